"""What trials under load tell: percentiles, whether a rate holds, the highest one that does, and what it costs.

Pure functions; who makes the trials is `measure.load_generator`, and in which order `steps.serving_cost`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from compile_stage.core.quantities import quantity, told_apart
from compile_stage.core.records import Check, Gate, Layout, LoadPoint, Outcome, Serving, ServingCost, TargetPolicy
from compile_stage.measure import gates as rules
from compile_stage.measure.quantiles import quantile_interval
from compile_stage.measure.stats import Interval, samples_needed, student_t

LEVEL = 0.99
"""Share of the requests that must hold the limit: MLPerf Inference's server scenario."""

THROUGHPUT, COST = "throughput_at_p99", "cost_per_million"
SERVED_GATES = (THROUGHPUT, COST)
"""Gates that are looked at once a winner is served, not while candidates are compared."""

_RESOLUTION = 1.05  # a search ends when the rates that held and that did not are so near
_UP, _DOWN = 1.3, 0.6
_LOWEST = 1 / 64  # of the first rate: where not even this holds, none does
_INVALID = 3  # trials of one search that show nothing
_LATE_SHARE = 0.01
_LATE_S = 0.001
_TO_HOLD = 0.75  # of what the search found, where the policy asks for no rate
_ENOUGH = 10  # times the independent requests that a p99 needs: those that wait together count less
_CONFIDENCE = 0.97  # the number of independent requests is estimated too: at 0.95 the bound is too low in 4 to 9 %
_NO_ANSWER_S, _LEAST_ENDLESS_S = 1e12, 1e6  # between two requests, one of them without an answer, lies what is neither


def point_of(
    kind: Literal["open", "closed", "predict"],
    found: dict[str, Any],
    limit_s: float | None,
    *,
    rate: float | None = None,
    clients: int = 0,
) -> LoadPoint:
    """One trial, summarised.

    Args:
        found: `latencies_s` (None of what had no right answer), `late_s`, `wrong`, `errors`, `unanswered`, `seconds`,
            `right`, `overloaded`, and `generator_cores` where it is known.
    """
    latencies = [math.inf if value is None else float(value) for value in found["latencies_s"]]
    late = sorted(found["late_s"])
    over = 0 if limit_s is None else sum(limit_s < value < math.inf for value in latencies)
    point = LoadPoint(
        kind=kind,
        rate=rate,
        clients=clients,
        requests=len(latencies),
        seconds=found["seconds"],
        throughput_per_s=found["right"] / found["seconds"] if found["seconds"] > 0 else 0.0,
        wrong=found["wrong"],
        errors=found["errors"],
        unanswered=found["unanswered"],
        over_limit=over,
        judged_s=limit_shown(limit_s, rate, len(latencies)) if limit_s is not None and rate else None,
        p50_s=quantile(latencies, 0.5),
        p95_s=quantile(latencies, 0.95),
        p99_s=quantile(latencies, LEVEL),
        late_p99_s=late[math.ceil(LEVEL * len(late)) - 1] if late else None,
        overloaded=bool(found["overloaded"]),
        generator_cores=found.get("generator_cores"),
    )
    return replace(point, invalid=refuse_generator(late, limit_s)) if kind == "open" else point


def quantile(latencies: Sequence[float], q: float) -> float | None:
    """The smallest latency that a share of `q` of all requests held. None where so few can't carry it
    (`stats.samples_needed`), or where it lies among those without an answer."""
    if len(latencies) < samples_needed(q):
        return None
    value = sorted(latencies)[math.ceil(q * len(latencies)) - 1]
    return value if math.isfinite(value) else None


def refuse_generator(late_s: Sequence[float], limit_s: float | None) -> str:
    """Why a trial tells nothing of the server: more than 1 % of the requests that found a free connection were sent
    later than they were to arrive by more than 1 ms, or a tenth of the limit. Empty where it tells something."""
    allowed = max(_LATE_S, 0.1 * limit_s if limit_s is not None else 0.0)
    late = sum(value > allowed for value in late_s)
    if late <= _LATE_SHARE * len(late_s):
        return ""
    by = f"more than {allowed * 1e3:.3g} ms late"
    advice = "serve with fewer instances or threads, or measure on a quieter machine"
    return f"the load generator sent {late} of {len(late_s)} requests {by}: it had no core; {advice}"


def holds(point: LoadPoint) -> bool:
    """Whether 99 % of the requests were answered rightly and in time, and no queue grew."""
    if point.overloaded or point.missed > (1 - LEVEL) * point.requests:
        return False
    return point.judged_s is None or (point.p99_s is not None and point.p99_s <= point.judged_s)


def limit_shown(limit_s: float, rate: float, requests: int) -> float:
    """The latency, up to the limit, that a trial of so many requests can tell to be held.

    A server that can just not carry a rate has a queue that grows as a random walk: after n arrivals about sqrt(n)
    requests wait, for sqrt(n) / rate seconds. A trial that is too short for the walk to come to the limit would call
    any such rate carried. So 4 (limit x rate)^2 requests are needed for the limit itself, and with fewer a lower one is
    held against them, which makes the throughput smaller than it is and never larger. On queues whose percentile is
    known, intervals hold the true rate with that number in 97 of 100 cases (M/M/1), with half of it in 86.
    """
    return min(limit_s, math.sqrt(requests / 4) / rate)


def find_rate(measure: Callable[[float], bool | None], first: float, goes_on: Callable[[], bool]) -> float | None:
    """The highest rate that holds, by bisection on the logarithm to within 5 %.

    Args:
        measure: A trial at a rate: whether it holds, None where it tells nothing.
        first: Rate of the first trial.
        goes_on: False when there is no time for another trial.

    Returns:
        0 where none from a 64th of `first` on holds; None where that is not known.
    """
    low, high, rate, invalid = 0.0, math.inf, first, 0
    while invalid < _INVALID:
        held = measure(rate)
        if held is None:
            invalid += 1
        elif held:
            low = rate
        else:
            high = rate
        if low and high / low <= _RESOLUTION:
            return low
        if high < first * _LOWEST:
            return 0.0
        if not goes_on():
            break
        if low and high < math.inf:
            rate = math.sqrt(low * high)
        elif low:
            rate = low * _UP
        elif high < math.inf:
            rate = high * _DOWN
    return low or None


def rate_to_hold(found: float, asked: float | None, seconds: float) -> float:
    """The rate of the long trials that decide the lower end of a throughput: the one that the policy asks for, where
    the search found about as much; a higher one, up to half of what it found, where so few would arrive that a p99
    could hardly be known.

    Args:
        found: By the first start's search, in requests a second.
        asked: By a gate; None without one.
        seconds: Of all long trials together.
    """
    if asked is None or asked > _RESOLUTION * found:
        return _TO_HOLD * found
    return max(asked, min(found / 2, _ENOUGH * samples_needed(LEVEL) / seconds))


def asked_per_s(policy: TargetPolicy) -> float | None:
    """The requests a second that a target's gates ask for; None where none does."""
    serving, rows = policy.serving, policy.serving.rows or policy.target.batch_sizes[0]
    rates = [gate.limit for gate in policy.performance if gate.metric == THROUGHPUT]
    if serving.price_per_hour:
        costs = [gate.limit for gate in policy.performance if gate.metric == COST and gate.limit > 0]
        rates += [serving.price_per_hour / 3600 / (limit * rows) * 1e6 for limit in costs]
    return max(rates, default=None)


def p99_of(trials: Sequence[Sequence[float | None]], rate: float) -> Interval | None:
    """The p99 of requests that arrived at a rate, in seconds, with its 95 % bounds.

    Requests that wait in one queue share their fate, and so do those that a pause of the server meets. So they are
    counted as the independent ones that tell as much, second by second (`quantiles.quantile_interval`).

    Args:
        trials: Latencies in seconds by request, in the order of arrival; None of what had no right answer.

    Returns:
        None where so few independent requests have no bound. Endless is what lies among those without an answer.
    """
    size = max(1, round(rate))
    seconds = [trial[at : at + size] for trial in trials for at in range(0, len(trial), size)]
    answered = [[_NO_ANSWER_S if one is None else one for one in part] for part in seconds]
    known = quantile_interval(answered, LEVEL, _CONFIDENCE)
    if known is None or known.high < _LEAST_ENDLESS_S:
        return known
    return replace(known, high=math.inf, value=known.value if known.value < _LEAST_ENDLESS_S else math.inf)


def over_starts(values: Sequence[float]) -> tuple[float | None, tuple[float, float] | None]:
    """The geometric mean of what starts of the servers gave, and its 95 % interval: Student's t on the logarithm. A
    start with 0 makes the lower end 0."""
    if not values:
        return None, None
    if min(values) <= 0:
        return 0.0, (0.0, max(values)) if len(values) > 1 else None
    logs = [math.log(value) for value in values]
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return math.exp(mean), None
    spread = math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1) / len(logs))
    half = student_t(len(logs) - 1, 0.95) * spread
    # No search tells rates apart that are nearer than its resolution: as much is added to either side.
    half = math.hypot(half, math.log(_RESOLUTION) / 2)
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def layouts(serving: Serving, threads: int, cores: int) -> tuple[Layout, ...]:
    """The ways to use the cores that are tried.

    Args:
        threads: Of the target.
    """
    found = []
    for width in serving.threads or (threads,):
        most = max(1, cores // width)
        counts = serving.instances or tuple(2**power for power in range(most.bit_length()))
        found += [Layout(instances=count, threads=width) for count in counts]
    return tuple(dict.fromkeys(found))


def best_of(points: Sequence[LoadPoint], limit_s: float | None) -> float:
    """The highest throughput of closed loops whose 95th percentile (that of few requests is known) holds the limit."""
    fit = [p.throughput_per_s for p in points if limit_s is None or (p.p95_s is not None and p.p95_s <= limit_s)]
    return max(fit, default=0.0)


def cost_per_million(price_per_hour: float, requests_per_s: float, rows: int) -> float:
    """Of a million rows on a machine of that price, at that throughput; endless at none."""
    return price_per_hour / 3600 / (requests_per_s * rows) * 1e6 if requests_per_s > 0 else math.inf


def with_cost(cost: ServingCost) -> ServingCost:
    """With the cost of a million inferences, where there is a price and a throughput."""
    winner = cost.winner
    if cost.price_per_hour is None or winner is None or not winner.throughput_per_s:
        return cost
    price, rows = cost.price_per_hour, cost.rows
    ends = tuple(cost_per_million(price, end, rows) for end in reversed(winner.interval or ()))
    finite = len(ends) == 2 and math.isfinite(ends[1])
    return replace(
        cost,
        cost_per_million=cost_per_million(price, winner.throughput_per_s, rows),
        cost_interval=(ends[0], ends[1]) if finite else None,
    )


def judge_served(gates: Sequence[Gate], cost: ServingCost) -> tuple[Check, ...]:
    """The gates on what serving costs; of each the interval's worse end must hold."""
    return tuple(_judge(gate, cost) for gate in gates if gate.metric in SERVED_GATES)


def _judge(gate: Gate, cost: ServingCost) -> Check:
    winner = cost.winner
    if gate.metric == THROUGHPUT:
        value = winner.throughput_per_s if winner is not None else None
        interval, unit = (winner.interval if winner is not None else None), "requests/s"
    else:
        value, interval, unit = cost.cost_per_million, cost.cost_interval, cost.currency
    missing = cost.reason or ((winner.reason or winner.held) if winner is not None else "")
    requests = winner.requests if winner is not None else 0
    if value is None or interval is None:
        why = missing or "fewer than two starts of the servers were measured, or one held no rate at all"
        return Check(gate=gate, outcome=Outcome.NOT_RUN, measured=None, reason=f"not measured: {why}", samples=requests)
    at_least = gate.direction == "at_least"
    passed = rules.holds(gate, value, interval)
    sure = interval[1] < gate.limit if at_least else interval[0] > gate.limit
    limit = f"{'at least' if at_least else 'at most'} {gate.limit:g} {'is asked for' if at_least else 'is allowed'}"
    what = "with 99 % of the requests within the limit" if gate.metric == THROUGHPUT else "for a million inferences"
    limit += f"; {winner.held}" if winner is not None and winner.held and not passed else ""
    low, high = (told_apart(end, gate.limit)[0] for end in interval)
    measured = f"{quantity(value)} {unit} {what} (95 % interval {low} to {high}); {limit}"
    return Check(
        gate=gate,
        outcome=Outcome.PASS if passed else Outcome.FAIL,
        measured=value,
        interval=interval,
        reason=measured if passed or sure else f"too uncertain: {measured}",
        samples=requests,
    )
