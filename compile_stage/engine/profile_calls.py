"""What a worker can do with the profilers of runtimes. `engine.calls` has the rest.

A plug-in's profiler opens a session of its own, so nothing of it is in the sessions that are validated and timed.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.baseline import baseline_target
from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Artifact, Profile, SampleSet, SourceModel, Target
from compile_stage.plugin_support.profiling import ProfileRequest

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_OF_A_PROMPT = "of a language model, the call that reads the prompt is profiled, not those for each token after it"
_BATCHES = 8  # different ones that are called in turn


def profile_artifact(artifact: Any, target: Any, samples: Any, into: str) -> Profile:
    """An artifact's profile on the first batch size of a target, by its backend's profiler; a trace is written into the
    folder `into`. Raises UsageError where the backend has none."""
    built, where = revive(Artifact, artifact), revive(Target, target)
    backend, request = plugins.load("backends", built.backend), _request(where, samples, into)
    if built.generation is not None:
        request = replace(request, batches=tuple(_prompt(built, batch) for batch in request.batches))
    profile = _checked(_profiler(backend)(backend, built, request), backend.name)
    return profile if built.generation is None else replace(profile, notes=(*profile.notes, _OF_A_PROMPT))


def profile_source(source: Any, target: Any, samples: Any, into: str) -> Profile:
    """As `profile_artifact`, of an original in its own framework, on the device where it is measured."""
    model, where = revive(SourceModel, source), baseline_target(revive(Target, target))
    exporter = plugins.load("sources", model.flavor)
    profile = _checked(_profiler(exporter)(exporter, model, where, _request(where, samples, into)), exporter.name)
    return replace(profile, notes=(*profile.notes, _OF_A_PROMPT)) if exporter.keeps_cache(model) else profile


def _prompt(artifact: Artifact, batch: Batch) -> Batch:
    """The graph's inputs where a prompt is read."""
    from compile_stage.core.generation import INPUT_IDS, as_first_call

    prompt = artifact.generation.prompt_tokens if artifact.generation is not None else 0
    return as_first_call(artifact.signature, batch[INPUT_IDS][:, :prompt])


def _profiler(plugin: Any) -> Callable[..., Any]:
    declared = plugin.capabilities.profiler
    if not declared:
        raise UsageError(f"{plugin.name} declares no profiler of its runtime")
    module, _, function = declared.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _checked(profile: Any, name: str) -> Profile:
    if not isinstance(profile, Profile):
        raise TypeError(f"the profiler of {name!r} answered with {type(profile).__name__} instead of a Profile")
    return profile


def _request(target: Target, samples: Any, into: str) -> ProfileRequest:
    Path(into).mkdir(parents=True, exist_ok=True)
    size = target.batch_sizes[0]
    batches = tuple(itertools.islice(_batches(revive(SampleSet, samples), size), _BATCHES))
    return ProfileRequest(
        threads=target.threads, device=target.device, batches=batches, batch_size=size, into=Path(into)
    )


def _batches(samples: SampleSet, size: int) -> Any:
    """Whole batches of the samples; where they make up less than one, they are repeated."""
    import numpy as np

    from compile_stage.measure.samples import open_samples

    opened = open_samples(samples)
    whole = range(0, opened.count - size + 1, size)
    if not whole:
        batch: Batch = opened.batch(0, opened.count)
        yield {name: np.ascontiguousarray(array[np.arange(size) % opened.count]) for name, array in batch.items()}
    for start in whole:
        yield opened.batch(start, start + size)
