"""Speedups: how many times faster one model is than another by their latencies, and how surely that is known.

The interval of a speedup claims no more than its rounds and process starts carry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import NormalDist

import numpy as np

from compile_stage.core.records import Measurement, TargetPolicy, Timing, record
from compile_stage.measure.stats import F64, Interval, bootstrap, median, student_t

RESOLUTION = 0.02
"""A ratio of two latencies is resolved to ±2 %: closer than that, nothing is claimed."""

UNSTABLE = 0.10
"""A ratio whose interval's half width is more than 10 % of it is unstable: it is shown as a range, without a figure."""

FEW_ROUNDS = 6
"""Below so many rounds the resampled medians lie between the extremes of the rounds, which is too short an interval (2
rounds hold the median between them every other time), so Student's t is used there, with the bootstrap's error."""

_OFF_CENTRE = 0.5
"""Where the mean quotient of the starts is further from that of all calls than this share of the half width, the
interval reaches as far around it: of calls with two speeds, as beside a neighbour that works half of the time, the
median of all jumps from one to the other as that of a single start does, and Student's t is right around the mean
alone."""

_RESAMPLES = 1000
_GRID = 256  # a resample's median is exact to 0.2 % of the calls
_NORMAL = NormalDist()


@record
class Spread:
    """How much the median latency of one model differs between its processes, by where memory and threads happen to
    lie.

    Attributes:
        log_sd: Standard deviation of the logarithm (0.02: 2 %), of a process's median by everything that differs.
        freedom: Degrees of freedom that it is known with; infinite for an assumption.
    """

    log_sd: float
    freedom: float = math.inf

    def reach(self, confidence: float = 0.95) -> float:
        """How far the logarithm of one process's median may lie from that of all, at that confidence."""
        return student_t(self.freedom, confidence) * self.log_sd


ASSUMED_SPREAD = Spread(log_sd=0.04)
"""Where fewer than three processes were measured: 4 %. Layout alone moves a program by 1 to 5 % (Kalibera and Jones,
*Rigorous Benchmarking in Reasonable Time*, ISMM 2013; Mytkowicz and others, ASPLOS 2009)."""

FEW_PROCESSES = 3
"""Fewer do not show how much processes differ: Student's t of two is 12.7. From three on the interval holds what it
says, by simulation (docs/measurement.md)."""

_ENOUGH_FOR_RANGE = 5
"""The median of any distribution lies below all of five draws, or above all, with a probability of 3 % each (1 / 2⁵):
so an interval of so many starts that differ by far reaches from the least of their quotients to the largest."""


def ratio_interval(
    baseline_rounds: Sequence[Sequence[float]],
    candidate_rounds: Sequence[Sequence[float]],
    *,
    seed: int,
    confidence: float = 0.95,
    processes: Sequence[int] = (),
    spread: Spread = ASSUMED_SPREAD,
) -> Interval:
    """How many times faster the candidate is: the baseline's median latency / the candidate's, both over all calls.

    So the value is the quotient of the two medians that a report shows. The interval is of exactly that quotient, on
    the logarithm:

    - Of three processes and more: Student's t over the quotients of the single processes. Whatever lasts longer than a
      round, and whatever a process is born with, differs between them as it does between two runs. Where that reaches
      further than what is assumed of one process, they are not normal, and what they show takes its place
      (`_over_unlike_starts`).
    - Of fewer: the bootstrap's over rounds (a round brings the calls of both, since what slows a whole round slows
      both), wider by the memory of the rounds (`longer_memory`) and by what processes differ by (`spread`).
    - `processes` not given: over rounds alone. It says what this process will do, and nothing of the next.

    Args:
        baseline_rounds: Seconds per call, one list for each round.
        candidate_rounds: The same; round i was run next to the baseline's round i.
        processes: Of each round, which start of the processes it belongs to.
        spread: What processes differ by, where fewer than three were measured.

    Returns:
        With a single round the interval is (0, inf): one round says nothing of the next.

    Raises:
        ValueError: there is no round, or one without a call, or a latency that is not a number above 0.
    """
    count = min(len(baseline_rounds), len(candidate_rounds))  # the last round may have been cut short
    if count == 0:
        raise ValueError("a ratio needs at least one round")
    baseline_rounds, candidate_rounds = baseline_rounds[:count], candidate_rounds[:count]
    base, own = _PooledMedian(baseline_rounds), _PooledMedian(candidate_rounds)
    value = base.value / own.value
    processes = processes[:count]
    quotients = log_quotients(baseline_rounds, candidate_rounds, processes)
    if len(quotients) >= FEW_PROCESSES:
        half = student_t(len(quotients) - 1, confidence)
        half *= math.sqrt(variance_over_starts(baseline_rounds, candidate_rounds, processes))
        ends = math.log(value) - half, math.log(value) + half
        if abs(off := float(quotients.mean()) - math.log(value)) > _OFF_CENTRE * half:
            ends = ends[0] + min(off, 0.0), ends[1] + max(off, 0.0)
        if half > ASSUMED_SPREAD.reach(confidence) * math.sqrt(2):
            ends = _over_unlike_starts(ends, baseline_rounds, candidate_rounds, processes, seed)
        low, high = (_exp(end) for end in ends)
        return Interval(value=value, low=min(low, value), high=max(high, value), confidence=confidence)
    if count == 1:
        return Interval(value=value, low=0.0, high=math.inf, confidence=confidence)
    log_value = math.log(value)
    ends = _over_rounds(base, own, count, seed, confidence)
    if len(quotients):
        memory = math.sqrt(longer_memory(log_quotients(baseline_rounds, candidate_rounds, range(count))))
        born = spread.reach(confidence) * math.sqrt(2 / len(quotients))
        below, above = (math.hypot(memory * (end - log_value), born) for end in ends)
        ends = (log_value - below, log_value + above)
    return Interval(value=value, low=_exp(ends[0]), high=_exp(ends[1]), confidence=confidence)


def mean_ratio_interval(
    baseline_rounds: Sequence[Sequence[float]],
    candidate_rounds: Sequence[Sequence[float]],
    *,
    seed: int,
    processes: Sequence[int],
    spread: Spread = ASSUMED_SPREAD,
) -> tuple[float, float] | None:
    """95 % interval of how many times faster the candidate is by the means over all calls, the time of all calls
    together.

    No median shows calls that take far longer now and then, such as a pause of 50 ms in each hundred. What disturbs a
    machine is in a mean, so the interval is wide there, and only what lies wholly on one side of a limit says anything.

    Args:
        baseline_rounds, candidate_rounds, processes, spread: As `ratio_interval`. Of three processes and more it is
            Student's t over the logarithms of their quotients, of fewer the bootstrap's over rounds (BCa).

    Returns:
        None for fewer than six rounds.
    """
    count = min(len(baseline_rounds), len(candidate_rounds), len(processes))
    if count < FEW_ROUNDS:
        return None
    base, own = (
        np.array([(sum(turn), len(turn)) for turn in rounds[:count]], dtype=np.float64)
        for rounds in (baseline_rounds, candidate_rounds)
    )

    def quotients(weights: F64) -> F64:
        sums, of_own = weights @ base, weights @ own
        found: F64 = np.log(sums[:, 0] / sums[:, 1] * of_own[:, 1] / of_own[:, 0])
        return found

    owners = np.asarray(processes[:count])
    starts = np.unique(owners)
    if len(starts) >= FEW_PROCESSES:
        logs = quotients((owners[None, :] == starts[:, None]).astype(np.float64))
        half = student_t(len(logs) - 1, 0.95) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
        return _exp(float(logs.mean()) - half), _exp(float(logs.mean()) + half)
    found = bootstrap(quotients, count, seed=seed)
    if found is None:
        return None
    born = spread.reach() * math.sqrt(2 / len(starts))
    below, above = (math.hypot(end - found.value, born) for end in (found.low, found.high))
    return _exp(found.value - below), _exp(found.value + above)


def _over_unlike_starts(
    ends: tuple[float, float],
    baseline_rounds: Sequence[Sequence[float]],
    candidate_rounds: Sequence[Sequence[float]],
    processes: Sequence[int],
    seed: int,
) -> tuple[float, float]:
    """Ends of the interval of the logarithm over starts that differ by far more than processes do.

    Others' work slows some of the starts, and mostly one of the two models: their quotients are of two kinds, which
    Student's t does not fit. An artifact that was 5, 8 and 100 times as fast would be "0.6 to 104 times"; and one that
    was as fast as the original in one start of five, and three times in the four that were slowed, 1.6 to 5.5 times.

    - Five starts and more: as far as their quotients lie (`_ENOUGH_FOR_RANGE`), and by one standard deviation of what
      is assumed of processes further, since each is measured.
    - Fewer: as far as their own intervals reach, which have room for what processes differ by.

    Args:
        ends: By Student's t, which stay where a start has one round and its interval no end.
    """
    quotients = log_quotients(baseline_rounds, candidate_rounds, processes)
    if len(quotients) >= _ENOUGH_FOR_RANGE:
        room = ASSUMED_SPREAD.log_sd * math.sqrt(2)
        return float(quotients.min()) - room, float(quotients.max()) + room
    lows, highs = [], []
    for start in dict.fromkeys(processes):
        base, own = (
            [turn for turn, number in zip(rounds, processes, strict=False) if number == start]
            for rounds in (baseline_rounds, candidate_rounds)
        )
        interval = ratio_interval(base, own, seed=seed, processes=[0] * len(base))
        lows.append(interval.low)
        highs.append(interval.high)
    lowest, highest = min(lows), max(highs)
    return math.log(lowest) if lowest > 0 else ends[0], math.log(highest) if math.isfinite(highest) else ends[1]


def log_quotients(
    baseline_rounds: Sequence[Sequence[float]], candidate_rounds: Sequence[Sequence[float]], owners: Sequence[int]
) -> F64:
    """The logarithm of the quotient of both medians, of each owner (a process, or a round)."""
    calls: dict[int, tuple[list[float], list[float]]] = {}
    for owner, base, own in zip(owners, baseline_rounds, candidate_rounds, strict=False):
        both = calls.setdefault(owner, ([], []))
        both[0].extend(base)
        both[1].extend(own)
    return np.array([math.log(median(base) / median(own)) for base, own in calls.values()], dtype=np.float64)


def variance_over_starts(
    baseline_rounds: Sequence[Sequence[float]], candidate_rounds: Sequence[Sequence[float]], processes: Sequence[int]
) -> float:
    """Variance of the logarithm of a speedup, by how the quotients of two starts and more differ."""
    quotients = log_quotients(baseline_rounds, candidate_rounds, processes)
    memory = _neighbouring_starts(baseline_rounds, candidate_rounds, processes)
    return float(quotients.var(ddof=1)) / len(quotients) * memory**2


def _neighbouring_starts(
    baseline_rounds: Sequence[Sequence[float]], candidate_rounds: Sequence[Sequence[float]], processes: Sequence[int]
) -> float:
    """By what an interval over starts is too short since one start's last rounds are like the next one's first.

    The means of neighbouring batches of L values correlate by about m / (4 L), m being their `longer_memory`; to first
    order that adds m / (2 L) to the variance of the mean of three, as it is estimated from the batches. What lies
    between two starts makes it less, and that m is seen too small in so few rounds makes it more: m / L is taken.
    """
    rounds = log_quotients(baseline_rounds, candidate_rounds, range(len(processes)))
    starts = [rounds[np.asarray(processes) == number] for number in dict.fromkeys(processes)]
    return math.sqrt(1 + (longer_memory(*starts) - 1) / (len(rounds) / len(starts)))


def longer_memory(*series: F64) -> float:
    """By what the variance of a mean grows because neighbouring values are alike; 1 where they are not.

    (1 + r) / (1 - r) of the autocorrelation r of neighbours within the series, which a series of n values shows too
    small by about (1 + 3 r) / n (Kendall, Biometrika 41:403, 1954); at most half the number of values.
    """
    count = sum(map(len, series))
    off = [values - values.mean() for values in series]
    power = sum(float(values @ values) for values in off)
    if count < 4 * len(series) or power <= 0:
        return 1.0
    seen = sum(float(values[1:] @ values[:-1]) for values in off) / power
    r = min(seen + (1 + 3 * seen) * len(series) / count, 1 - 4 / (count + 2))
    return max(1.0, (1 + r) / (1 - r))


def outlast_memory(baseline_rounds: Sequence[Sequence[float]], candidate_rounds: Sequence[Sequence[float]]) -> bool:
    """True when there are three times as many rounds as their quotients remember (`longer_memory`): fewer show one
    state of the machine, however well they agree."""
    count = min(len(baseline_rounds), len(candidate_rounds))
    return count >= 3 * longer_memory(log_quotients(baseline_rounds, candidate_rounds, range(count)))


def _over_rounds(
    base: _PooledMedian, own: _PooledMedian, count: int, seed: int, confidence: float
) -> tuple[float, float]:
    """Ends of the interval of the logarithm, rounds taken as independent."""
    value = base.value / own.value
    log_ratios = _resampled_log_ratios(base, own, count, seed)
    if count < FEW_ROUNDS:
        low, high = _student(math.log(value), log_ratios, count, confidence)
    else:
        share = _expanded(confidence, count)
        low, high = (float(np.quantile(log_ratios, tail)) for tail in ((1 - share) / 2, (1 + share) / 2))
    # Of few calls the resampled medians may all lie on one side of the median itself.
    return min(low, math.log(value)), max(high, math.log(value))


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
    """The logarithm of the quotient for resamples of the rounds: the draws of `scipy.stats.bootstrap` with
    `rng=seed`, whose import takes half a second."""
    drawn = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    offsets = np.arange(_RESAMPLES)[:, None] * count
    weights = np.bincount((drawn + offsets).ravel(), minlength=_RESAMPLES * count).reshape(-1, count).astype(float)
    draws: F64 = np.log(base.of(weights) / own.of(weights))
    return draws


def _expanded(confidence: float, count: int) -> float:
    """The bootstrap's percentile interval is too short by a factor of about sqrt((n - 1) / n), and normal where
    Student's t is due. Hesterberg's expanded interval (The American Statistician 69:4, 2015) takes percentiles further
    out."""
    return 2 * _NORMAL.cdf(student_t(count - 1, confidence) * math.sqrt(count / (count - 1))) - 1


def _student(centre: float, draws: F64, count: int, confidence: float) -> tuple[float, float]:
    half = student_t(count - 1, confidence) * float(draws.std(ddof=1)) * math.sqrt(count / (count - 1))
    return centre - half, centre + half


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf  # with two rounds the half width may pass what exp can hold


def tied(a: Timing, b: Timing) -> bool:
    """True when the speeds of two candidates can't be told apart: the interval of the quotient of their own medians,
    from the same rounds, holds 1, or the medians differ by less than a ratio is resolved to. Timings that were not
    taken in the same rounds, or have no two starts in common, are not tied."""
    if a.processes != b.processes:
        a, b = _of_common_starts(a, b)
    if not a.turns or len(a.turns) != len(b.turns):
        return False
    if abs(math.log(median(a.latency_s) / median(b.latency_s))) <= math.log1p(RESOLUTION):
        return True
    rounds_a, rounds_b = by_round(a), by_round(b)
    medians_a, medians_b = [median(calls) for calls in rounds_a], [median(calls) for calls in rounds_b]
    # The median of pooled rounds lies between theirs, so no resample of rounds that don't overlap has a quotient of 1.
    if not a.processes and (max(medians_a) < min(medians_b) or max(medians_b) < min(medians_a)):
        return False
    ratio = ratio_interval(rounds_a, rounds_b, seed=0, processes=a.processes)
    return ratio.low <= 1 <= ratio.high


def _of_common_starts(a: Timing, b: Timing) -> tuple[Timing, Timing]:
    """Both timings with the starts that both were part of; without any round where these are fewer than two."""
    common = set(a.processes) & set(b.processes)

    def part(timing: Timing) -> Timing:
        kept = [place for place, start in enumerate(timing.processes) if start in common and len(common) > 1]
        rounds = by_round(timing)
        return replace(
            timing,
            latency_s=tuple(call for place in kept for call in rounds[place]),
            turns=tuple(timing.turns[place] for place in kept),
            processes=tuple(timing.processes[place] for place in kept),
        )

    return part(a), part(b)


def is_resolved(timing: Timing) -> bool:
    """True when the timing's speedup is known to ±2 %: more measuring would not change what a limit says of it."""
    return is_known(timing, RESOLUTION)


def is_known(timing: Timing, relative_half_width: float) -> bool:
    """True when the timing's speedup is known so narrowly, or it has none."""
    if timing.speedup is None or timing.speedup_interval is None:
        return True
    low, high = timing.speedup_interval
    return is_within(Interval(value=timing.speedup, low=low, high=high, confidence=0.95), relative_half_width)


def by_round(timing: Timing) -> list[tuple[float, ...]]:
    """A timing's latencies, one group for each round."""
    ends = list(accumulate(timing.turns))
    return [timing.latency_s[end - calls : end] for end, calls in zip(ends, timing.turns, strict=True)]


def cpu_by_start(timing: Timing) -> dict[int, float]:
    """CPU seconds of a call in each start, of a language model with those of the call for its first token; empty where
    they, or the starts, were not noted."""
    if len(timing.cpu_s) != len(timing.turns) or len(timing.processes) != len(timing.turns):
        return {}
    seconds, calls = dict.fromkeys(timing.processes, 0.0), dict.fromkeys(timing.processes, 0)
    for start, of_turn_s, number in zip(timing.processes, timing.cpu_s, timing.turns, strict=True):
        seconds[start] += of_turn_s
        calls[start] += number
    return {start: seconds[start] / calls[start] for start in seconds if calls[start]}


def per_sample_s(timing: Timing) -> float:
    """Seconds for one sample: the median of a call, shared among its batch."""
    return median(timing.latency_s) / timing.batch_size


def deciding_timing(measurement: Measurement | None, policy: TargetPolicy) -> Timing | None:
    """The timing that selection looks at: at the target's first batch size; where the policy prefers throughput, at the
    batch size with the least time for one sample."""
    if measurement is None:
        return None
    if policy.prefer == "throughput":
        return min(measurement.timings, key=per_sample_s, default=None)
    return measurement.timing(policy.target.batch_sizes[0])
