"""What the cache already holds of a plan.

The steps themselves are walked, with a context that only reads: so what is looked up is what `run` looks up, and a key
that changes there changes here. No worker is started, nothing is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.core.cache import Cached
from compile_stage.core.context import Context, whole_key
from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import Candidate, Job, Plan, PortableModel, TargetPolicy
from compile_stage.steps.benchmark import benchmark_candidates
from compile_stage.steps.compile import compile_job
from compile_stage.steps.export import export, other_forms
from compile_stage.steps.lower import lower
from compile_stage.steps.sample import samples_for
from compile_stage.steps.select import waive
from compile_stage.steps.validate import reference, validate


class _NotHeldError(Exception):
    """The cache does not have it."""


class _Reader(Context):
    """A context that makes nothing."""

    def cached(self, step: str, job_id: str, key: Mapping[str, Any], make: Callable[[Path], Any]) -> Cached:
        if (found := self.cache.read(step, whole_key(key))) is None:
            raise _NotHeldError(step)
        return found


def holdings(context: Context, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Job id → the steps (`lower`, `compile`, `validate`, `measure`) that a run would find in the cache.

    Nothing for jobs whose samples are made by a function, since what it answers is only known when it is called.
    """
    reader = _Reader(
        cache=context.cache,
        engine=context.engine,
        events=context.events,
        hardware=context.hardware,
        scratch=context.scratch,
        today=context.today,
    )
    found: dict[str, tuple[str, ...]] = {}
    with context.worker("plan", Needs()) as worker:  # it starts at its first call, and there is none
        for target_policy in plan.policy.targets:
            jobs = [job for job in plan.jobs if job.target.name == target_policy.target.name]
            found |= {job.id: () for job in jobs}
            try:
                found |= _of_target(reader, worker, plan, target_policy, jobs)
            except (_NotHeldError, CompileStageError):  # what is wrong with the model or the samples, a run says
                continue
    return found


def _of_target(
    reader: Context, worker: Worker, plan: Plan, target_policy: TargetPolicy, jobs: Sequence[Job]
) -> dict[str, tuple[str, ...]]:
    if not jobs:
        return {}
    source, policy, target = plan.source, plan.policy, target_policy.target
    portable = export(reader, worker, source, target)
    samples = samples_for(reader, worker, source, policy.data, portable.signature, jobs)
    steps: dict[str, list[str]] = {job.id: [] for job in jobs}
    candidates: list[Candidate] = []
    try:
        expected = reference(reader, worker, source, samples["validation"], target)
    except _NotHeldError:
        expected = None
    try:
        others = other_forms(reader, worker, source, jobs)
    except _NotHeldError:
        others = {}
    for job in jobs:
        start = portable if job.form == portable.form else others.get(job.form)
        if not isinstance(start, PortableModel):
            continue
        try:
            model = lower(reader, worker, job, start, samples.get("calibration"))
            steps[job.id] += [] if job.scheme.native else ["lower"]
            artifact = compile_job(reader, worker, job, model, samples.get("calibration")).artifact
            steps[job.id].append("compile")
            if expected is not None:
                proof = validate(reader, worker, job, artifact, expected, samples["validation"], policy.data)
                steps[job.id].append("validate")
                candidate = Candidate(job=job, artifact=artifact, verdict=proof.verdict)
                candidates.append(waive(candidate, target_policy, policy.waivers, reader.today))
        except _NotHeldError:
            continue
    try:
        measured, _ = benchmark_candidates(reader, plan, target_policy, candidates, samples["validation"])
    except _NotHeldError:
        measured = []
    for candidate in measured:
        if candidate.measurement is not None:
            steps[candidate.job.id].append("measure")
    return {job_id: tuple(done) for job_id, done in steps.items()}
