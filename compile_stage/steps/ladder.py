"""The steps from the original to the best that was found: which settings may be tried, what each is worth, and what each gained.

Here is the pure part; `compile_stage.pipeline.option_tuning` makes and measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.records import (
    Candidate,
    Job,
    JsonMap,
    Measurement,
    OptimizationStep,
    Policy,
    Scheme,
    Selection,
    Target,
    TargetPolicy,
    Timing,
    TuningOption,
    record,
)
from compile_stage.measure import stats
from compile_stage.measure.memory import SAME_MEMORY

KINDS = ("memory", "tuning")
"""In this order: settings for speed are judged on the memory layout that they will run with."""

_IN_IDS = {"memory": "memory", "tuning": "tuned"}


@record
class Climb:
    """What was tried on a target's ladder, before everything is measured together.

    Attributes:
        stand: Job id of the candidate that the rungs were tried on; empty when there was none.
        why: Why that one.
        steps: One for each rung, in order.
        reason: Why there was none to stand on, or nothing to try; empty when there was.
    """

    stand: str = ""
    why: str = ""
    steps: tuple[OptimizationStep, ...] = ()
    reason: str = ""


def rungs_of(backend: str, target: Target, scheme: Scheme) -> list[TuningOption]:
    """What the backend offers to try, memory first; nothing for one that knows of no rungs."""
    plugin = plugins.load("backends", backend)
    offered = plugin.tuning_options(target, scheme) if plugin.capabilities_for(target).offers_tuning_options else ()
    return sorted(offered, key=lambda rung: KINDS.index(rung.kind))


def refuse_rung(rung: TuningOption, job: Job) -> str | None:
    """The reason why it can't be laid over a job's options: they say already what it would set, and what a policy says holds."""
    asked = job.target.options.get(job.backend, {})
    stated = sorted(key for key in _paths(rung.options) if key in _paths(asked))
    return f"not tried: {', '.join(stated)} is set already" if stated else None


def climbed_job(job: Job, rung: TuningOption) -> Job:
    """The job with the rung laid over its options: `...--int8-u8--memory-no-arena`, in tables `int8-u8+no-arena`."""
    asked = job.target.options.get(job.backend, {})
    options = {**job.target.options, job.backend: _laid_over(asked, rung.options)}
    return replace(
        job,
        id=f"{job.id}--{_IN_IDS[rung.kind]}-{rung.name}",
        target=replace(job.target, options=options),
        scheme=replace(job.scheme, name=f"{job.scheme.name}+{rung.name}"),
        tuning_options=(*job.tuning_options, rung.name),
    )


def weigh(own: Measurement, before: Measurement, policy: TargetPolicy) -> tuple[bool, str]:
    """Is a rung better than what is below it, and a sentence. Both were measured in turns, `before` being the baseline of `own`.

    Better is faster by more than can be noise, or as fast within the resolution of a ratio with less memory. A policy that prefers
    memory takes less memory at any latency that its gates allow, and speed only where it costs none.
    """
    size = policy.target.batch_sizes[0]
    timing, below = own.timing(size), before.timing(size)
    if timing is None or below is None or timing.speedup is None:
        return False, "dropped: it was not measured"
    faster = timing.speedup > 1 and not stats.tied(timing, below)
    as_fast = math.log(timing.speedup) >= -math.log1p(stats.RESOLUTION)
    less = own.peak_memory_bytes * SAME_MEMORY < before.peak_memory_bytes
    more = own.peak_memory_bytes > before.peak_memory_bytes * SAME_MEMORY
    kept = (less or (faster and not more)) if policy.prefer == "memory" else (faster or (less and as_fast))
    low, high = timing.speedup_interval or (timing.speedup, timing.speedup)
    memory = f"{own.peak_memory_bytes / 1e6:.4g} MB of memory instead of {before.peak_memory_bytes / 1e6:.4g} MB"
    said = f"{timing.speedup:.3f} times as fast as the step before ({low:.3f} to {high:.3f}), {memory}"
    return kept, f"{'kept' if kept else 'dropped'}: {said}"


def lay_out(
    climb: Climb,
    candidates: Sequence[Candidate],
    selection: Selection,
    baseline: Measurement | None,
    policy: TargetPolicy,
) -> tuple[OptimizationStep, ...]:
    """The whole ladder, from the original upwards, with what each climbed step gained over the one before.

    Args:
        candidates: All that were measured together, those of the ladder among them.
    """
    original = OptimizationStep(
        kind="original",
        name="",
        accepted=baseline is not None,
        reason="" if baseline is not None else "not measured: no candidate passed every tolerance",
    )
    by_id = {candidate.job.id: candidate for candidate in candidates}
    stand = by_id.get(climb.stand)
    if stand is None:
        return original, OptimizationStep(kind="graph", name="", accepted=False, reason=climb.reason)
    steps = [original, *_lower_steps(stand, climb.why, candidates), *climb.steps]
    if climb.reason:
        steps.append(OptimizationStep(kind="memory", name="", accepted=False, reason=climb.reason))
    size, before, made = policy.target.batch_sizes[0], _timing(baseline, policy.target.batch_sizes[0]), []
    for step in steps:
        own = by_id.get(step.job_id) if step.accepted else None
        timing = _timing(own.measurement, size) if own is not None and not own.pruned else None
        if not step.job_id or not step.accepted:
            made.append(step)
        elif timing is None:  # it was kept, and did not live through the measurement, or missed its tolerance
            made.append(replace(step, accepted=False, reason=selection.reasons.get(step.job_id, "it was not measured")))
        else:
            made.append(_gained(step, timing, before))
            before = timing
    return tuple(made)


def _lower_steps(stand: Candidate, chosen: str, candidates: Sequence[Candidate]) -> list[OptimizationStep]:
    """What the compiler makes of the graph in fp32, then the precision that the rungs stand on."""
    backend, scheme = stand.job.backend, stand.job.scheme
    plain = next((c.job for c in candidates if c.job.backend == backend and c.job.scheme.precision == "fp32"), None)
    said = f"compiled by {backend}, in fp32"
    if plain is None:
        graph = OptimizationStep(
            kind="graph", name="fp32", accepted=False, reason=f"the policy has no fp32 of {backend}"
        )
    else:
        graph = OptimizationStep(kind="graph", name=plain.scheme.name, job_id=plain.id, reason=said)
    if scheme.precision == "fp32":
        lower = any(c.job.scheme.precision != "fp32" for c in candidates)
        why = f"the ladder stands on fp32: {chosen}" if lower else "the policy asks for no other precision"
        return [graph, OptimizationStep(kind="precision", name="", accepted=False, reason=why)]
    why = f"{chosen}; {stand.note}" if stand.note else chosen
    return [graph, OptimizationStep(kind="precision", name=scheme.name, job_id=stand.job.id, reason=why)]


def _gained(step: OptimizationStep, own: Timing, before: Timing | None) -> OptimizationStep:
    """The step with its speed-up over the one before, where both played the same rounds."""
    if before is None or not own.turns or len(own.turns) != len(before.turns):
        return step
    ratio = stats.ratio_interval(stats.by_round(before), stats.by_round(own), seed=0)
    return replace(step, speedup=ratio.value, speedup_interval=(ratio.low, ratio.high))


def _timing(measurement: Measurement | None, batch_size: int) -> Timing | None:
    return measurement.timing(batch_size) if measurement is not None else None


# ------------------------------------------------------------------------------------------------------------- options


def announce(policy: Policy, jobs: Sequence[Job]) -> Iterator[str]:
    """What a ladder may try beyond the jobs: which job it stands on is known when they are proven."""
    for target in (target_policy.target for target_policy in policy.targets if target_policy.ladder):
        offered: dict[str, None] = {}
        for job in jobs:
            if job.target.name == target.name and (rungs := rungs_of(job.backend, job.target, job.scheme)):
                offered[f"{job.backend}: {', '.join(f'{rung.kind} {rung.name}' for rung in rungs)}"] = None
        found = "; ".join(offered) or "none of its backends has any"
        yield f"ladder of {target.name}: on top of the fastest that passes, its backend's settings are tried one by one ({found})"


def job_of_rungs(jobs: Sequence[Job], job_id: str) -> Job | None:
    """The job that an id like `...--int8-u8--memory-no-arena--tuned-static` names: one of `jobs` with those of its backend's rungs laid over it; None when there is none."""
    for job in jobs:
        climbed, rest = job, job_id.removeprefix(job.id)
        rungs = rungs_of(job.backend, job.target, job.scheme) if rest != job_id else []
        while rest:
            fits = [rung for rung in rungs if f"{rest}--".startswith(f"--{_IN_IDS[rung.kind]}-{rung.name}--")]
            if not fits:
                break
            rest = rest.removeprefix(f"--{_IN_IDS[fits[0].kind]}-{fits[0].name}")
            climbed = climbed_job(climbed, fits[0])
        if not rest and climbed is not job:
            return climbed
    return None


def _laid_over(asked: JsonMap, more: JsonMap) -> dict[str, Any]:
    """Maps merge, all else replaces."""
    merged = dict(asked)
    for key, value in more.items():
        here = merged.get(key)
        merged[key] = _laid_over(here, value) if isinstance(here, Mapping) and isinstance(value, Mapping) else value
    return merged


def _paths(options: JsonMap) -> set[str]:
    """The names of all that is set: of a map's entries, not of the map."""
    found: set[str] = set()
    for key, value in options.items():
        found |= _paths(value) if isinstance(value, Mapping) else {key}
    return found
