"""Checks → the state of a candidate. Waivers are applied here, and nowhere else: to a verdict when it is made, and to
the performance gates when they join it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from compile_stage.core.performance_keys import policy_key
from compile_stage.core.records import Candidate, Check, Outcome, TargetPolicy, Verdict, Waiver
from compile_stage.measure.metrics import apply_waivers
from compile_stage.measure.performance import check_performance


def judge_tolerances(
    candidate: Candidate, checks: Sequence[Check], waivers: Sequence[Waiver], today: date
) -> Candidate:
    """The candidate with its verdict on what was validated: `passed`, or `failed` with the deciding check."""
    verdict = Verdict(checks=apply_waivers(checks, waivers, candidate.job.target.name, today))
    judged = replace(candidate, verdict=verdict)
    if verdict.passed:
        return judged.in_state("passed", "every tolerance holds")
    return judged.in_state("failed", _deciding(verdict))


def judge_performance(candidate: Candidate, policy: TargetPolicy, waivers: Sequence[Waiver], today: date) -> Candidate:
    """The candidate with the performance gates in its verdict. What has no verdict, or missed a tolerance and so was
    not measured, stays as it is."""
    verdict, artifact, measurement = candidate.verdict, candidate.artifact, candidate.measurement
    if verdict is None or artifact is None or (not verdict.passed and measurement is None):
        return candidate
    checks = check_performance(policy.performance, measurement, artifact.size_bytes)
    waived = apply_waivers(checks, waivers, policy.target.name, today)
    verdict = Verdict(checks=(*verdict.checks, *waived))
    judged = replace(candidate, verdict=verdict)
    if candidate.state != "passed":
        return judged
    if not verdict.passed:
        return judged.in_state("failed", _deciding(verdict))
    if measurement is None:
        return judged.in_state("failed", "it passes every gate, but it was not measured")
    return judged


def _deciding(verdict: Verdict) -> str:
    """The check that decided against it: one that failed before one that could not be run."""
    bad = [c for c in verdict.checks if c.outcome is not Outcome.PASS and c.waived is None]
    if not bad:
        return "nothing was checked"
    worst = next((c for c in bad if c.outcome is Outcome.FAIL), bad[0])
    place = f" (output {worst.output})" if worst.output else ""
    batch = f" at batch size {worst.batch_size}" if worst.batch_size else ""
    others = len(bad) - 1
    more = f"; {others} more check{'s' if others > 1 else ''} did not pass" if others else ""
    return f"{policy_key(worst.gate.metric)}{place}{batch}: {worst.reason}{more}"
