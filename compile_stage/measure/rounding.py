"""Samples that were rounded to the network's type: whether the original still answers as it does to them as they are.

The original is compared with an artifact on the rounded samples. What the rounding itself does to its answers, no gate
sees: a time stamp of 1.7e9 loses its last two minutes in float32, on both sides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

Ask = Callable[[Mapping[str, "Array"]], "Sequence[Array]"]

_APART = 1e-3
"""Of the range of a column of answers. FP32 may be off by as much of the largest answer (`tolerances.fp32.max_rel`)."""

_FEW = 0.01
"""Of the samples. Of a model of trees a sample may lie so near to a threshold that it takes another branch."""

_MOST_COLUMNS = 64
"""Each is rounded alone to find the one that does it."""


def differing(ask: Ask, given: Batch, rounded: Batch) -> tuple[int, bool]:
    """How many samples the original answers otherwise once they are rounded, and whether these are more than a few;
    none where it takes one of both only.

    Args:
        ask: What the original answers to inputs in the type that they have.
        given: Each input as the source of samples has it.
        rounded: As the network gets it.
    """
    try:
        before, after = ask(given), ask(rounded)
    except Exception:  # noqa: BLE001 - what it does not take, the validation says
        return 0, False
    return _count(before, after)


def _count(before: Sequence[Array], after: Sequence[Array]) -> tuple[int, bool]:
    rows = np.zeros(len(before[0]), bool)
    for one, other in zip(before, after, strict=True):
        rows |= _apart(np.asarray(one), np.asarray(other))
    count = int(np.count_nonzero(rows))
    return count, count > max(1.0, _FEW * len(rows))


def blamed(ask: Ask, given: Batch, rounded: Batch) -> tuple[str, int | None] | None:
    """The input, and of a matrix the column, whose rounding alone changes the answers of more than a few samples; None
    where none does alone. The original takes both, as `differing` found."""
    before = ask(given)
    for name, array in rounded.items():
        if array.dtype.kind != "f" or given[name] is array:
            continue
        columns = range(array.shape[1]) if array.ndim == 2 and array.shape[1] <= _MOST_COLUMNS else [None]
        for column in columns:
            tried = array if column is None else np.array(given[name])
            if column is not None:
                tried[:, column] = array[:, column]
            if _count(before, ask({**given, name: tried}))[1]:
                return name, column if array.ndim == 2 and array.shape[1] > 1 else None
    return None


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
