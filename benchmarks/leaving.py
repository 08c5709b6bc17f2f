"""Is anything lost where candidates leave the rounds that are behind beyond doubt (decision 0093)? Simulated.

    python benchmarks/leaving.py --save                # some minutes on two cores
    python benchmarks/leaving.py --trials 40           # a look

Seeded: the same figures on every machine. Six candidates take 3, 1.6, 1.3, 1.12, 1.03 and 1 times as long as the
fastest, which is twice as fast as the original; the slower counts as the simpler. They run on the machines of
`benchmarks/selection.py` and on two more: `bursts`, which make one turn in ten take up to three times as long, some in
a row; and one on which 40 % of the original's turns take 10 to 100 times as long, as those of a framework do whose
threads wait for each other beside others' work. The stage's own functions say who leaves, who is started again, put the
starts together and choose the winner.
Each simulated measurement is made twice on the same machine: all stay to the end of the first start's rounds
(`before`), and who is behind beyond doubt leaves (`now`).

- **none**: no winner, since no speedup is known well enough for `min_speedup: 1`; not counted in what follows.
- **wrong**: the winner is more than 5 % slower than the fastest. One that is 3 % slower mostly ties, and is simpler.
- **slower by**: what the winner lacks of the fastest's speed, on average.
- **held**: the 95 % intervals that hold the true speedup: the winner's, and those of candidates that left.
- **turns**: of all participants in the first start; **left**, how many candidates did, and **near left**, how many of
  these would be started again by the truth.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402
from selection import BASELINE, NOISES, Machine, Noise, measurement, name_of, winner  # noqa: E402
from simulations import CALL_NOISE, CALLS, GAP, LATENCY_S, MOST_ROUNDS, SPEEDUP  # noqa: E402

from compile_stage.core.records import Measurement  # noqa: E402
from compile_stage.measure import speedups  # noqa: E402
from compile_stage.measure.leaving import gates_hold, leaving, one_process  # noqa: E402
from compile_stage.measure.restarts import CONTENDER, contenders, merge  # noqa: E402
from compile_stage.measure.timing import MIN_ROUNDS  # noqa: E402

TIMES = (3.0, 1.6, 1.3, 1.12, 1.03, 1.0)
WRONG = 1.05
FASTEST = 2.0
BURSTS = Noise("bursts", 0.5, 0.02)
STALLS = Noise("the original stalls", 0.5, 0.02)
_BURST, _LASTS, _SLOWER = 0.03, 4, 3.0
_STALL, _STALLED = 0.4, (10.0, 100.0)


@dataclass
class Found:
    """One simulated measurement."""

    merged: dict[str, Measurement]
    left: tuple[str, ...]
    turns: int


class Unequal(Machine):
    """The original, and candidates of different speeds."""

    def __init__(self, noise: Noise, generator: np.random.Generator) -> None:
        super().__init__(noise, len(TIMES), generator)
        self._times = np.log([FASTEST, *TIMES])  # of the fastest candidate's latency

    def measure(self, *, may_leave: bool) -> Found:
        """Everybody once, and those who may win twice more."""
        first, left, turns = self._play(list(self._names), may_leave=may_leave)
        again = [BASELINE, *contenders(first, BASELINE)]
        starts = [first, *(self._play(again, may_leave=False)[0] for _ in range(speedups.FEW_PROCESSES - 1))]
        return Found(merge(starts, BASELINE, seed=0), left, turns)

    def _play(self, names: Sequence[str], *, may_leave: bool) -> tuple[dict[str, Measurement], tuple[str, ...], int]:
        places = [self._names.index(name) for name in names]
        born = dict(zip(names, self._spread[places] * self._generator.standard_normal(len(places)), strict=True))
        rounds: dict[str, list[np.ndarray]] = {name: [] for name in names}
        here, left, turns = list(names), [], 0
        while len(rounds[BASELINE]) < MOST_ROUNDS and not self._known([rounds[name] for name in here]):
            turns += len(here)
            for name, calls in zip(here, self._round(here, born), strict=True):
                rounds[name].append(calls)
            done = len(rounds[BASELINE])
            if may_leave and done >= MIN_ROUNDS and done % 2 == 0:
                gone = self._leaving({name: [turn.tolist() for turn in rounds[name]] for name in here}, len(names) - 1)
                here, left = [name for name in here if name not in gone], [*left, *gone]
        self._now += GAP
        return {name: measurement(np.array(rounds[name])) for name in names}, tuple(left), turns

    def _round(self, here: Sequence[str], born: dict[str, float]) -> np.ndarray:
        places = [self._names.index(name) for name in here]
        noise = np.abs(self._generator.normal(0, CALL_NOISE, (len(here), CALLS)))
        slowed = self._slowed[places, self._now] + [born[name] for name in here] + self._waves(len(here))
        if self._noise is BURSTS:
            slowed = slowed + self._bursts(len(here))
        if self._noise is STALLS and BASELINE in here and self._generator.random() < _STALL:
            slowed[here.index(BASELINE)] += self._generator.uniform(*np.log(_STALLED))
        self._now += 1
        return np.asarray(LATENCY_S * np.exp((slowed + self._times[places])[:, None] + noise))

    def _bursts(self, count: int) -> np.ndarray:
        """Slowdowns that last some turns in a row."""
        slowed, left = np.zeros(count), 0
        for turn in range(count):
            if self._generator.random() < _BURST:
                left = int(self._generator.integers(1, _LASTS + 1))
                height = self._generator.uniform(0, math.log(_SLOWER))
            if left:
                slowed[turn], left = height, left - 1
        return slowed

    def _leaving(self, rounds: dict[str, list[list[float]]], candidates: int) -> list[str]:
        base = rounds.pop(BASELINE)

        def hold(name: str) -> bool | None:
            ratio = one_process(base, rounds[name], candidates, 0)
            known = measurement(np.array(rounds[name])).timings[0]
            known = replace(known, speedup=ratio.value, speedup_interval=(ratio.low, ratio.high))
            return gates_hold((SPEEDUP,), Measurement(timings=(known,), load_s=1.0, peak_memory_bytes=1), 1)

        return list(leaving(rounds, hold, candidates=candidates, seed=0))

    def _known(self, here: Sequence[list[np.ndarray]]) -> bool:
        base, *others = ([turn.tolist() for turn in rounds] for rounds in here)
        if len(base) < MIN_ROUNDS or len(base) % 2:
            return False
        return all(map(partial(speedups.outlast_memory, base), others))


def held(measured: Measurement, truth: float) -> float:
    """1 where the interval holds it."""
    interval = measured.timings[0].speedup_interval
    assert interval is not None
    return float(interval[0] <= truth <= interval[1])


def cell(noise: Noise, trials: int) -> dict[str, float]:
    """Shares and means over the trials."""
    generator = np.random.default_rng([93, len(noise.name)])
    rows: dict[str, list[float]] = {}
    for _ in range(trials):
        machine = Unequal(noise, generator)
        for way, found in (("before", machine.measure(may_leave=False)), ("now", machine.measure(may_leave=True))):
            first = winner(found.merged, 1.0)
            rows.setdefault(f"{way}_none", []).append(float(first is None))
            if first is None:
                continue
            times = dict(zip(map(name_of, range(len(TIMES))), TIMES, strict=True))
            rows.setdefault(f"{way}_wrong", []).append(float(times[first] > WRONG))
            rows.setdefault(f"{way}_slower_by", []).append(times[first] - 1)
            rows.setdefault(f"{way}_held", []).append(held(found.merged[first], FASTEST / times[first]))
            rows.setdefault(f"{way}_turns", []).append(found.turns)
            losers = found.left if way == "now" else [n for n, t in times.items() if t > 1.5]
            rows.setdefault(f"{way}_losers_held", []).extend(held(found.merged[n], FASTEST / times[n]) for n in losers)
            rows.setdefault(f"{way}_left", []).append(len(found.left))
            rows.setdefault(f"{way}_near_left", []).append(sum(times[n] < CONTENDER for n in found.left))
    return {key: float(np.mean(values)) for key, values in rows.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows, and save them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400, help="simulated measurements of a cell")
    results.add_save_option(parser)
    options = parser.parse_args(arguments)
    with results.recording("leaving", options.save) as record:
        record.settings["trials"] = options.trials
        for noise in (*NOISES, BURSTS, STALLS):
            row = {"noise": noise.name} | {key: round(value, 4) for key, value in cell(noise, options.trials).items()}
            record.rows.append(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
