"""The line that a published version is described by."""

from __future__ import annotations

import dataclasses
import math

from compile_stage.core.records import (
    Candidate,
    Check,
    Gate,
    Outcome,
    Verdict,
    Waiver,
)
from compile_stage.measure.published_figures import metrics_of, summary_of
from compile_stage.report.result import timing_summary
from tests import factories

_WAIVER = Waiver(gate="max_abs", target="cpu", reason="new sensor", owner="vision", expires="2027-01-31")


def _winner(*checks: Check) -> Candidate:
    job = factories.job()
    gates = tuple(check.gate for check in checks if check.gate.unit != "ratio")
    return dataclasses.replace(
        factories.passed(), job=dataclasses.replace(job, gates=gates), verdict=Verdict(checks=checks)
    )


def _check(metric: str, outcome: Outcome, reason: str, *, batch_size: int = 1, waived: Waiver | None = None) -> Check:
    limit = {"cosine": 0.99, "max_abs": 0.01, "speedup": 3.0}[metric]
    direction = "at_most" if metric == "max_abs" else "at_least"
    gate = Gate(metric=metric, limit=limit, direction=direction, unit="ratio" if metric == "speedup" else "")
    measured = {"cosine": 0.999, "max_abs": 0.01 * (1 + batch_size), "speedup": 1.5}[metric]
    return Check(gate=gate, outcome=outcome, measured=measured, reason=reason, batch_size=batch_size, waived=waived)


def test_a_waived_miss_is_not_counted_as_passed() -> None:
    """Else a version says in the registry that all its checks passed, though some were missed under a waiver."""
    winner = _winner(
        _check("cosine", Outcome.PASS, "cosine is 0.999 >= 0.99"),
        _check("max_abs", Outcome.FAIL, "max_abs is 0.02 > 0.01", waived=_WAIVER),
        _check("max_abs", Outcome.FAIL, "max_abs is 0.09 > 0.01", batch_size=8, waived=_WAIVER),
    )

    summary = summary_of(factories.source(), factories.target_policy(), winner)

    assert "1 of 3 accuracy checks passed, closest to its limit: cosine is 0.999 >= 0.99; " in summary
    assert "missed under a waiver of max_abs until 2027-01-31 (vision): max_abs is 0.09 > 0.01" in summary


def test_a_waiver_of_speed_takes_nothing_from_accuracy() -> None:
    """Else a version whose speed alone was waived looks as if its answers were."""
    waiver = dataclasses.replace(_WAIVER, gate="speedup")
    winner = _winner(
        _check("cosine", Outcome.PASS, "cosine is 0.999 >= 0.99"),
        _check("speedup", Outcome.FAIL, "1.5 times the baseline's speed", waived=waiver),
    )

    summary = summary_of(factories.source(), factories.target_policy(), winner)

    assert "all 1 accuracy checks passed, closest to its limit" in summary
    assert "missed under a waiver of speedup until 2027-01-31 (vision): 1.5 times the baseline's speed" in summary


def test_a_waiver_that_was_not_needed_is_not_named() -> None:
    """Else a version that holds every limit says that it missed one."""
    winner = _winner(_check("max_abs", Outcome.PASS, "max_abs is 0 <= 0.01", waived=_WAIVER))

    assert "waiver" not in summary_of(factories.source(), factories.target_policy(), winner)


def test_an_unstable_speedup_is_no_metric_of_a_registry() -> None:
    """Broken: runs are sorted by a figure of which every report says that only a range is known."""
    check = _check("speedup", Outcome.PASS, "1.5 times the baseline's speed")
    for stable in (True, False):
        timing = factories.timing(speedup=1.5, speedup_interval=(1.1, 2.1), stable=stable)
        measured = factories.measurement(timings=(timing,))
        metrics = metrics_of(dataclasses.replace(_winner(check), measurement=measured))
        assert metrics.get("speedup.batch_1") == (1.5 if stable else None)
        assert metrics["latency_p50_ms.batch_1"] > 0


def test_what_result_json_leaves_out_is_no_metric_of_a_registry() -> None:
    """Broken: the registry has a median and a throughput of three calls, and result.json says that they carry none."""
    for calls, known in ((3, False), (12, True)):
        timing = factories.timing(rounds=calls)
        metrics = metrics_of(dataclasses.replace(_winner(), measurement=factories.measurement(timings=(timing,))))
        summary = timing_summary(timing)
        assert ("latency_p50_ms.batch_1" in metrics) is (summary["p50_s"] is not None) is known
        assert ("throughput_per_s.batch_1" in metrics) is (summary["throughput_per_s"] is not None) is known


def test_a_speedup_is_described_as_the_reports_say_it() -> None:
    """Broken: the description of a version says `22.60 to inf times` or `0.00 to inf times`, of which every report says
    that at least 22.6, or nothing, is known."""
    said = {
        (1.1, 2.1): "1.1 to 2.1 times the original's speed (unstable measurement)",
        (22.6, math.inf): "at least 22.6 times the original's speed (unstable measurement)",
        (0.0, math.inf): "how many times the original's speed is not known (unstable measurement)",
    }
    for interval, words in said.items():
        timing = factories.timing(speedup=1.5, speedup_interval=interval, stable=False)
        winner = dataclasses.replace(_winner(), measurement=factories.measurement(timings=(timing,)))
        assert words in summary_of(factories.source(), factories.target_policy(), winner)
