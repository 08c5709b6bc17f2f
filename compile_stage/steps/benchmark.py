"""Artifacts and baseline, interleaved → raw timings, ratios with intervals, memory and load time.

How often each is started is in `compile_stage.measure.process_starts`, how they take turns in `measure.interleaved`;
here is what is measured, for how long, and what of it is kept for the next run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from compile_stage.core import plugins
from compile_stage.core.context import Context, cache_key
from compile_stage.core.digest import revive
from compile_stage.core.killed_workers import once_more_after_a_kill
from compile_stage.core.records import (
    Artifact,
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
    TargetPolicy,
    TargetResult,
    record,
)
from compile_stage.measure import speedups
from compile_stage.measure.interleaved import BASELINE as BASELINE
from compile_stage.measure.leaving import gates_hold
from compile_stage.measure.one_thread import held_up
from compile_stage.measure.performance import calls_needed, check_performance, is_too_uncertain
from compile_stage.measure.process_starts import ProcessStarts
from compile_stage.measure.request import MOST_TRIES, MeasurementRequest
from compile_stage.measure.restarts import CONTENDER, MORE_PROCESSES, MOST_TRIED, Schedule, worth_a_try
from compile_stage.measure.rounds import OVERTIME
from compile_stage.measure.timed_answers import ANSWERED_OTHERWISE, Proof

_STEP = "benchmark/21"
_ANSWERS = "timed-answers/2"


@record
class Measured:
    """Measurements by participant, failures of those that crashed during benchmarking, and whether it came from the
    cache."""

    measurements: Mapping[str, Measurement]
    failures: Mapping[str, Failure]
    cached: bool


TrySettings: TypeAlias = Callable[[str, Callable[[str, str], bool]], Sequence[Candidate]]
"""Given a job, and which settings are wanted, by what they are for and the id of the job that has them: validated
candidates."""


@record
class CandidatesRequest:
    """What is asked of the measurement of a target's candidates.

    Attributes:
        proof: What the answers are compared with that are given while they are timed.
        seconds: For the rounds: the policy's `budget.measure_seconds`, or what `budget.minutes` leaves of it.
        overtime: Times that, where there are too few rounds.
        try_settings: Of contenders: the same artifacts with settings that are tried unasked. They join the later
            starts.
    """

    samples: SampleSet
    proof: Proof
    seconds: float
    overtime: float = OVERTIME
    try_settings: TrySettings | None = None


def benchmark_candidates(
    context: Context,
    plan: Plan,
    target_policy: TargetPolicy,
    candidates: Sequence[Candidate],
    wanted: CandidatesRequest,
) -> tuple[list[Candidate], Measurement | None]:
    """The candidates with what was measured of those that are validated, and the original model's own measurement;
    behind a candidate those that joined with other settings.

    What already failed a tolerance is not measured: timings of a wrong answer decide nothing.
    """
    validated = {c.job.id: c.artifact for c in candidates if c.has_passed and c.artifact}
    if not validated:
        return list(candidates), None
    first, joined = dict(validated), _Joined(wanted)

    def join(measured: Mapping[str, Measurement]) -> tuple[Mapping[str, Artifact], Proof]:
        more = joined.behind(worth_a_try(measured, BASELINE, target_policy.target.threads))
        validated.update(more)
        return more, wanted.proof.and_of(joined.candidates)

    target, budget = target_policy.target, plan.policy.budget
    gates = target_policy.performance
    holding = tuple(gate for gate in gates if gate.metric in ("size_mb", "memory_mb"))
    drop_behind = holding if target_policy.prunes_slow else None

    def decided(name: str, measured: Measurement) -> bool:
        return bool(measured.stopped_early) or are_decided(gates, measured, validated[name].size_bytes)

    def holds(name: str, measured: Measurement) -> bool | None:
        return gates_hold(gates, measured, validated[name].size_bytes)

    request = MeasurementRequest(
        label=target.name,
        samples=wanted.samples,
        target=target,
        budget=budget,
        overtime=wanted.overtime,
        left_s=wanted.seconds if wanted.seconds < budget.measure_seconds or wanted.overtime < OVERTIME else None,
        seed=plan.policy.data.seed,
        min_calls=calls_needed(gates),
        decided=decided,
        drop_behind=drop_behind,
        # Where size or memory decides, the winner may be a slow one, and its speedup is wanted as narrowly.
        holds=holds if target_policy.prefer in ("latency", "throughput") else None,
        proof=wanted.proof,
        more=join if wanted.try_settings is not None else None,
    )
    results = benchmark(context, plan.source, first, request)
    if results.cached:
        joined.behind_measured(set(results.measurements) - {BASELINE}, list(first))
    state: CacheState = "hit" if results.cached else "miss"
    measured: list[Candidate] = []
    for candidate in candidates:
        if candidate.job.id not in first:
            measured.append(candidate)
            continue
        behind = [one for one in joined.by_job.get(candidate.job.id, ()) if one.job.id in results.measurements]
        own = [candidate, *behind]
        measured += [_measured(replace(c, cache={**c.cache, "benchmark": state}), results) for c in own]
    return measured, results.measurements.get(BASELINE)


class _Joined:
    """Candidates with settings that are tried unasked, by the job that they are laid over."""

    def __init__(self, wanted: CandidatesRequest) -> None:
        self._make = wanted.try_settings
        self.by_job: dict[str, list[Candidate]] = {}

    @property
    def candidates(self) -> list[Candidate]:
        return [one for found in self.by_job.values() for one in found]

    def behind(self, worth: Mapping[str, Mapping[str, float]]) -> dict[str, Artifact]:
        """Make those that are worth a try (`restarts.worth_a_try`): on the fastest whose backend offers any, and on
        who may be as fast; what joins, by name."""
        for purpose, jobs in worth.items():
            tried: list[float] = []
            for job, latency in jobs.items():
                if len(tried) == MOST_TRIED or (tried and latency > CONTENDER * tried[0]):
                    break
                if self._add(job, partial(_is_for, purpose)):
                    tried.append(latency)
        return {one.job.id: one.artifact for one in self.candidates if one.artifact is not None}

    def behind_measured(self, names: set[str], jobs: Sequence[str]) -> None:
        """Those of a measurement that was made before."""
        for job in jobs:
            if any(name.startswith(f"{job}--") for name in names):
                self._add(job, lambda _, name: name in names)

    def _add(self, job: str, wanted: Callable[[str, str], bool]) -> bool:
        made = self._make(job, wanted) if self._make is not None else ()
        held = self.by_job.setdefault(job, []) if made else []
        known = {one.job.id for one in held}  # of a measurement that was begun again
        held += [one for one in made if one.job.id not in known]
        return bool(made)


def _is_for(wanted: str, purpose: str, _: str) -> bool:
    return purpose == wanted


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
    context: Context,
    policy: Policy,
    target_result: TargetResult,
    successor: Artifact,
    incumbent: Artifact | None,
    incumbent_threads: int | None = None,
) -> Measurement | None:
    """What a target would ship, with `incumbent` as its baseline; None when there is nothing to compare.

    Args:
        incumbent_threads: With which it serves; None for the target's.

    Raises:
        CompileStageError: The incumbent can't be run on this run's samples.
    """
    target, limit = target_result.policy.target, 1 / target_result.policy.promote.max_slowdown
    if incumbent is None:
        return None

    def decided(_: str, measured: Measurement) -> bool:
        intervals = [t.speedup_interval or (0.0, math.inf) for t in measured.timings if not speedups.is_resolved(t)]
        return all(low >= limit or high < limit for low, high in intervals)

    request = MeasurementRequest(
        label=f"{target.name} (against the promoted version)",
        samples=target_result.samples["validation"],
        target=target,
        budget=policy.budget,
        seed=policy.data.seed,
        decided=decided,
        baseline_threads=incumbent_threads,
    )
    results = benchmark(context, incumbent, {successor.job_id: successor}, request)
    return results.measurements.get(successor.job_id)


def benchmark(
    context: Context,
    baseline: SourceModel | Artifact,
    artifacts: Mapping[str, Artifact],
    request: MeasurementRequest,
) -> Measured:
    """Measure `artifacts` (name → artifact) against `baseline`, alone on the machine.

    Where somebody kills the process of one of them, all are measured once more: a slower one would win else. An
    artifact that answered otherwise than it was proven to while an earlier run timed it fails again without being
    measured: one that is wrong now and then would pass in some later run.

    Returns:
        What a reader should know of all of it, such as that the machine was busy, is in the notes of the baseline's
        measurement.
    """
    keys = {name: _key_of_answers(context, artifact, name, request) for name, artifact in artifacts.items()}
    earlier = {name: failure for name, key in keys.items() if key and (failure := _wrong_before(context, key))}
    asked_anew = context.remeasure or request.each_time
    left = {name: artifact for name, artifact in artifacts.items() if asked_anew or name not in earlier}
    if artifacts and not left:
        return Measured(measurements={}, failures=earlier, cached=True)
    measured = _benchmark(context, baseline, left, request)
    for name in left:
        failure = measured.failures.get(name)
        is_wrong = failure is not None and failure.problem.startswith(ANSWERED_OTHERWISE)
        if (key := keys[name]) and (is_wrong or (name in earlier and failure is None)):
            context.cache.fetch(_ANSWERS, key, partial(_kept, failure), anew=True)
    known = {name: failure for name, failure in earlier.items() if name not in left}
    return replace(measured, failures={**measured.failures, **known})


def _key_of_answers(
    context: Context, artifact: Artifact, name: str, request: MeasurementRequest
) -> dict[str, Any] | None:
    """What decides whether the answers that it gives while it is timed are right; None where nobody looks at them."""
    if request.proof is None or name not in request.proof.gates:
        return None
    return cache_key({
        "artifact": _loaded(artifact),
        "proof": request.proof.only(name).key(),
        "samples": request.samples.digest,
        "batch_sizes": list(request.target.batch_sizes),
        "threads": request.target.threads,
        "device": request.target.device,
        "hardware": context.hardware,
    })  # fmt: skip


def _kept(failure: Failure | None, _: object) -> Failure | None:
    return failure


def _wrong_before(context: Context, key: Mapping[str, Any]) -> Failure | None:
    """How it failed when it was timed before."""
    stored = context.cache.read(_ANSWERS, key)
    if stored is None or stored.value is None:
        return None
    failure: Failure = revive(Failure, stored.value)
    again = "in an earlier run; with --remeasure it is measured again"
    return replace(failure, problem=f"{failure.problem}, {again}")


def _benchmark(
    context: Context,
    baseline: SourceModel | Artifact,
    artifacts: Mapping[str, Artifact],
    request: MeasurementRequest,
) -> Measured:
    models: dict[str, SourceModel | Artifact] = {BASELINE: baseline, **artifacts}
    starts = 1 if request.first_look else request.starts or MORE_PROCESSES

    def measure(asked: MeasurementRequest) -> dict[str, Measurement]:
        left_s = request.left_s
        schedule = Schedule(request.budget.measure_seconds if left_s is None else left_s, starts=starts)
        measuring = ProcessStarts(context, asked, dict(models), schedule)
        measured = measuring.measure()
        if measuring.failures:
            raise _PartialError(measured, measuring.failures)
        return measured

    def decided(measured: Mapping[str, Measurement]) -> bool:
        # Who joined was a try: that it is undecided has nobody measure all others again.
        # A baseline that its threads held up leaves each speedup open.
        return held_up(measured[BASELINE]) is None and all(request.decided(name, measured[name]) for name in artifacts)

    def kept(key: Mapping[str, Any]) -> Mapping[str, Measurement]:
        stored = context.cache.read(_STEP, cache_key(key))
        return revive(Mapping[str, Measurement], stored.value) if stored is not None else {}

    key = _key(context, baseline, artifacts, request)
    if request.left_s is not None and not context.remeasure:
        # One that had all of its time is the better one, unless it would be made anew.
        whole = _key(context, baseline, artifacts, replace(request, left_s=None, overtime=OVERTIME))
        if (known := kept(whole)) and decided(known):
            key = whole
    before = kept(key)
    tries = max((measurement.tries for measurement in before.values()), default=0)
    is_open = bool(before) and not decided(before)

    def make(_: Any) -> dict[str, Measurement]:
        measured = once_more_after_a_kill(lambda again: measure(replace(request, after_a_kill=again)))
        return {name: replace(measurement, tries=tries + 1) for name, measurement in measured.items()}

    try:
        anew = context.remeasure or (is_open and (request.each_time or tries < MOST_TRIES))
        cached = context.cached(_STEP, request.label, key, make, anew=anew)
    except _PartialError as error:  # a failure is never cached, and the others' numbers still hold
        return Measured(measurements=error.measurements, failures=error.failures, cached=False)
    measured = dict(revive(Mapping[str, Measurement], cached.value))
    base = measured[BASELINE]
    notes = [_note_of_tries(request.label, base.tries)] if base.tries > 1 else []
    if cached.hit and (unstable := _unstable(measured)):
        notes.append(
            f"The measurement of {request.label} comes from the cache, and the speedup of {', '.join(unstable)} is "
            "unstable: on a quieter machine, run again with --remeasure"
        )
    elif cached.hit and is_open:
        notes.append(
            f"The measurement of {request.label} comes from the cache, since {base.tries} left a limit open: on a "
            "quieter machine, run again with --remeasure"
        )
    measured[BASELINE] = replace(base, notes=(*base.notes, *notes))
    return Measured(measurements=measured, failures={}, cached=cached.hit)


def _note_of_tries(label: str, tries: int) -> str:
    earlier = "1 earlier measurement" if tries == 2 else f"{tries - 1} earlier measurements"
    return (
        f"The figures of {label} take the place of {earlier} of the same models on this machine (a limit was open, or "
        "--remeasure). Each lets through about one in twenty of what is just at its limit"
    )


def _key(
    context: Context, baseline: SourceModel | Artifact, artifacts: Mapping[str, Artifact], request: MeasurementRequest
) -> dict[str, Any]:
    """What a measurement depends on."""
    target = request.target
    return {
        "baseline": _loaded(baseline),
        "artifacts": {name: _loaded(artifact) for name, artifact in artifacts.items()},
        "samples": request.samples.digest,
        "batch_sizes": list(target.batch_sizes),
        "generation": target.generation,
        "threads": target.threads,
        "baseline_threads": request.baseline_target.threads,
        "device": target.device,
        "seconds": request.budget.measure_seconds,
        "seed": request.seed,
        "min_calls": request.min_calls,
        "hardware": context.hardware,
        "drop_behind": request.drop_behind,
        "overtime": request.overtime if request.left_s is None else None,
        "leaving": request.holds is not None,
        "starts": request.starts,
        "first_look": request.first_look,
        "proof": request.proof.key() if request.proof is not None else None,
    }


def _unstable(measured: Mapping[str, Measurement]) -> list[str]:
    """The participants that were measured to the end, and whose speedup has no figure."""
    return [
        name
        for name, measurement in measured.items()
        if not measurement.stopped_early and not all(timing.stable for timing in measurement.timings)
    ]


def are_decided(gates: Sequence[Gate], measured: Measurement, size_bytes: int | None) -> bool:
    """Whether more measuring could not change what the gates on performance say (`MeasurementRequest.decided`)."""
    return not any(_left_open(check, measured) for check in check_performance(gates, measured, size_bytes))


def _left_open(check: Check, measured: Measurement) -> bool:
    """True for a limit that was missed only because the machine was too unsteady to show more, and for a latency that
    missed it on a busy one: what others' work adds to it is no part of the artifact."""
    timing = measured.timing(check.batch_size) if check.batch_size is not None else None
    if check.outcome is not Outcome.FAIL or timing is None:
        return False
    if check.gate.metric != "speedup":  # a latency: its bounds hold the limit
        return measured.busy or is_too_uncertain(check)
    if speedups.is_resolved(timing):
        return False
    return check.interval is None or check.interval[1] >= check.gate.limit


def _loaded(model: SourceModel | Artifact) -> dict[str, Any]:
    """What decides how fast a model runs: its files, and all that loads them."""
    if isinstance(model, SourceModel):
        return {"source": model.identity, "made_by": plugins.cache_identity("sources", model.flavor)}
    made_by = plugins.cache_identity("backends", model.backend)
    return {"digest": model.digest, "options": model.options, "toolchain": model.toolchain, "made_by": made_by}


class _PartialError(Exception):
    def __init__(self, measurements: Mapping[str, Measurement], failures: Mapping[str, Failure]) -> None:
        super().__init__("some participants failed while they were measured")
        self.measurements, self.failures = measurements, failures
