"""Models measured in several processes each: what one process shows is not what the next will.

A process lies elsewhere in memory than the one before, and its threads on other cores; its model is a few per cent
faster or slower for as long as it lives. Rounds of one process can't show that, however many they are. So the
participants are started anew, measured in turns again, and a speedup's interval comes from how its starts differ
(`speedups.ratio_interval`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from compile_stage.core.quantities import percent
from compile_stage.core.records import Measurement, Timing
from compile_stage.measure import speedups, stats
from compile_stage.measure.simultaneous_intervals import common_reach, widened

MORE_PROCESSES = 5
"""Starts where loading them leaves time for rounds (`LOADING_SHARE`): they halve the interval of three."""

MOST_PROCESSES = 9
"""Starts where a gate is open after three (`Schedule.more`). With five, a p95 that is 10 % below its limit is shown to
hold it in 70 of 100 cases where processes differ by 4 %, with nine in 90."""

LEAST_HALF_WIDTHS = (speedups.RESOLUTION, 2 * speedups.RESOLUTION)
"""Relative half widths. Three starts are enough where the intervals of all are at most three quarters
(`AGREEING_SHARE`) as wide as this. They may agree by chance, so they are said to be this wide: ±2 %, or ±4 % where that
leaves no doubt of who is the fastest. By simulation (docs/benchmarks.md) the intervals of all measurements together,
ended after three starts or not, hold what they say."""

AGREEING_SHARE = 0.75

CONTENDER = 1.25
"""A candidate that takes so many times as long as the fastest is not started again: what restarts would tell of it
changes no winner."""

SHORT_CALL_S = 2e-3
"""Where a call is shorter, waking the threads and waiting for the last of them may cost more than they gain: 5 to 20 us
for each operator that is shared out. An LSTM of 0.33 ms on two threads takes 0.24 ms on one."""

MOST_TRIED = 2
"""So many candidates, the fastest whose backend offers any, are tried unasked with settings of a kind. Which of the two
is the faster is often not known after one start."""

SHARED_GAIN = 2.0
"""A batch that is shared among the threads is at most so many times as fast, and as they are many: an LSTM, whose steps
wait for each other, takes 1.34 times as long as the fastest on two threads together, and 0.84 times on two of one."""

_LIKELY = 3

LOADING_SHARE = 0.5
"""Starting processes again may take at most this share of the time for measuring."""

ROUNDS_SHARE = 0.5
"""Rounds for so much of the time that starting again takes, and no more where a ratio is known to ±8 %
(`timing.ROUGHLY`): the next start tells more then. By the optimal allocation of two-stage sampling (Cochran, Sampling
Techniques, 3rd ed., 10.6) it is √(c_r / c_s) σ_r / σ_s for rounds that differ by σ_r and cost c_r, and starts that
differ by σ_s and cost c_s: 0.6 where processes differ by 4 %, ratios of rounds by 14 %, a start costs 6 s, and a round
0.35 s."""

LEAST_SHARE = 0.05
"""Rounds for at least this share of the time for measuring: where starting again costs little, there are no more than
five starts all the same, and rounds are what there is time for."""


@dataclass
class Schedule:
    """The time for measuring, shared among the starts. Loading counts, but for the first, which nobody can do without.

    Attributes:
        seconds: For all rounds and all later starts.
        starts: How many are wanted at most, and, as loading shows what they cost, how many there will be; at least 1.
            What is measured of those who stay changes it once, after three starts: fewer where they agree, and their
            intervals are never narrower than `LEAST_HALF_WIDTHS` then, since one that ends whenever it is narrow does
            not hold what it says; more where a gate is open.
        restart_s: What a later start takes.
    """

    seconds: float
    starts: int = MORE_PROCESSES
    restart_s: float = 0.0
    _ends: float = 0.0

    def begin(self, load_s: float, participants: int) -> None:
        """The first start is loaded. Who is started again is not known yet: the original and mostly two more."""
        self._ends = time.monotonic() + self.seconds
        self.limit(load_s * min(1.0, _LIKELY / participants))

    def limit(self, restart_s: float) -> None:
        """Fewer starts, if a later start takes so long that they don't fit."""
        self.restart_s = restart_s
        if (self.starts - 1) * restart_s > LOADING_SHARE * self.seconds:
            self.starts = 1 + int(LOADING_SHARE * self.seconds / restart_s)

    def one_more(self) -> None:
        """A start more, for who joins after the first: a speedup needs as many of theirs. Before any of it is known."""
        self.starts += 1

    def one_less(self) -> None:
        """The start that was added for who joined is not needed: none of them is started again."""
        self.starts -= 1

    def more(self, done: int) -> None:
        """More starts, where a gate is open after so many: as far as the time that is left has room for them, and as
        much for rounds as for loading."""
        each_s = self.restart_s + max(self.restart_s, self.rough_s)
        fit = int((self._ends - time.monotonic()) / each_s) if each_s > 0 else MOST_PROCESSES
        self.starts = max(self.starts, min(MOST_PROCESSES, done + fit))

    def seconds_of(self, number: int) -> float:
        """For the rounds of a start, from now on."""
        left_s = self._ends - time.monotonic() - (self.starts - 1 - number) * self.restart_s
        return max(0.0, left_s) / max(1, self.starts - number)

    @property
    def rough_s(self) -> float:
        """Rounds of a start may end after so long where ratios are known roughly; infinite where an interval comes from
        rounds."""
        if self.starts < speedups.FEW_PROCESSES:
            return math.inf
        return max(ROUNDS_SHARE * self.restart_s, LEAST_SHARE * self.seconds)

    def extend(self, overtime_s: float) -> None:
        """A start took longer than it was given, since it had too few rounds: the later ones keep their share."""
        self._ends += overtime_s

    def note(self, restart_s: float, *, others: bool) -> str:
        """One sentence for the reports when there were too few starts to see how processes differ; else empty.

        Args:
            others: There are models that were not started again, since they are far behind the fastest.
        """
        if self.starts >= speedups.FEW_PROCESSES:
            return ""
        processes = "one process" if self.starts == 1 else f"{self.starts} processes"
        of = "each model"
        if others and self.starts > 1:
            of = f"each model within {percent(CONTENDER - 1)} of the fastest, and from one of each other model"
        return (
            f"Speedups come from {processes} of {of}; their intervals assume that processes differ by "
            f"{percent(speedups.ASSUMED_SPREAD.log_sd)}. To measure more processes, raise budget.measure_seconds "
            f"({_whole(self.seconds)} s here): starting the models again takes {_whole(restart_s)} s"
        )


def _whole(seconds: float) -> str:
    """Whole seconds; of fewer than ten, two digits: half a second is not 0."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def contenders(measured: Mapping[str, Measurement], baseline: str) -> list[str]:
    """Who may still win by its latency, at some batch size: all within 25 % of the fastest candidate.

    Latencies are beside those of the candidate with the most rounds, in the rounds that both ran: who left early met
    the machine at one time, who stayed at several. Not beside the baseline's, which may be a slow model with one noisy
    call a round.
    """
    sizes = [base.batch_size for base in measured[baseline].timings]
    near = {name for size in sizes for name in _within(CONTENDER, measured, baseline, size)}
    return [name for name in measured if name in near]


def _within(times: float, measured: Mapping[str, Measurement], baseline: str, batch_size: int) -> dict[str, float]:
    """Candidates that take at most so many times as long as the fastest at that batch size, and how many; the fastest
    first."""
    others = {name: m for name, m in measured.items() if name != baseline and not m.stopped_early}
    timings = {name: own for name, m in others.items() if (own := m.timing(batch_size)) is not None}
    if not timings:
        return {}
    stayed = max(timings.values(), key=lambda timing: timing.rounds)
    relative = sorted((beside(stayed, own), name) for name, own in timings.items())
    fastest, _ = relative[0]
    return {name: latency / fastest for latency, name in relative if latency <= times * fastest}


def differences(starts: Sequence[Mapping[str, Measurement]], baseline: str, batch_size: int) -> dict[str, float]:
    """By what the speedup of each differed between these starts at that batch size: the standard deviation of its
    logarithm. Those without two starts are left out."""
    quotients: dict[str, list[float]] = {}
    for start in starts:
        base = start[baseline].timing(batch_size)
        for name, measurement in start.items():
            own = measurement.timing(batch_size)
            if name != baseline and base is not None and own is not None:
                quotients.setdefault(name, []).append(math.log(beside(base, own)))
    return {name: float(np.std(values, ddof=1)) for name, values in quotients.items() if len(values) > 1}


def worth_a_try(measured: Mapping[str, Measurement], baseline: str, threads: int) -> dict[str, dict[str, float]]:
    """By what a setting is for: on which candidates it is worth a try, the fastest first, each with its latency over
    the fastest one's.

    Fewer threads on contenders, and another layout; a shared batch also on those that it could make the fastest of
    all (`SHARED_GAIN`).
    """
    names = contenders(measured, baseline)
    fastest_s = {name: min(stats.median(t.latency_s) for t in measured[name].timings) for name in names}
    calls = sorted((seconds, name) for name, seconds in fastest_s.items())
    relative = {name: seconds / calls[0][0] for seconds, name in calls}
    short = {name: times for name, times in relative.items() if fastest_s[name] < SHORT_CALL_S}
    largest = max((timing.batch_size for timing in measured[baseline].timings), default=1)
    gain = min(SHARED_GAIN, float(threads))
    several = _within(gain, measured, baseline, largest) if largest > 1 and threads > 1 else {}
    return {"short-calls": short, "batches": several, "layout": relative}


def beside(other: Timing, own: Timing) -> float:
    """The own median latency over the other's, in the rounds that both ran. Raises ValueError where there is none."""
    shared = shared_rounds(other, own)
    other_s, own_s = ([call for turn in turns for call in turn] for turns in (shared.base, shared.own))
    return stats.median(own_s) / stats.median(other_s)


def agree(measured: Mapping[str, Measurement], names: Sequence[str], baseline: str, half_width: float) -> bool:
    """Whether the starts of all that may still win agree so well that their intervals can be said to have a relative
    half width of `half_width`, and more starts would change no winner. Whose interval lies wholly behind that of the
    fastest won't win. What is beyond a resolution (`speedups.RESOLUTION`) and within the intervals is not decided.

    Args:
        measured: All starts so far, merged.
        names: The candidates that were started again.
        half_width: One of `LEAST_HALF_WIDTHS`.
    """
    for base in measured[baseline].timings:
        found = (measured[name].timing(base.batch_size) for name in names)
        bounds = [(timing, *timing.speedup_interval) for timing in found if timing and timing.speedup_interval]
        ahead = max((low for _, low, _ in bounds), default=0.0)
        near = [timing for timing, _, high in bounds if high >= ahead]
        if not all(speedups.is_known(timing, AGREEING_SHARE * half_width) for timing in near):
            return False
        values = [timing.speedup or 0.0 for timing in near]
        if half_width > speedups.RESOLUTION and values and max(values) > (1 + speedups.RESOLUTION) * min(values):
            return False
    return True


def merge(
    starts: Sequence[Mapping[str, Measurement]], baseline: str, *, seed: int, reach: float = 0.0
) -> dict[str, Measurement]:
    """One measurement for each participant, of all the starts that it was part of.

    Latencies are put together, so that a median is over all calls; the peak memory is the largest, the load time that
    of its first start, where nothing else was loaded. A speedup is over the baseline's calls of the same starts.
    Intervals of candidates with three starts or more hold for all of them at once
    (`simultaneous_intervals.common_reach`): the winner is one of these.

    Args:
        reach: That these intervals have at least, on the logarithm: of starts that were fewer since they agreed, which
            they may have done by chance.
    """
    names = dict.fromkeys(name for start in starts for name in start)
    parts = {name: {number: start[name] for number, start in enumerate(starts) if name in start} for name in names}
    merged = {}
    seen = [_seen(parts, baseline, index, reach) for index in range(len(starts[0][baseline].timings))]
    for name, of_starts in parts.items():
        measurements = list(of_starts.values())
        last = measurements[-1]
        timings = tuple(
            _with_speedup(
                _joined(of_starts, index),
                _joined({number: parts[baseline][number] for number in of_starts}, index),
                seen[index],
                seed,
            )
            if name != baseline
            else _joined(of_starts, index)
            for index in range(min(len(m.timings) for m in measurements))
        )
        merged[name] = replace(
            measurements[0],
            timings=timings,
            peak_memory_bytes=max(m.peak_memory_bytes for m in measurements),
            stopped_early=last.stopped_early,
            busy=any(m.busy for m in measurements),
            notes=max((m.notes for m in measurements), key=len),  # of a busy machine, that of one start
        )
    return merged


def _joined(of_starts: Mapping[int, Measurement], index: int) -> Timing:
    """The rounds of all these starts, one after the other, at the batch size with that index."""
    timings = [measurement.timings[index] for measurement in of_starts.values()]
    first = timings[0]
    return replace(
        first,
        latency_s=tuple(call for timing in timings for call in timing.latency_s),
        rounds=sum(timing.rounds for timing in timings),
        turns=tuple(calls for timing in timings for calls in timing.turns),
        disturbed=sum(timing.disturbed for timing in timings),
        cpu_s=tuple(seconds for timing in timings for seconds in timing.cpu_s),
        threads=round(stats.median([float(timing.threads) for timing in timings])),
        first_s=tuple(call for timing in timings for call in timing.first_s),
        one_thread_s=tuple(turn for timing in timings for turn in timing.one_thread_s),
        processes=tuple(n for n, timing in zip(of_starts, timings, strict=True) for _ in timing.turns),
    )


@dataclass(frozen=True)
class _Seen:
    """What all candidates together show at one batch size of how processes differ.

    Attributes:
        spread: Of processes of one model.
        reach: How far the intervals of those who were started often enough reach at least, on the logarithm.
    """

    spread: speedups.Spread
    reach: float


def _with_speedup(own: Timing, base: Timing, seen: _Seen, seed: int) -> Timing:
    shared = shared_rounds(base, own)
    ratio = shared.ratio(seed=seed, spread=seen.spread)
    if len(set(own.processes)) >= speedups.FEW_PROCESSES:
        ratio = widened(ratio, seen.reach)
    return replace(
        own,
        stable=speedups.is_within(ratio, speedups.UNSTABLE),
        speedup=ratio.value,
        speedup_interval=(ratio.low, ratio.high),
        mean_speedup_interval=speedups.mean_ratio_interval(
            shared.base, shared.own, seed=seed, processes=shared.processes, spread=seen.spread
        ),
    )


class Shared(NamedTuple):
    """The rounds that two models both ran: round i of one was run next to round i of the other.

    Attributes:
        base: Seconds per call of the first model, one group for each round.
        own: The same, of the second.
        processes: Of each round, the start that it belongs to; empty where that was not noted.
    """

    base: list[tuple[float, ...]]
    own: list[tuple[float, ...]]
    processes: tuple[int, ...]

    def ratio(self, *, seed: int, spread: speedups.Spread = speedups.ASSUMED_SPREAD) -> stats.Interval:
        """How many times faster the second is (`speedups.ratio_interval`). Raises ValueError without a round."""
        return speedups.ratio_interval(self.base, self.own, seed=seed, processes=self.processes, spread=spread)


def shared_rounds(
    base: Timing, own: Timing, rounds_of: Callable[[Timing], list[tuple[float, ...]]] = speedups.by_round
) -> Shared:
    """The rounds that both ran: of each start the first ones, since whoever left, was dropped, or is not started again,
    has fewer.

    Args:
        rounds_of: A timing → seconds of each call, one group for each round.
    """
    base_rounds, rounds = rounds_of(base), rounds_of(own)
    if not base.processes or not own.processes:
        kept = min(len(rounds), len(base_rounds))
        return Shared(base_rounds[:kept], rounds[:kept], own.processes[:kept])
    shared = Shared([], [], ())
    for start in dict.fromkeys(own.processes):
        base_of = [turn for turn, number in zip(base_rounds, base.processes, strict=True) if number == start]
        own_of = [turn for turn, number in zip(rounds, own.processes, strict=True) if number == start]
        kept = min(len(base_of), len(own_of))
        shared = Shared(shared.base + base_of[:kept], shared.own + own_of[:kept], shared.processes + (start,) * kept)
    return shared


def _seen(parts: Mapping[str, Mapping[int, Measurement]], baseline: str, index: int, reach: float) -> _Seen:
    """Of the batch size with that index, by those that were started often enough.

    A process's spread is the mean over them, known with the degrees of freedom of one, since all share the baseline's
    processes. Of one that crashed there are fewer starts: then all count with its number.
    """
    joined = {
        name: _joined(known, index)
        for name, of_starts in parts.items()
        if (known := {number: m for number, m in of_starts.items() if index < len(m.timings)})
    }
    base = joined.pop(baseline)
    often = _started_often(base, joined.values())
    if not often:
        return _Seen(speedups.ASSUMED_SPREAD, reach)
    variances = [speedups.variance_over_starts(*shared) for shared in often]
    fewest = min(len(set(shared.processes)) for shared in often)
    return _Seen(_spread(often), max(reach, common_reach(variances, fewest)))


def spread_seen(base: Timing, others: Iterable[Timing]) -> speedups.Spread:
    """By what processes of one model differ, as `merge` takes it for who was started too seldom to show it.

    Args:
        base: The baseline, of all starts.
        others: The candidates at the same batch size, of all starts.
    """
    return _spread(_started_often(base, others))


def _started_often(base: Timing, others: Iterable[Timing]) -> list[Shared]:
    """Those whose starts show how processes differ, each with the baseline's rounds."""
    shared = (shared_rounds(base, own) for own in others)
    return [one for one in shared if len(set(one.processes)) >= speedups.FEW_PROCESSES]


def _spread(often: Sequence[Shared]) -> speedups.Spread:
    """What these show; what is assumed where they show less than that and it reaches less far than Student's t of few
    starts. Where they show more, the assumption is wrong: on a machine whose cores others use, PyTorch's calls took
    0.5 ms in some starts and 150 ms in others."""
    if not often:
        return speedups.ASSUMED_SPREAD
    quotients = [speedups.log_quotients(*shared) for shared in often]
    log_sd = float(np.sqrt(np.mean([values.var(ddof=1) / 2 for values in quotients])))
    spread = speedups.Spread(log_sd=log_sd, freedom=min(map(len, quotients)) - 1)
    if log_sd > speedups.ASSUMED_SPREAD.log_sd:
        return spread
    return min(spread, speedups.ASSUMED_SPREAD, key=speedups.Spread.reach)
