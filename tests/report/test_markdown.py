"""`report.md`: what a pull request's comment shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

from compile_stage.core.records import RunResult
from compile_stage.report.markdown import render_markdown


def test_the_text(result: RunResult, golden: Callable[[str, str], None]) -> None:
    golden("report.md", render_markdown(result))


def test_others_words_cannot_leave_their_cell(result: RunResult) -> None:
    """A `|` would shift the columns, a newline would end the table, HTML would be rendered, an @ would call people."""
    target = result.targets[0]
    reasons = dict.fromkeys(target.selection.reasons, "a | b\nc <img src=x> `d` [e](f) @team")
    hurt = dataclasses.replace(target, selection=dataclasses.replace(target.selection, reasons=reasons))
    text = render_markdown(dataclasses.replace(result, targets=(hurt,)))
    line = next(line for line in text.splitlines() if "openvino | int8-sym" in line)
    assert line.replace("\\|", "").count("|") == 9
    assert "a \\| b c &lt;img src=x&gt; \\`d\\` \\[e\\](f) @\u200bteam" in line


def test_it_fits_where_it_is_posted(factory: ModuleType) -> None:
    """A code host refuses a longer comment: then there would be none at all."""
    made = factory.make_result(*(factory.every_ending() for _ in range(20)))
    whole = render_markdown(made)
    text = render_markdown(made, limit=4000)
    assert len(text) <= 4000 < len(whole)
    assert text.startswith("## ✅ digits-cnn 1: passed")
    assert "Cut here" in text


def test_synthetic_data_is_called_so(result: RunResult) -> None:
    samples = {"validation": dataclasses.replace(result.samples["validation"], real=False)}
    assert "**synthetic** samples" in render_markdown(dataclasses.replace(result, samples=samples))


def test_each_of_a_runs_problems_is_a_line(result: RunResult) -> None:
    """Broken: "at most 1.1 allowed fix: promote.max_slowdown", two problems and what to do as one sentence."""
    failed = dataclasses.replace(
        result, status="failed", exit_code=3, problem="the alias stays\n  fix: wait\n<b>too slow"
    )
    text = render_markdown(failed)
    assert "\nthe alias stays  \nfix: wait  \n&lt;b&gt;too slow" in text
