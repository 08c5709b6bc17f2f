"""Latency round by round, and whether it drifted while it was measured."""

from __future__ import annotations

import statistics
from itertools import accumulate, pairwise

from compile_stage.core.records import Timing, record

FEWEST = 6
"""Rounds below which a drift is not looked for: two medians of a round or two differ by chance."""

DRIFT = 0.1
"""A change of the median by more than this share is called a drift: no wider than what makes a ratio unstable."""


@record
class Rounds:
    """One participant of a measurement.

    Attributes:
        medians_s: Of each round, in seconds, in order.
        processes: Of each round, which start of the process it belongs to.
        drift: Median of the last third of the rounds over that of the first, minus 1; None with fewer than `FEWEST`.
    """

    label: str
    state: str
    medians_s: tuple[float, ...]
    processes: tuple[int, ...]
    drift: float | None

    @property
    def drifted(self) -> bool:
        """The change is more than `DRIFT`."""
        return self.drift is not None and abs(self.drift) > DRIFT


def rounds_of(label: str, state: str, timing: Timing) -> Rounds | None:
    """The rounds of a timing; None where it is not known which call belongs to which."""
    if not timing.turns or sum(timing.turns) != len(timing.latency_s):
        return None
    ends = list(accumulate(timing.turns, initial=0))
    medians = tuple(statistics.median(timing.latency_s[a:b]) for a, b in pairwise(ends) if b > a)
    third = len(medians) // 3
    drift = None
    if len(medians) >= FEWEST:
        drift = statistics.median(medians[-third:]) / statistics.median(medians[:third]) - 1
    processes = timing.processes if len(timing.processes) == len(medians) else (0,) * len(medians)
    return Rounds(label=label, state=state, medians_s=medians, processes=processes, drift=drift)
