"""Statistics of any samples: median, Student's t, how many samples a percentile needs, bootstrap intervals.

A *statistic* is a function of weights: given an array `[resamples, n]` that says how often each of the n observations
was drawn, it answers `[resamples]` values. Written so, thousands of resamples are one matrix product, and a paired
difference is paired by construction, since both sides see the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.records import record

F64: TypeAlias = NDArray[np.float64]
Statistic: TypeAlias = Callable[[F64], F64]

_BLOCK = 1 << 21  # weights held at once (16 MB)
_NORMAL = NormalDist()


@record
class Interval:
    """A value with the interval that holds the true one at that confidence."""

    value: float
    low: float
    high: float
    confidence: float


def median(samples: Sequence[float]) -> float:
    """The middle value. Raises ValueError for no samples."""
    if len(samples) == 0:
        raise ValueError("the median of nothing")
    return float(np.median(np.asarray(samples, dtype=np.float64)))


def student_t(freedom: float, confidence: float) -> float:
    """Student's t of a two-sided interval; the normal's for infinite degrees of freedom."""
    from scipy.special import stdtrit

    tail = (1 + confidence) / 2
    return _NORMAL.inv_cdf(tail) if math.isinf(freedom) else float(stdtrit(freedom, tail))


def samples_needed(q: float, confidence: float = 0.95) -> int:
    """How many samples a percentile needs before its upper confidence bound is one of them.

    The largest of n samples lies above the true q-quantile with probability 1 - q^n (Wilks 1941), so n >= ln(1 -
    confidence) / ln(q): 5 for the median, 29 for p90, 59 for p95, 299 for p99, 2,995 for p99.9.
    """
    if not 0 < q < 1:
        raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
    return math.ceil(math.log(1 - confidence) / math.log(q))


# ------------------------------------------------------------------------------------------------------------ bootstrap


def bootstrap(
    statistic: Statistic,
    count: int,
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    groups: NDArray[np.int64] | None = None,
) -> Interval | None:
    """Bias-corrected and accelerated (BCa) bootstrap interval (Efron 1987), the same for the same seed.

    Args:
        statistic: `[resamples, count]` weights → `[resamples]` values; NaN where the resample does not define it.
        count: Number of observations.
        groups: `[count]`, numbered from 0: observations of one group are drawn together. None: each is its own.

    Returns:
        None when the statistic is undefined on the sample itself or on more than one resample in ten, and for a single
        observation or group: it says nothing of how the next would differ.
    """
    found = resampled(statistic, count, seed=seed, resamples=resamples, groups=groups)
    return None if found is None else found.interval(confidence)


@record
class Resampled:
    """A statistic of the observations at hand, and of others that might have been.

    Attributes:
        draws: Of the resamples that define it.
        left_out: Of the observations without a part of them, for each part; empty where all draws are the value.
    """

    value: float
    draws: F64
    left_out: F64

    def interval(self, confidence: float) -> Interval:
        """The BCa interval."""
        value, draws = self.value, self.draws
        if not len(self.left_out):
            return Interval(value=value, low=value, high=value, confidence=confidence)
        # A share of 0 or 1 would put the correction at infinity; the most extreme that so many resamples can tell is
        # half a draw.
        below = (np.sum(draws < value) + 0.5 * np.sum(draws == value)) / len(draws)
        bias = _NORMAL.inv_cdf(float(np.clip(below, 0.5 / len(draws), 1 - 0.5 / len(draws))))
        acceleration = self._acceleration()
        tail = _NORMAL.inv_cdf((1 + confidence) / 2)
        low, high = (
            float(np.quantile(draws, _NORMAL.cdf(bias + (bias + z) / max(1 - acceleration * (bias + z), 1e-6))))
            for z in (-tail, tail)
        )
        return Interval(value=value, low=low, high=high, confidence=confidence)

    def _acceleration(self) -> float:
        left_out = self.left_out
        spread = np.nanmean(left_out) - left_out if not np.all(np.isnan(left_out)) else np.zeros(1)
        scale = float(np.nansum(spread**2)) ** 1.5
        return float(np.nansum(spread**3)) / (6 * scale) if scale > 0 else 0.0


def resampled(
    statistic: Statistic, count: int, *, seed: int, resamples: int = 2000, groups: NDArray[np.int64] | None = None
) -> Resampled | None:
    """What `bootstrap` makes its interval of; arguments and None as there."""
    groups = np.arange(count) if groups is None else groups
    number = int(groups.max()) + 1 if count else 0
    if number < 2:
        return None
    value = float(statistic(np.ones((1, count)))[0])
    draws = np.concatenate([statistic(weights) for weights in resamples_of(groups, number, resamples, seed)])
    draws = draws[~np.isnan(draws)]
    if math.isnan(value) or len(draws) < 0.9 * resamples:
        return None
    alike = draws.min() == draws.max() == value
    left_out = np.zeros(0) if alike else _jackknife(statistic, groups, number)
    return Resampled(value=value, draws=draws, left_out=left_out)


def resamples_of(groups: NDArray[np.int64], number: int, resamples: int, seed: int, *, width: int = 0) -> Iterator[F64]:
    """Blocks of `[some, n]` weights, so many rows in all: how often each sample of `[n]` groups, numbered from 0, was
    drawn.

    Args:
        width: So many values are made of each row, where that is more than n: blocks are smaller then.
    """
    generator = np.random.default_rng(seed)
    step = max(1, _BLOCK // max(len(groups), width))
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = generator.integers(0, number, (rows, number)) + np.arange(rows)[:, None] * number
        weights = np.bincount(drawn.ravel(), minlength=rows * number).reshape(rows, number).astype(np.float64)
        yield weights if number == len(groups) else weights[:, groups]


def _jackknife(statistic: Statistic, groups: NDArray[np.int64], number: int) -> F64:
    """Observations are left out in at most 400 parts, which has the same limit and a bounded cost."""
    parts = groups * min(number, 400) // number
    values = []
    step = max(1, _BLOCK // len(groups))
    for start in range(0, min(number, 400), step):
        left_out = np.arange(start, min(start + step, number, 400))
        values.append(statistic((parts[None, :] != left_out[:, None]).astype(np.float64)))
    return np.concatenate(values)
