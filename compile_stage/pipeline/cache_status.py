"""What the cache already holds of a plan.

It goes through the very functions that `run` calls, with a context that only reads: what is looked up is what `run`
looks up. No worker is started, nothing is made. A measurement belongs to all candidates together, so it is not found
where the run added mixed or tuned ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from compile_stage.core.cache import Cached
from compile_stage.core.context import Context, cache_key
from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Artifact, Candidate, Job, Plan, TargetPolicy
from compile_stage.measure.timed_answers import Proof
from compile_stage.pipeline.inputs import TargetInputs
from compile_stage.steps.benchmark import CandidatesRequest, benchmark_candidates
from compile_stage.steps.compile import compile_job
from compile_stage.steps.judge import judge_tolerances
from compile_stage.steps.lower import lower
from compile_stage.steps.validate import validate


class _NotCachedError(Exception):
    """The cache does not have it."""


class _ReadOnly(Context):
    """A context that makes nothing."""

    def cached(
        self, step: str, job_id: str, key: Mapping[str, Any], make: Callable[[Path], Any], *, anew: bool = False
    ) -> Cached:
        if anew or (entry := self.cache.read(step, cache_key(key))) is None:
            raise _NotCachedError(step)
        return entry


def cache_status(context: Context, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Job id → the steps (`lower`, `compile`, `validate`, `benchmark`) that a run would find in the cache.

    Empty for jobs whose samples are made by a function, since what it returns is only known when it is called.
    """
    reader = _ReadOnly(**{field.name: getattr(context, field.name) for field in fields(context)})
    status: dict[str, tuple[str, ...]] = {}
    with context.worker("plan", WorkerLimits()) as worker:  # it starts at its first call, and there is none
        for policy in plan.policy.targets:
            jobs = [job for job in plan.jobs if job.target.name == policy.target.name]
            status |= {job.id: () for job in jobs}
            if jobs:
                status |= _status_of_target(reader, worker, plan, policy, jobs)
    return status


def _status_of_target(
    reader: Context, worker: Worker, plan: Plan, policy: TargetPolicy, jobs: Sequence[Job]
) -> dict[str, tuple[str, ...]]:
    inputs = TargetInputs(reader, worker, plan.source, plan.policy.data, policy.target, jobs)
    steps: dict[str, list[str]] = {job.id: [] for job in jobs}
    candidates: list[Candidate] = []
    for job in jobs:
        try:
            artifact = _compiled(reader, worker, job, inputs, steps[job.id])
            validated = validate(reader, worker, job, artifact, inputs.validation_set(plan.policy.waivers))
        except (_NotCachedError, CompileStageError):  # what is wrong with the model or the samples, a run says
            continue
        steps[job.id].append("validate")
        candidate = Candidate(job=job, artifact=artifact)
        candidates.append(judge_tolerances(candidate, validated.verdict.checks, plan.policy.waivers, reader.today))
    if candidates:
        proof = Proof.beside(inputs.reference, candidates)
        with contextlib.suppress(_NotCachedError):
            seconds = plan.policy.budget.measure_seconds
            request = CandidatesRequest(samples=inputs.validation, proof=proof, seconds=seconds)
            measured, _ = benchmark_candidates(reader, plan, policy, candidates, request)
            for candidate in measured:
                if candidate.measurement is not None:
                    steps[candidate.job.id].append("benchmark")
    return {job_id: tuple(names) for job_id, names in steps.items()}


def _compiled(reader: Context, worker: Worker, job: Job, inputs: TargetInputs, steps: list[str]) -> Artifact:
    model = lower(reader, worker, job, inputs.model_for(job), inputs.calibration)
    steps += [] if job.scheme.native else ["lower"]
    artifact = compile_job(reader, worker, job, model, inputs.calibration).artifact
    steps.append("compile")
    return artifact
