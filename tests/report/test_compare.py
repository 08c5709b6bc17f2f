"""Two runs side by side: noise is no change, and what they were given is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compile_stage.core.records import PolicyValue, RunResult
from compile_stage.report import comparison_text as text
from compile_stage.report.compare import Comparison, compare, comparison_document


def changed_winner(result: RunResult, factor: float, **more: Any) -> RunResult:
    """The run with its first winner so many times as fast, by the same relative intervals."""
    target = result.targets[0]
    winner = target.candidates[0]
    assert winner.measurement is not None
    timings = tuple(
        replace(
            timing,
            speedup=timing.speedup * factor,
            speedup_interval=(timing.speedup_interval[0] * factor, timing.speedup_interval[1] * factor),
        )
        for timing in winner.measurement.timings
        if timing.speedup and timing.speedup_interval
    )
    faster = replace(winner, measurement=replace(winner.measurement, timings=timings))
    targets = (replace(target, candidates=(faster, *target.candidates[1:])), *result.targets[1:])
    return replace(result, targets=targets, **more)


def value(path: str, of: Any) -> PolicyValue:
    return PolicyValue(path=path, value=of, origin="policy.yaml:3", is_default=False, locked_by="")


def one_option(result: RunResult) -> Comparison:
    before = replace(result, policy_values=(value("targets.cpu-server.threads", 2), value("budget.minutes", 60)))
    values = (value("targets.cpu-server.threads", 4), value("budget.minutes", 60))
    return compare(before, changed_winner(result, 0.5, policy_values=values))


def test_the_same_run_twice_has_no_difference(result: RunResult) -> None:
    """Broken: noise would be reported as a change."""
    found = compare(result, result)
    assert not found.changed
    assert not found.regressed
    assert "no difference beyond noise" in text.render_text(found)
    assert "the same policy, source, samples, hardware and packages" in " ".join(text.render_text(found).split())


def test_a_ratio_within_the_noise_is_no_change(result: RunResult) -> None:
    """Broken: 2 % between two measurements that are each known to 2.5 % would be called a regression."""
    found = compare(result, changed_winner(result, 0.98))
    assert not found.changed
    (figure,) = [f for f in found.targets[0].figures if f.what == "speedup" and "int8-sym" in f.candidate]
    assert figure.verdict == "unchanged"
    assert figure.interval is not None
    low, high = figure.interval
    assert low < 0.98 < 1 < high


def test_one_option_is_named_with_what_it_changed(result: RunResult) -> None:
    """Broken: who edits one value could not see that it was this which made it slower, and by how much."""
    found = one_option(result)
    assert [(one.kind, one.what, one.before, one.after) for one in found.inputs] == [
        ("policy", "targets.cpu-server.threads", 2, 4)
    ]
    assert found.regressed
    assert "0.50× of before (0.48 to 0.52)" in str(found)


def test_the_text_is_as_before(result: RunResult, golden: Callable[[str, str], None]) -> None:
    """Broken: what people read, or paste into a pull request, changed unseen; or a line is wider than a terminal."""
    found = one_option(result)
    shown = text.render_text(found)
    assert max(map(len, shown.splitlines())) <= 80
    golden("compare.txt", shown)
    golden("compare.md", text.render_markdown(found))


def test_the_page_escapes_what_others_wrote(result: RunResult) -> None:
    """Broken: a policy's value could put a script into the page."""
    before = replace(result, policy_values=(value("owner", "<script>"),))
    page = text.render_html(compare(before, replace(result, policy_values=(value("owner", "me"),))))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_speeds_of_two_machines_are_not_compared(result: RunResult) -> None:
    """Broken: a faster machine would look like a faster model."""
    slower = changed_winner(result, 0.5)
    target = slower.targets[0]
    winner = target.candidates[0]
    assert winner.measurement is not None
    timings = tuple(replace(timing, environment="other") for timing in winner.measurement.timings)
    moved = replace(winner, measurement=replace(winner.measurement, timings=timings))
    elsewhere = replace(
        slower,
        targets=(replace(target, candidates=(moved, *target.candidates[1:])), *slower.targets[1:]),
        environment={**result.environment, "hardware_fingerprint": "other"},
    )
    found = compare(result, elsewhere)
    assert not any("int8-sym" in figure.candidate and figure.what != "size" for figure in found.targets[0].figures)
    assert "openvino--int8-sym: measured on different hardware: speeds are not compared" in found.targets[0].notes
    alone = replace(found.targets[0], figures=(), changes=())
    assert alone.unchanged_text == "no difference in what can be compared"
    assert ("hardware", "hardware_fingerprint") in {(one.kind, one.what) for one in found.inputs}


def test_a_slower_predict_is_a_regression(result: RunResult) -> None:
    """Broken: a release that only slows the conversion down would pass."""
    target = result.targets[0]
    assert target.predict_speedup is not None
    slower = replace(target.predict_speedup, speedup=0.92, interval=(0.86, 0.98))
    found = compare(result, replace(result, targets=(replace(target, predict_speedup=slower), *result.targets[1:])))
    assert found.regressed
    assert "slower beyond the noise through predict(): 1.84× -> 0.92×" in str(found)


def test_the_document_is_plain_and_versioned(result: RunResult) -> None:
    """Broken: a program could not read it, or not know which fields it has."""
    document = json.loads(json.dumps(comparison_document(one_option(result))))
    assert document["schema"] == "compile-stage/comparison/v1"
    assert document["regressed"] is True
    assert document["inputs"] == [{"kind": "policy", "what": "targets.cpu-server.threads", "before": 2, "after": 4}]
    figure = document["targets"][0]["figures"][0]
    assert set(figure) == {"candidate", "what", "before", "after", "ratio", "interval", "verdict"}


def test_a_lost_winner_is_a_regression(result: RunResult) -> None:
    """Broken: `--fail-on-regression` would let a pull request pass after which nothing ships."""
    target = result.targets[0]
    lost = replace(target, selection=replace(target.selection, winner=None))
    assert compare(result, replace(result, targets=(lost, *result.targets[1:]))).regressed


@pytest.mark.parametrize("missing", [True, False])
def test_a_target_of_one_run_alone_is_said(result: RunResult, missing: bool) -> None:
    """Broken: a target that was taken out of the policy would go unnoticed."""
    fewer = replace(result, targets=result.targets[1:])
    found = compare(result, fewer) if missing else compare(fewer, result)
    assert found.regressed is missing
    assert f"cpu-server: only in the {'first' if missing else 'second'} run" in str(found)
