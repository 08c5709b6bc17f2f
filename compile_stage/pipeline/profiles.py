"""Profiles: of what a run selected, and, for the command `profile`, of what was only compiled or is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.baseline import refuse_baseline
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree, revive
from compile_stage.core.errors import CompileStageError, IntegrityError, StorageError, UsageError
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Budget,
    Data,
    Job,
    Plan,
    Profiled,
    SampleSet,
    SourceModel,
    Target,
    TargetPolicy,
    TargetResult,
    record,
)
from compile_stage.pipeline.evaluate import compile_candidate
from compile_stage.pipeline.inputs import TargetInputs, TargetRun, source_errors, source_limits
from compile_stage.serving.manifest import artifact_of, data_folder
from compile_stage.steps.export import inspect, inspect_published
from compile_stage.steps.profile import BASELINE, profile_artifact, profile_original
from compile_stage.steps.resolve import resolve_made_from


@record
class TargetProfiles:
    """What was profiled for one target: the baseline first, where it was."""

    target: str
    profiles: tuple[Profiled, ...]


@record
class Profiles:
    """What the command `profile` found.

    Attributes:
        uri: Of the model.
    """

    uri: str
    targets: tuple[TargetProfiles, ...]


def profile_winners(
    context: Context, source_worker: Worker, plan: Plan, targets: Sequence[TargetResult]
) -> tuple[TargetResult, ...]:
    """The targets with the profiles of their original and their winner, where the policy asks for them and somebody
    won.

    Every verdict was given before. It is the last that the worker of the original is asked for, so that a profiler
    which ends it takes nothing with it.
    """
    return tuple(_with_profiles(context, source_worker, plan, target) for target in targets)


def _with_profiles(context: Context, source_worker: Worker, plan: Plan, target: TargetResult) -> TargetResult:
    winner = target.winner
    if not plan.policy.report.profile or winner is None or winner.artifact is None:
        return target
    samples, where = target.samples["validation"], target.policy.target
    original = _original(context, source_worker, plan.source, samples, where)
    profiled = profile_artifact(context, winner.artifact, samples, winner.job.target, plan.policy.budget)
    return replace(target, profiles=(original, profiled))


def profile_plan(context: Context, plan: Plan, backends: Sequence[str], precisions: Sequence[str]) -> Profiles:
    """The original, and what the plan's jobs compile, for each target; nothing is validated or measured.

    Args:
        backends: Only these; empty for all.
        precisions: Only these.

    Raises:
        UsageError: No job of the plan is of these backends and precisions.
        SourceError: The source is refused or unreadable.
    """
    jobs = [
        job for job in plan.jobs if job.scheme.precision in precisions and (not backends or job.backend in backends)
    ]
    if not jobs:
        known = ", ".join(sorted({f"{job.backend} {job.scheme.precision}" for job in plan.jobs})) or "none"
        raise UsageError(
            f"no job of the policy is of {' or '.join(backends) or 'any backend'} in {' or '.join(precisions)}",
            fix=f"name others with --backend and --precision; the policy has {known}",
        )
    limits = source_limits(plan.policy.budget, plan.source, plan.policy.data, plan.policy.files)
    with context.source_worker(plan.source, limits) as source_worker, source_errors(plan.source):
        inspect(context, source_worker, plan.source, plan.policy.compliance)
        return Profiles(
            uri=plan.source.uri,
            targets=tuple(
                _profile_jobs(context, source_worker, plan, policy, of_target)
                for policy in plan.policy.targets
                if (of_target := [job for job in jobs if job.target.name == policy.target.name])
            ),
        )


def profile_published(
    context: Context, uri: str, manifest: Mapping[str, Any], model_dir: Path, *, allow_pickle: bool
) -> Profiles:
    """A published version's artifact, on the samples that it was validated with, and its original beside it.

    Raises:
        IntegrityError: The source, or the artifact, is not the one that was published.
        RegistryError, SourceError: The source can't be had, or is refused.
    """
    job, data = revive(Job, manifest["job"]), revive(Data, manifest["data"]["spec"])
    artifact, source = artifact_of(manifest, data_folder(model_dir)), resolve_made_from(context, manifest["source"])
    if digest_tree(artifact.path) != artifact.digest:
        raise IntegrityError("the artifact's files do not have the digest that was validated", where=artifact.path)
    plugins.demand(plugins.load("backends", job.backend))
    budget = Budget()
    with (
        context.source_worker(source, source_limits(budget, source, data)) as source_worker,
        source_errors(source),
    ):
        inspect_published(context, source_worker, source, allow_pickle=allow_pickle)
        inputs = TargetInputs(context, source_worker, source, data, job.target, (job,))
        profiles = (
            _original(context, source_worker, source, inputs.validation, job.target),
            profile_artifact(context, replace(artifact, job_id=job.id), inputs.validation, job.target, budget),
        )
    return Profiles(uri=uri, targets=(TargetProfiles(target=job.target.name, profiles=profiles),))


def _profile_jobs(
    context: Context, source_worker: Worker, plan: Plan, policy: TargetPolicy, jobs: Sequence[Job]
) -> TargetProfiles:
    inputs = TargetInputs(context, source_worker, plan.source, plan.policy.data, policy.target, jobs)
    target = TargetRun(context, plan, policy, inputs)
    profiles = [_original(context, source_worker, plan.source, inputs.validation, policy.target)]
    profiles += [_compiled(target, job) for job in jobs]
    return TargetProfiles(target=policy.target.name, profiles=tuple(profiles))


def _compiled(target: TargetRun, job: Job) -> Profiled:
    nothing = Profiled(name=job.id, runtime=job.backend)
    try:
        artifact = compile_candidate(target, job)
    except StorageError:
        raise
    except CompileStageError as error:
        return replace(nothing, reason=f"it was not compiled: {error.problem}")
    if why := job.not_runnable_here or artifact.not_runnable_here:
        return replace(nothing, reason=f"it can't be run on this machine: {why}")
    return profile_artifact(target.context, artifact, target.inputs.validation, job.target, target.run_policy.budget)


def _original(
    context: Context, source_worker: Worker, source: SourceModel, samples: SampleSet, target: Target
) -> Profiled:
    framework = plugins.load("sources", source.flavor).framework
    if (reason := refuse_baseline(source.flavor, target)) is not None:
        return Profiled(name=BASELINE, runtime=framework, reason=reason)
    return profile_original(context, source_worker, source, samples, target, framework)
