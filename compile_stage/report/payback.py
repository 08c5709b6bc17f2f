"""What compiling cost, and after how many calls the winner has paid it back."""

from __future__ import annotations

from compile_stage.core.records import RunResult, TargetResult, record
from compile_stage.report import numbers, summary


@record
class Payback:
    """What a target's winner saves, against what it cost.

    Attributes:
        compile_s: Compiling the winner alone.
        run_s: The whole run: all candidates, of all targets, with validation and measurement.
        saved_s: Of a call: the baseline's median minus the winner's, at the same batch size.
        calls: Calls after which `run_s` is saved; None where nothing is saved.
        hours: How long the winner takes for these calls, one after the other.
    """

    compile_s: float
    run_s: float
    batch_size: int
    saved_s: float
    calls: float | None
    hours: float | None

    @property
    def text(self) -> str:
        """In one sentence."""
        if self.calls is None or self.hours is None:
            return f"No time is saved by a call at batch {self.batch_size}, so the run's time does not pay back."
        return (
            f"{numbers.duration(self.saved_s)} saved by each call at batch {self.batch_size}: the run's "
            f"{numbers.duration(self.run_s)} pay back after {self.calls:,.0f} calls, which is "
            f"{numbers.duration(self.hours * 3600)} of calls one after the other."
        )


def payback(result: RunResult, target: TargetResult) -> Payback | None:
    """Of the winner; None where there is none, or where its speedup is unstable, was not measured, or is over a
    baseline that something slowed down."""
    winner = target.winner
    timing = summary.main_timing(target, winner.measurement) if winner is not None else None
    own, base = summary.median_s(timing), _baseline_median(result, target)
    if winner is None or timing is None or own is None or base is None or not timing.stable:
        return None
    if target.contradiction:
        return None
    saved = base - own
    calls = result.duration_s / saved if saved > 0 else None
    return Payback(
        compile_s=winner.compile_s,
        run_s=result.duration_s,
        batch_size=timing.batch_size,
        saved_s=saved,
        calls=calls,
        hours=None if calls is None else calls * own / 3600,
    )


def _baseline_median(result: RunResult, target: TargetResult) -> float | None:
    return summary.median_s(summary.main_timing(target, summary.baseline_of(result, target)))
