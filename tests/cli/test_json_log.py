"""`run --log-format json`: a log that a program reads line by line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import POLICY_TEXT

import compile_stage.api as api
from compile_stage.cli.main import main
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import RegistryError
from compile_stage.core.events import EventLog
from compile_stage.core.records import RunResult

Lines = list[dict[str, Any]]


@pytest.fixture
def logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Lines]]:
    """Runs the command with a replaced `api.run`: (exit code, what standard error had, a dict a line)."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY_TEXT)

    def run(behaviour: Callable[..., RunResult]) -> tuple[int, Lines]:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest has put its own there
        monkeypatch.setattr(api, "run", behaviour)
        with pytest.raises(SystemExit) as left:
            main(["run", "models:/m/1", "-p", str(policy), "--log-format", "json"])
        shown = capsys.readouterr()
        assert shown.out == ""
        return int(left.value.code or 0), [json.loads(line) for line in shown.err.splitlines()]

    return run


def test_steps_logs_and_the_end_are_a_line_each(logged: Callable[..., tuple[int, Lines]], result: RunResult) -> None:
    """Broken: a program that follows the run meets text between the objects, a password, or no verdict at the end."""

    def behave(*_: Any, reporter: Any, **__: Any) -> RunResult:
        events = EventLog(reporter)
        with events.step("compile", "job"):
            logging.getLogger("lib").warning("slow store at\npostgres://me:secret@host/db")
        with pytest.raises(RegistryError), events.step("publish"):
            raise RegistryError("the server is gone")
        return result

    code, lines = logged(behave)
    assert code == result.exit_code
    assert [(line["event"], line.get("step", "")) for line in lines] == [
        ("began", "compile"),
        ("log", ""),
        ("ended", "compile"),
        ("began", "publish"),
        ("ended", "publish"),
        ("result", ""),
    ]
    assert lines[1]["message"] == "slow store at\npostgres://me@host/db"
    assert (lines[2]["job"], lines[2]["outcome"]) == ("job", "done")
    assert (lines[4]["outcome"], lines[4]["message"]) == ("failed", "the server is gone")
    assert lines[-1]["status"] == result.status
    assert set(lines[-1]["winners"]) == {target.policy.target.name for target in result.targets}


def test_an_error_is_the_last_line_with_its_code(logged: Callable[..., tuple[int, Lines]]) -> None:
    """Broken: a program has to read English to know why a run ended."""

    def behave(*_: Any, **__: Any) -> RunResult:
        raise RegistryError("no such model", fix="name another", where="models:/m/1", code=Code.NOT_IN_REGISTRY)

    code, lines = logged(behave)
    assert code == 4
    assert {key: lines[-1][key] for key in ("event", "code", "exit_code", "problem", "fix")} == {
        "event": "error",
        "code": "CS0402",
        "exit_code": 4,
        "problem": "no such model",
        "fix": "name another",
    }
