"""One candidate: lowered, compiled and validated in workers; and the candidates of a target, side by side.

A refusal, a crash, a time-out or too little memory is the candidate's state, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compile_stage.core import plugins
from compile_stage.core.baseline import refuse_baseline
from compile_stage.core.digest import tree_size
from compile_stage.core.errors import CompileStageError, StorageError, UsageError, WorkerError
from compile_stage.core.ports import Worker
from compile_stage.core.records import Artifact, CacheState, Candidate, Failure, Job, PortableModel, record
from compile_stage.core.records.candidate import NOT_STARTED
from compile_stage.measure import own_metric
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.job_workers import JobWorkers, NewWorkers, Pair, TrialWorkers, Workers
from compile_stage.pipeline.pruning import quick_comparison
from compile_stage.pipeline.time_left import in_order_of_promise
from compile_stage.steps.compile import compile_job
from compile_stage.steps.judge import judge_tolerances
from compile_stage.steps.lower import lower
from compile_stage.steps.validate import validate, validated_before

_JOB_BYTES, _JOB_COPIES = 1_000_000_000, 8
"""What a job's worker holds at most, as a rule: a compiler's packages, and the model so many times (int8 of ResNet-50
and of BERT: 7)."""

# Of a quick latency. A turn of ten calls tells enough, but a few microseconds more or less need twenty milliseconds.
_WARM_UP_S, _TURNS, _TURN_CALLS, _SHORTEST_TURN_S, _LONGEST_TURN_S = 0.5, 4, 10, 0.02, 0.1

Lower = Callable[[Worker], PortableModel]
"""Makes the graph that is compiled, in the worker that it is given."""


@dataclass(frozen=True)
class EvaluationOptions:
    """How far one evaluation goes.

    Attributes:
        lower: Makes the graph; None for the step `lower`.
        seconds: All of it ends after so long; None for the limits of each call alone.
        prune: One that a quick comparison finds far slower than the original is not validated, where that would take
            long.
        time_quickly: Take its quick latency too, in the worker that has it open.
        beside_others: Other jobs run at the same time.
        workers: That it may use after others; None for workers of its own.
        after_a_kill: Somebody killed its worker before, and it is evaluated once more.
    """

    lower: Lower | None = None
    seconds: float | None = None
    prune: bool = False
    time_quickly: bool = False
    beside_others: bool = False
    workers: Workers | None = None
    after_a_kill: bool = False


_TO_THE_END = EvaluationOptions()


@record
class Evaluation:
    """One candidate evaluated.

    Attributes:
        quick_latency_s: Seconds of a call, measured alone; None when it was not asked for or could not be measured.
    """

    candidate: Candidate
    quick_latency_s: float | None = None


def evaluate_all(
    target: TargetRun, jobs: Sequence[Job], *, prune: bool = False, meanwhile: Callable[[], None] = lambda: None
) -> list[Candidate]:
    """A candidate for each job of one target, in their order; as many jobs at once as the engine has room for, the most
    promising first.

    Args:
        meanwhile: What no job waits for. It begins before the last jobs, which run beside it, and has ended when they
            have.
    """
    context, left = target.context, target.time
    job_bytes = _JOB_BYTES + _JOB_COPIES * tree_size(Path(target.inputs.portable.path).parent)
    lanes = context.engine.max_parallel(job_bytes)
    several = min(lanes, len(jobs)) > 1
    workers = JobWorkers(target, jobs, room_bytes=lanes * job_bytes, beside_others=several)
    options = EvaluationOptions(prune=prune, beside_others=several, workers=workers)

    def evaluated(job: Job) -> Candidate:
        began = time.monotonic()
        candidate = evaluate(target, job, options).candidate
        if candidate.failure is None or candidate.failure.step != NOT_STARTED:
            left.ended(job, time.monotonic() - began, passed=candidate.has_passed)
        return candidate

    with closing(workers), ThreadPoolExecutor(max_workers=lanes, thread_name_prefix="job") as pool:
        ordered = in_order_of_promise(jobs)
        first, beside = ordered[:-lanes], ordered[-lanes:]
        futures = {job.id: pool.submit(evaluated, job) for job in first}
        done = pool.submit(meanwhile)
        futures |= {job.id: pool.submit(evaluated, job) for job in beside}
        try:
            candidates = [futures[job.id].result() for job in jobs]
            done.result()
            return candidates
        except BaseException:
            for future in futures.values():
                future.cancel()
            done.cancel()
            own_metric.stop_waiting()
            context.cache.stop_waiting()
            context.engine.close()  # ends the workers, so that the threads that wait for them end too
            raise


def evaluate(target: TargetRun, job: Job, options: EvaluationOptions = _TO_THE_END) -> Evaluation:
    """Take one job as far as it goes."""
    if (late := target.time.refuse(job)) is not None:
        return Evaluation(candidate=Candidate(job=job).failed(late))
    if (known := target.context.failed.get(job.id)) is not None:
        return Evaluation(candidate=Candidate(job=job).failed(known))
    bound_s, began = target.time.bound_s() if options.seconds is None else None, time.monotonic()
    bound = options if bound_s is None else replace(options, seconds=bound_s, workers=None)
    steps = _Steps(target, job, bound)
    try:
        quick_latency_s = steps.run()
        return Evaluation(candidate=steps.candidate, quick_latency_s=quick_latency_s)
    except UsageError as refusal:
        return Evaluation(candidate=steps.candidate.in_state("refused", refusal.problem))
    except WorkerError as error:
        if steps.follows_another and error.kind in ("crash", "out_of_memory"):  # which may have left something behind
            return evaluate(target, job, replace(options, workers=None))
        if error.killed and not options.after_a_kill:  # by somebody else: a slower one would win, and be promoted
            return evaluate(target, job, replace(options, workers=None, after_a_kill=True))
        failure = Failure(kind=error.kind, step=steps.current, problem=error.problem, detail=error.detail)
        failure = target.time.cut(failure, bound_s, time.monotonic() - began)
    except StorageError:  # a full disk, or files that are gone: no candidate is to blame for the machine's trouble
        raise
    except CompileStageError as error:
        failure = Failure(kind="exception", step=steps.current, problem=str(error))
    return Evaluation(candidate=steps.candidate.failed(failure))


class _Steps:
    """The steps of one evaluation.

    Attributes:
        candidate: What is known so far.
        current: The step that is running.
        follows_another: Its workers were another job's before.
    """

    def __init__(self, target: TargetRun, job: Job, options: EvaluationOptions) -> None:
        self._target, self._job, self._options = target, job, options
        self.candidate = Candidate(job=job)
        self.current = "lower"
        self.follows_another = False

    def run(self) -> float | None:
        """All steps, as far as they apply; the quick latency where it was asked for."""
        options = self._options
        new = NewWorkers(self._target, seconds=options.seconds, beside_others=options.beside_others)
        with (options.workers or new).opened(self._job) as pair:
            self.follows_another, worker = pair.used, pair.runs
            artifact = self._compile(worker, self._lower(pair.lowers))
            if why := self.candidate.not_runnable_here:
                reason = f"compiled, not validated: it can't be run on this machine: {why}"
                self.candidate = self.candidate.in_state("compiled_not_validated", reason)
                return None
            no_baseline = refuse_baseline(self._target.inputs.source.flavor, self._job.target)
            if no_baseline is not None:
                raise UsageError(no_baseline)  # of a backend that cross-compiles, only now is known that this runs here
            self.current = "validate"
            if options.prune and self._pruned(worker, artifact):
                return None
            self._validate(worker, artifact)
            # It was validated: that it can't be timed alone does not change its verdict.
            return quick_latency(self._target, self.candidate, nullcontext(pair)) if options.time_quickly else None

    def _lower(self, here: Worker) -> PortableModel:
        target, job, inputs = self._target, self._job, self._target.inputs
        make = self._options.lower
        model = make(here) if make else lower(target.context, here, job, inputs.model_for(job), inputs.calibration)
        self.candidate, self.current = replace(self.candidate, portable=model), "compile"
        return model

    def _compile(self, worker: Worker, model: PortableModel) -> Artifact:
        compiled = compile_job(self._target.context, worker, self._job, model, self._target.inputs.calibration)
        self.candidate = replace(
            self.candidate,
            artifact=compiled.artifact,
            compile_s=compiled.compile_s,
            cache={"compile": _cache_state(compiled.cached)},
        )
        return compiled.artifact

    def _pruned(self, worker: Worker, artifact: Artifact) -> bool:
        validation = self._target.inputs.validation_set(self._target.run_policy.waivers)
        if validated_before(self._target.context, self._job, artifact, validation):
            return False
        measurement = quick_comparison(self._target, worker, self._job, artifact)
        if measurement is None:
            return False
        self.candidate = replace(self.candidate, measurement=measurement).in_state("pruned", measurement.stopped_early)
        return True

    def _validate(self, worker: Worker, artifact: Artifact) -> None:
        context, waivers = self._target.context, self._target.run_policy.waivers
        of_call_s, of_all_s = self._target.run_policy.budget.job_minutes * 60, self._options.seconds
        with own_metric.allowed(of_call_s if of_all_s is None else min(of_call_s, of_all_s)):
            validated = validate(context, worker, self._job, artifact, self._target.inputs.validation_set(waivers))
        candidate = replace(
            self.candidate,
            cache={**self.candidate.cache, "validate": _cache_state(validated.cached)},
            errors=validated.errors,
        )
        self.candidate = judge_tolerances(candidate, validated.verdict.checks, waivers, context.today)


def compile_candidate(target: TargetRun, job: Job) -> Artifact:
    """What a job compiles, without a look at its answers. Raises what its steps raise."""
    with NewWorkers(target).opened(job) as pair:
        inputs = target.inputs
        model = lower(target.context, pair.lowers, job, inputs.model_for(job), inputs.calibration)
        return compile_job(target.context, pair.runs, job, model, inputs.calibration).artifact


def fastest(target: TargetRun, candidates: Sequence[Candidate], seconds: float) -> tuple[Candidate, float] | None:
    """The candidate with the lowest quick latency, and that latency in seconds; None when none could be measured.

    Args:
        seconds: A hard limit of all of it.
    """
    ends, latencies = time.monotonic() + seconds, dict[str, float]()
    for backend in dict.fromkeys(candidate.job.backend for candidate in candidates):
        with closing(TrialWorkers(target, ends)) as workers:
            for candidate in candidates:
                if candidate.job.backend != backend or time.monotonic() >= ends:
                    continue
                if (latency_s := quick_latency(target, candidate, workers.opened(candidate.job))) is not None:
                    latencies[candidate.job.id] = latency_s
    timed = [candidate for candidate in candidates if candidate.job.id in latencies]
    best = min(timed, key=lambda candidate: latencies[candidate.job.id], default=None)
    return (best, latencies[best.job.id]) if best is not None else None


def quick_latency(target: TargetRun, candidate: Candidate, workers: AbstractContextManager[Pair]) -> float | None:
    """Seconds of a call at the target's first batch size: the lowest of the medians of four turns of 0.02 to 0.1 s, one
    after the other, after the warm-up. Not interleaved: it guides the searches, and no claim is made from it. None
    where it was not compiled, or could not be measured.

    Args:
        workers: Entered only where it is not in the cache.
    """
    with suppress(CompileStageError):
        return _time_quickly(target, candidate.job, candidate.artifact, workers) if candidate.artifact else None
    return None


def _time_quickly(target: TargetRun, job: Job, artifact: Artifact, workers: AbstractContextManager[Pair]) -> float:
    context, samples, batch_size = target.context, target.inputs.validation, job.target.batch_sizes[0]
    key = {
        "artifact": [artifact.digest, artifact.options, artifact.toolchain],
        "backend": job.backend,
        "made_by": plugins.cache_identity("backends", job.backend),
        "samples": samples.digest,
        "batch_size": batch_size,
        "threads": job.target.threads,
        "hardware": context.hardware,
    }

    def measure(_: Path) -> float:
        with workers as pair, context.alone():
            worker = pair.runs
            worker.call("open_artifact", artifact=artifact, threads=job.target.threads)
            warmed = worker.call("warm_up", samples=samples, batch_size=batch_size, seconds=_WARM_UP_S)
            turn_s = min(max(_TURN_CALLS * warmed["latency_s"], _SHORTEST_TURN_S), _LONGEST_TURN_S)
            seconds = _TURNS * max(turn_s, warmed["latency_s"])
            calls = worker.call("quick_turn", samples=samples, batch_size=batch_size, seconds=seconds)
            worker.call("close_model")
        turns = np.array_split(np.array(calls), min(_TURNS, len(calls)))
        return min(float(np.median(turn)) for turn in turns)  # of the least disturbed turn

    return float(context.cached("quick_latency/4", job.id, key, measure, anew=context.remeasure).value)


def _cache_state(cached: bool) -> CacheState:
    return "hit" if cached else "miss"
