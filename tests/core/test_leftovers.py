"""Temporary folders of processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compile_stage.core.leftovers import leave_alone, part_folder, remove_leftovers, temporary_folder

OWNER = """
import sys, time
from pathlib import Path
from compile_stage.core.leftovers import part_folder, temporary_folder
with temporary_folder("test") as here, part_folder(Path(sys.argv[1])) as there:
    (here / "big").write_bytes(bytes(1000))
    (there / "big").write_bytes(bytes(1000))
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for parts; TMPDIR is another one of the test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def start(place: Path) -> subprocess.Popen[str]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(place)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


def held(place: Path) -> list[str]:
    """Names below the two folders."""
    return sorted(path.name for folder in (place, place.parent / "tmp") for path in folder.iterdir())


def test_the_next_run_deletes_what_a_killed_one_left_and_nothing_of_a_living_one(place: Path) -> None:
    """Broken: every killed run would leave its folder for ever, or a run would lose its own under its hands."""
    dead, living = start(place), start(place)
    with dead, living:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert len(held(place)) == 8, "two folders and their owner's files, of two processes"
        assert remove_leftovers() == 1
        assert remove_leftovers(place) == 1
        assert len(held(place)) == 4
        assert remove_leftovers() + remove_leftovers(place) == 0
        living.kill()


def test_a_folder_ends_with_its_context(place: Path) -> None:
    """Broken: each run would leave an empty file."""
    with temporary_folder() as here, part_folder(place) as there:
        assert list(here.iterdir()) == list(there.iterdir()) == [], "what is uploaded from there holds nothing of ours"
        assert remove_leftovers() + remove_leftovers(place) == 0
    assert held(place) == []


def test_a_folder_without_an_owners_file_and_what_a_link_leads_to_stay(place: Path) -> None:
    """Broken: the files of a server that has loaded a published model would be deleted, or those that a link names."""
    temporary = place.parent / "tmp"
    (temporary / "compile-stage-model-1").mkdir()
    precious = place.parent / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (temporary / "compile-stage-x").symlink_to(precious)
    (temporary / "compile-stage-x.owner").touch()
    (temporary / "compile-stage-y.owner").symlink_to(precious / "file")
    os.mkfifo(temporary / "compile-stage-z.owner")
    remove_leftovers()
    assert (precious / "file").exists()
    assert (temporary / "compile-stage-model-1").exists()


def test_what_a_thread_writes_after_its_folder_was_deleted_is_deleted_by_the_next_run(place: Path) -> None:
    """Broken: a run that Ctrl-C or SIGTERM ended in a download left a part of a model in TMPDIR for ever. The threads
    of the download made its folder again, and nothing said whose it was."""
    deleted, written = threading.Event(), threading.Event()

    def download() -> None:
        deleted.wait()
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(1000))
        written.set()

    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    with temporary_folder("test") as folder:
        leave_alone(thread)
    assert not folder.exists()
    deleted.set()
    thread.join()
    assert written.is_set()
    assert remove_leftovers() == 1
    assert held(place) == []
    with temporary_folder("test"):  # the thread has ended: nothing stays for the next run
        pass
    assert held(place) == []
