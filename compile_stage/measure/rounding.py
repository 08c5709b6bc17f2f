"""What becomes of the original's answers where samples are rounded to the type of the network's inputs.

An artifact takes float32. An original that computes in float64 answers a time stamp of 1.7e9 by its last two minutes,
which float32 loses. So it is asked with the samples as they are, artifacts with the rounded ones, and the gates judge
the difference. Here is what tells a reader where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.quantities import percent

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

Ask = Callable[["Batch"], Mapping[str, "Array"]]

_APART = 1e-3
"""Of the range of a column of answers. FP32 may be off by as much of the largest answer (`tolerances.fp32.max_rel`)."""

_MOST_COLUMNS = 64
"""Each is rounded alone to find those that do it."""

_SHOWN = 3

HELP = (
    "train it on the difference of a time or a large number from a constant, on an id as text, and trees and bins on "
    "columns in float32 (frame.astype('float32')), with the signature of these"
)


def changed(before: Mapping[str, Array], after: Mapping[str, Array]) -> int:
    """How many samples have another answer in `after`, of any output: another label or text, or a number that is off by
    more than 0.1 % of its column's range.

    Args:
        before, after: Output name → array, axis 0 being the sample.
    """
    rows = np.zeros(len(next(iter(before.values()))), bool)
    for name, one in before.items():
        rows |= _apart(np.asarray(one), np.asarray(after[name]))
    return int(np.count_nonzero(rows))


def blamed(ask: Ask, given: Batch, rounded: Batch) -> list[tuple[str, int | None, int]]:
    """Inputs, the column where it is a matrix of several, and how many samples have another answer where that alone is
    rounded; the most first, and without those that change none.

    Args:
        ask: What the original answers to inputs in the types that they have.
        given: Each input as the source of samples has it.
        rounded: As the network gets it.
    """
    before = ask(dict(given))
    found = [(name, column, changed(before, ask(batch))) for name, column, batch in _one_rounded(given, rounded)]
    return sorted((one for one in found if one[2]), key=lambda one: -one[2])


def _one_rounded(given: Batch, rounded: Batch) -> Iterator[tuple[str, int | None, Batch]]:
    for name, array in rounded.items():
        if array.dtype == given[name].dtype:
            continue
        if array.ndim != 2 or not 1 < array.shape[1] <= _MOST_COLUMNS:
            yield name, None, {**given, name: array}
            continue
        for column in range(array.shape[1]):
            tried = np.array(given[name])
            tried[:, column] = array[:, column]
            yield name, column, {**given, name: tried}


def in_words(count: int, samples: int, columns: Sequence[Mapping[str, Any]]) -> str:
    """What rounding does to the original's answers, as a sentence.

    Args:
        count: Of samples with another answer.
        columns: `{"column", "samples"}` of those whose rounding alone does it, the most first.
    """
    named = ", ".join(f"{one['column']} ({one['samples']})" for one in columns[:_SHOWN])
    more = f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
    by = f", by the rounding of {named}{more}" if named else ""
    return (
        f"the original answers {count} of {samples} samples ({percent(count / samples, 1)}) otherwise once they are "
        f"rounded to float32, as a compiled model takes them{by}"
    )


def _apart(one: Array, other: Array) -> NDArray[np.bool_]:
    """Which rows hold another answer."""
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        unlike = np.asarray(one != other)
    else:
        a, b = one.astype(np.float64), other.astype(np.float64)
        finite = np.where(np.isfinite(a), a, np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            range_ = np.nan_to_num(np.fmax.reduce(finite, axis=0) - np.fmin.reduce(finite, axis=0))
            near = np.abs(a - b) <= np.maximum(_APART * range_, 1e-6 * np.abs(a))
        unlike = ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    return np.asarray(unlike.reshape(len(one), -1).any(axis=1))
