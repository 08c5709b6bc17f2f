"""Percentiles of latencies with the bounds that their calls leave.

The bounds of a quantile are order statistics (David and Nagaraja, *Order Statistics*, 2003, section 7.1): of n
independent calls the k-th smallest lies above the true q-quantile with the probability that at most k - 1 of them lie
below it, which is binomial, whatever the latencies' distribution.

Calls of one round share the machine's state, and so do neighbouring rounds. So they are counted as the number of
independent calls that tell as much. And calls of one process share what it was born with: the bounds reach as far as
the quantiles of the single processes differ, or as is assumed where these are too few to show it. What is asked for is
the quantile of all the processes that a model may be served by, and not of those that were started.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import NormalDist

import numpy as np

from compile_stage.core.records import Timing
from compile_stage.measure.speedups import ASSUMED_SPREAD, FEW_PROCESSES, by_round, longer_memory
from compile_stage.measure.stats import Interval, samples_needed, student_t

GATED = 0.95
"""The quantile that a policy may limit: p95_latency_ms."""

_LEAST_S = 1e-9
"""A time per token is a difference of two calls, and may come out as less than nothing."""


def rounds_of_calls(timing: Timing) -> Sequence[Sequence[float]]:
    """A timing's latencies, one group for each round; each its own where the rounds are not known."""
    return by_round(timing) or [(call,) for call in timing.latency_s]


def percentile(timing: Timing, q: float) -> float | None:
    """The q-quantile (`q=0.95` for p95) of a timing's calls, in seconds, or None where so few independent ones can't
    carry it: the rule of the gate on it. Of the median, which no round's mood moves far, all calls count. Above p95 it
    is None where p95 is: of the few calls that lie so far out it is not seen what they have in common."""
    return percentiles(timing, (q,))[0]


def percentiles(timing: Timing, wanted: Sequence[float]) -> list[float | None]:
    """`percentile` of each of `wanted`: what the calls of a round have in common is found once for a quantile."""
    calls = np.asarray(timing.latency_s, dtype=np.float64)
    rounds = rounds_of_calls(timing)

    @cache
    def carried(q: float) -> bool:
        if q > GATED and not carried(GATED):
            return False
        return (len(calls) if q <= 0.5 else int(effective_calls(rounds, q))) >= samples_needed(q)

    return [float(np.quantile(calls, q)) if carried(q) else None for q in wanted]


def quantile_interval(
    rounds: Sequence[Sequence[float]], q: float, confidence: float = 0.95, *, processes: Sequence[int] = ()
) -> Interval | None:
    """The q-quantile of all calls, and its bounds, each with that confidence by itself.

    Args:
        rounds: Seconds per call, one list for each round.
        processes: Of each round, which start of the process it belongs to; empty where that was not noted: the bounds
            are then those of this process.

    Returns:
        None where so few independent calls leave no upper bound: see `stats.samples_needed`.
    """
    from scipy.stats import binom

    number = int(effective_calls(rounds, q))
    if number < samples_needed(q, confidence):
        return None
    calls = np.sort(np.concatenate([np.asarray(turn, dtype=np.float64) for turn in rounds]))
    above, below = _rank_above(number, q, confidence), int(binom.ppf(1 - confidence, number, q))
    # The ranks among so many independent calls, laid over all calls.
    high = calls[math.ceil(above / number * len(calls)) - 1]
    low = calls[max(0, math.floor(below / number * len(calls)) - 1)]
    value = float(np.quantile(calls, q))
    interval = Interval(value=value, low=min(float(low), value), high=max(float(high), value), confidence=confidence)
    return _over_processes(interval, rounds, processes, q) if processes and value > 0 else interval


def _over_processes(
    interval: Interval, rounds: Sequence[Sequence[float]], processes: Sequence[int], q: float
) -> Interval:
    """The interval of a quantile that has room for what the processes of one model differ by.

    It is the quantile of the calls of all processes that there may be: above that of a typical one where q > 0.5, since
    most of its slowest calls come from slow processes. So how far they differ decides twice: where the middle of all
    processes lies, and how far beyond it the quantile does (`_beyond`). Of three processes and more, both are taken
    from the logarithms of their quantiles: Student's t, and the upper bound of their standard deviation by chi-squared,
    put together as a root of squares (MOVER: Zou and Donner, Statistics in Medicine 27:1693, 2008). Of fewer,
    `ASSUMED_SPREAD` comes to what the calls leave open.
    """
    calls: dict[int, list[float]] = {}
    for turn, process in zip(rounds, processes, strict=True):
        calls.setdefault(process, []).extend(turn)
    both = 2 * interval.confidence - 1  # each end by itself
    count, logs = len(calls), [_log_quantile(part, q) for part in calls.values()]
    sizes = [len(part) for part in calls.values()]
    independent = sum(sizes) ** 2 / sum(size**2 for size in sizes)  # as many of one size tell as much of all calls
    within = max(0.0, float(np.mean(logs)) - float(np.mean([_log_quantile(part, 0.5) for part in calls.values()])))
    if count < FEW_PROCESSES:
        born = ASSUMED_SPREAD.reach(both) / math.sqrt(independent)
        below, above = (
            math.hypot(math.log(max(end, _LEAST_S) / interval.value), born) for end in (interval.low, interval.high)
        )
        above += _beyond(within, ASSUMED_SPREAD.log_sd, q)
    else:
        spread = float(np.std(logs, ddof=1))
        below = student_t(count - 1, both) * spread / math.sqrt(independent)
        most = _largest_spread(spread, count - 1, interval.confidence)
        beyond = _beyond(within, spread, q)
        above = math.hypot(below, _beyond(within, most, q) - beyond)
        # The slowest of few processes is not as slow as the slowest of all: their calls have too low a quantile.
        above += max(0.0, float(np.mean(logs)) + beyond - math.log(interval.value))
    return replace(
        interval,
        low=min(interval.low, interval.value * math.exp(-below)),
        high=max(interval.high, interval.value * math.exp(above)),
    )


def _log_quantile(calls: Sequence[float], q: float) -> float:
    return math.log(max(float(np.quantile(calls, q)), _LEAST_S))


def _beyond(within: float, spread: float, q: float) -> float:
    """How much further out, on the logarithm, the quantile of all processes' calls lies than that of one.

    Args:
        within: From the median of one process's calls to their quantile.
        spread: Standard deviation of what processes differ by.
    """
    return math.hypot(within, NormalDist().inv_cdf(q) * spread) - within


def _largest_spread(spread: float, freedom: int, confidence: float) -> float:
    """The upper bound of a standard deviation of normal values that is known with those degrees of freedom."""
    from scipy.special import gammaincinv

    return spread * math.sqrt(freedom / (2 * float(gammaincinv(freedom / 2, 1 - confidence))))


def calls_wanted(q: float, confidence: float = 0.95) -> int:
    """Calls that put the upper bound of a quantile no further out than half of what lies beyond it: 234 for p95, whose
    bound is then at most p97.5.

    With the fewest calls that have a bound at all (59 for p95) it is the slowest call, so that an artifact well below
    its limit misses it by one disturbed call.
    """
    number = samples_needed(q, confidence)
    while _rank_above(number, q, confidence) / number > (1 + q) / 2:
        number += 1
    return number


def effective_calls(rounds: Sequence[Sequence[float]], q: float) -> float:
    """How many independent calls tell as much of the q-quantile as these.

    All calls, divided by what calls of one round have in common (Kish's design effect of the share of calls beyond the
    quantile) and, for neighbouring rounds, by (1 + r) / (1 - r), r being the autocorrelation of the rounds' shares.
    """
    sizes = np.array([len(turn) for turn in rounds], dtype=np.float64)
    total = float(sizes.sum())
    if len(rounds) < 2 or total == 0:
        return total
    calls = np.concatenate([np.asarray(turn, dtype=np.float64) for turn in rounds])
    beyond = (calls >= np.quantile(calls, q)).astype(np.float64)
    share = float(beyond.mean())
    if share == 1:
        return total
    owners = np.repeat(np.arange(len(rounds)), sizes.astype(np.int64))
    off = np.bincount(owners, weights=beyond - share, minlength=len(rounds))
    independent = share * (1 - share) * total
    effect = float(np.sum(off**2)) * len(rounds) / (len(rounds) - 1) / independent
    return total / max(1.0, effect * longer_memory(off / sizes))


def _rank_above(number: int, q: float, confidence: float) -> int:
    """The least k for which the k-th smallest of so many calls lies above the quantile with that confidence."""
    from scipy.stats import binom

    return int(binom.ppf(confidence, number, q)) + 1
