"""A compiled candidate → a first look: is it so slow that its proof need not be paid for?

A call or two, beside whatever else runs, tell nothing for certain: others make a call longer, never shorter. So they only raise the suspicion. What is
suspected is measured in turns with the original, in fresh processes, alone on the machine. And a drop changes no winner: who might win
after all is proven after all (`hasty`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Artifact,
    Candidate,
    Job,
    Measurement,
    SampleSet,
    SourceModel,
    TargetPolicy,
    Waiver,
)
from compile_stage.measure import stats
from compile_stage.measure.timing import HOPELESS

WORTH_S = 30.0
"""A proof that takes less than so many seconds is made: the look costs about ten, most of them to load the original once more."""


def first_look(
    context: Context,
    worker: Worker,
    job: Job,
    artifact: Artifact,
    source: SourceModel,
    samples: SampleSet,
    sample_s: float,
    race: Callable[[], Measurement | None],
) -> Measurement | None:
    """What was measured of a candidate that is dropped before its proof, with the reason; None for one that is to be proven.

    Args:
        worker: The one that will validate it.
        sample_s: Seconds that the original takes for a sample, roughly.
        race: Measures it in turns with the original, for a first pair of rounds at the target's first batch size.

    Raises:
        WorkerError: It crashed, ran out of memory or took too long, and the worker is gone. Whatever else goes wrong is for the proof to say.
    """
    key = {
        "artifact": [artifact.digest, artifact.options, artifact.toolchain],
        "backend": job.backend,
        "made_by": plugins.made_by("backends", job.backend),
        "source": source.identity,
        "samples": samples.digest,
        "target": job.target,
        "hardware": context.hardware,
    }
    batch_size, calls_wanted = job.target.batch_sizes[0], samples.count * len(job.target.batch_sizes)

    def proof_s(call_s: float) -> float:
        return call_s / batch_size * calls_wanted

    def make(_: Path) -> Measurement | None:
        call_s = _one_call(worker, artifact, job.target.threads, samples, batch_size)
        if call_s is None or call_s < HOPELESS * sample_s * batch_size or proof_s(call_s) < WORTH_S:
            return None
        try:
            found = race()
        except CompileStageError:  # it could not be measured, which is no reason to drop it
            return None
        if found is None or not found.stopped_early or (lasts := proof_s(_quickest(found))) < WORTH_S:
            return None
        lasting = f"{lasts / 60:.2g} minutes" if lasts >= 60 else f"{lasts:.2g} seconds"
        why = f"{found.stopped_early}, so it was not proven, which would have taken about {lasting}"
        return replace(found, stopped_early=f"{why}; a policy that names {job.backend} has it proven")

    value = context.cached("look/1", job.id, key, make).value
    return None if value is None else revive(Measurement, value)


def hasty(
    candidates: Sequence[Candidate], policy: TargetPolicy, waivers: Sequence[Waiver], winner: Candidate | None
) -> list[Candidate]:
    """Of those that were dropped before their proof the ones that might be wanted after all.

    Beside a winner these are the ones that are not hopelessly behind it; without one, all that are not hopelessly behind the policy's limit on speed too.
    """
    dropped = [(c, c.measurement) for c in candidates if c.pruned and c.measurement is not None]
    size = policy.target.batch_sizes[0]
    if winner is not None and winner.measurement is not None:
        timing = winner.measurement.timing(size)
        best = stats.median(timing.latency_s) if timing is not None else 0.0
        return [c for c, measured in dropped if _quickest(measured) < HOPELESS * best]
    waived = any(waiver.gate == "speedup" and waiver.target == policy.target.name for waiver in waivers)
    limit = 0.0 if waived else max((gate.limit for gate in policy.performance if gate.metric == "speedup"), default=0.0)
    return [c for c, measured in dropped if _speedup(measured, size) * HOPELESS > limit]


def _one_call(worker: Worker, artifact: Artifact, threads: int, samples: SampleSet, batch_size: int) -> float | None:
    """Seconds of its second call or so; None when it could not be made."""
    try:
        worker.call("open_artifact", artifact=artifact, threads=threads)
        turn: list[float] = worker.call("time_turn", samples=samples, batch_size=batch_size, seconds=0.0)
    except WorkerError as error:
        if error.kind != "exception":
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
