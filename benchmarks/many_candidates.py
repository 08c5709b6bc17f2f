"""Several candidates, judged by the same simulated samples (`benchmarks/simulations.py`): how often what is published
loses more than the limit, by the confidence of each candidate and by that of the winner (`select.confidence_of`).

The stage's own bounds of the accuracy, with a limit of one point at 0.95.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from compile_stage.core.records import Gate
from compile_stage.measure.gates import holds
from compile_stage.measure.proportions import drop_interval
from compile_stage.pipeline.many_candidates import at_confidence_over

GATE = Gate(metric="accuracy", limit=0.01, direction="at_most", confidence=0.95, options={"drop": "max_drop"})


@cache
def passes(lost: int, gained: int, samples: int, tries: int) -> bool:
    """By the bounds at what is left of the confidence for one of so many tries."""
    (gate,) = at_confidence_over((GATE,), tries)
    drop = drop_interval(lost, gained, samples, gate.confidence or 0.0)
    return holds(gate, drop.value, (drop.low, drop.high))


def winner_of(lost: Sequence[int], gained: Sequence[int], samples: int, *, of_winner: bool) -> int | None:
    """The place of the first candidate that passes; None where none does."""
    own = list(zip(lost, gained, strict=True))
    left = [place for place, one in enumerate(own) if passes(*one, samples, 1)]
    if not of_winner:
        return left[0] if left else None
    tries = 1 + sum(place not in left and holds(GATE, (a - b) / samples) for place, (a, b) in enumerate(own))
    for place in left:
        if passes(*own[place], samples, tries):
            return place
        tries += 1
    return None


def changed(
    loses: np.ndarray, gains: np.ndarray, alike: float, samples: int, generator: np.random.Generator
) -> list[list[int]]:
    """`[candidates]` answers that are lost, and gained. Of the answers, the share `alike` has one fate for all."""
    shape = (samples, len(loses))
    fate = np.where(generator.random(shape) < alike, generator.random((samples, 1)), generator.random(shape))
    return [(fate < loses).sum(axis=0).tolist(), (fate > 1 - gains).sum(axis=0).tolist()]


def published_cell(count: int, samples: int, loses: float, alike: float, trials: int) -> dict[str, float]:
    """How often at least one of so many candidates passes, all of which lose that share of right answers: the fastest
    of those that passed is published, so a bad one is."""
    generator = np.random.default_rng([count, samples, int(loses * 1e4), int(10 * alike)])
    alone, beside = 0, 0
    for _ in range(trials):
        lost, gained = changed(np.full(count, loses), np.zeros(count), alike, samples, generator)
        alone += winner_of(lost, gained, samples, of_winner=False) is not None
        beside += winner_of(lost, gained, samples, of_winner=True) is not None
    return {"published": alone / trials, "winner_published": beside / trials}


def mixed_cell(count: int, samples: int, trials: int) -> dict[str, float]:
    """How often the first of those that pass holds the limit, and how often it loses more: the candidates come in the
    order of their speed, which says nothing of what they lose."""
    generator = np.random.default_rng([count, samples])
    least, most = np.array([0.0, 0.003, 0.01, 0.03]), np.array([0.003, 0.01, 0.03, 0.2])
    found = dict.fromkeys(("good", "bad", "winner_good", "winner_bad"), 0)
    for _ in range(trials):
        kind = generator.choice(4, count, p=[0.5, 0.2, 0.15, 0.15])
        loses, gains = generator.uniform(least[kind], most[kind]), generator.uniform(0, 0.003, count)
        lost, gained = changed(loses + gains, gains, 0.5, samples, generator)
        for which in ("", "winner_"):
            place = winner_of(lost, gained, samples, of_winner=bool(which))
            if place is not None:
                found[f"{which}{'bad' if loses[place] > GATE.limit else 'good'}"] += 1
    return {name: number / trials for name, number in found.items()}
