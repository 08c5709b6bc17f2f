"""A record is judged by the rule of the step that made it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.digest import plain, revive
from compile_stage.core.records import Check, Gate, Layout, Measurement, Outcome, ServedLoad, ServingCost, Timing
from compile_stage.measure.metrics import ComparedSamples, check_outputs
from compile_stage.measure.performance import PERFORMANCE, check_performance
from compile_stage.measure.recompute import holds
from compile_stage.measure.served_load import SERVED_GATES, judge_served, with_cost
from compile_stage.measure.speedups import RESOLUTION
from compile_stage.measure.tasks import HIGHER_IS_BETTER
from compile_stage.measure.tokens import TEXT_METRICS

AT_LEAST = ("speedup", "tokens_per_s", "throughput_at_p99")
SEEDS = st.integers(0, 10**6)


def judged(metric: str, limit: float, seed: int) -> Check:
    """One gate on performance, looked at by the step of a run with random figures."""
    random = np.random.default_rng(seed)
    gate = Gate(metric=metric, limit=limit, direction="at_least" if metric in AT_LEAST else "at_most")
    if metric in SERVED_GATES:
        rate, spread = random.uniform(10, 500), random.uniform(1.01, 3)
        load = ServedLoad(
            layout=Layout(instances=1, threads=1), throughput_per_s=rate, interval=(rate / spread, rate * spread)
        )
        (check,) = judge_served([gate], with_cost(ServingCost(winner=load, price_per_hour=0.7, currency="EUR")))
        return check
    calls = (0.01 * np.exp(random.normal(0, 0.3, 400))).tolist()
    ratio, below, above = random.uniform(0.5, 3), *random.uniform(0.9, 1, 2)
    timing = Timing(
        latency_s=tuple(calls),
        batch_size=1,
        stable=True,
        environment="x",
        rounds=40,
        turns=(10,) * 40,
        speedup=ratio,
        speedup_interval=(ratio * below, ratio / above),
        first_s=tuple(call / 4 for call in calls),
        new_tokens=7,
    )
    measurement = Measurement(timings=(timing,), load_s=1, peak_memory_bytes=int(random.integers(10**6, 10**9)))
    (check,) = check_performance([gate], measurement, int(random.integers(10**5, 10**8)))
    return check


def near(check: Check, share: float) -> list[float]:
    """Limits at, beside and between the figures of a check."""
    assert check.measured is not None
    figures = [check.measured, *(check.interval or ())]
    at = [*figures, *(figure / (1 - RESOLUTION) for figure in figures)]
    at += [math.nextafter(figure, end) for figure in at for end in (-math.inf, math.inf)]
    return [*at, check.measured * share]


@pytest.mark.parametrize("metric", PERFORMANCE)
@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, share=st.floats(0.5, 2))
def test_limits_on_performance_are_held_by_the_rule_of_the_run(metric: str, seed: int, share: float) -> None:
    """Broken: `verify -p` and promotion accept a limit that the run's own rule calls missed, or refuse one that the run
    calls held."""
    for limit in near(judged(metric, 1.0, seed), share):
        check = judged(metric, limit, seed)
        assert check.outcome in (Outcome.PASS, Outcome.FAIL)
        recorded: Check = revive(Check, plain(check))
        assert holds(recorded) is (check.outcome is Outcome.PASS), check.reason


@pytest.mark.parametrize(
    ("metric", "measured", "interval", "limit", "held"),
    [
        ("p95_latency_ms", 16.57, (15.71, 17.87), 16.9, False),
        ("p95_latency_ms", 16.57, (15.71, 17.87), 17.87, True),
        ("ttft_p95_ms", 19.0, (15.0, 40.0), 20.0, False),
        ("tokens_per_s", 101.0, (20.0, 400.0), 100.0, False),
        ("speedup", 1.99, (1.97, 1.995), 2.0, False),
        ("speedup", 1.99, (1.97, 2.01), 2.0, True),
        ("throughput_at_p99", 105.0, (60.0, 180.0), 100.0, False),
        ("cost_per_million", 0.9, (0.5, 1.7), 1.0, False),
        ("tpot_p95_ms", 19.0, None, 20.0, False),  # no run leaves one without an interval
        ("p95_latency_ms", 19.0, None, 20.0, True),  # but for those before 2026-11-23
    ],
)
def test_an_interval_decides_gates_that_name_no_confidence(
    metric: str, measured: float, interval: tuple[float, float] | None, limit: float, held: bool
) -> None:
    """Broken: the value of a latency or a rate is held against the limit, which an interval is measured for."""
    gate = Gate(metric=metric, limit=limit, direction="at_least" if metric in AT_LEAST else "at_most")
    check = Check(gate=gate, outcome=Outcome.PASS, measured=measured, reason="", interval=interval)
    assert holds(check) is held


# ---------------------------------------------------------------------------------------------------------- tolerances

DROP = {"drop": "max_drop"}
ELEMENTWISE = {
    "max_abs": "at_most",
    "mean_abs": "at_most",
    "cosine": "at_least",
    "mean_cosine": "at_least",
    "mean_snr_db": "at_least",
    "column_nrmse": "at_most",
    "column_spread": "at_least",
    "top1_agreement": "at_least",
    "top1_regret": "at_most",
    "similarity_spearman": "at_least",
    "nearest_kept": "at_least",
}
OF_TOKENS = {"token_kl": "at_most", "token_top1_agreement": "at_least"}


def samples_for(metric: str, seed: int) -> tuple[Any, Any, Any]:
    """The candidate's answers, the baseline's, and labels."""
    random = np.random.default_rng(seed)
    noise = random.choice([0.01, 0.1, 1.0])
    if metric in OF_TOKENS or metric in TEXT_METRICS:
        base = random.normal(size=(60, 3, 5))
        return base + noise * random.normal(size=base.shape), base, random.integers(0, 5, (60, 3))
    if metric in ("mae", "rmse", "r2", "spearman"):
        labels = random.normal(size=400)
        base = labels + 0.3 * random.normal(size=400)
        return base + noise * random.normal(size=400), base, labels
    truth = random.integers(0, 3, 400)
    base = np.eye(3)[truth] * 3 + random.normal(size=(400, 3))
    return base + noise * random.normal(size=base.shape), base, truth


def tolerances(gate: Gate, arrays: Sequence[Any]) -> Check:
    own, base, labels = arrays
    samples = ComparedSamples(min_samples=2, real=True, labels=labels)
    checks = check_outputs([gate], {"y": own}, {"y": base}, samples, batch_size=1, seed=0)
    return next(check for check in checks if check.gate.metric == gate.metric)


TASKS = [*(metric for metric in HIGHER_IS_BETTER if metric not in ("coco_map", "wer", "ndcg")), *TEXT_METRICS]


@pytest.mark.parametrize("confidence", [None, 0.95])
@pytest.mark.parametrize("metric", [*ELEMENTWISE, *OF_TOKENS, *TASKS])
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, share=st.floats(0.5, 2))
def test_tolerances_are_held_by_the_rule_of_the_run(
    metric: str, confidence: float | None, seed: int, share: float
) -> None:
    """Broken: an interval that the gate did not ask for decides, or one that it asked for does not; or a step of the
    run ends with an error where a gate asks for no confidence."""
    is_task = metric in TASKS
    direction: Any = "at_most" if is_task else (ELEMENTWISE | OF_TOKENS)[metric]
    options = ({"drop": "max_relative_drop"} if metric == "perplexity" else DROP) if is_task else {}
    arrays = samples_for(metric, seed)

    def look(limit: float) -> Check:
        gate = Gate(metric=metric, limit=limit, direction=direction, confidence=confidence, options=options)
        return tolerances(gate, arrays)

    found = look(0.1)
    if found.measured is None:
        assert found.outcome is Outcome.NOT_RUN
        return
    # Where there is an interval its ends decide, and a look is a bootstrap: one limit somewhere else is enough.
    somewhere = found.measured * share
    edges, others = (found.interval, (somewhere,)) if found.interval else ((somewhere,), ())
    # Rounding: the run knows the values behind a mean, and the record does not.
    for limit in (*(edge + off for edge in edges for off in (-1e-6, 1e-6)), *others):
        check = look(limit)
        if check.outcome is not Outcome.NOT_RUN:
            recorded: Check = revive(Check, plain(check))
            assert holds(recorded) is (check.outcome is Outcome.PASS), check.reason
