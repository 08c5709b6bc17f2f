"""Is the best of several candidates believed too much? The winner's figure, its interval and its gate, simulated.

    python benchmarks/selection.py --save              # some minutes on two cores
    python benchmarks/selection.py --trials 40         # a look

Seeded: the same figures on every machine. All candidates are equally fast, and the simpler one comes first. They and
the original are started three times, with the noise of `benchmarks/simulations.py` (rounds that wander by 2 %,
processes that differ), until all outlast the memory of their rounds. Two kinds are added: `waves` of 10 % with a period
of 5 to 50 turns, which hit whoever has his turn then, and `uneven`: of every other candidate all processes are alike.

The stage's own functions put the starts together, judge the gate and choose the winner. Asked is, of the shares of
simulated measurements:

- **bias**: by how much the figure of the winner is above the truth on average, and that of the fastest candidate, which
  would win without ties.
- **held**: does the winner's 95 % interval hold the truth?
- **slower passes**: all candidates are 3 % slower than `min_speedup` asks for. Does any of them win?
- **faster passes**: all are 10 % faster than it asks for. Does any of them win?

Each with three ways to know the winner's speed:

- `alone`: the interval of each candidate by itself, as until commit c17ed4a;
- `now`: that of all candidates at once (`measure.simultaneous_intervals`);
- `again`: `alone`, and the winner and the original are started three times more, for the figure and the gate; who fails
  then is out, and the next is called. It takes three more starts of two models.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402
from simulations import CALL_NOISE, CALLS, GAP, LATENCY_S, MOST_ROUNDS, SLOWER, SPEEDUP, WANDERS, wander  # noqa: E402

from compile_stage.core.records import (  # noqa: E402
    Artifact,
    Candidate,
    Job,
    Measurement,
    Outcome,
    Scheme,
    Target,
    TargetPolicy,
    Timing,
    Verdict,
)
from compile_stage.core.records.verdict import Check  # noqa: E402
from compile_stage.core.tensors import Signature  # noqa: E402
from compile_stage.measure import speedups  # noqa: E402
from compile_stage.measure.restarts import merge  # noqa: E402
from compile_stage.measure.timing import MIN_ROUNDS  # noqa: E402
from compile_stage.steps.judge import judge_performance  # noqa: E402
from compile_stage.steps.select import select  # noqa: E402

COUNTS = (1, 2, 5, 12)
FASTER = 1.10
WAYS = ("alone", "now", "again")
BASELINE = "baseline"
NO_LIMIT = replace(SPEEDUP, limit=0.0)
TODAY = date(2026, 1, 1)


@dataclass(frozen=True)
class Noise:
    """A machine.

    Attributes:
        memory: Autocorrelation of rounds.
        spread: By how much processes of one model differ.
        waves: Height of slow waves over the turns.
        uneven: Processes of every other candidate don't differ.
    """

    name: str
    memory: float
    spread: float
    waves: float = 0.0
    uneven: bool = False


NOISES = (
    Noise("wanders", 0.5, 0.0),
    Noise("processes 2 %", 0.5, 0.02),
    Noise("processes 4 %", 0.5, 0.04),
    Noise("long memory", 0.9, 0.02),
    Noise("waves", 0.0, 0.02, waves=0.1),
    Noise("uneven", 0.5, 0.04, uneven=True),
)

Starts = list[dict[str, Measurement]]


class Machine:
    """The original and some candidates, all of one speed on a machine at rest."""

    def __init__(self, noise: Noise, candidates: int, generator: np.random.Generator) -> None:
        self._noise, self._generator = noise, generator
        self._names = (BASELINE, *map(name_of, range(candidates)))
        self._spread = np.full(len(self._names), noise.spread)
        if noise.uneven:
            self._spread[2::2] = 0.0
        length = 2 * speedups.FEW_PROCESSES * (MOST_ROUNDS + GAP)
        self._slowed = WANDERS * np.array([wander(noise.memory, generator, length) for _ in self._names])
        self._period, self._phase = generator.uniform(5, 50), generator.uniform(0, 2 * math.pi)
        self._now = 0

    def starts(self, names: Sequence[str]) -> Starts:
        """Three starts of the original and these candidates, later than any before."""
        if self._now + speedups.FEW_PROCESSES * (MOST_ROUNDS + GAP) > self._slowed.shape[1]:
            self._now = 0
        places = [self._names.index(name) for name in (BASELINE, *names)]
        return [self._start(places) for _ in range(speedups.FEW_PROCESSES)]

    def _start(self, places: Sequence[int]) -> dict[str, Measurement]:
        born = self._spread[places] * self._generator.standard_normal(len(places))
        rounds: list[np.ndarray] = []
        while len(rounds) < MOST_ROUNDS and not self._enough(rounds):
            noise = np.abs(self._generator.normal(0, CALL_NOISE, (len(places), CALLS)))
            slowed = self._slowed[places, self._now] + born + self._waves(len(places))
            rounds.append(LATENCY_S * np.exp(slowed[:, None] + noise))
            self._now += 1
        self._now += GAP
        calls = np.array(rounds)
        return {self._names[place]: measurement(calls[:, index]) for index, place in enumerate(places)}

    def _waves(self, count: int) -> np.ndarray:
        turns = np.arange(count) if self._now % 2 == 0 else np.arange(count)[::-1]
        at = 2 * math.pi * (self._now * count + turns) / self._period + self._phase
        return np.asarray(self._noise.waves * np.sin(at))

    def _enough(self, rounds: Sequence[np.ndarray]) -> bool:
        if len(rounds) < MIN_ROUNDS or len(rounds) % 2:
            return False
        base, *others = ([turn[place].tolist() for turn in rounds] for place in range(len(rounds[0])))
        return all(speedups.outlast_memory(base, own) for own in others)


def name_of(number: int) -> str:
    """Of a candidate."""
    return f"c{number:02d}"


def measurement(calls: np.ndarray) -> Measurement:
    """Of one process: `[rounds, calls]` seconds."""
    timing = Timing(
        latency_s=tuple(calls.ravel().tolist()), batch_size=1, stable=True, environment="", rounds=len(calls),
        turns=(calls.shape[1],) * len(calls),
    )  # fmt: skip
    return Measurement(timings=(timing,), load_s=1.0, peak_memory_bytes=1)


def alone(merged: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """The measurements with the interval of each candidate by itself."""
    base = merged[BASELINE].timings[0]
    out = dict(merged)
    for name, measured in merged.items():
        if name == BASELINE:
            continue
        own = measured.timings[0]
        ratio = speedups.ratio_interval(
            speedups.by_round(base), speedups.by_round(own), seed=0, processes=own.processes
        )
        timing = replace(
            own, speedup_interval=(ratio.low, ratio.high), stable=speedups.is_within(ratio, speedups.UNSTABLE)
        )
        out[name] = replace(measured, timings=(timing,))
    return out


def times(measured: Mapping[str, Measurement], factor: float) -> dict[str, Measurement]:
    """As it would have been, were all candidates so many times as fast."""
    return {name: replace(m, timings=(_times(m.timings[0], factor),)) for name, m in measured.items()}


def _times(timing: Timing, factor: float) -> Timing:
    if timing.speedup is None or timing.speedup_interval is None:
        return timing
    low, high = timing.speedup_interval
    return replace(timing, speedup=timing.speedup * factor, speedup_interval=(low * factor, high * factor))


def judged(measured: Mapping[str, Measurement], limit: float) -> list[Candidate]:
    """The candidates, with `min_speedup` at that limit in their verdicts."""
    policy = _policy(len(measured) - 1, limit)
    candidates = [_candidate(name, m, policy) for name, m in measured.items() if name != BASELINE]
    return [judge_performance(candidate, policy, (), TODAY) for candidate in candidates]


def winner(measured: Mapping[str, Measurement], limit: float = 0.0) -> str | None:
    """Whom the stage chooses with `min_speedup` at that limit."""
    return select(judged(measured, limit), _policy(len(measured) - 1, limit)).winner


def has_winner(measured: Mapping[str, Measurement], factor: float) -> bool:
    """Whether any passes `min_speedup: 1.0`, were all so many times as fast."""
    return any(candidate.has_passed for candidate in judged(times(measured, factor), 1.0))


def _policy(candidates: int, limit: float) -> TargetPolicy:
    target = Target(name="cpu", backends=tuple(map(name_of, range(candidates))))
    return TargetPolicy(target=target, tolerances={}, performance=(replace(SPEEDUP, limit=limit),))


def _candidate(name: str, measured: Measurement, policy: TargetPolicy) -> Candidate:
    scheme = Scheme(precision="fp32", name="fp32", native=True)
    job = Job(id=name, source="", target=policy.target, backend=name, scheme=scheme, gates=())
    compiled = Artifact(
        path="", entry="", digest="", job_id=name, backend=name, precision="fp32", toolchain={}, hardware="",
        signature=Signature(inputs=(), outputs=()), size_bytes=1,
    )  # fmt: skip
    holds = Check(gate=NO_LIMIT, outcome=Outcome.PASS, measured=1.0, reason="")
    candidate = Candidate(job=job, artifact=compiled, measurement=measured, verdict=Verdict(checks=(holds,)))
    return candidate.in_state("passed", "every tolerance holds")


def winner_again(machine: Machine, measured: Mapping[str, Measurement], factor: float) -> bool:
    """Whether anybody who wins holds the limit in fresh processes too."""
    left = dict(times(measured, factor))
    while has_winner(left, 1.0):
        name = winner(left, 1.0)
        assert name is not None
        if has_winner(alone(merge(machine.starts([name]), BASELINE, seed=0)), factor):
            return True
        del left[name]
    return False


def trials_of(noise: Noise, count: int, trials: int) -> Iterator[dict[str, float]]:
    """What is asked, of each simulated measurement."""
    generator = np.random.default_rng([NOISES.index(noise), count])
    for trial in range(trials):
        machine = Machine(noise, count, generator)
        merged = merge(machine.starts([name_of(number) for number in range(count)]), BASELINE, seed=trial)
        by_itself = alone(merged)
        first = winner(merged)  # by latencies, so that it does not matter which intervals these have
        assert first is not None
        fresh = alone(merge(machine.starts([first]), BASELINE, seed=trial))
        found: dict[str, float] = {
            "fastest_bias": max(m.timings[0].speedup or 0.0 for n, m in merged.items() if n != BASELINE) - 1
        }
        for way, measured in (("alone", by_itself), ("now", merged), ("again", fresh)):
            found |= {f"{way}_{key}": value for key, value in figures(measured[first]).items()}
        for way, measured in (("alone", by_itself), ("now", merged)):
            found[f"{way}_slower"] = float(has_winner(measured, 1 / SLOWER))
            found[f"{way}_faster"] = float(has_winner(measured, FASTER))
        found["again_slower"] = float(winner_again(machine, by_itself, 1 / SLOWER))
        found["again_faster"] = float(winner_again(machine, by_itself, FASTER))
        yield found


def figures(measured: Measurement) -> dict[str, float]:
    """Of the winner."""
    timing = measured.timings[0]
    assert timing.speedup is not None
    assert timing.speedup_interval is not None
    low, high = timing.speedup_interval
    return {
        "bias": timing.speedup - 1,
        "held": float(low <= 1 <= high),
        "unstable": float(not timing.stable),
        "half_width": (high - low) / 2,
    }


def cell(noise: Noise, count: int, trials: int) -> dict[str, float]:
    """Means over the trials; of half widths the median."""
    found = list(trials_of(noise, count, trials))
    return {
        key: float((np.median if key.endswith("half_width") else np.mean)([each[key] for each in found]))
        for key in found[0]
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows, and save them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400, help="simulated measurements of a cell")
    results.add_save_option(parser)
    options = parser.parse_args(arguments)
    with results.recording("selection", options.save) as record:
        record.settings["trials"] = options.trials
        for noise in NOISES:
            for count in COUNTS:
                row: dict[str, Any] = {"noise": noise.name, "candidates": count} | cell(noise, count, options.trials)
                record.rows.append(row)
                print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
                sys.stdout.flush()


if __name__ == "__main__":
    main()
