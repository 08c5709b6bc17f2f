"""How often the 95 % interval of a speedup holds the true one, on simulated machines.

    python benchmarks/coverage_of_intervals.py            # 400 simulated measurements a cell, some minutes on two cores
    python benchmarks/coverage_of_intervals.py 200        # the table of docs/measurement.md

Seeded: the same table on every machine. The true speedup is 5; a participant has the
turns that the stage gives it (`calls_of_a_turn`). Only the noise differs:

- quiet: 0.3 % from round to round, 0.4 % from turn to turn.
- shared: whole rounds 20 % up and down, 2 % from turn to turn.
- disturbed: one turn in ten is slowed by a factor of e on average, others' work beside one participant.
- waves: 30 % up and down with a period of 3 to 12 turns, so that it hits whoever has his turn then.
- own drift: each participant wanders by 5 % by itself, and 70 % of that stays for the next round.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from compile_stage.measure.speedups import ratio_interval
from compile_stage.measure.timing import LONGEST_TURN_S, calls_of_a_turn

NOISE = ("quiet", "shared", "disturbed", "waves", "own drift")
ROUNDS = (6, 12, 30, 60)
LATENCY_S = (0.005, 0.001)
"""Of the baseline and the candidate, on a machine without noise."""


def log_slowdowns(noise: str, rounds: int, generator: np.random.Generator) -> np.ndarray:
    """`[2, rounds]`: by what the two participants' turns are slowed."""
    shape = (2, rounds)
    if noise == "quiet":
        return generator.normal(0, 0.003, rounds) + generator.normal(0, 0.004, shape)
    if noise == "shared":
        return generator.normal(0, 0.2, rounds) + generator.normal(0, 0.02, shape)
    if noise == "disturbed":
        hit = np.where(generator.random(shape) < 0.1, abs(generator.normal(0, 1, shape)), 0)
        return generator.normal(0, 0.05, rounds) + generator.normal(0, 0.02, shape) + hit
    if noise == "waves":
        period, phase = generator.uniform(3, 12), generator.uniform(0, 2 * math.pi)
        turns = 0.3 * np.sin(2 * math.pi * np.arange(2 * rounds) / period + phase)
        slowed = turns.reshape(rounds, 2)
        slowed[1::2] = slowed[1::2, ::-1]  # mirrored pairs of rounds
        return slowed.T + generator.normal(0, 0.01, shape)
    stays, slowed = 0.7, np.empty(shape)
    now = generator.normal(0, 0.05, 2)
    for number in range(rounds):
        slowed[:, number] = now
        now = stays * now + math.sqrt(1 - stays**2) * generator.normal(0, 0.05, 2)
    return slowed


def simulate(noise: str, rounds: int, generator: np.random.Generator) -> list[list[list[float]]]:
    """Seconds per call of both participants, by round."""
    slowed, measured = log_slowdowns(noise, rounds, generator), []
    for latency_s, own in zip(LATENCY_S, slowed, strict=True):
        turns = []
        for log_slowdown in own:
            call_s = latency_s * math.exp(log_slowdown)
            calls = max(1, min(calls_of_a_turn(latency_s), int(LONGEST_TURN_S / call_s) + 1))
            turns.append((call_s * np.exp(abs(generator.normal(0, 0.03, calls)))).tolist())
        measured.append(turns)
    return measured


def coverage(noise: str, rounds: int, trials: int) -> tuple[float, float]:
    """The share of intervals that hold the true speedup, and the median of their half widths, relative to it."""
    generator = np.random.default_rng([NOISE.index(noise), rounds])
    truth, held, widths = LATENCY_S[0] / LATENCY_S[1], 0, []
    for trial in range(trials):
        ratio = ratio_interval(*simulate(noise, rounds, generator), seed=trial)
        held += ratio.low <= truth <= ratio.high
        widths.append((ratio.high - ratio.low) / 2 / truth)
    return held / trials, float(np.median(widths))


def main(trials: int) -> None:
    """Print the table."""
    print("| noise | " + " | ".join(f"{rounds} rounds" for rounds in ROUNDS) + " |")
    print("|---" * (len(ROUNDS) + 1) + "|")
    for noise in NOISE:
        cells = []
        for rounds in ROUNDS:
            share, half_width = coverage(noise, rounds, trials)
            cells.append(f"{share:.0%} (±{half_width:.1%})")
        print(f"| {noise} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
