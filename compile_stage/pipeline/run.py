"""One run in order: plan, targets, packaging, publication, promotion.

What a step does is in its own file in `compile_stage.steps`. Here is only the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from compile_stage.core.context import Context
from compile_stage.core.errors import (
    EXIT_GATE,
    EXIT_OK,
    GateError,
    NothingCompiledError,
    SourceError,
    UsageError,
    WorkerError,
)
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import JsonMap, Plan, Policy, RunOutcome, SourceModel, TargetResult
from compile_stage.pipeline.outcome import RunInProgress, ended_by, outcome_of
from compile_stage.pipeline.target import run_target
from compile_stage.pipeline.tuning_options import announce
from compile_stage.steps.benchmark import benchmark_successor
from compile_stage.steps.export import inspect
from compile_stage.steps.package import package
from compile_stage.steps.plan import plan as expand
from compile_stage.steps.promote import Incumbent, alias_of, incumbent, promote, shipped
from compile_stage.steps.publish import attach_reports, publish
from compile_stage.steps.resolve import refuse_policy, resolve
from compile_stage.steps.select import select
from compile_stage.steps.tuning_records import push_records


def make_plan(context: Context, policy: Policy, uri: str) -> Plan:
    """Resolve the source and expand the policy into jobs and refusals."""
    source = resolve(context, uri)
    if (reason := refuse_policy(source, policy.applies_to)) is not None:
        raise UsageError(reason, where=source.uri, fix="choose another policy, or widen applies_to")
    plan = expand(source, policy, context.hardware)
    return replace(plan, notes=(*plan.notes, *announce(policy, plan.jobs)))


def run(progress: RunInProgress, context: Context, plan: Plan) -> None:
    """Everything after the plan. A job that fails and a gate that is missed are results, not exceptions.

    Raises:
        RegistryError: Publication could not be finished; running again finishes it.
    """
    with context.worker("source", Needs.within(plan.policy.budget)) as source_worker:
        try:
            with _source_errors(plan.source):
                origin = inspect(context, source_worker, plan.source, plan.policy.compliance)
            progress.framework = origin.framework
            progress.targets = _run_targets(context, source_worker, plan)
        except SourceError as error:
            progress.outcome = ended_by(error, "refused")
            progress.write_reports()
            return
    with progress.alone_in_folder():
        _package(progress, context, plan, origin.answer)
        progress.outcome = outcome_of(progress.targets)
        if progress.options.publish:
            _publish(progress, context, plan)
            if progress.options.promote and progress.outcome.exit_code == EXIT_OK:
                _promote(progress, context, plan)
        attach_reports(context, plan.source, progress.targets, progress.write_reports())


def _run_targets(context: Context, source_worker: Worker, plan: Plan) -> tuple[TargetResult, ...]:
    """Every target. What the source can't do for one of them, such as a batch size, is that target's reason to have no
    winner.

    Raises:
        SourceError: No target could have the source.
    """
    results: list[TargetResult] = []
    refusals: list[SourceError] = []
    for policy in plan.policy.targets:
        try:
            with _source_errors(plan.source):
                results.append(run_target(context, source_worker, plan, policy))
        except SourceError as error:
            refusals.append(error)
            selection = replace(select((), policy), reason=error.problem)
            results.append(TargetResult(policy=policy, candidates=(), selection=selection))
    if refusals and len(refusals) == len(results):
        raise refusals[0]
    return tuple(results)


def _package(progress: RunInProgress, context: Context, plan: Plan, answer: JsonMap) -> None:
    if progress.folder is not None:
        out = progress.folder
        progress.targets = tuple(package(context, plan, target, answer, out) for target in progress.targets)


def _publish(progress: RunInProgress, context: Context, plan: Plan) -> None:
    """Push tuning records and bundles. Each receipt is known as soon as there is one: a later target may fail."""
    progress.targets = tuple(push_records(context, plan.source, target) for target in progress.targets)
    reports = progress.write_reports()
    for target in progress.targets:
        _put(progress, publish(context, plan.source, target, reports))


def _promote(progress: RunInProgress, context: Context, plan: Plan) -> None:
    """Move each target's alias, or say why it stays; one that stays keeps no other from moving, and a required one
    fails the run."""
    problems = []
    for target in progress.targets:
        try:
            _put(progress, _promote_target(context, plan, target))
        except GateError as error:
            if target.policy.target.required:
                problems.append(str(error))
            if target.receipt is not None:
                _put(progress, replace(target, receipt=replace(target.receipt, note=error.problem)))
    if problems:
        progress.outcome = RunOutcome(status="failed", exit_code=EXIT_GATE, problem="\n".join(problems))


def _promote_target(context: Context, plan: Plan, target: TargetResult) -> TargetResult:
    alias = alias_of(target)
    if alias is None or target.receipt is None:
        return target
    artifact = shipped(context, plan.source, target)
    before, successor = incumbent(context, plan.source, target.receipt, alias, artifact), None
    try:
        successor = benchmark_successor(context, plan.policy, target, artifact, before.artifact)
    except (WorkerError, SourceError, UsageError, NothingCompiledError) as error:
        before = Incumbent(
            obstacle=f"what the alias points to now does not run on this run's samples ({error.problem})"
        )
    return replace(target, receipt=promote(context, plan.source, target, alias, before, successor))


def _put(progress: RunInProgress, changed: TargetResult) -> None:
    """Replace the target's result."""
    name = changed.policy.target.name
    targets: Sequence[TargetResult] = progress.targets
    progress.targets = tuple(changed if target.policy.target.name == name else target for target in targets)


@contextmanager
def _source_errors(source: SourceModel) -> Iterator[None]:
    """A crash, a time-out or an error of the worker that holds the original is no job's failure: without the original
    nothing is proven."""
    try:
        yield
    except WorkerError as error:
        last = error.detail.strip().splitlines()[-1:] if error.kind == "crash" else []
        raise SourceError(
            ": ".join(["the original model could not be exported, run or measured", error.problem, *last]),
            fix="load and run it in its own framework first; budget.job_minutes and job_memory_mb bound it here",
            where=source.uri,
        ) from error
