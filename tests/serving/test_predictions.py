"""Whether what a published model answers to texts is the original's answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from compile_stage.serving.predictions import answer_items, plain_prediction, refuse_prediction

ORIGINAL = [("cat", 0.70), ("dog", 0.20), ("cow", 0.1999)]


def ranked(*labels: tuple[str, float]) -> dict[str, Any]:
    frame = pd.DataFrame([{"label": label, "score": score} for label, score in labels], columns=["label", "score"])
    return plain_prediction(frame, ranks_labels=True)


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (ORIGINAL, None),
        ([("cat", 0.7009), ("dog", 0.1991), ("cow", 0.1990)], None),
        ([("cat", 0.70), ("cow", 0.20), ("dog", 0.1999)], None),  # within the tolerance, so neither is the second
        ([("cat", 0.70), ("dog", 0.20), ("owl", 0.1995)], None),  # just as near to the last place
        ([("cat", 0.72), ("dog", 0.20), ("cow", 0.1999)], "of answer 0 a score is off by 0.02"),
        ([("cat", 0.68), ("dog", 0.20), ("cow", 0.1999)], "of answer 0 a score is off by 0.02"),
        ([("dog", 0.70), ("cat", 0.20), ("cow", 0.1999)], "of answer 0 'dog' has another rank"),
        ([("owl", 0.70), ("dog", 0.20), ("cow", 0.1999)], "of answer 0 'owl' has another rank"),
        ([("cat", float("nan")), ("dog", 0.20), ("cow", 0.1999)], "it is made of [2 x [3]], not []"),
    ],
)
def test_a_label_has_the_rank_and_the_score_that_the_original_gives_it(answer: Any, refusal: str | None) -> None:
    """Broken: a published classifier that names another label, or is less sure, is promoted; or one is refused since
    two labels with one score came in the other order."""
    found = refuse_prediction(ranked(*answer), ranked(*ORIGINAL), 1e-3)
    assert found is None if refusal is None else refusal in str(found)


def test_a_label_that_is_missing_and_an_answer_that_is_missing_are_differences() -> None:
    """Broken: the first labels are compared, and the rest is taken for equal."""
    rows = pd.DataFrame({0: [{"label": "a", "score": 0.9}], 1: [{"label": "b", "score": 0.1}]})
    both, one = plain_prediction(rows), plain_prediction(rows[[0]])
    assert len(both["ranks"][0]) == 2
    assert refuse_prediction(both, both, 0.0) is None
    assert refuse_prediction(one | {"form": both["form"]}, both, 1.0) == "of answer 0 1 labels are ranked, not 2"
    assert refuse_prediction(both | {"ranks": []}, both, 1.0) == "it ranks the labels 0 times, not 1 times"


@pytest.mark.parametrize(
    ("answer", "original", "refusal"),
    [
        (np.array([1.0005, 2.0]), np.array([1.0, 2.0]), None),
        (np.array([0.9, 2.0]), np.array([1.0, 2.0]), "a number is off by 0.1"),
        (np.array([2.0, 1.0]), np.array([1.0, 2.0]), "a number is off by 1"),
        (np.array([1000.9, 0.0]), np.array([1000.0, 0.0]), None),  # of the largest
        (np.array([1002.0, 0.0]), np.array([1000.0, 0.0]), "a number is off by 2"),
        (np.array([0.002]), np.array([0.0]), "a number is off by 0.002"),  # of 1 where all are smaller
        (np.array([np.nan, 2.0]), np.array([1.0, 2.0]), "it says ['nan'], not []"),
        (np.array([1.0, 2.0], np.float32), np.array([1.0, 2.0]), "it has the form float32 array [2], not float64"),
        (["yes", "no"], ["yes", "yes"], "it says ['yes', 'no'], not ['yes', 'yes']"),
        ([{"text": "a", "start": 1}], [{"text": "a", "start": 2}], "a number is off by 1"),
        ([[1.0, 2.0]], [[1.0]], "it is made of [1 x [2]], not [1 x [1]]"),
        ([[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]], "it is made of [[2], [1]], not [[1], [2]]"),
        ([{"word": "a", "score": 0.5}], [{"token": "a", "score": 0.5}], "it is made of [1 x {word, score}], not"),
        ({"start": 1, "end": 2}, {"end": 1, "start": 2}, "it is made of {start, end}, not {end, start}"),
        ([{"a": [1, 2]}, {"a": [3, 4]}], [{"a": [1, 2]}, {"a": [3, 4]}], None),
        ([None], ["None of it"], "it says ['None'], not ['None of it']"),
    ],
)
def test_texts_are_equal_and_numbers_are_near(answer: Any, original: Any, refusal: str | None) -> None:
    """Broken: the check before promotion takes another answer for the original's."""
    found = refuse_prediction(plain_prediction(answer), plain_prediction(original), 1e-3)
    assert found is None if refusal is None else refusal in str(found)


def test_answers_that_an_earlier_version_wrote_down_are_compared_as_it_did() -> None:
    """Broken: after an update, versions that were published before it would be refused."""
    now = plain_prediction([{"word": "a", "start": 1}])
    before = {key: value for key, value in now.items() if key != "layout"}
    assert refuse_prediction(now, before, 0.0) is None
    assert refuse_prediction(before, now, 0.0) is None
    assert refuse_prediction(now, before | {"texts": ["b"]}, 0.0) is not None


def test_items_are_given_as_the_original_takes_them() -> None:
    """Broken: both models would be asked otherwise than clients ask them, and agree on that."""
    given: list[Any] = []

    def predict(data: Any) -> Any:
        given.append(data)
        return [len(data)]

    answer_items(predict, ["a", "b"])
    assert given.pop() == ["a", "b"]
    answer_items(predict, ["a", "b"], column="text")
    assert given.pop().to_dict("list") == {"text": ["a", "b"]}

    def rank(data: Any) -> Any:
        given.append(data)
        return pd.DataFrame([{"label": data, "score": 0.5}])

    answer = answer_items(rank, ["a", "b"], each=True)
    assert given == ["a", "b"]
    assert answer["ranks"] == [[["a", 0.5]], [["b", 0.5]]]
