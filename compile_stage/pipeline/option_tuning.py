"""Option tuning of a target: on the fastest candidate that passes, its backend's options are tried, as long as the
run's budget lasts: one by one what must be compiled, then in combination the settings that only change how a model is
opened.

Each option, and the best combination, is compiled, validated in full, and measured in turns with what it is laid over.
The accepted ones join the candidates: they are measured with all others and selected like any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import (
    Artifact,
    Candidate,
    JsonMap,
    Measurement,
    OptimizationStep,
    Selection,
    TargetPolicy,
    Timing,
    TuningOption,
    record,
)
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.restarts import shared_rounds, spread_seen
from compile_stage.measure.speedups import ASSUMED_SPREAD, Spread
from compile_stage.measure.successive_halving import FoundSettings
from compile_stage.pipeline.evaluate import EvaluationOptions, evaluate, fastest
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.settings_search import (
    describe_search,
    describe_setting,
    find_settings,
    settings_failed,
    settings_of,
)
from compile_stage.pipeline.tuning_options import is_better, laid_over, options_of, refuse_option, tuned_job
from compile_stage.steps.benchmark import BASELINE, benchmark

_COMPARE_S = 8.0
"""An option and what it is laid over are measured in turns for at most so long; on a quiet machine their ratio is known
to 2 % after a second or two. It decides what is accepted; what is claimed is measured with all others."""


_PROVEN = 2
"""Of the combinations that a search ends with, so many are compiled and validated, until one is accepted."""


@record
class Tuning:
    """What was tried on a target, before everything is measured together.

    Attributes:
        base: Job id of the candidate that the options were tried on; empty when there was none.
        why: Why that one.
        steps: One for each option, in order.
        reason: Why there was no base, or nothing to try; empty when there was.
    """

    base: str = ""
    why: str = ""
    steps: tuple[OptimizationStep, ...] = ()
    reason: str = ""


def tune(target: TargetRun, candidates: Sequence[Candidate]) -> tuple[list[Candidate], Tuning | None]:
    """The candidates, behind the base those with the options that were accepted, and what was tried; None when the
    policy wants no tuning."""
    if not target.policy.ladder:
        return list(candidates), None
    tuner = _Tuner(target)
    base, why = tuner.base_of(candidates)
    if base is None:
        return list(candidates), Tuning(reason="no candidate passed every tolerance")
    accepted, steps = [base], []
    offered = options_of(base.job.backend, base.job.target, base.job.scheme)
    combined = tuner.searched(offered)
    for option in offered:
        if option in combined:
            continue
        step, candidate = tuner.step((option,), accepted[-1])
        steps.append(step)
        if candidate is not None:
            accepted.append(candidate)
    if combined:
        found, candidate = tuner.search(combined, accepted[-1])
        steps += found
        if candidate is not None:
            accepted.append(candidate)
    missing = "" if offered else f"{base.job.backend} offers no options for memory or tuning here"
    with_accepted = [one for candidate in candidates for one in (accepted if candidate is base else [candidate])]
    return with_accepted, Tuning(base=base.job.id, why=why, steps=tuple(steps), reason=missing)


class _Tuner:
    """Tries options for one target until its share of the budget is used up."""

    def __init__(self, target: TargetRun) -> None:
        # The final measurement of all candidates keeps its own part of the budget.
        left_s = target.time.seconds - target.run_policy.budget.measure_seconds
        self._ends = time.monotonic() + min(left_s, target.time.for_searches_s)
        self._target = target

    @property
    def _seconds(self) -> float:
        return self._ends - time.monotonic()

    def base_of(self, candidates: Sequence[Candidate]) -> tuple[Candidate | None, str]:
        """What the options are tried on, and why: the fastest that passes by quick latency, or the fastest of the
        smallest."""
        passing, which = [c for c in candidates if c.has_passed], "that passes"
        if self._target.policy.prefer == "size":
            least = min((_size(c) for c in passing), default=0)
            passing, which = [c for c in passing if _size(c) == least], "of the smallest that pass"
        if len(passing) < 2:
            return (passing[0], f"the only one {which}") if passing else (None, "")
        best = fastest(self._target, passing, self._seconds)
        if best is None:
            return passing[0], f"the first {which}: none could be timed"
        return best[0], f"the fastest {which}, by its quick latency"

    def searched(self, offered: Sequence[TuningOption]) -> list[TuningOption]:
        """The settings that are searched in combination: none where the policy gives that no time, or takes memory at
        any latency, which needs no search."""
        settings = settings_of(offered)
        wanted = self._target.run_policy.budget.search_minutes > 0 and self._target.policy.prefer != "memory"
        return settings if wanted and len(settings) > 1 else []

    def search(
        self, options: Sequence[TuningOption], below: Candidate
    ) -> tuple[list[OptimizationStep], Candidate | None]:
        """The best combination of settings on top of what was accepted, and the candidate when it is accepted too.

        Returns:
            A step for what was compiled, and one for each setting that is no part of what was accepted.
        """
        refused = {option.name: self._refuse(option, below) for option in options}
        free = [option for option in options if refused[option.name] is None]
        found, reason = FoundSettings(), ""
        if free:
            seconds = min(self._seconds, 60 * self._target.run_policy.budget.search_minutes)
            with self._target.context.events.step("ladder", f"{below.job.id}: settings in combination"):
                try:
                    found = find_settings(self._target, below, free, seconds)
                except CompileStageError as error:
                    reason = settings_failed(error)
        steps, accepted, proven = [], None, []
        for ranked in found.ranked[:_PROVEN]:
            proven.append(ranked.settings)
            step, accepted = self.step([option for option in free if option.name in ranked.settings], below)
            steps.append(replace(step, reason=f"{step.reason}; {describe_search(found)}"))
            if accepted is not None:
                break
        kept = accepted.job.tuning_options if accepted is not None else ()
        for option in options:
            if option.name not in kept and (option.name,) not in proven:
                why = refused[option.name] or reason or describe_setting(option.name, found, proven)
                step = OptimizationStep(kind=option.kind, name=option.name, accepted=False, options=option.options)
                steps.append(replace(step, reason=why, tried=option.name in (found.alone or {})))
        return steps, accepted

    def _refuse(self, option: TuningOption, below: Candidate) -> str | None:
        """Why an option is not tried on what was accepted."""
        if (reason := refuse_option(option, below.job)) is not None:
            return reason
        if self._seconds > 0:
            return None
        minutes = self._target.run_policy.budget.minutes
        late = f"nothing is left of the budget of {minutes:g} minutes beside the measurement of all candidates"
        return f"not tried: {late}"

    def step(self, options: Sequence[TuningOption], below: Candidate) -> tuple[OptimizationStep, Candidate | None]:
        """Options on top of what was accepted, in one step; the candidate when they are accepted too."""
        merged: JsonMap = {}
        for option in options:
            merged = laid_over(merged, option.options)
        name = "+".join(option.name for option in options)
        step = OptimizationStep(kind=options[-1].kind, name=name, accepted=False, options=merged)
        for option in options:
            if (reason := self._refuse(option, below)) is not None:
                return replace(step, reason=reason, tried=False), None
        job, lowered = below.job, below.portable
        for option in options:
            job = tuned_job(job, option)
        step = replace(step, job_id=job.id)
        with self._target.context.events.step("ladder", job.id):
            lower = (lambda _: lowered) if lowered is not None else None
            candidate = evaluate(self._target, job, EvaluationOptions(lower=lower, seconds=self._seconds)).candidate
            if not candidate.has_passed or candidate.artifact is None:
                return replace(step, reason=f"rejected: {candidate.reason}"), None
            accepted, reason = self._compare(candidate.artifact, below.artifact)
        return replace(step, accepted=accepted, reason=reason), candidate if accepted else None

    def _compare(self, own: Artifact, below: Artifact | None) -> tuple[bool, str]:
        """Measured in turns with what it is laid over: is it better, and a sentence."""
        policy, run_policy, name = self._target.policy, self._target.run_policy, own.job_id
        if below is None or self._seconds <= 0:
            return False, "rejected: no time was left to measure it"
        budget, left_s = run_policy.budget, self._seconds
        wanted_s = min(budget.measure_seconds, _COMPARE_S)
        request = MeasurementRequest(
            label=name,
            samples=self._target.inputs.validation,
            target=replace(policy.target, batch_sizes=policy.target.batch_sizes[:1]),
            # What is left is another number in each run: the cache's key holds what is wanted.
            budget=replace(budget, measure_seconds=wanted_s, job_minutes=min(budget.job_minutes, left_s / 60)),
            left_s=left_s if left_s < wanted_s else None,
            seed=run_policy.data.seed,
        )
        try:
            measured = benchmark(self._target.context, below, {name: own}, request)
        except CompileStageError as error:
            return False, f"rejected: the step before could not be measured again ({error.problem})"
        if name in measured.failures:
            return False, f"rejected: it failed during benchmarking: {measured.failures[name].problem}"
        return is_better(measured.measurements[name], measured.measurements[BASELINE], policy)


# ---------------------------------------------------------------------------------------------------- as it is reported


def lay_out(
    tuning: Tuning,
    candidates: Sequence[Candidate],
    selection: Selection,
    baseline: Measurement | None,
    policy: TargetPolicy,
) -> tuple[OptimizationStep, ...]:
    """All steps from the original to the best, with what each accepted step gained over the one before.

    Args:
        candidates: All that were measured together, the tuned ones among them.
    """
    original = OptimizationStep(
        kind="original",
        name="",
        accepted=baseline is not None,
        reason="" if baseline is not None else "not measured: no candidate passed every tolerance",
        tried=baseline is not None,
    )
    by_id = {candidate.job.id: candidate for candidate in candidates}
    base = by_id.get(tuning.base)
    if base is None:
        return original, OptimizationStep(kind="graph", name="", accepted=False, reason=tuning.reason, tried=False)
    steps = [original, *_steps_to(base, tuning.why, candidates), *tuning.steps]
    if tuning.reason:
        steps.append(OptimizationStep(kind="memory", name="", accepted=False, reason=tuning.reason, tried=False))
    size = policy.target.batch_sizes[0]
    before, laid_out = _timing(baseline, size), []
    timings = [timing for c in candidates if (timing := _timing(c.measurement, size)) is not None]
    spread = spread_seen(before, timings) if before is not None else ASSUMED_SPREAD
    for step in steps:
        own = by_id.get(step.job_id) if step.accepted else None
        timing = _timing(own.measurement, size) if own is not None and own.verdict is not None else None
        if not step.job_id or not step.accepted:
            laid_out.append(step)
        elif timing is None:  # it was accepted, and then failed during benchmarking or missed its tolerance
            why = selection.reasons.get(step.job_id, "it was not measured")
            laid_out.append(replace(step, accepted=False, reason=why))
        else:
            laid_out.append(_gained(step, timing, before, spread))
            before = timing
    return tuple(laid_out)


def _steps_to(base: Candidate, chosen: str, candidates: Sequence[Candidate]) -> list[OptimizationStep]:
    """What the compiler makes of the graph in fp32, then the precision that the options are tried on."""
    backend, scheme = base.job.backend, base.job.scheme
    fp32 = next((c.job for c in candidates if c.job.backend == backend and c.job.scheme.precision == "fp32"), None)
    if fp32 is None:
        graph = OptimizationStep(
            kind="graph", name="fp32", accepted=False, reason=f"{backend} has no fp32 candidate here", tried=False
        )
    else:
        graph = OptimizationStep(
            kind="graph", name=fp32.scheme.name, job_id=fp32.id, reason=f"compiled by {backend}, in fp32"
        )
    if scheme.precision == "fp32":
        lower = any(c.job.scheme.precision != "fp32" for c in candidates)
        why = f"options are tuned on fp32: {chosen}" if lower else "no other precision was compiled"
        return [graph, OptimizationStep(kind="precision", name="", accepted=False, reason=why, tried=False)]
    why = f"{chosen}; {base.note}" if base.note else chosen
    return [graph, OptimizationStep(kind="precision", name=scheme.name, job_id=base.job.id, reason=why)]


def _gained(step: OptimizationStep, own: Timing, before: Timing | None, spread: Spread) -> OptimizationStep:
    """The step with its speedup over the one before, in the rounds that both ran: the slower of two that are far apart
    is not started again, and what processes differ by (`spread`) is then taken from the other candidates."""
    shared = shared_rounds(before, own) if before is not None else None
    if shared is None or not shared.own:
        return step
    ratio = shared.ratio(seed=0, spread=spread)
    return replace(step, speedup=ratio.value, speedup_interval=(ratio.low, ratio.high))


def _timing(measurement: Measurement | None, batch_size: int) -> Timing | None:
    return measurement.timing(batch_size) if measurement is not None else None


def _size(candidate: Candidate) -> int:
    return candidate.artifact.size_bytes if candidate.artifact is not None else 0
