"""What the candidates of a target cost and what they give: points for the plot of latency against error, size or
memory, and those that no other beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from compile_stage.core.records import Candidate, Check, Measurement, Timing, is_ratio_known, record
from compile_stage.report import summary

SIZE, MEMORY, SAMPLE = "size", "memory", "sample error"
"""Axes that are no metric of a gate: bytes of the artifact, peak memory in bytes, largest error of a sample."""

_METRICS = ("cosine", "mean_snr_db", "accuracy", "f1", "mae", "rmse", "max_rel", "wer", "agreement", "top1_agreement")


@record
class Point:
    """One candidate that was measured.

    Attributes:
        p50_s: Median latency in seconds at the batch size that selection looked at.
        interval_s: What the speedup's 95 % interval makes of that latency; None where it has none.
        values: Axis → what lies on it, smaller being better (`axes`).
        passed: It held every gate, so it may be on the frontier.
    """

    job_id: str
    label: str
    state: str
    p50_s: float
    interval_s: tuple[float, float] | None
    stable: bool
    passed: bool
    values: Mapping[str, float]
    reason: str = ""


@record
class Axis:
    """A choice of the plot's horizontal axis.

    Attributes:
        title: With its unit.
        frontier: Job ids of the passing points that no other passing one beats in latency and here, by latency.
    """

    key: str
    title: str
    frontier: tuple[str, ...]


def points(
    rows: Iterable[summary.Row], baseline: Measurement | None, timing: Timing | None, framework: str
) -> tuple[Point, ...]:
    """Each candidate with a median, and the baseline first.

    Args:
        timing: The baseline's, at the batch size of the rows.
    """
    found = [_baseline(baseline, timing, framework)] if baseline is not None else []
    found += [_point(row) for row in rows]
    return tuple(point for point in found if point is not None)


def _baseline(baseline: Measurement, timing: Timing | None, framework: str) -> Point | None:
    median = summary.median_s(timing)
    if median is None:
        return None
    values = {MEMORY: float(baseline.peak_memory_bytes)} if baseline.peak_memory_bytes else {}
    return Point(
        job_id="", label=framework, state="baseline", p50_s=median, interval_s=None, stable=True, passed=False,
        values=values, reason="what every candidate is compared with",
    )  # fmt: skip


def _point(row: summary.Row) -> Point | None:
    median, timing, candidate = summary.median_s(row.timing), row.timing, row.candidate
    if median is None or timing is None or candidate is None:
        return None
    interval = None
    if timing.speedup is not None and timing.speedup_interval is not None and is_ratio_known(timing.speedup_interval):
        low, high = timing.speedup_interval
        interval = (median * timing.speedup / high, median * timing.speedup / low)
    return Point(
        job_id=row.job_id,
        label=row.label,
        state=row.state,
        p50_s=median,
        interval_s=interval,
        stable=timing.stable,
        passed=row.state in ("won", "lost"),
        values=_values(row, candidate),
        reason=row.reason,
    )


def _values(row: summary.Row, candidate: Candidate) -> dict[str, float]:
    values = {} if row.size_bytes is None else {SIZE: float(row.size_bytes)}
    if candidate.measurement is not None and candidate.measurement.peak_memory_bytes:
        values[MEMORY] = float(candidate.measurement.peak_memory_bytes)
    errors = [error for output in candidate.errors for error in output.errors]
    if errors and math.isfinite(max(errors)):
        values[SAMPLE] = max(errors)
    for metric in _METRICS:
        measured = [_away(check) for check in candidate.checks if check.gate.metric == metric]
        known = [value for value in measured if value is not None and math.isfinite(value)]
        if known:
            values[metric] = max(known)
    return values


def _away(check: Check) -> float | None:
    """How far a measured value is from a perfect one, smaller being better: `1 - cosine`, a drop, or minus decibels."""
    if check.measured is None:
        return None
    if check.gate.direction == "at_most":
        return check.measured
    return -check.measured if check.gate.unit == "dB" else 1 - check.measured


def axes(found: Sequence[Point]) -> tuple[Axis, ...]:
    """The axes on which at least two candidates lie, the errors first; empty where there is nothing to compare."""
    candidates = [point for point in found if point.state != "baseline"]
    keys = [SAMPLE, *_METRICS, SIZE, MEMORY]
    shared = [key for key in keys if sum(key in point.values for point in candidates) >= 2]
    return tuple(Axis(key=key, title=_TITLES.get(key, key), frontier=frontier(candidates, key)) for key in shared)


_TITLES = {
    SAMPLE: "largest relative error of a sample",
    SIZE: "size of the artifact (MB)",
    MEMORY: "peak memory (MB)",
    "cosine": "1 − cosine, worst sample",
    "mean_snr_db": "noise below the signal (dB, negated)",
    "accuracy": "loss of accuracy",
    "f1": "loss of F1",
    "agreement": "share of answers that differ",
    "top1_agreement": "share of top answers that differ",
    "max_rel": "largest error over the range",
}


def frontier(found: Iterable[Point], key: str) -> tuple[str, ...]:
    """Job ids of the passing points with that value which no other passing one beats in both, by latency."""
    best, kept = math.inf, []
    rated = [point for point in found if point.passed and key in point.values]
    for point in sorted(rated, key=lambda point: (point.p50_s, point.values[key])):
        if point.values[key] < best:
            best = point.values[key]
            kept.append(point.job_id)
    return tuple(kept)
