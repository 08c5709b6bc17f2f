"""The workers in which third parties' plug-ins answer the stage's questions, and when they live."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from factories import run_context, target

from compile_stage.core import plugins
from compile_stage.core.errors import UsageError
from compile_stage.engine.local import LocalEngine


def workers() -> list[int]:
    """Processes of workers that this one has started."""
    return [child.pid for child in psutil.Process().children() if "compile_stage.engine.worker" in child.cmdline()]


@pytest.mark.usefixtures("fake_backends", "isolated_home")
def test_no_plug_in_has_a_process_beside_a_measurement(tmp_path: Path) -> None:
    """Broken: a plug-in starts a thread when it is imported to be asked, which computes while the original is timed. It
    takes no turns, so nobody watches it, and its backend wins since the original looks slow."""
    before = workers()
    engine = LocalEngine()
    context = run_context(tmp_path, engine)
    try:
        backend = plugins.load("backends", "fake-slow")
        assert backend.schemes(target(), "fp32")
        assert len(workers()) == len(before) + 1, "it is asked in a worker, which stays for the next question"
        with context.alone():
            assert workers() == before
            assert backend.schemes(target(), "fp32"), "what it has answered is known"
            assert backend.schemes(target("other"), "fp32"), "it can be asked something new"
            assert workers() == before, "in a worker for that question alone"
        assert backend.schemes(target("a third"), "fp32")
        assert len(workers()) == len(before) + 1
    finally:
        plugins.refresh()
        engine.close()
    assert workers() == before


@pytest.mark.usefixtures("isolated_home")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import surely_not_there", "No module named 'surely_not_there'"),
        ("import os; os._exit(0)", "ended the process with exit code 0"),
        ("from compile_stage.core.errors import InternalError; raise InternalError('no')", "can't be used: no"),
    ],
    ids=["lacks a package", "ends its process", "raises an error of ours"],
)
def test_a_plug_in_that_cannot_be_imported_is_named_and_is_no_bug_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    """Broken: who lacks a package that a plug-in needs reads that a worker's function failed, is asked to report a bug
    of ours, and does not learn which plug-in it was."""
    (tmp_path / "house_backend.py").write_text(code)
    info = tmp_path / "house_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[compile_stage.backends]\nhouse = house_backend:House\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    plugins.refresh()
    try:
        with pytest.raises(UsageError, match=r"the plug-in 'house' of house-backend 1\.0 can't be used") as caught:
            plugins.load("backends", "house")
        assert says in caught.value.problem
        assert caught.value.where == "house_backend:House"
    finally:
        monkeypatch.undo()
        plugins.refresh()
