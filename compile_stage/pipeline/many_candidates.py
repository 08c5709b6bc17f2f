"""The confidence of a limit, where several candidates were judged by the same samples.

Of many candidates that lose a little too much, one passes by luck, and is published. With `select.confidence_of:
winner` who would win is judged once more, at a confidence that is corrected for the candidates that miss for their
interval alone. Who does not hold it is one more of these, and the next best is judged. It is nearly Hochberg's step-up
test (Biometrika 75:800, 1988), which holds where the candidates' errors go the same way, as those of one model on the
same samples do. One that misses by its value does not count, since hardly any of these pass by luck, and neither do the
trials of a search, which are a fixed sequence (`measure.search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compile_stage.core.errors import CompileStageError, StorageError
from compile_stage.core.records import Answers, Candidate, Failure, Gate, Outcome, Selection, Verdict
from compile_stage.core.sample_sizes import confidence_over
from compile_stage.measure import own_metric
from compile_stage.measure.search import is_open
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.job_workers import NewWorkers
from compile_stage.pipeline.soaked_selection import select_soaked
from compile_stage.steps.judge import judge_tolerances
from compile_stage.steps.validate import validate


def misses_by_luck(candidate: Candidate) -> bool:
    """Whether it was validated, and fails for the interval of its limits alone."""
    checks = candidate.checks
    limited = {gate.metric for gate in candidate.job.gates}
    missed = [
        check
        for check in checks  # behind a limit that was NOT_RUN, what is beyond the samples is not looked at either
        if check.waived is None
        and (check.outcome is Outcome.FAIL or (check.outcome is Outcome.NOT_RUN and check.gate.metric in limited))
    ]
    return bool(missed) and all(map(is_open, missed))


def at_confidence_over(gates: Sequence[Gate], tries: int) -> tuple[Gate, ...]:
    """The gates, those with a confidence at 1 - (1 - confidence) / tries, for one of so many tries (Bonferroni)."""
    return tuple(replace(gate, confidence=confidence_over(gate.confidence, tries)) for gate in gates)


def select_confirmed(
    target: TargetRun, candidates: Sequence[Candidate], original: Answers, validated: Sequence[Candidate]
) -> tuple[tuple[Candidate, ...], Selection]:
    """The candidates, and the selection whose winner holds the soak, and its limits at the confidence of a winner where
    the policy says so.

    Args:
        candidates: With what was measured in their verdicts.
        validated: The same before it.
    """
    policy, budget = target.policy, target.run_policy.budget
    own = {one.job.id: len(one.verdict.checks) for one in validated if one.verdict is not None}
    judged, confirmed = tuple(candidates), set[str]()

    def confirm(job_id: str) -> tuple[Candidate, ...]:
        confirmed.add(job_id)
        tries = _tries(judged)
        return tuple(_judged_again(target, c, tries, own[c.job.id]) if c.job.id == job_id else c for c in judged)

    while True:
        judged, selection = select_soaked(target.context, judged, policy, original, budget)
        if policy.confidence_of != "winner" or _tries(judged) == 1:
            return judged, selection
        # Where the winner may yet fail behind its server, the next best must have been judged too.
        next_ones = [c.job.id for c in judged if c.has_passed] if policy.serving.asked else []
        left = [one for one in (selection.winner, *next_ones) if one is not None and one not in confirmed]
        if not left:
            return judged, selection
        judged = confirm(left[0])


def _tries(candidates: Sequence[Candidate]) -> int:
    return 1 + sum(map(misses_by_luck, candidates))


def notes(target: TargetRun, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """At which confidence limits were judged, over how many candidates; empty where one was judged alone.

    Args:
        candidates: As `select_confirmed` returns them.
    """
    of_all = [one for one in candidates if one.verdict is not None and _has_confidence(one)]
    missed = [one.job.id for one in of_all if misses_by_luck(one)]
    if len(of_all) < 2 or not missed:
        return ()
    count, verb = len(missed), "misses" if len(missed) == 1 else "miss"
    missing = f"{count} of {len(of_all)} candidates {verb} a limit for its interval alone ({', '.join(missed)})"
    if target.policy.confidence_of == "winner":
        return (
            f"{missing}: the winner is judged at 1 - (1 - confidence) / {1 + count} (select.confidence_of: winner)",
        )
    return (
        f"{missing}: the confidence of a limit is that of each candidate by itself, and of several that lose a little "
        "too much one passes more often; select.confidence_of: winner corrects for it",
    )


def _has_confidence(candidate: Candidate) -> bool:
    return any(gate.confidence is not None for gate in candidate.job.gates)


def _judged_again(target: TargetRun, candidate: Candidate, tries: int, own: int) -> Candidate:
    """The candidate by its limits for one of so many tries.

    Args:
        own: So many of its checks are of its validation, the first ones.
    """
    context, run_policy = target.context, target.run_policy
    if candidate.verdict is None or candidate.artifact is None or not _has_confidence(candidate):
        return candidate
    job = replace(candidate.job, gates=at_confidence_over(candidate.job.gates, tries))
    samples = target.inputs.validation_set(run_policy.waivers)
    try:
        with NewWorkers(target).opened(job) as pair, own_metric.allowed(run_policy.budget.job_minutes * 60):
            validated = validate(context, pair.runs, job, candidate.artifact, samples)
    except StorageError:
        raise
    except CompileStageError as error:
        return replace(candidate, job=job).failed(Failure(kind="exception", step="validate", problem=error.problem))
    judged = judge_tolerances(replace(candidate, job=job), validated.verdict.checks, run_policy.waivers, context.today)
    if judged.verdict is not None and judged.has_passed:
        return replace(judged, verdict=Verdict(checks=(*judged.verdict.checks, *candidate.verdict.checks[own:])))
    why = (
        f"it held at the confidence of one candidate, and {tries - 1} missed a limit for its interval alone: validate "
        "on more samples, or say select.confidence_of: candidate"
    )
    return judged.in_state("failed", f"{judged.reason}; {why}")
