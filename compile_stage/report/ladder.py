"""The ladder of a target in the words of its readers: what each step from the original upwards gained, and what was tried and dropped."""

from __future__ import annotations

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
class LadderRow:
    """One step.

    Attributes:
        what: The source's framework, a scheme, or the name of a setting.
        p50_s, peak_memory_bytes, size_bytes, error: Of the climbed step's candidate, as every other table has them; None for what was
            not climbed, and where there is none.
        speedup, speedup_interval: Over the climbed step before, from the same interleaved run.
        state: What selection made of it; None for the original and for what was not climbed.
    """

    kind: StepKind
    what: str
    job_id: str
    accepted: bool
    reason: str
    options: JsonMap
    p50_s: float | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    peak_memory_bytes: int | None = None
    size_bytes: int | None = None
    error: Check | None = None
    state: CandidateState | None = None


def ladder_rows(result: RunResult, target: TargetResult) -> tuple[LadderRow, ...]:
    """From the original upwards, what was dropped where it was tried; empty when the policy asks for no ladder."""
    by_id = {row.job_id: row for row in summary.rows(result, target)}
    found = []
    for step in target.ladder:
        row = by_id.get(step.job_id) if step.accepted else None
        measured = row.candidate.measurement if row is not None and row.candidate is not None else None
        if step.kind == "original" and step.accepted:
            measured = summary.baseline_of(result, target)
        found.append(
            LadderRow(
                kind=step.kind,
                what=result.baseline_framework if step.kind == "original" else step.name,
                job_id=step.job_id,
                accepted=step.accepted,
                reason=step.reason,
                options=step.options,
                p50_s=summary.median_s(summary.main_timing(target, measured)),
                speedup=step.speedup,
                speedup_interval=step.speedup_interval,
                peak_memory_bytes=measured.peak_memory_bytes if measured is not None else None,
                size_bytes=row.size_bytes if row is not None else None,
                error=row.error if row is not None else None,
                state=row.state if row is not None else None,
            )
        )
    return tuple(found)


def ladder_line(result: RunResult, target: TargetResult) -> str:
    """The climbed steps on one line, `original 2.02 ms → graph fp32 0.62 ms → ...`, how many were dropped, and whether the winner is elsewhere; empty without
    a ladder."""
    rows = ladder_rows(result, target)
    climbed = [row for row in rows if row.accepted]
    steps = " → ".join(
        f"{KIND_WORDS[row.kind]} {'' if row.kind == 'original' else row.what + ' '}{numbers.duration(row.p50_s)}"
        for row in climbed
    )
    said = [steps or "nothing to climb"]
    if dropped := sum(not row.accepted and bool(row.job_id) for row in rows):
        said.append(f"{numbers.count(dropped, 'setting')} tried and dropped")
    if target.selection.winner is not None and not any(row.state == "won" for row in climbed):
        said.append("the winner is none of these")
    return f"ladder: {'; '.join(said)}" if rows else ""
