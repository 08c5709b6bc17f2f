"""Searches for mixed precision on simulated samples (`benchmarks/simulations.py`): how often what they find loses more
than the limit.

The stage's own search (`measure.search`) among 40 nodes, the stage's own bounds of the accuracy. Each node adds normal
noise to the margin by which a sample is answered rightly; their powers are lognormal, and add up. So answers change
for better and worse, and trials that keep nearly the same nodes change nearly the same answers. The true loss of a set
is known: the original is right in 90 %, and margins are normal.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
from scipy.stats import norm

from compile_stage.core.records import Check, Gate, Outcome, Trial
from compile_stage.measure import search as searching
from compile_stage.measure.gates import holds
from compile_stage.measure.proportions import drop_interval

NODES, EVALUATIONS, MARGIN = 40, 24, float(norm.ppf(0.9))
GATE = Gate(metric="accuracy", limit=0.01, direction="at_most", confidence=0.95, options={"drop": "max_drop"})


class Network:
    """One model with its samples. `powers` are ranked nearly as they are: by a guess that is off by 30 %."""

    def __init__(self, samples: int, loses: float, generator: np.random.Generator) -> None:
        powers = np.exp(1.2 * generator.standard_normal(NODES))
        powers *= ((MARGIN / norm.ppf(0.9 - loses)) ** 2 - 1) / powers.sum()
        self.powers = powers[np.argsort(-powers * np.exp(0.3 * generator.standard_normal(NODES)))]
        self._margins = MARGIN + generator.standard_normal(samples)
        self._noise = generator.standard_normal((samples, NODES)) * np.sqrt(self.powers)

    def trial(self, kept: tuple[str, ...], float_type: str) -> Trial:
        """What the samples say of a set of kept nodes, which costs 2 % of the latency a node."""
        rounded = np.setdiff1d(np.arange(NODES), [int(node) for node in kept])
        own = self._margins + self._noise[:, rounded].sum(axis=1)
        lost, gained = (int(np.sum((a > 0) & (b <= 0))) for a, b in ((self._margins, own), (own, self._margins)))
        drop = drop_interval(lost, gained, len(own))
        passed = holds(GATE, drop.value, (drop.low, drop.high))
        check = Check(
            gate=GATE, outcome=Outcome.PASS if passed else Outcome.FAIL, measured=drop.value, reason="",
            interval=(drop.low, drop.high),
        )  # fmt: skip
        latency_s = 1 + 0.02 * len(kept)
        return Trial(kept=kept, float_type=float_type, passed=passed, decisive=check, latency_s=latency_s)

    def loss(self, kept: Sequence[str]) -> float:
        """The true one."""
        left = self.powers.sum() - self.powers[[int(node) for node in kept]].sum()
        return float(0.9 - norm.cdf(MARGIN / np.sqrt(1 + left)))


def searches_cell(samples: int, loses: float, trials: int, *, going_on: bool) -> dict[str, float]:
    """How often a search finds a set, and one that loses more than the limit; how many nodes it keeps, and trials.

    Args:
        loses: Of all nodes quantised.
        going_on: No miss ends the search, as until commit 21521d7.
    """
    generator = np.random.default_rng([samples, int(1000 * loses)])
    limits = searching.Limits(evaluations=EVALUATIONS, seconds=float("inf"))
    names = tuple(map(str, range(NODES)))
    found, bad, kept, made = 0, 0, list[int](), list[int]()
    with patch.object(searching, "is_open", lambda _: False) if going_on else nullcontext():
        for _ in range(trials):
            network = Network(samples, loses, generator)
            outcome = searching.search(names, network.trial, limits)
            made.append(len(outcome.trials))
            if outcome.best is not None:
                found += 1
                bad += network.loss(outcome.best.kept) > GATE.limit
                kept.append(len(outcome.best.kept))
    mean = float(np.mean(kept)) if kept else 0.0
    return {"bad": bad / trials, "found": found / trials, "kept": mean, "trials": float(np.mean(made))}
