"""Answers of two predict()s to the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from compile_stage.core.records import Gate
from compile_stage.measure.predict_answers import refuse_answers
from compile_stage.measure.predict_turns import COMPARED_ROWS, answer_parts

HOW = {"kind": "array", "dtypes": {}}
ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def parts(predict: Any, how: Any = HOW, call_s: float = 0.0, rows: int = 1) -> dict[str, dict[str, str]]:
    return answer_parts(predict, how, {"x": ROWS}, rows, call_s)


def labels(rows: Any) -> Any:
    return (rows[:, 0] > 0).astype(np.int64)


@pytest.mark.parametrize(
    ("original", "published"),
    [
        (lambda rows: rows, lambda rows: rows * np.float32(1.01)),
        (labels, lambda rows: labels(rows).astype(np.float64)),
        (labels, lambda rows: labels(rows).reshape(-1, 1)),
        (lambda rows: {"a": rows}, lambda rows: pd.DataFrame({"a": list(rows)})),
        (lambda rows: pd.Series(rows[:, 0]), lambda rows: rows[:, 0].tolist()),
        (lambda _: ["text"] * COMPARED_ROWS, lambda _: np.array(["text"] * COMPARED_ROWS, object)),
        (lambda rows: pd.DataFrame({"a": pd.array(labels(rows), "Int64")}), lambda rows: {"a": labels(rows)}),
        (lambda rows: [{"score": 1.0}] * len(rows), lambda rows: rows),
        (lambda rows: rows[0, 0], lambda rows: float(rows[0, 0])),
        (lambda rows: [rows[0], rows[:2, 0]], lambda rows: rows),
        (lambda rows: {"a": rows, "b": rows[0, 0]}, lambda rows: {"a": rows, "b": rows[0, 0]}),
        (lambda rows: rows, lambda rows: 1 / 0),
        (lambda rows: rows[:, 0] * np.nan, lambda rows: rows[:, 0] * np.nan),
    ],
    ids=[
        "rounded",
        "labels' type",
        "a column",
        "frame of a dict",
        "series",
        "texts",
        "pandas' own",
        "dicts",
        "one number",
        "ragged",
        "other lengths",
        "refused",
        "missing",
    ],
)
def test_the_same_answers(original: Any, published: Any) -> None:
    """Broken: a right model is refused for the form of its answers, or for what nobody can compare."""
    assert refuse_answers(parts(original), parts(published)) is None


@pytest.mark.parametrize(
    ("original", "published", "says"),
    [
        (lambda rows: rows, lambda rows: 3 * rows, r"its answer is another one in 1\d of 16 rows: 0\.\d+, "),
        (labels, lambda rows: 1 - labels(rows), "its answer is another one in 16 of 16 rows"),
        (labels, lambda rows: rows, r"its answer has the shape \[16, 3\], and the original's \[16\]"),
        (lambda rows: {"a": rows}, lambda rows: {"b": rows}, "it answers 'b', and the original 'a'"),
        (lambda _: ["text"] * COMPARED_ROWS, labels, "its answer is numbers, and the original's text"),
        (lambda rows: {"a": rows}, lambda rows: rows, "it answers one array, and the original 'a'"),
        (lambda rows: {"a": rows}, lambda rows: {"a": np.zeros_like(rows)}, "its answer of a is another one in"),
    ],
    ids=["scaled", "other labels", "another output", "another name", "numbers", "no names", "zeros"],
)
def test_other_answers(original: Any, published: Any, says: str) -> None:
    """Broken: a published model that answers another of its outputs, or with its columns mixed up, passes."""
    import re

    reason = refuse_answers(parts(original), parts(published))
    assert reason is not None
    assert re.search(says, reason), reason


CLOSE = (Gate(metric="max_abs", limit=0.05, direction="at_most"),)


@pytest.mark.parametrize(
    "frame",
    [lambda rows: rows, lambda rows: {"y": rows}, lambda rows: pd.DataFrame(rows, columns=list("abc"))],
    ids=["array", "dict", "a column for each"],
)
def test_an_output_is_held_to_its_gates(frame: Any) -> None:
    """Broken: what is around an artifact of fp32 moves its answers by a tenth, and the version is published."""
    outputs = {"z": ROWS * 7, "y": ROWS}
    original = parts(frame)

    def refused(factor: float, gates: Any = CLOSE, known: Any = outputs) -> str | None:
        return refuse_answers(original, parts(lambda rows: frame(rows * np.float32(factor))), gates, known)

    assert refused(1.001) is None
    assert refused(1.02) is None, "few rows may use twice the tolerance"
    assert refused(1.1) is not None
    assert "times the tolerance" in str(refused(1.1))
    assert refused(1.1, gates=()) is None
    assert refused(1.1, known={"y": outputs["y"] * 2}) is None, "it is no output as it is"


def test_the_first_samples_again_where_there_are_fewer() -> None:
    """Broken: answers are held beside those of other samples."""

    def asked(factor: float) -> Any:
        return answer_parts(lambda rows: rows * np.float32(factor), HOW, {"x": ROWS[:5]}, 1, 0.0)

    assert refuse_answers(asked(1), asked(1.1), CLOSE, {"y": ROWS[:5]}) is not None
    assert refuse_answers(asked(1), asked(1.1), CLOSE, {"y": ROWS[5:10]}) is None, "it is no output of those"


@pytest.mark.parametrize("call_s", [0.0, 10.0])
def test_a_model_of_other_rows_or_of_long_calls_is_compared_in_the_rows_that_are_timed(call_s: float) -> None:
    """Broken: a model that is fixed to four rows, or one whose call takes seconds, is published unseen."""

    def fixed(factor: float) -> Any:
        def predict(rows: Any) -> Any:
            if len(rows) != 4 and not call_s:
                raise ValueError
            return rows * np.float32(factor)

        return parts(predict, call_s=call_s, rows=4)

    assert list(fixed(1)) == ["4"]
    assert refuse_answers(fixed(1), parts(lambda rows: rows, rows=4)) is None, "it takes other rows too"
    assert refuse_answers(fixed(1), fixed(3)) is not None


def test_what_is_not_asked_twice() -> None:
    """Broken: texts, whose answers are compared elsewhere, are asked here too."""
    assert parts(labels, {"kind": "items", "texts": ["a"], "column": "", "each": False}) == {}
