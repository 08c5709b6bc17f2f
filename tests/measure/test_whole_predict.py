"""A predict() as a whole, with the network and with the artifact in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Gate, Outcome
from compile_stage.measure.whole_predict import judge_predict, predict_both

GATES = (Gate(metric="max_rel", limit=1e-3, direction="at_most"),)
X = np.random.default_rng(0).normal(size=(20, 3))
_random = np.random.default_rng(1)


def by_chance(x: Any, artifact: Any) -> Any:
    return x.sum(axis=1) + 0.1 * _random.normal(size=len(x))


def repeats(x: Any, artifact: Any) -> Any:
    return x.sum(axis=1) * (1.1 if artifact else 1.0)


@pytest.mark.parametrize(("predict", "names_the_original"), [(by_chance, True), (repeats, False)])
def test_a_predict_that_does_not_repeat_its_own_answers_is_named(
    predict: Callable[[Any, Any], Any], names_the_original: bool, tmp_path: Path
) -> None:
    """Broken: an artifact is blamed for the chance in the code around it, or a wrong one blames the original."""
    answers = predict_both(lambda columns, run: predict(columns["x"], run), dict, {"x": X}, 3, 5, tmp_path)
    failed = [check for check in judge_predict(GATES, answers, 0) if check.outcome is Outcome.FAIL]
    assert [check.gate.metric for check in failed] == ["max_rel"]
    says = "; the cause is the original: its predict() does not repeat its answers (output 'predict()' of two equal "
    assert (says in failed[0].reason) is names_the_original
