"""How long the turns of one batch size are, and when its rounds end.

A speedup needs several rounds more than it needs long turns: of one round nothing is known of the next, however many
calls it has. On a busy machine calls take ten times as long as in a warm-up that nothing disturbed, and a slow original
fills a round by itself. So turns are shortened until enough rounds fit into the time, and where they still don't, or
tell nothing, the rounds go on beyond it, within a bound. The rules look at times, numbers of rounds and the width of
intervals only, never at who is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compile_stage.measure.participant import Turn
from compile_stage.measure.timing import LONGEST_TURN_S, MIN_ROUNDS, TURN_S

PAIR = 2
"""Rounds that are always measured: of one alone the interval is 0 to infinity."""

WANTED = 2 * MIN_ROUNDS
"""Rounds that should fit into the time. Where they don't, turns are shortened."""

OVERTIME = 3.0
"""Times the given time that rounds may take, until there are `MIN_ROUNDS` of them and each speedup is known to a factor
of two."""

SHORTEST_TURN_S = TURN_S / 4
"""A turn is not cut below this, but where it holds a single call: what is around it (inputs, messages, rest) takes
about twice as long, so that less would bring hardly more rounds."""

TRIAL_TURN_S = 2 * TURN_S
"""The first round's turns end after so long: on a machine that is busy they would take ten times as long as the warm-up
said, and that round shows it."""

_WORTH = 2 / 3  # shorter turns must bring a round down to this share: the rounds before are thrown away for it
_MOST_CHANGES = 2


@dataclass
class Pace:
    """The time of one batch size, shared among its rounds.

    Attributes:
        seconds: That the rounds may take.
        began_s: When they began (`time.monotonic`).
        min_calls: So many calls of each participant are wanted in all rounds together.
        overtime: Times `seconds` that they may take in the end.
    """

    seconds: float
    began_s: float
    min_calls: int = 0
    overtime: float = OVERTIME
    _changes: int = 0

    def is_over(self, rounds: int, now_s: float, known: Callable[[], bool]) -> bool:
        """True when so many rounds have to do. Never before a pair.

        Args:
            known: Whether the speedups are known to a factor of two (`timing.roughly_known`). Asked when the time is
                spent.
        """
        spent_s = now_s - self.began_s
        if rounds < PAIR or spent_s <= self.seconds:
            return False
        return spent_s > self.overtime * self.seconds or (rounds >= MIN_ROUNDS and known())

    def overtime_s(self, now_s: float) -> float:
        """By how much the rounds took longer than they were given."""
        return max(0.0, now_s - self.began_s - self.seconds) if math.isfinite(self.seconds) else 0.0

    def longest_turn_s(self, rounds: int) -> float:
        """When the turns of the next round end, after so many rounds."""
        return TRIAL_TURN_S if rounds == self._changes == 0 else LONGEST_TURN_S

    def shorter_turns(
        self, calls: Mapping[str, int], last: Mapping[str, Turn], rounds: int, now_s: float
    ) -> dict[str, int]:
        """Calls of a turn of each participant, where the turns must become shorter; empty where they stay.

        All turns of a participant must have as many calls (`timing.calls_of_a_turn`), so the rounds that were measured
        with longer ones don't count; that is why this is only done early, twice at most, and where it gains a third.

        Args:
            calls: Of each participant's turns as they are now.
            last: The turns of the last round.
            rounds: That were measured.
        """
        around_s = sum(turn.took_s - sum(turn.latency_s) for turn in last.values())
        round_s = around_s + sum(min(calls[name] * _latency_s(turn), LONGEST_TURN_S) for name, turn in last.items())
        left_s = self.seconds - (now_s - self.began_s)
        if rounds >= MIN_ROUNDS or self._changes >= _MOST_CHANGES or round_s * (WANTED - rounds) <= left_s:
            return {}
        turn_s = (max(left_s, 0.0) / WANTED - around_s) / max(1, len(last))
        shorter = {
            name: _calls(calls[name], turn, min(max(turn_s, SHORTEST_TURN_S), TURN_S), self._fewest)
            for name, turn in last.items()
        }
        planned_s = around_s + sum(shorter[name] * _latency_s(turn) for name, turn in last.items())
        if planned_s > _WORTH * round_s:
            return {}
        self._changes += 1
        return shorter

    @property
    def _fewest(self) -> int:
        """Calls of a turn by which `min_calls` are reached in the wanted rounds."""
        return max(1, math.ceil(self.min_calls / WANTED))


def _calls(now: int, turn: Turn, turn_s: float, fewest: int) -> int:
    latency_s = _latency_s(turn)
    fitting = round(turn_s / latency_s) if latency_s > 0 else now
    return min(now, max(fewest, fitting))


def _latency_s(turn: Turn) -> float:
    """Seconds of a call as it is now, disturbed or not: the mean, since that is what fills a turn."""
    return sum(turn.latency_s) / len(turn.latency_s)
