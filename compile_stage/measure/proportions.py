"""Intervals of shares of samples, also where errors are rare.

A bootstrap can't see what it has no example of: with no changed prediction among 32 its interval has no width. These
intervals come from the distribution of the counts instead, and 0 of 32 has the width that 32 samples leave.

A limit has one side, so `confidence` is that of each end by itself: the true value lies beyond it with a probability of
1 - confidence. Both ends together hold it less often (0.9 for 0.95).

Counts may be fractions: samples in groups (one patient, one video) tell less than as many independent ones, and are
counted as the number of independent samples that tell as much (`effective_share`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.stats import F64, Interval

FEW_CHANGES = 10
"""Below so many groups with a changed answer, how alike the answers within a group are can't be estimated."""

MOST_SAMPLES = 100_000_000
"""More samples than this are called unreachable."""

_STEPS = 50  # halvings of an interval of length 2: 1e-15
_NORMAL = NormalDist()


def drop_interval(lost: float, gained: float, count: float, confidence: float = 0.95) -> Interval:
    """How much smaller a share of right answers has become, of two models on the same samples.

    The score interval of a paired difference (Tango, Statistics in Medicine 17:891, 1998). It is defined for no change
    at all, where it reaches from -z^2 / (n + z^2) to z^2 / (n + z^2). Where all changes go one way their number is
    binomial, and the end on that side is at least Clopper and Pearson's, which is exact.

    Args:
        lost: Samples that only the baseline answers rightly.
        gained: Samples that only the candidate answers rightly.
        count: All samples, above 0.
        confidence: Of each end.

    Returns:
        The drop: (lost - gained) / count, from -1 to 1.
    """
    high = _largest_drop(lost, gained, count, confidence)
    low = -_largest_drop(gained, lost, count, confidence)
    return Interval(value=(lost - gained) / count, low=low, high=high, confidence=confidence)


def _largest_drop(lost: float, gained: float, count: float, confidence: float) -> float:
    tail = _NORMAL.inv_cdf(confidence)
    high = _root(lambda drop: _score(drop, lost, gained, count) + tail, (lost - gained) / count, 1.0)
    return max(high, share_interval(lost, count, confidence).high) if gained == 0 else high


def _score(drop: float, lost: float, gained: float, count: float) -> float:
    """Tango's statistic: standard normal where the true drop is `drop`. Falls with it."""
    linear = (2 * count - lost + gained) * drop - lost - gained
    constant = -gained * drop * (1 - drop)
    rate = (math.sqrt(max(linear**2 - 8 * count * constant, 0.0)) - linear) / (4 * count)
    variance = count * (2 * rate + drop * (1 - drop))
    distance = lost - gained - count * drop
    if variance > 0:
        return distance / math.sqrt(variance)
    return math.copysign(math.inf, distance) if abs(distance) > 1e-9 * count else 0.0


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function passes 0."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


def share_interval(hits: float, count: float, confidence: float = 0.95) -> Interval:
    """Of one share: Clopper and Pearson's (Biometrika 26:404, 1934), exact for independent samples.

    Also too wide rather than too narrow for the mean of values between 0 and 1, whose variance is never above that of
    a share with the same mean.
    """
    from scipy.special import betaincinv

    tail = 1 - confidence
    low = float(betaincinv(hits, count - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, count - hits, 1 - tail)) if hits < count else 1.0
    return Interval(value=hits / count, low=low, high=high, confidence=confidence)


def relative_drop_interval(drop: Interval, baseline: Interval) -> Interval:
    """A drop as a share of the baseline's own share. Both are uncertain, and the worse end of each counts."""
    value = drop.value / baseline.value
    ends = []
    for end, (widening, narrowing) in (
        (drop.low, (baseline.high, baseline.low)),
        (drop.high, (baseline.low, baseline.high)),
    ):
        divisor = widening if end > 0 else narrowing
        ends.append(end / divisor if divisor > 0 else math.copysign(math.inf, end))
    return Interval(value=value, low=min(ends[0], value), high=max(ends[1], value), confidence=drop.confidence)


def samples_needed_for(limit: float, confidence: float = 0.95, *, lost: float = 0.0, gained: float = 0.0) -> int | None:
    """The smallest number of samples that shows a drop of at most `limit`; None when none does.

    Args:
        lost, gained: Shares of the samples that change for the worse and for the better. With none: the least number
            that can show the limit at all.
    """

    def shows(count: int) -> bool:
        return drop_interval(lost * count, gained * count, count, confidence).high <= limit

    if not shows(MOST_SAMPLES):
        return None
    low, high = 0, 1
    while not shows(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high


def effective_share(values: F64, groups: NDArray[np.int64] | None, confidence: float = 0.95) -> float:
    """By what the number of samples is to be multiplied to count independent ones: 1 without groups.

    One over the design effect of a mean (Kish, Survey Sampling, 1965): its variance by groups over that by samples, and
    never below 1; wider by Student's t, since the variance comes from as many terms as there are groups. Where values
    differ in fewer than 10 groups it can't be estimated, and the samples of a group are taken as equal.

    Of groups of unlike sizes the few largest make up most of that variance, and it is far too small where the values
    happen not to differ in these. So it is at least what the sizes and the correlation within groups say, to which all
    groups bring their part: 1 + correlation * (sum of sizes^2 / n - 1) (Gabler, Haeder and Lahiri, Survey Methodology
    25:105, 1999), the correlation being that of the analysis of variance.

    Args:
        values: `[n]`: a sample's difference, or its share.
        groups: `[n]`, numbered from 0; None where samples are independent.
    """
    if groups is None:
        return 1.0
    from scipy.special import stdtrit

    sizes = np.bincount(groups)
    count, number = len(values), len(sizes)
    odd = values != np.median(values)
    if number < 2 or len(np.unique(groups[odd])) < FEW_CHANGES:
        return count / float(np.sum(sizes**2))
    off = values - values.mean()
    by_groups = float(np.sum(np.bincount(groups, weights=off) ** 2)) * number / (number - 1)
    by_samples = float(np.sum(off**2)) * count / (count - 1)
    within = off - (np.bincount(groups, weights=off) / sizes)[groups]
    alike = 1 - float(np.sum(within**2)) / max(count - number, 1) / (by_samples / count)
    by_sizes = 1 + alike * (float(np.sum(sizes**2)) / count - 1)
    wider = float(stdtrit(number - 1, confidence)) / _NORMAL.inv_cdf(confidence)
    return 1 / (max(by_groups / by_samples, by_sizes, 1.0) * wider**2)
