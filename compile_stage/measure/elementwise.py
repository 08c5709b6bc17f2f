"""How far two arrays of floats lie apart, sample by sample, in pieces of a few megabytes.

Two passes. The first finds magnitudes and what is not finite; the second sums squares of values scaled by those
magnitudes, so that neither 1e200 nor 1e-200 is lost when squared. All sums are float64.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

F64: TypeAlias = NDArray[np.float64]

BLOCK = 1 << 20
"""Elements looked at together: 8 MB of float64, and a handful of temporaries of that size."""


class NotMeasurableError(ValueError):
    """A metric has no value for these arrays; the message is the reason, and becomes that of a NOT_RUN."""


@dataclass(frozen=True)
class Measured:
    """A metric's value.

    Attributes:
        badness: `[samples]`, larger is worse, 0 (or less) is perfect; None when samples have no share of their own.
        note: What a reader should know beside the number.
        parts: `[samples]`, for a metric that is their mean, and can so have an interval; None for one of the worst
            sample.
        interval: Low and high end, where whoever measured it had them.
        needed: Samples with which the gate's limit could be shown if nothing differed at all; None where it is not
            known.
    """

    value: float
    badness: F64 | None = None
    note: str = ""
    parts: F64 | None = None
    interval: tuple[float, float] | None = None
    needed: int | None = None

    def worst(self, most: int = 5) -> tuple[int, ...]:
        """The worst samples, worst first; those that are perfect are not among them."""
        if self.badness is None:
            return ()
        order = np.argsort(-np.nan_to_num(self.badness, nan=np.inf), kind="stable")[:most]
        return tuple(int(i) for i in order if not self.badness[i] <= 0)


@dataclass(frozen=True)
class Distances:
    """Per sample, what the elementwise metrics are made of. All arrays are `[samples]`.

    Attributes:
        compared: Elements that are finite on both sides.
        shared: Elements that are the same NaN or infinity on both sides; they are left out.
        strange: Elements that are NaN or infinite on one side only, or differently.
        max_abs: max |a - b|.
        peak_a, peak_b: max |a|, max |b|.
        sum_abs: Sum of |a - b|, in units of max_abs.
        dot, norm_a, norm_b: Sums of a*b, a*a, b*b, with a in units of peak_a and b in units of peak_b.
        noise: Sum of (a - b) squared, in units of max_abs squared.
        width: Elements of one sample.
    """

    compared: F64
    shared: F64
    strange: F64
    max_abs: F64
    peak_a: F64
    peak_b: F64
    sum_abs: F64
    dot: F64
    norm_a: F64
    norm_b: F64
    noise: F64
    width: int


def distances(a: Array, b: Array) -> Distances:
    """Compare candidate `a` with baseline `b`, of the same shape `[samples, ...]`, at least one element each."""
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    sums = {name: np.zeros(len(b)) for name in Distances.__annotations__ if name != "width"}
    for rows, columns in _blocks(a, b):
        x, y = a[rows, columns].astype(np.float64), b[rows, columns].astype(np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        same = ~both & ((x == y) | (np.isnan(x) & np.isnan(y)))
        sums["compared"][rows] += both.sum(axis=1)
        sums["shared"][rows] += same.sum(axis=1)
        sums["strange"][rows] += (~both & ~same).sum(axis=1)
        x, y = np.where(both, x, 0), np.where(both, y, 0)
        for name, value in (("peak_a", x), ("peak_b", y), ("max_abs", _minus(x, y))):
            np.maximum(sums[name][rows], np.abs(value).max(axis=1), out=sums[name][rows])
    unit_a, unit_b, unit_d = (
        np.where((unit := sums[name]) > 0, unit, 1)[:, None] for name in ("peak_a", "peak_b", "max_abs")
    )
    for rows, columns in _blocks(a, b):
        x, y = a[rows, columns].astype(np.float64), b[rows, columns].astype(np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        x, y = np.where(both, x, 0), np.where(both, y, 0)
        with np.errstate(invalid="ignore"):  # infinity over infinity, when |a - b| passes the largest float64
            apart = _minus(x, y) / unit_d[rows]
        x, y = x / unit_a[rows], y / unit_b[rows]
        sums["sum_abs"][rows] += np.abs(apart).sum(axis=1)
        sums["noise"][rows] += (apart * apart).sum(axis=1)
        sums["dot"][rows] += (x * y).sum(axis=1)
        sums["norm_a"][rows] += (x * x).sum(axis=1)
        sums["norm_b"][rows] += (y * y).sum(axis=1)
    return Distances(**sums, width=b.shape[1])


def _blocks(*arrays: Array) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of a piece at a time, of arrays of the same shape `[samples, elements]`."""
    count, width = arrays[0].shape
    across = min(width, BLOCK)
    down = max(1, BLOCK // max(across, 1))
    for row in range(0, count, down):
        for column in range(0, width, across):
            yield slice(row, row + down), slice(column, column + across)
            release(*arrays)


def release(*arrays: Array) -> None:
    """Let go of the pages of memory-mapped arrays that were read: they count as resident until somebody needs the
    memory."""
    for array in arrays:
        if isinstance(array, np.memmap) and array.mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
            mapped: Any = array  # NumPy keeps the map of a memmap to itself
            mapped._mmap.madvise(mmap.MADV_DONTNEED)


def _minus(x: F64, y: F64) -> F64:
    with np.errstate(over="ignore"):
        return x - y


# -------------------------------------------------------------------------------------------------------------- metrics


def _max_abs(d: Distances) -> Measured:
    return Measured(float(d.max_abs.max()), d.max_abs)


def _mean_abs(d: Distances) -> Measured:
    with np.errstate(invalid="ignore"):
        sums = d.sum_abs * d.max_abs
    return Measured(float(sums.sum() / d.compared.sum()), sums / np.maximum(d.compared, 1))


def _max_rel(d: Distances) -> Measured:
    peak = float(d.peak_b.max())
    if peak == 0:
        value = np.where(d.max_abs > 0, np.inf, 0.0)
        return Measured(float(value.max()), value, "the baseline is zero everywhere")
    with np.errstate(over="ignore"):
        return Measured(float(d.max_abs.max() / peak), d.max_abs / peak)


def _cosines(d: Distances) -> F64:
    """1 where both are zero (they are equal), 0 where only one is."""
    norms = np.sqrt(d.norm_a) * np.sqrt(d.norm_b)
    some = np.clip(d.dot / np.where(norms > 0, norms, 1), -1, 1)
    both_zero = (d.norm_a == 0) & (d.norm_b == 0)
    # Equal arrays have the cosine 1, whatever the last digit of the division says.
    return np.where(both_zero | (d.max_abs == 0), 1.0, np.where(norms > 0, some, 0.0))


def _column_cosine(d: Distances) -> Measured:
    """Of outputs with one value for each sample: the cosine of a single number is its sign, which a value near zero
    loses to rounding, so that of the column of all samples is taken."""
    top_a, top_b = d.peak_a.max() or 1.0, d.peak_b.max() or 1.0
    unit_a, unit_b = d.peak_a / top_a, d.peak_b / top_b
    norms = math.sqrt(float(d.norm_a @ unit_a**2)) * math.sqrt(float(d.norm_b @ unit_b**2))
    if not d.max_abs.any():
        value = 1.0
    else:
        value = float(np.clip(d.dot @ (unit_a * unit_b) / norms, -1, 1)) if norms > 0 else 0.0
    return Measured(value, d.max_abs, "one value for each sample: the cosine is that of all samples' values")


def _cosine(d: Distances) -> Measured:
    if d.width == 1:
        return _column_cosine(d)
    cosines = _compared(d, _cosines(d), 1.0)
    zero = int(np.sum(d.peak_b == 0))
    note = f"the baseline is zero for {zero} samples" if zero else ""
    return Measured(float(cosines.min()), 1 - cosines, note)


def _mean_cosine(d: Distances) -> Measured:
    if d.width == 1:
        return _column_cosine(d)
    cosines = _cosines(d)[d.compared > 0]
    return Measured(float(cosines.mean()), 1 - _compared(d, _cosines(d), 1.0), parts=cosines)


def _decibels(signal: F64, signal_unit: F64, noise: F64, noise_unit: F64) -> F64:
    """10 log10(signal / noise), both given as a sum in units of their square: +inf without noise, -inf without
    signal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        level = 10 * (np.log10(signal) - np.log10(noise)) + 20 * (np.log10(signal_unit) - np.log10(noise_unit))
    return np.where(noise_unit == 0, np.inf, np.where(signal_unit == 0, -np.inf, level))


def _snrs(d: Distances) -> F64:
    return _decibels(d.norm_b, d.peak_b, d.noise, d.max_abs)


def _psnrs(d: Distances) -> F64:
    peak = np.full_like(d.peak_b, d.peak_b.max())
    return _decibels(np.maximum(d.compared, 1), peak, d.noise, d.max_abs)


def _worst_decibels(d: Distances, levels: F64) -> Measured:
    levels = _compared(d, levels, np.inf)
    # An exact sample is not among the worst, however bad the others' decibels.
    badness = np.where(levels == np.inf, 0.0, 1e4 - np.where(np.isfinite(levels), levels, -1e4))
    return Measured(float(levels.min()), badness)


def _snr(d: Distances) -> Measured:
    return _worst_decibels(d, _snrs(d))


def _psnr(d: Distances) -> Measured:
    return _worst_decibels(d, _psnrs(d))


def _pooled(d: Distances, levels: F64, signal: F64, signal_unit: F64) -> Measured:
    """The mean is one of powers, not of decibels: a single exact sample would make that infinite."""
    top_signal, top_noise = signal_unit.max(), d.max_abs.max()
    scaled_signal = np.sum(signal * (signal_unit / (top_signal or 1)) ** 2)
    scaled_noise = np.sum(d.noise * (d.max_abs / (top_noise or 1)) ** 2)
    value = _decibels(scaled_signal, top_signal, scaled_noise, top_noise)
    return Measured(float(value), _worst_decibels(d, levels).badness)


def _mean_snr(d: Distances) -> Measured:
    return _pooled(d, _snrs(d), d.norm_b, d.peak_b)


def _mean_psnr(d: Distances) -> Measured:
    return _pooled(d, _psnrs(d), d.compared, np.full_like(d.peak_b, d.peak_b.max()))


def _compared(d: Distances, values: F64, perfect: float) -> F64:
    """Samples of which nothing could be compared say nothing, good or bad."""
    return np.where(d.compared > 0, values, perfect)


DISTANCE_METRICS: Mapping[str, Callable[[Distances], Measured]] = {
    "max_abs": _max_abs,
    "mean_abs": _mean_abs,
    "max_rel": _max_rel,
    "cosine": _cosine,
    "mean_cosine": _mean_cosine,
    "snr_db": _snr,
    "mean_snr_db": _mean_snr,
    "psnr_db": _psnr,
    "mean_psnr_db": _mean_psnr,
}


def allclose(a: Array, b: Array, options: JsonMap) -> Measured:
    """max |a - b| / (atol + rtol |b|): at most 1 means that every element is within the tolerance.

    Where both are the same NaN or infinity they agree; where neither tolerance leaves room, any difference is
    infinitely many times too large.
    """
    rtol, atol = float(options.get("rtol", 1e-5)), float(options.get("atol", 1e-8))
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    excess = np.zeros(len(b))
    for rows, columns in _blocks(a, b):
        x, y = a[rows, columns].astype(np.float64), b[rows, columns].astype(np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        x, y = np.where(both, x, 0), np.where(both, y, 0)
        apart, room = np.abs(_minus(x, y)), atol + rtol * np.abs(y)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = np.where(apart > 0, apart / room, 0.0)
        np.maximum(excess[rows], ratio.max(axis=1), out=excess[rows])
    return Measured(float(excess.max()), excess)


def agreement(a: Array, b: Array) -> Measured:
    """Share of equal elements; NaN equals NaN. For whole numbers, truth values and text."""
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    equal = np.zeros(len(b))
    for rows, columns in _blocks(a, b):
        x, y = a[rows, columns], b[rows, columns]
        same = np.asarray(x == y)
        if x.dtype.kind in "fc" and y.dtype.kind in "fc":
            same |= np.isnan(x) & np.isnan(y)
        equal[rows] += same.sum(axis=1)
    share = equal / b.shape[1]
    return Measured(float(share.mean()), 1 - share, parts=share)
