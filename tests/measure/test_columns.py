"""Dead models that the metrics of a whole output pass, and right conversions that must not fail beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.language_models import fitting_gates
from compile_stage.core.records import Gate, Outcome
from compile_stage.measure.classes import measure_classes
from compile_stage.measure.columns import COLUMN_METRICS, columns_along_axes, measure_columns
from compile_stage.measure.metrics import ComparedSamples, check_outputs
from compile_stage.policy.load import load_policy

RANDOM = np.random.default_rng(0)
COUNT = 128


def softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


LOGITS = RANDOM.normal(size=(COUNT, 10)) * 3
POSITION = RANDOM.uniform(50, 500, size=(COUNT, 1))
KELVIN = 293 + RANDOM.normal(size=(COUNT, 1))
STEADY = 293 + 0.05 * RANDOM.normal(size=(COUNT, 1))
PRICE = np.hstack([1e6 + 5e4 * RANDOM.normal(size=(COUNT, 1)), RANDOM.uniform(size=(COUNT, 1))])
BOXES = np.concatenate(
    [RANDOM.uniform(0, 640, (COUNT, 20, 4)), RANDOM.uniform(size=(COUNT, 20, 2)) ** 20], axis=2
)  # fmt: skip
NEAR_UNIFORM = softmax(RANDOM.normal(size=(COUNT, 10)) * 1e-3)


def with_zeros(output: Any, start: int) -> Any:
    dead = output.copy()
    dead[..., start:] = 0
    return dead


def second_best(output: Any) -> Any:
    """Best and second best class swapped, in every row."""
    order, rows, swapped = np.argsort(-output, axis=1), np.arange(len(output)), output.copy()
    swapped[rows, order[:, 0]], swapped[rows, order[:, 1]] = output[rows, order[:, 1]], output[rows, order[:, 0]]
    return swapped


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Gate, ...]]:
    """The shipped limits of what is no language model, by precision."""
    path: Path = tmp_path_factory.mktemp("policy") / "p.yaml"
    path.write_text("apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntargets: {cpu: {}}\n")
    asked = load_policy(path).targets[0].tolerances
    return {precision: fitting_gates(gates, language_model=False) for precision, gates in asked.items()}


def failures(gates: tuple[Gate, ...], candidate: Any, baseline: Any, labels: Any = None) -> set[str]:
    """Metrics of the checks that did not pass, of an output `y`."""
    pair = ({"y": np.asarray(side, np.float32)} for side in (candidate, baseline))
    samples = ComparedSamples(min_samples=32, real=True, labels=labels)
    checks = check_outputs(gates, *pair, samples, batch_size=1, seed=0)
    return {check.gate.metric for check in checks if check.outcome is not Outcome.PASS}


DEAD: dict[str, tuple[str, Any, Any, str]] = {
    "probabilities beside a position": (
        "int8",
        with_zeros(np.hstack([POSITION, softmax(LOGITS)]), 1),
        np.hstack([POSITION, softmax(LOGITS)]),
        "column_nrmse",
    ),
    "a temperature that stays": ("int8", np.full_like(KELVIN, 293), KELVIN, "column_spread"),
    "the same in fp32": ("fp32", np.full_like(STEADY, 293), STEADY, "column_spread"),
    "a score beside a price": ("fp32", with_zeros(PRICE, 1), PRICE, "column_nrmse"),
    "a detector without scores": ("int8", with_zeros(BOXES, 4), BOXES, "column_nrmse"),
    "channels first": (
        "int8",
        np.moveaxis(with_zeros(BOXES, 4), 2, 1),
        np.moveaxis(BOXES, 2, 1),
        "column_nrmse",
    ),
    "another class in every row": ("int8", second_best(NEAR_UNIFORM), NEAR_UNIFORM, "top1_regret"),
    "classes shifted by one": ("bf16", np.roll(NEAR_UNIFORM, 1, axis=1), NEAR_UNIFORM, "top1_regret"),
    "half the amplitude": ("fp32", (STEADY + 293) / 2, STEADY, "column_nrmse"),
}


@pytest.mark.parametrize("case", DEAD)
def test_a_dead_model_fails_the_shipped_limits(shipped: dict[str, tuple[Gate, ...]], case: str) -> None:
    """Broken: what reads the whole output would pass a model that answers nothing of use."""
    precision, candidate, baseline, metric = DEAD[case]
    assert metric in failures(shipped[precision], candidate, baseline)
    wide = tuple(gate for gate in shipped[precision] if not gate.metric.startswith(("column", "top1")))
    assert not failures(wide, candidate, baseline), "the limits of the whole output see it too: no need of columns"


def quantised(values: Any, steps: int) -> Any:
    step = np.abs(values).max() / steps
    return np.round(values / step) * step


HONEST: dict[str, tuple[str, Any, Any]] = {
    "int8 logits": ("int8", quantised(LOGITS, 127), LOGITS),
    "int8 probabilities": ("int8", softmax(quantised(LOGITS, 60)), softmax(LOGITS)),
    "int8 with the offset in its step": ("int8", np.round(KELVIN / 1.16) * 1.16, KELVIN),
    "bf16 of a large offset": ("bf16", np.round(KELVIN / 2) * 2 * 0.999 + 0.293, KELVIN),
    "fp16 probabilities, most of them subnormal": (
        "fp16",
        softmax(LOGITS * 6).astype(np.float16),
        softmax(LOGITS * 6),
    ),
    "fp32 in another order": ("fp32", PRICE * (1 + 1e-6 * RANDOM.normal(size=PRICE.shape)), PRICE),
    "random weights: a thousand logits that hardly move": (
        "int8",
        (moving := 5 * RANDOM.normal(size=(1, 1000)) + 1e-2 * RANDOM.normal(size=(COUNT, 1000)))
        + 0.1 * RANDOM.normal(size=moving.shape),
        moving,
    ),
    "random weights in bf16": ("bf16", moving + 0.01 * RANDOM.normal(size=moving.shape), moving),
    "features, some next to dead": (
        "int8",
        (features := np.maximum(RANDOM.normal(size=(COUNT, 256)) - np.linspace(0, 3, 256), 0))
        + 0.01 * RANDOM.normal(size=features.shape),
        features,
    ),
    "a constant output": ("int8", np.full((COUNT, 4), 0.502), np.full((COUNT, 4), 0.5)),
}


@pytest.mark.parametrize("case", HONEST)
def test_a_right_conversion_holds_the_shipped_limits(shipped: dict[str, tuple[Gate, ...]], case: str) -> None:
    """Broken: an honest candidate, of a network with random weights too, would fail by rounding alone."""
    precision, candidate, baseline = HONEST[case]
    columns = tuple(gate for gate in shipped[precision] if gate.metric.startswith(("column", "top1")))
    assert len(columns) == 3
    assert not failures(columns, candidate, baseline)


def test_a_rare_class_that_is_lost_fails_beside_an_accuracy_that_holds(shipped: dict[str, tuple[Gate, ...]]) -> None:
    """Broken: six frauds in two thousand, all missed, cost 0.3 points of accuracy."""
    labels = np.zeros(2000, dtype=np.int64)
    labels[:6] = 1
    scores = np.where(labels == 1, 0.9, RANDOM.uniform(0, 0.2, 2000))
    missed = np.where(labels == 1, 0.45, scores)
    gates = (
        *(g for g in shipped["int8"] if not g.metric.startswith("column")),
        Gate(metric="accuracy", limit=0.01, direction="at_most", confidence=0.95, options={"drop": "max_drop"}),
        recall := Gate(
            metric="class_recall", limit=0.5, direction="at_most", confidence=0.95, options={"drop": "max_drop"}
        ),
    )  # fmt: skip
    assert "class_recall" in failures(gates, missed, scores, labels)
    assert "accuracy" not in failures(gates, missed, scores, labels)
    assert not failures((recall,), scores, scores, labels)
    labels[:12] = 1
    scores = np.where(labels == 1, 0.9, scores)
    one_of_twelve = np.where(np.arange(2000) < 1, 0.45, scores)
    assert not failures((recall,), one_of_twelve, scores, labels)


def test_the_class_that_lost_is_named() -> None:
    """Broken: nobody could tell which class to look at."""
    labels = np.repeat([0, 1], [30, 10])
    scores = np.eye(2)[labels]
    gate = Gate(metric="class_recall", limit=0.5, direction="at_most", confidence=0.95, options={"drop": "max_drop"})
    lost = np.eye(2)[np.zeros(40, dtype=int)]
    samples = ComparedSamples(min_samples=1, real=True, labels=labels)
    checks = check_outputs((gate,), {"y": lost}, {"y": scores}, samples, batch_size=1, seed=0)
    (check,) = [c for c in checks if c.gate.metric == "class_recall"]
    assert check.reason == (
        "class_recall gets worse by 1 (95 % bounds 0.7411 to 1), from 1 to 0 over 40 samples; at most 0.5 is allowed "
        "(of class 1, 10 samples: 10 right answers lost, 0 gained)"
    )


def test_the_worst_column_is_named_and_values_are_their_formulas() -> None:
    """Broken: the report would name another column than the one that is dead."""
    baseline = RANDOM.normal(size=(COUNT, 3)) + np.array([[0.0, 10.0, 100.0]])
    candidate = baseline.copy()
    candidate[:, 1] = 10 + (candidate[:, 1] - 10) / 4
    along = columns_along_axes(candidate, baseline)
    nrmse, spread = (measure_columns(metric, along, {"floor": 0.0}) for metric in COLUMN_METRICS)
    error = np.sqrt(np.mean((candidate[:, 1] - baseline[:, 1]) ** 2))
    assert nrmse.value == pytest.approx(error / baseline[:, 1].std())
    assert spread.value == pytest.approx(0.25)
    assert nrmse.note == spread.note == "column 1 of 3 along axis 1"


def test_in_float32_no_column_of_many_may_be_lost(shipped: dict[str, tuple[Gate, ...]]) -> None:
    """A probability beside 23 prices: PyTorch's exporter leaves the divisor_override of an average pool out, so that
    this column alone is 5/3 of what it should be. Broken: it is one of twenty, and its answers are published."""
    random = np.random.default_rng(0)
    baseline = (random.normal(size=(256, 24)) * 300 + 1000).astype(np.float32)
    baseline[:, 7] = random.random(256) * 0.5
    candidate = baseline.copy()
    candidate[:, 7] *= 5 / 3
    assert failures(shipped["fp32"], candidate, baseline) == {"column_nrmse"}


def test_in_float32_a_column_that_is_next_to_dead_may_be_rounded(shipped: dict[str, tuple[Gate, ...]]) -> None:
    """A feature of 1e-9 beside others of 1, each with float32's rounding of the layer. Broken: right conversions of
    wide outputs fail."""
    random = np.random.default_rng(0)
    baseline = random.normal(size=(256, 64)).astype(np.float32)
    baseline[:, 7] *= 1e-9
    candidate = baseline + (random.normal(size=baseline.shape) * 1e-6).astype(np.float32)
    assert failures(shipped["fp32"], candidate, baseline) == set()


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an output wider than a piece would have other columns."""
    baseline = RANDOM.normal(size=(9, 4, 5, 3)) * np.arange(1, 4)
    candidate = baseline + 0.1 * RANDOM.normal(size=baseline.shape)
    whole = columns_along_axes(candidate, baseline)
    monkeypatch.setattr("compile_stage.measure.columns.BLOCK", 7)
    for one, other in zip(whole, columns_along_axes(candidate, baseline), strict=True):
        assert one.axis == other.axis
        for name in ("std_a", "std_b", "error", "rms"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name))
    assert [columns.axis for columns in whole] == [1, 3]


def test_few_samples_are_one_column() -> None:
    """Broken: the spread of four samples in one of a thousand columns is luck, and would fail an honest candidate."""
    baseline = RANDOM.normal(size=(4, 1000))
    (columns,) = columns_along_axes(baseline + 0.05, baseline)
    assert columns.axis == 0
    single = columns_along_axes(baseline[:1] * 1.05, baseline[:1])
    assert measure_columns("column_nrmse", single, {"floor": 0.1}).value == 0
    assert measure_columns("column_nrmse", single, {"floor": 0.01}).value == np.inf


def test_masked_classes_have_a_place_in_the_order() -> None:
    """Broken: logits with -inf for classes that are not allowed would fail every candidate, or hide a wrong choice."""
    baseline = np.array([[1.0, 2.0, -np.inf], [3.0, -np.inf, 0.0]])
    assert measure_classes("top1_regret", baseline, baseline, {}).value == 0
    wrong = np.array([[1.0, 2.0, -np.inf], [0.0, -np.inf, 3.0]])
    assert measure_classes("top1_regret", wrong, baseline, {}).value > 0.5


def test_an_infinite_score_is_the_best_one() -> None:
    """Broken: scores such as 1 / distance, infinite where a sample is met again, fail every candidate, even one with
    the same answers; or a candidate that prefers another class passes."""
    baseline = np.array([[1.0, np.inf, 2.0], [3.0, 1.0, 0.0], [np.inf, -np.inf, 4.0]])
    assert measure_classes("top1_regret", baseline, baseline, {}).value == 0
    wrong = np.array([[1.0, 0.0, 2.0], [3.0, 1.0, 0.0], [0.0, -np.inf, 4.0]])
    assert measure_classes("top1_regret", wrong, baseline, {}).value > 0.3
    nothing = np.full((2, 3), np.inf)  # no score is finite: nothing is known, and nothing is lost
    assert measure_classes("top1_regret", nothing, nothing, {}).value == 0
