"""What to do after a run, in one line: a command that works as it stands, or nothing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from compile_stage.core.generation import has_cache
from compile_stage.core.records import Candidate, Receipt, RunResult, TargetResult
from compile_stage.report import summary
from compile_stage.report.why import serve_command, with_trust


@dataclass(frozen=True, slots=True)
class Asked:
    """What the run was asked for, as far as a further command needs it again.

    Attributes:
        publish: Winners were to be published.
    """

    policy: Path
    policy_roots: tuple[Path, ...] = ()
    sets: tuple[str, ...] = ()
    publish: bool = True


def next_step(result: RunResult, folder: Path, asked: Asked) -> str:
    """One line without its label; empty where nothing is known to help.

    Args:
        folder: Where the reports of the run are.
    """
    targets = sorted(result.targets, key=lambda target: not target.policy.target.required)
    if result.status == "passed":
        trusted = _trusted(result)
        return next(filter(None, (_after_success(target, asked, trusted) for target in targets)), "")
    for target in targets:
        promoted = summary.promotion(result, target)
        if promoted is not None and promoted[0] == "failed":
            return _compare(target)
    lost = next((target for target in targets if target.selection.winner is None), None)
    return _without_winner(result, lost, folder, asked) if lost is not None else ""


def _trusted(result: RunResult) -> tuple[str, ...]:
    """As `report.why.trusted_files`, by absolute paths: a line is pasted here, and a report goes to other machines."""
    compliance = result.policy.compliance
    return compliance.trusted_keys if compliance.require_signature else ()


def _after_success(target: TargetResult, asked: Asked, trusted: tuple[str, ...]) -> str:
    receipt = target.receipt
    if receipt is not None:
        if target.policy.promote.approval and receipt.promoted_to is None and "; then: compile-stage" in receipt.note:
            asks, _, promotes = receipt.note.removeprefix("waiting for approval: ").rpartition("; then: ")
            return f"{asks}; then: {with_trust(promotes, trusted)}"
        return _use(receipt, trusted)
    if waits := _validate_there(target):
        return waits
    if target.winner is not None and not asked.publish:
        return "the same command without --no-publish publishes it; nothing is compiled again"
    return ""


def _use(receipt: Receipt, trusted: tuple[str, ...]) -> str:
    """MLflow knows no other registry's versions."""
    if receipt.uri.startswith("models:/"):
        return serve_command(receipt, trusted)
    return with_trust(f"compile-stage verify {shlex.quote(receipt.uri)}", trusted)


def _validate_there(target: TargetResult) -> str:
    receipts = [one.receipt for one in target.unvalidated if one.receipt is not None]
    return f"on the target's hardware: compile-stage validate {shlex.quote(receipts[0].uri)}" if receipts else ""


def _compare(target: TargetResult) -> str:
    """Two published versions are compared by the results beside them."""
    replaced, receipt = target.replaced, target.receipt
    if replaced is None or replaced.measurement is None or receipt is None or not replaced.uri:
        return ""
    return f"compile-stage compare {shlex.quote(replaced.uri)} {shlex.quote(receipt.uri)}"


def _without_winner(result: RunResult, target: TargetResult, folder: Path, asked: Asked) -> str:
    if waits := _validate_there(target):
        return waits
    if summary.too_uncertain(target):
        return "the same command with --remeasure, when the machine is quieter"
    if not target.candidates:
        return ""
    report = shlex.join(["open", str(folder / "report.html")])
    job_id = next((c.job.id for c in target.candidates if _is_for_debug(target, c)), None)
    if job_id is None:
        return report
    words = ["compile-stage", "debug", result.source.uri, "-p", str(asked.policy), "--job", job_id]
    words += [word for root in asked.policy_roots for word in ("--policy-root", str(root))]
    words += [word for value in asked.sets for word in ("--set", value)]
    return f"{report}; {shlex.join(words)}"


def _is_for_debug(target: TargetResult, candidate: Candidate) -> bool:
    """Whether `debug` has something to find: numbers beyond a tolerance, in a graph whose nodes it can compare, of a
    job that the plan makes."""
    made_from = any(candidate.job.id.startswith(f"{other.job.id}--") for other in target.candidates)
    model = candidate.portable
    if made_from or model is None or model.form != "onnx" or has_cache(model.signature):
        return False
    return any(
        summary.outcome_word(check) == "failed" and check.gate.metric != "samples" and not summary.is_performance(check)
        for check in candidate.checks
    )
