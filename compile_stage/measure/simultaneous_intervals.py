"""Intervals that hold for all candidates of one measurement at once.

The winner is the best of several candidates, and a gate is passed by a target when one of them passes. Of twelve 95 %
intervals one is wrong every other time, and the best candidate is the one that is most likely to be it: its interval is
short since its starts happened to agree, and its figure is high since they happened to be fast.

How much processes differ is seen of all candidates together better than of the few starts of one. So an interval
reaches at least as far as that common measure says, at the confidence that makes all of them hold at once (Sidak,
Journal of the American Statistical Association 62:626, 1967).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from compile_stage.measure.speedups import ASSUMED_SPREAD
from compile_stage.measure.stats import Interval, student_t


def common_reach(variances: Sequence[float], starts: int, confidence: float = 0.95) -> float:
    """How far the logarithm of each candidate's speedup may lie from the truth, so that all hold at once.

    The mean variance is known with the degrees of freedom of `f k / (1 + (k - 1) / 4)`, for k candidates and the f of
    one: all share the original's processes, which are half of what differs, so the quotients of two candidates
    correlate with 1/2 and their variances with 1/4. For 3 starts that is 3.2 for two candidates, and never above 8.

    Args:
        variances: Of each candidate's log speedup over its starts (`speedups.variance_over_starts`). One that others'
            work hit counts with what is assumed where nothing is known, so that it does not widen all others.
        starts: Of each candidate.

    Returns:
        0 for a single candidate, whose own interval says it.
    """
    count = len(variances)
    if count < 2:
        return 0.0
    most = 2 * ASSUMED_SPREAD.log_sd**2 / starts
    mean = sum(min(variance, most) for variance in variances) / count
    freedom = (starts - 1) * count / (1 + (count - 1) / 4)
    return student_t(freedom, confidence ** (1 / count)) * math.sqrt(mean)


def widened(interval: Interval, reach: float) -> Interval:
    """The interval of a ratio that reaches at least so far to both sides, on the logarithm."""
    return Interval(
        value=interval.value,
        low=min(interval.low, interval.value * math.exp(-reach)),
        high=max(interval.high, interval.value * math.exp(reach)),
        confidence=interval.confidence,
    )
