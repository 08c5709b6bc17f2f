"""A backend's tuning options: which may be tried on a job, what the tuned job is called, and when an option is
better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.records import Job, JsonMap, Measurement, Policy, Scheme, Target, TargetPolicy, TuningOption
from compile_stage.measure import speedups
from compile_stage.measure.memory import SAME_MEMORY

KINDS = ("memory", "tuning")
"""In this order: settings for speed are judged on the memory layout that they will run with."""

_IN_IDS = {"memory": "memory", "tuning": "tuned"}


def options_of(backend: str, target: Target, scheme: Scheme) -> list[TuningOption]:
    """What the backend offers to try, memory first; empty for one that offers nothing."""
    plugin = plugins.load("backends", backend)
    offered = plugin.tuning_options(target, scheme) if plugin.capabilities_for(target).offers_tuning_options else ()
    return sorted(offered, key=lambda option: KINDS.index(option.kind))


def refuse_option(option: TuningOption, job: Job) -> str | None:
    """The reason why it can't be laid over a job's options: the policy, or an option that was accepted before, sets the
    same."""
    asked = job.target.options.get(job.backend, {})
    stated = sorted(key for key in option_paths(option.options) if key in option_paths(asked))
    return f"not tried: already set by the policy or by an accepted option: {', '.join(stated)}" if stated else None


def tuned_job(job: Job, option: TuningOption) -> Job:
    """The job with the option laid over its own: `...--int8-u8--memory-no-arena`, in tables `int8-u8+no-arena`."""
    asked = job.target.options.get(job.backend, {})
    options = {**job.target.options, job.backend: laid_over(asked, option.options)}
    return replace(
        job,
        id=f"{job.id}--{_IN_IDS[option.kind]}-{option.name}",
        target=replace(job.target, options=options),
        scheme=replace(job.scheme, name=f"{job.scheme.name}+{option.name}"),
        tuning_options=(*job.tuning_options, option.name),
    )


def find_tuned_job(jobs: Sequence[Job], job_id: str) -> Job | None:
    """The job that an id like `...--int8-u8--memory-no-arena--tuned-static` names: one of `jobs` with its backend's
    options laid over it; None when there is none."""
    for job in jobs:
        tuned, rest = job, job_id.removeprefix(job.id)
        offered = options_of(job.backend, job.target, job.scheme) if rest != job_id else []
        while rest:
            fits = [option for option in offered if f"{rest}--".startswith(f"--{_IN_IDS[option.kind]}-{option.name}--")]
            if not fits:
                break
            rest = rest.removeprefix(f"--{_IN_IDS[fits[0].kind]}-{fits[0].name}")
            tuned = tuned_job(tuned, fits[0])
        if not rest and tuned is not job:
            return tuned
    return None


def is_better(own: Measurement, before: Measurement, policy: TargetPolicy) -> tuple[bool, str]:
    """Is an option better than what it is laid over, and a sentence. Both were measured in turns, `before` being the
    baseline of `own`.

    Better is faster by more than can be noise, or with less memory and not shown to be slower by more than a ratio is
    resolved to. A policy that prefers memory takes less memory at any latency that its gates allow, and speed only
    where it costs none.
    """
    size = policy.target.batch_sizes[0]
    timing, below = own.timing(size), before.timing(size)
    if timing is None or below is None or timing.speedup is None:
        return False, "rejected: it was not measured"
    low, high = timing.speedup_interval or (timing.speedup, timing.speedup)
    faster = timing.speedup > 1 and not speedups.tied(timing, below)
    # That it is slower by more than a ratio is resolved to is not shown.
    as_fast = high * (1 + speedups.RESOLUTION) >= 1
    less = own.peak_memory_bytes * SAME_MEMORY < before.peak_memory_bytes
    more = own.peak_memory_bytes > before.peak_memory_bytes * SAME_MEMORY
    kept = (less or (faster and not more)) if policy.prefer == "memory" else (faster or (less and as_fast))
    memory = f"{own.peak_memory_bytes / 1e6:.4g} MB of memory instead of {before.peak_memory_bytes / 1e6:.4g} MB"
    compared = f"{timing.speedup:.3f} times as fast as the step before ({low:.3f} to {high:.3f}), {memory}"
    return kept, f"{'accepted' if kept else 'rejected'}: {compared}"


def announce(policy: Policy, jobs: Sequence[Job]) -> Iterator[str]:
    """A note for each target that tunes options: what may be tried beyond the jobs. On which job is known when they are
    validated."""
    for target in (target_policy.target for target_policy in policy.targets if target_policy.ladder):
        offered: dict[str, None] = {}
        for job in jobs:
            if job.target.name == target.name and (options := options_of(job.backend, job.target, job.scheme)):
                names = ", ".join(f"{option.kind} {option.name}" for option in options)
                offered[f"{job.backend}: {names}"] = None
        listed = "; ".join(offered) or "none of its backends offers any"
        yield (
            f"option tuning of {target.name}: on top of the fastest candidate that passes, its backend's options are "
            f"tried ({listed})"
        )


def laid_over(asked: JsonMap, more: JsonMap) -> dict[str, Any]:
    """Options with others laid over them: maps merge, all else replaces."""
    merged = dict(asked)
    for key, value in more.items():
        here = merged.get(key)
        merged[key] = laid_over(here, value) if isinstance(here, Mapping) and isinstance(value, Mapping) else value
    return merged


def option_paths(options: JsonMap) -> set[str]:
    """The names of all that is set: of a map's entries, not of the map."""
    names: set[str] = set()
    for key, value in options.items():
        names |= option_paths(value) if isinstance(value, Mapping) else {key}
    return names
