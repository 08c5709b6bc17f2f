"""What became of a job: read from the `result.json` that its run left, and from how its process ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.errors import EXIT_GATE, EXIT_NOTHING_COMPILED, EXIT_OK, EXIT_SOURCE
from compile_stage.core.json_files import read_json_object
from compile_stage.core.records import Outcome, record
from compile_stage.core.records.candidate import NOT_STARTED
from compile_stage.report import numbers

PASSED, FAILED, REFUSED, COMPILED, UNKNOWN = "passed", "failed", "refused", "compiled", "unknown"
NOT_BEGUN = "not begun"


@record
class TargetOutcome:
    """One target of a job.

    Attributes:
        outcome: `passed`: it has a winner; `compiled`: for hardware that was not there, to be validated; `failed`;
            `refused`: the model or the policy was; `unknown`: the run ended before it could say; `not begun`: no time
            was left to try any of its candidates.
        reason: Why it did not pass.
        speedup: Of the winner over the original, at the policy's first batch size; None where its measurement was
            unstable, which no single figure stands for.
        published: URI of the published version.
        note: Which gates are waived, the range of an unstable speedup, why the alias stays or what it waits for.
    """

    target: str
    required: bool
    outcome: str
    reason: str = ""
    winner: str = ""
    speedup: float | None = None
    published: str = ""
    note: str = ""


@record
class JobOutcome:
    """A job's end.

    Attributes:
        passed: The exit code is 0.
        conclusive: It failed, published nothing, and would again: the same files under the same policy. Not so where
            time or memory was short, a worker was lost, or a check could not run.
        steps: Step → (seconds, times it ran, times it came from the cache).
    """

    passed: bool
    conclusive: bool
    exit_code: int
    problem: str = ""
    seconds: float = 0.0
    targets: tuple[TargetOutcome, ...] = ()
    steps: Mapping[str, tuple[float, int, int]]


def outcome_of_run(
    result: Path, targets: tuple[tuple[str, bool], ...], exit_code: int, problem: str, seconds: float
) -> JobOutcome:
    """The end of a run.

    Args:
        result: Its `result.json`, which may be missing.
        targets: (name, required) of the policy's targets.
        problem: What the log says, for want of a result.
    """
    try:
        document = read_json_object(result)
        held = {str(target["name"]): target for target in document.get("targets", [])}
        problem = str(document.get("problem") or problem)
        found = tuple(_target(name, required, held.get(name), document, problem) for name, required in targets)
        decided = _is_decided(document, exit_code)
        steps = _steps(document.get("events", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # An interrupted write leaves none, and a run that could not even start too.
        unknown = UNKNOWN if exit_code != EXIT_OK else FAILED
        found = tuple(
            TargetOutcome(target=name, required=required, outcome=unknown, reason=problem) for name, required in targets
        )
        decided, steps = False, {}
    nothing_made = not any(target.published or target.winner or target.outcome == COMPILED for target in found)
    return JobOutcome(
        passed=exit_code == EXIT_OK,
        conclusive=exit_code in (EXIT_GATE, EXIT_SOURCE, EXIT_NOTHING_COMPILED) and nothing_made and decided,
        exit_code=exit_code,
        problem="" if exit_code == EXIT_OK else problem,
        seconds=seconds,
        targets=found,
        steps=steps,
    )


def _is_decided(document: Mapping[str, Any], exit_code: int) -> bool:
    """Whether the files and the policy decided a failed run. A source that was refused before anything was tried was;
    one that broke a worker later may have lacked time or memory."""
    if exit_code == EXIT_SOURCE:
        return document.get("status") == "refused"
    candidates = [one for target in document.get("targets", []) for one in target.get("candidates", [])]
    return all(map(_is_settled, candidates))


def _is_settled(candidate: Mapping[str, Any]) -> bool:
    """Whether a candidate would end in the same way again: what it raised, or a check that it missed, says so."""
    error, verdict = candidate.get("error"), candidate.get("verdict")
    if error:
        return bool(error["kind"] == "exception")
    outcomes = {check["outcome"] for check in (verdict or {}).get("checks", [])}
    return Outcome.FAIL in outcomes or Outcome.NOT_RUN not in outcomes


def _target(
    name: str, required: bool, held: Mapping[str, Any] | None, document: Mapping[str, Any], problem: str
) -> TargetOutcome:
    if held is None:
        outcome = REFUSED if document.get("status") == "refused" else FAILED
        return TargetOutcome(target=name, required=required, outcome=outcome, reason=problem)
    receipt = held.get("receipt") or {}
    drafts = [draft for draft in held.get("drafts", []) if draft.get("bundle") or draft.get("receipt")]
    if held["winner"] is not None:
        outcome, reason = PASSED, ""
    elif drafts:
        outcome, reason = COMPILED, str(held.get("reason") or "")
        receipt = drafts[0].get("receipt") or {}
    else:
        # What was never tried is neither worse than the original nor worse than before.
        outcome = NOT_BEGUN if _is_untried(held) else FAILED
        reason = str(held.get("reason") or problem)
    winner: Mapping[str, Any] = next(
        (one for one in held.get("candidates", []) if one.get("job_id") == held["winner"]), {}
    )
    timing = _main_timing(winner)
    stable = timing.get("stable", True)
    slowed = bool((held.get("predict_speedup") or {}).get("contradiction"))
    unknown = "speedup not known: something slowed the baseline down" if slowed else "" if stable else _unstable(timing)
    notes = (_waived(winner), unknown, str(receipt.get("note") or ""))
    speedup = timing.get("speedup") if stable and not slowed else None
    return TargetOutcome(
        target=name,
        required=required,
        outcome=outcome,
        reason=reason,
        winner=str(held["winner"] or ""),
        speedup=float(speedup) if isinstance(speedup, int | float) else None,
        published=str(receipt.get("uri") or ""),
        note="; ".join(filter(None, notes)),
    )


def _is_untried(held: Mapping[str, Any]) -> bool:
    """Whether the budget ended before any candidate of a target was started; those that were refused are none."""
    meant = [one for one in held.get("candidates", []) if one.get("state") != "refused"]
    return bool(meant) and all(map(_is_late, meant))


def _is_late(candidate: Mapping[str, Any]) -> bool:
    """Whether no time was left to start it. One that was validated, and then had no time to be measured, was tried."""
    error = candidate.get("error") or {}
    return error.get("kind") == "timeout" and error.get("step") == NOT_STARTED and not candidate.get("verdict")


def _main_timing(candidate: Mapping[str, Any]) -> Mapping[str, Any]:
    """At the policy's first batch size."""
    batches: dict[str, Any] = (candidate.get("timing") or {}).get("by_batch") or {}
    first = next(iter(batches.values()), None)
    return first if isinstance(first, Mapping) else {}


def _waived(candidate: Mapping[str, Any]) -> str:
    waivers = (candidate.get("verdict") or {}).get("waivers") or []
    return f"passed {numbers.under_waivers([str(waiver['gate']) for waiver in waivers])}" if waivers else ""


def _unstable(timing: Mapping[str, Any]) -> str:
    interval = timing.get("speedup_interval")
    known = interval is not None and None not in interval
    return f"unstable speedup, {numbers.span(interval)}" if known else "unstable speedup"


def _steps(events: list[Mapping[str, Any]]) -> dict[str, tuple[float, int, int]]:
    """Steps of jobs run side by side, so their seconds may add up to more than the run took."""
    seconds: dict[str, float] = defaultdict(float)
    ran: dict[str, int] = defaultdict(int)
    cached: dict[str, int] = defaultdict(int)
    for event in events:
        step = str(event["step"])
        seconds[step] += float(event["ended_s"]) - float(event["started_s"])
        (cached if event.get("cached") else ran)[step] += 1
    return {step: (seconds[step], ran[step], cached[step]) for step in seconds}
