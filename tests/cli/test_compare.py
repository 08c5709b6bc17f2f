"""`compare` on the command line: files, policies, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import policy_text

from compile_stage.cli.main import main
from compile_stage.core.records import RunResult
from compile_stage.report.result import result_text


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in arguments])
    return int(left.value.code or 0)


@pytest.fixture
def two(tmp_path: Path, result: RunResult) -> tuple[Path, Path]:
    """A run that passed, in a folder, and one that failed, as a file."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text(result_text(result))
    (tmp_path / "b.json").write_text(result_text(replace(result, status="failed", exit_code=3, problem="missed")))
    return tmp_path / "a", tmp_path / "b.json"


def test_a_regression_has_its_exit_code_only_where_it_is_asked_for(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a pull request would be blocked by a comparison that somebody only wanted to read, or never blocked."""
    assert run("compare", *two) == 0
    assert "passed -> failed" in capsys.readouterr().out
    written = ("--markdown", tmp_path / "c.md", "--html", tmp_path / "c.html")
    assert run("compare", *two, "--fail-on-regression", *written) == 3
    assert capsys.readouterr().err == "regression, exit code 3: status: passed -> failed\n"
    assert (tmp_path / "c.md").read_text().startswith("## Comparison: a regression")
    assert "A regression." in (tmp_path / "c.html").read_text()
    capsys.readouterr()
    assert run("compare", two[0], two[0], "--fail-on-regression", "--json") == 0
    assert json.loads(capsys.readouterr().out)["changed"] is False


def test_a_file_that_can_not_be_written_is_named_with_its_option(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a traceback and "a bug of ours" for a folder that is not there, and a pull request without a comment."""
    assert run("compare", *two, "--markdown", tmp_path / "new" / "folder" / "c.md") == 0
    assert (tmp_path / "new" / "folder" / "c.md").read_text().startswith("## Comparison")
    (tmp_path / "file").touch()
    capsys.readouterr()
    assert run("compare", *two, "--html", tmp_path / "file" / "c.html") == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'file' / 'c.html'}: it can't be written: " in said
    assert "fix: name another --html" in said


def test_what_is_no_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a wrong path would end in a traceback."""
    assert run("compare", tmp_path, tmp_path) == 2
    assert "name a result.json of a run" in capsys.readouterr().err


def test_two_policies_are_compared_without_running_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a reviewer could not see what an edit of a policy would change: which jobs come and go, which limits."""
    old, new, data = tmp_path / "old.yaml", tmp_path / "new.yaml", tmp_path / "d.npz"
    np.savez(data, x=np.zeros((4, 8), np.float32))
    old.write_text(policy_text(data, "backends: [onnxruntime], precisions: [fp32]"))
    new.write_text(
        policy_text(data, "backends: [onnxruntime], precisions: [fp32, int8]", "performance: {min_speedup: 2}\n")
    )
    assert run("compare", "--policy", old, new) == 0
    said = capsys.readouterr().out
    assert "performance.min_speedup: 1.0 -> 2" in said
    assert "job: cpu onnxruntime int8: none -> asked for\n" in said
    assert run("compare", "--policy", old, old) == 0
    assert capsys.readouterr().out == "the resolved policies are the same\n"
