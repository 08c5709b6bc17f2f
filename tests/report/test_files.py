"""All files, each whole or not at all."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from compile_stage.core.records import RunResult
from compile_stage.report import write
from compile_stage.report.files import write_text


def test_all_four_files_are_written(result: RunResult, tmp_path: Path) -> None:
    out = tmp_path / "not" / "there"
    written = write(result, out)
    assert set(written) == {"result.json", "report.html", "report.md", "junit.xml"}
    assert sorted(path.name for path in out.iterdir()) == sorted(written)
    assert json.loads(written["result.json"].read_text())["status"] == "passed"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_text(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    """A temporary file is private; a report that the web server can't read is none."""
    path = write_text(tmp_path / "report.html", "x")
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_lone_surrogate_does_not_cost_the_report(tmp_path: Path) -> None:
    assert "\\udcff" in write_text(tmp_path / "x", "name \udcff").read_text()


def test_a_terminal_that_shows_a_report_obeys_nothing_in_it(tmp_path: Path) -> None:
    """Broken: a plug-in's name or message could clear the screen of whoever prints the report, or hide lines of it."""
    assert write_text(tmp_path / "report.md", "a\x1b[2Jb\x9bc\r\n\td").read_text() == "a\ufffd[2Jb\ufffdc\ufffd\n\td"
