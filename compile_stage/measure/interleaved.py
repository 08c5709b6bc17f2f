"""Several models measured in turns, on a machine that they have alone.

Each participant is a fresh process that did not compile: its load time and peak memory are those of a serving process.
A round holds one turn of each, in an order that changes from round to round, so that a machine that slows down slows all
alike. Rounds in which other processes used the cores are dropped and repeated, as long as the time lasts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.environment import available_cores
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import (
    Artifact,
    Failure,
    Gate,
    Measurement,
    Outcome,
    SampleSet,
    SourceModel,
    Target,
    Timing,
    record,
)
from compile_stage.measure import disturbance, stats, timing
from compile_stage.measure.performance import check_performance

BASELINE = "baseline"
"""Name of the participant that all others are compared with."""

WARM_UP_S = 1.5
"""At most so long until the latencies are steady; most models need a few calls."""

_FIRST_LOOK = 2  # rounds: a shuffled order and its mirror image


@record
class Rounds:
    """What rounds are wanted at one batch size.

    Attributes:
        seconds: For all of them; warm-up comes on top.
        seed: For the order of turns and the intervals.
        min_calls: So many calls of each participant are wanted even where the ratios are known sooner.
        first_look: A first pair of undisturbed rounds, or a few more of any kind, is all that is wanted.
    """

    batch_size: int
    seconds: float
    seed: int
    min_calls: int = 0
    first_look: bool = False


@dataclass
class _Runner:
    worker: Worker
    load_s: float
    peak_memory_bytes: int
    calls: int = 1  # of a turn, at the batch size that is measured
    timings: list[Timing] = field(default_factory=list)


_Round: TypeAlias = dict[str, list[float]]  # participant → seconds per call of its turn


class Interleaved:
    """The participants of one interleaved measurement."""

    def __init__(self, context: Context, label: str, samples: SampleSet, target: Target, stack: ExitStack) -> None:
        self._context = context
        self._label = label
        self._samples = samples
        self._target = target
        self._threads = target.threads
        self._stack = stack
        self._runners: dict[str, _Runner] = {}
        self._dropped: dict[str, tuple[_Runner, str]] = {}
        self._load = disturbance.Load()
        self.failures: dict[str, Failure] = {}

    def enter(self, name: str, model: SourceModel | Artifact, needs: Needs, batch_sizes: Sequence[int]) -> None:
        """Open the model in a fresh process, run it once at each batch size, and note load time and peak memory."""
        self._progress(f"loading {name}")
        try:
            if isinstance(model, Artifact):
                needs = replace(needs, interpreter=plugins.interpreter_of(model.backend))
            worker = self._stack.enter_context(self._context.engine.worker(f"measure--{name}", needs))
            if isinstance(model, Artifact):
                opened = worker.call("open_artifact", artifact=model, threads=self._threads)
            else:
                opened = worker.call("open_source", source=model, target=self._target)
            for batch_size in batch_sizes:
                worker.call("warm_up", samples=self._samples, batch_size=batch_size, seconds=0.0)
            self._runners[name] = _Runner(worker, opened["load_s"], worker.call("peak_memory"))
        except CompileStageError as error:
            self._drop(name, error)

    def who_hold(self, gates: Sequence[Gate], sizes: Mapping[str, int]) -> list[str]:
        """The participants that hold gates on what is known before the first round: size and memory."""
        holding = []
        for name, runner in self._runners.items():
            known = Measurement(timings=(), load_s=runner.load_s, peak_memory_bytes=runner.peak_memory_bytes)
            if name != BASELINE and all(
                check.outcome is Outcome.PASS for check in check_performance(gates, known, sizes[name])
            ):
                holding.append(name)
        return holding

    def wait_until_quiet(self, seconds: float) -> float:
        """Wait a part of the time for measuring, if other processes use the cores; returns the seconds waited."""

        def on_wait(foreign: float) -> None:
            self._progress(f"waiting: other processes use {foreign:.1f} of {available_cores()} cores")

        longest = min(disturbance.WAIT_SHARE * seconds, disturbance.WAIT_S)
        return disturbance.wait_until_quiet(self._threads, longest, on_wait=on_wait)

    def run(self, wanted: Rounds, leads: Sequence[str] | None = None) -> None:
        """Rounds at one batch size, until every ratio's interval is narrow enough or the time is up.

        Args:
            leads: Where given, who is far slower than one of these after a first pair of undisturbed rounds, or a few
                more of any kind, is dropped.
        """
        for name in list(self._runners):
            warmed = self._turn(name, "warm_up", wanted.batch_size, seconds=WARM_UP_S)
            if warmed is not None:
                self._runners[name].calls = timing.calls_of_a_turn(warmed["latency_s"])
        clean: list[_Round] = []
        dirty: list[_Round] = []
        ends = time.monotonic() + wanted.seconds
        while BASELINE in self._runners:
            played, quiet = self._round(len(clean) + len(dirty), wanted)
            (clean if quiet else dirty).append(played)
            late = time.monotonic() > ends
            # Where others use the cores all the time, more rounds must agree, as far as there is time.
            first = clean if len(clean) == _FIRST_LOOK else [*clean, *dirty]
            if leads is not None and (
                first is clean or len(first) == timing.MIN_ROUNDS or (late and len(first) >= _FIRST_LOOK)
            ):
                here = [name for name in leads if name in self._runners]
                self._drop_far_slower(self._by_name(first), here, wanted)
                leads = None
                if wanted.first_look:
                    break
            if late or timing.enough(self._by_name(clean), BASELINE, seed=wanted.seed, min_calls=wanted.min_calls):
                break
            message = f"batch {wanted.batch_size}, round {len(clean) + len(dirty)}"
            self._progress(f"{message}, {len(dirty)} disturbed" if dirty else message)
        trusted = len(clean) >= timing.MIN_ROUNDS
        rounds = self._by_name(clean if trusted else clean + dirty)
        for name, runner in self._runners.items():
            summary = self._summary(name, rounds, wanted)
            runner.timings.append(replace(summary, disturbed=len(dirty)) if trusted else summary)

    def _drop_far_slower(self, rounds: Mapping[str, list[list[float]]], leads: Sequence[str], wanted: Rounds) -> None:
        compared = {name: turns for name, turns in rounds.items() if name != BASELINE or name in leads}
        for name, (leader, times) in timing.far_slower(compared, leads).items():
            runner = self._runners.pop(name)
            runner.timings.append(self._summary(name, rounds, wanted))
            whose = "the original" if leader == BASELINE else leader
            why = (
                f"dropped after {len(rounds[name])} rounds: "
                f"its latency was at least {times:.3g} times that of {whose} in each"
            )
            self._dropped[name] = (runner, why)
            self._progress(f"{name} {why}")

    def _round(self, number: int, wanted: Rounds) -> tuple[_Round, bool]:
        """One turn for each, and whether other processes left us the cores meanwhile."""
        before, played, participants = disturbance.usage(), {}, len(self._runners)
        for name in timing.schedule(tuple(self._runners), number, wanted.seed):
            limits = {"seconds": timing.LONGEST_TURN_S, "max_calls": self._runners[name].calls}
            latencies = self._turn(name, "time_turn", wanted.batch_size, **limits)
            if latencies is not None:
                played[name] = latencies
        after = disturbance.usage()
        if len(played) == participants:  # what a process has used is not counted any more when it has ended
            self._load.add(before, after)
        return played, not disturbance.disturbed(before, after, self._threads)

    def _by_name(self, rounds: Sequence[_Round]) -> dict[str, list[list[float]]]:
        return {name: [played[name] for played in rounds] for name in self._runners}

    def measurements(self) -> dict[str, Measurement]:
        """By participant. The baseline's notes tell of all of them."""
        busy = self._load.note(self._threads)
        notes = (busy,) if busy else ()
        everybody = {name: (runner, "") for name, runner in self._runners.items()} | self._dropped
        return {
            name: Measurement(
                timings=tuple(runner.timings),
                load_s=runner.load_s,
                peak_memory_bytes=runner.peak_memory_bytes,
                stopped_early=dropped,
                notes=notes if name == BASELINE else (),
            )
            for name, (runner, dropped) in everybody.items()
        }

    def _turn(self, name: str, function: str, batch_size: int, **limits: Any) -> Any:
        """What the participant's worker answers; None when the participant crashed, and is dropped."""
        try:
            return self._runners[name].worker.call(function, samples=self._samples, batch_size=batch_size, **limits)
        except CompileStageError as error:
            self._drop(name, error)
            return None

    def _drop(self, name: str, error: CompileStageError) -> None:
        if name == BASELINE:
            raise error  # without the baseline no ratio means anything
        self._runners.pop(name, None)
        self.failures[name] = Failure(
            kind=error.kind if isinstance(error, WorkerError) else "exception",
            step="benchmark",
            problem=error.problem,
            detail=error.detail if isinstance(error, WorkerError) else "",
        )

    def _summary(self, name: str, rounds: Mapping[str, list[list[float]]], wanted: Rounds) -> Timing:
        own, base = rounds[name], rounds[BASELINE]
        timed = Timing(
            latency_s=tuple(value for turn in own for value in turn),
            batch_size=wanted.batch_size,
            environment=self._context.hardware.fingerprint,
            rounds=len(own),
            turns=tuple(len(turn) for turn in own),
            stable=True,
        )
        if name == BASELINE:
            return timed
        ratio = stats.ratio_interval(base, own, seed=wanted.seed)
        return replace(
            timed,
            stable=stats.is_within(ratio, stats.UNSTABLE),
            speedup=ratio.value,
            speedup_interval=(ratio.low, ratio.high),
        )

    def _progress(self, message: str) -> None:
        self._context.events.progress("benchmark", self._label, message)
