"""Intervals and percentiles that claim no more than their samples carry.

A *statistic* is a function of weights: given an array `[resamples, n]` that says how often each of the n observations
was drawn, it answers `[resamples]` values. Written so, thousands of resamples are one matrix product, and a paired
difference is paired by construction, since both sides see the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.records import Timing, record

F64: TypeAlias = NDArray[np.float64]
Statistic: TypeAlias = Callable[[F64], F64]

RESOLUTION = 0.02
"""A ratio of two latencies is resolved to ±2 %: closer than that, nothing is claimed."""

UNSTABLE = 0.10
"""A ratio whose interval's half width is more than 10 % of it is unstable: it is shown as a range, without a figure."""

FEW_ROUNDS = 6
"""Below so many rounds the resampled medians lie between the extremes of the rounds, which is too short an interval (2
rounds hold the median between them every other time), so Student's t is used there, with the bootstrap's error."""

_RESAMPLES = 1000
_GRID = 256  # a resample's median is exact to 0.2 % of the calls
_BLOCK = 1 << 21  # weights held at once (16 MB)
_NORMAL = NormalDist()


@record
class Interval:
    """A value with the interval that holds the true one at that confidence."""

    value: float
    low: float
    high: float
    confidence: float


# ------------------------------------------------------------------------------------------------------------- bootstrap


def bootstrap(
    statistic: Statistic, count: int, *, seed: int, confidence: float = 0.95, resamples: int = 2000
) -> Interval | None:
    """Bias-corrected and accelerated (BCa) bootstrap interval (Efron 1987), the same for the same seed.

    Args:
        statistic: `[resamples, count]` weights → `[resamples]` values; NaN where the resample does not define it.
        count: Number of observations.

    Returns:
        None when the statistic is undefined on the sample itself or on more than one resample in ten, and for a single
        observation: it says nothing of how the next would differ.
    """
    if count < 2:
        return None
    value = float(statistic(np.ones((1, count)))[0])
    draws = np.concatenate([statistic(weights) for weights in _resamples(count, resamples, seed)])
    draws = draws[~np.isnan(draws)]
    if math.isnan(value) or len(draws) < 0.9 * resamples:
        return None
    if draws.min() == draws.max() == value:
        return Interval(value=value, low=value, high=value, confidence=confidence)
    # A share of 0 or 1 would put the correction at infinity; the most extreme that so many resamples can tell is half a
    # draw.
    below = (np.sum(draws < value) + 0.5 * np.sum(draws == value)) / len(draws)
    bias = _NORMAL.inv_cdf(float(np.clip(below, 0.5 / len(draws), 1 - 0.5 / len(draws))))
    acceleration = _acceleration(statistic, count)
    tail = _NORMAL.inv_cdf((1 + confidence) / 2)
    low, high = (
        float(np.quantile(draws, _NORMAL.cdf(bias + (bias + z) / max(1 - acceleration * (bias + z), 1e-6))))
        for z in (-tail, tail)
    )
    return Interval(value=value, low=low, high=high, confidence=confidence)


def _resamples(count: int, resamples: int, seed: int) -> Iterator[F64]:
    generator = np.random.default_rng(seed)
    step = max(1, _BLOCK // count)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = generator.integers(0, count, (rows, count)) + np.arange(rows)[:, None] * count
        yield np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).astype(np.float64)


def _acceleration(statistic: Statistic, count: int) -> float:
    """From the jackknife; observations are left out in at most 400 groups, which has the same limit and a bounded
    cost."""
    groups = np.arange(count) * min(count, 400) // count
    values = []
    step = max(1, _BLOCK // count)
    for start in range(0, int(groups[-1]) + 1, step):
        left_out = np.arange(start, min(start + step, int(groups[-1]) + 1))
        values.append(statistic((groups[None, :] != left_out[:, None]).astype(np.float64)))
    jackknife = np.concatenate(values)
    spread = np.nanmean(jackknife) - jackknife if not np.all(np.isnan(jackknife)) else np.zeros(1)
    scale = float(np.nansum(spread**2)) ** 1.5
    return float(np.nansum(spread**3)) / (6 * scale) if scale > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------------- ratios


def ratio_interval(
    baseline_rounds: Sequence[Sequence[float]],
    candidate_rounds: Sequence[Sequence[float]],
    *,
    seed: int,
    confidence: float = 0.95,
) -> Interval:
    """How many times faster the candidate is: the baseline's median latency / the candidate's, both over all calls.

    So the value is the quotient of the two medians that a report shows. The interval is the bootstrap's, of exactly
    that quotient. Rounds are resampled, and a round brings the calls of both: the calls of one round share the state of
    the machine, and what slows a whole round slows both.

    Args:
        baseline_rounds: Seconds per call, one list for each round.
        candidate_rounds: The same; round i was run next to the baseline's round i.

    Returns:
        With a single round the interval is (0, inf): one round says nothing of the next.

    Raises:
        ValueError: there is no round, or one without a call, or a latency that is not a number above 0.
    """
    count = min(len(baseline_rounds), len(candidate_rounds))  # the last round may have been cut short
    if count == 0:
        raise ValueError("a ratio needs at least one round")
    base, own = _PooledMedian(baseline_rounds[:count]), _PooledMedian(candidate_rounds[:count])
    value = base.value / own.value
    if count == 1:
        return Interval(value=value, low=0.0, high=math.inf, confidence=confidence)
    log_ratios, share = _resampled_log_ratios(base, own, count, seed), _expanded(confidence, count)
    if count < FEW_ROUNDS:
        low, high = _student(math.log(value), log_ratios, count, confidence)
    else:
        low, high = (float(np.quantile(log_ratios, tail)) for tail in ((1 - share) / 2, (1 + share) / 2))
    # Of few calls the resampled medians may all lie on one side of the median itself.
    return Interval(value=value, low=min(_exp(low), value), high=max(_exp(high), value), confidence=confidence)


def is_within(ratio: Interval, relative_half_width: float) -> bool:
    """True when the interval's half width is at most that share of the ratio."""
    return (ratio.high - ratio.low) / 2 <= relative_half_width * ratio.value


class _PooledMedian:
    """The median of all calls of some rounds, for many resamples of the rounds at once."""

    def __init__(self, rounds: Sequence[Sequence[float]]) -> None:
        arrays = [np.sort(np.asarray(calls, dtype=np.float64)) for calls in rounds]
        pooled = np.sort(np.concatenate(arrays))
        if any(len(calls) == 0 for calls in arrays) or not np.all(np.isfinite(pooled)) or pooled[0] <= 0:
            raise ValueError("a ratio needs rounds with calls, and latencies that are numbers above 0")
        self.value = float(np.median(pooled))
        # A resample's median is looked up among so many of the calls, evenly spaced in rank.
        ranks = np.unique(np.linspace(0, len(pooled) - 1, min(_GRID, len(pooled))).round().astype(np.intp))
        self._grid = pooled[ranks]
        self._at_most = np.array([np.searchsorted(calls, self._grid, side="right") for calls in arrays], dtype=float)
        self._calls = np.array([len(calls) for calls in arrays], dtype=float)

    def of(self, weights: F64) -> F64:
        """`[resamples, rounds]` weights → `[resamples]` medians."""
        twice, total = 2 * (weights @ self._at_most), (weights @ self._calls)[:, None]
        lower, upper = np.argmax(twice >= total, axis=1), np.argmax(twice > total, axis=1)
        medians: F64 = (self._grid[lower] + self._grid[upper]) / 2
        return medians


def _resampled_log_ratios(base: _PooledMedian, own: _PooledMedian, count: int, seed: int) -> F64:
    from scipy.stats import bootstrap as scipy_bootstrap

    def log_ratio(rounds: NDArray[np.intp], axis: int = -1) -> F64:
        drawn = np.atleast_2d(np.moveaxis(rounds, axis, -1))
        offsets = np.arange(len(drawn))[:, None] * count
        weights = np.bincount((drawn + offsets).ravel(), minlength=len(drawn) * count).reshape(-1, count).astype(float)
        ratios: F64 = np.log(base.of(weights) / own.of(weights))
        return ratios if np.ndim(rounds) > 1 else ratios[0]

    resampled = scipy_bootstrap(
        (np.arange(count),), log_ratio, vectorized=True, n_resamples=_RESAMPLES, method="percentile", rng=seed
    )
    draws: F64 = resampled.bootstrap_distribution
    return draws


def _expanded(confidence: float, count: int) -> float:
    """The bootstrap's percentile interval is too short by a factor of about sqrt((n - 1) / n), and normal where
    Student's t is due. Hesterberg's expanded interval (The American Statistician 69:4, 2015) takes percentiles further
    out."""
    from scipy.special import stdtrit

    wanted = float(stdtrit(count - 1, (1 + confidence) / 2)) * math.sqrt(count / (count - 1))
    return 2 * _NORMAL.cdf(wanted) - 1


def _student(centre: float, draws: F64, count: int, confidence: float) -> tuple[float, float]:
    from scipy.special import stdtrit

    error = float(draws.std(ddof=1)) * math.sqrt(count / (count - 1))
    half = float(stdtrit(count - 1, (1 + confidence) / 2)) * error
    return centre - half, centre + half


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf  # with two rounds the half width may pass what exp can hold


def tied(a: Timing, b: Timing) -> bool:
    """True when the speeds of two candidates can't be told apart: the interval of the quotient of their own medians,
    from the same rounds, holds 1, or the medians differ by less than a ratio is resolved to. Timings that were not
    taken in the same rounds are not tied."""
    if not a.turns or len(a.turns) != len(b.turns):
        return False
    if abs(math.log(median(a.latency_s) / median(b.latency_s))) <= math.log1p(RESOLUTION):
        return True
    rounds_a, rounds_b = by_round(a), by_round(b)
    medians_a, medians_b = [median(calls) for calls in rounds_a], [median(calls) for calls in rounds_b]
    # The median of pooled rounds lies between theirs, so no resample of rounds that don't overlap has a quotient of 1.
    if max(medians_a) < min(medians_b) or max(medians_b) < min(medians_a):
        return False
    ratio = ratio_interval(rounds_a, rounds_b, seed=0)
    return ratio.low <= 1 <= ratio.high


def is_resolved(timing: Timing) -> bool:
    """True when the timing's speedup is known to ±2 %: more measuring would not change what a limit says of it."""
    if timing.speedup is None or timing.speedup_interval is None:
        return True
    low, high = timing.speedup_interval
    return is_within(Interval(value=timing.speedup, low=low, high=high, confidence=0.95), RESOLUTION)


def by_round(timing: Timing) -> list[tuple[float, ...]]:
    """A timing's latencies, one group for each round."""
    ends = list(accumulate(timing.turns))
    return [timing.latency_s[end - calls : end] for end, calls in zip(ends, timing.turns, strict=True)]


# ----------------------------------------------------------------------------------------------------------- percentiles


def median(samples: Sequence[float]) -> float:
    """The middle value. Raises ValueError for no samples."""
    if len(samples) == 0:
        raise ValueError("the median of nothing")
    return float(np.median(np.asarray(samples, dtype=np.float64)))


def samples_needed(q: float, confidence: float = 0.95) -> int:
    """How many samples a percentile needs before its upper confidence bound is one of them.

    The largest of n samples lies above the true q-quantile with probability 1 - q^n (Wilks 1941), so n >= ln(1 -
    confidence) / ln(q): 5 for the median, 29 for p90, 59 for p95, 299 for p99, 2,995 for p99.9.
    """
    if not 0 < q < 1:
        raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
    return math.ceil(math.log(1 - confidence) / math.log(q))


def percentile(samples: Sequence[float], q: float) -> float | None:
    """The q-quantile (`q=0.95` for p95), or None when so few samples can't carry it: see `samples_needed`."""
    if len(samples) < samples_needed(q):
        return None
    return float(np.quantile(np.asarray(samples, dtype=np.float64), q))
