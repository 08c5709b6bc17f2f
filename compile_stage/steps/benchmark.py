"""Artifacts and baseline, interleaved → raw timings, ratios with intervals, memory and load time.

Each participant is a fresh process that did not compile: its load time and peak memory are those of a serving process.
Turns are given round-robin in an order that changes from round to round, so that a machine that slows down slows all
alike; rounds in which others used the cores are dropped and played again, as long as the time lasts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import (
    Artifact,
    Budget,
    CacheState,
    Candidate,
    Check,
    Failure,
    Gate,
    Measurement,
    Outcome,
    Plan,
    Policy,
    SampleSet,
    SourceModel,
    Target,
    TargetPolicy,
    TargetResult,
    Timing,
    record,
)
from compile_stage.measure import disturbance, stats, timing
from compile_stage.measure.performance import calls_needed, check_performance

BASELINE = "baseline"
"""Name of the participant that all others are compared with."""

TURN_S = 0.04
"""Length of one turn, at least one call. Long enough for hundreds of calls of a small model; short enough that a round
of ten small participants takes half a second, so that drift slower than that hits all alike, and there are many rounds
to resample."""

_FIRST_LOOK = 2  # rounds: a shuffled order and its mirror image

WARM_UP_S = 1.5
"""At most so long until the latencies are steady; most models need a few calls."""


@record
class Measured:
    """Measurements by participant, failures of those that did not live to the end, and whether it came from the
    cache."""

    measurements: Mapping[str, Measurement]
    failures: Mapping[str, Failure]
    cached: bool


def benchmark_candidates(
    context: Context,
    plan: Plan,
    target_policy: TargetPolicy,
    candidates: Sequence[Candidate],
    samples: SampleSet,
) -> tuple[list[Candidate], Measurement | None]:
    """The candidates with what was measured of those that are proven, and the original model's own measurement.

    What already failed a tolerance is not measured: timings of a wrong answer decide nothing.
    """
    proven = {c.job.id: c.artifact for c in candidates if c.has_passed and c.artifact}
    if not proven:
        return list(candidates), None
    target = target_policy.target
    gates = target_policy.performance
    holding = tuple(gate for gate in gates if gate.metric in ("size_mb", "memory_mb"))
    drop_behind = holding if target_policy.prunes_slow else None

    def decided(name: str, measured: Measurement) -> bool:
        checks = check_performance(gates, measured, proven[name].size_bytes)
        return bool(measured.stopped_early) or not any(_left_open(check, measured) for check in checks)

    found = benchmark(
        context, target.name, plan.source, proven, samples, target, plan.policy.budget, seed=plan.policy.data.seed,
        min_calls=calls_needed(gates), decided=decided, drop_behind=drop_behind,
    )  # fmt: skip
    state: CacheState = "hit" if found.cached else "miss"
    measured = [
        _measured(replace(c, cache={**c.cache, "benchmark": state}), found) if c.job.id in proven else c
        for c in candidates
    ]
    return measured, found.measurements.get(BASELINE)


def _measured(candidate: Candidate, measured: Measured) -> Candidate:
    """The candidate with its measurement, or with how it ended while it was measured."""
    measurement, failure = measured.measurements.get(candidate.job.id), measured.failures.get(candidate.job.id)
    candidate = replace(candidate, measurement=measurement)
    if failure is not None:
        return candidate.failed(failure)
    if measurement is not None and measurement.stopped_early:
        return candidate.in_state("pruned", measurement.stopped_early)
    return candidate


def benchmark_successor(
    context: Context, policy: Policy, target_result: TargetResult, successor: Artifact, incumbent: Artifact | None
) -> Measurement | None:
    """What a target would ship, with `incumbent` as its baseline; None when there is nothing to compare.

    Raises:
        CompileStageError: The incumbent can't be run on this run's samples.
    """
    target, limit = target_result.policy.target, 1 / target_result.policy.promote.max_slowdown
    if incumbent is None:
        return None

    def decided(_: str, measured: Measurement) -> bool:
        intervals = [t.speedup_interval or (0.0, math.inf) for t in measured.timings if not t.stable]
        return all(low >= limit or high < limit for low, high in intervals)

    label, samples = f"{target.name} (against the promoted version)", target_result.samples["validation"]
    artifacts = {successor.job_id: successor}
    seed = policy.data.seed
    found = benchmark(context, label, incumbent, artifacts, samples, target, policy.budget, seed=seed, decided=decided)
    return found.measurements.get(successor.job_id)


def benchmark(
    context: Context,
    label: str,
    baseline: SourceModel | Artifact,
    artifacts: Mapping[str, Artifact],
    samples: SampleSet,
    target: Target,
    budget: Budget,
    *,
    seed: int,
    min_calls: int = 0,
    decided: Callable[[str, Measurement], bool] = lambda name, measured: True,
    drop_behind: tuple[Gate, ...] | None = None,
    first_look: bool = False,
) -> Measured:
    """Measure `artifacts` (name → artifact) against `baseline`, alone on the machine.

    Args:
        label: Whose measurement it is, for events.
        budget: Its `measure_seconds` bounds the rounds over all batch sizes; warm-up and loading come on top.
        seed: For the order of turns and the intervals.
        min_calls: So many calls of each are wanted even where the ratios are known sooner.
        decided: False for a participant and its measurement that came out too unsteady to answer what is asked of it.
            Such a measurement is not kept for the next run, which may find a quieter machine.
        drop_behind: Where given, whoever is hopelessly behind another that holds these gates (on size and memory) is dropped
            after a first pair of rounds, and its measurement says so.
        first_look: That pair is all that is wanted, and the baseline is the one to be behind.
    """
    batch_sizes, threads = target.batch_sizes, target.threads
    seconds, needs = budget.measure_seconds, Needs.within(budget, threads)
    key = {
        "baseline": _loaded(baseline),
        "artifacts": {name: _loaded(artifact) for name, artifact in artifacts.items()},
        "samples": samples.digest,
        "batch_sizes": list(batch_sizes),
        "threads": threads,
        "seconds": seconds,
        "seed": seed,
        "min_calls": min_calls,
        "hardware": context.hardware,
        **({} if drop_behind is None else {"drop_behind": drop_behind}),
        **({"first_look": True} if first_look else {}),
    }
    failed: dict[str, Failure] = {}

    def make(_: Any) -> dict[str, Measurement]:
        with context.engine.alone(), ExitStack() as stack:
            race = _Race(context, label, samples, threads, stack)
            for name, model in {BASELINE: baseline, **artifacts}.items():
                race.enter(name, model, needs, batch_sizes)
            leads = [BASELINE] if first_look else None
            if drop_behind is not None:
                sizes = {name: artifact.size_bytes for name, artifact in artifacts.items()}
                leads = race.who_hold(drop_behind, sizes)
            for batch_size in batch_sizes:
                # A look ends by itself, after a few rounds: the slower it is, the less may it be cut short.
                lasts = math.inf if first_look else seconds / len(batch_sizes)
                race.run(batch_size, lasts, seed, min_calls, leads, first_look=first_look)
                leads = None
            failed.update(race.failures)
            found = race.measurements()
            if failed or not all(decided(name, measured) for name, measured in found.items() if name != BASELINE):
                raise _PartialError(found)
            return found

    try:
        found = context.cached("benchmark/1", label, key, make)
    except _PartialError as partial:  # a failure is never cached, and the others' numbers still hold
        return Measured(measurements=partial.measurements, failures=failed, cached=False)
    return Measured(measurements=revive(Mapping[str, Measurement], found.value), failures={}, cached=found.hit)


def _left_open(check: Check, measured: Measurement) -> bool:
    """True for a limit that was missed only because the machine was too unsteady to show more."""
    timing = measured.timing(check.batch_size) if check.batch_size is not None else None
    if check.outcome is not Outcome.FAIL or timing is None or timing.stable:
        return False
    return check.interval is None or check.interval[1] >= check.gate.limit


def _loaded(model: SourceModel | Artifact) -> dict[str, Any]:
    """What decides how fast a model runs: its files, and all that loads them."""
    if isinstance(model, SourceModel):
        return {"source": model.identity, "made_by": plugins.made_by("sources", model.flavor)}
    made_by = plugins.made_by("backends", model.backend)
    return {"digest": model.digest, "options": model.options, "toolchain": model.toolchain, "made_by": made_by}


class _PartialError(Exception):
    def __init__(self, measurements: Mapping[str, Measurement]) -> None:
        super().__init__("some participants failed, or did not settle, while they were measured")
        self.measurements = measurements


@dataclass
class _Runner:
    worker: Worker
    load_s: float
    peak_memory_bytes: int
    timings: list[Timing] = field(default_factory=list)


_Round: TypeAlias = dict[str, list[float]]  # participant → seconds per call of its turn


class _Race:
    """The participants of one interleaved measurement."""

    def __init__(self, context: Context, label: str, samples: SampleSet, threads: int, stack: ExitStack) -> None:
        self._context = context
        self._label = label
        self._samples = samples
        self._threads = threads
        self._stack = stack
        self._runners: dict[str, _Runner] = {}
        self._dropped: dict[str, tuple[_Runner, str]] = {}
        self.failures: dict[str, Failure] = {}

    def enter(self, name: str, model: SourceModel | Artifact, needs: Needs, batch_sizes: Sequence[int]) -> None:
        """Open the model in a fresh process, run it once at each batch size, and note load time and peak memory."""
        self._context.events.progress("benchmark", self._label, f"loading {name}")
        try:
            if isinstance(model, Artifact):
                needs = replace(needs, interpreter=plugins.interpreter_of(model.backend))
            worker = self._stack.enter_context(self._context.engine.worker(f"measure--{name}", needs))
            if isinstance(model, Artifact):
                opened = worker.call("open_artifact", artifact=model, threads=self._threads)
            else:
                opened = worker.call("open_source", source=model, threads=self._threads)
            for batch_size in batch_sizes:
                worker.call("warm_up", samples=self._samples, batch_size=batch_size, seconds=0.0)
            self._runners[name] = _Runner(worker, opened["load_s"], worker.call("peak_memory"))
        except CompileStageError as error:
            self._drop(name, error)

    def who_hold(self, gates: Sequence[Gate], sizes: Mapping[str, int]) -> list[str]:
        """The participants that hold gates which are known before the race."""
        found = []
        for name, runner in self._runners.items():
            known = Measurement(timings=(), load_s=runner.load_s, peak_memory_bytes=runner.peak_memory_bytes)
            if name != BASELINE and all(
                check.outcome is Outcome.PASS for check in check_performance(gates, known, sizes[name])
            ):
                found.append(name)
        return found

    def run(
        self, batch_size: int, seconds: float, seed: int, min_calls: int, leads: Sequence[str] | None = None,
        *, first_look: bool = False,
    ) -> None:  # fmt: skip
        """Rounds at one batch size, until every ratio's interval is narrow enough or the time is up.

        Args:
            leads: Where given, who is hopelessly behind one of these after a first pair of undisturbed rounds, or a few more of any kind, is dropped.
            first_look: No round comes after that.
        """
        for name in list(self._runners):
            self._turn(name, "warm_up", batch_size, WARM_UP_S)
        clean: list[_Round] = []
        dirty: list[_Round] = []
        ends = time.monotonic() + seconds
        while BASELINE in self._runners:
            played, quiet = self._round(len(clean) + len(dirty), batch_size, seed)
            (clean if quiet else dirty).append(played)
            # Where others use the cores all the time, more rounds must agree.
            looked_at = clean if len(clean) == _FIRST_LOOK else [*clean, *dirty]
            if leads is not None and (looked_at is clean or len(looked_at) == timing.MIN_ROUNDS):
                here = [name for name in leads if name in self._runners]
                self._drop_hopeless(self._by_name(looked_at), here, batch_size, seed)
                leads = None
                if first_look:
                    break
            if timing.enough(self._by_name(clean), BASELINE, seed=seed, min_calls=min_calls):
                break
            if time.monotonic() > ends:
                break
            said = f"batch {batch_size}, round {len(clean) + len(dirty)}"
            self._context.events.progress(
                "benchmark", self._label, f"{said}, {len(dirty)} disturbed" if dirty else said
            )
        trusted = len(clean) >= timing.MIN_ROUNDS
        rounds = self._by_name(clean if trusted else clean + dirty)
        for name, runner in self._runners.items():
            timed = self._summary(name, rounds, batch_size, seed)
            runner.timings.append(
                replace(timed, disturbed=len(dirty)) if trusted else replace(timed, stable=timed.stable and not dirty)
            )

    def _drop_hopeless(
        self, rounds: Mapping[str, list[list[float]]], leads: Sequence[str], batch_size: int, seed: int
    ) -> None:
        looked_at = {name: turns for name, turns in rounds.items() if name != BASELINE or name in leads}
        for name, (leader, times) in timing.hopeless(looked_at, leads).items():
            runner = self._runners.pop(name)
            runner.timings.append(replace(self._summary(name, rounds, batch_size, seed), stable=False))
            whose = "the original" if leader == BASELINE else leader
            why = f"dropped after {len(rounds[name])} rounds: its latency was at least {times:.3g} times that of {whose} in each"
            self._dropped[name] = (runner, why)
            self._context.events.progress("benchmark", self._label, f"{name} {why}")

    def _round(self, number: int, batch_size: int, seed: int) -> tuple[_Round, bool]:
        """One turn for each, and whether the machine was ours meanwhile."""
        before, played = disturbance.usage(), {}
        for name in timing.schedule(tuple(self._runners), number, seed):
            latencies = self._turn(name, "time_turn", batch_size, TURN_S)
            if latencies is not None:
                played[name] = latencies
        return played, not disturbance.disturbed(before, disturbance.usage(), self._threads)

    def _by_name(self, rounds: Sequence[_Round]) -> dict[str, list[list[float]]]:
        return {name: [played[name] for played in rounds] for name in self._runners}

    def measurements(self) -> dict[str, Measurement]:
        everybody = {name: (runner, "") for name, runner in self._runners.items()} | self._dropped
        return {
            name: Measurement(
                timings=tuple(runner.timings),
                load_s=runner.load_s,
                peak_memory_bytes=runner.peak_memory_bytes,
                stopped_early=dropped,
            )
            for name, (runner, dropped) in everybody.items()
        }

    def _turn(self, name: str, function: str, batch_size: int, seconds: float) -> list[float] | None:
        try:
            answer: list[float] = self._runners[name].worker.call(
                function, samples=self._samples, batch_size=batch_size, seconds=seconds
            )
        except CompileStageError as error:
            self._drop(name, error)
            return None
        return answer

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

    def _summary(self, name: str, rounds: Mapping[str, list[list[float]]], batch_size: int, seed: int) -> Timing:
        own, base = rounds[name], rounds[BASELINE]
        timed = Timing(
            latency_s=tuple(value for turn in own for value in turn),
            batch_size=batch_size,
            environment=self._context.hardware.fingerprint,
            rounds=len(own),
            turns=tuple(len(turn) for turn in own),
            stable=True,
        )
        if name == BASELINE:
            return timed
        ratio = stats.ratio_interval(base, own, seed=seed)
        return replace(
            timed,
            stable=timing.narrow(ratio),
            speedup=ratio.value,
            speedup_interval=(ratio.low, ratio.high),
        )
