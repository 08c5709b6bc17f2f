"""The gates on speed, latency, size and memory, looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compile_stage.core.records import Check, Gate, Measurement, Outcome, Timing
from compile_stage.measure.stats import RESOLUTION, percentile, samples_needed

PERFORMANCE = ("speedup", "p95_latency_ms", "size_mb", "memory_mb")
"""The performance metrics."""


def calls_needed(gates: Sequence[Gate]) -> int:
    """Calls of each participant that the gates ask for: a gate on a percentile wants as many as that percentile
    needs."""
    return samples_needed(0.95) if any(gate.metric == "p95_latency_ms" for gate in gates) else 0


def check_performance(
    gates: Sequence[Gate], measurement: Measurement | None, size_bytes: int | None
) -> tuple[Check, ...]:
    """One check for each gate; `speedup` has one for each batch size that was measured.

    Args:
        measurement: Of the candidate; None when it was not measured, which makes its gates NOT_RUN.
        size_bytes: Of the artifact on disk.
    """
    return tuple(check for gate in gates for check in _check(gate, measurement, size_bytes))


def _check(gate: Gate, measurement: Measurement | None, size_bytes: int | None) -> Iterator[Check]:
    timings = measurement.timings if measurement is not None else ()
    if gate.metric == "size_mb":
        yield _amount(gate, size_bytes, "the artifact", "its size is not known")
    elif gate.metric == "memory_mb":
        peak = measurement.peak_memory_bytes if measurement is not None else None
        yield _amount(gate, peak, "the peak memory of a process that runs it", "its memory was not measured")
    elif gate.metric not in PERFORMANCE:
        yield _not_run(gate, f"there is no performance metric {gate.metric!r}")
    elif not timings:
        yield _not_run(gate, "it was not measured")
    elif gate.metric == "speedup":
        yield from (_speedup(gate, timing) for timing in timings)
    else:
        # The first batch size is the one that is served; a larger one naturally takes longer.
        yield _latency(gate, timings[0])


def _speedup(gate: Gate, timing: Timing) -> Check:
    """A ratio is resolved to ±2 %, so a candidate exactly at the limit must be able to pass: the interval may reach 2 %
    below it, if it reaches the limit at all."""
    at = f"at batch {timing.batch_size}"
    if timing.speedup is None or timing.speedup_interval is None:
        return _not_run(gate, f"{at} it was not compared with the baseline", timing)
    low, high = timing.speedup_interval
    measured = f"{timing.speedup:.3g} times the baseline's speed (95 % interval {low:.3g} to {high:.3g})"
    limit = f"the limit is {gate.limit:g}"
    if high < gate.limit:
        outcome = Outcome.FAIL
        reason = f"slower than the baseline: {measured}" if high < 1 else f"not fast enough: {measured}"
        reason += f"; {limit}"
    elif low >= (1 - RESOLUTION) * gate.limit:
        outcome, reason = Outcome.PASS, f"{measured}; {limit}"
    else:
        outcome = Outcome.FAIL
        width = (high - low) / 2 / timing.speedup
        reason = (
            f"too uncertain: {measured}; {limit}, and {timing.rounds} rounds leave ±{width:.1%}: use a quieter machine, or a larger "
            "budget.measure_seconds"
        )
    return Check(
        gate=gate,
        outcome=outcome,
        measured=timing.speedup,
        reason=reason,
        batch_size=timing.batch_size,
        interval=timing.speedup_interval,
        samples=len(timing.latency_s),
    )


def _latency(gate: Gate, timing: Timing) -> Check:
    value = percentile(timing.latency_s, 0.95)
    if value is None:
        reason = f"a p95 needs {samples_needed(0.95)} calls, and {len(timing.latency_s)} were made; raise budget.measure_seconds"
        return _not_run(gate, reason, timing)
    measured = value * 1e3
    holds = measured <= gate.limit
    reason = f"p95 is {measured:.4g} ms at batch {timing.batch_size} over {len(timing.latency_s)} calls; at most {gate.limit:g} ms is allowed"
    return Check(
        gate=gate,
        outcome=Outcome.PASS if holds else Outcome.FAIL,
        measured=measured,
        reason=reason,
        batch_size=timing.batch_size,
        samples=len(timing.latency_s),
    )


def _amount(gate: Gate, size_bytes: int | None, what: str, missing: str) -> Check:
    if not size_bytes:  # nothing that runs takes no space
        return _not_run(gate, missing)
    measured = size_bytes / 1e6
    holds = measured <= gate.limit
    reason = f"{what} is {measured:.4g} MB; at most {gate.limit:g} MB is allowed"
    return Check(gate=gate, outcome=Outcome.PASS if holds else Outcome.FAIL, measured=measured, reason=reason)


def _not_run(gate: Gate, reason: str, timing: Timing | None = None) -> Check:
    return Check(
        gate=gate,
        outcome=Outcome.NOT_RUN,
        measured=None,
        reason=reason,
        batch_size=timing.batch_size if timing else None,
        samples=len(timing.latency_s) if timing else 0,
    )
