"""Which samples count: those that differ from all others beyond rounding."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from compile_stage.measure.distinct import count_distinct
from compile_stage.measure.samples import Samples

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(0)
DIGIT = np.round(RANDOM.random((1, 8, 8)) * 16).astype(np.float32) / 16 * (RANDOM.random((1, 8, 8)) < 0.5)


def count(outputs: Array | None = None, **inputs: Array) -> int:
    number = len(next(iter(inputs.values())))
    answers = np.zeros((number, 3)) + 0.5 if outputs is None else outputs
    return count_distinct(Samples(number, inputs, None), {"y": answers})


def noisy(size: float, number: int = 200) -> Array:
    return (DIGIT + size * RANDOM.random((number, *DIGIT.shape))).astype(np.float32)


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-6, 2e-6])
def test_copies_with_noise_below_rounding_are_one_sample(size: float) -> None:
    """Broken: one picture, 200 times with a millionth of noise, would be 200 samples, and prove nothing."""
    assert count(x=noisy(size)) == 1
    assert count(x=np.concatenate([noisy(size), noisy(size) * 0.5 + 0.1])) == 2


def test_what_differs_is_counted() -> None:
    """Broken: honest sets of samples that lie close would be called too small."""
    assert count(x=noisy(1e-2)) == 200
    step = np.repeat(DIGIT, 64, axis=0)
    step.reshape(64, -1)[np.arange(64), np.arange(64)] += 1 / 255  # one step of 8 bits in one pixel
    assert count(x=step) == 64
    assert count(x=np.arange(1000, dtype=np.float32)[:, None]) == 1000
    assert count(x=RANDOM.normal(20, 5, (1000, 1)).astype(np.float32)) > 950


def test_whole_numbers_and_texts_differ_by_any_other_value() -> None:
    """Broken: token ids that lie next to each other would be one text."""
    ids = np.full((50, 16), 30000, np.int64)
    ids[:, 3] += np.arange(50) // 2
    assert count(ids=ids) == 25
    assert count(ids=ids, x=np.ones((50, 4), np.float32)) == 25
    assert count(text=np.array(["a", "b", "a", "bb"])) == 3
    assert count(flag=np.array([[True], [False], [True]])) == 2


def test_a_large_column_hides_the_others_only_where_the_answers_agree() -> None:
    """Broken: rows of a table of one hour, with a column of seconds since 1970, would all be copies."""
    table = np.column_stack([1.7e9 + np.arange(200), RANDOM.random((200, 3))])
    assert count(RANDOM.random((200, 2)), x=table) > 150
    assert count(np.ones((200, 2)), x=table) == 1


def test_each_input_counts_in_its_own_size() -> None:
    """Broken: a picture beside a large number would not be looked at."""
    number = np.full((200, 1), 1e9, np.float32)
    assert count(number=number, x=noisy(1e-2)) == 200
    assert count(number=number, x=noisy(1e-6)) == 1


def test_samples_without_an_answer_and_those_with_nan_are_told_apart() -> None:
    """Broken: samples of which the baseline has only NaN would count, or those with missing values be one."""
    x = RANDOM.random((10, 4)).astype(np.float32)
    answers = np.ones((10, 2))
    answers[:3] = np.nan
    assert count(answers, x=x) == 7
    same = np.ones((4, 4), np.float32)
    same[[0, 1], [0, 1]] = np.nan
    assert count(x=same) == 3
    assert count(x=np.zeros((5, 4), np.float32)) == 1


def test_a_large_set_costs_seconds() -> None:
    """Broken: every pair of 20,000 samples would be looked at, which takes minutes."""
    began = time.process_time()
    assert count(x=RANDOM.normal(size=(20_000, 8)).astype(np.float32)) == 20_000
    assert count(x=np.repeat(noisy(1e-6, 10), 2000, axis=0)) == 1
    assert time.process_time() - began < 30
