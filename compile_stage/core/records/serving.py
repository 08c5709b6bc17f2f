"""What serving costs: what a policy asks for, and what was measured of a served model under load."""

from __future__ import annotations

from typing import Literal

from compile_stage.core.records.base import record


@record
class Serving:
    """How a published model is measured behind its HTTP server.

    Attributes:
        p99_ms: The latency that 99 % of the requests must hold, in milliseconds; None: no throughput is looked for.
        rates: Requests a second that arrive whether or not the server keeps up, each measured.
        clients: So many clients at a time, each of which waits for its answer before it asks again.
        instances: How many server processes are tried; empty for powers of two, up to what the cores hold.
        threads: Compute threads of a process that are tried; empty for the target's.
        rows: Of a request; None for the target's first batch size.
        seconds: For all of it, without the starts of servers.
        price_per_hour: Of a machine like this one, in `currency`; None: no cost is computed.
    """

    p99_ms: float | None = None
    rates: tuple[float, ...] = ()
    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    instances: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    rows: int | None = None
    seconds: float = 60.0
    price_per_hour: float | None = None
    currency: str = "USD"

    @property
    def asked(self) -> bool:
        """True where the policy asks for a measurement under load."""
        return self.p99_ms is not None or bool(self.rates)


@record
class LoadPoint:
    """One trial: requests under one load, every one of them accounted for.

    Attributes:
        kind: `open`: they arrive at `rate`, as a Poisson process, and a latency begins when a request was to arrive;
            `closed`: `clients` wait for their answers; `predict`: `clients` threads call predict() without a server.
        rate: Offered, in requests a second; None unless `open`.
        requests: That were to be answered.
        wrong: Answered with status 200 and other values than one at a time, without load.
        errors: Answered with another status, or with a connection that broke.
        unanswered: Not answered until the trial ended.
        over_limit: Answered rightly, and later than the limit; 0 without one.
        throughput_per_s: Right answers a second.
        judged_s: The limit that so many requests at that rate can show (`measure.served_load.limit_shown`); None
            without a limit, and unless `open`.
        p50_s, p95_s, p99_s: Of all requests, what was missed counting as endless; None where too few were made for that
            percentile, or it lies among what was missed.
        late_p99_s: 99 % of the requests were sent no later than this after they were to be; None unless `open`.
        overloaded: More requests waited at its end than a queue of a load that can be carried grows to by chance.
        invalid: Why it tells nothing, such as a load generator that was late; empty when it does.
        generator_cores: That the load generator used; None where it was not measured.
        server_cpu_s: CPU seconds of a request, of all server processes; None where it was not measured.
    """

    kind: Literal["open", "closed", "predict"]
    requests: int
    seconds: float
    throughput_per_s: float
    rate: float | None = None
    clients: int = 0
    wrong: int = 0
    errors: int = 0
    unanswered: int = 0
    over_limit: int = 0
    judged_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    late_p99_s: float | None = None
    overloaded: bool = False
    invalid: str = ""
    generator_cores: float | None = None
    server_cpu_s: float | None = None

    @property
    def missed(self) -> int:
        """Requests that had no right answer in time."""
        return self.wrong + self.errors + self.unanswered + self.over_limit


@record
class Layout:
    """A way to use the machine's cores: so many processes, of so many compute threads each.

    Attributes:
        throughput_per_s: The best that its closed loops reached, within the limit where there is one; None where it was
            not tried, or reached none.
        reason: Why it is not the one that was taken; empty of that one.
    """

    instances: int
    threads: int
    throughput_per_s: float | None = None
    reason: str = ""


@record
class ServedLoad:
    """What was measured of one published model under load.

    Attributes:
        layout: How the cores were used.
        points: Trials, in the order in which they were made.
        throughput_per_s: Highest rate of arrival, in requests a second, at which 99 % of the requests held the limit:
            the geometric mean of the starts; None where it is not known.
        interval: Its 95 % interval, each end by itself: from the rate that was shown to hold the limit (`held_per_s`; 0
            where none was) to the end of Student's t over the starts; None with fewer than two.
        starts_per_s: That of each start of the servers; 0 where no rate held the limit.
        held_per_s: The rate of the long trials, one in each start, that are to show that the limit is held.
        held_p99_s: The upper 95 % bound of the p99 of all their requests; None where these are too few.
        held: What was missing, where they did not show it.
        requests: In the trials at the rates that decided.
        joules: Energy of a request at that rate, of the whole machine; None where it was not measured.
        energy: What `joules` was read from, or why it was not.
        reason: Why there is no throughput; empty where there is.
    """

    layout: Layout
    points: tuple[LoadPoint, ...] = ()
    throughput_per_s: float | None = None
    interval: tuple[float, float] | None = None
    starts_per_s: tuple[float, ...] = ()
    held_per_s: float | None = None
    held_p99_s: float | None = None
    held: str = ""
    requests: int = 0
    joules: float | None = None
    energy: str = ""
    reason: str = ""


@record
class ServingCost:
    """What serving a target's winner costs.

    Attributes:
        server: What answered, with versions.
        limit_s: That 99 % of the requests must hold; None without one.
        rows: Of a request. An inference is one row.
        cores: That the load generator and the server share.
        layouts: That were tried.
        winner: Of the winner.
        production: Of what the alias points to now; None where there is none, or it can't be compared.
        ratio: The winner's throughput over that of production; None where one is not known.
        ratio_interval: Its 95 % interval, from starts beside each other.
        price_per_hour, currency: By the policy.
        cost_per_million: Of a million inferences, at the winner's throughput; None where it is not known.
        cost_interval: At the ends of the throughput's interval.
        reason: Why nothing was measured; empty where something was.
        notes: What a reader should know.
    """

    server: str = ""
    limit_s: float | None = None
    rows: int = 1
    cores: int = 0
    layouts: tuple[Layout, ...] = ()
    winner: ServedLoad | None = None
    production: ServedLoad | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    price_per_hour: float | None = None
    currency: str = ""
    cost_per_million: float | None = None
    cost_interval: tuple[float, float] | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
