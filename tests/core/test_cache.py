"""The cache: all of an entry or nothing, verified when read, only successes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from compile_stage.core.cache import Cache, cache_secret
from compile_stage.core.digest import digest_of
from compile_stage.core.errors import StorageError, UsageError, WorkerError
from compile_stage.core.storage import storage_error

KEY = {"input": "sha256:1", "toolchain": {"onnxruntime": "1.31"}}


def make(into: Path) -> dict[str, int]:
    (into / "model.bin").write_bytes(b"weights")
    return {"answer": 42}


def test_the_second_time_is_a_hit_with_the_same_answer(tmp_path: Path) -> None:
    """Broken: every run would compile again."""
    cache = Cache(tmp_path)
    first, second = cache.fetch("compile/1", KEY, make), cache.fetch("compile/1", KEY, make)
    assert (first.hit, second.hit) == (False, True)
    assert second.value == {"answer": 42}
    assert (Path(second.path) / "model.bin").read_bytes() == b"weights"
    assert (cache.locate("compile/1", KEY) / "entry.json").exists()


@pytest.mark.parametrize("said", [(errno.ENOSPC, "No space left on device"), ("100 requested and 50 written",)])
def test_a_disk_that_fills_up_in_the_middle_of_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: tuple[object, ...]
) -> None:
    """Broken: "the disk is full" without a word of which one, or, for NumPy's error of a large array, a bug of ours."""

    def fill(into: Path) -> None:
        raise OSError(*said)

    with pytest.raises(OSError, match=str(said[-1])):  # there is room here: it is another disk's trouble
        Cache(tmp_path).fetch("compile/1", KEY, fill)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(StorageError, match="the disk is full") as caught:
        Cache(tmp_path).fetch("compile/1", KEY, fill)
    assert caught.value.where.startswith(str(tmp_path))


def test_an_entry_that_was_given_out_and_is_gone_is_named(tmp_path: Path) -> None:
    """Broken: a step that misses its input could not say that the cache was emptied under it."""
    cache = Cache(tmp_path)
    cache.fetch("compile/1", KEY, make)
    assert cache.removed() is None

    def fail(into: Path) -> None:
        raise RuntimeError("compiler crashed")

    with pytest.raises(RuntimeError):
        cache.fetch("compile/2", KEY, fail)
    assert cache.removed() is None  # the folder of a failed step is no loss

    def emptied(into: Path) -> None:
        shutil.rmtree(tmp_path)
        (into / "model.bin").write_bytes(b"weights")

    with pytest.raises(FileNotFoundError):
        cache.fetch("compile/3", KEY, emptied)
    gone = cache.removed()
    assert gone is not None
    assert gone.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("step", "key"),
    [
        ("compile/2", KEY),
        ("compile/1", {**KEY, "toolchain": {"onnxruntime": "1.32"}}),
        ("compile/1", {**KEY, "hardware": "x"}),
    ],
)
def test_another_step_version_tool_or_machine_is_a_miss(tmp_path: Path, step: str, key: dict[str, object]) -> None:
    """Broken: an artifact of another compiler version would be published as if it were new."""
    cache = Cache(tmp_path)
    cache.fetch("compile/1", KEY, make)
    assert not cache.fetch(step, key, make).hit


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """Broken: a failed compile would be found as a success by the next run."""
    cache = Cache(tmp_path)

    def fail(into: Path) -> None:
        (into / "half").write_text("half")
        raise RuntimeError("compiler crashed")

    with pytest.raises(RuntimeError):
        cache.fetch("compile/1", KEY, fail)
    assert not (cache.locate("compile/1", KEY) / "entry.json").exists()
    assert not list(tmp_path.rglob("half"))


@pytest.mark.parametrize("anew", [False, True], ids=["made", "made anew"])
def test_an_entry_that_is_put_in_its_place_is_not_said_to_be_gone(
    anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: where a job fails while another's entry is renamed, the run ends: somebody had removed its files."""
    cache, rename, found = Cache(tmp_path), Path.rename, list[Path | None]()
    lookers = [threading.Thread(target=lambda: found.append(cache.removed())) for _ in range(2)]
    if anew:
        cache.fetch("compile/1", KEY, make)

    def slow(part: Path, entry: Path) -> Path:
        for looker, act in zip(lookers, (lambda: part, lambda: rename(part, entry)), strict=True):
            act()
            looker.start()
            looker.join(0.2)
        return entry

    monkeypatch.setattr(Path, "rename", slow)
    cache.fetch("compile/1", KEY, make, anew=anew)
    for looker in lookers:
        looker.join()
    assert found == [None, None]


def test_others_may_read_an_entry_as_the_umask_says(tmp_path: Path) -> None:
    """Broken: of two users with one cache, the second could neither use nor replace what the first made, and its run
    ended with a bug of ours."""
    cache = Cache(tmp_path / "cache")
    cache.fetch("compile/1", KEY, make)
    (tmp_path / "plain").mkdir()
    entry = cache.locate("compile/1", KEY)
    assert stat.S_IMODE(entry.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_an_entry_that_can_not_be_replaced_is_a_matter_of_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an entry that another user keeps private would end the run with a bug of ours."""
    cache = Cache(tmp_path)
    cache.fetch("compile/1", KEY, make)
    entry = cache.locate("compile/1", KEY)
    remove = shutil.rmtree

    def refuse(folder: Path, **options: bool) -> None:
        if folder != entry:
            remove(folder, **options)

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(PermissionError) as refused:
        cache.fetch("compile/1", KEY, make, anew=True)
    trouble = storage_error(refused.value)
    assert trouble is not None
    assert trouble.where == str(entry)
    assert "Permission denied" in trouble.problem


@pytest.mark.parametrize("damage", ["changed", "removed", "added", "answer"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, damage: str) -> None:
    """Broken: a bit that flipped on disk would be published."""
    cache = Cache(tmp_path)
    files = Path(cache.fetch("compile/1", KEY, make).path)
    if damage == "changed":
        (files / "model.bin").write_bytes(b"weightz")
    elif damage == "removed":
        (files / "model.bin").unlink()
    elif damage == "added":
        (files / "more").write_text("")
    else:
        (files.parent / "entry.json").write_text("{")
    again = cache.fetch("compile/1", KEY, make)
    assert not again.hit
    assert (Path(again.path) / "model.bin").read_bytes() == b"weights"


def test_with_a_secret_an_entry_without_its_mac_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: whoever may write to a shared cache could turn failed checks into passed ones, sealed by a digest of his
    own."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(secret))
    cache = Cache(tmp_path / "cache", cache_secret())
    assert not cache.fetch("compile/1", KEY, make).hit
    assert cache.fetch("compile/1", KEY, make).hit
    entry = cache.locate("compile/1", KEY) / "entry.json"
    stored = json.loads(entry.read_text())
    del stored["digest"], stored["mac"]
    forged = {**stored, "value": {"answer": 43}}
    entry.write_text(json.dumps({**forged, "digest": digest_of(forged)}))
    assert Cache(tmp_path / "cache").fetch("compile/1", KEY, make).value == {"answer": 43}  # a digest alone holds
    assert cache.read("compile/1", KEY) is None
    assert cache.fetch("compile/1", KEY, make).value == {"answer": 42}
    assert Cache(tmp_path / "cache", b"t" * 32).read("compile/1", KEY) is None
    assert Cache(tmp_path / "cache").read("compile/1", KEY) is not None  # who has no secret reads what has a MAC


@pytest.mark.parametrize(("content", "says"), [(None, "can't be read"), (b"short", "5 bytes, fewer than 32")])
def test_a_secret_that_is_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, says: str
) -> None:
    """Broken: a typo in the variable would leave the cache open, and nobody would know."""
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(file))
    with pytest.raises(UsageError, match=says):
        cache_secret()


def _race(root: str, log: str) -> None:
    def slow(into: Path) -> int:
        with open(log, "a") as stream:
            stream.write("made\n")
        time.sleep(0.2)
        return make(into)["answer"]

    assert Cache(Path(root)).fetch("compile/1", KEY, slow).value == 42


def test_two_processes_make_an_entry_once(tmp_path: Path) -> None:
    """Broken: two CI jobs on one machine would both compile, or read each other's half-written files."""
    context, log = multiprocessing.get_context("spawn"), tmp_path / "log"
    racers = [context.Process(target=_race, args=(str(tmp_path / "cache"), str(log))) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert log.read_text() == "made\n"


def test_who_waits_for_another_processs_entry_can_be_sent_away(tmp_path: Path) -> None:
    """Broken: Ctrl-C, or a scheduler's SIGTERM, would end a run only when the run beside it has compiled."""
    cache = Cache(tmp_path)
    entry = cache.locate("compile/1", KEY)
    entry.parent.mkdir(parents=True)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            cache.fetch("compile/1", KEY, make)
        except WorkerError as error:
            errors.append(error)

    with FileLock(f"{entry}.lock"):
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        cache.stop_waiting()
        waiting.join(timeout=60)
        assert not waiting.is_alive()
    assert len(errors) == 1
    assert not entry.exists()


def test_kill_in_the_middle_leaves_no_entry(tmp_path: Path) -> None:
    """Broken: after a kill -9 the next run would find half an artifact."""
    program = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from compile_stage.core.cache import Cache
        def slow(into):
            (into / "model.bin").write_bytes(b"half")
            print("writing", flush=True)
            time.sleep(60)
        Cache(Path({str(tmp_path)!r})).fetch("compile/1", {json.dumps(KEY)}, slow)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    cache = Cache(tmp_path)
    assert not (cache.locate("compile/1", KEY) / "entry.json").exists()
    assert cache.fetch("compile/1", KEY, make).value == {"answer": 42}


def test_what_a_killed_process_left_half_made_is_cleared_away(tmp_path: Path) -> None:
    """Broken: each kill in the middle of a compilation would leave a model's worth of disk behind, for ever."""
    cache = Cache(tmp_path)
    entry = cache.locate("compile/1", KEY)
    left = entry.parent / f"{entry.name[:16]}.part-killed"
    (left / "files").mkdir(parents=True)
    other = entry.parent / f"{'0' * 16}.part-running"
    other.mkdir()
    cache.fetch("compile/1", KEY, make)
    assert not left.exists()
    assert other.exists()
