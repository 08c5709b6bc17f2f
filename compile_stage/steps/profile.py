"""An original or an artifact → what its runtime's own profiler says of it.

Nothing depends on it: a profiler that fails is a reason why there is no profile, whatever it fails with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, StorageError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Artifact, Budget, Profile, Profiled, SampleSet, SourceModel, Target
from compile_stage.core.records.profile import MOST_LISTED, MOST_OPERATORS

BASELINE = "baseline"
"""The name of the original's profile."""

_TIMEOUT_S = 120.0
_TRACE, _TRACE_BYTES = "trace.json", 4_000_000


def profile_original(
    context: Context, worker: Worker, source: SourceModel, samples: SampleSet, target: Target, framework: str
) -> Profiled:
    """The original's profile, on the first batch size of the target.

    Args:
        worker: The one that holds the original.
        framework: Of the original, for people.
    """
    if not plugins.load("sources", source.flavor).capabilities.profiler:
        return Profiled(name=BASELINE, runtime=framework, reason=_none(framework))
    key = {
        "source": source.identity,
        "made_by": plugins.cache_identity("sources", source.flavor),
        **_key(context, samples, target),
    }

    def call(into: Path) -> Any:
        return worker.call("profile_source", source=source, target=target, samples=samples, into=str(into))

    return _profiled(context, Profiled(name=BASELINE, runtime=framework), key, call)


def profile_artifact(
    context: Context, artifact: Artifact, samples: SampleSet, target: Target, budget: Budget
) -> Profiled:
    """An artifact's profile, as `profile_original`, in a worker of its own."""
    if not plugins.load("backends", artifact.backend).capabilities.profiler:
        return Profiled(name=artifact.job_id, runtime=artifact.backend, reason=_none(artifact.backend))
    key = {
        "artifact": [artifact.digest, artifact.options, artifact.toolchain],
        "backend": artifact.backend,
        "made_by": plugins.cache_identity("backends", artifact.backend),
        **_key(context, samples, target),
    }
    limits = WorkerLimits.within(budget, target.threads, plugins.interpreter_of(artifact.backend))
    limits = replace(limits, timeout_s=min(limits.timeout_s, _TIMEOUT_S))

    def call(into: Path) -> Any:
        with context.worker(f"{artifact.job_id}--profile", limits) as worker:
            return worker.call("profile_artifact", artifact=artifact, target=target, samples=samples, into=str(into))

    return _profiled(context, Profiled(name=artifact.job_id, runtime=artifact.backend), key, call)


def _none(runtime: str) -> str:
    return f"{runtime} has no profiler that is read here"


def _key(context: Context, samples: SampleSet, target: Target) -> dict[str, Any]:
    return {
        "samples": samples.digest,
        "batch_size": target.batch_sizes[0],
        "threads": target.threads,
        "device": target.device,
        "hardware": context.hardware,
    }


def _profiled(context: Context, of: Profiled, key: Mapping[str, Any], call: Callable[[Path], Any]) -> Profiled:
    def make(into: Path) -> Any:
        with context.alone():  # what else runs would show as slow kernels
            return call(into)

    try:
        stored = context.cached("profile/3", of.name, key, make, anew=context.remeasure)
        profile: Profile = revive(Profile, stored.value)
    except StorageError:
        raise
    except CompileStageError as error:
        return replace(of, reason=f"the profiler failed: {error.problem}")
    except (TypeError, ValueError) as error:  # a third party's answer
        return replace(of, reason=f"the profiler answered with something else than a profile: {error}")
    if not all(map(math.isfinite, _numbers(profile))):
        return replace(of, reason="the profiler answered with times that are no numbers")
    return replace(of, profile=_bounded(profile), trace=_trace(profile, Path(stored.path)))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name))


def _bounded(profile: Profile) -> Profile:
    """No longer than a report has room for, whoever wrote it."""
    lists = {
        name: listed[:MOST_LISTED]
        for name in ("fusions", "conversions", "folded")
        if (listed := getattr(profile, name)) is not None
    }
    return replace(profile, operators=profile.operators[:MOST_OPERATORS], **lists)


def _trace(profile: Profile, folder: Path) -> str:
    """The trace's file, where it is one that can be kept beside a report."""
    file = folder / _TRACE
    kept = profile.trace == _TRACE and file.is_file() and not file.is_symlink()
    return str(file) if kept and file.stat().st_size <= _TRACE_BYTES else ""
