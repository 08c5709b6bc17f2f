"""Percentiles of latencies with the bounds that their calls leave.

The bounds of a quantile are order statistics (David and Nagaraja, *Order Statistics*, 2003, section 7.1): of n
independent calls the k-th smallest lies above the true q-quantile with the probability that at most k - 1 of them lie
below it, which is binomial, whatever the latencies' distribution.

Calls of one round share the machine's state, and so do neighbouring rounds. So they are counted as the number of
independent calls that tell as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from compile_stage.core.records import Timing
from compile_stage.measure.stats import Interval, by_round, longer_memory, samples_needed

GATED = 0.95
"""The quantile that a policy may limit: p95_latency_ms."""


def rounds_of_calls(timing: Timing) -> Sequence[Sequence[float]]:
    """A timing's latencies, one group for each round; each its own where the rounds are not known."""
    return by_round(timing) or [(call,) for call in timing.latency_s]


def percentile(timing: Timing, q: float) -> float | None:
    """The q-quantile (`q=0.95` for p95) of a timing's calls, in seconds, or None where so few independent ones can't
    carry it: the rule of the gate on it. Of the median, which no round's mood moves far, all calls count."""
    calls = timing.latency_s
    number = len(calls) if q <= 0.5 else int(effective_calls(rounds_of_calls(timing), q))
    if number < samples_needed(q):
        return None
    return float(np.quantile(np.asarray(calls, dtype=np.float64), q))


def quantile_interval(rounds: Sequence[Sequence[float]], q: float, confidence: float = 0.95) -> Interval | None:
    """The q-quantile of all calls, and its bounds, each with that confidence by itself.

    Args:
        rounds: Seconds per call, one list for each round.

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
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value), confidence=confidence)


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
