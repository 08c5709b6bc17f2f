"""What the tensors of a float graph hold on calibration samples, and the range in which each is rounded.

One pass over the samples, one sample at a time in each thread: each tensor's statistics by channel and, when the method
needs it, a histogram of its values. What is kept between samples is a few numbers for each channel and twice `BINS`
counts for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from compile_stage.core.errors import UsageError
from compile_stage.core.parallel import in_threads
from compile_stage.plugin_support import onnx_weights
from compile_stage.precision.onnx_graph import open_session
from compile_stage.precision.weights import LEAST_SCALE

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

METHODS = ("mse", "minmax", "percentile", "entropy")

Array: TypeAlias = Any
Seen = TypeVar("Seen")

BINS = 4096  # on each side of 0, a power of 2; the largest value falls in the outer half of them
_LEAST_EXPONENT = -100  # of a tensor's largest value, as a power of 2: what is smaller counts as 0
_PARTS = 0.96 ** np.arange(75)  # of an extreme: the ends of a range that are tried, down to a twentieth
_PIECE = 1 << 16  # values that are counted at once: a whole tensor, in new memory each time, takes 5 times as long
_ENTROPY_BINS = 1024  # for the divergence: fewer bins, else most of them hold nothing


@dataclass
class Channels:
    """Of one tensor, for each channel: extremes, mean, and mean of squares; and how many values were seen in each."""

    low: Array
    high: Array
    mean: Array
    square: Array
    count: int

    @property
    def magnitude(self) -> Array:
        """The largest absolute value of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def rescaled(self, factor: Array) -> Channels:
        """What would have been seen of the tensor with each channel multiplied by its (positive) factor."""
        return Channels(
            self.low * factor, self.high * factor, self.mean * factor, self.square * factor * factor, self.count
        )


@dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's values, in bins whose width is a power of 2 with an edge at 0: those of any two samples add
    up exactly, in any order.

    Attributes:
        exponent: The width of a bin is 2 to this power.
        counts: Of `2 * BINS` bins, the first `BINS` for what is below 0.
    """

    exponent: int
    counts: Array

    def __add__(self, other: Histogram) -> Histogram:
        exponent = max(self.exponent, other.exponent)
        return Histogram(exponent, self._widened(exponent) + other._widened(exponent))

    def filled(self, span: Range) -> tuple[Array, Array]:
        """The bins that hold anything: their middles, which do not leave the span, and their counts."""
        places = np.flatnonzero(self.counts)
        centres = (places - BINS + 0.5) * 2.0**self.exponent
        return np.clip(centres, span.low, span.high), self.counts[places]

    def _widened(self, exponent: int) -> Array:
        """The counts in bins of a width that is larger, or the same."""
        merged = min(2 ** (exponent - self.exponent), BINS)
        counts = np.zeros(2 * BINS, np.int64)
        half = BINS // merged
        counts[BINS - half : BINS + half] = self.counts.reshape(-1, merged).sum(1)
        return counts


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value that is not clipped. 0 is always between them."""

    low: float
    high: float


class Activations:
    """The tensors of a float graph on the calibration samples.

    Args:
        model: The graph's file; beside it is room for another.
        axes: The tensors that can be observed → the axis of the channels of each. A tensor with fewer axes, or whose
            channels differ in number from sample to sample, counts as one channel.
        batches: Gives the samples, from the first, each time that it is called.
        threads: How many samples are run at once. It changes no result.
    """

    def __init__(
        self, model: Path, axes: Mapping[str, int], batches: Callable[[], Iterable[Batch]], threads: int
    ) -> None:
        self.axes = axes
        self._model, self._batches, self._threads = model, batches, threads

    def each(
        self, tensors: Collection[str], look: Callable[[dict[str, Array]], Seen], batches: Iterable[Batch] | None = None
    ) -> Iterator[Seen]:
        """What `look` makes of the float tensors of each sample, in order.

        Args:
            batches: Instead of all.
        """
        session, computed = self._session
        wanted = [name for name in tensors if name in computed]
        fed = {value.name for value in session.get_inputs()}

        def run(batch: Batch) -> Seen:
            outputs = (
                session.run(wanted, {name: array for name, array in batch.items() if name in fed}) if wanted else ()
            )
            values = dict(zip(wanted, outputs, strict=True)) | {n: batch[n] for n in tensors if n not in computed}
            return look({name: value for name, value in values.items() if value.dtype == np.float32 and value.size})

        return in_threads(run, self._batches() if batches is None else batches, self._threads)

    def only(self, names: Collection[str], samples: int) -> Activations:
        """Some of the tensors, on at most so many of the samples, evenly spread over all: a file of samples may be
        sorted."""
        total = sum(1 for _ in self._batches())
        step = max(1, -(-total // samples))
        axes = {name: self.axes[name] for name in names}
        return Activations(self._model, axes, lambda: islice(self._batches(), 0, None, step), self._threads)

    def first(self, count: int) -> Iterable[Batch]:
        """The first samples."""
        return islice(self._batches(), count)

    @cached_property
    def _session(self) -> tuple[Any, frozenset[str]]:
        """Computes all of the tensors that are not the graph's inputs; and the names of these."""
        import onnx

        proto = onnx_weights.load(self._model)
        inputs = {value.name for value in proto.graph.input}
        computed = [name for name in self.axes if name not in inputs]
        if computed:
            del proto.graph.output[:]
            proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
        return open_session(proto, threads=1), frozenset(computed)


def observe(tensors: Activations, counted: Collection[str] = ()) -> tuple[dict[str, Channels], dict[str, Histogram]]:
    """Statistics of each tensor along its channel axis, and the histograms of those that are to be counted.

    Raises:
        UsageError: A tensor holds a NaN or an infinity.
    """

    def look(values: dict[str, Array]) -> dict[str, tuple[Channels, Histogram | None]]:
        found = {name: _reduce(value, tensors.axes[name]) for name, value in values.items()}
        return {name: (c, _count(values[name], c) if name in counted else None) for name, c in found.items()}

    channels: dict[str, Channels] = {}
    histograms: dict[str, Histogram] = {}
    for reduced in tensors.each(tensors.axes, look):
        for name, (seen, counts) in reduced.items():
            if not np.isfinite(seen.square).all():
                raise UsageError(f"the tensor {name!r} holds NaN or infinite values on the calibration samples")
            before = channels.get(name)
            if before is not None and before.low.shape != seen.low.shape:
                before, seen = _merge_channels(before), _merge_channels(seen)
            channels[name] = seen if before is None else _add(before, seen)
            if counts is not None:
                histograms[name] = histograms[name] + counts if name in histograms else counts
    return channels, histograms


def count_values(tensors: Activations, names: Collection[str], samples: int) -> dict[str, Histogram]:
    """Histograms only, in another pass over at most so many samples."""
    return observe(tensors.only(names, samples), names)[1] if names else {}


def _count(value: Array, seen: Channels) -> Histogram | None:
    """None where a value is not finite."""
    if not np.isfinite(largest := float(seen.magnitude.max())):
        return None
    exponent = max(int(np.frexp(largest)[1]), _LEAST_EXPONENT) - (BINS.bit_length() - 1)
    flat, counts = value.reshape(-1), np.zeros(2 * BINS + 1, np.int64)
    scaled = np.empty(min(_PIECE, flat.size), np.float32)
    places = np.empty(scaled.size, np.intp)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        here, there = scaled[: piece.size], places[: piece.size]
        np.multiply(piece, np.float32(2.0**-exponent), out=here)
        here += np.float32(BINS)
        there[...] = here
        counts += np.bincount(there, minlength=counts.size)
    counts[-2] += counts[-1]  # the sum before was rounded up
    return Histogram(exponent, counts[:-1])


def rounding_shift(
    tensors: Activations, names: Collection[str], round_trip: Callable[[str, Array], Array], samples: int
) -> dict[str, Array]:
    """By how much quantisation moves the mean of each channel: the mean of (quantised - exact).

    It is no noise that averages out: a channel of small values beside one of large values becomes 0 as a whole.

    Args:
        round_trip: The values of a tensor, quantised and dequantised.
        samples: How many are run, from the first.
    """

    def look(values: dict[str, Array]) -> dict[str, Array]:
        return {name: _mean(round_trip(name, value) - value, tensors.axes[name]) for name, value in values.items()}

    sums: dict[str, tuple[Array, int]] = {}
    for shifts in tensors.each(names, look, tensors.first(samples)):
        for name, moved in shifts.items():
            total, count = sums.get(name, (np.zeros(1), 0))
            if not count or total.shape == moved.shape:
                sums[name] = (total + moved, count + 1)
    return {name: total / count for name, (total, count) in sums.items()}


def full_range(channels: Channels) -> Range:
    """From the smallest to the largest value that was seen.

    Empty where the steps within would be no float32 numbers.
    """
    span = Range(min(0.0, float(channels.low.min())), max(0.0, float(channels.high.max())))
    return span if span.high - span.low > BINS * LEAST_SCALE else Range(0.0, 0.0)


def choose(method: str, span: Range, seen: Histogram, symmetric: bool, percentile: float) -> Range:
    """The range to round in.

    Args:
        method: `mse`: the ends with the least mean squared error of rounding and clipping together; `percentile`: so
            many percent of all values lie between; `entropy`: the ends whose rounded distribution diverges least from
            the true one (Kullback-Leibler, as in TensorRT's calibrator); `minmax`: all that was seen.
        span: All that was seen.
        symmetric: The range will be widened to the same size on both sides of 0.
    """
    if method == "minmax" or span.high <= span.low:
        return span
    centres, counts = seen.filled(span)
    if method == "percentile":
        return _cover(counts, centres, span, percentile, symmetric)
    if method == "entropy":
        return _least_divergence(counts, centres, span, symmetric)
    return _least_error(counts.astype(np.float64), centres, span, symmetric)


def _least_error(counts: Array, centres: Array, span: Range, symmetric: bool) -> Range:
    """One end after the other: the errors of the two only meet in the step, so that a few rounds settle."""
    if symmetric:
        limit = max(-span.low, span.high)
        levels = 127.5 if span.low < 0 else 255.0
        errors = [_error(counts, centres, -part * limit, part * limit, part * limit / levels) for part in _PARTS]
        best = float(_PARTS[int(np.argmin(errors))]) * limit
        return Range(max(span.low, -best), min(span.high, best))
    low, high = span.low, span.high
    for _ in range(4):
        if span.high > 0:
            errors = [_error(counts, centres, low, part * span.high, (part * span.high - low) / 255) for part in _PARTS]
            high = float(_PARTS[int(np.argmin(errors))]) * span.high
        if span.low < 0:
            errors = [_error(counts, centres, part * span.low, high, (high - part * span.low) / 255) for part in _PARTS]
            low = float(_PARTS[int(np.argmin(errors))]) * span.low
    return Range(low, high)


def _error(counts: Array, centres: Array, low: float, high: float, step: float) -> float:
    """Squared error: step² / 12 for what is rounded, the distance to the end for what is clipped. A zero is exact."""
    over = np.maximum(centres - high, 0) + np.maximum(low - centres, 0)
    inside = (over == 0) & (np.abs(centres) > step / 2)
    return float(counts @ (over * over) + counts[inside].sum() * step * step / 12)


def _cover(counts: Array, centres: Array, span: Range, percentile: float, symmetric: bool) -> Range:
    if symmetric:
        order = np.argsort(np.abs(centres), kind="stable")
        covered = np.cumsum(counts[order])
        limit = float(np.abs(centres[order])[np.searchsorted(covered, covered[-1] * percentile / 100)])
        return Range(max(span.low, -limit), min(span.high, limit))
    covered = np.cumsum(counts) / counts.sum()
    outside = (1 - percentile / 100) / 2
    low = float(centres[np.searchsorted(covered, outside)]) if span.low < 0 else 0.0
    high = float(centres[min(len(centres) - 1, np.searchsorted(covered, 1 - outside))])
    return Range(min(0.0, max(low, span.low)), max(0.0, min(high, span.high)))


def _least_divergence(counts: Array, centres: Array, span: Range, symmetric: bool) -> Range:
    """Over magnitudes: both ends are cut at the same limit."""
    del symmetric
    limit = max(-span.low, span.high)
    places = np.minimum((np.abs(centres) / limit * _ENTROPY_BINS).astype(np.int64), _ENTROPY_BINS - 1)
    true = np.bincount(places, weights=counts, minlength=_ENTROPY_BINS)
    true[0] = min(true[0], true[1:].max(initial=0.0))  # a ReLU's zeros are exact in any range
    levels, best, least = 128, _ENTROPY_BINS, np.inf
    for end in range(levels, _ENTROPY_BINS + 1, 8):
        kept = true[:end].copy()
        kept[-1] += true[end:].sum()
        which = np.arange(end) * levels // end
        filled = true[:end] > 0
        sums = np.bincount(which, weights=true[:end], minlength=levels)
        sizes = np.bincount(which, weights=filled, minlength=levels)
        coarse = np.where(filled, (sums / np.maximum(sizes, 1))[which], 0.0)
        if not kept.sum() or not coarse.sum():
            continue
        p, q = kept / kept.sum(), np.maximum(coarse / coarse.sum(), 1e-12)
        divergence = float(np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0])))
        if divergence < least:
            best, least = end, divergence
    threshold = limit * best / _ENTROPY_BINS
    return Range(max(span.low, -threshold), min(span.high, threshold))


def _mean(value: Array, axis: int) -> Array:
    rank = value.ndim
    if not -rank <= axis < rank:
        return value.mean(keepdims=True, dtype=np.float64).reshape(1)
    others = tuple(place for place in range(rank) if place != axis % rank)
    return value.mean(others, dtype=np.float64)


def _reduce(value: Array, axis: int) -> Channels:
    rank = value.ndim
    if not -rank <= axis < rank:
        flat = value.reshape(1, -1)
    elif axis in (-1, rank - 1):
        return _reduce_rows(value.reshape(-1, value.shape[-1]))
    elif axis == 1 and len(value) == 1:
        flat = value.reshape(value.shape[1], -1)
    else:
        flat = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
    size = flat.shape[1]
    square = np.einsum("ij,ij->i", flat, flat, dtype=np.float64) / size
    return Channels(flat.min(1), flat.max(1), flat.mean(1, dtype=np.float64), square, size)


def _reduce_rows(rows: Array) -> Channels:
    square = np.einsum("ij,ij->j", rows, rows, dtype=np.float64) / len(rows)
    return Channels(rows.min(0), rows.max(0), rows.mean(0, dtype=np.float64), square, len(rows))


def _add(a: Channels, b: Channels) -> Channels:
    count = a.count + b.count
    part = b.count / count
    return Channels(
        np.minimum(a.low, b.low),
        np.maximum(a.high, b.high),
        a.mean + (b.mean - a.mean) * part,
        a.square + (b.square - a.square) * part,
        count,
    )


def _merge_channels(a: Channels) -> Channels:
    return Channels(
        a.low.min(keepdims=True), a.high.max(keepdims=True), a.mean.mean(keepdims=True), a.square.mean(keepdims=True),
        a.count * a.low.size,
    )  # fmt: skip
