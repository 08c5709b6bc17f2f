"""Option tuning in every report: what each step gained, and what was rejected and why."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest

from compile_stage.cli.render import Display
from compile_stage.core.records import OptimizationStep, RunResult
from compile_stage.measure.successive_halving import FoundSettings
from compile_stage.pipeline.settings_search import describe_setting
from compile_stage.report.html import render_html
from compile_stage.report.markdown import render_markdown
from compile_stage.report.option_tuning import option_tuning_line, option_tuning_rows
from compile_stage.report.reading import read_result, result_of
from compile_stage.report.result import result_json_schema, result_text
from compile_stage.steps.select import without_speed

TUNED = "digits-cnn-1--cpu-server--openvino--int8-sym--memory-lean"


@pytest.fixture
def tuned(factory: ModuleType) -> RunResult:
    return factory.make_result(factory.with_option_tuning())


def test_the_figures_are_those_of_the_candidates(tuned: RunResult) -> None:
    """Broken: option tuning would show another latency, memory or error than the table above it."""
    rows = {row.what: row for row in option_tuning_rows(tuned, tuned.targets[0])}
    original, lean, liar = rows["PyTorch (eager)"], rows["lean"], rows["<b>liar</b>"]
    assert original.p50_s == pytest.approx(0.00202, rel=0.05)
    assert original.size_bytes is None
    assert (lean.peak_memory_bytes, lean.size_bytes, lean.state) == (61_000_000, 18_400, "won")
    assert lean.error is not None
    assert lean.error.gate.metric == "accuracy"
    assert (liar.p50_s, liar.speedup, liar.error, liar.state) == (None, None, None, None)


def test_result_json_fits_its_schema(tuned: RunResult) -> None:
    """Broken: a field that others read would be missing, or a rejected option hidden."""
    document = json.loads(result_text(tuned))
    jsonschema.Draft202012Validator(result_json_schema()).validate(document)
    steps = document["targets"][0]["ladder"]
    assert [step["kind"] for step in steps] == ["original", "graph", "precision", "memory", "tuning", "tuning"]
    assert steps[3]["options"] == {"arena": False}
    assert steps[3]["speedup_interval"] == [1.05, 1.09]
    assert [step["climbed"] for step in steps] == [True, True, True, True, False, False]
    assert steps[5]["job_id"] is None


def test_the_page_and_the_comment_show_it(tuned: RunResult) -> None:
    """Broken: readers of the reports would not see what each step gained, or markup of others would be rendered."""
    for text in (render_html(tuned), render_markdown(tuned)):
        for words in (
            "hardware tuning",
            "61 MB instead of 92 MB",
            "1.05 to 1.09",
            "cosine is 0.2",
            "rejected",
        ):
            assert words in text, words
        assert ("61.0 MB" if text.startswith("## ") else ">61.0</td>") in text
        assert "<b>liar</b>" not in text
        assert "liar" in text
        assert "not tried" in text


def test_the_terminal_has_one_line(tuned: RunResult) -> None:
    """Broken: the terminal would lack it, or drown in it."""
    line = option_tuning_line(tuned, tuned.targets[0])
    assert line == (
        "option tuning: original 2.03 ms → graph fp32 0.62 ms → precision int8-sym 0.31 ms → memory lean 0.29 ms; "
        "1 option rejected"
    )
    stream = io.StringIO()
    Display(stream, width=200).show_result(tuned, Path("out"))
    assert stream.getvalue().count("option tuning: ") == 1


def test_a_winner_beside_option_tuning_is_named(tuned: RunResult, tmp_path: Path) -> None:
    """Broken: a reader would take the last accepted step for what ships."""
    target = tuned.targets[0]
    elsewhere = replace(target.selection, winner="other", states={**target.selection.states, TUNED: "lost"})
    other = next(c.job.id for c in target.candidates if c.job.id not in {step.job_id for step in target.ladder})
    elsewhere = replace(elsewhere, winner=other, states={**elsewhere.states, other: "won"})
    changed = replace(target, selection=elsewhere)
    assert "the winner is none of these" in option_tuning_line(tuned, changed)
    result = replace(tuned, targets=(changed,))
    for text in (render_html(result), render_markdown(result)):
        assert "is none of these steps." in text
    assert "none of these steps" not in render_markdown(tuned)
    steps = tuple(replace(step, accepted=step.accepted and step.job_id != TUNED) for step in target.ladder)
    again = replace(tuned, targets=(replace(target, ladder=steps),))
    (tmp_path / "result.json").write_text(result_text(again))
    for known in (again, read_result(tmp_path / "result.json")):
        assert "lean was rejected here, tried on another candidate" in render_markdown(known)


def test_a_run_without_option_tuning_has_no_section(result: RunResult) -> None:
    """Broken: every report would carry an empty table."""
    assert "Option tuning" not in render_html(result)
    assert "Option tuning" not in render_markdown(result)
    assert option_tuning_line(result, result.targets[0]) == ""
    assert json.loads(result_text(result))["targets"][0]["ladder"] == []


def test_a_setting_that_was_measured_in_the_search_is_not_said_to_be_untried(tuned: RunResult) -> None:
    """Broken: settings that were measured together, of which no candidate is made, are "not tried" beside "rejected:
    no combination was better", and the terminal does not count them."""
    target = tuned.targets[0]
    found = FoundSettings(valid=7, tried=7, alone={"arena": 1.01})
    searched = OptimizationStep(
        kind="memory", name="arena", accepted=False, reason=describe_setting("arena", found), options={"arena": False}
    )
    late = replace(searched, name="late", reason=describe_setting("late", found), tried=False)
    changed = replace(target, ladder=(*target.ladder[:4], searched, late))
    rows = {row.what: row for row in option_tuning_rows(tuned, changed)}
    assert (rows["arena"].outcome, rows["late"].outcome, rows["lean"].outcome) == ("rejected", "not tried", "")
    assert option_tuning_line(tuned, changed).endswith("; 1 option rejected")
    assert "| arena (rejected) |" in render_markdown(replace(tuned, targets=(changed,)))


def test_whether_a_step_was_tried_does_not_hang_on_its_words(tuned: RunResult, tmp_path: Path) -> None:
    """Broken: another wording of a reason makes "not tried" of what was measured, in this run's reports or in those
    that are made again from result.json; or a precision that failed counts as an option."""
    target = tuned.targets[0]
    measured = OptimizationStep(kind="memory", name="arena", accepted=False, reason="no combination was better")
    missed = replace(target.ladder[2], accepted=False, reason="accuracy: lost 0.2")
    changed = replace(tuned, targets=(replace(target, ladder=(*target.ladder[:2], missed, measured)),))
    (tmp_path / "result.json").write_text(result_text(changed))
    for result in (changed, read_result(tmp_path / "result.json")):
        rows = option_tuning_rows(result, result.targets[0])
        assert [row.outcome for row in rows] == ["", "", "rejected", "rejected"]
        assert option_tuning_line(result, result.targets[0]).endswith(
            "; 1 option rejected; the winner is none of these"
        )


def test_a_file_without_the_field_says_the_same_as_when_it_was_written(tuned: RunResult) -> None:
    """Broken: the report of a version that was published before says "not tried" of what it says was rejected."""
    target = tuned.targets[0]
    searched = OptimizationStep(kind="memory", name="arena", accepted=False, reason="rejected: no better")
    document = json.loads(result_text(replace(tuned, targets=(replace(target, ladder=(*target.ladder, searched)),))))
    for step in document["targets"][0]["ladder"]:
        del step["tried"]
    result = result_of(document)
    rows = option_tuning_rows(result, result.targets[0])
    assert [row.outcome for row in rows] == ["", "", "", "", "rejected", "not tried", "rejected"]


def test_a_step_over_a_baseline_that_was_slowed_down_has_no_figure(tuned: RunResult) -> None:
    """Broken: `speedup in the runtime not known` stands above a step that is 214 times as fast as the original."""
    target = tuned.targets[0]
    assert target.predict_speedup is not None
    slowed = replace(target, predict_speedup=replace(target.predict_speedup, contradiction="it waited for cores"))
    assert [step.speedup for step in target.ladder] == [None, 3.26, 2.0, 1.07, None, None]
    assert [step.speedup for step in without_speed(slowed).ladder] == [None, None, 2.0, 1.07, None, None]
