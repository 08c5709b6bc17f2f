"""Inputs of timed calls: drawn from all samples, most of them new, and some in common for all participants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.measure.samples import Samples
from compile_stage.measure.timed_inputs import (
    CHECKED_CALLS,
    LARGEST_CHANGE,
    TURN_BYTES,
    KeptAnswers,
    TimedInputs,
    checked_batch,
)

Array = np.ndarray[Any, Any]


def samples(**inputs: Array) -> Samples:
    return Samples(count=len(next(iter(inputs.values()))), inputs=inputs, labels=None)


def rows_of(samples_: Array, batch: Array) -> list[int]:
    """Which samples the rows of a batch were made from."""
    far = np.abs(batch[:, None] - samples_[None]).reshape(len(batch), len(samples_), -1).max(axis=2)
    return [int(row) for row in far.argmin(axis=1)]


IMAGES = np.random.default_rng(0).uniform(-1, 1, (40, 3, 4)).astype(np.float32)


def test_a_turn_uses_the_whole_set_and_hardly_any_batch_twice() -> None:
    """Broken: a model that remembers what it answered would be timed on its memory."""
    turn = TimedInputs(samples(x=IMAGES), 2).turn(400, seed=5, checked_seed=None)
    assert len(turn.batches) == 400
    assert {row for batch in turn.batches for row in rows_of(IMAGES, batch["x"])} == set(range(40))
    seen = [batch["x"].tobytes() for batch in (turn.first, *turn.batches)]
    plain = sum(all(row.tobytes() in {s.tobytes() for s in IMAGES} for row in batch["x"]) for batch in turn.batches)
    assert 0.1 < plain / 400 < 0.4
    assert len(set(seen)) > 395
    other = TimedInputs(samples(x=IMAGES), 2).turn(400, seed=6, checked_seed=None)
    assert len({batch["x"].tobytes() for batch in other.batches} & set(seen)) < 20


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["float16", "float32", "float64"]), st.integers(0, 2**40))
def test_a_changed_float_stays_within_its_range_and_near_its_sample(dtype: str, seed: int) -> None:
    """Broken: a mask of zeros, or the smallest and largest pixel, would become a value that no sample has."""
    array = np.random.default_rng(seed).uniform(-300, 300, (8, 2, 3)).astype(dtype)
    array[:, 0] = 0
    for batch in TimedInputs(samples(x=array), 1).some(20, seed):
        (sample,) = rows_of(array.astype(np.float64), batch["x"].astype(np.float64))
        assert batch["x"].dtype == dtype
        was, now = array[sample].astype(np.float64), batch["x"][0].astype(np.float64)
        assert np.all(np.abs(now) <= np.abs(was))
        assert np.all(np.abs(now - was) <= (LARGEST_CHANGE + np.finfo(dtype).eps) * np.abs(was))
        assert np.all(now[0] == 0)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(60, dtype=np.int64).reshape(20, 3),
        np.array([["a", "bc"], ["d", "e"]]),
        np.arange(40, dtype=np.float32).reshape(20, 2),  # perhaps categories, or a mask
        np.array([True, False, True]),
    ],
    ids=["whole numbers", "text", "floats that are whole numbers", "truth values"],
)
def test_what_has_nothing_between_two_values_is_only_reordered(array: Array) -> None:
    """Broken: a category, an id or a mask would become one that the model was never shown."""
    batches = TimedInputs(samples(x=array), 2).some(30, seed=1)
    known = {row.tobytes() for row in array}
    assert all(row.tobytes() in known for batch in batches for row in batch["x"])
    assert len({batch["x"].tobytes() for batch in batches}) > 1


def test_in_a_table_only_columns_with_fractions_change() -> None:
    """Broken: the encoded category beside a price would be an unknown one."""
    table = np.stack([np.arange(20) % 4, np.linspace(0.1, 7, 20)], axis=1).astype(np.float32)
    batches = TimedInputs(samples(x=table), 4).some(20, seed=1)
    assert {float(value) for batch in batches for value in batch["x"][:, 0]} <= {0.0, 1.0, 2.0, 3.0}
    prices = {float(value) for value in table[:, 1]}
    assert any(float(value) not in prices for batch in batches for value in batch["x"][:, 1])


def test_large_inputs_do_not_fill_the_memory() -> None:
    """Broken: a turn of a fast model on images would hold gigabytes, and take longer to prepare than to run."""
    large = np.zeros((2, TURN_BYTES // 8 // 4), dtype=np.float32)
    assert len(TimedInputs(samples(x=large), 1).turn(100, seed=0, checked_seed=None).batches) == 7
    assert len(TimedInputs(samples(x=large), 100).turn(3, seed=0, checked_seed=None).batches) == 1


def in_common(turn: Any) -> Mapping[int, bytes]:
    return {number: turn.batches[place]["x"].tobytes() for place, number in turn.checked.items()}


def test_participants_are_given_the_same_batches_at_places_of_their_own() -> None:
    """Broken: an answer would be compared with the original's to another input, or a model could know which are
    kept."""
    inputs = TimedInputs(samples(x=IMAGES), 2)
    many, few, one = (inputs.turn(calls, seed=calls, checked_seed=77) for calls in (100, 8, 1))
    assert (len(many.checked), len(few.checked), len(one.checked)) == (CHECKED_CALLS, 2, 1)
    assert in_common(few).items() <= in_common(many).items()
    assert in_common(one).items() <= in_common(few).items()
    again = inputs.turn(100, seed=101, checked_seed=77)
    assert in_common(again) == in_common(many)
    assert again.checked.keys() != many.checked.keys()
    assert in_common(inputs.turn(100, seed=100, checked_seed=78)) != in_common(many)


def test_the_stage_knows_the_samples_of_a_common_batch_without_having_them() -> None:
    """Broken: an answer would be laid beside that of another sample."""
    inputs = TimedInputs(samples(x=IMAGES), 3)
    plains = []
    for seed in range(30):
        turn = inputs.turn(4, seed=seed, checked_seed=seed)
        ((place, number),) = turn.checked.items()
        known = checked_batch(40, 3, seed, number)
        assert rows_of(IMAGES, turn.batches[place]["x"]) == list(known.rows)
        assert np.array_equal(turn.batches[place]["x"], IMAGES[known.rows]) == known.plain
        assert sorted(known.order) == [0, 1, 2]
        plains.append(known.plain)
    assert 0 < sum(plains) < 20


def test_kept_answers_are_copies_in_the_order_of_the_batch_and_few_of_large_ones() -> None:
    """Broken: a buffer that the next call overwrites would pass as the answer, or a disk would fill with what is
    kept."""
    inputs = TimedInputs(samples(x=IMAGES), 4)
    turn = inputs.turn(40, seed=0, checked_seed=9)
    kept, buffer = KeptAnswers(inputs, turn, 9), np.zeros((4, 2), dtype=np.float32)
    for place in range(len(turn.batches)):
        buffer[:] = [[place, row] for row in range(4)]
        kept.keep(place, {"y": buffer})
    arrays = kept.arrays()
    places = sorted(turn.checked)
    assert len(arrays) == len(places) == CHECKED_CALLS
    for number, (place, array) in enumerate(zip(places, arrays, strict=True)):
        assert list(array["y"][:, 0]) == [place] * 4
        assert list(array["y"][:, 1]) == list(checked_batch(40, 4, 9, number).order)
    large = KeptAnswers(inputs, turn, 9)
    for place in range(len(turn.batches)):
        large.keep(place, {"y": np.zeros((4, 500_000))})  # 4 MB a row
    assert [array["y"].shape[0] for array in large.arrays()] == [1, 1]
