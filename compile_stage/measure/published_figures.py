"""What is said of a published version in its registry: one line, and figures by name."""

from __future__ import annotations

from compile_stage.core.records import (
    Candidate,
    Check,
    Outcome,
    SourceModel,
    TargetPolicy,
    Timing,
    Waiver,
    is_ratio_known,
    surely_faster,
)
from compile_stage.measure import speedups, stats
from compile_stage.measure.performance import ratio_text
from compile_stage.measure.quantiles import GATED, percentiles
from compile_stage.measure.search import margin


def summary_of(source: SourceModel, target: TargetPolicy, chosen: Candidate, *, speed_known: bool = True) -> str:
    """What it is, how fast and how exact, in one line.

    Args:
        speed_known: False where something slowed the baseline down, so that no speedup over it is one.
    """
    job, artifact = chosen.job, chosen.artifact
    what = f"{source.name} {source.version}".strip()
    parts = [f"{what} compiled by {job.backend} to {job.scheme.precision} for {target.target.name}"]
    timing = speedups.deciding_timing(chosen.measurement, target)
    if timing is not None:
        parts.append(f"median {stats.median(timing.latency_s) * 1e3:.3g} ms at batch {timing.batch_size}")
        parts += _speedup_words(timing) if speed_known else _UNKNOWN_SPEED
    parts += [_accuracy_words(chosen), *_waived_words(chosen)]
    size = [f"{artifact.size_bytes / 1e6:.3g} MB"] if artifact is not None else []
    return "; ".join([*parts, *size]) + "."


_UNKNOWN_SPEED = ["how many times the original's speed is not known (something slowed the original down)"]


def _speedup_words(timing: Timing) -> list[str]:
    """An unstable ratio is a range without a figure of its own, or only its lower end where the range has no end of
    use."""
    if timing.speedup is None:
        return []
    ends = timing.speedup_interval or (timing.speedup, timing.speedup)
    low, high = map(ratio_text, ends)
    if timing.stable:
        return [f"{timing.speedup:.2f} times the original's speed (95 % interval {low} to {high})"]
    if surely_faster(ends) is not None:
        return [f"at least {low} times the original's speed (unstable measurement)"]
    if not is_ratio_known(ends):
        return ["how many times the original's speed is not known (unstable measurement)"]
    return [f"{low} to {high} times the original's speed (unstable measurement)"]


def _accuracy_words(chosen: Candidate) -> str:
    if chosen.verdict is None:
        return "not validated, since it can't run where it was compiled"
    metrics = {gate.metric for gate in chosen.job.gates}
    checks = [check for check in chosen.verdict.checks if check.gate.metric in metrics]
    held = [check for check in checks if check.outcome is Outcome.PASS]
    count = f"all {len(checks)}" if len(held) == len(checks) else f"{len(held)} of {len(checks)}"
    passed = f"{count} accuracy checks passed"
    closest = min(held, key=margin, default=None)
    return f"{passed}, closest to its limit: {closest.reason}" if closest is not None else passed


def _waived_words(chosen: Candidate) -> list[str]:
    """Each gate that was missed, by how much, and who lets that through until when."""
    missed: dict[Waiver, Check] = {}
    for check in chosen.checks:
        if check.waived is not None and check.outcome is Outcome.FAIL:
            first = missed.setdefault(check.waived, check)
            missed[check.waived] = min(first, check, key=margin)
    return [f"missed under a waiver of {w.gate} until {w.expires} ({w.owner}): {missed[w].reason}" for w in missed]


def metrics_of(winner: Candidate) -> dict[str, float]:
    """Every measured error, latencies in milliseconds, throughput, memory and size, as a registry shows them.

    An unstable speedup is none of them: a registry sorts and compares by single figures, and it has none.
    """
    metrics: dict[str, float] = {}
    for check in winner.checks:
        if check.measured is not None and check.batch_size is not None and check.gate.metric != "speedup":
            name = ".".join(filter(None, (check.gate.metric, check.output, f"batch_{check.batch_size}")))
            metrics[name.replace(":", "_")] = check.measured
    for timing in winner.measurement.timings if winner.measurement else ():
        median_s, p95_s = percentiles(timing, (0.5, GATED))
        if median_s is not None:  # as in result.json: a few calls can't carry it
            metrics[f"latency_p50_ms.batch_{timing.batch_size}"] = median_s * 1e3
        if p95_s is not None:  # fewer than 59 independent calls can't carry it
            metrics[f"latency_p95_ms.batch_{timing.batch_size}"] = p95_s * 1e3
        if median_s:
            metrics[f"throughput_per_s.batch_{timing.batch_size}"] = timing.batch_size / median_s
        if timing.speedup is not None and timing.stable:
            metrics[f"speedup.batch_{timing.batch_size}"] = timing.speedup
    if winner.measurement:
        metrics["peak_memory_mb"] = winner.measurement.peak_memory_bytes / 1e6
        metrics["load_s"] = winner.measurement.load_s
    if winner.artifact:
        metrics["size_mb"] = winner.artifact.size_bytes / 1e6
    return metrics
