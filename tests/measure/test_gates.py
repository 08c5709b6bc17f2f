"""Which gates hold for an output."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from compile_stage.core.language_models import LANGUAGE_MODELS_ONLY
from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.core.records.policy import Direction
from compile_stage.measure.gates import fitting, holds, in_force, suits, that_held
from compile_stage.measure.label_needs import CLASSES_ONLY

GENERAL = Gate(metric="max_rel", limit=1e-6, direction="at_most")
OF_Y = replace(GENERAL, limit=0.01, output="y")
COSINE = Gate(metric="cosine", limit=0.99, direction="at_least")


def check(gate: Gate, output: str, outcome: Outcome) -> Check:
    return Check(gate=gate, outcome=outcome, measured=0.1, reason="", output=output, batch_size=1)


def test_an_outputs_own_limit_stands_in_the_place_of_the_general_one() -> None:
    """Broken: who loosens a limit for one output would have it judged by both, and who tightens it by either."""
    gates = [GENERAL, OF_Y, COSINE]
    assert in_force(gates, "y") == [OF_Y, COSINE]
    assert in_force(gates, "z") == [GENERAL, COSINE]
    assert in_force(gates, None) == [GENERAL, COSINE]


def test_a_waived_limit_of_an_output_does_not_bring_the_general_one_back() -> None:
    """Broken: an artifact whose limit on one output is waived would fail in the soak by the general limit, which nobody
    asked of that output."""
    checks = [check(OF_Y, "y", Outcome.FAIL), check(GENERAL, "z", Outcome.PASS), check(COSINE, "y", Outcome.PASS)]
    held = that_held([GENERAL, OF_Y, COSINE], checks)
    assert in_force(held, "y") == [COSINE]
    assert in_force(held, "z") == [replace(GENERAL, output="z"), COSINE]
    for outcome in (Outcome.FAIL, Outcome.NOT_RUN):
        assert that_held([GENERAL, COSINE], [check(COSINE, "y", outcome)]) == (GENERAL,)


NLL = Gate(metric="perplexity", limit=0.01, direction="at_most", options={LANGUAGE_MODELS_ONLY: True})
ACCURACY = Gate(metric="accuracy", limit=0.01, direction="at_most", options={CLASSES_ONLY: True})
LOGITS = {"logits": np.zeros((4, 6, 32), dtype=np.float32)}
TOKENS = np.arange(24, dtype=np.int64).reshape(4, 6)


def test_the_shipped_limits_of_language_models_hold_where_the_labels_are_their_texts() -> None:
    """Broken: a language model whose perplexity got worse would pass, since the shipped limit is left out; or a report
    would say that a limit is left out which nobody gave."""
    assert fitting([NLL, COSINE], LOGITS, TOKENS) == ([NLL, COSINE], [])
    assert fitting([NLL, COSINE], {"hidden": LOGITS["logits"][..., 0], **LOGITS}, TOKENS) == ([NLL, COSINE], [])


def test_only_shipped_limits_are_left_out_and_each_is_named() -> None:
    """Broken: a limit that the policy asks for itself would be left out as the shipped ones are, or without a word."""
    labels = np.array([0.5, 1.5, 2.5, 3.5], dtype=np.float32)
    own = [replace(gate, options={}) for gate in (NLL, ACCURACY)]
    kept, said = fitting([NLL, ACCURACY, *own], {"y": labels[:, None]}, labels)
    assert kept == own
    assert said == [
        "the shipped limit on 'accuracy' is left out: the labels are no classes of an output",
        "the shipped limit on 'perplexity' is left out: the labels are float32[4], and not the tokens of an output",
    ]
    # Without labels a task metric says itself what it lacks.
    assert fitting([ACCURACY], {"y": labels[:, None]}, None) == ([ACCURACY], [])


def test_a_speedup_at_the_limit_passes_and_one_that_is_surely_below_it_does_not() -> None:
    """Broken: a candidate as fast as the original would fail `min_speedup: 1`, or one that is surely slower pass."""
    gate = Gate(metric="speedup", limit=1.0, direction="at_least")
    assert holds(gate, 1.0, (0.98, 1.0))
    assert not holds(gate, 0.99, (0.985, 0.9999))
    assert not holds(gate, 1.1, (0.9799, 1.3))


@pytest.mark.parametrize(("direction", "side"), [("at_most", 1), ("at_least", -1)])
def test_the_worse_of_the_figure_and_its_bound_decides(direction: Direction, side: int) -> None:
    """Broken: an artifact passes by a bound that is not a number, or by one that is better than its own figure; or one
    that is further beyond its limit than rounding explains."""
    gate = Gate(metric="accuracy", limit=0.0, direction=direction, confidence=0.95)

    def ends(worse: float) -> tuple[float, float]:
        return (-1.0, worse) if side > 0 else (worse, 1.0)

    assert holds(gate, -0.2 * side, ends(-0.1 * side))
    assert not holds(gate, -0.2 * side, ends(0.1 * side))
    assert not holds(gate, 0.1 * side, ends(-0.1 * side))
    assert not holds(gate, -0.2 * side, ends(math.nan))
    assert not holds(gate, math.nan)
    assert holds(gate, 0.01 * side, slack=0.01)
    assert not holds(gate, 0.015 * side, slack=0.01)


def test_a_gate_looks_at_the_outputs_that_its_metric_can_read() -> None:
    """Broken: a limit on tokens, or on classes, looks at an output that has none, and the candidate can't pass for
    that; or equal labels count as a proof of scores."""
    kinds = {
        "tokens": np.zeros((4, 6, 32), dtype=np.float32),
        "scores": np.zeros((4, 10), dtype=np.float32),
        "number": np.zeros((4, 1), dtype=np.float32),
        "label": np.zeros(4, dtype=np.int64),
    }
    seen = {
        "token_kl": ["tokens"],
        "kl": ["tokens", "scores"],
        "max_rel": ["tokens", "scores", "number"],
        "agreement": ["label"],
    }
    for metric, names in seen.items():
        gate = Gate(metric=metric, limit=0.1, direction="at_most")
        assert [name for name, output in kinds.items() if suits(gate, output)] == names, metric
