"""A winner that misses a gate on what serving costs, and who is served instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import job, passed, policy, run_context, source, target_policy
from fake_engine import FakeEngine, Scenario

from compile_stage.core.records import (
    Answers,
    Candidate,
    Check,
    Gate,
    Layout,
    Outcome,
    Plan,
    SampleSet,
    ServedLoad,
    Serving,
    ServingCost,
    TargetResult,
    Verdict,
)
from compile_stage.measure.structure import SOAK
from compile_stage.pipeline import serving, soaked_selection
from compile_stage.steps.select import select

GATE = Gate(metric="throughput_at_p99", limit=100, direction="at_least")
SAMPLES = SampleSet(path="", digest="", count=8, real=True, source="input_example")
ANSWERS = Answers(outputs={}, digest="", samples=SAMPLES, seed=0)
POLICY = target_policy(performance=(GATE,), serving=Serving(p99_ms=50))


def soaked(candidate: Candidate) -> Candidate:
    assert candidate.verdict is not None
    check = Check(gate=Gate(metric=SOAK, limit=0.0, direction="at_most"), outcome=Outcome.PASS, measured=0.0, reason="")
    return replace(candidate, verdict=Verdict(checks=(*candidate.verdict.checks, check)))


def is_soaked(candidate: Candidate) -> bool:
    return candidate.verdict is not None and any(check.gate.metric == SOAK for check in candidate.verdict.checks)


def load(per_s: float) -> ServingCost:
    layout = Layout(instances=1, threads=1)
    interval = (0.9 * per_s, 1.1 * per_s)
    winner = ServedLoad(layout=layout, points=(), throughput_per_s=per_s, interval=interval)
    return ServingCost(server="", limit_s=0.05, rows=1, cores=2, winner=winner)


def test_who_is_served_instead_is_called_for_a_while_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: behind a winner that misses a gate on served throughput, one is published that nobody called for
    `budget.soak_seconds`; and one that fails then would win."""
    fast, slow, slower = (
        soaked(passed(job("int8", native=False), 5.0)),
        passed(job("bf16"), 3.0),
        passed(job("fp32"), 2.0),
    )
    candidates = (fast, slow, slower)
    called: list[str] = []

    def soak(_: Any, candidate: Candidate, *given: Any) -> Candidate:
        called.append(candidate.job.id)
        return soaked(candidate) if candidate.job != slow.job else candidate.in_state("failed", "soak: other answers")

    def measured(_: Any, __: Any, target: TargetResult, *given: Any, **named: Any) -> ServingCost:
        return load(50.0 if target.winner is not None and target.winner.job == fast.job else 200.0)

    monkeypatch.setattr(soaked_selection, "soak", soak)
    monkeypatch.setattr(serving, "_measured", measured)
    context = run_context(tmp_path, FakeEngine(Scenario()))
    plan = Plan(source=source(), policy=policy(POLICY), jobs=(), refused=())
    before = TargetResult(policy=POLICY, candidates=candidates, selection=select(candidates, POLICY), original=ANSWERS)
    found = serving.measure_served(context, plan, before, None, beside_production=False)  # type: ignore[arg-type]
    assert called == [slow.job.id, slower.job.id]
    assert found.winner is not None
    assert found.winner.job == slower.job
    assert is_soaked(found.winner)
