"""The ladder in every report: what each step gained, and what was dropped and why."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest

from compile_stage.cli.render import Display
from compile_stage.core.records import RunResult
from compile_stage.report.html import render_html
from compile_stage.report.ladder import ladder_line, ladder_rows
from compile_stage.report.markdown import render_markdown
from compile_stage.report.result import result_json_schema, result_text

RUNG = "digits-cnn-1--cpu-server--openvino--int8-sym--memory-lean"


@pytest.fixture
def climbed(factory: ModuleType) -> RunResult:
    return factory.make_result(factory.with_ladder())


def test_the_figures_are_those_of_the_candidates(climbed: RunResult) -> None:
    """Broken: the ladder would tell another latency, memory or error than the table above it."""
    rows = {row.what: row for row in ladder_rows(climbed, climbed.targets[0])}
    original, lean, liar = rows["PyTorch (eager)"], rows["lean"], rows["<b>liar</b>"]
    assert original.p50_s == pytest.approx(0.00202, rel=0.05)
    assert original.size_bytes is None
    assert (lean.peak_memory_bytes, lean.size_bytes, lean.state) == (61_000_000, 18_400, "won")
    assert lean.error is not None
    assert lean.error.gate.metric == "accuracy"
    assert (liar.p50_s, liar.speedup, liar.error, liar.state) == (None, None, None, None)


def test_result_json_fits_its_schema(climbed: RunResult) -> None:
    """Broken: a field that others read would be missing, or a dropped setting hidden."""
    document = json.loads(result_text(climbed))
    jsonschema.Draft202012Validator(result_json_schema()).validate(document)
    told = document["targets"][0]["ladder"]
    assert [step["kind"] for step in told] == ["original", "graph", "precision", "memory", "tuning", "tuning"]
    assert told[3]["options"] == {"arena": False}
    assert told[3]["speedup_interval"] == [1.05, 1.09]
    assert [step["climbed"] for step in told] == [True, True, True, True, False, False]
    assert told[5]["job_id"] is None


def test_the_page_and_the_comment_tell_it(climbed: RunResult) -> None:
    """Broken: readers of the reports would not see what each step gained, or markup of others would be obeyed."""
    for text in (render_html(climbed), render_markdown(climbed)):
        for said in (
            "hardware tuning",
            "61 MB instead of 92 MB",
            "1.05 to 1.09",
            "61.0 MB",
            "cosine is 0.2",
            "dropped",
        ):
            assert said in text, said
        assert "<b>liar</b>" not in text
        assert "liar" in text
        assert "not climbed" in text


def test_the_terminal_has_one_line(climbed: RunResult) -> None:
    """Broken: the terminal would lack it, or drown in it."""
    line = ladder_line(climbed, climbed.targets[0])
    assert line == (
        "ladder: original 2.03 ms → graph fp32 0.62 ms → precision int8-sym 0.31 ms → memory lean 0.29 ms; "
        "1 setting tried and dropped"
    )
    stream = io.StringIO()
    Display(stream, width=200).show_result(climbed, Path("out"))
    assert stream.getvalue().count("ladder: ") == 1


def test_a_winner_beside_the_ladder_is_said(climbed: RunResult) -> None:
    """Broken: a reader would take the top of the ladder for what ships."""
    target = climbed.targets[0]
    elsewhere = replace(target.selection, winner="other", states={**target.selection.states, RUNG: "lost"})
    assert "the winner is none of these" in ladder_line(climbed, replace(target, selection=elsewhere))


def test_a_run_without_a_ladder_has_no_section(result: RunResult) -> None:
    """Broken: every report would carry an empty table."""
    assert "Ladder" not in render_html(result)
    assert "ladder" not in render_markdown(result)
    assert ladder_line(result, result.targets[0]) == ""
    assert json.loads(result_text(result))["targets"][0]["ladder"] == []
