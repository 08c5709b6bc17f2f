"""How often the statistics of a verdict hold what they say, on simulated machines and samples.

    python benchmarks/simulations.py --save                      # some minutes on two cores
    python benchmarks/simulations.py --before c17ed4a --save     # beside them the functions of that commit

Seeded: the same figures on every machine.

- **Speedup**: two models of the same speed in 3 starts of 6 rounds and more, until they outlast their memory or are 24
  (before: 24 rounds of one process), and in 5, or the 3 of them that agree so well that the stage makes no more. Each
  model's rounds wander by themselves, by 2 % with
  the autocorrelation `memory`; between two starts as much time passes as in 10 rounds. Each process of a model is
  faster or slower than the next by `processes`, as long as it lives. Asked is how often the 95 % interval holds the
  true ratio, and how often an artifact that is 3 % slower passes `min_speedup: 1.0`.
- **Starts**: five starts by the stage's own rule of when one ends (`timing.enough`), rounds that wander by 6 % and at
  most 30 of them; beside it always five, by the rule that does not look at what the earlier starts differed by
  (`fixed`).
- **Allocation**: a minute for measuring, of which a start takes 6 s and a round 0.35 s, shared by the stage's rule
  (`restarts.Schedule`, `timing.enough`); beside it three starts, each known to 3.5 % where its share of the time allows
  (`three`). Rounds of each model wander by `noise`, without memory.
- **Accuracy**: an artifact that loses 1.5 points where 1 is allowed with `confidence: 0.95`, or one exactly at the
  limit; as many answers get better and worse beside that as `changes` says. Samples may come in groups of ten that
  share their fate.
- **Candidates**, **mixed** (`benchmarks/many_candidates.py`): as *accuracy*, of several candidates that are all at the
  limit, or lose half as much again: how often one passes, and so is published. Of the answers, the share `alike` is
  lost by all or none of them. Beside it by `select.confidence_of: winner` (`winner`). *Mixed*: half of the candidates
  lose up to 0.3 points, a fifth 0.3 to 1, and as many 1 to 3 as 3 to 20: how often one is published that holds the
  limit of one point, and one that does not.
- **Searches**: searches for mixed precision (`benchmarks/searches.py`): how often what they find loses more than the
  limit of one point. Beside it the search that goes on after a trial missed for its interval alone (`going_on`), as
  until commit 21521d7.
- **Groups**: an artifact exactly at the limit, and one with half of it, of samples in groups: of one size (10), or of
  sizes with a tail (lognormal, or Pareto with the power 1.2, at most 400). Answers change as often as `loses` and
  `gains` say on average, and alike within a group by the correlation `alike` (beta-binomial), but for a tenth that both
  models answer wrongly. Beside it the number of independent samples by how groups differ alone (`by_groups`), as until
  commit 9bb36c0.
- **Two speeds**: two models of the same speed beside a neighbour that works for a share `duty` of each period, and
  then slows the calls of both, of 20 ms, by the factor `slows`. Beside the stage's interval the one around the quotient
  of all calls alone, as until commit fc88241.
- **Stalls**: 3 or 5 starts of 4 rounds on a machine that others use. For a share of the time, in stretches of 8 rounds
  on average, the original takes `times` as long, since its threads wait for cores; the artifact does not. Asked is how
  often an artifact that is as fast as the original is said to be faster, one that is 10 % slower passes
  `min_speedup: 1.0`, and one that is ten times as fast does. Beside it Student's t however the starts differ
  (`student`).
- **p95**: an artifact whose p95 is 5 % above its limit, at it, or 10 % below, of lognormal latencies (`spread`). Calls
  come in rounds of 6; the share of a call's spread that its round decides is `shared`; what its processes differ by is
  `processes`. Its p95 is that of the calls of all processes that it could be served by. One at its limit passes as
  often as the bound is too low.
- **Undecided**: a limit that is open after three starts: by the stage's rule there are nine then, else five (`five`:
  always five), in the same time. A p95 of 600 calls with a spread of 10 %, or a speedup of 120 rounds that remember
  (autocorrelation 0.5); `processes` as above.
- **Tries**: a limit as in *undecided*, and up to five runs that stop when it passes, or fails beyond doubt, which the
  cache keeps; by the stage's rule what is open is measured in three of them (`request.MOST_TRIES`). An artifact at
  its limit, 2 % beyond it, or 10 % within.
- **Served**: a throughput at a p99 of 50 ms, of queues whose true rate is known (`benchmarks/queues.py`), by the
  stage's own trials in 60 s, or 120 (`long`): how often a gate passes that asks for the true rate, and for 80 and 60 %
  of it. Beside it the searches alone in as much time (`by_search`), as until commit e7937a2. A queue that pauses stops
  for `pause_s`, every `every_s` on average.
- **Perplexity**: how often the upper bound of a rise of perplexity by 2 % is below it, and an artifact with half of
  that rise passes a limit of 2 %. What a prompt loses is normal, with a standard deviation of four times its mean
  (`spread` 0), or lognormal with that spread. Beside it the bootstrap's end (BCa), as until commit 7807596.
- **Own**: a user's metric with one number, the rise of the root mean square error, of an artifact that loses 5 % more
  than the limit, and of one whose own errors are half as large. Labels are normal, or lognormal, and errors grow with
  these. Beside it the bootstrap's end (BCa).
- **Tokens**: how often the upper bound of a language model's mean divergence is below the true one, where it is taken
  over prompts, and where all tokens count as independent. Divergences are lognormal; the logarithm of a token's has the
  standard deviation 1, an autocorrelation of 0.9 from token to token, and `prompts` from prompt to prompt beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy.special import stdtrit

sys.path[:0] = [str(Path(__file__).parent)]

import many_candidates  # noqa: E402
import queues  # noqa: E402
import results  # noqa: E402
import searches  # noqa: E402

from compile_stage.core.records import Check, Gate, Measurement, Outcome, Timing  # noqa: E402
from compile_stage.measure import own_metric, served_load, speedups, stats, task_intervals, tokens  # noqa: E402
from compile_stage.measure.elementwise import NotMeasurableError  # noqa: E402
from compile_stage.measure.performance import check_performance, is_too_uncertain  # noqa: E402
from compile_stage.measure.proportions import FEW_CHANGES  # noqa: E402
from compile_stage.measure.request import MOST_TRIES  # noqa: E402
from compile_stage.measure.restarts import (  # noqa: E402
    AGREEING_SHARE,
    LEAST_HALF_WIDTHS,
    MORE_PROCESSES,
    MOST_PROCESSES,
    Schedule,
)
from compile_stage.measure.simultaneous_intervals import widened  # noqa: E402
from compile_stage.measure.skewed_means import Means  # noqa: E402
from compile_stage.measure.tasks import measure_task  # noqa: E402
from compile_stage.measure.timing import MIN_ROUNDS, enough  # noqa: E402
from compile_stage.measure.tokens import divergence_interval  # noqa: E402

MOST_ROUNDS, GAP = 24, 10
WANDERS, CALL_NOISE, CALLS = 0.02, 0.03, 5
LATENCY_S = 0.001
MEMORIES, SPREADS = (0.0, 0.5, 0.9, 0.98), (0.0, 0.02, 0.04)
SLOWER = 1.03
RUNS = 5
NOISY, NOISY_ROUNDS = 0.06, 30
STRETCH, FEW_STALLED = 8, 4  # rounds
TURN_S, REST_S, CALL_S = 0.04, 0.02, 0.02
BOTH_WRONG = 0.1
MEASURE_S, RESTART_S, ROUND_S = 60.0, 6.0, 0.35
SPEEDUP = Gate(metric="speedup", limit=1.0, direction="at_least", unit="ratio")

Rounds = list[list[float]]


# -------------------------------------------------------------------------------------------------------------- speedup


def wander(memory: float, generator: np.random.Generator, count: int) -> np.ndarray:
    """`[count]`: a stationary series with standard deviation 1 and that autocorrelation."""
    steps, now = np.empty(count), generator.standard_normal()
    for index in range(count):
        steps[index] = now
        now = memory * now + np.sqrt(1 - memory**2) * generator.standard_normal()
    return steps


class Machine:
    """Two models that would be equally fast on a machine at rest."""

    def __init__(
        self, memory: float, spread: float, generator: np.random.Generator, *, wanders: float = WANDERS,
        most: int = MOST_ROUNDS,
        starts: int = MORE_PROCESSES,
    ) -> None:  # fmt: skip
        self.most = most
        self._slowed = wanders * np.array([wander(memory, generator, starts * (most + GAP)) for _ in range(2)])
        self._spread, self._generator = spread, generator
        self._now = 0

    def start(self) -> Iterator[tuple[list[float], list[float]]]:
        """Rounds of new processes of both models: seconds per call."""
        born = self._spread * self._generator.standard_normal(2)
        for _ in range(self.most):
            noise = np.abs(self._generator.normal(0, CALL_NOISE, (2, CALLS)))
            calls = LATENCY_S * np.exp(self._slowed[:, self._now, None] + born[:, None] + noise)
            self._now += 1
            yield calls[0].tolist(), calls[1].tolist()

    def rest(self) -> None:
        """The time that it takes to start anew."""
        self._now += GAP


def ratio_now(machine: Machine, seed: int, starts: int = speedups.FEW_PROCESSES) -> stats.Interval:
    """Of several starts, each with as many rounds as the stage takes: pairs, until they outlast their memory."""

    def ends(base: Rounds, own: Rounds, _: Sequence[float]) -> bool:
        return len(base) >= MIN_ROUNDS and len(base) % 2 == 0 and speedups.outlast_memory(base, own)

    return of_starts(machine, seed, starts, ends, may_agree=starts > speedups.FEW_PROCESSES)[0]


def of_starts(
    machine: Machine,
    seed: int,
    starts: int,
    ends: Callable[[Rounds, Rounds, Sequence[float]], bool],
    *,
    may_agree: bool,
) -> tuple[stats.Interval, int]:
    """The interval of several starts, and their rounds.

    Args:
        ends: Whether a start has enough rounds: those of both models, and the logarithms of the quotients of the starts
            before.
        may_agree: Three are enough where they agree.
    """
    base: Rounds = []
    own: Rounds = []
    processes: list[int] = []
    quotients: list[float] = []
    for number in range(starts):
        first = len(base)
        for calls in machine.start():
            base.append(calls[0])
            own.append(calls[1])
            processes.append(number)
            if ends(base[first:], own[first:], quotients):
                break
        machine.rest()
        quotients += speedups.log_quotients(base[first:], own[first:], processes[first:]).tolist()
        if may_agree and (known := known_after_three(base, own, processes, seed)) is not None:
            return known, len(base)
    return speedups.ratio_interval(base, own, seed=seed, processes=processes), len(base)


def known_after_three(base: Rounds, own: Rounds, processes: Sequence[int], seed: int) -> stats.Interval | None:
    """The interval of three starts that agree so well that the stage makes no more; else None."""
    if len(set(processes)) != speedups.FEW_PROCESSES:
        return None
    ratio = speedups.ratio_interval(base, own, seed=seed, processes=processes)
    half_width = next((one for one in LEAST_HALF_WIDTHS if speedups.is_within(ratio, AGREEING_SHARE * one)), None)
    return None if half_width is None else widened(ratio, float(np.log1p(half_width)))


def speedup_cell(
    memory: float, spread: float, trials: int, measure: Callable[[Machine, int], Any] = ratio_now
) -> dict[str, float]:
    """Shares of the trials, and the median half width."""
    generator = np.random.default_rng([MEMORIES.index(memory), SPREADS.index(spread)])
    held, unstable, slower_passes, widths = 0, 0, 0, []
    for trial in range(trials):
        ratio = measure(Machine(memory, spread, generator), trial)
        held += ratio.low <= 1 <= ratio.high
        unstable += not speedups.is_within(ratio, speedups.UNSTABLE)
        widths.append((ratio.high - ratio.low) / 2)
        slower_passes += passes(ratio)
    shares = {"held": held, "unstable": unstable, "slower_passes": slower_passes}
    return {key: count / trials for key, count in shares.items()} | {"half_width": float(np.median(widths))}


class Neighbour(Machine):
    """Both models have calls of two speeds, by whether a neighbour works when they begin."""

    def __init__(self, period_s: float, duty: float, slows: float, generator: np.random.Generator) -> None:
        super().__init__(0.0, 0.01, generator)
        self._slows = slows
        self._period_s, self._duty, self._time_s = period_s, duty, float(generator.uniform(0, 10))

    def start(self) -> Iterator[tuple[list[float], list[float]]]:
        born, order = self._spread * self._generator.standard_normal(2), np.arange(2)
        for number in range(self.most):
            order = order[::-1] if number % 2 else self._generator.permutation(2)
            calls = {int(which): self._turn(float(born[which])) for which in order}
            yield calls[0], calls[1]

    def rest(self) -> None:
        self._time_s += 3 + float(self._generator.uniform(0, self._period_s))

    def _turn(self, born: float) -> list[float]:
        self._time_s += REST_S * (1 + 0.2 * float(self._generator.random()))
        calls = []
        for _ in range(int(TURN_S / CALL_S)):
            works = self._time_s / self._period_s % 1 < self._duty
            noise = abs(float(self._generator.normal(0, CALL_NOISE)))
            calls.append(CALL_S * (self._slows if works else 1) * float(np.exp(born + noise)))
            self._time_s += calls[-1]
        return calls


def speeds_cell(period_s: float, duty: float, slows: float, trials: int, *, centred: bool) -> dict[str, float]:
    """How often the interval of five starts holds the truth, and 10 % slower passes.

    Args:
        centred: Around the quotient of all calls, however the starts lie.
    """
    generator = np.random.default_rng([int(1000 * period_s), int(100 * duty), int(10 * slows)])
    held, passed = 0, 0
    with patch.object(speedups, "_OFF_CENTRE", np.inf if centred else speedups._OFF_CENTRE):
        for trial in range(trials):
            ratio = ratio_now(Neighbour(period_s, duty, slows, generator), trial, MORE_PROCESSES)
            held += ratio.low <= 1 <= ratio.high
            passed += passes(ratio, 1.1)
    return {"held": held / trials, "slower_passes": passed / trials}


class Stalled(Machine):
    """The baseline takes so many times as long while its threads wait for cores that others use: for that share of the
    time, in stretches of some rounds. The artifact, of one thread or of short calls, does not."""

    def __init__(self, share: float, times: float, generator: np.random.Generator) -> None:
        super().__init__(0.0, 0.02, generator, starts=MOST_PROCESSES)
        self._share, self._times = share, times
        self._waits = generator.random() < share

    def start(self) -> Iterator[tuple[list[float], list[float]]]:
        for base, own in super().start():
            yield [call * self._times for call in base] if self._waits else base, own
            self._go_on(1)

    def rest(self) -> None:
        super().rest()
        self._go_on(GAP)

    def _go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            if self._generator.random() < 1 / STRETCH:
                self._waits = self._generator.random() < self._share


def stalls_cell(share: float, times: float, starts: int, trials: int, *, student: bool) -> dict[str, float]:
    """How often an artifact is said to be faster that is as fast as the original, one passes that is 10 % slower, and
    one that is ten times as fast.

    Args:
        student: By Student's t over the starts however they differ.
    """
    generator = np.random.default_rng([int(100 * share), int(10 * times), starts])
    faster, slower, tenfold = 0, 0, 0
    ours = speedups._over_unlike_starts
    with patch.object(speedups, "_over_unlike_starts", (lambda ends, *_: ends) if student else ours):
        for trial in range(trials):
            machine = Stalled(share, times, generator)
            ratio, _ = of_starts(machine, trial, starts, lambda base, *_: len(base) >= FEW_STALLED, may_agree=False)
            faster += ratio.low > 1
            slower += passes(ratio, 1.1)
            tenfold += passes(ratio, 0.1)
    return {"faster": faster / trials, "slower_passes": slower / trials, "tenfold_passes": tenfold / trials}


def starts_cell(memory: float, spread: float, trials: int, *, fixed: bool) -> dict[str, float]:
    """Five starts, each ended by the stage's rule: how often the interval holds the truth, its median half width, and
    rounds of a measurement."""
    generator = np.random.default_rng([int(100 * memory), int(100 * spread)])

    def ends(base: Rounds, own: Rounds, quotients: Sequence[float]) -> bool:
        differ = {"own": float(np.std(quotients, ddof=1))} if len(quotients) > 1 and not fixed else None
        return enough({"base": base, "own": own}, "base", seed=trial, starts=MORE_PROCESSES, differ=differ)

    held, widths, played = 0, [], []
    for trial in range(trials):
        machine = Machine(memory, spread, generator, wanders=NOISY, most=NOISY_ROUNDS)
        ratio, rounds = of_starts(machine, trial, MORE_PROCESSES, ends, may_agree=not fixed)
        held += ratio.low <= 1 <= ratio.high
        widths.append((ratio.high - ratio.low) / 2)
        played.append(rounds)
    return {"held": held / trials, "half_width": float(np.median(widths)), "rounds": float(np.mean(played))}


def allocation_cell(noise: float, spread: float, trials: int, *, three: bool) -> dict[str, float]:
    """A minute of rounds and starts: how often the interval holds the truth and is unstable, its median half width, and
    the seconds that it takes."""
    schedule = Schedule(MEASURE_S, starts=speedups.FEW_PROCESSES if three else MORE_PROCESSES)
    schedule.limit(RESTART_S)
    starts, generator = schedule.starts, np.random.default_rng([int(1000 * noise), int(100 * spread)])
    share_s = (MEASURE_S - (starts - 1) * RESTART_S) / starts

    def ends(base: Rounds, own: Rounds, quotients: Sequence[float]) -> bool:
        differ = {"own": float(np.std(quotients, ddof=1))} if len(quotients) > 1 else None
        rough = not three and len(base) * ROUND_S >= schedule.rough_s
        return enough({"base": base, "own": own}, "base", seed=trial, starts=starts, differ=differ, rough=rough)

    held, unstable, widths, seconds = 0, 0, [], []
    for trial in range(trials):
        machine = Machine(0.0, spread, generator, wanders=noise, most=int(share_s / ROUND_S))
        ratio, rounds = of_starts(machine, trial, starts, ends, may_agree=not three)
        held += ratio.low <= 1 <= ratio.high
        unstable += not speedups.is_within(ratio, speedups.UNSTABLE)
        widths.append((ratio.high - ratio.low) / 2)
        seconds.append(rounds * ROUND_S + (starts - 1) * RESTART_S)
    shares = {"held": held / trials, "unstable": unstable / trials}
    return {**shares, "half_width": float(np.median(widths)), "seconds": float(np.mean(seconds))}


def passes(ratio: Any, slower: float = SLOWER) -> bool:
    """Whether an artifact that is slower passes `min_speedup: 1.0` by an interval that was measured like this one."""
    return judged(ratio, slower).outcome is Outcome.PASS


def judged(ratio: Any, slower: float) -> Check:
    """The check of `min_speedup: 1.0`."""
    timing = Timing(
        latency_s=(0.001,), batch_size=1, stable=True, environment="", rounds=1,
        speedup=ratio.value / slower, speedup_interval=(ratio.low / slower, ratio.high / slower),
    )  # fmt: skip
    measured = Measurement(timings=(timing,), load_s=0.0, peak_memory_bytes=1)
    return check_performance((SPEEDUP,), measured, 1)[0]


# ------------------------------------------------------------------------------------------------------------- accuracy


def drop_passes(
    samples: int,
    loses: float,
    changes: float,
    trials: int,
    *,
    group: int = 1,
    measure: Callable[..., Any] = measure_task,
) -> float:
    """The share of trials in which an artifact that loses that share of right answers passes a limit of one point.

    Args:
        changes: Share of the answers that get better, and that get worse beside `loses`.
        group: So many samples share one fate.
        measure: `measure_task`, or that of an earlier commit, which knows no groups.
    """
    gate = Gate(
        metric="accuracy", limit=0.01, direction="at_most", confidence=0.95, options={"drop": "max_drop"}
    )  # fmt: skip
    generator = np.random.default_rng([samples, int(loses * 1e4), int(changes * 1e4), group])
    truth, passed = np.zeros(samples, np.int64), 0
    known = {"groups": np.arange(samples) // group} if group > 1 and measure is measure_task else {}
    for trial in range(trials):
        fate = np.repeat(generator.random(-(-samples // group)), group)[:samples]
        base, own = truth.copy(), truth.copy()
        base[fate < changes] = 1
        own[(changes <= fate) & (fate < 2 * changes + loses)] = 1
        result = measure(gate, own, base, truth, seed=trial, **known)
        passed += result.interval.high <= gate.limit + 1e-12
    return passed / trials


def groups_cell(
    sizes: str, number: int, loses: float, gains: float, alike: float, trials: int, *, by_groups: bool
) -> dict[str, float]:
    """How often an artifact passes that loses exactly the limit, and one that loses half of it."""
    generator = np.random.default_rng([len(sizes), number, int(1000 * loses), int(1000 * gains), int(100 * alike)])
    passed = dict.fromkeys(("at", "half"), 0)

    def shares(mean: float) -> np.ndarray:
        more = (1 - alike) / alike
        return generator.beta(mean * more, (1 - mean) * more, number) if mean else np.zeros(number)

    with patch.object(task_intervals, "effective_share", without_sizes) if by_groups else nullcontext():
        for trial in range(trials):
            groups = np.repeat(np.arange(number), group_sizes(sizes, number, generator))
            lost, gained, fate = shares(loses)[groups], shares(gains)[groups], generator.random(len(groups))
            truth = generator.integers(0, 2, len(groups))
            both = generator.random(len(groups)) < BOTH_WRONG
            own, base = truth ^ (both | (fate < lost)), truth ^ (both | ((fate >= lost) & (fate > 1 - gained)))
            for name, times in (("at", 1), ("half", 2)):
                gate = Gate(
                    metric="accuracy", limit=times * (1 - BOTH_WRONG) * (loses - gains), direction="at_most",
                    confidence=0.95, options={"drop": "max_drop"},
                )  # fmt: skip
                try:
                    result = measure_task(gate, own, base, truth, seed=trial, groups=groups)
                except NotMeasurableError:  # of a few large groups the original's own answers are not known well enough
                    continue
                passed[name] += result.interval is not None and result.interval.high <= gate.limit + 1e-12
    return {name: count / trials for name, count in passed.items()}


def group_sizes(sizes: str, number: int, generator: np.random.Generator) -> np.ndarray:
    """`[number]` sizes of groups."""
    if sizes == "equal":
        return np.full(number, 10)
    if sizes == "lognormal":
        return np.maximum(1, np.round(8 * np.exp(generator.standard_normal(number)))).astype(np.int64)
    return np.clip(np.round(3 * (generator.pareto(1.2, number) + 1)), 1, 400).astype(np.int64)


def without_sizes(values: np.ndarray, groups: np.ndarray | None, confidence: float = 0.95) -> float:
    """`proportions.effective_share` as it was until commit 9bb36c0."""
    if groups is None:
        return 1.0
    sizes, off = np.bincount(groups), values - values.mean()
    count, number = len(values), len(sizes)
    if len(np.unique(groups[values != np.median(values)])) < FEW_CHANGES:
        return count / float(np.sum(sizes**2))
    by_groups = float(np.sum(np.bincount(groups, weights=off) ** 2)) * number / (number - 1)
    wider = float(stdtrit(number - 1, confidence)) / float(stdtrit(np.inf, confidence))
    return 1 / (max(by_groups / (float(np.sum(off**2)) * count / (count - 1)), 1.0) * wider**2)


# ------------------------------------------------------------------------------------------------------------------ p95


def p95_passes(
    calls: int,
    shared: float,
    spread: float,
    processes: float,
    trials: int,
    *,
    starts: int = speedups.FEW_PROCESSES,
    over: float = 1.05,
    before: bool = False,
) -> float:
    """The share of trials in which an artifact passes whose p95 is so many times its limit.

    Args:
        shared: Share of a call's variance that its round decides.
        spread: Standard deviation of a call's logarithm.
        processes: That of a process of the artifact.
        starts: How many of them there are.
        before: Processes of it are not looked at, as until commit fc88241.
    """
    generator = np.random.default_rng([calls, int(shared * 100), int(spread * 100), int(processes * 100)])
    passed, size = 0, 6
    limit_ms = 1e3 * 0.01 * np.exp(np.hypot(spread, processes) * 1.6449) / over
    gate = Gate(metric="p95_latency_ms", limit=limit_ms, direction="at_most", unit="ms")
    for _ in range(trials):
        rounds = starts * -(-calls // (size * starts))
        of_rounds = np.repeat(np.arange(starts), rounds // starts)
        own = generator.normal(0, np.sqrt(1 - shared), (rounds, size))
        own += generator.normal(0, np.sqrt(shared), (rounds, 1))
        latency = 0.01 * np.exp(spread * own + processes * generator.standard_normal(starts)[of_rounds, None])
        timing = Timing(
            latency_s=tuple(latency.ravel().tolist()), batch_size=1, stable=True, environment="", rounds=rounds,
            turns=(size,) * rounds, processes=() if before else tuple(of_rounds.tolist()),
        )  # fmt: skip
        measured = Measurement(timings=(timing,), load_s=0.0, peak_memory_bytes=1)
        passed += check_performance((gate,), measured, 1)[0].outcome is Outcome.PASS
    return passed / trials


# ------------------------------------------------------------------------------------------------------------ undecided


def undecided_cell(kind: str, processes: float, trials: int, *, five: bool) -> dict[str, float]:
    """How often an artifact passes that misses its limit (by 5 % of a p95, 3 % of a speedup), is at it (of a speedup at
    the 2 % below it that are not told apart), and holds it by 5 % and 10 %."""
    generator = np.random.default_rng([len(kind), int(100 * processes)])
    over = {"misses": 1.05, "at": 1.0, "five_below": 1 / 1.05, "ten_below": 1 / 1.1}
    if kind == "speedup":
        over |= {"misses": SLOWER, "at": 1 / (1 - speedups.RESOLUTION)}
    passed = dict.fromkeys(over, 0)
    for trial in range(trials):
        for name, by in over.items():
            judge = p95_of_starts if kind == "p95" else speedup_of_starts
            passed[name] += judge(processes, by, generator, trial, five=five).outcome is Outcome.PASS
    return {name: count / trials for name, count in passed.items()}


def p95_of_starts(
    processes: float, over: float, generator: np.random.Generator, _: int, *, five: bool = False
) -> Check:  # fmt: skip
    """What is said of a p95 that is so many times its limit."""
    spread, size, calls = 0.1, 6, 120
    limit_ms = 10 * np.exp(np.hypot(spread, processes) * 1.6449) / over
    gate = Gate(metric="p95_latency_ms", limit=limit_ms, direction="at_most", unit="ms")
    latency, owners = np.empty(0), list[int]()

    def check(starts: Sequence[int], each: int) -> Check:
        nonlocal latency, owners
        for start in starts:
            own = processes * generator.standard_normal() + spread * generator.standard_normal(each)
            latency, owners = np.append(latency, 0.01 * np.exp(own)), owners + [start] * (each // size)
        timing = Timing(
            latency_s=tuple(latency.tolist()), batch_size=1, stable=True, environment="", rounds=len(owners),
            turns=(size,) * len(owners), processes=tuple(owners),
        )  # fmt: skip
        return check_performance((gate,), Measurement(timings=(timing,), load_s=0.0, peak_memory_bytes=1), 1)[0]

    more = MOST_PROCESSES if is_too_uncertain(check(range(3), calls)) and not five else MORE_PROCESSES
    each = 2 * calls // (more - 3) // size * size
    return check(range(3, more), each)


def speedup_of_starts(
    processes: float, slower: float, generator: np.random.Generator, seed: int, *, five: bool = False
) -> Check:  # fmt: skip
    """What `min_speedup: 1.0` says of an artifact that takes so many times as long as the baseline."""
    machine = Machine(0.5, processes, generator, starts=MOST_PROCESSES)
    base: Rounds = []
    own: Rounds = []
    owners: list[int] = []

    def check(starts: Sequence[int], rounds: int) -> Check:
        for start in starts:
            machine.most = rounds
            for calls in machine.start():
                base.append(calls[0])
                own.append(calls[1])
                owners.append(start)
            machine.rest()
        return judged(speedups.ratio_interval(base, own, seed=seed, processes=owners), slower)

    more = MOST_PROCESSES if is_too_uncertain(check(range(3), MOST_ROUNDS)) and not five else MORE_PROCESSES
    return check(range(3, more), 2 * MOST_ROUNDS // (more - 3))


# ---------------------------------------------------------------------------------------------------------------- tries


def tries_cell(kind: str, processes: float, trials: int) -> dict[str, float]:
    """How often an artifact passes in one run, in at most five runs by the stage's rule, and in as many that all
    measure (`unlimited`); `quiet_later`: of one that holds its limit by 10 %, by the rule, where processes differ by
    30 % in the first run alone."""
    generator = np.random.default_rng([len(kind), int(100 * processes)])
    judge = p95_of_starts if kind == "p95" else speedup_of_starts
    at = 1.0 if kind == "p95" else 1 / (1 - speedups.RESOLUTION)
    over = {"at": at, "two_beyond": 1.02 * at, "ten_within": 1 / 1.1}
    passed = {f"{name}{way}": 0 for name in over for way in ("", "_unlimited", "_once")}
    quiet_later = 0
    for trial in range(trials):
        for name, by in over.items():
            number = runs_until_pass(judge(processes, by, generator, trial) for _ in range(RUNS))
            passed[name] += number <= MOST_TRIES
            passed[f"{name}_unlimited"] += number <= RUNS
            passed[f"{name}_once"] += number == 1
        differ = (0.3, *[processes] * (MOST_TRIES - 1))
        number = runs_until_pass((judge(own, 1 / 1.1, generator, trial) for own in differ), busy=kind == "p95")
        quiet_later += number <= MOST_TRIES
    shares = {name: count / trials for name, count in passed.items()}
    return {**shares, "quiet_later": quiet_later / trials}


def runs_until_pass(checks: Iterator[Check], *, busy: bool = False) -> float:
    """Infinite where none passes, or one fails beyond doubt, which the cache keeps.

    Args:
        busy: The first is a latency that was measured on a busy machine, which is measured again too.
    """
    for number, check in enumerate(checks, start=1):
        if check.outcome is Outcome.PASS:
            return number
        if not is_too_uncertain(check) and not (busy and number == 1):
            break
    return np.inf


# --------------------------------------------------------------------------------------------- perplexity, own metrics


def perplexity_cell(count: int, spread: float, trials: int, *, bca: bool) -> dict[str, float]:
    """How often the bound of so many prompts is below the true rise, and one of half the limit passes."""
    gate = Gate(
        metric="perplexity", limit=np.expm1(0.02), direction="at_most", confidence=0.95,
        options={"drop": "max_relative_drop"},
    )  # fmt: skip
    generator, low, passed = np.random.default_rng([count, int(10 * spread)]), 0, 0
    with patch.object(tokens, "means_interval", by_bootstrap) if bca else nullcontext():
        for trial in range(trials):
            lengths, base = generator.integers(16, 65, count).astype(np.float64), generator.gamma(4, 0.75, count)
            loses = 1 + 4 * generator.standard_normal(count)
            if spread:
                loses = np.exp(spread * generator.standard_normal(count) - spread**2 / 2)
            ends = []
            for rise in (0.02, 0.01):
                own, none = lengths * (base + rise * loses), np.zeros(count)
                known = tokens.Tokens(lengths, none, none, loss=own, base_loss=lengths * base)
                interval = tokens.measure_text(gate, known, seed=trial, groups=None).interval
                ends.append(np.inf if interval is None else interval.high)
            low, passed = low + int(ends[0] < gate.limit), passed + int(ends[1] <= gate.limit)
    return {"too_low": low / trials, "good_passes": passed / trials}


def by_bootstrap(metric: Means, **options: Any) -> stats.Interval | None:
    """The bootstrap's end in place of that of means."""
    return stats.bootstrap(metric.weighted, len(metric.columns), **options)


def rmse_rise(own: np.ndarray, base: np.ndarray, labels: np.ndarray | None) -> float:
    """A user's metric with one number."""
    squares = [float(np.mean((answers - labels) ** 2)) for answers in (own, base)]
    return float(np.sqrt(squares[0] / squares[1])) - 1


def own_cell(count: int, labels: str, trials: int, *, bca: bool) -> dict[str, float]:
    """How often an artifact passes that loses 5 % more than its limit, and one whose own errors are half as large."""
    generator = np.random.default_rng([count, len(labels)])

    def draw(samples: int, off: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        truth = generator.standard_normal(samples)
        truth = np.exp(truth) if labels == "lognormal" else truth
        base = truth + 0.5 * (2.161 if labels == "lognormal" else 1) * generator.standard_normal(samples)
        sizes = np.abs(truth) if labels == "lognormal" else 1.0
        return base + off * sizes * generator.standard_normal(samples), base, truth

    gate = Gate(
        metric="python:simulations:rmse_rise", limit=rmse_rise(*draw(400_000, 0.4)) / 1.05, direction="at_most",
        confidence=0.95,
    )  # fmt: skip
    passed = dict.fromkeys((0.4, 0.2), 0)
    with patch.object(own_metric, "interval_of_any", stats.bootstrap) if bca else nullcontext():
        for trial in range(trials):
            for off in passed:
                found = own_metric.measure_own(gate, *draw(count, off), seed=trial)
                passed[off] += found.interval is not None and found.interval[1] <= gate.limit
    return {"bad_passes": passed[0.4] / trials, "good_passes": passed[0.2] / trials}


# ----------------------------------------------------------------------------------------------------------- the tables


class Before:
    """The functions of an earlier commit, as it was written then."""

    def __init__(self, commit: str) -> None:
        self.commit = commit
        self._stats = self._module("compile_stage/measure/stats.py", {})
        self.measure = self._module(
            "compile_stage/measure/tasks.py", {"compile_stage.measure.stats": self._stats}
        ).measure_task

    def ratio(self, machine: Machine, seed: int) -> Any:
        """Of 24 rounds of one process, which is how they were taken."""
        base, own = zip(*machine.start(), strict=True)
        return self._stats.ratio_interval(base, own, seed=seed)

    def _module(self, path: str, imports: dict[str, types.ModuleType]) -> types.ModuleType:
        source = subprocess.run(
            ["git", "show", f"{self.commit}:{path}"], cwd=results.ROOT, check=True, capture_output=True, text=True
        ).stdout
        module = types.ModuleType(f"before_{Path(path).stem}")
        sys.modules[module.__name__] = module
        now = {name: sys.modules.get(name) for name in imports}
        sys.modules.update(imports)
        try:
            exec(compile(source, path, "exec"), module.__dict__)
        finally:
            sys.modules.update({name: old for name, old in now.items() if old is not None})
        return module


def speedup_rows(trials: int, before: Before | None) -> list[dict[str, Any]]:
    rows = []
    for memory in MEMORIES:
        for spread in SPREADS:
            row: dict[str, Any] = {"question": "speedup", "memory": memory, "processes": spread}
            row |= speedup_cell(memory, spread, trials)
            more = speedup_cell(memory, spread, trials, partial(ratio_now, starts=MORE_PROCESSES))
            row |= {f"more_{key}": value for key, value in more.items()}
            if before is not None:
                then = speedup_cell(memory, spread, max(50, trials // 5), before.ratio)
                row |= {f"before_{key}": value for key, value in then.items()}
            rows.append(row)
            print(row, flush=True)
    return rows


def paired_rows(
    question: str,
    cells: Sequence[Mapping[str, float]],
    measure: Callable[..., dict[str, float]],
    trials: int,
    other: str,
) -> list[dict[str, Any]]:
    """Of each cell what `measure` finds, and behind `OTHER_` what it finds with that."""
    rows = []
    for cell in cells:
        found, then = (measure(*cell.values(), trials, **{other: wanted}) for wanted in (False, True))
        rows.append({"question": question, **cell, **found, **{f"{other}_{key}": value for key, value in then.items()}})
        print(rows[-1], flush=True)
    return rows


def starts_rows(trials: int) -> list[dict[str, Any]]:
    cells = [{"memory": memory, "processes": spread} for memory in (0.0, 0.7) for spread in (0.0, 0.05, 0.15)]
    return paired_rows("starts", cells, starts_cell, trials, "fixed")


def allocation_rows(trials: int) -> list[dict[str, Any]]:
    cells = [{"noise": noise, "processes": spread} for noise in (0.03, 0.1) for spread in (0.01, 0.04)]
    return paired_rows("allocation", cells, allocation_cell, trials, "three")


def accuracy_rows(trials: int, before: Before | None) -> list[dict[str, Any]]:
    rows = []
    cells = [(n, loses, changes, 1) for n in (32, 100, 300, 512) for loses in (0.015, 0.01) for changes in (0.0, 0.01)]
    for samples, loses, changes, group in [*cells, (500, 0.015, 0.01, 10), (2000, 0.015, 0.01, 10)]:
        row: dict[str, Any] = {
            "question": "accuracy", "samples": samples, "loses": loses, "changes": changes, "group": group,
            "passes": drop_passes(samples, loses, changes, trials, group=group),
        }  # fmt: skip
        if before is not None:
            row["before_passes"] = drop_passes(
                samples, loses, changes, max(50, trials // 5), group=group, measure=before.measure
            )
        rows.append(row)
        print(row, flush=True)
    return rows


def candidates_rows(trials: int) -> list[dict[str, Any]]:
    rows = []
    for samples, loses in ((512, 0.01), (512, 0.015), (2000, 0.01), (2000, 0.015)):
        for count in (1, 5, 20):
            for alike in (0.0, 0.5, 0.9):
                row = {"count": count, "samples": samples, "loses": loses, "alike": alike}
                found = many_candidates.published_cell(count, samples, loses, alike, trials)
                rows.append({"question": "candidates", **row, **found})
                print(rows[-1], flush=True)
    return rows


def mixed_rows(trials: int) -> list[dict[str, Any]]:
    rows = []
    for samples in (300, 500, 1000, 2000, 5000):
        for count in (3, 8):
            row = {"count": count, "samples": samples}
            rows.append({"question": "mixed", **row, **many_candidates.mixed_cell(count, samples, trials)})
            print(rows[-1], flush=True)
    return rows


def searches_rows(trials: int) -> list[dict[str, Any]]:
    cells = [{"samples": samples, "loses": loses} for samples in (500, 2000, 5000) for loses in (0.015, 0.03, 0.1)]
    return paired_rows("searches", cells, searches.searches_cell, trials, "going_on")


def groups_rows(trials: int) -> list[dict[str, Any]]:
    cells = [
        {"sizes": sizes, "number": number, "loses": loses, "gains": gains, "alike": alike}
        for sizes in ("equal", "lognormal", "pareto")
        for number in (50, 100, 150)
        for loses, gains in ((0.05, 0.0), (0.1, 0.02))
        for alike in (0.1, 0.5)
    ]
    return paired_rows("groups", cells, groups_cell, trials, "by_groups")


def speeds_rows(trials: int) -> list[dict[str, Any]]:
    cells = [
        {"period_s": period_s, "duty": duty, "slows": slows}
        for slows in (1.2, 2.0)
        for period_s in (0.1, 0.12, 0.5)
        for duty in (0.3, 0.5, 0.7)
    ]
    return paired_rows("speeds", cells, speeds_cell, trials, "centred")


def stalls_rows(trials: int) -> list[dict[str, Any]]:
    cells = [
        {"share": share, "times": times, "starts": starts}
        for starts in (3, 5)
        for share in (0.15, 0.3)
        for times in (1.3, 3.0, 300.0)
    ]
    return paired_rows("stalls", cells, stalls_cell, trials, "student")


def p95_rows(trials: int) -> list[dict[str, Any]]:
    rows = []
    cells = [(3, calls, shared, 0.5, 0.0) for calls in (60, 234, 600) for shared in (0.0, 0.3)]
    cells += [
        (starts, calls, 0.0, spread, processes)
        for starts in (1, 3, 5)
        for calls in (234, 600)
        for spread in (0.05, 0.1)
        for processes in ((0.0, 0.04) if starts == 1 else (0.0, 0.04, 0.1))
    ]
    for starts, calls, shared, spread, processes in cells:
        passes_now = partial(p95_passes, calls, shared, spread, processes, trials, starts=starts)
        rows.append({
            "question": "p95", "starts": starts, "calls": calls, "shared": shared, "spread": spread,
            "processes": processes, "passes": passes_now(), "before_passes": passes_now(before=True),
            "too_low": passes_now(over=1.0), "fast_passes": passes_now(over=1 / 1.1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def undecided_rows(trials: int) -> list[dict[str, Any]]:
    cells = [{"kind": kind, "processes": spread} for kind in ("p95", "speedup") for spread in (0.0, 0.02, 0.04, 0.1)]
    return paired_rows("undecided", cells, undecided_cell, trials, "five")


def tries_rows(trials: int) -> list[dict[str, Any]]:
    rows = []
    for kind in ("p95", "speedup"):
        for spread in (0.0, 0.02, 0.04, 0.1):
            found = tries_cell(kind, spread, trials)
            rows.append({"question": "tries", "kind": kind, "processes": spread, **found})
            print(rows[-1], flush=True)
    return rows


def perplexity_rows(trials: int) -> list[dict[str, Any]]:
    cells = [{"count": count, "spread": spread} for count in (32, 64, 128, 512) for spread in (0.0, 1.0, 1.5, 2.0)]
    return paired_rows("perplexity", cells, perplexity_cell, trials, "bca")


def own_rows(trials: int) -> list[dict[str, Any]]:
    cells = [{"count": count, "labels": labels} for count in (40, 150, 600) for labels in ("normal", "lognormal")]
    return paired_rows("own", cells, own_cell, trials, "bca")


def tokens_rows(trials: int) -> list[dict[str, Any]]:
    rows = []
    for count in (32, 64, 128, 512):
        for spread in (0.5, 1.0, 1.5):
            over_prompts, over_tokens = too_low(count, spread, trials)
            row = {"question": "tokens", "count": count, "prompts": spread}
            rows.append({**row, "too_low": over_prompts, "by_tokens": over_tokens})
            print(rows[-1], flush=True)
    return rows


def too_low(prompts: int, spread: float, trials: int, tokens: int = 32) -> tuple[float, float]:
    """How often the bound over prompts, and that over tokens, is below the true mean."""
    generator, truth = np.random.default_rng([prompts, int(10 * spread)]), np.exp(spread**2 / 2 + 0.5)
    low = [0, 0]
    for trial in range(trials):
        logs = np.empty((prompts, tokens))
        logs[:, 0] = generator.standard_normal(prompts)
        for place in range(1, tokens):
            logs[:, place] = 0.9 * logs[:, place - 1] + np.sqrt(1 - 0.81) * generator.standard_normal(prompts)
        nats = np.exp(logs + spread * generator.standard_normal((prompts, 1)))
        low[0] += bool(divergence_interval(nats.mean(axis=1), 0.95, seed=trial).high < truth)
        half = 1.96 * nats.std(ddof=1) / np.sqrt(nats.size)  # of so many tokens the bootstrap's is the normal's
        low[1] += bool(nats.mean() + half < truth)
    return low[0] / trials, low[1] / trials


# --------------------------------------------------------------------------------------------------------------- served

P99_S, SERVED = 0.05, 300.0
QUEUES: tuple[Mapping[str, Any], ...] = (
    {"kind": "exponential"}, {"kind": "constant"}, {"kind": "lognormal"},
    {"kind": "constant", "pause_s": 0.1, "every_s": 10.0}, {"kind": "exponential", "pause_s": 0.06, "every_s": 2.0},
)  # fmt: skip


def served_rows(trials: int) -> list[dict[str, Any]]:
    rows = []
    for number, known in enumerate(QUEUES):
        generator = np.random.default_rng(number)

        def make(known: Mapping[str, Any] = known, generator: np.random.Generator = generator) -> queues.Queue:
            return queues.Queue(served=SERVED, generator=generator, **known)

        true = queues.true_rate(make(), P99_S)
        row: dict[str, Any] = {"question": "served", **known, "true_per_s": true}
        for share in (1.0, 0.8, 0.6):
            for which, seconds in (("", 60.0), ("long_", 120.0)):
                passes, by_search = served_share(make, true * share, trials, seconds)
                row |= {f"{which}passes_{share:g}": passes, f"{which}by_search_{share:g}": by_search}
        rows.append(row)
        print(row, flush=True)
    return rows


def served_share(
    make: Callable[[], queues.Queue], asked_per_s: float, trials: int, seconds: float
) -> tuple[float, float]:
    """How often a gate passes, and would by the interval over the searches of the starts in twice the time."""
    passed = [0, 0]
    for _ in range(trials):
        found = queues.measure(make, P99_S, asked_per_s, seconds)
        passed[0] += found.interval is not None and found.interval[0] >= asked_per_s
        alone = queues.measure(make, P99_S, asked_per_s, 2 * seconds)
        interval = served_load.over_starts(alone.starts_per_s)[1]
        passed[1] += interval is not None and interval[0] >= asked_per_s
    return passed[0] / trials, passed[1] / trials


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows, and save them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="simulated measurements of a cell")
    parser.add_argument(
        "--before", metavar="COMMIT", help="also with the functions of that commit, a fifth of the trials"
    )
    questions = (
        "speedup", "starts", "allocation", "speeds", "stalls", "accuracy", "candidates", "mixed", "searches", "groups",
        "p95", "undecided", "tries", "served", "perplexity", "own", "tokens",
    )  # fmt: skip
    parser.add_argument("--question", choices=questions, help="only this one")
    results.add_save_option(parser)
    options = parser.parse_args(arguments)
    before = Before(options.before) if options.before else None
    with results.recording("simulations", options.save) as record:
        record.settings |= {"trials": options.trials, "before": options.before}
        if options.question in (None, "speedup"):
            record.rows += speedup_rows(options.trials, before)
        if options.question in (None, "starts"):
            record.rows += starts_rows(max(50, options.trials // 5))
        if options.question in (None, "allocation"):
            record.rows += allocation_rows(max(50, options.trials // 5))
        if options.question in (None, "speeds"):
            record.rows += speeds_rows(max(50, options.trials // 5))
        if options.question in (None, "stalls"):
            record.rows += stalls_rows(options.trials)
        if options.question in (None, "accuracy"):
            record.rows += accuracy_rows(options.trials, before)
        if options.question in (None, "candidates"):
            record.rows += candidates_rows(options.trials)
        if options.question in (None, "mixed"):
            record.rows += mixed_rows(options.trials)
        if options.question in (None, "searches"):
            record.rows += searches_rows(max(50, options.trials // 2))
        if options.question in (None, "groups"):
            record.rows += groups_rows(options.trials)
        if options.question in (None, "p95"):
            record.rows += p95_rows(options.trials)
        if options.question in (None, "undecided"):
            record.rows += undecided_rows(max(50, options.trials // 5))
        if options.question in (None, "tries"):
            record.rows += tries_rows(max(50, options.trials // 5))
        if options.question in (None, "served"):
            record.rows += served_rows(max(50, options.trials // 5))
        if options.question in (None, "perplexity"):
            record.rows += perplexity_rows(max(50, options.trials // 5))
        if options.question in (None, "own"):
            record.rows += own_rows(max(50, options.trials // 10))
        if options.question in (None, "tokens"):
            record.rows += tokens_rows(options.trials)


if __name__ == "__main__":
    main()
