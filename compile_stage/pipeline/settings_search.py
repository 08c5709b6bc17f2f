"""Settings that need no new compilation, searched in combination (`measure.successive_halving`) on one candidate.

A heat opens the candidate's own files with each combination's options, one process for each, and measures them in turns
with the candidate itself. Nothing that is found is shipped by that: the caller compiles, validates and compares it like
any tuned job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import Artifact, Candidate, Measurement, TuningOption
from compile_stage.engine.watch import free_memory_bytes
from compile_stage.measure import speedups
from compile_stage.measure.interleaved import BASELINE
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.restarts import shared_rounds
from compile_stage.measure.successive_halving import HEAT, Combination, FoundSettings, Limits, Raced, search_settings
from compile_stage.pipeline.evaluate import quick_latency
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.job_workers import TrialWorkers
from compile_stage.pipeline.tuning_options import laid_over, option_paths
from compile_stage.steps.benchmark import benchmark

_AROUND_TURN_S = 0.06
"""What is around a turn of 40 ms: inputs, messages, rest."""

_PROCESS_BYTES, _COPIES = 300_000_000, 4
"""What a process of a heat holds at most, as a rule: a runtime's packages, and the artifact so many times."""


def settings_of(options: Sequence[TuningOption]) -> list[TuningOption]:
    """Those that need no new compilation."""
    return [option for option in options if option.opening]


def find_settings(
    target: TargetRun, below: Candidate, options: Sequence[TuningOption], seconds: float
) -> FoundSettings:
    """The combinations of settings that are faster than the candidate as it is, the best first.

    Args:
        below: Validated; its files are what is opened.
        options: Settings, each with its `opening`.
        seconds: Nothing is begun later.

    Raises:
        CompileStageError: The candidate itself could not be measured again.
    """
    by_name = {option.name: option for option in options}
    artifact = below.artifact
    ends = time.monotonic() + seconds
    with closing(TrialWorkers(target, ends)) as workers:
        latency_s = quick_latency(target, below, workers.opened(below.job))
    if artifact is None or latency_s is None:
        return FoundSettings()
    heats = _Heats(target, artifact, by_name, latency_s, ends)
    limits = Limits(seconds=ends - time.monotonic(), heat=_heat_size(artifact))
    return search_settings(tuple(by_name), fitting(by_name), heats.race, limits)


def fitting(options: Mapping[str, TuningOption]) -> Callable[[Combination], bool]:
    """Whether settings of these names can be laid over each other: no two set the same."""

    def fits(chosen: Combination) -> bool:
        paths = [path for name in chosen for path in option_paths(options[name].options)]
        return len(paths) == len(set(paths))

    return fits


class _Heats:
    """Runs heats, each a measurement of its own, which the cache keeps."""

    def __init__(
        self,
        target: TargetRun,
        artifact: Artifact,
        options: Mapping[str, TuningOption],
        latency_s: float,
        ends: float,
    ) -> None:
        self._target, self._artifact, self._options = target, artifact, options
        self._turn_s, self._ends = max(0.04, latency_s) + _AROUND_TURN_S, ends

    def race(self, heat: Sequence[Combination], rounds: int, start: int) -> dict[Combination, Raced]:
        """As `measure.successive_halving.Race`."""
        policy, run_policy = self._target.policy.target, self._target.run_policy
        left_s, budget = max(1.0, self._ends - time.monotonic()), run_policy.budget
        wanted_s = round(rounds * (len(heat) + 1) * self._turn_s, 1)
        request = MeasurementRequest(
            label=f"{self._artifact.job_id} (settings, heat {start + 1})",
            samples=self._target.inputs.validation,
            target=replace(policy, batch_sizes=policy.batch_sizes[:1]),
            # What is wanted, not what is left: the cache's key holds it, and a run that was killed continues.
            budget=replace(budget, measure_seconds=wanted_s, job_minutes=min(budget.job_minutes, 1 + left_s / 60)),
            seed=run_policy.data.seed + start,
            starts=1,
        )
        named = {"+".join(one): one for one in heat}
        artifacts = {name: self._opened(name, one) for name, one in named.items()}
        measured = benchmark(self._target.context, self._artifact, artifacts, request).measurements
        plain = measured[BASELINE]
        seen = {one: _raced(measured[name], plain) for name, one in named.items() if name in measured}
        return {**seen, (): Raced(log_speedups=(), memory_bytes=plain.peak_memory_bytes)}

    def _opened(self, name: str, combination: Combination) -> Artifact:
        """The same files, opened with a combination's options."""
        options = dict(self._artifact.options)
        for setting in combination:
            options = laid_over(options, self._options[setting].opening)
        return replace(self._artifact, job_id=f"{self._artifact.job_id}--{name}", options=options)


def _raced(own: Measurement, plain: Measurement) -> Raced:
    if not own.timings or not plain.timings:
        return Raced(log_speedups=())
    shared = shared_rounds(plain.timings[0], own.timings[0])
    quotients = speedups.log_quotients(shared.base, shared.own, range(len(shared.own)))
    return Raced(log_speedups=tuple(float(one) for one in quotients), memory_bytes=own.peak_memory_bytes)


def _heat_size(artifact: Artifact) -> int:
    """As many as half of the free memory holds beside the plain model."""
    each = _PROCESS_BYTES + _COPIES * artifact.size_bytes
    return max(1, min(HEAT, free_memory_bytes() // 2 // each - 1))


def describe_search(found: FoundSettings) -> str:
    """How a combination was found."""
    ended = ", when the time of the search was up" if found.exhausted else ""
    return f"found among {found.valid} combinations of settings, {found.tried} of them measured{ended}"


def describe_setting(name: str, found: FoundSettings, proven: Sequence[Combination] = ()) -> str:
    """Why a setting is no part of what was accepted.

    Args:
        proven: The combinations that were compiled, validated and compared.
    """
    alone = (found.alone or {}).get(name)
    if alone is None:
        return "not tried: it could not be measured, or no time was left for it"
    within = next((one for one in proven if name in one), None)
    if within is not None:
        why = f"its combination {'+'.join(within)} was not accepted"
    elif found.ranked:
        why = "it is not in the best combination"
    else:
        why = f"no combination was better, {describe_search(found)}"
    return f"rejected: {why}; alone about {alone:.2f} times as fast as the step before"


def settings_failed(error: CompileStageError) -> str:
    """Why a search ended without an answer, as one sentence."""
    return f"not tried in combination: the step before could not be measured again ({error.problem})"
