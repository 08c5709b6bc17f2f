"""One run in order: plan, targets, packaging, publication, promotion.

What a step does is in its own file in `compile_stage.steps`. Here is only the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import (
    EXIT_GATE,
    EXIT_OK,
    AliasMovedError,
    GateError,
    InternalError,
    NothingCompiledError,
    RegistryError,
    SourceError,
    UsageError,
    WorkerError,
)
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import (
    Origin,
    Plan,
    Policy,
    PredictSpeedup,
    Replacement,
    RunOutcome,
    SourceModel,
    TakenOver,
    TargetPolicy,
    TargetResult,
)
from compile_stage.pipeline.inputs import source_errors, source_limits
from compile_stage.pipeline.outcome import RunState, ended_by, outcome_of
from compile_stage.pipeline.profiles import profile_winners
from compile_stage.pipeline.serving import measure_served
from compile_stage.pipeline.target import OpenedTarget, open_target, run_target
from compile_stage.pipeline.time_left import START_S, TimeLeft
from compile_stage.pipeline.tuning_options import announce
from compile_stage.steps.benchmark import benchmark_successor
from compile_stage.steps.export import inspect, predict_original
from compile_stage.steps.package import family_key, package, package_family, remove_bundles
from compile_stage.steps.plan import plan as expand
from compile_stage.steps.predict import PredictComparison, contradicted, demand_speedup
from compile_stage.steps.promote import alias_of, incumbent, lacking, promote, shipped, where_aliases_ended
from compile_stage.steps.publish import attach_reports, publish
from compile_stage.steps.resolve import refuse_policy, resolve
from compile_stage.steps.sample import demand_even_lists
from compile_stage.steps.select import select, without_speed
from compile_stage.steps.serve import demand_served, load_model_dir
from compile_stage.steps.sign import refuse_signing, sign
from compile_stage.steps.sync_tuning_records import push_records, share_records
from compile_stage.steps.take_over import published_meanwhile, take_over

if TYPE_CHECKING:
    from compile_stage.serving.trust import Trust

_JOINS = 5  # as many other machines may publish variants of the family, one after the other, while this one joins them
_PROMOTIONS = 5  # as many others may move the alias while the run measures what it points to


def make_plan(context: Context, policy: Policy, uri: str) -> Plan:
    """Resolve the source and expand the policy into jobs and refusals."""
    if policy.compliance.sandbox == "required":
        demand_confinement(context)
    return plan_for(context, policy, resolve(context, uri))


def plan_for(context: Context, policy: Policy, source: SourceModel) -> Plan:
    """Expand the policy into jobs and refusals, for the hardware of the context."""
    if (reason := refuse_policy(source, policy.applies_to)) is not None:
        raise UsageError(reason, where=source.uri, fix="choose another policy, or widen applies_to")
    name = policy.publish_name.replace("{model}", source.name)
    if name == source.name:
        raise UsageError(
            f"publish.name would publish the compiled versions as versions of the source, {source.name!r}: its latest "
            "version, and an alias that is promoted, would no longer be an original",
            where=source.uri,
            fix='give them a name of their own, such as "{model}-compiled"',
            code=Code.WRONG_NAME,
        )
    try:
        plugins.load("registries", source.registry).publication_name(source, name)
    except (RegistryError, SourceError) as error:  # said before anything is compiled
        raise UsageError(
            f"publish.name gives this model a name that its registry does not take: {error.problem}",
            where=source.uri,
            fix='give it another one in the policy, or by --set publish.name="NAME"',
            code=Code.WRONG_NAME,
        ) from error
    plan = expand(source, policy, context.hardware)
    return replace(plan, notes=(*plan.notes, *announce(policy, plan.jobs)))


def demand_confinement(context: Context) -> None:
    """Raise UsageError where workers can't be kept from files and from the network."""
    confinement = context.confinement()
    if not confinement.complete:
        raise UsageError(
            "the policy requires confined workers (compliance.sandbox), and this machine can't confine them: "
            f"{confinement.text}",
            fix="run it on Linux 6.2 or newer with Landlock enabled, or set compliance.sandbox to best-effort; doctor "
            "shows what is in force",
        )


def run(progress: RunState, context: Context, plan: Plan) -> None:
    """Everything after the plan. A job that fails and a gate that is missed are results, not exceptions.

    Raises:
        UsageError: The policy requires signatures, and this run could make none that is trusted.
        RegistryError: Publication could not be finished; running again finishes it.
    """
    refuse_signing(plan.policy, progress.options.signer, progress.trust)
    policy = plan.policy
    limits = source_limits(policy.budget, plan.source, context.placed(policy.data), policy.files)
    with context.source_worker(plan.source, limits) as source_worker:
        try:
            with source_errors(plan.source):
                origin = inspect(context, source_worker, plan.source, policy.compliance)
            progress.framework, progress.notes = origin.framework, (*origin.notes, *_foreign_source(plan.source))
            progress.targets = tuple(
                share_records(context, target) for target in _run_targets(context, source_worker, plan)
            )
            if origin.processor.text:
                progress.targets = _predict_originals(context, source_worker, plan.source, progress.targets)
            progress.confinement = context.confinement()
            promotes = progress.options.publish and progress.options.promote
            for target in progress.targets:
                _put(progress, measure_served(context, plan, target, origin, beside_production=promotes))
        except SourceError as error:
            progress.outcome = ended_by(error, "refused")
            progress.write_reports()
            return
        with progress.folder_lock():
            _package(progress, context, plan, origin)
            progress.outcome = outcome_of(progress.targets)
            try:
                _compare_predicts(progress, context, plan, PredictComparison(context, source_worker, plan))
                if any(target.contradiction for target in progress.targets):
                    _package(progress, context, plan, origin)  # once more: a manifest holds speedups too
            except GateError as error:  # what was packaged has a verdict that does not hold for it
                _remove_packaged(progress)
                progress.outcome = ended_by(error, "failed")
                progress.write_reports()
                return
            if progress.options.publish:
                _publish(progress, context, plan, origin)
                if progress.options.promote and progress.outcome.exit_code == EXIT_OK:
                    _promote(progress, context, plan)
                elif progress.options.promote:
                    _say_that_aliases_stay(progress)
            _profile(progress, context, plan, source_worker)
            attach_reports(plan.source, progress.targets, progress.write_reports())


def _foreign_source(source: SourceModel) -> tuple[str, ...]:
    """Whose word the baseline is, where it is a third party's."""
    of = " ".join(f"{name} {version}" for name, version in plugins.third_party("sources", source.flavor).items())
    said = f"what the original answers, and how fast it is, is the word of a third party's source ({of})"
    return (said,) if of else ()


def _run_targets(context: Context, source_worker: Worker, plan: Plan) -> tuple[TargetResult, ...]:
    """Every target. What the source can't do for one of them, such as a batch size, is that target's reason to have no
    winner.

    Raises:
        SourceError: No target could have the source.
    """
    results: list[TargetResult] = []
    refusals: list[SourceError] = []
    if plan.jobs:
        with source_errors(plan.source):
            demand_even_lists(context, source_worker, plan.policy.data)
    opened = [_open_target(context, source_worker, plan, policy) for policy in plan.policy.targets]
    if refused := [refusal for one in opened if isinstance(one, OpenedTarget) for refusal in one.refused]:
        without = {refusal.job_id for refusal in refused}
        jobs = tuple(job for job in plan.jobs if job.id not in without)
        context.events.planned(replace(plan, jobs=jobs, refused=(*plan.refused, *refused)))
    for policy, one in zip(plan.policy.targets, opened, strict=True):
        try:
            if isinstance(one, SourceError):
                raise one
            with source_errors(plan.source):
                results.append(run_target(context, source_worker, plan, one))
        except SourceError as error:
            refusals.append(error)
            selection = replace(select((), policy), reason=error.problem)
            results.append(TargetResult(policy=policy, candidates=(), selection=selection))
    if refusals and len(refusals) == len(results):
        raise refusals[0]
    return tuple(results)


def _open_target(
    context: Context, source_worker: Worker, plan: Plan, policy: TargetPolicy
) -> OpenedTarget | SourceError:
    """The target, or why it can't have the source: so that all targets are looked at before anything is compiled."""
    try:
        with source_errors(plan.source):
            return open_target(context, source_worker, plan, policy)
    except SourceError as error:
        return error


def _predict_originals(
    context: Context, source_worker: Worker, source: SourceModel, targets: Sequence[TargetResult]
) -> tuple[TargetResult, ...]:
    """The targets with what the original's predict() answers to their samples' texts, where there is a winner."""
    with source_errors(source):
        return tuple(
            replace(target, predictions=predict_original(context, source_worker, source, target.samples["validation"]))
            if target.winner is not None
            else target
            for target in targets
        )


def _package(progress: RunState, context: Context, plan: Plan, origin: Origin) -> None:
    if progress.folder is None:
        return
    out, signer = progress.folder, progress.options.signer
    # Of a run that began in the same folder after this one, and was faster: the reports will be this one's.
    remove_bundles(out, [target.policy for target in progress.targets])
    packaged: dict[str, TargetResult] = {}
    for members in _published_together(progress.targets):
        if members[0].policy.family:
            results = _package_family(progress, context, plan, origin, members)
        else:
            results = (package(context, plan, members[0], origin, out, progress.options.signed_by),)
        packaged |= {result.policy.target.name: result for result in results}
    progress.targets = tuple(packaged[target.policy.target.name] for target in progress.targets)
    if signer is not None:
        for target in progress.targets:
            sign(context, plan.policy, target, signer)


def _package_family(
    progress: RunState, context: Context, plan: Plan, origin: Origin, members: Sequence[TargetResult]
) -> tuple[TargetResult, ...]:
    """Its members' bundle, with what other machines proved of the family where this run publishes."""
    assert progress.folder is not None
    earlier = TakenOver()
    if progress.options.publish and any(member.winner is not None for member in members):
        trust = _demanded_trust(progress, plan)
        earlier = take_over(context, plan, members, family_key(plan, members), trust)
        progress.notes = tuple(dict.fromkeys((*progress.notes, *earlier.notes)))
    return package_family(context, plan, members, origin, (progress.folder, progress.options.signed_by, earlier))


def _published_together(targets: Sequence[TargetResult]) -> tuple[tuple[TargetResult, ...], ...]:
    """Each family's targets, and each other target alone."""
    groups: dict[str, list[TargetResult]] = {}
    for target in targets:
        groups.setdefault(target.policy.published_as, []).append(target)
    return tuple(tuple(group) for group in groups.values())


def _publish(progress: RunState, context: Context, plan: Plan, origin: Origin) -> None:
    """Push tuning records and bundles. Each receipt is known as soon as there is one: a later target may fail."""
    progress.targets = tuple(push_records(context, plan.source, target) for target in progress.targets)
    reports = progress.reports_when_asked()
    for target in progress.targets:
        _put(progress, publish(context, plan.source, target, reports))
    for members in _published_together(progress.targets):
        if members[0].policy.family:
            _join(progress, context, plan, origin, members)


def _join(progress: RunState, context: Context, plan: Plan, origin: Origin, members: Sequence[TargetResult]) -> None:
    """Publish a family once more, with what other machines published of it since this run looked. Every machine looks
    after its own publication, so the last of them sees all others."""
    for _ in range(_JOINS):
        lead = next((member for member in members if member.receipt is not None), None)
        if lead is None or not published_meanwhile(plan, lead, family_key(plan, members)):
            return
        members = _package_family(progress, context, plan, origin, members)
        if (signer := progress.options.signer) is not None:
            sign(context, plan.policy, next(member for member in members if member.bundle is not None), signer)
        for member in members:
            _put(progress, member)
        reports = progress.reports_when_asked()
        members = tuple(publish(context, plan.source, member, reports) for member in members)
        for member in members:
            _put(progress, member)


def _compare_predicts(progress: RunState, context: Context, plan: Plan, comparison: PredictComparison) -> None:
    """Each winner's predict() beside the original's: of what was packaged, before anybody has it.

    Raises:
        GateError: One answers otherwise; or it, or the baseline itself, shows that the baseline's latency is not the
            original's, and no speedup that the policy asks for.
    """
    for target in progress.targets:
        bundle, winner = target.bundle, target.winner
        if bundle is None or winner is None or winner.artifact is None or target.predict_speedup is not None:
            continue
        where, trust = target.policy.target, _demanded_trust(progress, plan)
        limits = WorkerLimits.within(plan.policy.budget, where.threads, plugins.interpreter_of(winner.artifact.backend))
        found: PredictSpeedup | None
        if late := _late_for_predict(context, plan):
            found = comparison.known(target) or PredictSpeedup(reason=late)
        else:
            with ExitStack() as stack:
                loading = load_model_dir(context, bundle, where, limits, trust)
                found = comparison.known(target) or comparison.take(target, partial(stack.enter_context, loading))
        target = replace(target, predict_speedup=contradicted(target, found))
        target = without_speed(target) if target.contradiction else target
        _put(progress, target)  # first: the reports show by what it fails
        demand_speedup(target)


def _remove_packaged(progress: RunState) -> None:
    if progress.folder is not None:
        remove_bundles(progress.folder, [target.policy for target in progress.targets])
    progress.targets = tuple(replace(target, bundle=None) for target in progress.targets)


def _late_for_predict(context: Context, plan: Plan) -> str:
    """Why predict() is not compared: too little time is left; empty where there is enough."""
    left = TimeLeft(context.events, plan.policy.budget)
    return left.lacks(plan.policy.budget.predict_seconds + START_S + left.source_s)


def _profile(progress: RunState, context: Context, plan: Plan, source_worker: Worker) -> None:
    """Profiles of the winners, where there is time for them: no verdict needs them."""
    wanted = plan.policy.report.profile and any(target.winner is not None for target in progress.targets)
    left = TimeLeft(context.events, plan.policy.budget)
    if wanted and (late := left.lacks(START_S + left.source_s)):
        progress.notes = (*progress.notes, f"nothing was profiled: {late}")
        return
    progress.targets = profile_winners(context, source_worker, plan, progress.targets)


def _demanded_trust(progress: RunState, plan: Plan) -> Trust | None:
    """Whose signatures what serves is loaded with; None where none are demanded."""
    demanded = plan.policy.compliance.require_signature or progress.options.trust is not None
    return progress.trust if demanded else None


def _promote(progress: RunState, context: Context, plan: Plan) -> None:
    """Move each target's alias, or say why it stays; one that stays keeps no other from moving, and a required one
    fails the run."""
    problems = []
    for target in progress.targets:
        try:
            _put(progress, _promote_target(progress, context, plan, target))
        except GateError as error:
            if target.policy.target.required:
                problems.append(str(error))
            if target.receipt is not None:
                now = next(t for t in progress.targets if t.policy.target.name == target.policy.target.name)
                _put(progress, replace(now, receipt=replace(target.receipt, note=error.problem)))
    progress.targets = where_aliases_ended(progress.targets)
    if problems:
        progress.outcome = RunOutcome(status="failed", exit_code=EXIT_GATE, problem="\n".join(problems))


def _say_that_aliases_stay(progress: RunState) -> None:
    """What was published by a run that fails is not promoted: a policy whose required targets do not all hold is not
    met, and an alias is what production follows (decision 0013)."""
    without = ", ".join(one.policy.target.name for one in progress.targets if one.winner is None)
    for target in progress.targets:
        if (alias := alias_of(target)) is not None and target.receipt is not None:
            note = f"alias {alias!r} stays: the run failed, without a winner for {without}, and so promotes nothing"
            joined = "; ".join(filter(None, (target.receipt.note, note)))
            _put(progress, replace(target, receipt=replace(target.receipt, note=joined)))


def _promote_target(progress: RunState, context: Context, plan: Plan, target: TargetResult) -> TargetResult:
    alias = alias_of(target)
    if alias is None or target.receipt is None:
        return target
    trust = _demanded_trust(progress, plan)
    version = replace(shipped(context, plan.source, target, trust), predictions=target.predictions)
    artifact, where = version.artifact, target.policy.target
    limits = WorkerLimits.within(plan.policy.budget, where.threads, plugins.interpreter_of(artifact.backend))
    receipt = target.receipt
    demand_served(context, version, where, target.samples["validation"], limits, trust)
    for attempt in range(1, _PROMOTIONS + 1):
        before, successor = incumbent(context, plan.source, receipt, alias, artifact, where.threads), None
        if before.newer:
            note = f"alias {alias!r} stays at {before.newer}, which is newer than {plan.source.uri}"
            return replace(target, receipt=replace(receipt, note=note))
        before = replace(before, lacking=lacking(plan.policy, target, before))
        try:
            successor = benchmark_successor(context, plan.policy, target, artifact, before.artifact, before.threads)
        except (WorkerError, SourceError, UsageError, NothingCompiledError) as error:
            before = replace(
                before, obstacle=f"what the alias points to now does not run on this run's samples ({error.problem})"
            )
        if before.artifact is not None or before.obstacle:
            target = replace(
                target,
                replaced=Replacement(alias=alias, uri=before.uri, measurement=successor, note=before.obstacle),
            )
            _put(progress, target)
        try:
            return replace(target, receipt=promote(context, plan.source, target, alias, before, successor))
        except AliasMovedError:  # another stage was faster: the next attempt is against what it put there
            if attempt == _PROMOTIONS:
                raise
    raise InternalError("no attempt to promote was made")


def _put(progress: RunState, changed: TargetResult) -> None:
    """Replace the target's result."""
    name = changed.policy.target.name
    targets: Sequence[TargetResult] = progress.targets
    progress.targets = tuple(changed if target.policy.target.name == name else target for target in targets)
