"""What the tensors of a float graph hold on calibration samples, and the range in which each is rounded.

Two passes over the samples, one sample at a time. The first takes each tensor's statistics by channel; the second, when the method needs it, a
histogram of every value. What is kept between samples is a few numbers for each channel and `BINS` counts for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from compile_stage.core.errors import UsageError

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

METHODS = ("mse", "minmax", "percentile", "entropy")

Array: TypeAlias = Any

BINS = 4096
_PARTS = 0.96 ** np.arange(75)  # of an extreme: the ends of a range that are tried, down to a twentieth
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
class Range:
    """The smallest and the largest value that rounding keeps. 0 is always between them."""

    low: float
    high: float


def observe(
    model: Path, axes: Mapping[str, int], batches: Callable[[], Iterable[Batch]], threads: int
) -> dict[str, Channels]:
    """Statistics of each tensor along its channel axis.

    Args:
        axes: Tensor → the axis of its channels. A tensor with fewer axes, or whose channels differ in number from sample to sample,
            counts as one channel.
        batches: Gives the samples, from the first, each time that it is called.

    Raises:
        UsageError: A tensor holds a NaN or an infinity.
    """
    found: dict[str, Channels] = {}
    for values in _run(model, list(axes), batches(), threads):
        for name, value in values.items():
            if not value.size:
                continue
            seen = _reduce(value, axes[name])
            if not np.isfinite(seen.square).all():
                raise UsageError(f"the tensor {name!r} holds NaN or infinite values on the calibration samples")
            before = found.get(name)
            if before is not None and before.low.shape != seen.low.shape:
                before, seen = _merge_channels(before), _merge_channels(seen)
            found[name] = seen if before is None else _add(before, seen)
    return found


def histograms(
    model: Path, spans: Mapping[str, Range], batches: Callable[[], Iterable[Batch]], threads: int
) -> dict[str, Array]:
    """Counts of each tensor's values in `BINS` equal bins over its span."""
    found = {name: np.zeros(BINS, np.int64) for name in spans}
    for values in _run(model, list(spans), batches(), threads):
        for name, value in values.items():
            span = spans[name]
            width = (span.high - span.low) / BINS
            if width <= 0:
                continue
            places = np.multiply(value.reshape(-1), np.float32(1 / width), dtype=np.float32)
            places -= np.float32(span.low / width)
            np.clip(places, 0, BINS - 1, out=places)
            found[name] += np.bincount(places.astype(np.int32), minlength=BINS)
    return found


def rounding_shift(
    model: Path,
    axes: Mapping[str, int],
    round_trip: Callable[[str, Array], Array],
    batches: Callable[[], Iterable[Batch]],
    threads: int,
) -> dict[str, Array]:
    """By how much rounding moves the mean of each channel: the mean of (rounded - exact). It is no noise that averages out: a quiet channel beside
    a loud one is rounded to 0 as a whole.

    Args:
        axes: As for `observe`.
        round_trip: The values of a tensor as they come out of its rounding.
    """
    found: dict[str, tuple[Array, int]] = {}
    for values in _run(model, list(axes), batches(), threads):
        for name, value in values.items():
            if value.size:
                moved = _mean(round_trip(name, value) - value, axes[name])
                total, count = found.get(name, (np.zeros(1), 0))
                if not count or total.shape == moved.shape:
                    found[name] = (total + moved, count + 1)
    return {name: total / count for name, (total, count) in found.items()}


def full_range(channels: Channels) -> Range:
    """From the smallest to the largest value that was seen."""
    return Range(min(0.0, float(channels.low.min())), max(0.0, float(channels.high.max())))


def choose(method: str, span: Range, counts: Array, symmetric: bool, percentile: float) -> Range:
    """The range to round in.

    Args:
        method: `mse`: the ends with the least mean squared error of rounding and clipping together; `percentile`: so many percent of
            all values lie between; `entropy`: the ends whose rounded distribution diverges least from the true one (Kullback-Leibler,
            as in TensorRT's calibrator); `minmax`: all that was seen.
        span: What `counts` covers.
        symmetric: The range will be widened to the same size on both sides of 0.
    """
    if method == "minmax" or not counts.sum() or span.high <= span.low:
        return span
    centres = span.low + (np.arange(BINS) + 0.5) * ((span.high - span.low) / BINS)
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
    high = float(centres[min(BINS - 1, np.searchsorted(covered, 1 - outside))])
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
    found = limit * best / _ENTROPY_BINS
    return Range(max(span.low, -found), min(span.high, found))


def _run(model: Path, tensors: Sequence[str], batches: Iterable[Batch], threads: int) -> Iterable[dict[str, Any]]:
    """The tensors of each batch, of which those that are no float are left out."""
    import onnx
    import onnxruntime

    from compile_stage.precision.onnx_graph import write_graph

    proto = onnx.load(model)
    inputs = {value.name for value in proto.graph.input}
    wanted = [name for name in tensors if name not in inputs]
    if not wanted:
        yield from ({name: batch[name] for name in tensors if batch[name].dtype == np.float32} for batch in batches)
        return
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    path = write_graph(proto, model.parent / "observed")
    del proto
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    fed = {value.name for value in session.get_inputs()}
    for batch in batches:
        answers = session.run(wanted, {name: array for name, array in batch.items() if name in fed})
        values = dict(zip(wanted, answers, strict=True)) | {name: batch[name] for name in tensors if name in inputs}
        yield {name: value for name, value in values.items() if value.dtype == np.float32}


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
