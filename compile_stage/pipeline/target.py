"""One target, from its inputs to the selection among its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compile_stage.core.context import Context
from compile_stage.core.generation import session_signature
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Answers, Candidate, Job, Plan, Refusal, SampleSet, TargetPolicy, TargetResult
from compile_stage.core.sample_sizes import confidence_notes
from compile_stage.measure.constant_answers import constant_notes
from compile_stage.measure.predict import open_outputs
from compile_stage.measure.previews import previews_of, worst_samples
from compile_stage.measure.timed_answers import Proof
from compile_stage.pipeline.evaluate import evaluate_all
from compile_stage.pipeline.inputs import TargetInputs, TargetRun
from compile_stage.pipeline.many_candidates import notes as notes_on_confidence
from compile_stage.pipeline.many_candidates import select_confirmed
from compile_stage.pipeline.mixed_precision import search_missed
from compile_stage.pipeline.option_tuning import Tuning, lay_out, tune
from compile_stage.pipeline.pruning import dropped_too_soon, to_validate
from compile_stage.pipeline.time_left import late_note
from compile_stage.pipeline.tried_settings import tried_settings
from compile_stage.pipeline.unfit_samples import refusal, unfit, unfit_limits, unfit_source
from compile_stage.steps.benchmark import CandidatesRequest, benchmark_candidates
from compile_stage.steps.judge import judge_performance
from compile_stage.steps.reference import copies_notes, rounding_notes
from compile_stage.steps.sample import compare_samples
from compile_stage.steps.select import select
from compile_stage.steps.sync_tuning_records import pull_records, pull_shared_records
from compile_stage.steps.write_texts import write_texts


@dataclass(frozen=True)
class OpenedTarget:
    """A target whose validation samples were read.

    Attributes:
        jobs: Those that may pass, or are compiled for hardware that is not here.
        refused: The others.
        inputs: For `jobs`; None where there are none.
    """

    policy: TargetPolicy
    jobs: tuple[Job, ...] = ()
    refused: tuple[Refusal, ...] = ()
    inputs: TargetInputs | None = None


def open_target(context: Context, source_worker: Worker, plan: Plan, policy: TargetPolicy) -> OpenedTarget:
    """Read a target's validation samples, and refuse the jobs that can't pass with them or their limits.

    Raises:
        SourceError: The source can't be exported or sampled as this target asks.
    """
    jobs, data = tuple(job for job in plan.jobs if job.target.name == policy.target.name), plan.policy.data
    if not jobs:
        return OpenedTarget(policy)
    early = unfit_source(jobs, data)
    if len(early) == len(jobs):
        return OpenedTarget(policy, refused=tuple(refusal(job, early[job.id]) for job in jobs))
    inputs = TargetInputs(context, source_worker, plan.source, data, policy.target, jobs)
    signature = session_signature(inputs.exported.signature, policy.target.generation)
    reasons = unfit_limits(jobs, policy.performance, signature, plan.policy.budget)
    reasons |= unfit(jobs, inputs.validation, data, signature)
    left = tuple(job for job in jobs if job.id not in reasons)
    if left != jobs:
        inputs = TargetInputs(context, source_worker, plan.source, data, policy.target, left)
    refused = tuple(refusal(job, reasons[job.id]) for job in jobs if job.id in reasons)
    return OpenedTarget(policy, left, refused, inputs if left else None)


def run_target(context: Context, source_worker: Worker, plan: Plan, opened: OpenedTarget) -> TargetResult:
    """Everything of one target: inputs, candidates, searches, measurement, selection.

    Raises:
        SourceError: The source can't be run as this target asks.
    """
    policy, jobs, inputs = opened.policy, opened.jobs, opened.inputs
    if inputs is None:
        return _without_jobs(plan, opened)
    inputs.make()
    notes = pull_records(context, plan.source, jobs)
    notes += pull_shared_records(context, jobs)
    notes += confidence_notes(
        jobs,
        inputs.validation.independent,
        inputs.validation.unit,
        of_winner=policy.confidence_of == "winner",
    )
    notes += copies_notes(inputs.validation, inputs.reference)
    notes += rounding_notes(inputs.reference)
    with context.naming_what_is_gone():
        notes += constant_notes(jobs, open_outputs(inputs.reference.outputs))
    target = TargetRun(context, plan, policy, inputs)
    of_samples: list[str] = []

    def compare() -> None:
        limits = WorkerLimits.within(plan.policy.budget)
        of_samples.extend(compare_samples(context, limits, inputs.portable, inputs.samples))

    candidates = evaluate_all(target, jobs, prune=policy.prunes_slow, meanwhile=compare)
    notes = (*of_samples, *notes)
    if not any(candidate.has_passed for candidate in candidates):
        candidates, validated = _validate_pruned(target, candidates, winner=None)
        notes += validated
    competition = _Competition(target)
    result = competition.run(candidates)
    while True:
        candidates, validated = _validate_pruned(target, candidates, result.winner)
        again = competition.without_failed(result)
        if not validated and not again:
            break
        notes += (*validated, *again)
        result = competition.run(candidates)
    if plan.policy.report.samples:
        limits = policy.target, plan.policy.budget
        texts = write_texts(context, source_worker, plan.source, result.candidates, inputs.validation, limits)
        result = replace(result, texts=texts)
    notes += notes_on_confidence(target, result.candidates)
    return replace(
        _with_samples(result, inputs.validation, shown=plan.policy.report.samples),
        refused=opened.refused,
        samples=inputs.samples,
        notes=(*notes, *result.measurement_notes, *late_note(result.candidates, plan.policy.budget.minutes)),
    )


def _with_samples(result: TargetResult, validation: SampleSet, *, shown: bool) -> TargetResult:
    """The result with the worst samples where the policy lets reports show them, else without what was answered to
    them."""
    if shown:
        worst = worst_samples(result.candidates, result.selection.winner)
        return replace(result, previews=previews_of(validation, worst))
    return replace(result, candidates=tuple(_without_answers(c) for c in result.candidates))


def _without_answers(candidate: Candidate) -> Candidate:
    errors = tuple(
        replace(output, worst=tuple(replace(worst, original="", candidate="") for worst in output.worst))
        for output in candidate.errors
    )
    return replace(candidate, errors=errors)


@dataclass
class _Competition:
    """From the evaluated candidates to the selection. It is run again where that shows that one was left out too soon.

    Attributes:
        entered: All candidates of the last run as they were before it was measured.
        tuning: What option tuning tried.
        failed: By job's id, who failed while it was measured, or called. It is not measured again.
    """

    target: TargetRun
    entered: list[Candidate] = field(default_factory=list)
    tuning: Tuning | None = None
    failed: dict[str, Candidate] = field(default_factory=dict)

    def run(self, candidates: Sequence[Candidate]) -> TargetResult:
        """Search, tune, measure, judge and select."""
        target, policy, run_policy = self.target, self.target.policy, self.target.run_policy
        self._enter(candidates)
        inputs = target.inputs
        proof = Proof.beside(inputs.reference, self.entered)
        entering = [c for c in self.entered if c.has_passed and c.job.id not in self.failed]
        measuring = target.time.for_measuring(entering)
        out = {c.job.id: c for c in measuring.late} | self.failed
        request = CandidatesRequest(
            samples=inputs.validation,
            proof=proof,
            seconds=measuring.seconds,
            overtime=measuring.overtime,
            try_settings=tried_settings(target, self.entered),
        )
        timely = [out.get(c.job.id, c) for c in self.entered]
        measured, baseline = benchmark_candidates(target.context, target.plan, policy, timely, request)
        judged = tuple(
            c if c.job.id in self.failed else judge_performance(c, policy, run_policy.waivers, target.context.today)
            for c in measured
        )
        reference, seed = inputs.reference, run_policy.data.seed
        original = Answers(
            outputs=dict(reference.outputs),
            digest=reference.digest,
            samples=inputs.validation,
            seed=seed,
            mixed_batch=reference.batch_size if reference.mixed_rows else None,
        )
        judged, selection = select_confirmed(target, judged, original, timely)
        return TargetResult(
            policy=policy,
            original=original,
            candidates=judged,
            selection=selection,
            baseline=baseline,
            ladder=lay_out(self.tuning, judged, selection, baseline, policy) if self.tuning is not None else (),
        )

    def without_failed(self, result: TargetResult) -> tuple[str, ...]:
        """Leave out from now on who failed, where another was dropped behind it that may win without it: a sentence
        for each of those. Empty where a further run would bring nothing."""
        policy, waivers = self.target.policy, self.target.run_policy.waivers
        dropped = dropped_too_soon(result.candidates, policy, waivers, result.winner)
        passed = {candidate.job.id for candidate in self.entered if candidate.has_passed} - set(self.failed)
        failed = {c.job.id: c for c in result.candidates if c.state == "failed" and c.job.id in passed}
        if not dropped or not failed:
            return ()
        self.failed |= failed
        whom = ", ".join(failed)
        return tuple(f"{c.job.id} was {c.reason}; it was measured again without {whom}, which failed" for c in dropped)

    def _enter(self, candidates: Sequence[Candidate]) -> None:
        """The candidates with what was searched and tuned. What an earlier run found stays, for which there may be no
        time again."""
        entered, tuning = tune(self.target, search_missed(self.target, candidates))
        before = {candidate.job.id: candidate for candidate in self.entered}
        searched = {job_id for job_id, candidate in before.items() if candidate.trials}
        entered = [before[c.job.id] if c.job.id in searched and not c.trials else c for c in entered]
        now = {candidate.job.id for candidate in entered}
        self.entered = [*entered, *(c for job_id, c in before.items() if c.has_passed and job_id not in now)]
        if self.tuning is None or tuning is None or tuning.base != self.tuning.base:
            self.tuning = tuning


def _validate_pruned(
    target: TargetRun, candidates: Sequence[Candidate], winner: Candidate | None
) -> tuple[list[Candidate], tuple[str, ...]]:
    """The candidates with those validated that were pruned too soon, and a sentence for each of these.

    Args:
        winner: Of their competition; None where no candidate passed.
    """
    wanted = to_validate(candidates, target.policy, target.run_policy.waivers, winner)
    validated = {c.job.id: c for c in evaluate_all(target, [c.job for c in wanted])} if wanted else {}
    because = f"{winner.job.id} is not far ahead of it" if winner is not None else "no other candidate passed"
    notes = tuple(f"{c.job.id} was pruned ({c.reason}), and then validated after all, since {because}" for c in wanted)
    return [validated.get(c.job.id, c) for c in candidates], notes


def _without_jobs(plan: Plan, opened: OpenedTarget) -> TargetResult:
    policy, selection = opened.policy, select((), opened.policy)
    refused = [one for one in plan.refused if one.target == policy.target.name]
    why = "; ".join(dict.fromkeys(one.reason for one in (*refused, *opened.refused)))
    reason = f"{selection.reason}: {why}" if why else selection.reason
    selection = replace(selection, reason=reason)
    return TargetResult(policy=policy, candidates=(), selection=selection, refused=opened.refused)
