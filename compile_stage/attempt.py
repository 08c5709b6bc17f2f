"""One job: lowered, compiled and validated in a worker of its own; and the jobs of a target, side by side.

Whatever happens there, a refusal, a crash or a time-out, becomes the job's result, and the other jobs go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from compile_stage.core.context import Context
from compile_stage.core.errors import CompileStageError, UsageError, WorkerError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import CacheState, Candidate, Failure, Job, Policy, PortableModel, SampleSet
from compile_stage.steps.compile import compile_job
from compile_stage.steps.lower import lower
from compile_stage.steps.validate import Reference, validate


def attempt_all(
    context: Context,
    policy: Policy,
    jobs: Sequence[Job],
    portable: PortableModel,
    samples: Mapping[str, SampleSet],
    expected: Reference,
) -> list[Candidate]:
    """A candidate for each job of one target; as many jobs at once as the machine has cores for the target's threads.

    Args:
        samples: By role: `validation`, and `calibration` where a job needs it.
        expected: What the original model answers for the validation samples.
    """
    lanes = max(1, context.hardware.cores // max(1, jobs[0].target.threads))
    with ThreadPoolExecutor(max_workers=lanes, thread_name_prefix="job") as pool:
        futures = [pool.submit(attempt, context, policy, job, portable, samples, expected) for job in jobs]
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
    portable: PortableModel,
    samples: Mapping[str, SampleSet],
    expected: Reference,
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
    validation, calibration = samples["validation"], samples.get("calibration")
    if context.events.elapsed_s > budget.minutes * 60:
        late = f"the policy's budget of {budget.minutes:g} minutes was used up before this job began"
        return replace(candidate, failure=Failure(kind="timeout", step=step, problem=late))
    try:
        with context.worker(job.id, replace(Needs.within(budget, job.target.threads), total_s=total_s)) as worker:
            step = "lower"
            model = make(worker) if make else lower(context, worker, job, portable, calibration)
            candidate, step = replace(candidate, portable=model), "compile"
            built = compile_job(context, worker, job, model, calibration)
            candidate = replace(
                candidate, artifact=built.artifact, compile_s=built.compile_s, cache={step: _state(built.cached)}
            )
            step = "validate"
            proof = validate(context, worker, job, built.artifact, expected, validation, policy.data)
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
