"""The inputs of timed calls, made outside the clock.

A model that is called with one batch again and again can remember its answer. So each timed call has a batch of its
own: rows of the whole validation set, in random order, and in three of four calls each float of them a little smaller
than it is in the sample. Whole numbers and text are only reordered. Nothing can be known of such a batch before.

Some batches of a round are given to all participants, at places that differ: the answers to these are kept, and
compared with the original's (`measure.timed_answers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.predict import plain_array
from compile_stage.measure.samples import Samples

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

PLAIN_SHARE = 0.25
"""Share of the calls with samples as they are. It is well below one half, so that remembering the answers to all
samples moves no median."""

LARGEST_CHANGE = 1e-3
"""A changed float is its sample's, less at most this share: sign, zeros and range stay, and no answer jumps, but where
a threshold lies just there."""

TURN_BYTES = 8_000_000
"""At most so many bytes of inputs are made for one turn, but at least two batches: it takes some 20 ms."""

CHECKED_CALLS = 8
"""At most so many answers of a turn are kept, and at most every fourth."""

_CALL_BYTES, _KEPT_BYTES = 2_000_000, 8_000_000  # kept of one call, and of one turn; at least one row

_Random = np.random.Generator


@dataclass(frozen=True)
class CheckedBatch:
    """What is known of a batch that all participants are given, without the samples.

    Attributes:
        rows: `[batch]`, indices of samples.
        order: `[batch]`, the rows in the order in which they are kept, where not all are.
        plain: The samples are as they are.
    """

    rows: NDArray[np.int64]
    order: NDArray[np.int64]
    plain: bool


@dataclass(frozen=True)
class TurnInputs:
    """The batches of one turn.

    Attributes:
        first: For the call that is not timed.
        batches: One for each timed call.
        checked: Position among them → number of the batch that all participants are given.
    """

    first: Batch
    batches: tuple[Batch, ...]
    checked: dict[int, int]


def checked_batch(count: int, batch_size: int, seed: int, number: int) -> CheckedBatch:
    """The batch of that number among those that all participants of a round are given.

    Args:
        count: Of the validation set.
        seed: Of the round.
    """
    random = np.random.default_rng([seed, number])
    rows, plain = _rows(random, count, batch_size), bool(random.random() < PLAIN_SHARE)
    return CheckedBatch(rows=rows, order=random.permutation(batch_size), plain=plain)


class TimedInputs:
    """Batches of one size from one set of samples."""

    def __init__(self, samples: Samples, batch_size: int) -> None:
        self.batch_size = batch_size
        self._samples = samples
        self._changing = {name: _changing(array) for name, array in samples.inputs.items()}
        self._most = max(2, TURN_BYTES // max(1, _batch_bytes(samples, batch_size)))

    def some(self, calls: int, seed: int) -> list[Batch]:
        """Batches as those of a turn, at most as many as one holds."""
        calls = min(calls, self._most)
        random = np.random.default_rng(seed)
        rows = _rows(random, self._samples.count, calls * self.batch_size)
        plain = random.random(calls) < PLAIN_SHARE
        made = self._take(random, rows, np.repeat(plain, self.batch_size))
        size = self.batch_size
        return [{name: array[i * size : (i + 1) * size] for name, array in made.items()} for i in range(calls)]

    def turn(self, calls: int, seed: int, checked_seed: int | None) -> TurnInputs:
        """The inputs of one turn of so many calls, or of fewer when more would take too much memory.

        Args:
            seed: Of this participant's turn alone.
            checked_seed: Of the round; None when no answer is kept.
        """
        first, *batches = self.some(calls + 1, seed)
        if checked_seed is None:
            return TurnInputs(first, tuple(batches), {})
        most = max(1, min(CHECKED_CALLS, len(batches) // 4))
        places = np.sort(np.random.default_rng([seed, 1]).permutation(len(batches))[:most])
        checked = {int(place): number for number, place in enumerate(places)}
        for place, number in checked.items():
            batches[place] = self._checked(checked_seed, number)
        return TurnInputs(first, tuple(batches), checked)

    def kept_rows(self, answer: Batch, checked_seed: int, number: int) -> Batch:
        """Copies of the rows of an answer to a checked batch that are kept: all of them, where they are not too
        large."""
        order = checked_batch(self._samples.count, self.batch_size, checked_seed, number).order
        row_bytes = max(1, sum(array.nbytes for array in answer.values()) // self.batch_size)
        rows = order[: max(1, _CALL_BYTES // row_bytes)]
        return {name: array[rows].copy() if array.ndim else array.copy() for name, array in answer.items()}

    def _checked(self, seed: int, number: int) -> Batch:
        chosen = checked_batch(self._samples.count, self.batch_size, seed, number)
        plain = np.full(self.batch_size, chosen.plain)
        return self._take(np.random.default_rng([seed, number, 1]), chosen.rows, plain)

    def _take(self, random: _Random, rows: NDArray[np.int64], plain: NDArray[np.bool_]) -> dict[str, Array]:
        taken: dict[str, Array] = {}
        for name, samples in self._samples.inputs.items():
            array = np.ascontiguousarray(samples[rows])  # a copy, since it is by index
            changing = self._changing[name]
            if changing is not None and not plain.all():
                factor = random.random(array.shape, dtype=np.float32)
                factor *= -LARGEST_CHANGE
                factor += 1
                factor[plain] = 1
                if array.ndim > 1 and not changing.all():
                    factor[..., ~changing] = 1
                np.multiply(array, factor, out=array, casting="same_kind")
            taken[name] = array
        return taken


def turn_bytes(samples: Samples, batch_size: int) -> int:
    """At most so many bytes are the inputs of one turn."""
    return max(TURN_BYTES, 2 * _batch_bytes(samples, batch_size))


def _batch_bytes(samples: Samples, batch_size: int) -> int:
    return batch_size * sum(array.nbytes // max(1, len(array)) for array in samples.inputs.values())


class KeptAnswers:
    """The kept answers of one turn."""

    def __init__(self, inputs: TimedInputs, turn: TurnInputs, checked_seed: int) -> None:
        self._inputs, self._turn, self._seed = inputs, turn, checked_seed
        self._answers: list[Batch] = []
        self._left = _KEPT_BYTES

    def of_same_turn(self) -> KeptAnswers:
        """An empty one, for other answers to the same batches."""
        return KeptAnswers(self._inputs, self._turn, self._seed)

    def keep(self, place: int, answer: Batch) -> None:
        """Copy what a call answered, if it is one that is kept and memory is left."""
        number = self._turn.checked.get(place)
        if number is None or number > len(self._answers) or (self._answers and self._left <= 0):
            return
        rows = self._inputs.kept_rows(answer, self._seed, number)
        self._left -= sum(array.nbytes for array in rows.values())
        self._answers.append(rows)

    def arrays(self) -> list[dict[str, Array]]:
        """By number of the checked batch: output name → its kept rows, of a dtype that `.npy` knows.

        Raises:
            SourceError: An output holds neither numbers nor text.
        """
        return [{name: plain_array(name, array) for name, array in answer.items()} for answer in self._answers]


def _rows(random: _Random, count: int, wanted: int) -> NDArray[np.int64]:
    """Indices of samples: all of them in random order, as often as it takes."""
    passes = [random.permutation(count) for _ in range(-(-wanted // count))]
    return np.concatenate(passes)[:wanted]


def _changing(array: Array) -> NDArray[np.bool_] | None:
    """Which positions of the last axis may change, or of `[samples]` whether it may; None for an input that is only
    reordered.

    In a table `[samples, columns]` a column of whole numbers may be a category or a mask, for which nothing lies
    between two values; of images and sequences every float may change.
    """
    if array.dtype.kind != "f" or array.ndim == 0:
        return None
    if array.ndim > 2:
        return np.ones(array.shape[-1], dtype=bool)
    table = np.asarray(array, dtype=np.float64).reshape(len(array), -1)
    with np.errstate(invalid="ignore"):
        fractions = np.asarray((np.isfinite(table) & (table % 1 != 0)).any(axis=0))
    return fractions if fractions.any() else None
