"""A predict() as a whole, with the network and with the artifact in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Gate, Outcome
from compile_stage.measure.whole_predict import arrays_of, judge_predict, predict_both

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


def labelled(scores: Any, depth: int) -> Any:
    """Rows as pyfuncs answer classes: the best `depth` of three as dicts."""
    best = np.argsort(-scores, axis=1)[:, :depth]
    return [
        [{"label": "abc"[n], "score": float(row[n])} for n in order] for row, order in zip(scores, best, strict=True)
    ]


def test_lists_of_labels_and_scores_are_compared_as_labels_and_scores(tmp_path: Path) -> None:
    """Broken: an exact artifact fails on `agreement`, since a score as text differs in its last digit; or a wrong score
    passes beside a right label."""

    def predict(columns: Any, run: Any) -> Any:
        return labelled(columns["x"] * (1 + (run or 0.0)), 2)

    scores = np.abs(X) + 0.1

    def failed(error: float) -> list[tuple[str, str | None]]:
        answers = predict_both(lambda c, run: predict(c, error if run else None), dict, {"x": scores}, 3, 5, tmp_path)
        gates = (*GATES, Gate(metric="agreement", limit=0.999, direction="at_least"))
        return [(c.gate.metric, c.output) for c in judge_predict(gates, answers, 0) if c.outcome is not Outcome.PASS]

    assert failed(1e-7) == []
    assert failed(0.1) == [("max_rel", "predict() 0 score"), ("max_rel", "predict() 1 score")]


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ([{"a": 1.0}, {"a": 2.0}], {"predict() a": "f"}),
        ([["x", 0.5], ["y", 0.25]], {"predict() 0": "U", "predict() 1": "f"}),
        ([[1.0, 2.0], [3.0, 4.0]], {"predict()": "f"}),
        ([["x"], ["y", "z"]], {"predict()": "U"}),
        ([{"a": 1.0}, {"b": 2.0}], {"predict()": "U"}),
        (["x", "y"], {"predict()": "U"}),
        ([], {"predict()": "f"}),
    ],
)
def test_rows_of_one_form_are_taken_apart_and_others_are_texts(answer: Any, names: dict[str, str]) -> None:
    """Broken: rows of different lengths end the validation with an error of NumPy's."""
    assert {name: array.dtype.kind for name, array in arrays_of(answer).items()} == names
