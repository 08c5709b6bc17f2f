"""Intervals of metrics that are functions of means, where few samples may decide what the mean is.

Squared errors and log losses have no upper end: of labels with a long tail, three samples in a thousand may make up
half of what an artifact loses. Resamples then differ as little as the samples at hand do, and the bootstrap's (BCa)
upper end is too low: of artifacts that lose 5 % more than their limit, it passed 10 to 40 % instead of 5. Two things
hold it down:

- The bootstrap of Student's t (Hall, *Theoretical Comparison of Bootstrap Confidence Intervals*, Annals of Statistics
  16:927, 1988): each resample is compared with its own standard error, which is small where the samples that decide
  were not drawn.
- The tail that no sample shows: as many more samples as those at hand can't rule out (3 of n, at 0.95) may each be
  twice as bad as the worst one that was seen, as far as that one lies beyond where the worst of so many normal values
  would, by the middle half of the samples. So light tails add next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.proportions import share_interval
from compile_stage.measure.stats import F64, Interval, Statistic, resampled, resamples_of

FURTHEST = 10.0
"""An end is at most so many standard errors away. Where two or three samples make up the whole loss, resamples without
them have no error to compare with, and t would be anything."""

BEYOND_WORST = 2.0
"""How much worse than the worst sample those are on average that lie beyond it: a / (a - 1) of a tail that falls with
the power a, taken for a = 2. With a heavier one a mean has no variance, and no interval is right."""

_LEAST_ERROR = 1e-9  # of the error of the samples at hand: below it is rounding


@dataclass(frozen=True)
class Means:
    """A metric as a function of means over samples.

    Attributes:
        columns: `[n, k]`: what the means are taken of.
        of: `[resamples, k]` means → `[resamples]` values; NaN where these means do not define it.
        slopes: `[resamples, k]` means → `[resamples, k]`: how the value changes with each.
    """

    columns: F64
    of: Callable[[F64], F64]
    slopes: Callable[[F64], F64]

    def weighted(self, weights: F64) -> F64:
        """`[resamples, n]` weights → `[resamples]` values."""
        return self.of(weights @ self.columns / weights.sum(axis=1, keepdims=True))


def mean_of(parts: F64) -> Means:
    """The mean of `[n]` values."""
    return Means(parts[:, None], lambda means: means[:, 0], np.ones_like)


def compared_means(own: Means, base: Means, compared: Callable[[F64, F64], F64]) -> Means:
    """What a gate compares with its limit, of both models' metrics on the same samples.

    Args:
        compared: (candidate's values, baseline's values) → what the gate compares.
    """
    width = own.columns.shape[1]

    def of(means: F64) -> F64:
        return compared(own.of(means[:, :width]), base.of(means[:, width:]))

    def slopes(means: F64) -> F64:
        ours, theirs = own.of(means[:, :width]), base.of(means[:, width:])
        step = 1e-6 * np.maximum(np.abs(theirs), 1e-12)
        by_own = compared(ours + 1, theirs) - compared(ours, theirs)  # all that gates compare is linear in it
        by_ref = (compared(ours, theirs + step) - compared(ours, theirs - step)) / (2 * step)
        return np.hstack(
            [by_own[:, None] * own.slopes(means[:, :width]), by_ref[:, None] * base.slopes(means[:, width:])]
        )

    return Means(np.hstack([own.columns, base.columns]), of, slopes)


def means_interval(
    metric: Means,
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    groups: NDArray[np.int64] | None = None,
) -> Interval | None:
    """The interval of a function of means, the same for the same seed.

    Each end has half of what `confidence` leaves open, as the bootstrap's has.

    Args:
        groups: `[n]`, numbered from 0: samples of one group are drawn together. None: each is its own.

    Returns:
        None when the metric is undefined on the samples themselves or on more than one resample in ten, and for a
        single sample or group.
    """
    columns = metric.columns - metric.columns.mean(axis=0)  # so that large means cost no digits
    offset, count = metric.columns.mean(axis=0), len(metric.columns)
    groups = np.arange(count) if groups is None else groups
    number = int(groups.max()) + 1 if count else 0
    if number < 2:
        return None
    order = np.argsort(groups, kind="stable")
    columns, groups = columns[order], groups[order]
    first = np.flatnonzero(np.diff(groups, prepend=-1))

    def of(weights: F64) -> tuple[F64, F64, F64]:
        """Values, their standard errors, and `[resamples, groups]` what each group adds."""
        total = weights.sum(axis=1, keepdims=True)
        means = weights @ columns / total
        slopes = metric.slopes(means + offset)
        each = slopes @ columns.T - (slopes * means).sum(axis=1, keepdims=True)
        each = np.add.reduceat(each, first, axis=1)
        drawn = weights[:, first]
        error = np.sqrt((drawn * each**2).sum(axis=1) * number / (number - 1)) / total[:, 0]
        return metric.of(means + offset), error, each

    with np.errstate(all="ignore"):
        (value,), (error,), (each,) = of(np.ones((1, count)))
        blocks = resamples_of(groups, number, resamples, seed, width=columns.shape[1])
        drawn = [of(weights)[:2] for weights in blocks]
        values, errors = (np.concatenate(part) for part in zip(*drawn, strict=True))
    known = ~np.isnan(values)
    if np.isnan(value) or np.count_nonzero(known) < 0.9 * resamples:
        return None
    if not error > 0:
        return Interval(value=float(value), low=float(value), high=float(value), confidence=confidence)
    off, errors = values[known] - value, errors[known]
    t = off / np.maximum(errors, _LEAST_ERROR * error)
    tails = np.quantile(t, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
    high, low = value - np.clip(tails, -FURTHEST, FURTHEST) * error
    more = BEYOND_WORST * share_interval(0, number, confidence).high * number
    ends = []
    for worst in (int(each.argmin()), int(each.argmax())):
        weights = np.where(groups == worst, 1 + more * _beyond_normal(each, worst), 1.0)[None, :]
        ends.append(float(of(weights)[0][0] - value))
    low, high = low + min(np.nan_to_num(ends[0]), 0.0), high + max(np.nan_to_num(ends[1]), 0.0)
    return Interval(value=float(value), low=float(min(low, value)), high=float(max(high, value)), confidence=confidence)


def interval_of_any(
    statistic: Statistic,
    count: int,
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    groups: NDArray[np.int64] | None = None,
) -> Interval | None:
    """`stats.bootstrap`, as far out as the tails of what is not known as a function of means ask for.

    What each sample does to the value is taken from the jackknife: pseudo-values (Tukey; Efron and Tibshirani, *An
    Introduction to the Bootstrap*, 1993, chapter 11), whose mean has the interval of any mean. Where they say more than
    the resamples do of how sure the value is, as of a median, which the jackknife does not suit, they are scaled down.
    """
    found = resampled(statistic, count, seed=seed, resamples=resamples, groups=groups)
    if found is None:
        return None
    interval, left_out = found.interval(confidence), found.left_out[~np.isnan(found.left_out)]
    if len(left_out) < 2:
        return interval
    parts = (len(left_out) - 1) * (left_out.mean() - left_out)
    error = float(parts.std(ddof=1)) / math.sqrt(len(parts))
    parts *= min(1.0, float(found.draws.std()) / error) if error > 0 else 1.0
    tails = means_interval(mean_of(parts), seed=seed, confidence=confidence)
    if tails is None:  # some value is infinite
        return interval
    low, high = (found.value + end - tails.value for end in (tails.low, tails.high))
    return replace(interval, low=min(interval.low, low), high=max(interval.high, high))


def _beyond_normal(values: F64, worst: int) -> float:
    """The share of one of `[n]` values that lies beyond where the largest of n normal ones would, whose middle half is
    as wide; 1 where the middle half has no width."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    normal = NormalDist()
    usual = (high - low) / (2 * normal.inv_cdf(0.75)) * normal.inv_cdf(1 - 0.5 / len(values))
    off = abs(float(values[worst]))
    return float(np.clip((abs(float(values[worst] - middle)) - usual) / off, 0.0, 1.0)) if off > 0 else 0.0
