"""The rounds of one batch size as they were measured: which of them decide, and what a participant's turns show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from compile_stage.core.records import Timing
from compile_stage.measure import speedups, stats, timing
from compile_stage.measure.participant import Turn, latencies

FIRST_LOOK = 2
"""Rounds: a shuffled order and its mirror image."""

Round: TypeAlias = dict[str, Turn]
"""Participant → its turn."""


@dataclass
class MeasuredRounds:
    """The rounds of one batch size, in order, so that who left them early was in the first of any of them.

    Attributes:
        quiet: Of each round, whether other processes left us the cores.
        all_count: Somebody left by disturbed rounds, so that these go on counting.
    """

    rounds: list[Round] = field(default_factory=list)
    quiet: list[bool] = field(default_factory=list)
    all_count: bool = False

    @property
    def clean(self) -> list[Round]:
        """The undisturbed rounds."""
        return [turns for turns, quiet in zip(self.rounds, self.quiet, strict=True) if quiet]

    @property
    def disturbed(self) -> int:
        return len(self.rounds) - sum(self.quiet)

    @property
    def deciding(self) -> list[Round]:
        """The undisturbed rounds, where there are enough of them; else all."""
        clean = self.clean
        return clean if len(clean) >= timing.MIN_ROUNDS and not self.all_count else self.rounds

    @property
    def dropped(self) -> int:
        """Disturbed rounds that don't count."""
        return len(self.rounds) - len(self.deciding)


def first_look(measured: MeasuredRounds, *, late: bool) -> list[Round]:
    """The rounds that say who is far slower: a first pair of undisturbed ones, else a few of any kind; empty while
    there are too few."""
    clean, rounds = measured.clean, measured.rounds
    if len(clean) == FIRST_LOOK:
        return clean
    return rounds if len(rounds) == timing.MIN_ROUNDS or (late and len(rounds) >= FIRST_LOOK) else []


def timing_of(turns: Sequence[Turn], batch_size: int, environment: str, new_tokens: int) -> Timing:
    """What a participant's turns show, without a ratio.

    Args:
        environment: The machine's fingerprint.
        new_tokens: That each call writes, of a language model.
    """
    own = latencies(turns)
    timed = Timing(
        latency_s=tuple(value for turn in own for value in turn),
        batch_size=batch_size,
        environment=environment,
        rounds=len(own),
        turns=tuple(len(turn) for turn in own),
        cpu_s=tuple(turn.cpu_s for turn in turns),
        threads=round(stats.median([float(turn.threads) for turn in turns])),
        stable=True,
    )
    if first_s := tuple(value for turn in turns for value in turn.first_s):
        timed = replace(timed, first_s=first_s, new_tokens=new_tokens)
    return timed


def with_ratio(timed: Timing, ratio: stats.Interval) -> Timing:
    """The timing with its ratio to the baseline's."""
    stable = speedups.is_within(ratio, speedups.UNSTABLE)
    return replace(timed, stable=stable, speedup=ratio.value, speedup_interval=(ratio.low, ratio.high))
