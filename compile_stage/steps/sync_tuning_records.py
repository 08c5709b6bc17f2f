"""Tuning records: from the registry into the cache before jobs are compiled, and what they measured back to it.

They make a run faster and change nothing of what is validated, so whatever is wrong with them is a note, and the run
goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins, tuning_records
from compile_stage.core.context import Context
from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Backend
from compile_stage.core.records import Job, SourceModel, TargetResult

_STEP = "tuning"


def pull_records(context: Context, source: SourceModel, jobs: Sequence[Job]) -> tuple[str, ...]:
    """Bring what the registry knows for the backends that tune to where they look for it; returns notes on that.

    Nothing is believed: each file must have the content that it is named after, and be what its backend writes.
    """
    registry, notes = plugins.load("registries", source.registry), []
    for key, backend in _keys(jobs):
        if not registry.capabilities.keeps_tuning_records:
            notes.append(
                f"the registry {registry.name} keeps no tuning records: for {key} there are this machine's only"
            )
            continue
        try:
            folder = tuning_records.folder_of(key)
            with (
                context.events.step(_STEP),
                tempfile.TemporaryDirectory(dir=context.scratch) as pulled,
            ):
                registry.pull_records(source, key, frozenset(tuning_records.intact_in(folder)), Path(pulled))
                taken, refused = _admit(Path(pulled), folder, backend)
        except (CompileStageError, OSError) as error:
            notes.append(
                f"no tuning records could be had from the registry, so what they know is measured again: {error}"
            )
            continue
        notes += [f"the tuning record {name} of {key} in the registry was refused: {why}" for name, why in refused]
        if taken:
            notes.append(f"tuning records taken from the registry: {taken}, of {key}")
    return tuple(notes)


def pull_shared_records(context: Context, jobs: Sequence[Job]) -> tuple[str, ...]:
    """The same from the cache that machines share, where there is one."""
    notes: list[str] = []
    shared = context.cache.shared
    if shared is None:
        return ()
    for key, backend in _keys(jobs):
        folder = tuning_records.folder_of(key)
        try:
            with context.events.step(_STEP), tempfile.TemporaryDirectory(dir=context.scratch) as pulled:
                shared.pull_records(key, frozenset(tuning_records.intact_in(folder)), Path(pulled))
                taken, refused = _admit(Path(pulled), folder, backend)
        except OSError as error:
            notes.append(f"tuning records of the shared cache could not be had: {error}")
            continue
        notes += [f"the tuning record {name} of {key} in the shared cache was refused: {why}" for name, why in refused]
        if taken:
            notes.append(f"tuning records taken from the shared cache: {taken}, of {key}")
    return tuple(notes)


def share_records(context: Context, target: TargetResult) -> TargetResult:
    """Add what this machine measured to the cache that machines share, where there is one; the result says so."""
    notes: list[str] = []
    shared = context.cache.shared
    if shared is None:
        return target
    for key, _ in _keys([candidate.job for candidate in target.candidates]):
        mine = tuning_records.intact_in(tuning_records.folder_of(key))
        try:
            added = shared.push_records(key, mine) if mine else 0
        except OSError as error:
            notes.append(f"tuning records could not be put into the shared cache: {error}")
            continue
        if added:
            notes.append(f"tuning records added to the shared cache: {added}, of {key}")
    return replace(target, notes=(*target.notes, *notes))


def push_records(context: Context, source: SourceModel, target: TargetResult) -> TargetResult:
    """Add what this machine measured, now or before, to what the registry keeps; the result tells of it."""
    registry, notes = plugins.load("registries", source.registry), []
    for key, _ in _keys([candidate.job for candidate in target.candidates]):
        try:
            mine = tuning_records.intact_in(tuning_records.folder_of(key))
            if not mine or not registry.capabilities.keeps_tuning_records:
                continue
            with context.events.step(_STEP) as mark:
                added = registry.push_records(source, key, mine)
                mark.cached = not added
        except (CompileStageError, OSError) as error:
            notes.append(f"tuning records could not be kept in the registry; the next run tries again: {error}")
            continue
        if added:
            notes.append(f"tuning records added to the registry: {added}, of {key}")
    return replace(target, notes=(*target.notes, *notes))


def _keys(jobs: Sequence[Job]) -> Iterator[tuple[str, Backend]]:
    """Each key that the jobs' compilations read and add to, once."""
    seen = set()
    for job in jobs:
        backend = plugins.load("backends", job.backend)
        if backend.capabilities.keeps_tuning_records and not job.not_runnable_here:
            key = backend.records_key(job.target, plugins.packages_of(backend))
            if key is not None and key not in seen:
                seen.add(key)
                yield key, backend


def _admit(pulled: Path, folder: Path, backend: Backend) -> tuple[int, list[tuple[str, str]]]:
    """Take each file that holds; how many that were, and which did not and why."""
    taken, refused = 0, []
    for path in sorted(pulled.iterdir()):
        content = path.read_bytes()
        reason = tuning_records.refuse(path.name, content) or _refuse(backend, path.name, content)
        if reason is None:
            tuning_records.write(folder, path.name, content)
            taken += 1
        else:
            refused.append((path.name, reason))
    return taken, refused


def _refuse(backend: Backend, name: str, content: bytes) -> str | None:
    try:
        return backend.refuse_record(name, content)
    except Exception as error:  # noqa: BLE001 - what a plug-in stumbles over is no record that it could use
        return f"the backend can't read it: {type(error).__name__}: {error}"
