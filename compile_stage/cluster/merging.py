"""Runs on several kinds of hardware as the one run that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from compile_stage.core.records import Bundle, Plan, Policy, RunOutcome, RunResult, TargetResult
from compile_stage.pipeline.outcome import outcome_of


def merged_plan(plans: Sequence[Plan], policy: Policy) -> Plan:
    """All jobs and refusals, in the order of the policy's targets."""
    order = {one.target.name: at for at, one in enumerate(policy.targets)}
    jobs = sorted(chain.from_iterable(plan.jobs for plan in plans), key=lambda job: order[job.target.name])
    refused = sorted(chain.from_iterable(plan.refused for plan in plans), key=lambda one: order[one.target])
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    return replace(plans[0], policy=policy, jobs=tuple(jobs), refused=tuple(refused), notes=tuple(notes))


def merged_outcome(results: Sequence[RunResult]) -> RunOutcome:
    """How the run ended: by all its targets together, and by what else ended one of the runs, such as a promotion that
    was refused."""
    said = [RunOutcome(status=one.status, exit_code=one.exit_code, problem=one.problem) for one in results]
    if len(said) == 1:
        return said[0]
    by_targets = outcome_of([target for result in results for target in result.targets])
    beside = [
        outcome
        for outcome, result in zip(said, results, strict=True)
        if outcome.exit_code and outcome.exit_code != outcome_of(result.targets).exit_code
    ]
    if not beside:
        return by_targets
    problems = [one.problem for one in (*beside, by_targets) if one.problem]
    return RunOutcome(status="failed", exit_code=beside[0].exit_code, problem="\n".join(problems))


def rebased(result: RunResult, places: Mapping[str, str]) -> RunResult:
    """The result with its bundles elsewhere.

    Args:
        places: Path of a bundle in the result → where it is now.
    """

    def moved(bundle: Bundle) -> Bundle:
        return replace(bundle, path=places.get(bundle.path, bundle.path))

    def of(target: TargetResult) -> TargetResult:
        return replace(
            target,
            bundle=moved(target.bundle) if target.bundle is not None else None,
            unvalidated=tuple(replace(one, bundle=moved(one.bundle)) for one in target.unvalidated),
        )

    return replace(result, targets=tuple(map(of, result.targets)))
