"""A job of a policy that went wrong: the node at which the error departs, the nodes to keep in higher precision, and a
bundle for a bug report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.errors import UsageError
from compile_stage.core.generation import has_cache
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Candidate, Check, Job, Outcome, Plan, Sensitivity, Verdict
from compile_stage.core.spelling import did_you_mean
from compile_stage.diagnosis.findings import PACKAGES, SAMPLES, with_bundle, with_reduced_graph
from compile_stage.diagnosis.in_workers import trace
from compile_stage.graph_debug.comparison import Comparison
from compile_stage.graph_debug.diagnosis import Diagnosis, Failed, Kept
from compile_stage.graph_debug.graphs import INPUT_OP
from compile_stage.graph_debug.trace import Trace, rank
from compile_stage.pipeline.evaluate import Lower, evaluate
from compile_stage.pipeline.inputs import TargetInputs, TargetRun, source_limits
from compile_stage.pipeline.mixed_precision import Method, SearchBudget, find_mixed, searchable
from compile_stage.pipeline.tuning_options import find_tuned_job
from compile_stage.steps.export import inspect
from compile_stage.steps.lower import lower


def diagnose_job(context: Context, plan: Plan, pattern: str, out: Path, *, count: int = SAMPLES) -> Diagnosis:
    """Look into the first job that matches and does not pass; if only one matches, into that.

    Args:
        pattern: Glob over job ids.
        out: Folder of the bundle.
        count: Samples of the trace.

    Raises:
        UsageError: No job matches, or several do and all of them pass.
        SourceError: The source is refused or unreadable.
    """
    jobs = _matching(plan, pattern)
    limits = source_limits(plan.policy.budget, plan.source, plan.policy.data, plan.policy.files)
    with context.source_worker(plan.source, limits) as source_worker:
        inspect(context, source_worker, plan.source, plan.policy.compliance)
        for policy in plan.policy.targets:
            of_target = [job for job in jobs if job.target.name == policy.target.name]
            if not of_target:
                continue
            inputs = TargetInputs(context, source_worker, plan.source, plan.policy.data, policy.target, of_target)
            inputs.make()
            target = TargetRun(context, plan, policy, inputs)
            for job in of_target:
                candidate = evaluate(target, job).candidate
                if candidate.not_runnable_here and len(jobs) == 1:
                    raise UsageError(f"{job.id} can't be run on this machine: {candidate.not_runnable_here}")
                if len(jobs) == 1 or not (candidate.not_runnable_here or candidate.has_passed):
                    return _Diagnosing(target, source_worker, out, count).diagnose(candidate)
    raise UsageError(
        f"the answers of all {len(jobs)} jobs that match {pattern!r} pass, so there is none to look into; speed and "
        "size are not looked at here",
        fix=f"name one with --job: {', '.join(job.id for job in jobs)}",
    )


class _Diagnosing:
    """One candidate of a target."""

    def __init__(self, target: TargetRun, source_worker: Worker, out: Path, count: int) -> None:
        self._target, self._worker, self._out, self._count = target, source_worker, out, count

    def diagnose(self, candidate: Candidate) -> Diagnosis:
        job, artifact, inputs, context = candidate.job, candidate.artifact, self._target.inputs, self._target.context
        model = candidate.portable or inputs.portable
        if "stablehlo" in (model.form, inputs.portable.form):
            raise UsageError(f"{job.id} starts from StableHLO, and debug compares the nodes of ONNX graphs")
        if inputs.portable.form != "onnx":
            raise UsageError(f"the source of {job.id} has no ONNX, and debug compares the nodes of ONNX graphs")
        if has_cache(inputs.portable.signature):
            raise UsageError(f"{job.id} hands on a cache from token to token, and debug compares graphs of one pass")
        diagnosis = Diagnosis(
            title=job.id,
            precision=job.scheme.precision,
            backend=job.backend,
            reference=inputs.portable.path,
            candidate=str(Path(artifact.path) / artifact.entry) if artifact else model.path,
            misses=_misses(candidate.verdict),
            packages=plugins.package_versions(*PACKAGES),
        )
        if artifact is None:
            if candidate.portable is None:
                return replace(diagnosis, failed=Failed(step="lower", problem=_problem(candidate)))
            limits = WorkerLimits.within(self._target.run_policy.budget, job.target.threads)
            return with_reduced_graph(context, limits, diagnosis, job, candidate.portable, self._out)
        if Path(diagnosis.candidate).suffix not in (".onnx", ".xml"):
            note = f"{job.backend}'s tensors can't be read; its graph was run by ONNX Runtime instead"
            diagnosis = replace(diagnosis, candidate=model.path, notes=(note,))
        pair = Comparison(
            title=job.id,
            reference=diagnosis.reference,
            candidate=diagnosis.candidate,
            samples=inputs.validation,
            precision=job.scheme.precision,
            hint=str(artifact.options.get("hint", "f32")),
            threads=job.target.threads,
            worst=_worst(candidate),
        )
        traced = trace(context, self._worker, pair, self._count)
        diagnosis = self._searched(replace(diagnosis, trace=traced), candidate, traced)
        return with_bundle(context, self._worker, diagnosis, pair, self._out / "bundle")

    def _searched(self, diagnosis: Diagnosis, candidate: Candidate, traced: Trace) -> Diagnosis:
        """With the nodes to keep in higher precision, or a note that says why none were searched for."""
        verdict, scheme, note = candidate.verdict, candidate.job.scheme, ""
        if verdict is None:
            return replace(diagnosis, failed=Failed(step="validate", problem=_problem(candidate)))
        if verdict.passed:
            note = "it passes its gates, so no node needs a higher precision"
        elif not any(check.outcome is Outcome.FAIL for check in verdict.checks):
            note = "no gate failed: some could not be checked, and no precision changes that"
        elif scheme.native:
            note = f"{candidate.job.backend} lowers {scheme.name} itself, and can't keep named nodes in fp32"
        elif unknown := [check.gate.metric for check in verdict.checks if check.outcome is Outcome.NOT_RUN]:
            note = (
                f"no nodes to keep in higher precision were searched for: {', '.join(dict.fromkeys(unknown))} could "
                "not be checked, without which no candidate passes"
            )
        if note:
            return replace(diagnosis, notes=(*diagnosis.notes, note))
        return replace(diagnosis, kept=self._search(candidate, traced))

    def _search(self, candidate: Candidate, traced: Trace) -> Kept:
        """The search that `run` makes; where it makes none, as for fp16, the same by the trace's ranking."""
        target = self._target
        method = None if searchable(candidate) else Method(_by_trace(traced), self._lowering(candidate.job))
        with target.context.events.step("search", candidate.job.id):
            noted, mixed = find_mixed(target, candidate, SearchBudget.of(target), method=method)
        passing = [trial for trial in noted.trials if trial.passed]
        if mixed is None or not passing:
            return Kept(nodes=None, minimal=False, trials=noted.trials, note=noted.note)
        smallest = min(passing, key=lambda trial: len(trial.kept))
        ended = "budget ended it" in noted.note
        return Kept(nodes=smallest.kept, minimal=not ended, trials=noted.trials, note=noted.note)

    def _lowering(self, job: Job) -> Callable[[tuple[str, ...]], Lower]:
        context, inputs = self._target.context, self._target.inputs

        def keeping(kept: tuple[str, ...]) -> Lower:
            return lambda worker: lower(context, worker, job, inputs.portable, inputs.calibration, kept)

        return keeping


def _by_trace(traced: Trace) -> tuple[Sensitivity, ...]:
    """The nodes that add error, by the noise that they add; each costs the same."""
    errors = [error for error in rank(traced) if error.op != INPUT_OP]
    return tuple(
        Sensitivity(node=error.node, op=error.op, effect=float(len(errors) - place), cost=1.0, together=error.merged)
        for place, error in enumerate(errors)
    )


def _matching(plan: Plan, pattern: str) -> Sequence[Job]:
    jobs = [job for job in plan.jobs if fnmatchcase(job.id, pattern)]
    if jobs:
        return jobs
    tuned = find_tuned_job(plan.jobs, pattern)
    if tuned is None:
        _nothing_matches(plan, pattern)
    return [tuned]


def _misses(verdict: Verdict | None) -> tuple[str, ...]:
    checks: tuple[Check, ...] = verdict.checks if verdict else ()
    return tuple(check.reason for check in checks if check.outcome is not Outcome.PASS)


def _worst(candidate: Candidate) -> tuple[int, ...]:
    """Samples, worst first: those on which a check failed, each check's worst before any check's second, then all by
    their error. A sample that fails alone among thousands is seldom among the first ones."""
    failed = [check.worst for check in candidate.checks if check.outcome is Outcome.FAIL]
    of_checks = [index for same_place in zip_longest(*failed) for index in same_place if index is not None]
    errors: dict[int, float] = {}
    for output in candidate.errors:
        for index, error in enumerate(output.errors):
            errors[index] = max(error, errors.get(index, 0.0))
    by_error = sorted((index for index, error in errors.items() if error > 0), key=lambda index: -errors[index])
    return tuple(dict.fromkeys([*of_checks, *by_error]))


def _problem(candidate: Candidate) -> str:
    return candidate.failure.problem if candidate.failure is not None else candidate.reason


def _nothing_matches(plan: Plan, pattern: str) -> NoReturn:
    refused = next((r for r in plan.refused if fnmatchcase(r.job_id, pattern)), None)
    if refused is not None:
        raise UsageError(f"{refused.job_id} was refused: {refused.reason}")
    listed = ", ".join(job.id for job in plan.jobs) or "none"
    near = did_you_mean(pattern, [job.id for job in plan.jobs])
    hint = f"did you mean {near!r}? " if near else ""
    raise UsageError(f"no job matches {pattern!r}", fix=f"{hint}the policy has {listed}")
