"""How far each column of an output moves with the sample, in both models, and how far apart they are there.

A metric of the whole output reads mostly its largest numbers and its offset: a score in 0 to 1 beside a pixel position
in 0 to 500 is lost in it, and so is 1 K of change in 293 K. So each column is held against its own standard deviation
over the samples, with the offset removed. docs/decisions/0036 has the reasons for the rule and its numbers.

A *column* of `[n, k]` is one of the k. Of an output with more axes it is an index of axis 1 (channels, anchors), and
one of the last axis (classes, coordinates) too, with all elements that share it pooled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.classes import is_distribution
from compile_stage.measure.elementwise import BLOCK, F64, Measured, release

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

COLUMN_METRICS = ("column_nrmse", "column_spread")

MANY = 20
"""From so many columns on, one in twenty may miss `column_nrmse`: some are next to dead in the original too."""

SIXTEEN_BITS = 1e-3
"""A floor below this is that of float32, in which a column that is next to dead has a precision of its own: fp16 has
2^-11, and a floor of 0.003. There no column may miss its limit."""

FEW = 8
"""With fewer samples than this a column's spread is luck, so that all elements are taken as one column."""

RESOLUTION = 1 / 32
"""Of the floor: a column that moves by less, beside its own RMS, can be a constant in a right conversion of that
precision (bf16 has 2^-9, and a floor of 0.015)."""

_NEVER = 1e-9  # a standard deviation below this share of the RMS is float64's rounding


@dataclass(frozen=True)
class Columns:
    """Of the columns along one axis; all arrays are `[columns]`, in one unit of the whole output.

    Attributes:
        axis: Of the output; 0 for an output of one number per sample.
        std_a, std_b: Standard deviation over the samples, of the candidate and the baseline, each element about its own
            mean.
        error: Root of the mean squared difference.
        rms: Root of the baseline's mean square, offset included.
        scale: What the noise of a column is compared with beside its own spread: its RMS, or where columns have one
            unit that of the others (`_scale`).
    """

    axis: int
    std_a: F64
    std_b: F64
    error: F64
    rms: F64
    scale: F64

    @property
    def moving(self) -> NDArray[np.bool_]:
        """Columns that move with the sample at all."""
        return np.asarray(self.std_b > _NEVER * self.rms)

    def named(self, index: int) -> str:
        """Which column it is, for a reader."""
        if self.axis == 0:
            return ""
        return f"column {index} of {len(self.std_b)} along axis {self.axis}"


def measure_columns(metric: str, along: Sequence[Columns], options: JsonMap) -> Measured:
    """One of COLUMN_METRICS. Where no column of the baseline moves with the sample, the error alone decides, as far as
    it is beyond the floor.

    Args:
        along: As `columns_along_axes` gives them.
    """
    floor = float(options.get("floor", 0.0))
    moving = [columns for columns in along if columns.moving.any()]
    if not moving:
        over = max(_norm(columns.error) - floor * _norm(columns.rms) for columns in along)
        lost, kept = (math.inf, 0.0) if metric == "column_nrmse" else (0.0, 1.0)
        return Measured(lost if over > 0 else kept, note="the baseline does not move with the sample")
    if metric == "column_nrmse":
        return max((_nrmse(columns, floor) for columns in moving), key=lambda m: m.value)
    return min((_spread(columns, floor) for columns in moving), key=lambda m: m.value)


def _norm(values: F64) -> float:
    return float(np.sqrt(np.sum(values * values)))


def _nrmse(columns: Columns, floor: float) -> Measured:
    """The error of the worst column beyond `floor` of its scale, over its standard deviation: 1 for an answer that
    stays at the mean."""
    excess = np.maximum(columns.error - floor * columns.scale, 0)[columns.moving]
    values = excess / columns.std_b[columns.moving]
    order = np.argsort(-values, kind="stable")
    spared = len(values) // MANY if floor >= SIXTEEN_BITS else 0
    rank = order[spared]
    return Measured(float(values[rank]), note=columns.named(int(np.flatnonzero(columns.moving)[rank])))


def _spread(columns: Columns, floor: float) -> Measured:
    """The candidate's standard deviation over the baseline's, of the column where that is least; or of the best one,
    where all columns stand still."""
    shares = np.where(columns.moving, columns.std_a / np.where(columns.moving, columns.std_b, 1), np.nan)
    common = np.where(columns.scale > columns.rms, floor * columns.scale, 0)
    clear = columns.std_b > np.maximum(RESOLUTION * floor * columns.rms, common)
    place = int(np.nanargmax(shares))
    if (clear & columns.moving).any():
        worst = int(np.nanargmin(np.where(clear, shares, np.nan)))
        place = worst if shares[worst] < shares[place] else place
    return Measured(float(shares[place]), note=columns.named(place))


# ----------------------------------------------------------------------------------------------------------- statistics


def columns_along_axes(a: Array, b: Array) -> list[Columns]:
    """The columns of candidate `a` and baseline `b`, both `[samples, ...]` floats with at least one element: one entry
    for each axis that has columns."""
    axes = [0] if b.ndim == 1 or len(b) < FEW else sorted({1, b.ndim - 1})
    axes = [axis for axis in axes if axis == 0 or b.shape[axis] > 1] or axes[:1]
    moments, within = _moments(a, b, axes)
    along = []
    for axis in axes:
        std_a, std_b, error, rms = np.sqrt(moments[axis])
        scale = _scale(rms, axis > 0 and within and _distributes(b, axis))
        along.append(Columns(axis, std_a, std_b, error, rms, scale))
    return along


def _scale(rms: F64, distribution: bool) -> F64:
    """Columns that share a unit share their noise: the classes of a distribution that of the likeliest; those of a wide
    output that of the middle one, since there a column is mostly a feature of one layer, and some features are next to
    dead. Below 64 columns it is the lower quartile, so that the scores among boxes or key points keep their own."""
    if distribution:
        return np.full_like(rms, rms.max())
    if len(rms) < 16:
        return rms
    return np.maximum(rms, np.quantile(rms, 0.5 if len(rms) >= 64 else 0.25))


def _distributes(b: Array, axis: int) -> bool:
    """Whether the baseline's scores along that axis are probabilities that sum to 1, judged by its first samples."""
    some = np.asarray(b[: max(1, BLOCK // max(int(np.prod(b.shape[1:])), 1))])
    return b.shape[axis] > 1 and is_distribution(np.moveaxis(some, axis, -1).reshape(-1, b.shape[axis]))


def _moments(a: Array, b: Array, axes: list[int]) -> tuple[dict[int, F64], bool]:
    """By axis `[4, columns]`: variance of a, of b, mean squared difference, mean square of b, each averaged over a
    column's elements and in the output's unit squared; and whether b lies within 0 and 1.

    Elements that are not finite on both sides are left out: they count as the first sample's.
    """
    shape, count = b.shape, len(b)
    a, b = a.reshape(count, -1), b.reshape(count, -1)
    unit, within = _unit(b)
    sums = {axis: np.zeros((4, shape[axis] if axis else 1)) for axis in axes}
    for columns in _pieces(b.shape[1]):
        values = _of_elements(a[:, columns], b[:, columns], unit)
        places = np.arange(columns.start, min(columns.stop, b.shape[1]))
        for axis in axes:
            inner = int(np.prod(shape[axis + 1 :])) if axis else 1
            index = (places // inner) % shape[axis] if axis else np.zeros(len(places), dtype=np.int64)
            for row, value in enumerate(values):
                sums[axis][row] += np.bincount(index, weights=value, minlength=sums[axis].shape[1])
    return {axis: total * total.shape[1] / b.shape[1] for axis, total in sums.items()}, within


def _pieces(width: int) -> Iterator[slice]:
    for start in range(0, width, BLOCK):
        yield slice(start, start + BLOCK)


def _of_elements(a: Array, b: Array, unit: float) -> F64:
    """`[4, elements]`: variance of a and of b over the samples, mean of (a - b) squared and of b squared."""
    first = np.where(np.isfinite(b[0]), b[0], 0).astype(np.float64) / unit
    sums = np.zeros((6, b.shape[1]))
    step = max(1, BLOCK // b.shape[1])
    for row in range(0, len(b), step):
        x, y = a[row : row + step].astype(np.float64) / unit, b[row : row + step].astype(np.float64) / unit
        both = np.isfinite(x) & np.isfinite(y)
        x, y = np.where(both, x, first) - first, np.where(both, y, first) - first  # about a sample: no digits are lost
        with np.errstate(over="ignore", invalid="ignore"):  # a candidate of 1e300 is infinitely wrong
            for place, value in enumerate((x, x * x, y, y * y, (x - y) ** 2, (y + first) ** 2)):
                sums[place] += value.sum(axis=0)
        release(a, b)
    sums /= len(b)
    with np.errstate(over="ignore", invalid="ignore"):
        variances = [np.maximum(sums[place + 1] - sums[place] ** 2, 0) for place in (0, 2)]
    return np.stack([*variances, sums[4], sums[5]])


def _unit(b: Array) -> tuple[float, bool]:
    """The largest finite magnitude, so that no square overflows; and whether all lies within 0 and 1, but for the
    rounding of an 8-bit softmax."""
    low, high = math.inf, -math.inf
    flat = b.reshape(-1)
    for start in range(0, len(flat), BLOCK):
        piece = flat[start : start + BLOCK]
        finite = piece[np.isfinite(piece)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        release(b)
    top = max(abs(low), abs(high))
    return top if 0 < top < math.inf else 1.0, low >= -0.02 and high <= 1.02
