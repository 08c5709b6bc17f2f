"""Option tuning of a target as reports show it: what each accepted step gained, and what was rejected and why."""

from __future__ import annotations

from collections.abc import Sequence

from compile_stage.core.records import CandidateState, Check, JsonMap, RunResult, StepKind, TargetResult, record
from compile_stage.report import numbers, summary

KIND_WORDS: dict[StepKind, str] = {
    "original": "original",
    "graph": "graph",
    "precision": "precision",
    "memory": "memory",
    "tuning": "hardware tuning",
}


@record
class OptionTuningRow:
    """One step.

    Attributes:
        what: The source's framework, a scheme, or the name of a setting.
        p50_s, peak_memory_bytes, size_bytes, error: Of the accepted step's candidate, as every other table has them;
            None for what was not accepted, and where there is none.
        speedup, speedup_interval: Over the accepted step before, from the same interleaved run.
        state: What selection made of it; None for the original and for what was not accepted.
    """

    kind: StepKind
    what: str
    job_id: str
    accepted: bool
    tried: bool
    reason: str
    options: JsonMap
    p50_s: float | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    peak_memory_bytes: int | None = None
    size_bytes: int | None = None
    error: Check | None = None
    state: CandidateState | None = None

    @property
    def outcome(self) -> str:
        """`rejected` of what was tried and dropped, as a candidate or in the search over combinations, which makes none
        of most settings; `not tried`; empty for what was accepted."""
        if self.accepted:
            return ""
        return "rejected" if self.tried else "not tried"


def option_tuning_rows(result: RunResult, target: TargetResult) -> tuple[OptionTuningRow, ...]:
    """From the original on, what was rejected too; empty when the policy asks for no option tuning."""
    by_id = {row.job_id: row for row in summary.rows(result, target)}
    rows = []
    for step in target.ladder:
        row = by_id.get(step.job_id) if step.accepted else None
        measured = row.candidate.measurement if row is not None and row.candidate is not None else None
        if step.kind == "original" and step.accepted:
            measured = summary.baseline_of(result, target)
        rows.append(
            OptionTuningRow(
                kind=step.kind,
                what=result.baseline_framework if step.kind == "original" else step.name,
                job_id=step.job_id,
                accepted=step.accepted,
                tried=step.tried,
                reason=step.reason,
                options=step.options,
                p50_s=summary.median_s(summary.timing_at(measured, target.policy.target.batch_sizes[0])),
                speedup=step.speedup,
                speedup_interval=step.speedup_interval,
                peak_memory_bytes=measured.peak_memory_bytes if measured is not None else None,
                size_bytes=row.size_bytes if row is not None else None,
                error=row.error if row is not None else None,
                state=row.state if row is not None else None,
            )
        )
    return tuple(rows)


def option_tuning_line(result: RunResult, target: TargetResult) -> str:
    """`option tuning: original 2.02 ms → graph fp32 0.62 ms → ...; 1 option rejected`: the accepted steps on one line.

    It says when the winner is none of them. Empty without option tuning.
    """
    rows = option_tuning_rows(result, target)
    accepted = [row for row in rows if row.accepted]
    steps = " → ".join(
        f"{KIND_WORDS[row.kind]} {'' if row.kind == 'original' else row.what + ' '}{numbers.duration(row.p50_s)}"
        for row in accepted
    )
    parts = [steps or "nothing was accepted"]
    if rejected := sum(row.outcome == "rejected" for row in rows if row.kind in ("memory", "tuning")):
        parts.append(f"{numbers.count(rejected, 'option')} rejected")
    if winner_elsewhere(result, target, rows):
        parts.append("the winner is none of these")
    return f"option tuning: {'; '.join(parts)}" if rows else ""


def winner_elsewhere(result: RunResult, target: TargetResult, rows: Sequence[OptionTuningRow]) -> str:
    """Where the winner is none of the accepted steps, a sentence that names it, and says which of its settings a step
    rejected on the base candidate. Empty where it is one of them, where there is none, and without option tuning.

    Args:
        rows: The steps (`option_tuning_rows`).
    """
    won = next((row for row in summary.rows(result, target) if row.job_id == target.selection.winner), None)
    if not rows or won is None or any(row.state == "won" for row in rows if row.accepted):
        return ""
    sentence = f"The winner, {won.label}, is none of these steps."
    rejected = {row.what for row in rows if row.outcome == "rejected"}
    settings = won.scheme.split("+")[1:]  # a result that is read again names them nowhere else
    if again := [name for name in settings if name in rejected]:
        were = f"{' and '.join(again)} {'was' if len(again) == 1 else 'were'}"
        sentence += f" {were} rejected here, tried on another candidate, and tried again in the final measurement."
    return sentence
