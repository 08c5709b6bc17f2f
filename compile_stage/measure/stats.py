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

FEW_ROUNDS = 12
"""Below so many rounds the bootstrap's intervals are too short (simulated: 85 % at 4 rounds, 92 % at 8, instead of 95
%), so Student's t is used there."""

_TRIM = 0.2  # Wilcox's default: robust to a disturbed round in five, smooth enough to be bootstrapped
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
        None when the statistic is undefined on the sample itself or on more than one resample in ten, and for a single observation: it says
        nothing of how the next would differ.
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
    """How many times faster the candidate is: baseline latency / candidate latency, from interleaved rounds.

    Each round gives one ratio, that of the two medians within it: what slows the machine in a round slows both, and
    cancels. The value is the trimmed geometric mean (20 % at each end) of the rounds' ratios. Rounds are what is
    resampled, not calls, since the calls of one round share the machine's mood.

    Args:
        baseline_rounds: Seconds per call, one list for each round.
        candidate_rounds: The same; round i was run next to the baseline's round i.

    Returns:
        With a single round the interval is (0, inf): one round says nothing of the next.

    Raises:
        ValueError: there is no round, or one without a call.
    """
    logs = np.array(
        [
            math.log(median(base)) - math.log(median(own))
            # The last round may have been cut short.
            for base, own in zip(baseline_rounds, candidate_rounds, strict=False)
        ]
    )
    if len(logs) == 0:
        raise ValueError("a ratio needs at least one round")
    if len(logs) < FEW_ROUNDS:
        return _student(logs, confidence)
    found = bootstrap(_trimmed_mean(logs), len(logs), seed=seed, confidence=confidence, resamples=1000)
    if found is None:
        raise ValueError("a latency is not a number")
    return Interval(
        value=math.exp(found.value), low=math.exp(found.low), high=math.exp(found.high), confidence=confidence
    )


def _student(logs: F64, confidence: float) -> Interval:
    centre = float(logs.mean())
    if len(logs) == 1:
        return Interval(value=math.exp(centre), low=0.0, high=math.inf, confidence=confidence)
    from scipy.special import stdtrit

    half = float(stdtrit(len(logs) - 1, (1 + confidence) / 2)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    # With two rounds the half width may pass what exp can hold.
    high = math.exp(centre + half) if centre + half < 700 else math.inf
    return Interval(value=math.exp(centre), low=math.exp(centre - half), high=high, confidence=confidence)


def _trimmed_mean(values: F64) -> Statistic:
    order = np.argsort(values, kind="stable")
    ordered = values[order]

    def statistic(weights: F64) -> F64:
        heights = np.cumsum(weights[:, order], axis=1)
        total = heights[:, -1:]
        inner = np.clip(heights, _TRIM * total, (1 - _TRIM) * total)
        kept = np.diff(inner, axis=1, prepend=_TRIM * total)
        means: F64 = kept @ ordered / ((1 - 2 * _TRIM) * total[:, 0])
        return means

    return statistic


def tied(a: Timing, b: Timing) -> bool:
    """True when the two candidates' speeds can't be told apart: the interval of their own ratio, round by round, holds
    1, or they differ by less than a ratio is resolved to. Timings that were not taken in the same rounds are not
    tied."""
    if not a.turns or len(a.turns) != len(b.turns):
        return False
    ratio = ratio_interval(by_round(a), by_round(b), seed=0)
    return ratio.low <= 1 <= ratio.high or abs(math.log(ratio.value)) <= math.log1p(RESOLUTION)


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
