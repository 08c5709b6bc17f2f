"""One target of the page, laid out for its templates (`templates/report/`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from compile_stage.core.records import (
    Check,
    JsonMap,
    Measurement,
    OutputErrors,
    RunResult,
    SamplePreview,
    TargetResult,
    Timing,
    WorstAnswer,
    record,
)
from compile_stage.report import numbers, profiles, summary
from compile_stage.report.charts import (
    Bar,
    Distribution,
    latency_chart,
    pareto_chart,
    rounds_chart,
    speedup_chart,
)
from compile_stage.report.language import language_rows, written_texts
from compile_stage.report.load_chart import load_chart
from compile_stage.report.option_tuning import option_tuning_rows, winner_elsewhere
from compile_stage.report.page_data import error_curves, pareto_data, rounds_data
from compile_stage.report.pareto import axes, points
from compile_stage.report.payback import payback
from compile_stage.report.result import timing_summary
from compile_stage.report.rounds import Rounds, rounds_of
from compile_stage.report.serving import serving_remarks, serving_rows, serving_text
from compile_stage.report.why import serve_command, trusted_files, why_it_won

_MOST_LINES = 8
"""Participants in the charts of rounds and of errors: more can't be told apart."""


@record
class ErrorRow:
    """The errors of one output of one candidate: of half of the samples, of 90 % of them, and the largest."""

    label: str
    state: str
    output: str
    samples: int
    median: float
    high: float
    largest: float
    worst: tuple[WorstAnswer, ...]


def section(result: RunResult, target: TargetResult, index: int) -> dict[str, Any]:
    """One target for the template; `index` is its place in the page."""
    rows, baseline = summary.rows(result, target), summary.baseline_of(result, target)
    winner = target.winner
    medians = {row.job_id: summary.median_s(row.timing) for row in rows}
    timings = _timings(result, rows, baseline)
    steps = option_tuning_rows(result, target)
    laid_out = {
        "index": index,
        "anchor": f"target-{index + 1}",
        "target": target.policy.target,
        "prefer": target.policy.prefer,
        "selection": target.selection,
        "measurement_notes": summary.measurement_notes(result, target),
        "baseline_text": summary.baseline_text(result, target),
        "predict_text": summary.predict_text(target),
        "serving_text": serving_text(target),
        "serving_rows": serving_rows(target.serving),
        "serving_remarks": serving_remarks(target.serving) if target.serving is not None else [],
        "serving_layouts": _layouts(target),
        "how_fast": summary.winner_speed(result, target),
        "contradiction": target.contradiction,
        "no_winner": summary.no_winner(result, target),
        "receipt": target.receipt,
        "bundle": target.bundle,
        "unvalidated": target.unvalidated,
        "replaced": target.replaced,
        "language": language_rows(result, target),
        "texts": written_texts(result, target),
        "winner": next((row for row in rows if row.state == "won"), None),
        "waivers": winner.verdict.waivers if winner is not None and winner.verdict is not None else (),
        "baseline_timing": _main_summary(target, baseline),
        "winner_timing": _main_summary(target, winner.measurement if winner is not None else None),
        "why": why_it_won(result, target),
        "serve": serve_command(target.receipt, trusted_files(result)) if target.receipt is not None and winner else "",
        "rows": rows,
        "medians": medians,
        "time": numbers.seconds_column(medians.values()),
        "bytes": numbers.bytes_column(row.size_bytes for row in rows),
        "pruned": [(row.label, row.reason) for row in rows if _is_pruned(row)],
        "option_tuning": steps,
        "winner_elsewhere": winner_elsewhere(result, target, steps),
        "validations": [(row, _ordered(row.candidate.checks)) for row in rows if row.candidate is not None],
        "timings": timings,
        "speedups": Markup("") if target.contradiction else _speedups(rows),
        "latencies": _latencies(result, target, rows, baseline),
        "errors": [_error_row(row, output) for row in rows if row.candidate for output in row.candidate.errors],
        "samples": [(preview, _answers(target, rows, preview)) for preview in target.previews],
        "no_worst": _no_worst(target, rows),
        "hot_operators": profiles.views(target),
        "payback": payback(result, target),
        "costs": _costs(result, rows),
    }
    laid_out |= _charts(result, target, rows, baseline)
    return laid_out | {"contents": _contents(laid_out)}


def _contents(laid_out: JsonMap) -> list[tuple[str, str]]:
    """(anchor, title) of the parts that the target has."""
    parts = [
        ("why", "Why this won", laid_out["why"]),
        ("production", "Beside the version in production", laid_out["replaced"]),
        ("pareto", "Latency against error, size and memory", laid_out["axes"]),
        ("candidates", "Candidates", True),
        ("pruned", "Pruned", laid_out["pruned"]),
        ("options", "Option tuning", laid_out["option_tuning"]),
        ("speedups", "Speedups", laid_out["speedups"]),
        ("latency", "Latency of every call", laid_out["latencies"]),
        ("rounds", "Latency per round", laid_out["rounds"]),
        ("serving", "What serving costs", laid_out["serving_text"]),
        ("errors", "Error by output and sample", laid_out["errors"]),
        ("operators", "Hot operators", laid_out["hot_operators"]),
        ("cost", "Cost of compiling", laid_out["costs"]),
        ("proof", "Proof", True),
    ]
    return [(anchor, title) for anchor, title, there in parts if there]


def _charts(
    result: RunResult, target: TargetResult, rows: tuple[summary.Row, ...], baseline: Measurement | None
) -> dict[str, Any]:
    timing = summary.main_timing(target, baseline)
    found = points(rows, baseline, timing, result.baseline_framework)
    choices = axes(found)
    taken = [(result.baseline_framework, "baseline", timing)]
    taken += [(row.label, row.state, row.timing) for row in rows]
    rounds = [one for label, state, t in taken if t is not None if (one := rounds_of(label, state, t)) is not None]
    plotted = _fastest(rounds)
    with_errors = [row for row in rows if row.candidate is not None and row.candidate.errors][:_MOST_LINES]
    return {
        "axes": choices,
        "pareto": pareto_chart(found, choices[0]) if choices else Markup(),
        "rounds": rounds,
        "rounds_picture": rounds_chart(plotted),
        "load_picture": load_chart(target.serving),
        "data": {
            "pareto": pareto_data(found, choices),
            "rounds": rounds_data(plotted),
            "errors": error_curves(with_errors),
        },
    }


def _fastest(rounds: Sequence[Rounds]) -> list[Rounds]:
    """The baseline and the fastest others, in their order."""
    kept = sorted(rounds, key=lambda one: (one.state != "baseline", statistics.median(one.medians_s)))[:_MOST_LINES]
    return [one for one in rounds if one in kept]


def _layouts(target: TargetResult) -> list[str]:
    """Of the ways to use the cores, those that were not taken."""
    tried = target.serving.layouts if target.serving is not None else ()
    return [
        f"{numbers.count(one.instances, 'process')} of {numbers.count(one.threads, 'thread')} ({one.reason})"
        for one in tried
        if one.reason
    ]


def _is_pruned(row: summary.Row) -> bool:
    measured = row.candidate.measurement if row.candidate is not None else None
    return measured is not None and bool(measured.stopped_early)


def _error_row(row: summary.Row, output: OutputErrors) -> ErrorRow:
    ordered = sorted(output.errors)
    return ErrorRow(
        label=row.label,
        state=row.state,
        output=output.output,
        samples=len(ordered),
        median=statistics.median(ordered),
        high=ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        largest=ordered[-1],
        worst=output.worst,
    )


def _no_worst(target: TargetResult, rows: tuple[summary.Row, ...]) -> bool:
    """Whether those whose worst samples are shown, the winner or else all, answered every sample as the original."""
    chosen = [row for row in rows if row.job_id == target.selection.winner] or list(rows)
    outputs = [output for row in chosen if row.candidate is not None for output in row.candidate.errors]
    return bool(outputs) and not any(output.worst for output in outputs)


def _answers(
    target: TargetResult, rows: tuple[summary.Row, ...], preview: SamplePreview
) -> list[tuple[str, WorstAnswer]]:
    """(output, what was answered) of the winner to a sample; of the first candidate that has it without a winner."""
    chosen = [row for row in rows if row.job_id == target.selection.winner] or list(rows)
    for row in chosen:
        outputs = row.candidate.errors if row.candidate is not None else ()
        found = [(o.output, answer) for o in outputs for answer in o.worst if answer.sample == preview.sample]
        if found:
            return found
    return []


def _costs(result: RunResult, rows: tuple[summary.Row, ...]) -> list[tuple[str, str, float, float]]:
    """(label, state, seconds of compiling, seconds of all its steps in this run) of what was compiled."""
    return [
        (
            row.label,
            row.state,
            row.candidate.compile_s,
            sum(event.ended_s - event.started_s for event in result.events if event.job_id == row.job_id),
        )
        for row in rows
        if row.candidate is not None and row.candidate.artifact is not None
    ]


def _main_summary(target: TargetResult, measurement: Measurement | None) -> dict[str, Any] | None:
    timing = summary.main_timing(target, measurement)
    return None if timing is None else timing_summary(timing)


def _ordered(checks: tuple[Check, ...]) -> list[Check]:
    """What did not pass comes first; otherwise as they were made."""
    return sorted(checks, key=lambda check: summary.outcome_word(check) == "passed")


def _timings(
    result: RunResult, rows: tuple[summary.Row, ...], baseline: Measurement | None
) -> list[tuple[str, str, Measurement, Timing, dict[str, Any]]]:
    """(label, state, measurement, timing, its summary) for the baseline, then each measured candidate, by batch
    size."""
    measured = [(result.baseline_framework, "baseline", baseline)]
    measured += [(row.label, row.state, row.candidate.measurement) for row in rows if row.candidate]
    return [
        (label, state, measurement, timing, timing_summary(timing))
        for label, state, measurement in measured
        if measurement is not None
        for timing in measurement.timings
    ]


def _speedups(rows: tuple[summary.Row, ...]) -> Markup:
    return speedup_chart(
        [
            Bar(
                label=row.label,
                state=row.state,
                speedup=row.timing.speedup,
                interval=row.timing.speedup_interval,
                stable=row.timing.stable,
            )
            for row in rows
            if row.timing is not None and row.timing.speedup is not None
        ]
    )


def _latencies(
    result: RunResult, target: TargetResult, rows: tuple[summary.Row, ...], baseline: Measurement | None
) -> Markup:
    taken = [(result.baseline_framework, "baseline", summary.main_timing(target, baseline))]
    taken += [(row.label, row.state, row.timing) for row in rows]
    return latency_chart(
        [
            Distribution(label=label, state=state, latency_s=timing.latency_s)
            for label, state, timing in taken
            if timing is not None
        ]
    )
