"""The gates on speed, latency, size and memory, looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from compile_stage.core.quantities import quantity, told_apart
from compile_stage.core.records import Check, Gate, Measurement, Outcome, Timing, is_ratio_known, surely_faster
from compile_stage.measure.gates import holds
from compile_stage.measure.quantiles import GATED, calls_wanted, effective_calls, quantile_interval, rounds_of_calls
from compile_stage.measure.served_load import SERVED_GATES
from compile_stage.measure.speedups import RESOLUTION
from compile_stage.measure.stats import samples_needed
from compile_stage.measure.token_times import FIRST, NEXT, rounds_of, tokens_per_s

PERCENTILES = ("p95_latency_ms", "ttft_p95_ms", "tpot_p95_ms")
"""Gates on a 95th percentile."""

_TIMED = ("speedup", *PERCENTILES, "tokens_per_s")

BY_INTERVAL = (*_TIMED, *SERVED_GATES)
"""Gates that an interval decides though they name no confidence."""

PERFORMANCE = (*BY_INTERVAL, "size_mb", "memory_mb")
"""Every gate on performance; each compares figures as they are recorded, without slack."""

_OF_TOKENS = {"ttft_p95_ms": ("time to the first token", FIRST), "tpot_p95_ms": ("time per output token", NEXT)}

TOKEN_SPEEDS = (*_OF_TOKENS, "tokens_per_s")
"""Gates on models that are measured token by token."""


def calls_needed(gates: Sequence[Gate]) -> int:
    """Independent calls of each participant that the gates ask for: a gate on a percentile wants as many as bring its
    upper bound near to it."""
    return calls_wanted(GATED) if any(gate.metric in PERCENTILES for gate in gates) else 0


def check_performance(
    gates: Sequence[Gate], measurement: Measurement | None, size_bytes: int | None
) -> tuple[Check, ...]:
    """One check for each gate; `speedup` has one for each batch size that was measured. Gates on what is served are
    left out: `measure.served_load.judge_served` looks at them.

    Args:
        measurement: Of the candidate; None when it was not measured, which makes its gates NOT_RUN.
        size_bytes: Of the artifact on disk.
    """
    own = (gate for gate in gates if gate.metric not in SERVED_GATES)
    return tuple(check for gate in own for check in _check(gate, measurement, size_bytes))


def is_too_uncertain(check: Check) -> bool:
    """True for a limit on speed or latency that failed though the interval reaches it: on a quieter machine, or by
    longer measuring, it might hold."""
    if check.outcome is not Outcome.FAIL or check.interval is None:
        return False
    low, high = check.interval
    return check.gate.metric in BY_INTERVAL and low <= check.gate.limit <= high


def _check(gate: Gate, measurement: Measurement | None, size_bytes: int | None) -> Iterator[Check]:
    timings = measurement.timings if measurement is not None else ()
    if gate.metric == "size_mb":
        yield _amount(gate, size_bytes, "the artifact", "its size is not known")
    elif gate.metric == "memory_mb":
        peak = measurement.peak_memory_bytes if measurement is not None else None
        yield _amount(gate, peak, "the peak memory of a process that runs it", "its memory was not measured")
    elif gate.metric not in _TIMED:
        yield _not_run(gate, f"there is no performance metric {gate.metric!r}")
    elif not timings:
        yield _not_run(gate, "it was not measured")
    elif gate.metric == "speedup":
        yield from (_speedup(gate, timing) for timing in timings)
    elif gate.metric == "p95_latency_ms":
        # The first batch size is the one that is served; a larger one naturally takes longer.
        yield _latency(gate, timings[0], rounds_of_calls(timings[0]), "")
    elif gate.metric == "tokens_per_s":
        yield _throughput(gate, max(timings, key=lambda timing: timing.batch_size))
    elif not timings[0].first_s:
        yield _not_run(gate, "it is no language model that was measured token by token", timings[0])
    else:
        what, which = _OF_TOKENS[gate.metric]
        yield _latency(gate, timings[0], rounds_of(timings[0], which), f" of the {what}")


def ratio_text(ratio: float) -> str:
    """Three digits, and no powers of ten: `0.745`, `1.34`, `2011`."""
    return f"{ratio:.3g}" if abs(ratio) < 999.5 else f"{ratio:.0f}"


def _speedup(gate: Gate, timing: Timing) -> Check:
    at = f"at batch {timing.batch_size}"
    if timing.speedup is None or timing.speedup_interval is None:
        return _not_run(gate, f"{at} it was not compared with the baseline", timing)
    low, high = timing.speedup_interval
    interval = f"95 % interval {ratio_text(low)} to {ratio_text(high)}"
    if (least := surely_faster(timing.speedup_interval)) is not None:
        interval = f"at least {ratio_text(least)}: its 95 % interval ends at more than 100 times that"
    elif not is_ratio_known(timing.speedup_interval):
        interval = "the ends of its 95 % interval are a factor of 100 or more apart"
    measured = f"{ratio_text(timing.speedup)} times the baseline's speed ({interval})"
    limit = f"the limit is {gate.limit:g}"
    mean = timing.mean_speedup_interval
    if mean is not None and high >= gate.limit and mean[1] < (1 - RESOLUTION) * gate.limit:
        value = math.sqrt(mean[0] * mean[1])
        found = _found(gate, Outcome.FAIL, f"{_by_mean(value, mean)}; {limit}; by the median it is {measured}", timing)
        return replace(found, measured=value, interval=mean)
    if holds(gate, timing.speedup, timing.speedup_interval):
        outcome, reason = Outcome.PASS, f"{measured}; {limit}"
    elif high < gate.limit:
        outcome = Outcome.FAIL
        reason = f"slower than the baseline: {measured}" if high < 1 else f"not fast enough: {measured}"
        reason += f"; {limit}"
    else:
        outcome = Outcome.FAIL
        reason = f"too uncertain: {measured}; {limit}"
    found = _found(gate, outcome, reason, timing)
    return replace(found, measured=timing.speedup, interval=timing.speedup_interval)


def _by_mean(value: float, interval: tuple[float, float]) -> str:
    return (
        f"some calls take far longer than others: all together have {ratio_text(value)} times the baseline's speed "
        f"(95 % interval {ratio_text(interval[0])} to {ratio_text(interval[1])})"
    )


def _throughput(gate: Gate, timing: Timing) -> Check:
    """Passes when the lower bound holds the limit."""
    interval = tokens_per_s(timing)
    if interval is None:
        why = f"{len(timing.latency_s)} calls are too few" if timing.new_tokens else "it is no language model"
        return _not_run(gate, f"tokens a second are not known: {why}", timing)
    measured = (
        f"{quantity(interval.value)} output tokens/s (95 % bounds {_bounds(interval.low, interval.high, gate)}) with "
        f"{timing.batch_size} sequences at a time; at least {gate.limit:g} are asked for"
    )
    ends = (interval.low, interval.high)
    held = holds(gate, interval.value, ends)
    sure = held or not holds(gate, interval.value)
    outcome = Outcome.PASS if held else Outcome.FAIL
    found = _found(gate, outcome, measured if sure else f"too uncertain: {measured}", timing)
    return replace(found, measured=interval.value, interval=ends)


def _latency(gate: Gate, timing: Timing, rounds: Sequence[Sequence[float]], of: str) -> Check:
    """Passes when the upper bound of the p95 holds the limit: the p95 of so many calls by itself is as often below the
    true one as above."""
    interval, calls = quantile_interval(rounds, GATED, processes=timing.processes), len(timing.latency_s)
    if interval is None:
        tell = effective_calls(rounds, GATED)
        as_many = "" if tell >= calls else f", which tell as much as {tell:.0f} independent ones"
        needed = samples_needed(GATED)
        return _not_run(
            gate,
            f"a p95 needs {needed} independent calls, and {calls} were made{as_many}; raise budget.measure_seconds",
            timing,
        )
    value, low, high = (end * 1e3 for end in (interval.value, interval.low, interval.high))
    limit = f"at most {gate.limit:g} ms is allowed"
    bounds = f"95 % bounds {_bounds(low, high, gate)}"
    measured = f"p95{of} is {quantity(value)} ms ({bounds}) at batch {timing.batch_size} over {calls} calls"
    held = holds(gate, value, (low, high))
    if held or not holds(gate, value):
        outcome, reason = (Outcome.PASS if held else Outcome.FAIL), f"{measured}; {limit}"
    else:
        outcome = Outcome.FAIL
        reason = f"too uncertain: {measured}; {limit}"
    return replace(_found(gate, outcome, reason, timing), measured=value, interval=(low, high))


def _bounds(low: float, high: float, gate: Gate) -> str:
    """Each bound with the digits that it takes to see on which side of the limit it lies."""
    return " to ".join(told_apart(end, gate.limit)[0] for end in (low, high))


def _amount(gate: Gate, size_bytes: int | None, what: str, missing: str) -> Check:
    if not size_bytes:  # nothing that runs takes no space
        return _not_run(gate, missing)
    measured = size_bytes / 1e6
    shown, limit = told_apart(measured, gate.limit)
    reason = f"{what} is {shown} MB; at most {limit} MB is allowed"
    outcome = Outcome.PASS if holds(gate, measured) else Outcome.FAIL
    return Check(gate=gate, outcome=outcome, measured=measured, reason=reason)


def _not_run(gate: Gate, reason: str, timing: Timing | None = None) -> Check:
    return _found(gate, Outcome.NOT_RUN, reason, timing)


def _found(gate: Gate, outcome: Outcome, reason: str, timing: Timing | None) -> Check:
    return Check(
        gate=gate,
        outcome=outcome,
        measured=None,
        reason=reason,
        batch_size=timing.batch_size if timing else None,
        samples=len(timing.latency_s) if timing else 0,
    )
