"""`result.json` read back: reports made again are those that the run wrote."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import pytest
from command_line import command_line

from compile_stage.core.errors import UsageError
from compile_stage.core.records import OutputErrors, PolicyValue, Replacement, RunResult, SamplePreview, WorstAnswer
from compile_stage.report import write
from compile_stage.report.files import NAMES, render
from compile_stage.report.reading import read_result, result_of
from compile_stage.report.result import result_text


def full(factory: ModuleType) -> RunResult:
    """A run with everything that a report can show."""
    target = factory.with_option_tuning()
    errors = OutputErrors(
        output="logits",
        errors=(0.0, float("inf"), 0.031),
        worst=(WorstAnswer(sample=1, error=float("inf"), original="largest at 3: 0.9", candidate="nan"),),
    )
    target = dataclasses.replace(
        target,
        candidates=tuple(dataclasses.replace(c, errors=(errors,)) for c in target.candidates),
        previews=(SamplePreview(sample=1, kind="values", content="x: 1, 2", label="3"),),
        replaced=Replacement(alias="prod", uri="models:/c/2", measurement=factory.measurement(0.0003, 1.2)),
    )
    values = (PolicyValue(path="select.prefer", value="latency", origin="policy.yaml:3", is_default=False),)
    made: RunResult = factory.make_result(target, factory.no_winner())
    return dataclasses.replace(made, started_at="2026-11-23T20:05:16Z", policy_values=values)


@pytest.mark.parametrize("kind", [*NAMES, "json"])
def test_a_report_made_again_is_the_same(factory: ModuleType, kind: str) -> None:
    """Broken: `compile-stage report` shows less, or something else, than the report that the run itself wrote."""
    made = full(factory)
    again = result_of(json.loads(result_text(made)))
    if kind == "json":
        assert result_text(again) == result_text(made)
    else:
        assert render(again, kind) == render(made, kind)


def test_the_command_writes_beside_the_result_or_to_standard_output(factory: ModuleType, tmp_path: Path) -> None:
    """Broken: the command writes elsewhere than it says, or another kind."""
    written = write(full(factory), tmp_path)
    before = {kind: (tmp_path / name).read_text() for kind, name in NAMES.items()}
    for name in NAMES.values():
        (tmp_path / name).unlink()
    done = command_line("report", str(tmp_path))
    assert (done.returncode, done.stdout.strip()) == (0, str(written["report.html"]))
    assert written["report.html"].read_text() == before["html"]
    done = command_line(
        "report", str(tmp_path / "result.json"), "--format", "junit", "--out", str(tmp_path / "n" / "j.xml")
    )
    assert (tmp_path / "n" / "j.xml").read_text() == before["junit"], done.stdout
    assert command_line("report", str(tmp_path), "--format", "md", "--out", "-").stdout.strip() == before["md"].strip()


def test_what_is_no_result_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Broken: a wrong file ends in a traceback, or in an empty report."""
    (tmp_path / "result.json").write_text('{"schema": "compile-stage/result/v1", "status": "passed"}')
    with pytest.raises(UsageError, match="does not hold to"):
        read_result(tmp_path)
    with pytest.raises(UsageError, match=r"none\.json: it can't be read: No such file or directory\n"):
        read_result(tmp_path / "none.json")
