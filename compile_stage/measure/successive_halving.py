"""Which settings of a runtime to use together: a search over combinations by successive halving.

All valid combinations start with few rounds. Before each halving they take turns with the plain model, in heats of
a few, each in a new process; the slower half is dropped, but for those that a paired test does not show to be slower.
The last ones get full rounds in three processes each, together with the best less one of its settings, so that
no setting stays that does not pay, and with one more. Where there are more combinations than there is time for, the
search starts with single settings and pairs, and joins the survivors.

Nothing here starts a process: who measures is the caller's `Race`, so the search is tested on simulated machines.
(Successive halving: Jamieson and Talwalkar, AISTATS 2016.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations as subsets
from itertools import count

import numpy as np

from compile_stage.core.records import record
from compile_stage.measure.memory import SAME_MEMORY
from compile_stage.measure.speedups import RESOLUTION

Combination = tuple[str, ...]
"""Names of settings in the order in which they are offered; () is the plain model."""

MOST = 40
"""Combinations that a search starts with at most: those of five settings, or singles and pairs of eight. By simulation
(tests/measure/test_settings.py) the pairs of six find as much as all 63 combinations, in two thirds of the time."""

MOST_SETTINGS = 10
"""Settings that are combined; of 10 there are up to 1023 combinations, which are listed, and predicted from pairs."""

HEAT = 11
"""Combinations that are open at once, beside the plain model: so many processes fit into memory, and a round of them
takes a second, so that what is slower than that meets all alike."""

FIRST_ROUNDS, MOST_ROUNDS = 6, 24
"""Rounds of the first halving, and of a later one at most; each has twice as many as the one before."""

FINAL_ROUNDS, FINAL_STARTS = 12, 3
"""Rounds of the last ones in each of their processes, and processes: one alone may be a few per cent off for as long as
it lives."""

FINALISTS = 3

SLOWER = 0.05
"""A one-sided signed-rank test with at most this probability shows that a combination is slower."""

SAME = RESOLUTION / 2
"""Of combinations that differ by less, the one with less memory or fewer settings is taken."""

_FINAL_SHARE = 0.4  # of the time, kept for the last ones
_PAIR_NOISE = 0.03  # three processes, each a per cent or two off, and six rounds
_MOST_ADDED = 3  # settings that are tried on top of the best
_KEPT = 0.75  # of a halving's combinations go on at most


@record
class Raced:
    """One combination in one heat.

    Attributes:
        log_speedups: Of each round, the logarithm of the plain model's median latency over its own.
        memory_bytes: Its peak; 0 where it is not known.
    """

    log_speedups: tuple[float, ...]
    memory_bytes: int = 0


Race = Callable[[Sequence[Combination], int, int], Mapping[Combination, Raced]]
"""(combinations, rounds, start) → what each showed beside the plain model, all in new processes; () is the plain model
itself, for its memory. Who failed is missing. The same arguments with another `start` are measured anew."""


@record
class Limits:
    """What a search may cost.

    Attributes:
        seconds: Nothing is begun later than this; a heat under way is the caller's to end.
        most, heat: `MOST` and `HEAT`.
    """

    seconds: float
    most: int = MOST
    heat: int = HEAT


@record
class Ranked:
    """A combination of the last ones, by its last rounds."""

    settings: Combination
    speedup: float
    memory_bytes: int = 0


@record
class FoundSettings:
    """What a search ended with.

    Attributes:
        ranked: The last ones, the one to take first; empty when none is faster than the plain model, nor as fast with
            less memory.
        tried: Combinations that were measured.
        valid: Combinations that there are.
        alone: Setting → how many times as fast it was by itself in the first halving.
        exhausted: The time ended the search.
    """

    ranked: tuple[Ranked, ...] = ()
    tried: int = 0
    valid: int = 0
    alone: Mapping[str, float] | None = None
    exhausted: bool = False


def starters(names: Sequence[str], fits: Callable[[Combination], bool], most: int) -> tuple[list[Combination], int]:
    """What a search starts with, and how many valid combinations there are: all of them, or, where these are more than
    `most`, single settings and pairs.

    Args:
        fits: True when the settings can be laid over each other.
    """
    valid = _valid(names, fits)
    if len(valid) <= most:
        return valid, len(valid)
    return [one for one in valid if len(one) <= 2][:most], len(valid)


def _valid(names: Sequence[str], fits: Callable[[Combination], bool]) -> list[Combination]:
    """All combinations of the first `MOST_SETTINGS`, those of few settings first."""
    names = names[:MOST_SETTINGS]
    sized = (subsets(names, size) for size in range(1, len(names) + 1))
    return [one for of_size in sized for one in of_size if fits(one)]


def search_settings(
    names: Sequence[str],
    fits: Callable[[Combination], bool],
    race: Race,
    limits: Limits,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> FoundSettings:
    """Find the combination that is fastest, and of those that are as fast the one with less memory, then fewer
    settings.

    Args:
        names: Of the settings, those first that are the most promising.
        fits: True when settings can be laid over each other.
    """
    return _Search(tuple(names), fits, race, limits, clock).run()


class _TimeEndedError(Exception):
    pass


class _Search:
    def __init__(
        self,
        names: tuple[str, ...],
        fits: Callable[[Combination], bool],
        race: Race,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._names, self._fits, self._race, self._limits, self._clock = names, fits, race, limits, clock
        self._began = clock()
        self._start = 0
        self._tried: set[Combination] = set()
        self._final: dict[Combination, list[Raced]] = {}
        self._alone: dict[str, float] = {}
        self._plain_bytes = 0

    def run(self) -> FoundSettings:
        field, valid = starters(self._names, self._fits, self._limits.most)
        exhausted = False
        try:
            self._finish(self._halve(field, complete=len(field) == valid))
        except _TimeEndedError:
            exhausted = True
        return FoundSettings(
            ranked=self._ranking(),
            tried=len(self._tried),
            valid=valid,
            alone=self._alone,
            exhausted=exhausted,
        )

    # ------------------------------------------------------------------------------------------------------- halvings

    def _halve(self, field: list[Combination], *, complete: bool) -> list[Combination]:
        """The few that get full rounds, fastest first.

        Args:
            complete: All combinations are in the field.
        """
        ends = self._began + (1 - _FINAL_SHARE) * self._limits.seconds
        for halving in count():
            seen = self._heats(field, min(MOST_ROUNDS, FIRST_ROUNDS * 2**halving), ends)
            field = _fastest_first(seen)
            if halving == 0:
                self._alone = {one[0]: math.exp(_median(raced)) for one, raced in seen.items() if len(one) == 1}
            if self._clock() >= ends or (len(field) <= FINALISTS and (complete or halving)):
                break
            kept = _survivors(field, seen)
            if halving == 0 and not complete:
                kept = self._with_predicted(kept[: self._limits.heat], seen)
            field = kept
        return field[:FINALISTS]

    def _heats(self, field: Sequence[Combination], rounds: int, ends: float) -> dict[Combination, Raced]:
        """All of them in heats; those that there is no time for are left out, the last ones first."""
        seen: dict[Combination, Raced] = {}
        number = max(1, math.ceil(len(field) / self._limits.heat))
        size = math.ceil(len(field) / number) if field else 0
        for first in range(0, len(field), max(1, size)):
            if seen and self._clock() >= ends:
                break
            seen |= self._heat(field[first : first + size], rounds)
        return seen

    def _heat(self, heat: Sequence[Combination], rounds: int) -> dict[Combination, Raced]:
        if self._clock() - self._began >= self._limits.seconds:
            raise _TimeEndedError
        raced = dict(self._race(heat, rounds, self._start))
        self._start += 1
        self._tried.update(heat)
        plain = raced.pop((), None)
        self._plain_bytes = plain.memory_bytes if plain is not None else self._plain_bytes
        return {one: found for one, found in raced.items() if found.log_speedups}

    def _with_predicted(self, field: list[Combination], seen: Mapping[Combination, Raced]) -> list[Combination]:
        """The survivors of the singles and pairs, and as many of the others as one heat holds, those first that should
        be the fastest by what singles and pairs showed."""
        log_speedups = {one: _median(raced) for one, raced in seen.items()}
        others = [one for one in _valid(self._names, self._fits) if one not in seen]
        others.sort(key=lambda one: -predicted(one, log_speedups))
        return [*field, *others[: self._limits.heat]]

    # --------------------------------------------------------------------------------------------------- the last ones

    def _finish(self, field: Sequence[Combination]) -> None:
        """Full rounds for the last ones, and then for the best with one setting less, until no setting is left to
        doubt."""
        wanted = list(field)
        while wanted:
            for _ in range(FINAL_STARTS):
                for one, raced in self._heat(wanted, FINAL_ROUNDS).items():
                    self._final.setdefault(one, []).append(raced)
            best = self._ranking()
            if not best:
                return
            settings = best[0].settings
            missing = [one for one in self._neighbours(settings) if one not in self._final]
            wanted = [settings, *missing] if missing else []

    def _neighbours(self, settings: Combination) -> list[Combination]:
        """What is left of a combination without one of its settings, and what it becomes with one that was no slower
        alone, the most promising first."""
        fewer = [tuple(name for name in settings if name != less) for less in settings if len(settings) > 1]
        gains = sorted((name for name, speedup in self._alone.items() if speedup > 1), key=lambda n: -self._alone[n])
        more = [tuple(n for n in self._names if n in (*settings, name)) for name in gains if name not in settings]
        return [*fewer, *[one for one in more if self._fits(one)][:_MOST_ADDED]]

    def _ranking(self) -> tuple[Ranked, ...]:
        """By the last rounds alone: the earlier ones chose who is here, so they flatter them."""
        speed = {one: _mean_of_starts(starts) for one, starts in self._final.items()}
        memory = {one: max(raced.memory_bytes for raced in starts) for one, starts in self._final.items()}
        good = [one for one in speed if self._is_worth_it(one, speed[one], memory[one])]
        left, ordered = sorted(good, key=lambda one: -speed[one]), []
        while left:
            alike = [one for one in left if self._as_fast(one, left[0], speed)]
            taken = min(alike, key=lambda one: _order_of_alike(one, alike, memory, speed))
            ordered.append(Ranked(settings=taken, speedup=math.exp(speed[taken]), memory_bytes=memory[taken]))
            left.remove(taken)
        return tuple(ordered)

    def _is_worth_it(self, one: Combination, speed: float, memory_bytes: int) -> bool:
        """Faster by more than a ratio is resolved to, and in every start (of more than three, in two thirds); or as
        fast with less memory."""
        starts = [_median(raced) for raced in self._final[one]]
        if speed > math.log1p(RESOLUTION) and sorted(starts)[(len(starts) - 1) // 3] > 0:
            return True
        return speed >= -SAME and bool(self._plain_bytes) and memory_bytes * SAME_MEMORY < self._plain_bytes

    def _as_fast(self, one: Combination, leader: Combination, speed: Mapping[Combination, float]) -> bool:
        return speed[leader] - speed[one] <= SAME


def predicted(one: Combination, log_speedups: Mapping[Combination, float]) -> float:
    """The logarithm of the speedup that singles and pairs let expect: the sum of those of its settings, and of what
    each pair showed beyond its two settings, as far as that is more than noise. What was not measured counts
    nothing."""
    total = sum(log_speedups.get((name,), 0.0) for name in one)
    for pair in subsets(one, 2):
        if pair in log_speedups:
            beyond = log_speedups[pair] - sum(log_speedups.get((name,), 0.0) for name in pair)
            total += math.copysign(max(0.0, abs(beyond) - _PAIR_NOISE), beyond)
    return total


def _order_of_alike(
    one: Combination,
    alike: Sequence[Combination],
    memory: Mapping[Combination, int],
    speed: Mapping[Combination, float],
) -> tuple[bool, int, float]:
    """Of those that are as fast: the least memory, as far as that is distinguished; then fewer settings; then speed."""
    least = min(memory[other] for other in alike)
    return memory[one] > least * SAME_MEMORY, len(one), -speed[one]


def _survivors(field: Sequence[Combination], seen: Mapping[Combination, Raced]) -> list[Combination]:
    """The faster half, and those of the slower half that are not shown to be slower than the leader; at most three
    quarters. `field` has the fastest first."""
    half = max(1, math.ceil(len(field) / 2))
    doubtful = [one for one in field[half:] if not shown_slower(seen[one], seen[field[0]])]
    return [*field[:half], *doubtful][: max(half, math.floor(_KEPT * len(field)))]


def shown_slower(one: Raced, leader: Raced) -> bool:
    """True when a signed-rank test over the pairs of rounds says so: both are quotients to the plain model of their
    round, so what slowed a whole round has cancelled."""
    from scipy.stats import wilcoxon

    rounds = min(len(one.log_speedups), len(leader.log_speedups))
    apart = np.array(leader.log_speedups[:rounds]) - np.array(one.log_speedups[:rounds])
    if not rounds or not np.any(apart):
        return False
    return float(wilcoxon(apart, alternative="greater").pvalue) <= SLOWER


def _fastest_first(seen: Mapping[Combination, Raced]) -> list[Combination]:
    """Of equals, the one with fewer settings first."""
    return sorted(seen, key=lambda one: (-_median(seen[one]), len(one), one))


def _median(raced: Raced) -> float:
    return float(np.median(raced.log_speedups))


def _mean_of_starts(starts: Sequence[Raced]) -> float:
    """The median over the starts of their medians: a start that a neighbour's work hit does not count."""
    return float(np.median([_median(raced) for raced in starts]))
