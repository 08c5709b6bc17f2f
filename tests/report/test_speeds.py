"""Every ratio that a reader sees is explained by the two latencies beside it, or is no single figure at all."""

from __future__ import annotations

import dataclasses
import io
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from compile_stage.cli.render import Display
from compile_stage.core.errors import GateError
from compile_stage.core.records import Check, Gate, Outcome, PredictSpeedup, RunResult, TargetResult
from compile_stage.measure.published_figures import metrics_of
from compile_stage.measure.recompute import holds
from compile_stage.report import summary
from compile_stage.report.html import render_html
from compile_stage.report.junit import render_junit
from compile_stage.report.markdown import render_markdown
from compile_stage.report.payback import payback
from compile_stage.report.result import result_document
from compile_stage.steps.package import timings
from compile_stage.steps.predict import contradicted, contradiction, demand_speedup
from compile_stage.steps.select import without_speed


class Log(io.StringIO):
    encoding = "utf-8"


def with_winner(result: RunResult, **timing: object) -> RunResult:
    """The run, with other values in its winner's first timing."""
    target = result.targets[0]
    winner = target.candidates[0]
    assert winner.measurement is not None
    first = dataclasses.replace(winner.measurement.timings[0], **timing)  # type: ignore[arg-type]
    measured = dataclasses.replace(winner.measurement, timings=(first, *winner.measurement.timings[1:]))
    candidates = (dataclasses.replace(winner, measurement=measured), *target.candidates[1:])
    return dataclasses.replace(result, targets=(dataclasses.replace(target, candidates=candidates),))


def everything_shown(result: RunResult) -> dict[str, str]:
    stream = Log()
    Display(stream, width=140).show_result(result, Path("out"))
    return {
        "terminal": stream.getvalue(),
        "html": render_html(result),
        "markdown": render_markdown(result),
        "junit": render_junit(result),
    }


def test_a_speedup_stands_beside_the_two_latencies_it_is_the_quotient_of(result: RunResult) -> None:
    """Broken: "827x" over "35.1 us, baseline 1.09 ms", which is 31x."""
    assert "6.52× the baseline's speed (median 0.31 ms, baseline 2.03 ms)" in summary.headline(result)
    for place, text in everything_shown(result).items():
        if place != "junit":
            assert "baseline PyTorch (eager): 2.03 ms at batch 1" in text, place


def test_where_throughput_decides_all_figures_are_those_of_the_batch_size_that_decided(result: RunResult) -> None:
    """Broken: a run that ships what is fastest at batch 8 would show, and rank by, latencies of batch 1."""
    target = result.targets[0]
    policy = dataclasses.replace(target.policy, prefer="throughput")
    many = dataclasses.replace(result, targets=(dataclasses.replace(target, policy=policy),))
    for place, text in everything_shown(many).items():
        if place != "junit":
            assert "at batch 8" in text, place
            assert "at batch 1" not in text, place
    assert {row.timing.batch_size for row in summary.rows(many, many.targets[0]) if row.timing is not None} == {8}
    assert "5.87×" in summary.headline(many)


def test_a_ratio_that_the_latencies_do_not_explain_says_what_they_say(result: RunResult) -> None:
    hurt = with_winner(result, speedup=827.0, speedup_interval=(800.0, 850.0))
    assert "827.00× the baseline's speed (median 0.31 ms, baseline 2.03 ms: 6.5" in summary.headline(hurt)


def test_an_unstable_speedup_is_a_range_and_no_headline_figure(result: RunResult) -> None:
    """Broken: MiniLM's "8.4x (6.4 to 10.9)" where 1.7x was true: a figure in large print that nobody could rely on."""
    unstable = with_winner(result, stable=False, speedup=6.66, speedup_interval=(4.4, 9.9))
    assert "unstable: between 4.40 to 9.90 times" not in summary.headline(unstable)
    assert "unstable: 4.40 to 9.90 times the baseline's speed (median 0.31 ms" in summary.headline(unstable)
    for place, text in everything_shown(unstable).items():
        assert "6.66" not in text, place


def test_an_interval_of_many_powers_of_ten_is_not_written_out(result: RunResult) -> None:
    """Broken: a reader is shown "2.16e-13 to 11,366,909,008,587,188,224" times, of two rounds on a busy machine."""
    unknown = with_winner(result, stable=False, speedup=1566.6, speedup_interval=(2.159e-13, 1.1367e19))
    for place, text in everything_shown(unknown).items():
        assert place == "junit" or "unstable" in text, place
        for figure in ("11,366", "1.137e+19 ", "2.16e-13 to"):
            where = text.find(figure)
            assert where < 0, (place, text[max(0, where - 200) : where + 100])
    assert "unstable: not known how many times the baseline's speed" in summary.headline(unknown)


def test_where_only_the_lower_end_tells_something_it_is_said(result: RunResult) -> None:
    """Broken: five starts show 12 to 9,131 times, and the reader is told that nothing is known."""
    least = with_winner(result, stable=False, speedup=355.0, speedup_interval=(12.53, 9131.4))
    assert "unstable: at least 12.5 times the baseline's speed" in summary.headline(least)
    for place, text in everything_shown(least).items():
        assert place == "junit" or "at least 12.5×, unstable" in text, place
        assert "9131" not in text, place
        assert "9,131" not in text, place


def test_a_busy_machine_is_said_wherever_speeds_are(result: RunResult) -> None:
    baseline = result.baseline["cpu-server"]
    note = "the machine was busy"
    noted = dataclasses.replace(result, baseline={"cpu-server": dataclasses.replace(baseline, notes=(note,))})
    for place, text in everything_shown(noted).items():
        if place != "junit":
            assert note in text, place


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            PredictSpeedup(speedup=0.5, interval=(0.48, 0.52), stable=True, rows=4, pairs=31, given="an array"),
            "6.52× in the runtime, 0.50× through predict() (0.48 to 0.52): given an array, 4 rows; predict() is slower "
            "than the original's",
        ),
        (
            PredictSpeedup(speedup=1.5, interval=(0.9, 2.0), rows=1, pairs=5, given="an array"),
            "6.52× in the runtime, 0.90 to 2.00× (unstable) through predict(): given an array, 1 row",
        ),
        (
            PredictSpeedup(reason="it is a pickle"),
            "6.52× in the runtime, through predict() not measured: it is a pickle",
        ),
        (
            PredictSpeedup(
                speedup=3,
                interval=(2.9, 3.1),
                stable=True,
                rows=1,
                original_s=3e-3,
                compiled_s=1e-3,
                given="an array",
                slowed_s=0.3,
            ),
            "6.52× in the runtime, 3.00× through predict() (2.90 to 3.10): 3.00 ms before, 1.00 ms after, given an "
            "array, 1 row, the original with one thread (with 2 it took 300 ms)",
        ),
    ],
    ids=["slower", "unstable", "not measured", "one thread"],
)
def test_what_predict_gains_is_said_beside_the_runtime(factory: ModuleType, found: PredictSpeedup, said: str) -> None:
    """Broken: a predict() that is slower than before looks like a gain, or one that was not measured like none."""
    target = dataclasses.replace(factory.every_ending(), predict_speedup=found)
    assert summary.predict_text(target) == said


def slowed_baseline(result: RunResult, times: float, **found: object) -> TargetResult:
    """The first target with a baseline that took so many times as long as the original's predict()."""
    target, base = result.targets[0], result.baseline["cpu-server"]
    assert target.predict_speedup is not None
    original_s = target.predict_speedup.original_s
    assert original_s is not None
    timings = [dataclasses.replace(t, latency_s=(times * original_s,) * len(t.latency_s)) for t in base.timings]
    taken = dataclasses.replace(target.predict_speedup, **found)  # type: ignore[arg-type]
    slow = dataclasses.replace(base, timings=tuple(timings))
    return dataclasses.replace(target, baseline=slow, predict_speedup=taken)


def test_a_baseline_that_takes_longer_than_the_predict_that_contains_it_is_said(result: RunResult) -> None:
    """Broken: something slows the baseline down, and the first line of all reports says `614×` beside `3× through
    predict()`, without a word."""
    target = slowed_baseline(result, 20)
    assert target.predict_speedup is not None
    said = contradiction(target, target.predict_speedup)
    assert "the baseline took 52.4 ms, and the original's predict(), of which it is a part, 2.62 ms" in said
    told = dataclasses.replace(target, predict_speedup=dataclasses.replace(target.predict_speedup, contradiction=said))
    assert said in summary.predict_text(told)
    headline = summary.headline(dataclasses.replace(result, targets=(told, *result.targets[1:])))
    assert f"speedup in the runtime not known: {said}; 1.84× through predict()" in headline
    assert "6.52×" not in headline


def test_no_part_of_a_report_shows_a_speedup_over_a_baseline_that_was_slowed_down(result: RunResult) -> None:
    """Broken: the head says that the speedup is not known, and the winner's card beside it that it is 6.52×."""
    target = slowed_baseline(result, 20)
    assert target.predict_speedup is not None
    assert target.winner is not None
    said = contradiction(target, target.predict_speedup)
    found = dataclasses.replace(target.predict_speedup, contradiction=said)
    reason = "passes every gate, best latency: 6.52 times as fast as the original"
    won = dataclasses.replace(target.winner, reason=reason)
    others = (one for one in target.candidates if one.job.id != won.job.id)
    reasons = {**target.selection.reasons, won.job.id: reason}
    selection = dataclasses.replace(target.selection, reason=reason, reasons=reasons)
    taken = dataclasses.replace(target, candidates=(won, *others), selection=selection, predict_speedup=found)
    told = without_speed(taken)
    shown = dataclasses.replace(result, targets=(told, *result.targets[1:]))
    assert payback(shown, told) is None
    for form, text in everything_shown(shown).items():
        words = " ".join(text.split())
        assert "6.52×" not in words, form
        assert "6.52 times" not in words, form
        assert "not known" in words or form == "junit", form
    assert "is not known (something slowed the baseline down)" in render_html(shown)


def test_nothing_that_a_machine_reads_holds_a_speedup_over_a_baseline_that_was_slowed_down(result: RunResult) -> None:
    """Broken: the reports say that the speedup is not known, and result.json, the manifest and the registry's metrics
    that it is 1,543: a pipeline that compares figures takes that for one."""
    target = asked_for(slowed_baseline(result, 20), 1.0, said="the baseline took 40.4 ms")
    told = without_speed(target)
    shown = dataclasses.replace(result, targets=(told, *result.targets[1:]))
    written = result_document(shown)["targets"][0]
    assert target.winner is not None
    assert told.winner is not None
    assert target.predict_speedup is not None
    for candidate in written["candidates"]:
        for timing in ((candidate["timing"] or {}).get("by_batch") or {}).values():
            assert (timing["speedup"], timing["speedup_interval"], timing["mean_speedup_interval"]) == (
                None,
                None,
                None,
            )
            assert timing["p50_s"] is not None
        checks = [one for one in (candidate["verdict"] or {"checks": []})["checks"] if one["metric"] == "speedup"]
        of_winner = target.predict_speedup.speedup if candidate["state"] == "won" else None
        assert [one["measured"] for one in checks] == [of_winner] * len(checks), candidate["job_id"]
    (check,) = (
        [one for one in told.winner.verdict.checks if one.gate.metric == "speedup"] if told.winner.verdict else ()
    )
    assert "through predict() of 1 row it is 1.84 times as fast" in check.reason
    assert holds(check)
    assert timings(told.winner.measurement)["1"]["speedup"] is None
    assert not [name for name in metrics_of(told.winner) if "speedup" in name]


def test_a_winner_that_is_slower_through_predict_misses_the_gate_there(result: RunResult) -> None:
    """Broken: where something slowed the baseline down, `min_speedup` is said to be held by a predict() that is slower
    than the original's, in the manifest and the reports."""
    target = asked_for(slowed_baseline(result, 20), 1.0, said="the baseline took 40.4 ms")
    found = target.predict_speedup
    assert found is not None
    for speedup, interval, outcome in ((1.84, (1.8, 1.9), Outcome.PASS), (0.8, (0.75, 0.85), Outcome.FAIL)):
        through = dataclasses.replace(found, speedup=speedup, interval=interval)
        told = without_speed(dataclasses.replace(target, predict_speedup=through)).winner
        assert told is not None
        assert told.verdict is not None
        assert [one.outcome for one in told.verdict.checks if one.gate.metric == "speedup"] == [outcome]


def asked_for(target: TargetResult, limit: float, *, said: str) -> TargetResult:
    """The target, whose winner passed `min_speedup`, with that contradiction."""
    assert target.winner is not None
    assert target.winner.verdict is not None
    assert target.predict_speedup is not None
    gate = Gate(metric="speedup", limit=limit, direction="at_least", unit="ratio")
    check = Check(gate=gate, outcome=Outcome.PASS, measured=6.52, reason="", interval=(6.32, 6.65))
    others = (one for one in target.winner.verdict.checks if one.gate.metric != "speedup")
    verdict = dataclasses.replace(target.winner.verdict, checks=(*others, check))
    winner = dataclasses.replace(target.winner, verdict=verdict)
    candidates = tuple(winner if c.job.id == winner.job.id else c for c in target.candidates)
    found = dataclasses.replace(target.predict_speedup, contradiction=said)
    return dataclasses.replace(target, candidates=candidates, predict_speedup=found)


def test_a_speedup_over_a_baseline_that_is_contradicted_passes_no_limit(result: RunResult) -> None:
    """Broken: something slows the baseline down by 20, the report says so, and `min_speedup` passes by it all the same:
    what is published and promoted may be slower than the original."""
    target = slowed_baseline(result, 20)
    assert target.predict_speedup is not None
    assert target.predict_speedup.interval is not None
    said = contradiction(target, target.predict_speedup)
    low, _ = target.predict_speedup.interval
    demand_speedup(asked_for(target, low, said=said))  # predict() itself is so much faster
    demand_speedup(asked_for(target, 2 * low, said=""))
    with pytest.raises(GateError, match=r"by a baseline that can't be relied on: the baseline took 52\.4 ms") as caught:
        demand_speedup(asked_for(target, 2 * low, said=said))
    assert "through predict() it is 1." in caught.value.problem
    assert caught.value.fix == "measure again with --remeasure on an idle machine"


def served_at(target: TargetResult, times: float, beyond_s: float = 0.0) -> TargetResult:
    """The target, whose winner's own call takes so many times as long in the process that serves it, and so much."""
    assert target.winner is not None
    assert target.winner.measurement is not None
    assert target.predict_speedup is not None
    timing = target.winner.measurement.timing(target.predict_speedup.rows)
    assert timing is not None
    served_s = times * sorted(timing.latency_s)[len(timing.latency_s) // 2] + beyond_s
    return dataclasses.replace(target, predict_speedup=dataclasses.replace(target.predict_speedup, served_s=served_s))


def test_a_latency_that_only_the_stopwatch_sees_passes_no_limit(result: RunResult) -> None:
    """Broken: a backend that notices that it is timed is published as 1.2 times as fast, and through predict() it is
    50 times as slow as the original."""
    target = slowed_baseline(result, 1)
    assert target.predict_speedup is not None
    assert target.predict_speedup.interval is not None
    low, _ = target.predict_speedup.interval
    slow = partial(served_at, times=3.2, beyond_s=0.0003)
    demand_speedup(slow(asked_for(target, low, said="")))  # predict() itself is so much faster
    demand_speedup(served_at(asked_for(target, 2 * low, said=""), 2.9))
    with pytest.raises(
        GateError, match="by a latency of its own that can't be relied on: the artifact's own call"
    ) as e:
        demand_speedup(slow(asked_for(target, 2 * low, said="")))
    assert e.value.fix.startswith("measure again with --remeasure on an idle machine; if it is so again")
    assert "the artifact's own call took" in summary.predict_text(slow(target))
    assert "the artifact's own call took" not in summary.predict_text(served_at(target, 2.9))


def test_what_takes_longer_than_its_limit_where_it_is_served_does_not_hold_it(result: RunResult) -> None:
    """Broken: `p95_latency_ms: 20` is held by a latency that only the stopwatch sees, and each request takes 30 ms."""
    target = served_at(slowed_baseline(result, 1), 1, 0.03)
    winner, found = target.winner, target.predict_speedup
    assert winner is not None
    assert winner.verdict is not None
    assert found is not None
    for limit, refused in ((20.0, True), (60.0, False)):
        gate = Gate(metric="p95_latency_ms", limit=limit, direction="at_most", unit="ms")
        check = Check(gate=gate, outcome=Outcome.PASS, measured=1.0, reason="", batch_size=found.rows)
        verdict = dataclasses.replace(winner.verdict, checks=(check,))
        changed = dataclasses.replace(winner, verdict=verdict)
        candidates = tuple(changed if c.job.id == winner.job.id else c for c in target.candidates)
        limited = dataclasses.replace(target, candidates=candidates)
        with pytest.raises(GateError, match="holds p95_latency_ms 20 by a latency") if refused else nullcontext():
            demand_speedup(limited)


def waiting_baseline(result: RunResult, threads_cost: float, **found: object) -> TargetResult:
    """The first target, whose baseline took so many times as long as with one thread."""
    target = slowed_baseline(result, 1, **found)
    assert target.baseline is not None
    timings = tuple(
        dataclasses.replace(timing, one_thread_s=(timing.latency_s[0] / threads_cost,))
        for timing in target.baseline.timings
    )
    return dataclasses.replace(target, baseline=dataclasses.replace(target.baseline, timings=timings))


def test_a_baseline_whose_threads_waited_is_found_out_whatever_predict_shows(result: RunResult) -> None:
    """Broken: a text model's baseline of 52 ms, 4 with one thread, beside a predict() of 15 ms that nothing slowed: the
    report shows a speedup of hundreds, and `min_speedup` holds by it."""
    target = waiting_baseline(result, 20, given="a list")
    found = contradicted(target, target.predict_speedup)
    assert found is not None
    assert found.contradiction.startswith("the baseline took 2.62 ms with 2 threads at batch 1, and 0.131 ms with one")
    for calm in (waiting_baseline(result, 2), slowed_baseline(result, 1)):
        assert contradicted(calm, calm.predict_speedup) == calm.predict_speedup


def test_a_baseline_whose_threads_waited_passes_no_limit_where_predict_was_not_timed(result: RunResult) -> None:
    """Broken: with `budget.predict_seconds: 0` nothing is asked of the baseline, and `min_speedup` holds by it."""
    target = waiting_baseline(result, 20)
    found = contradicted(target, None)
    assert found is not None
    slowed = asked_for(target, 0.1, said=found.contradiction)
    slowed = dataclasses.replace(slowed, predict_speedup=found)
    with pytest.raises(GateError, match=r"predict\(\) was not timed \(budget\.predict_seconds is 0\)"):
        demand_speedup(slowed)
    assert contradicted(slowed_baseline(result, 1), None) is None


@pytest.mark.parametrize(
    ("times", "found"),
    [(1.3, {}), (20, {"given": "a list"}), (20, {"rows": 3}), (20, {"original_s": None})],
    ids=["noise", "other texts", "other rows", "not known"],
)
def test_what_need_not_be_a_contradiction_is_none(result: RunResult, times: float, found: dict[str, object]) -> None:
    """Broken: reports call a sound measurement wrong."""
    target = slowed_baseline(result, times, **found)
    assert target.predict_speedup is not None
    assert contradiction(target, target.predict_speedup) == ""


def test_a_target_without_a_winner_or_a_speedup_says_what_it_said(result: RunResult) -> None:
    """Broken: a run whose baseline was slowed down ends with an error after all was measured."""
    target = result.targets[0]
    assert target.winner is not None
    assert target.winner.measurement is not None
    none = dataclasses.replace(target, selection=dataclasses.replace(target.selection, winner=None))
    assert without_speed(none) == none
    timings = tuple(
        dataclasses.replace(timing, speedup=None, speedup_interval=None) for timing in target.winner.measurement.timings
    )
    won = dataclasses.replace(
        target.winner, measurement=dataclasses.replace(target.winner.measurement, timings=timings)
    )
    others = tuple(won if one.job.id == won.job.id else one for one in target.candidates)
    unknown = dataclasses.replace(target, candidates=others)
    said = without_speed(unknown)
    assert said.winner is not None
    assert (said.winner.reason, said.selection) == (won.reason, unknown.selection)
