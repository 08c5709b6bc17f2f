"""Metrics of outputs that hold a score for each class: do both models rank, and distribute, alike.

The class axis is the last one, or the gate's option `axis` (1 for a segmentation's `[n, classes, height, width]`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import BLOCK, F64, Measured, NotMeasurableError, release

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

CLASS_METRICS = ("kl", "mean_kl", "top1_agreement", "topk_agreement", "top1_regret")

LOOKS_LIKE_SCORES = "top1_regret"
"""Shipped for every output, and left out where there is no axis of classes."""

SMALLEST = 1e-12
"""A probability below it counts as this, so that one rounded to zero costs 28 nats and not infinity."""

SUM_SLACK = 0.02
"""Rows of an 8-bit softmax sum to 1 within so much."""


def has_classes(output: Array, options: JsonMap) -> bool:
    """True when there are at least two classes to tell apart."""
    axis = int(options.get("axis", -1))
    return output.ndim >= 2 and axis % output.ndim != 0 and output.shape[axis] >= 2


def measure_classes(metric: str, a: Array, b: Array, options: JsonMap) -> Measured:
    """One of CLASS_METRICS, of candidate `a` against baseline `b`. Raises NotMeasurableError."""
    if not has_classes(b, options):
        raise NotMeasurableError(f"{metric} needs an axis of at least two classes, and the shape is {list(b.shape)}")
    if metric == "top1_agreement":
        return _share(a, b, options, 1)
    if metric == "top1_regret":
        return _regret(a, b, options)
    if metric == "topk_agreement":
        k, classes = int(options.get("k", 5)), b.shape[int(options.get("axis", -1))]
        if k >= classes:
            raise NotMeasurableError(f"the top {k} of {classes} classes are always the same ones")
        return _share(a, b, options, k)
    return _divergence(a, b, options, mean=metric == "mean_kl")


def _share(a: Array, b: Array, options: JsonMap, k: int) -> Measured:
    """Share of the baseline's k best classes that are among the candidate's k best. The first of equal scores is the
    better one."""
    shares = np.zeros(len(b))
    for rows, x, y in _scores(a, b, options):
        same = _common(_best(x, k), _best(y, k)) / k
        shares[rows] = same.reshape(rows.stop - rows.start, -1).mean(axis=1)
    return Measured(float(shares.mean()), 1 - shares, parts=shares)


def _regret(a: Array, b: Array, options: JsonMap) -> Measured:
    """What the candidate's best class scores less than the baseline's best, in the baseline's own scores, over how much
    the best is above the mean of its classes; both averaged over all positions.

    0 is the same choice or a tie, 1 a class picked at random. Near ties cost next to nothing: where the original is
    undecided, as a network with random weights is, noise changes the argmax and means nothing.
    """
    lost, ahead = np.zeros(len(b)), np.zeros(len(b))
    for rows, x, y in _scores(a, b, options, finite=False):
        y = y.astype(np.float64)
        usable = np.isfinite(y)
        low = np.where(usable, y, np.inf).min(axis=1, keepdims=True)
        high = np.where(usable, y, -np.inf).max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # a row without a finite score, which is left out below
            top = high + (high - low)  # +inf is the best, by as much as the others span; a masked class is a bad one
        y = np.where(usable, y, np.where(y == np.inf, top, low))
        best, choice = y.max(axis=1), np.argmax(np.where(np.isnan(x), -np.inf, x), axis=1)
        known = usable.any(axis=1)
        chosen = y[np.arange(len(y)), choice]
        with np.errstate(invalid="ignore"):
            gap, above = np.where(known, best - chosen, 0), np.where(known, best - y.mean(axis=1), 0)
        lost[rows] = gap.reshape(rows.stop - rows.start, -1).mean(axis=1)
        ahead[rows] = above.reshape(rows.stop - rows.start, -1).mean(axis=1)
    total = float(ahead.mean())
    return Measured(float(lost.mean()) / total if total > 0 else 0.0, lost)


def _best(scores: Array, k: int) -> NDArray[np.int64]:
    """`[positions, classes]` → `[positions, k]`."""
    if k == 1:
        return np.asarray(np.argmax(scores, axis=1))[:, None]
    order: NDArray[np.int64] = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :k]
    return order


def _common(x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = (x[:, :, None] == y[:, None, :]).any(axis=2).sum(axis=1)
    return counts


def _divergence(a: Array, b: Array, options: JsonMap, *, mean: bool) -> Measured:
    """KL(baseline || candidate) in nats, averaged over a sample's positions; the worst sample's unless `mean`."""
    logits = not all(is_distribution(y) for _, _, y in _scores(a, b, options))
    values = np.zeros(len(b))
    for rows, x, y in _scores(a, b, options):
        if not logits and not is_distribution(x):
            raise NotMeasurableError("the baseline's rows are probabilities, and the candidate's are not")
        p, q = log_probabilities(y, logits=logits), log_probabilities(x, logits=logits)
        # Gibbs: never below zero but for rounding
        nats = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0)
        values[rows] = nats.reshape(rows.stop - rows.start, -1).mean(axis=1)
    note = "softmax was taken of both" if logits else ""
    return Measured(float(values.mean()), values, note, values) if mean else Measured(float(values.max()), values, note)


def is_distribution(scores: Array) -> bool:
    """True when every row of `[positions, classes]` is made of probabilities."""
    values = scores.astype(np.float64)
    inside = bool(np.all((values >= -SUM_SLACK) & (values <= 1 + SUM_SLACK)))
    return inside and bool(np.all(np.abs(values.sum(axis=1) - 1) <= SUM_SLACK))


def log_probabilities(scores: Array, *, logits: bool) -> F64:
    """Of `[positions, classes]`; probabilities are clipped from below and made to sum to 1."""
    values = scores.astype(np.float64)
    values = values - values.max(axis=1, keepdims=True) if logits else np.log(np.clip(values, SMALLEST, None))
    logs: F64 = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return logs


def _scores(a: Array, b: Array, options: JsonMap, *, finite: bool = True) -> Iterator[tuple[slice, Array, Array]]:
    """(samples, candidate, baseline) in pieces, both as `[positions, classes]`.

    Args:
        finite: Raise NotMeasurableError for scores that are not.
    """
    axis = int(options.get("axis", -1))
    step = max(1, BLOCK // max(int(np.prod(b.shape[1:])), 1))
    for start in range(0, len(b), step):
        rows = slice(start, min(start + step, len(b)))
        x, y = (np.moveaxis(np.asarray(side[rows]), axis, -1).reshape(-1, b.shape[axis]) for side in (a, b))
        if finite and not (bool(np.isfinite(x).all()) and bool(np.isfinite(y).all())):
            raise NotMeasurableError("some scores are NaN or infinite, so classes have no order")
        yield rows, x, y
        release(a, b)
