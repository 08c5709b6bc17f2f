"""A full disk and a folder that refuses are the machine's doing: named as such, wherever the libraries hide them."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest

from compile_stage.core import address_space
from compile_stage.core.cache import flush_tree
from compile_stage.core.errors import IntegrityError, RemovedError, SourceError, StorageError, UsageError
from compile_stage.core.events import EventLog
from compile_stage.core.run_context import open_context
from compile_stage.core.storage import (
    demand_writable,
    disk_full,
    disk_full_of_text,
    explained,
    storage_error,
    storage_trouble,
)
from compile_stage.registry.mlflow_connection import trouble


def full(place: str = "/disk/file") -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)


def test_a_disk_without_inodes_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: "the disk is full" where `df` shows gigabytes of free space, and nobody looks at `df -i`."""
    place = str(tmp_path / "gone" / "file")
    said = storage_error(full(place))
    assert said is not None
    assert said.problem == "the disk is full"
    real = os.statvfs(tmp_path)
    asked = []

    def used_up(path: Path) -> os.statvfs_result:
        asked.append(path)
        return os.statvfs_result((*real[:7], 0, *real[8:]))

    monkeypatch.setattr(os, "statvfs", used_up)
    said = storage_error(full(place))
    assert said is not None
    assert said.problem == "the disk is full of files: it has no free inode (df -i), whatever space is free"
    assert asked == [tmp_path]


def test_a_quota_is_not_called_a_full_disk_alone() -> None:
    """Broken: "the disk is full" where `df` shows free space, since it is this user's quota."""
    said = storage_error(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/disk/file"))
    assert said is not None
    assert said.problem == f"the disk is full for this user: {os.strerror(errno.EDQUOT)}"


def test_a_disk_that_fails_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an NFS server that fails while files are flushed is answered with "free space", and names no file."""

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "entry").write_text("x")
    monkeypatch.setattr(os, "fsync", fails)
    said = "it can't be read or written: Input/output error"
    with pytest.raises(StorageError, match=said) as caught, storage_trouble():
        flush_tree(tmp_path)
    assert caught.value.where == str(tmp_path / "entry")
    assert "free space" not in caught.value.fix
    assert "dmesg" in caught.value.fix


def copy_as_a_library_does() -> None:
    try:
        raise full()
    except OSError as error:
        raise ValueError("the model can't be copied") from error


def test_what_a_library_wraps_is_found() -> None:
    with pytest.raises(StorageError, match="the disk is full") as caught, storage_trouble():
        copy_as_a_library_does()
    assert caught.value.where == "/disk/file"
    assert "COMPILE_STAGE_CACHE" in caught.value.fix


def test_a_step_that_can_not_copy_a_tree_ends_with_a_sentence() -> None:
    """Broken: the line of the step would be Python's list of every file of the tree, several hundred."""
    said: list[str] = []
    log = EventLog()
    log.reporter.ended = lambda step, job_id, seconds, outcome: said.append(outcome)  # type: ignore[method-assign]
    with pytest.raises(shutil.Error), log.step("package"):
        raise shutil.Error([("a", "/disk/a", f"[Errno 28] {os.strerror(errno.ENOSPC)}: '/disk/a'")])
    assert said == ["the disk is full"]


def test_copying_a_tree_to_a_full_disk_is_one() -> None:
    """`shutil.copytree` keeps of each failure only its text."""
    found = storage_error(shutil.Error([("a", "/disk/a", f"[Errno 28] {os.strerror(errno.ENOSPC)}: '/disk/a'")]))
    assert found is not None
    assert found.where == "/disk/a"


def test_a_file_of_ours_that_is_missing_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an emptied cache would be a bug of ours (70), or any missing file of the user's a removed one."""
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def missing(name: str) -> StorageError | None:
        return storage_error(FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / name)))

    for name in ("cache/export/ab/model.onnx", "tmp/compile-stage-x/staged"):
        error = missing(name)
        assert isinstance(error, RemovedError)
        assert error.where == str(tmp_path / name)
        assert "run again" in error.fix
    assert missing("data/val.npz") is None
    assert missing("tmp/val.npz") is None
    copied = shutil.Error([(str(tmp_path / "cache/a"), "/out/a", f"[Errno 2] {os.strerror(errno.ENOENT)}: 'a'")])
    assert isinstance(storage_error(copied), RemovedError)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "here").touch()
    assert missing("cache/here") is None


def test_what_is_no_trouble_of_a_disk_goes_through() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "no such file"), ValueError("x"), SourceError("y")):
        with pytest.raises(type(error)), storage_trouble():
            raise error
    assert disk_full(PermissionError(errno.EACCES, "no", "/x")) is None


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EFBIG, "File too large")])
def test_a_download_that_the_machine_can_not_write_is_no_trouble_of_the_registry(code: int, said: str) -> None:
    """Broken: where this machine limits the size of a file, people look for what is wrong with the server."""
    text = f"The following failures occurred while downloading: model.onnx: [Errno {code}] {os.strerror(code)}"
    found = disk_full_of_text(text, "/here")
    assert found is not None
    assert said in found.problem
    assert disk_full_of_text("Connection reset by peer", "/here") is None


def test_a_place_that_can_not_be_a_folder_is_named_before_the_work(tmp_path: Path) -> None:
    demand_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    assert storage_error(OSError(errno.EFBIG, "File too large")) is not None  # ulimit -f
    with pytest.raises(StorageError, match="can't be written"):
        demand_writable("/proc/none/out")


def test_a_database_whose_disk_is_full_is_no_bug_of_ours() -> None:
    """Broken: a fleet whose state folder is full ends with 70, and asks for a report in place of room."""
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA max_page_count=2")
    database.execute("CREATE TABLE t (x)")
    with pytest.raises(sqlite3.OperationalError) as full:
        database.execute("INSERT INTO t VALUES (?)", ("x" * 100_000,))
    assert isinstance(explained(full.value), StorageError)
    with pytest.raises(sqlite3.OperationalError) as wrong:
        database.execute("SELECT")
    assert not isinstance(explained(wrong.value), StorageError)
    database.close()


def test_too_few_open_files_are_no_damage_and_no_bug() -> None:
    """Broken: below a small `ulimit -n` a run would say that samples are damaged (7), or that it is a bug of ours
    (70)."""
    refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/cache/x.npy")
    damaged = IntegrityError("the samples can't be read back")
    damaged.__cause__ = refused
    for error in (refused, damaged):
        said = explained(error)
        assert (said.exit_code, said.where) == (2, "/cache/x.npy")
        assert "ulimit -n" in said.fix
    processes = UsageError("this machine starts no further process", fix="ulimit -u")
    processes.__cause__ = refused
    assert explained(processes) is processes


def test_too_few_threads_are_no_bug() -> None:
    """Broken: in a container with a small limit on processes (`pids.max`) a run would call it a bug of ours (70)."""
    said = explained(RuntimeError("can't start new thread"))
    assert said.exit_code == 2
    assert "pids.max" in str(said.fix)
    assert explained(RuntimeError("another")).exit_code == 70


def test_a_current_folder_that_was_deleted_is_no_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a command that a clean-up job left without its folder would end as a bug of ours, and name nothing."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        Path("out").absolute()
    assert explained(raised.value).exit_code == 2
    monkeypatch.chdir(tmp_path)
    assert explained(FileNotFoundError()).exit_code == 70


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libblas.so: failed to map segment from shared object"),
    ],
)
def test_memory_that_runs_out_in_the_stage_itself_is_no_bug(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: under `ulimit -v` a library can't be loaded, and the user is asked to report a bug of ours."""
    resource = pytest.importorskip("resource", reason="limits of processes are POSIX's")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (900_000_000, resource.RLIM_INFINITY))
    said = explained(error)
    assert isinstance(said, UsageError)
    assert "900 MB of addresses here (ulimit -v)" in said.problem
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert explained(error).fix == "free memory, or take a larger machine"
    assert not isinstance(explained(ImportError("No module named 'x'")), UsageError)


def test_a_limit_on_writable_memory_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: under `ulimit -d 300000` a run waits for ever, also after SIGTERM, and nothing has said why."""
    resource = pytest.importorskip("resource", reason="limits of processes are POSIX's")
    limits = {resource.RLIMIT_DATA: 300_000_000}
    monkeypatch.setattr(resource, "getrlimit", lambda of: (limits.get(of, resource.RLIM_INFINITY),) * 2)
    assert "300 MB of addresses here (ulimit -d)" in address_space.warning()
    assert "ulimit -d unlimited" in explained(MemoryError()).fix


@pytest.mark.parametrize(("option", "enough", "little"), [("RLIMIT_AS", 819, 410), ("RLIMIT_DATA", 410, 307)])
def test_what_no_library_can_be_loaded_with_is_refused(
    option: str, enough: int, little: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: under `ulimit -v 400000` a plan waits for ever in OpenBLAS and only SIGKILL ends it, or a run blames the
    model's MLmodel."""
    resource = pytest.importorskip("resource", reason="limits of processes are POSIX's")
    limits = {getattr(resource, option): enough * 10**6}
    monkeypatch.setattr(resource, "getrlimit", lambda of: (limits.get(of, resource.RLIM_INFINITY),) * 2)
    address_space.demand_enough()
    limits[getattr(resource, option)] = little * 10**6
    with pytest.raises(UsageError, match=f"{little} MB of addresses") as refused, open_context(None, "local"):
        pass
    assert "unlimited" in refused.value.fix


def test_a_current_folder_that_was_deleted_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: in a folder that was deleted, a run says that the registry's files can't be read."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    try:
        gone.rmdir()
    except OSError:
        pytest.skip("this system deletes no folder that a process is in")
    with pytest.raises(FileNotFoundError) as found, open_context(None, "local"):
        pass
    assert "current folder is not there" in explained(found.value).problem
    with pytest.raises(UsageError, match="current folder is not there"), trouble("sqlite:///mlflow.db"):
        Path.cwd()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="file systems with owners")
def test_a_cache_of_another_user_says_how_users_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: who is pointed to a colleague's cache is told to free space, and gives everybody the rights to write into
    it, which makes each other's entries unreadable."""
    cache, out, mine = tmp_path / "cache", tmp_path / "out", os.geteuid()
    cache.mkdir()
    out.mkdir()
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(cache))

    def fix(place: Path, code: int = errno.EACCES) -> str:
        found = storage_error(OSError(code, os.strerror(code), str(place)))
        assert found is not None
        return found.fix

    assert "--shared-cache" not in fix(cache / "compile" / "ab")  # our own
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert "--shared-cache" in fix(cache / "compile" / "ab")
    assert "--shared-cache" in fix(cache)
    assert "--shared-cache" not in fix(out / "report.html")
    assert "free space" in fix(cache, errno.ENOSPC)
