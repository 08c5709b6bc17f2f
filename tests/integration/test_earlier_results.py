"""What an earlier run left in the output folder is never taken for what this one found."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage import api
from compile_stage.core.errors import CompileStageError, StorageError
from compile_stage.core.events import Silent
from compile_stage.report import files
from compile_stage.steps import package

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

# The policy of `known_run`.
ONE = "backends: [onnxruntime], precisions: [fp32]"
FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}"
TOO_FAST = "performance.min_speedup=500"
REPORTS = ("result.json", "report.html", "report.md", "junit.xml")


@pytest.fixture
def passed(known_run: None, small_model: Path, write_policy: Callable[..., Path], tmp_path: Path) -> Path:
    """The policy of a run that passed, whose results are in `out`."""
    policy = write_policy(ONE, FAST)
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    assert result.exit_code == 0
    assert (tmp_path / "out" / "bundles" / "cpu" / "MLmodel").is_file()
    return policy


def test_a_run_without_a_winner_leaves_no_winner_of_an_earlier_one(
    passed: Path, small_model: Path, tmp_path: Path
) -> None:
    """Broken: the report says that there is no winner, and beside it lies a bundle that verifies and exports."""
    out = tmp_path / "out"
    (out / "profiles").mkdir()
    (out / "profiles" / "small-net--cpu--onnxruntime--fp32.trace.json").write_text("{}")
    result = api.run(f"folder:{small_model}", passed, out=out, publish=False, sets=[TOO_FAST])
    assert result.exit_code == 3
    assert not (out / "bundles").exists()
    assert not (out / "profiles").exists()


def test_a_run_that_looks_at_no_target_leaves_the_bundles_and_says_that_it_was_refused(
    passed: Path, small_model: Path, tmp_path: Path
) -> None:
    """Broken: a mistyped --set would delete what an earlier run proved, or its report would stay as this run's."""
    out = tmp_path / "out"
    with pytest.raises(CompileStageError):
        api.run(f"folder:{small_model}", passed, out=out, publish=False, sets=["performance.min_sped=1"])
    assert json.loads((out / "result.json").read_text())["status"] == "refused"
    assert (out / "bundles" / "cpu" / "MLmodel").is_file()


@pytest.mark.parametrize("step", ["resolve", "inspect", "package"])
def test_no_earlier_report_is_there_while_a_run_is_under_way(
    passed: Path, small_model: Path, tmp_path: Path, step: str
) -> None:
    """Broken: after kill -9 an earlier run's result.json says `passed`, with its exit code 0."""
    out, seen = tmp_path / "out", dict[str, list[str]]()

    class Reporter(Silent):
        def began(self, step: str, job_id: str) -> None:
            seen[step] = [name for name in REPORTS if (out / name).exists()]

    api.run(f"folder:{small_model}", passed, out=out, publish=False, reporter=Reporter())
    assert seen[step] == []
    assert json.loads((out / "result.json").read_text())["status"] == "passed"


@pytest.mark.parametrize("written", [0, 1])
def test_a_run_that_can_not_write_its_reports_leaves_none(
    passed: Path, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """Broken: the disk is full, and the result.json of an earlier run stays as the record; or the one that was written
    before the disk was full says `passed` of a run that ended with 2."""
    out, left, write_text = tmp_path / "out", [None] * written, files.write_text

    def full(path: Path, text: str) -> Path:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        left.pop()
        return write_text(path, text)

    monkeypatch.setattr(files, "write_text", full)
    with pytest.raises((StorageError, OSError)):
        api.run(f"folder:{small_model}", passed, out=out, publish=False)
    assert [name for name in REPORTS if (out / name).exists()] == []


def test_a_bundle_that_has_no_room_is_removed(
    passed: Path, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: half a bundle keeps the disk full, so that nobody learns from a report how the run ended, and the next
    run is refused for want of room."""
    out = tmp_path / "out"

    def full(_: str, into: Path, *__: Any, **___: Any) -> None:
        into.mkdir(parents=True)
        (into / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))

    monkeypatch.setattr(package, "save_model", full)
    with pytest.raises(StorageError, match="the disk is full"):
        api.run(f"folder:{small_model}", passed, out=out, publish=False)
    assert not list((out / "bundles").glob("*"))
    assert json.loads((out / "result.json").read_text())["exit_code"] == 2
