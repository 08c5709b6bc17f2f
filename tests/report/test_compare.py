"""Two runs side by side: noise is no change, and what they were given is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compile_stage.core.records import PolicyValue, RunResult
from compile_stage.core.records.serving import Layout, ServedLoad, ServingCost
from compile_stage.report import comparison_text as text
from compile_stage.report.compare import Comparison, compare, comparison_document, figure_text
from compile_stage.report.reading import result_of
from compile_stage.report.result import result_text


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


def other_winner(result: RunResult, *, speedup: float, predict: float, size: int) -> RunResult:
    """The run with another candidate as its first winner; the one before lost and is as fast as it was."""
    target = changed_winner(result, 1).targets[0]
    old, new = target.candidates[0], target.candidates[1]
    assert old.measurement is not None
    assert old.artifact is not None
    assert target.predict_speedup is not None
    timings = tuple(
        replace(timing, speedup=speedup, speedup_interval=(speedup * 0.97, speedup * 1.02))
        for timing in old.measurement.timings
    )
    winner = replace(
        new,
        artifact=replace(old.artifact, size_bytes=size),
        measurement=replace(old.measurement, timings=timings),
    )
    states = {**target.selection.states, old.job.id: "lost", new.job.id: "won"}
    changed = replace(
        target,
        candidates=tuple(winner if one is new else one for one in target.candidates),
        selection=replace(target.selection, winner=new.job.id, states=states),
        predict_speedup=replace(target.predict_speedup, speedup=predict, interval=(predict * 0.97, predict * 1.02)),
    )
    return replace(result, targets=(changed, *result.targets[1:]))


def at_batch_sizes(result: RunResult, factors: dict[int, float], rows: int = 1) -> RunResult:
    """The run with every candidate measured at these batch sizes, at so many times its first speedup."""
    target = result.targets[0]
    assert target.predict_speedup is not None
    candidates = []
    for one in target.candidates:
        if one.measurement is not None:
            timing = one.measurement.timings[0]
            assert timing.speedup is not None
            assert timing.speedup_interval is not None
            low, high = timing.speedup_interval
            timings = tuple(
                replace(timing, batch_size=size, speedup=timing.speedup * by, speedup_interval=(low * by, high * by))
                for size, by in factors.items()
            )
            one = replace(one, measurement=replace(one.measurement, timings=timings))
        candidates.append(one)
    changed = replace(target, candidates=tuple(candidates), predict_speedup=replace(target.predict_speedup, rows=rows))
    return replace(result, targets=(changed, *result.targets[1:]))


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


@pytest.mark.parametrize("filled_first", [False, True])
def test_a_list_that_got_its_first_entry_is_not_said_to_be_none(result: RunResult, filled_first: bool) -> None:
    """Broken: of a run under a new waiver, the comparison says that there is none any more: "waivers: [] -> none"."""
    empty = replace(result, policy_values=(value("waivers", []), value("data.groups", None)))
    filled = replace(result, policy_values=(value("waivers[0].gate", "speedup"), value("data.groups", None)))
    found = compare(filled, empty) if filled_first else compare(empty, filled)
    assert [one.what for one in found.inputs] == ["waivers[0].gate"]


def test_the_values_of_a_target_that_is_new_are_counted(result: RunResult) -> None:
    """Broken: who adds a target reads a hundred lines of its settings before what changed in the others."""
    (first, *_) = result.targets
    new = replace(first, policy=replace(first.policy, target=replace(first.policy.target, name="added")))
    values = [value(f"targets.{name}.threads", 2) for name in (first.policy.target.name, "added")]
    before = replace(result, policy_values=(*values[:1], value("name", "a")))
    after = replace(
        result,
        targets=(*result.targets, new),
        policy_values=(*values, value("targets.added.device", "cpu"), value("name", "b")),
    )
    for runs, said in (((before, after), (None, "2 values")), ((after, before), ("2 values", None))):
        found = [one for one in compare(*runs).inputs if one.kind == "policy"]
        assert [one.what for one in found] == ["targets.added", "name"]
        assert (found[0].before, found[0].after) == said


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


def test_throughputs_that_are_not_compared_are_said(result: RunResult) -> None:
    """Broken: a version that serves a tenth has "no difference beyond noise", and no word that it was not looked at."""

    def served(throughput: float) -> RunResult:
        load = ServedLoad(layout=Layout(instances=1, threads=1), throughput_per_s=throughput)
        target = replace(result.targets[0], serving=ServingCost(winner=load))
        return replace(result, targets=(target, *result.targets[1:]))

    note = "note: served 657.8 -> 65.8 requests/s: loads of two runs are not compared"
    found = compare(served(657.8), served(65.8))
    assert note in str(found)
    assert not found.regressed
    assert "served" not in str(compare(served(657.8), served(657.8)))
    assert "served" not in str(compare(result, served(657.8)))


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
    found = compare(result, replace(result, targets=(lost, *result.targets[1:])))
    assert found.regressed
    assert text.regression_text(found).startswith("cpu-server: winner: ")


@pytest.mark.parametrize("missing", [True, False])
def test_a_target_of_one_run_alone_is_said(result: RunResult, missing: bool) -> None:
    """Broken: a target that was taken out of the policy would go unnoticed."""
    fewer = replace(result, targets=result.targets[1:])
    found = compare(result, fewer) if missing else compare(fewer, result)
    assert found.regressed is missing
    assert f"cpu-server: only in the {'first' if missing else 'second'} run" in str(found)


@pytest.mark.parametrize(
    ("speedup", "predict", "size", "what"),
    [
        (3.26, 1.84, 18_400, "speedup"),
        (6.52, 0.92, 18_400, "predict() speedup"),
        (6.52, 1.84, 48_200, "size"),
        (6.4, 1.8, 18_400, ""),
        (13.0, 3.0, 9_200, ""),
    ],
)
def test_another_winner_that_is_worse_is_a_regression(
    result: RunResult, speedup: float, predict: float, size: int, what: str
) -> None:
    """Broken: `--fail-on-regression` would pass a target that is half as fast, because another candidate wins; or it
    would fail where the new winner is as good."""
    found = compare(result, other_winner(result, speedup=speedup, predict=predict, size=size))
    assert found.regressed is bool(what)
    figures = [one for one in found.targets[0].figures if one.candidate == "openvino--int8-sym -> onnxruntime--fp32"]
    assert [one.what for one in figures] == ["speedup", "size", "predict() speedup"]
    assert [one.what for one in figures if one.verdict == "worse"] == ([what] if what else [])
    said = text.regression_text(found)
    assert bool(said) is bool(what)
    assert said.startswith("cpu-server: openvino--int8-sym -> onnxruntime--fp32: " if what else "")


def test_another_winner_that_is_a_few_bytes_larger_is_no_regression(result: RunResult) -> None:
    """Broken: which of two candidates that tie wins is chance, so every other run would fail for some bytes."""
    for size, regressed in ((18_700, False), (19_500, True)):
        found = compare(result, other_winner(result, speedup=6.52, predict=1.84, size=size))
        assert found.regressed is regressed
        assert any(figure.what == "size" and figure.verdict == "worse" for figure in found.targets[0].figures)


def test_another_winner_is_compared_also_where_the_policy_dropped_the_first(result: RunResult) -> None:
    """Broken: a policy that no longer asks for int8 would halve the speed with exit code 0; or it would fail where what
    wins instead is as fast."""
    for speedup, regressed in ((3.26, True), (6.52, False)):
        after = other_winner(result, speedup=speedup, predict=1.84, size=18_400)
        target = replace(after.targets[0], candidates=after.targets[0].candidates[1:])
        found = compare(result, replace(after, targets=(target, *after.targets[1:])))
        assert found.regressed is regressed
        assert "openvino--int8-sym: not in the second run" in found.targets[0].changes


def test_the_text_of_another_winner_is_as_before(result: RunResult, golden: Callable[[str, str], None]) -> None:
    """Broken: what a pull request's comment says of a winner that was replaced changed unseen; or a table and a text
    leave out what made the exit code 3."""
    found = compare(result, other_winner(result, speedup=3.26, predict=0.92, size=18_400))
    golden("compare-winner.txt", text.render_text(found))
    golden("compare-winner.md", text.render_markdown(found))
    figures = comparison_document(found)["targets"][0]["figures"]
    assert figures[0]["candidate"] == "openvino--int8-sym -> onnxruntime--fp32"
    assert figures[0]["verdict"] == "worse"


def test_speeds_are_compared_at_a_batch_size_of_both_runs(result: RunResult) -> None:
    """Broken: batch 1 of one run would be compared with batch 16 of the other, as if the model had become slower."""
    before = at_batch_sizes(result, {1: 1})
    found = compare(before, at_batch_sizes(result, {16: 0.5, 1: 1}))
    assert not found.regressed
    both = "openvino--int8-sym, onnxruntime--fp32: speeds are compared at batch size 1"
    assert both in found.targets[0].notes
    assert compare(before, at_batch_sizes(result, {16: 1, 1: 0.5})).regressed


def test_speeds_without_a_batch_size_of_both_runs_are_not_compared(result: RunResult) -> None:
    """Broken: a pull request that asks for another batch size would fail, or be praised, for what was not measured."""
    found = compare(at_batch_sizes(result, {1: 1}), at_batch_sizes(result, {16: 0.5, 8: 0.5}, rows=16))
    target = found.targets[0]
    assert not found.regressed
    assert {figure.what for figure in target.figures} == {"size"}
    timed = "openvino--int8-sym, onnxruntime--fp32, onnxruntime--int8-dynamic"
    assert f"{timed}: measured at other batch sizes (1 -> 16, 8): speeds are not compared" in target.notes
    assert "openvino--int8-sym: predict() was given other numbers of rows (1 -> 16): it is not compared" in target.notes
    assert target.unchanged_text == "no difference in what can be compared"


def test_a_slowed_baseline_is_noted_once(result: RunResult) -> None:
    """Broken: the same note for each candidate, also for those that were refused, and not in which run it was."""
    [target, *others] = result.targets
    slowed = replace(target.predict_speedup, contradiction="its threads waited for cores")
    after = replace(target, predict_speedup=slowed)
    found = compare(result, replace(result, targets=(after, *others))).targets[0]
    said = "something slowed the baseline down in the second run: speeds over it are not compared"
    assert [note for note in found.notes if "slowed" in note] == [said]
    assert not [figure for figure in found.figures if figure.what == "speedup"]


def test_an_interval_that_does_not_hold_1_is_not_shown_as_one_that_does(result: RunResult) -> None:
    """Broken: "slower beyond the noise" stands beside an interval that ends at 1.00."""
    target = result.targets[0]
    winner = target.candidates[0]
    assert winner.measurement is not None
    ends = {"speedup": 6.5, "speedup_interval": (6.499, 6.501)}
    exact = replace(
        winner,
        measurement=replace(winner.measurement, timings=tuple(replace(t, **ends) for t in winner.measurement.timings)),
    )
    before = replace(result, targets=(replace(target, candidates=(exact, *target.candidates[1:])), *result.targets[1:]))
    figures = [figure for one in compare(before, changed_winner(before, 0.997)).targets for figure in one.figures]
    (slower,) = [figure for figure in figures if figure.verdict == "worse"]
    assert slower.interval is not None
    assert 0.995 < slower.interval[1] < 1
    assert figure_text(slower).endswith("1.00× of before (0.9968 to 0.9972)")


def test_candidates_of_two_versions_are_one_whatever_dashes_the_model_has(result: RunResult) -> None:
    """Broken: of a model `team--fraud--eu` every candidate of another version is new, and no speed is compared."""
    versions = []
    for version in ("1", "2"):
        document = json.loads(result_text(result).replace("digits-cnn-1--", f"team--fraud--eu-{version}--"))
        versions.append(result_of(document))
    found = compare(*versions)
    changes = [change for target in found.targets for change in target.changes]
    assert not any("not in the second run" in change or ": new, " in change for change in changes)
    assert any(figure.interval is not None for target in found.targets for figure in target.figures)
