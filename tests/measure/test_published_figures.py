"""The line that a published version is described by."""

from __future__ import annotations

import dataclasses

from compile_stage.core.records import Candidate, Check, Gate, Outcome, Verdict, Waiver
from compile_stage.measure.published_figures import summary_of
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
