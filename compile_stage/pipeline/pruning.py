"""Candidates that are dropped before a long validation, because they are far slower than the original, and validated
after all when they turn out to matter.

One call or two, beside whatever else runs, prove nothing: other work makes a call longer, never shorter. So a slow call
only raises a suspicion; then candidate and original are measured in turns, in fresh processes, alone on the machine.
Pruning changes no winner: whoever might still win is validated (`to_validate`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.ports import Worker
from compile_stage.core.records import Artifact, Candidate, Job, Measurement, SampleSet, TargetPolicy, Waiver
from compile_stage.measure import stats
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.timing import FAR_SLOWER
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.steps.benchmark import benchmark

WORTH_S = 30.0
"""A validation that takes less than so many seconds is always made: the comparison costs about ten, most of them to
load the original once more."""


def quick_comparison(target: TargetRun, worker: Worker, job: Job, artifact: Artifact) -> Measurement | None:
    """What was measured of a candidate that is pruned, with the reason; None for one that is to be validated.

    Args:
        worker: The one that will validate it.

    Raises:
        WorkerError: It crashed, ran out of memory or took too long, and the worker is gone. Whatever else goes wrong is
            for the validation to say.
    """
    context, inputs = target.context, target.inputs
    key = {
        "artifact": [artifact.digest, artifact.options, artifact.toolchain],
        "backend": job.backend,
        "made_by": plugins.cache_identity("backends", job.backend),
        "source": inputs.source.identity,
        # The original is what it is slower than.
        "source_made_by": plugins.cache_identity("sources", inputs.source.flavor),
        "samples": inputs.validation.digest,
        "target": job.target,
        "hardware": context.hardware,
    }

    def compare(_: Path) -> Measurement | None:
        return _compare(target, worker, job, artifact)

    try:
        value = context.cached("look/1", job.id, key, compare, anew=context.remeasure).value
    except WorkerError as error:
        if error.worker_is_gone:
            raise
        return None
    except CompileStageError:  # it could not be measured, which is no reason to prune it
        return None
    return None if value is None else revive(Measurement, value)


def _compare(target: TargetRun, worker: Worker, job: Job, artifact: Artifact) -> Measurement | None:
    samples, sample_s = target.inputs.validation, target.inputs.reference.sample_s
    batch_size, calls = job.target.batch_sizes[0], samples.count * len(job.target.batch_sizes)

    def validation_s(call_s: float) -> float:
        return call_s / batch_size * calls

    call_s = _one_call(worker, artifact, job.target.threads, samples, batch_size)
    if call_s is None or call_s < FAR_SLOWER * sample_s * batch_size or validation_s(call_s) < WORTH_S:
        return None
    measurement = _measure_beside_original(target, job, artifact)
    if measurement is None or not measurement.stopped_early:
        return None
    if (lasts_s := validation_s(_quickest(measurement))) < WORTH_S:
        return None
    lasting = f"{lasts_s / 60:.2g} minutes" if lasts_s >= 60 else f"{lasts_s:.2g} seconds"
    why = f"{measurement.stopped_early}, so it was not validated, which would have taken about {lasting}"
    return replace(measurement, stopped_early=f"{why}; to have it validated, list the backends by name instead of auto")


def _measure_beside_original(target: TargetRun, job: Job, artifact: Artifact) -> Measurement | None:
    """A first pair of rounds in turns with the original, at the target's first batch size."""
    policy, inputs = target.run_policy, target.inputs
    request = MeasurementRequest(
        label=job.id,
        samples=inputs.validation,
        target=replace(job.target, batch_sizes=job.target.batch_sizes[:1]),
        budget=policy.budget,
        seed=policy.data.seed,
        first_look=True,
    )
    measured = benchmark(target.context, inputs.source, {job.id: artifact}, request)
    return measured.measurements.get(job.id)


def to_validate(
    candidates: Sequence[Candidate], policy: TargetPolicy, waivers: Sequence[Waiver], winner: Candidate | None
) -> list[Candidate]:
    """Of the pruned candidates those that might be wanted after all.

    Beside a winner these are the ones that are not far slower than it; without one, all that are not far below the
    policy's limit on speed too.
    """
    pruned = [(c, c.measurement) for c in candidates if c.verdict is None and c.state == "pruned" and c.measurement]
    size = policy.target.batch_sizes[0]
    if winner is not None:
        return [c for c, measurement in pruned if _quickest(measurement) < FAR_SLOWER * _latency_s(winner, size)]
    return [c for c, measurement in pruned if _speedup(measurement, size) * FAR_SLOWER > _limit(policy, waivers)]


def dropped_too_soon(
    candidates: Sequence[Candidate], policy: TargetPolicy, waivers: Sequence[Waiver], winner: Candidate | None
) -> list[Candidate]:
    """Of the validated candidates that were dropped behind one that is far faster: those that may win, since that one
    did not. Beside the one that they were dropped behind they are slower by `FAR_SLOWER`, so half of it tells."""
    dropped = [
        (c, c.measurement) for c in candidates if c.verdict is not None and c.state == "pruned" and c.measurement
    ]
    size = policy.target.batch_sizes[0]
    if winner is not None:
        return [c for c, _ in dropped if _latency_s(c, size) < FAR_SLOWER / 2 * _latency_s(winner, size)]
    return [c for c, measurement in dropped if _speedup(measurement, size) * FAR_SLOWER > _limit(policy, waivers)]


def _limit(policy: TargetPolicy, waivers: Sequence[Waiver]) -> float:
    """The least speedup that the policy asks for; 0 where that is waived."""
    if any(waiver.gate == "speedup" and waiver.target == policy.target.name for waiver in waivers):
        return 0.0
    return max((gate.limit for gate in policy.performance if gate.metric == "speedup"), default=0.0)


def _latency_s(candidate: Candidate, batch_size: int) -> float:
    """Its median; 0 where it has none."""
    timing = candidate.measurement.timing(batch_size) if candidate.measurement is not None else None
    return stats.median(timing.latency_s) if timing is not None else 0.0


def _one_call(worker: Worker, artifact: Artifact, threads: int, samples: SampleSet, batch_size: int) -> float | None:
    """Seconds of its second call or so; None when it could not be made."""
    try:
        worker.call("open_artifact", artifact=artifact, threads=threads)
        turn: list[float] = worker.call("quick_turn", samples=samples, batch_size=batch_size, seconds=0.0)
    except WorkerError as error:
        if error.worker_is_gone:
            raise
        return None
    except CompileStageError:
        return None
    return min(turn)


def _quickest(measurement: Measurement) -> float:
    return min(latency for timing in measurement.timings for latency in timing.latency_s)


def _speedup(measurement: Measurement, batch_size: int) -> float:
    timing = measurement.timing(batch_size)
    return timing.speedup if timing is not None and timing.speedup is not None else math.inf
