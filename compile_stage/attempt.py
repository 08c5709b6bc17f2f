"""One job: lowered, compiled and validated in a worker of its own; and the jobs of a target, side by side.

Whatever happens there, a refusal, a crash or a time-out, becomes the job's result, and the other jobs go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import tree_size
from compile_stage.core.errors import CompileStageError, UsageError, WorkerError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import CacheState, Candidate, Failure, Job, Policy, PortableModel, SampleSet, record
from compile_stage.steps.compile import compile_job
from compile_stage.steps.lower import lower
from compile_stage.steps.validate import Reference, validate

_JOB_BYTES, _JOB_COPIES = 1_000_000_000, 8
"""What a job's worker holds at most, as a rule: a compiler's packages, and the model so many times (int8 of ResNet-50 and of BERT: 7)."""


@record
class Material:
    """What the candidates of one target are made of and judged by.

    Attributes:
        portable: The source as ONNX: what lowerings, the search and the debugger work on.
        samples: By role: `validation`, and `calibration` where a job needs it.
        expected: What the original model answers for the validation samples.
        others: The source in the other forms that a job asks for, or why it can't be had in one.
    """

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


def attempt_all(context: Context, policy: Policy, jobs: Sequence[Job], material: Material) -> list[Candidate]:
    """A candidate for each job of one target; as many jobs at once as the engine has room for."""
    lanes = context.engine.room(_JOB_BYTES + _JOB_COPIES * tree_size(Path(material.portable.path).parent))
    with ThreadPoolExecutor(max_workers=lanes, thread_name_prefix="job") as pool:
        futures = [pool.submit(attempt, context, policy, job, material) for job in jobs]
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
) -> Candidate:
    """Take one job as far as it goes.

    Args:
        make: Lowers it; by default the step `lower` does.
        total_s: All of it ends after so many seconds.
    """
    candidate, step, budget = Candidate(job=job), "plan", policy.budget
    validation, calibration = material.samples["validation"], material.samples.get("calibration")
    if context.events.elapsed_s > budget.minutes * 60:
        late = f"the policy's budget of {budget.minutes:g} minutes was used up before this job began"
        return replace(candidate, failure=Failure(kind="timeout", step=step, problem=late))
    try:
        needs = replace(Needs.within(budget, job.target.threads), total_s=total_s)
        interpreter = plugins.interpreter_of(job.backend)
        with (
            context.worker(job.id, needs) as here,
            context.worker(job.id, replace(needs, interpreter=interpreter)) as there,
        ):
            # Where a backend has a toolchain of its own, graphs are still lowered here: it holds the backend's packages only.
            worker = there if interpreter else here
            step = "lower"
            model = make(here) if make else lower(context, here, job, material.form(job), calibration)
            candidate, step = replace(candidate, portable=model), "compile"
            built = compile_job(context, worker, job, model, calibration)
            candidate = replace(
                candidate, artifact=built.artifact, compile_s=built.compile_s, cache={step: _state(built.cached)}
            )
            if candidate.elsewhere:
                return candidate
            step = "validate"
            proof = validate(context, worker, job, built.artifact, material.expected, validation, policy.data)
            return replace(candidate, verdict=proof.verdict, cache={**candidate.cache, step: _state(proof.cached)})
    except UsageError as refusal:
        return replace(candidate, refused=refusal.problem)
    except WorkerError as error:
        failure = Failure(kind=error.kind, step=step, problem=error.problem, detail=error.detail)
    except CompileStageError as error:
        failure = Failure(kind="exception", step=step, problem=str(error))
    return replace(candidate, failure=failure)


def _state(cached: bool) -> CacheState:
    return "hit" if cached else "miss"
