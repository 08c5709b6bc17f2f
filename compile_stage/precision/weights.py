"""Weights in 8 bits: their scales, and the scales that a bias needs."""

from __future__ import annotations

from typing import Any

import numpy as np

_PARTS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.84, 0.8, 0.75, 0.7)
_LARGEST_BIAS = 2.0**30
_EXACT_BIAS = 2.0**23  # steps in a float32 bias

LEAST_SCALE = float(np.finfo(np.float32).tiny)
"""The smallest normal float32: of what lies below it a scale keeps few digits or none, and a scale of 0 makes NaN."""


def as_rows(weight: Any, axis: int | None) -> Any:
    """[channels, everything that is summed for one]; one row when the weight has one scale."""
    return weight.reshape(1, -1) if axis is None else np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)


def from_rows(rows: Any, shape: tuple[int, ...], axis: int | None) -> Any:
    """The inverse of `as_rows` for a weight of this shape."""
    if axis is None:
        return rows.reshape(shape)
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    return np.ascontiguousarray(np.moveaxis(rows.reshape(moved), 0, axis))


def scale_rows(rows: Any, importance: Any, levels: int, search: bool) -> Any:
    """One scale for each row.

    Args:
        importance: How much an error of each element counts: the mean square of what it is multiplied by; same shape as
            one row, or as `rows`.
        levels: The largest integer: 127, or 63 where sums of products would overflow 16 bits.
        search: Take the scale with the least weighted squared error, clipping the largest weights if that pays; else
            none is clipped.
    """
    largest = np.abs(rows).max(1)
    largest = np.where(largest > levels * LEAST_SCALE, largest, 1.0).astype(np.float32)
    best = largest / np.float32(levels)
    if not search:
        return best
    least = np.full(len(rows), np.inf)
    for part in _PARTS:
        scale = largest * np.float32(part / levels)
        error = (((round_rows(rows, scale, levels) * scale[:, None] - rows) ** 2) * importance).sum(1)
        better = error < least
        best[better], least[better] = scale[better], error[better]
    return best


def round_rows(rows: Any, scale: Any, levels: int) -> Any:
    """The nearest integers, in float32."""
    return np.clip(np.rint(rows / scale[:, None]), -levels, levels)


def fit_empty_rows(scale: Any, rows: Any, bias: Any, x_scale: float) -> Any:
    """Of rows that are all zero any scale is right for the weights.

    This one makes a float32 of the bias' 32 bits, instead of a multiple of x_scale.
    """
    empty = ~rows.any(axis=1) & (bias != 0) if len(scale) == len(bias) else np.zeros(len(scale), bool)
    return np.where(empty, np.abs(bias) / (_EXACT_BIAS * x_scale) if empty.any() else scale, scale).astype(np.float32)


def widen_for_bias(scale: Any, bias: Any, x_scale: float) -> Any:
    """Scales large enough for the bias to fit 32 bits in units of both scales.

    One scale for the whole weight stays one.
    """
    least = np.abs(bias) if len(scale) > 1 else np.abs(bias).max(initial=0.0)
    return np.maximum(scale, np.maximum(least / (_LARGEST_BIAS * x_scale), LEAST_SCALE / x_scale).astype(np.float32))
