"""Expected calibration error: how far a classifier's confidence is from how often it is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.task_intervals import Score, far_apart

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap

BINS = 15
"""Guo et al., On Calibration of Modern Neural Networks (ICML 2017)."""


def ece(codes: NDArray[np.int64], logs: F64, options: JsonMap) -> Score:
    """The sum over bins of the confidence, of equal width, of |right answers - confidences| / samples.

    Args:
        codes: `[n]`, the class number of each label.
        logs: `[n, classes]` log-probabilities. The confidence is the largest probability.

    The bins are those of scikit-learn's `calibration_curve`: (low, high], the first one with its low end.
    """
    from sklearn.calibration import calibration_curve

    bins = int(options.get("bins", BINS))
    if bins < 2:
        raise NotMeasurableError("ece needs at least 2 bins")
    confidence = np.clip(np.exp(logs.max(axis=1)), 0.0, 1.0)
    right = (logs.argmax(axis=1) == codes).astype(np.float64)
    number = np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], confidence)
    share_right, mean_confidence = calibration_curve(right, confidence, n_bins=bins)
    sizes = np.bincount(number, minlength=bins)
    value = float(np.abs(share_right - mean_confidence) @ sizes[sizes > 0]) / len(codes)
    off = np.zeros((len(codes), bins))
    off[np.arange(len(codes)), number] = right - confidence

    def of(weights: F64) -> F64:
        return np.asarray(np.abs(weights @ off).sum(axis=1) / weights.sum(axis=1))

    # One ruined answer takes up to 1 / n out of one bin, and puts as much into another.
    answers = np.stack([confidence, right], axis=1)
    return Score(value, of, None, answers, 2 / len(codes), far_apart(answers))
