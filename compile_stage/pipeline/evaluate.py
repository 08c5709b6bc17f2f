"""One job: lowered, compiled, looked at and validated in a worker of its own; and the jobs of a target, side by side.

Whatever happens there, a refusal, a crash or a time-out, becomes the job's result, and the other jobs go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import field, replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import tree_size
from compile_stage.core.errors import CompileStageError, UsageError, WorkerError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import (
    Artifact,
    CacheState,
    Candidate,
    Failure,
    Job,
    Measurement,
    Policy,
    PortableModel,
    SampleSet,
    SourceModel,
    record,
)
from compile_stage.steps.benchmark import benchmark
from compile_stage.steps.compile import compile_job
from compile_stage.steps.look import first_look
from compile_stage.steps.lower import lower
from compile_stage.steps.validate import Reference, validate, validated_before

_JOB_BYTES, _JOB_COPIES = 1_000_000_000, 8
"""What a job's worker holds at most, as a rule: a compiler's packages, and the model so many times (int8 of ResNet-50 and of BERT: 7)."""


@record
class Material:
    """What the candidates of one target are made of and judged by.

    Attributes:
        source: The original.
        portable: It as ONNX: what lowerings, the search and the debugger work on.
        samples: By role: `validation`, and `calibration` where a job needs it.
        expected: What the original model answers for the validation samples.
        others: The source in the other forms that a job asks for, or why it can't be had in one.
    """

    source: SourceModel
    portable: PortableModel
    samples: Mapping[str, SampleSet]
    expected: Reference
    others: Mapping[str, PortableModel | str] = field(default_factory=dict)

    def form(self, job: Job) -> PortableModel:
        """What the job's backend starts from. Raises UsageError, with the reason, when the source can't be had in that form."""
        found = self.portable if job.form == self.portable.form else self.others[job.form]
        if isinstance(found, str):
            raise UsageError(found)
        return found


def attempt_all(
    context: Context, policy: Policy, jobs: Sequence[Job], material: Material, *, prune_slow: bool = False
) -> list[Candidate]:
    """A candidate for each job of one target; as many jobs at once as the engine has room for.

    Args:
        prune_slow: As `attempt`.
    """
    lanes = context.engine.room(_JOB_BYTES + _JOB_COPIES * tree_size(Path(material.portable.path).parent))
    with ThreadPoolExecutor(max_workers=lanes, thread_name_prefix="job") as pool:
        futures = [pool.submit(attempt, context, policy, job, material, prune_slow=prune_slow) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            context.engine.close()  # ends the workers, so that the threads that wait for them end too
            raise


def attempt(
    context: Context,
    policy: Policy,
    job: Job,
    material: Material,
    *,
    make: Callable[[Worker], PortableModel] | None = None,
    total_s: float | None = None,
    prune_slow: bool = False,
    then: Callable[[Worker, Candidate], object] = lambda worker, candidate: None,
) -> Candidate:
    """Take one job as far as it goes.

    Args:
        make: Lowers it; by default the step `lower` does.
        total_s: All of it ends after so many seconds.
        prune_slow: One that a first look finds many times slower than the original is not validated, where that would take long.
        then: What else is to be done, once it is validated, with the worker that has it open.
    """
    candidate, step, budget = Candidate(job=job), "plan", policy.budget
    validation, calibration = material.samples["validation"], material.samples.get("calibration")
    if context.events.elapsed_s > budget.minutes * 60:
        late = f"the policy's budget of {budget.minutes:g} minutes was used up before this job began"
        return replace(candidate, failure=Failure(kind="timeout", step=step, problem=late))
    try:
        needs = replace(Needs.within(budget, job.target.threads), total_s=total_s)
        interpreter = plugins.interpreter_of(job.backend)
        with ExitStack() as stack:
            here = worker = stack.enter_context(context.worker(job.id, needs))
            if interpreter:  # graphs are still lowered here: a toolchain holds the backend's packages only
                worker = stack.enter_context(context.worker(job.id, replace(needs, interpreter=interpreter)))
            step = "lower"
            model = make(here) if make else lower(context, here, job, material.form(job), calibration)
            candidate, step = replace(candidate, portable=model), "compile"
            built = compile_job(context, worker, job, model, calibration)
            candidate = replace(
                candidate, artifact=built.artifact, compile_s=built.compile_s, cache={step: _state(built.cached)}
            )
            if candidate.not_runnable_here:
                return candidate
            step = "validate"
            proving = (job, built.artifact, material.expected, validation, policy.data)
            if prune_slow and not validated_before(context, *proving):
                looked = _look(context, policy, worker, job, built.artifact, material)
                if looked is not None:
                    return replace(candidate, measurement=looked)
            proof = validate(context, worker, *proving)
            candidate = replace(candidate, verdict=proof.verdict, cache={**candidate.cache, step: _state(proof.cached)})
            then(worker, candidate)
            return candidate
    except UsageError as refusal:
        return replace(candidate, refused=refusal.problem)
    except WorkerError as error:
        failure = Failure(kind=error.kind, step=step, problem=error.problem, detail=error.detail)
    except CompileStageError as error:
        failure = Failure(kind="exception", step=step, problem=str(error))
    return replace(candidate, failure=failure)


def _look(
    context: Context, policy: Policy, worker: Worker, job: Job, artifact: Artifact, material: Material
) -> Measurement | None:
    samples, target = material.samples["validation"], job.target

    def race() -> Measurement | None:
        found = benchmark(
            context, job.id, material.source, {job.id: artifact}, samples,
            replace(target, batch_sizes=target.batch_sizes[:1]), policy.budget, seed=policy.data.seed, first_look=True,
        )  # fmt: skip
        return found.measurements.get(job.id)

    return first_look(context, worker, job, artifact, material.source, samples, material.expected.sample_s, race)


def _state(cached: bool) -> CacheState:
    return "hit" if cached else "miss"
