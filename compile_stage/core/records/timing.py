"""Raw latencies, load time and memory of one participant of a measurement."""

from __future__ import annotations

from compile_stage.core.records.base import record


@record
class Timing:
    """Raw latencies at one batch size; summaries are derived from them (`measure.stats`, `measure.speedups`).

    Attributes:
        latency_s: One value per call, in seconds, in order.
        speedup: The baseline's median latency / the own one, each over all its calls of the same interleaved rounds;
            None for the baseline itself.
        speedup_interval: 95 % interval of that quotient (`measure.speedups.ratio_interval`); of candidates with three
            starts all hold at once (`measure.simultaneous_intervals`).
        mean_speedup_interval: 95 % interval of the quotient of the mean latencies, which the calls count in that take
            far longer than the median (`measure.speedups.mean_ratio_interval`); None where it is not known.
        rounds: Interleaved turns.
        disturbed: Rounds that were dropped because others used the cores meanwhile; when too few would be left, none
            is.
        turns: How many of `latency_s` belong to each round, in order, so that two participants can be compared round by
            round.
        processes: Of each round, which start of the process it belongs to, from 0; empty where that was not noted. How
            much processes of one model differ is seen from three on.
        stable: The interval's half width is at most 10 % of `speedup`. One that is not stable is shown as its interval,
            without a figure: see `headline_speedup`.
        environment: Hardware fingerprint.
        cpu_s: CPU time of each turn in seconds, of the process and all that it started, by the kernel's counters; empty
            where it was not measured. A turn's few microseconds around each call are in it.
        threads: How many threads ran in a turn (median): with at least a tenth of the CPU time of the busiest; 0 where
            it was not measured.
        first_s: Of a language model, seconds of a call for its first token alone, one beside each of `latency_s`, on
            the same batch: the time to the first token. Empty for any other.
        new_tokens: That each call of `latency_s` writes in each row of its batch, the first among them; 0 where it is
            no language model.
        one_thread_s: Of a baseline whose threads waited for cores, seconds of a call with one thread, of each turn that
            was made with it after the rounds; empty of any other.
    """

    latency_s: tuple[float, ...]
    batch_size: int
    stable: bool
    environment: str
    rounds: int = 0
    turns: tuple[int, ...] = ()
    disturbed: int = 0
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    mean_speedup_interval: tuple[float, float] | None = None
    processes: tuple[int, ...] = ()
    cpu_s: tuple[float, ...] = ()
    threads: int = 0
    first_s: tuple[float, ...] = ()
    new_tokens: int = 0
    one_thread_s: tuple[float, ...] = ()

    @property
    def token_s(self) -> tuple[float, ...]:
        """Of a language model, seconds for an output token after the first, on average over each call."""
        more = self.new_tokens - 1
        if more < 1:
            return ()
        return tuple((whole - first) / more for whole, first in zip(self.latency_s, self.first_s, strict=True))

    @property
    def cpu_per_call_s(self) -> float | None:
        """CPU seconds of a call, on average; None where it was not measured. Of a turn in which first tokens were timed
        too, the calls have the share that they have of its time."""
        if not self.cpu_s or not self.latency_s:
            return None
        whole_s = sum(self.latency_s)
        share = whole_s / (whole_s + sum(self.first_s)) if self.first_s else 1.0
        return share * sum(self.cpu_s) / len(self.latency_s)

    @property
    def headline_speedup(self) -> float | None:
        """`speedup` where one figure may stand for it; None where it is unstable, and for the baseline."""
        return self.speedup if self.stable else None


def is_ratio_known(interval: tuple[float, float] | None) -> bool:
    """Whether the interval of a quotient of speeds tells people anything: its ends are less than a factor of 100 apart.

    With one degree of freedom, two rounds that differ by a third have an interval of thirty powers of ten: right, and
    its digits hide that nothing is known.
    """
    return interval is not None and interval[0] > 0 and interval[1] < 100 * interval[0]


def surely_faster(interval: tuple[float, float] | None) -> float | None:
    """How many times as fast it is at least, of an interval that tells people that alone: it begins above 1 and has no
    end of use (`is_ratio_known`). None of any other."""
    return interval[0] if interval is not None and interval[0] > 1 and not is_ratio_known(interval) else None


@record
class Measurement:
    """Everything measured of one artifact (or the baseline) in fresh processes.

    Attributes:
        stopped_early: Why it was not measured further after a first short look, or not even validated; empty when it
            was.
        notes: What a reader should know of it; of the baseline's measurement: of all that were measured beside it, such
            as that the machine was busy.
        tries: How many measurements of the same models there were on this machine, this one among them. Each lets
            through about one in twenty of what is just at its limit.
        busy: Other processes used the cores in one of its starts (`notes` of the baseline say how far), so latencies
            may be higher than on a quiet machine.
    """

    timings: tuple[Timing, ...]
    load_s: float
    peak_memory_bytes: int
    stopped_early: str = ""
    tries: int = 1
    busy: bool = False
    notes: tuple[str, ...] = ()

    def timing(self, batch_size: int) -> Timing | None:
        """The timing at that batch size, if it was measured."""
        return next((t for t in self.timings if t.batch_size == batch_size), None)
