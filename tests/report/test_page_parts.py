"""What the page computes: the frontier, drift over rounds, payback, columns of one unit, and the data of its charts."""

from __future__ import annotations

import dataclasses
import json
from types import ModuleType

import pytest

from compile_stage.core.records import (
    Check,
    Gate,
    Measurement,
    Outcome,
    PolicyValue,
    Receipt,
    RunResult,
    Timing,
    Verdict,
)
from compile_stage.report import numbers, summary
from compile_stage.report.page_data import embedded
from compile_stage.report.pareto import Point, axes, frontier
from compile_stage.report.payback import payback
from compile_stage.report.rounds import rounds_of
from compile_stage.report.why import serve_command, trusted_files, why_it_won


def point(name: str, p50_s: float, size: float, *, passed: bool = True) -> Point:
    return Point(
        job_id=name, label=name, state="lost" if passed else "failed", p50_s=p50_s, interval_s=None, stable=True,
        passed=passed, values={"size": size},
    )  # fmt: skip


def test_the_frontier_holds_what_no_other_beats_in_both() -> None:
    """Broken: a candidate that another beats in latency and in size is called a choice, or a failed one is."""
    found = [
        point("slow-small", 3.0, 1.0),
        point("fast-large", 1.0, 9.0),
        point("beaten", 2.0, 9.5),
        point("twin", 1.0, 9.0),
        point("middle", 2.0, 4.0),
        point("failed", 0.1, 0.1, passed=False),
    ]
    assert frontier(found, "size") == ("fast-large", "middle", "slow-small")
    assert [axis.key for axis in axes(found)] == ["size"]
    assert axes(found[:1]) == ()


def test_drift_is_the_last_third_over_the_first() -> None:
    """Broken: a machine that slowed down is not seen, or calls are counted to the wrong round."""
    latencies = tuple(median for median in (1.0, 1.0, 1.1, 1.1, 1.3, 1.3) for _ in range(5))
    timing = Timing(
        latency_s=latencies, batch_size=1, stable=True, environment="x", turns=(5,) * 6, processes=(0, 0, 0, 1, 1, 1)
    )
    found = rounds_of("a", "won", timing)
    assert found is not None
    assert found.medians_s == (1.0, 1.0, 1.1, 1.1, 1.3, 1.3)
    assert found.drift == pytest.approx(0.3)
    assert found.drifted
    few = rounds_of("a", "won", dataclasses.replace(timing, latency_s=latencies[:25], turns=(5,) * 5))
    assert few is not None
    assert few.drift is None
    assert rounds_of("a", "won", dataclasses.replace(timing, turns=(5,) * 5)) is None


def test_payback_is_the_run_over_what_a_call_saves(result: RunResult) -> None:
    """Broken: the report says that a run pays back sooner or later than it does, or says so of an unstable speedup."""
    target = result.targets[0]
    found = payback(result, target)
    assert found is not None
    assert found.calls is not None
    assert found.calls * found.saved_s == pytest.approx(result.duration_s)
    assert found.text.startswith("1.72 ms saved by each call at batch 1: the run's 21.4 s pay back after 12,4")
    winner = target.winner
    assert winner is not None
    assert winner.measurement is not None
    unsure = tuple(dataclasses.replace(timing, stable=False) for timing in winner.measurement.timings)
    measured = dataclasses.replace(winner, measurement=dataclasses.replace(winner.measurement, timings=unsure))
    doubtful = dataclasses.replace(target, candidates=(measured, *target.candidates[1:]))
    assert payback(result, doubtful) is None
    assert payback(result, result.targets[1]) is None


def test_three_sentences_say_why_it_won(result: RunResult) -> None:
    """Broken: a reader has to count the table to learn what held, and what the next best was."""
    tried, fast, following = why_it_won(result, result.targets[0])
    assert tried.startswith(f"{len(summary.rows(result, result.targets[0]))} candidates: 2 held every gate that ")
    assert fast.startswith("openvino int8-sym: 6.52× the baseline's speed")
    assert following.startswith("Next: ")
    assert "times the winner's median: passed, but 2.00× slower" in following
    assert why_it_won(result, result.targets[1]) == ()


def test_the_one_sentence_of_a_run_names_what_is_waived(result: RunResult) -> None:
    """Broken: who reads the last line of the terminal, or the page's headline, takes a missed gate for a held one."""
    passed = dataclasses.replace(result, problem="", targets=result.targets[:1])
    assert "openvino int8-sym selected under a waiver of max_rel, 6.52×" in summary.headline(passed)
    winner = passed.targets[0].winner
    assert winner is not None
    assert winner.verdict is not None
    held = tuple(check for check in winner.verdict.checks if check.waived is None)
    changed = dataclasses.replace(winner, verdict=Verdict(checks=held))
    candidates = tuple(changed if one is winner else one for one in passed.targets[0].candidates)
    unwaived = dataclasses.replace(passed, targets=(dataclasses.replace(passed.targets[0], candidates=candidates),))
    assert "openvino int8-sym selected, 6.52×" in summary.headline(unwaived)


def test_what_is_waived_is_not_said_to_hold(result: RunResult) -> None:
    """Broken: the page shows in yellow that a gate is waived, and says below it that every gate held."""
    target = result.targets[0]
    winner = target.winner
    assert winner is not None
    assert winner.verdict is not None
    assert winner.verdict.waivers
    assert ": 2 held every gate that is not waived, " in why_it_won(result, target)[0]
    held = tuple(check for check in winner.verdict.checks if check.waived is None)
    changed = dataclasses.replace(winner, verdict=Verdict(checks=held))
    candidates = tuple(changed if one is winner else one for one in target.candidates)
    assert ": 2 held every gate, " in why_it_won(result, dataclasses.replace(target, candidates=candidates))[0]


def test_medians_of_different_rounds_are_not_divided(result: RunResult) -> None:
    """Broken: of who left the rounds while the machine was slow, one line says 3.0 times and its reason 2.4."""
    target = result.targets[0]

    def shorter(measured: Measurement | None) -> Measurement | None:
        if measured is None:
            return None
        timings = tuple(dataclasses.replace(timing, rounds=timing.rounds - 1) for timing in measured.timings)
        return dataclasses.replace(measured, timings=timings)

    others = tuple(
        one if one is target.winner else dataclasses.replace(one, measurement=shorter(one.measurement))
        for one in target.candidates
    )
    following = why_it_won(result, dataclasses.replace(target, candidates=others))[2]
    assert following.startswith("Next: ")
    assert "median" not in following


def test_the_command_serves_by_the_alias_and_names_stay_words() -> None:
    """Broken: a name of others ends the quotes, and what a reader pastes into a shell runs it."""
    receipt = Receipt(uri="models:/a b/3", name="a'; rm -rf ~; '", version="3", digest="", created=True)
    assert serve_command(receipt) == "mlflow models serve -m 'models:/a b/3' --env-manager local --port 5000"
    named = serve_command(dataclasses.replace(receipt, promoted_to="prod"))
    assert named.split(" -m ")[1].startswith("'models:/a'\\''; rm -rf ~; '\\''@prod' ")


def test_a_signature_that_is_demanded_is_in_the_command_of_the_report(factory: ModuleType) -> None:
    """Broken: the command of the report ended with "nothing here says whose is trusted"."""
    result = factory.make_result()
    said = tuple(
        PolicyValue(path=f"compliance.{name}", value=value, origin="p.yaml:1", is_default=False)
        for name, value in (("require_signature", True), ("trusted_keys", ["keys/ci.pub"]))
    )
    assert trusted_files(dataclasses.replace(result, policy_values=said)) == ("keys/ci.pub",)
    assert trusted_files(dataclasses.replace(result, policy_values=said[1:])) == ()
    receipt = Receipt(uri="models:/a/3", name="a", version="3", digest="", created=True)
    assert serve_command(receipt, ("keys/ci.pub",)).startswith("COMPILE_STAGE_TRUST=keys/ci.pub mlflow models serve ")


def test_data_in_the_page_can_not_end_their_element() -> None:
    """Broken: a model's name closes the script element, and what follows runs or shows."""
    name = "</script><!-- <script>&amp;\u2028"
    text = embedded([{"label": name}])
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == [{"label": name}]


@pytest.mark.parametrize(
    ("values", "unit", "shown"),
    [
        ((20.1e-6, 14.4e-3, None), "µs", ["20.1", "14,400", "—"]),
        ((0.4e-3, 12.0), "ms", ["0.4", "12,000"]),
        ((2.5, 75.0), "s", ["2.50", "75.0"]),
    ],
)
def test_a_column_of_latencies_has_one_unit(values: tuple[float | None, ...], unit: str, shown: list[str]) -> None:
    """Broken: microseconds stand above milliseconds in one column, and the slower one looks faster."""
    column = numbers.seconds_column(values)
    assert (column.unit, [column.text(value) for value in values]) == (unit, shown)


@pytest.mark.parametrize(
    ("measured", "interval", "sentence"),
    [
        (0.98, None, "cosine 0.98 < 0.99 (output logits, batch 1; p.yaml:3)"),
        (0.995, (0.982, 0.999), "cosine 0.995, its interval's end 0.982 < 0.99 (output logits, batch 1; p.yaml:3)"),
        (None, None, "cosine not judged: why; the limit is at least 0.99 (output logits, batch 1; p.yaml:3)"),
    ],
)
def test_a_missed_check_says_the_figure_first(
    measured: float | None, interval: tuple[float, float] | None, sentence: str
) -> None:
    """Broken: the sentence that decided against a candidate has a false comparison, or no place."""
    gate = Gate(metric="cosine", limit=0.99, direction="at_least", origin="p.yaml:3")
    check = Check(
        gate=gate, outcome=Outcome.NOT_RUN if measured is None else Outcome.FAIL, measured=measured, reason="why",
        output="logits", batch_size=1, interval=interval,
    )  # fmt: skip
    assert summary.missed_text(check) == sentence


def test_only_what_was_measured_is_plotted(result: RunResult, factory: ModuleType) -> None:
    """Broken: a candidate that was refused stands in the plot."""
    from compile_stage.report.pareto import points

    target = result.targets[0]
    rows = summary.rows(result, target)
    found = points(rows, None, None, "")
    assert {one.job_id for one in found} == {row.job_id for row in rows if row.timing is not None}
    assert all(one.interval_s is None or one.interval_s[0] <= one.p50_s <= one.interval_s[1] for one in found)
    assert points((), factory.measurement(0.002, None), None, "x") == ()
