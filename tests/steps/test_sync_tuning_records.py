"""Tuning records between the registry and the cache: what is believed, what is told, and that nothing of it fails a
run."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import job, run_context

from compile_stage.backends.tensorrt import TensorRt
from compile_stage.core import plugins, tuning_records
from compile_stage.core.cache import Cache
from compile_stage.core.capabilities import RegistryCapabilities
from compile_stage.core.context import Context
from compile_stage.core.records import Candidate, Job, SourceModel, Target, TargetResult
from compile_stage.core.shared_cache import NoSeal, SecretSeal, SharedCache
from compile_stage.core.shared_store import open_store
from compile_stage.functions.caches import cache_entries, verify_cache
from compile_stage.steps.select import select
from compile_stage.steps.sync_tuning_records import (
    pull_records,
    pull_shared_records,
    push_records,
    share_records,
)
from tests.steps.test_plan import SOURCE as IN_MLFLOW
from tests.steps.test_plan import TARGET

# A backend that keeps records, of which nothing has to be installed: neither step runs a compiler.
JOB = job(backend="tensorrt", where=Target(name="gpu", device="cuda"))
KEY = TensorRt().records_key(JOB.target, TensorRt().toolchain()) or ""


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return run_context(tmp_path)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceModel:
    monkeypatch.setenv("COMPILE_STAGE_FOLDER_REGISTRY", str(tmp_path / "registry"))
    return replace(IN_MLFLOW, registry="folder")


def a_machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """From now on this is another one, with a cache of its own; returns where it keeps its records."""
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(folder))
    return tuning_records.folder_of(KEY)


def measured(folder: Path, content: bytes) -> str:
    name = tuning_records.name_of("timings", "cache", content)
    tuning_records.write(folder, name, content)
    return name


def done(*jobs: Job) -> TargetResult:
    return TargetResult(
        policy=TARGET, candidates=tuple(Candidate(job=job) for job in jobs), selection=select((), TARGET)
    )


def test_machines_share_what_they_measured(
    context: Context, source: SourceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: a fresh machine would measure again, or the same things would be told and sent in every run."""
    here = a_machine(monkeypatch, tmp_path / "one")
    assert pull_records(context, source, [JOB]) == ()
    one = measured(here, b"one")
    assert push_records(context, source, done(JOB, replace(JOB, id="b"))).notes == (
        f"tuning records added to the registry: 1, of {KEY}",
    )
    assert push_records(context, source, done(JOB)).notes == ()

    there = a_machine(monkeypatch, tmp_path / "two")
    two = measured(there, b"two")
    assert pull_records(context, source, [JOB, JOB]) == (f"tuning records taken from the registry: 1, of {KEY}",)
    assert (there / one).read_bytes() == b"one"
    assert pull_records(context, source, [JOB]) == ()
    push_records(context, source, done(JOB))
    a_machine(monkeypatch, tmp_path / "one")
    pull_records(context, source, [JOB])
    assert tuning_records.names_in(here) == sorted([one, two])


def test_garbage_is_refused_by_name_and_the_rest_is_taken(
    context: Context, source: SourceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: whoever can write to the registry, or a failing disk, would put anything before a compiler."""
    kept, here = tmp_path / "registry" / ".tuning" / KEY, a_machine(monkeypatch, tmp_path / "fresh")
    good, bad = measured(kept, b"good"), measured(kept, b"damaged later")
    (kept / bad).write_bytes(b"damaged")
    foreign = tuning_records.name_of("notes", "txt", b"hello")
    (kept / foreign).write_bytes(b"hello")
    notes = pull_records(context, source, [JOB])
    assert tuning_records.names_in(here) == [good]
    assert [note for note in notes if bad in note and "not what it was named after" in note]
    assert [note for note in notes if foreign in note and "no timing cache" in note]
    assert notes[-1] == f"tuning records taken from the registry: 1, of {KEY}"


def test_what_was_damaged_here_is_had_again_and_not_handed_on(
    context: Context, source: SourceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: a failing disk here would spoil the records of all, or keep the good ones out."""
    here = a_machine(monkeypatch, tmp_path / "one")
    shared = measured(here, b"shared")
    push_records(context, source, done(JOB))
    own = measured(here, b"own")
    (here / shared).write_bytes(b"sha")
    (here / own).write_bytes(b"ow")
    assert pull_records(context, source, [JOB]) == (f"tuning records taken from the registry: 1, of {KEY}",)
    assert (here / shared).read_bytes() == b"shared"
    assert push_records(context, source, done(JOB)).notes == ()
    assert tuning_records.names_in(tmp_path / "registry" / ".tuning" / KEY) == [shared]


def test_a_plug_in_that_stumbles_over_a_record_refuses_it(
    context: Context, source: SourceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: a file in the registry could end every run that uses somebody's backend."""
    measured(tmp_path / "registry" / ".tuning" / KEY, b"good")
    here = a_machine(monkeypatch, tmp_path / "fresh")
    monkeypatch.setattr(TensorRt, "refuse_record", _broken)
    (note,) = pull_records(context, source, [JOB])
    assert "OSError: the disk is gone" in note
    assert tuning_records.names_in(here) == []


def test_a_registry_in_trouble_is_told_and_the_run_goes_on(
    context: Context, source: SourceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: a run would fail for what only makes it faster."""
    here = a_machine(monkeypatch, tmp_path / "fresh")
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / ".tuning").write_text("in the way")
    measured(here, b"mine")
    (note,) = push_records(context, source, done(JOB)).notes
    assert "could not be kept in the registry" in note
    assert "read or written" in note
    monkeypatch.setattr(type(plugins.load("registries", "folder")), "pull_records", _broken)
    (note,) = pull_records(context, source, [JOB])
    assert note.startswith("no tuning records could be had")


def _broken(*_: object) -> None:
    message = "the disk is gone"
    raise OSError(message)


def test_nobody_else_pays_for_it(
    context: Context, source: SourceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: every run would ask a registry, which may be far away, for what none of its jobs takes."""
    monkeypatch.setattr(type(plugins.load("registries", "folder")), "pull_records", _broken)
    monkeypatch.setattr(type(plugins.load("registries", "folder")), "push_records", _broken)
    measured(a_machine(monkeypatch, tmp_path / "fresh"), b"mine")
    pinned = replace(JOB.target, options={"tensorrt": {"timing_cache": "mine.cache"}})
    untuned = replace(JOB, backend="tvm", target=replace(JOB.target, device="cpu"))
    others = [
        replace(JOB, backend="onnxruntime"),
        replace(JOB, not_runnable_here="it is not here"),
        replace(JOB, target=pinned),
        untuned,
    ]
    assert pull_records(context, source, others) == ()
    assert push_records(context, source, done(*others)).notes == ()
    assert context.events.events == ()


def test_a_registry_without_room_for_records_says_so(
    context: Context, source: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a registry that somebody else wrote, which keeps no such files, would end the run."""

    class Bare:
        name, capabilities = "bare", RegistryCapabilities()

    load: Any = plugins.load
    monkeypatch.setattr(plugins, "load", lambda group, name: Bare() if group == "registries" else load(group, name))
    (note,) = pull_records(context, source, [JOB])
    assert "the registry bare keeps no tuning records" in note
    assert push_records(context, source, done(JOB)).notes == ()


def test_names_tell_the_whole_content() -> None:
    """Broken: another digest here than there would refuse every record that ever was written."""
    assert (
        tuning_records.name_of("timings", "cache", b"one") == f"timings-{hashlib.sha256(b'one').hexdigest()[:24]}.cache"
    )


@pytest.mark.parametrize("seal", [NoSeal(), SecretSeal(b"s" * 32)], ids=["unsigned", "secret"])
def test_machines_share_them_by_the_shared_cache_too(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seal: Any
) -> None:
    """Broken: each CI machine tunes again what another has, or a damaged record makes a run fail."""
    url = f"file://{tmp_path}/shared"

    def with_cache() -> Context:
        return replace(context, cache=Cache(tmp_path / "steps", shared=SharedCache(open_store(url), seal)))

    first = a_machine(monkeypatch, tmp_path / "first")
    name = measured(first, b"of the first")
    assert "1, of" in share_records(with_cache(), done(JOB)).notes[0]
    assert share_records(with_cache(), done(JOB)).notes == (), "it is there"

    second = a_machine(monkeypatch, tmp_path / "second")
    monkeypatch.setattr(TensorRt, "refuse_record", lambda *_: None)
    assert pull_shared_records(with_cache(), [JOB]) == (f"tuning records taken from the shared cache: 1, of {KEY}",)
    assert (second / name).read_bytes() == b"of the first"
    assert pull_shared_records(with_cache(), [JOB]) == ()

    (held,) = [path for path in (tmp_path / "shared").rglob("timings-*") if path.is_file()]
    if isinstance(seal, NoSeal):
        monkeypatch.delenv("COMPILE_STAGE_CACHE_KEY", raising=False)
        assert [entry.step for entry in cache_entries(url).entries] == ["tuning"]
        assert verify_cache(url).refused == {}
    held.write_bytes(held.read_bytes()[:-3] + b"BAD")
    third, shared = a_machine(monkeypatch, tmp_path / "third"), with_cache()
    assert pull_shared_records(shared, [JOB]) == ()
    assert not (third / name).exists()
    assert any("1 refused" in note for note in shared.cache.notes())
    assert pull_shared_records(context, [JOB]) == (), "without a shared cache"
