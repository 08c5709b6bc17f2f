"""Metrics of outputs that are vectors to be compared with each other: are the same samples near each other.

Nearness is the cosine between the vectors of two samples. The samples are their own set of pairs, so no labels are
needed: the order of the baseline's similarities is what the candidate's is held against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.measure.elementwise import F64, Measured, NotMeasurableError

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

SIMILARITY_METRICS = ("similarity_spearman", "nearest_kept")

MOST = 1000
"""Samples that are compared with each other, spread evenly: 499,500 pairs, in float64 8 MB for each model."""

_DEFAULT_K = 10  # the usual page of a search
_LEAST = 4  # samples; of three, the order of three pairs says nothing


def measure_similarity(metric: str, a: Array, b: Array, options: JsonMap) -> Measured:
    """One of SIMILARITY_METRICS, of candidate `a` against baseline `b`, both `[samples, ...]`.

    Raises:
        NotMeasurableError: There are too few samples, vectors of one number, or all similarities are the same.
    """
    if len(b) < _LEAST or b[0].size < 2:
        raise NotMeasurableError(f"{metric} compares vectors, of {_LEAST} samples or more")
    rows = np.unique(np.linspace(0, len(b) - 1, min(len(b), MOST)).astype(np.int64))
    own, expected = _cosines(a[rows]), _cosines(b[rows])
    if metric == "nearest_kept":
        k = int(options.get("k", _DEFAULT_K))
        return _nearest_kept(own, expected, min(k, (len(rows) - 1) // 2))
    upper = np.triu_indices(len(rows), k=1)
    return _spearman(own[upper], expected[upper])


def _cosines(vectors: Array) -> F64:
    flat: Any = vectors.reshape(len(vectors), -1).astype(np.float64)
    if not bool(np.isfinite(flat).all()):
        raise NotMeasurableError("a vector holds NaN or infinity, so nothing is near it")
    peaks = np.abs(flat).max(axis=1, keepdims=True)
    flat = flat / np.where(peaks > 0, peaks, 1)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = flat / np.where(norms > 0, norms, 1)
    cosines: F64 = flat @ flat.T
    return cosines


def _spearman(own: F64, expected: F64) -> Measured:
    """Pearson's correlation of the ranks; equal values share the mean of theirs."""
    from scipy.stats import rankdata

    if np.ptp(expected) == 0:
        raise NotMeasurableError("all samples are equally near each other")
    if np.ptp(own) == 0:
        return Measured(0.0, note="the candidate's samples are equally near each other")
    return Measured(float(np.corrcoef(rankdata(own), rankdata(expected))[0, 1]), note=f"{len(own)} pairs of samples")


def _nearest_kept(own: F64, expected: F64, k: int) -> Measured:
    """A tie at the k-th place is broken alike on both sides, so that equal models keep all."""
    for cosines in (own, expected):
        np.fill_diagonal(cosines, -np.inf)
    near = [np.argsort(-cosines, axis=1, kind="stable")[:, :k] for cosines in (own, expected)]
    kept = np.array([len(np.intersect1d(x, y)) / k for x, y in zip(*near, strict=True)])
    return Measured(float(kept.mean()), 1 - kept, note=f"the {k} nearest", parts=kept)
