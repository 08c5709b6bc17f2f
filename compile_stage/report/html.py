"""`report.html`: one file, no script, no outside asset, so it shows the same from disk, from CI and in MLflow's
sandboxed frame."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from compile_stage import __version__
from compile_stage.core.records import Check, Measurement, RunResult, TargetResult, Timing
from compile_stage.report import numbers, summary
from compile_stage.report.charts import Bar, Distribution, latency_chart, speedup_chart, timeline_chart
from compile_stage.report.option_tuning import KIND_WORDS, option_tuning_rows
from compile_stage.report.result import timing_summary

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render_html(result: RunResult) -> str:
    """The page. Every name and sentence of others is escaped by the template engine."""
    labels = {
        row.job_id: f"{row.backend} {row.scheme}" for target in result.targets for row in summary.rows(result, target)
    }
    if len(result.targets) > 1:
        labels |= {
            row.job_id: f"{target.policy.target.name} {row.backend} {row.scheme}"
            for target in result.targets
            for row in summary.rows(result, target)
        }
    template = environment().get_template("report.html.j2")
    return template.render(
        result=result,
        headline=summary.headline(result),
        run_notes=summary.run_notes(result),
        sections=[_section(result, target) for target in result.targets],
        timeline=timeline_chart(result.events, labels),
        version=__version__,
    )


@cache
def environment() -> Environment:
    """The templates, with the words and numbers of a report as filters."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("compile_stage.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "quantity": numbers.quantity,
        "duration": numbers.duration,
        "size": numbers.size,
        "rate": numbers.rate,
        "ratio": numbers.ratio,
        "span": numbers.span,
        "short": numbers.short,
        "measured": summary.measured_text,
        "limit": summary.limit_text,
        "error": summary.error_text,
        "outcome": summary.outcome_word,
        "speedup": summary.speedup_text,
        "readable": _readable,
        "state_word": summary.STATE_WORDS.__getitem__,
        "kind_word": KIND_WORDS.__getitem__,
    }
    environment.globals["count"] = numbers.count
    environment.globals["outcome_counts"] = summary.outcome_counts
    return environment


def _readable(value: Any) -> str:
    """Plain JSON values as a phrase: lists with commas, maps as `key: value`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_readable(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_readable, value))
    return str(value)


def _section(result: RunResult, target: TargetResult) -> dict[str, Any]:
    """One target, laid out for the template."""
    rows, baseline = summary.rows(result, target), summary.baseline_of(result, target)
    winner = target.winner
    return {
        "target": target.policy.target,
        "prefer": target.policy.prefer,
        "selection": target.selection,
        "measurement_notes": summary.measurement_notes(result, target),
        "baseline_text": summary.baseline_text(result, target),
        "how_fast": _how_fast(result, target),
        "no_winner": summary.no_winner(result, target),
        "receipt": target.receipt,
        "bundle": target.bundle,
        "unvalidated": target.unvalidated,
        "winner": next((row for row in rows if row.state == "won"), None),
        "waivers": winner.verdict.waivers if winner is not None and winner.verdict is not None else (),
        "baseline_timing": _main_summary(target, baseline),
        "winner_timing": _main_summary(target, winner.measurement if winner is not None else None),
        "rows": rows,
        "option_tuning": option_tuning_rows(result, target),
        "medians": {row.job_id: summary.median_s(row.timing) for row in rows},
        "validations": [(row, _ordered(summary.checks_of(row.candidate))) for row in rows if row.candidate is not None],
        "timings": _timings(result, rows, baseline),
        "speedups": _speedups(rows),
        "latencies": _latencies(result, target, rows, baseline),
    }


def _how_fast(result: RunResult, target: TargetResult) -> str:
    winner = target.winner
    baseline = summary.main_timing(target, summary.baseline_of(result, target))
    return summary.how_fast(summary.main_timing(target, winner.measurement if winner else None), baseline)


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
    measured += [(f"{row.backend} {row.scheme}", row.state, row.candidate.measurement) for row in rows if row.candidate]
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
                label=f"{row.backend} {row.scheme}",
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
    taken += [(f"{row.backend} {row.scheme}", row.state, row.timing) for row in rows]
    return latency_chart(
        [
            Distribution(label=label, state=state, latency_s=timing.latency_s)
            for label, state, timing in taken
            if timing is not None
        ]
    )
