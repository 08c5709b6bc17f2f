"""One target, from its inputs to the selection among its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compile_stage.core.context import Context
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Candidate, Plan, SampleSet, Selection, TargetPolicy, TargetResult
from compile_stage.core.sample_sizes import confidence_notes
from compile_stage.measure.previews import previews_of, worst_samples
from compile_stage.measure.timed_answers import Proof
from compile_stage.pipeline.evaluate import evaluate_all
from compile_stage.pipeline.inputs import TargetRun, prepare
from compile_stage.pipeline.mixed_precision import search_missed
from compile_stage.pipeline.option_tuning import lay_out, tune
from compile_stage.pipeline.pruning import to_validate
from compile_stage.pipeline.time_left import late_note
from compile_stage.pipeline.tried_settings import tried_settings
from compile_stage.steps.benchmark import CandidatesRequest, benchmark_candidates
from compile_stage.steps.judge import judge_performance
from compile_stage.steps.sample import compare_samples
from compile_stage.steps.select import select
from compile_stage.steps.soak import Answers, soak
from compile_stage.steps.sync_tuning_records import pull_records, pull_shared_records
from compile_stage.steps.write_texts import write_texts


def run_target(context: Context, source_worker: Worker, plan: Plan, policy: TargetPolicy) -> TargetResult:
    """Everything of one target: inputs, candidates, searches, measurement, selection.

    Raises:
        SourceError: The source can't be exported, sampled or run as this target asks.
    """
    jobs = [job for job in plan.jobs if job.target.name == policy.target.name]
    if not jobs:
        return _without_jobs(plan, policy)
    inputs = prepare(context, source_worker, plan.source, plan.policy.data, policy.target, jobs)
    notes = pull_records(context, plan.source, jobs)
    notes += pull_shared_records(context, jobs)
    notes += confidence_notes(jobs, inputs.validation.independent, inputs.validation.unit)
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
    result = _compete(target, candidates)
    while True:
        candidates, validated = _validate_pruned(target, candidates, result.winner)
        if not validated:
            break
        notes += validated
        result = _compete(target, candidates)
    if plan.policy.report.samples:
        limits = policy.target, plan.policy.budget
        texts = write_texts(context, source_worker, plan.source, result.candidates, inputs.validation, limits)
        result = replace(result, texts=texts)
    return replace(
        _with_samples(result, inputs.validation, shown=plan.policy.report.samples),
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


def _compete(target: TargetRun, candidates: Sequence[Candidate]) -> TargetResult:
    """From the evaluated candidates to the selection."""
    policy, run_policy = target.policy, target.run_policy
    searched = search_missed(target, candidates)
    with_tuned, tuning = tune(target, searched)
    inputs = target.inputs
    proof = Proof.of(with_tuned, inputs.reference.outputs, inputs.reference.digest)
    measuring = target.time.for_measuring([c for c in with_tuned if c.has_passed])
    late = {c.job.id: c for c in measuring.late}
    request = CandidatesRequest(
        samples=inputs.validation,
        proof=proof,
        seconds=measuring.seconds,
        overtime=measuring.overtime,
        try_settings=tried_settings(target, with_tuned),
    )
    timely = [late.get(c.job.id, c) for c in with_tuned]
    measured, baseline = benchmark_candidates(target.context, target.plan, policy, timely, request)
    judged = tuple(judge_performance(c, policy, run_policy.waivers, target.context.today) for c in measured)
    judged, selection = _soaked(target, judged)
    return TargetResult(
        policy=policy,
        candidates=judged,
        selection=selection,
        baseline=baseline,
        ladder=lay_out(tuning, judged, selection, baseline, policy) if tuning is not None else (),
    )


def _soaked(target: TargetRun, candidates: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], Selection]:
    """The selection whose winner holds the soak, and the candidates; whoever does not is out, and the next best is
    called."""
    inputs, budget = target.inputs, target.run_policy.budget
    samples, reference = inputs.validation, inputs.reference
    original = Answers(
        outputs=dict(reference.outputs), digest=reference.digest, samples=samples, seed=target.run_policy.data.seed
    )
    while True:
        selection = select(candidates, target.policy)
        if selection.winner is None:
            return tuple(candidates), selection
        tried = {
            c.job.id: soak(target.context, c, original, budget) for c in candidates if c.job.id == selection.winner
        }
        candidates = tuple(tried.get(c.job.id, c) for c in candidates)
        if tried[selection.winner].has_passed:
            return candidates, selection


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


def _without_jobs(plan: Plan, policy: TargetPolicy) -> TargetResult:
    selection = select((), policy)
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in plan.refused if refusal.target == policy.target.name))
    reason = f"{selection.reason}: {why}" if why else selection.reason
    return TargetResult(policy=policy, candidates=(), selection=replace(selection, reason=reason))
