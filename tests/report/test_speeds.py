"""Every ratio that a reader sees is explained by the two latencies beside it, or is no single figure at all."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

from compile_stage.cli.render import Display
from compile_stage.core.records import RunResult
from compile_stage.report import summary
from compile_stage.report.html import render_html
from compile_stage.report.junit import render_junit
from compile_stage.report.markdown import render_markdown


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


def test_a_busy_machine_is_said_wherever_speeds_are(result: RunResult) -> None:
    baseline = result.baseline["cpu-server"]
    note = "the machine was busy"
    noted = dataclasses.replace(result, baseline={"cpu-server": dataclasses.replace(baseline, notes=(note,))})
    for place, text in everything_shown(noted).items():
        if place != "junit":
            assert note in text, place
