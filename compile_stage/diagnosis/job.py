"""The second story: a candidate that went wrong, from its job to the node at fault, the nodes to keep, and a bundle for a bug report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import (
    Budget,
    Candidate,
    Check,
    DataSpec,
    Job,
    Outcome,
    Plan,
    PortableModel,
    SampleSet,
    Target,
    TargetPolicy,
    Verdict,
)
from compile_stage.graph_debug.diagnosis import Diagnosis, Failed
from compile_stage.graph_debug.keep import Kept, smallest_kept
from compile_stage.graph_debug.trace import Trace, rank
from compile_stage.pipeline.evaluate import Material, attempt
from compile_stage.steps.compile import compile_job
from compile_stage.steps.debug import bundle_failure, bundle_trace, reduce_failure, trace
from compile_stage.steps.export import export, inspect, other_forms
from compile_stage.steps.ladder import job_of_rungs
from compile_stage.steps.lower import lower
from compile_stage.steps.sample import samples_for
from compile_stage.steps.validate import Reference, reference, validate

SAMPLES = 16
"""Samples of a trace: an error that matters shows in a few, and every tensor of every one is compared."""

_PACKAGES = ("compile-stage", "onnx", "onnxruntime", "openvino", "nncf", "numpy")


def diagnose_job(context: Context, made: Plan, pattern: str, out: Path, *, count: int = SAMPLES) -> Diagnosis:
    """Look into the first job that matches and does not pass; if only one matches, into that.

    Args:
        pattern: Glob over job ids.
        out: Folder of the bundle.
        count: Samples of the trace.

    Raises:
        UsageError: No job matches, or several do and all of them pass.
        SourceError: The source is refused or unreadable.
    """
    jobs = [job for job in made.jobs if fnmatchcase(job.id, pattern)]
    if not jobs:
        climbed = job_of_rungs(made.jobs, pattern)
        if climbed is None:
            _nothing_matches(made, pattern)
        jobs = [climbed]
    policy = made.policy
    with context.worker("source", Needs.within(policy.budget)) as home:
        inspect(context, home, made.source, policy.compliance)
        for target_policy in policy.targets:
            here = [job for job in jobs if job.target.name == target_policy.target.name]
            if not here:
                continue
            target = target_policy.target
            portable = export(context, home, made.source, target)
            samples = samples_for(context, home, made.source, policy.data, portable.signature, here)
            expected = reference(context, home, made.source, samples["validation"], target)
            others = other_forms(context, home, made.source, here)
            material = Material(
                source=made.source, portable=portable, samples=samples, expected=expected, others=others
            )
            for job in here:
                candidate = attempt(context, policy, job, material)
                if candidate.not_runnable_here and len(jobs) == 1:
                    raise UsageError(f"{job.id} can't be run on this machine: {candidate.not_runnable_here}")
                passes = bool(candidate.not_runnable_here) or (
                    candidate.verdict is not None and candidate.verdict.passed
                )
                if len(jobs) == 1 or not passes:
                    work = _Work(context, home, made, target_policy, portable, samples, expected, out, count)
                    return work.diagnose(candidate)
    raise UsageError(
        f"all {len(jobs)} jobs that match {pattern!r} pass, so none is to be looked into by itself",
        fix=f"name one with --job: {', '.join(job.id for job in jobs)}",
    )


def diagnose_files(
    context: Context, reference_file: Path, candidate_file: Path, data: str | None, out: Path, *, count: int = SAMPLES
) -> Diagnosis:
    """Compare two model files (`.onnx`, or OpenVINO's `.xml`), the first of which is held to be right.

    Args:
        data: File of samples; without one they are random numbers, and the diagnosis says so.
    """
    title = f"{candidate_file.name} against {reference_file.name}"
    shape_of = next((file for file in (reference_file, candidate_file) if file.suffix == ".onnx"), None)
    if shape_of is None:
        raise UsageError("one of the two files must be an .onnx, which says what the inputs are", where=title)
    with context.worker(title, Needs.within(Budget())) as worker:
        described = revive(PortableModel, worker.call("describe_graph", path=str(shape_of)))
        spec = DataSpec(source=f"file:{Path(data).absolute()}" if data else "synthetic", max_samples=count)
        samples: SampleSet = revive(
            SampleSet,
            worker.call(
                "prepare_samples",
                source=None,
                spec=spec,
                signature=described.signature,
                shapes={},
                dataset=None,
                seed=0,
                into=str(context.scratch / "samples"),
            ),
        )
        found = trace(
            context,
            worker,
            title,
            str(reference_file),
            str(candidate_file),
            samples,
            precision="",
            hint="f32",
            count=count,
            threads=2,
        )
        diagnosis = Diagnosis(
            title=title,
            precision=found.precision,
            backend="",
            reference=str(reference_file),
            candidate=str(candidate_file),
            trace=found,
            packages=plugins.package_versions(*_PACKAGES),
            notes=() if data else ("the samples are random numbers; a model may behave otherwise on real ones",),
        )
        return _bundled(context, worker, diagnosis, samples, "f32", out / "bundle")


def diagnose_compilation(context: Context, graph: Path, backend: str, out: Path) -> Diagnosis:
    """Does a backend take this ONNX file, and if not, which few of its nodes are enough to make it fail?"""
    plugin = plugins.load("backends", backend)
    plugins.demand(plugin)
    target = Target(name="debug", backends=(backend,))
    scheme = next(iter(plugin.schemes(target, "fp32")))
    job = Job(id=f"{graph.stem}--{backend}", source=str(graph), target=target, backend=backend, scheme=scheme, gates=())
    needs = Needs.within(Budget())
    diagnosis = Diagnosis(
        title=job.id,
        precision="fp32",
        backend=backend,
        reference=str(graph),
        candidate=str(graph),
        packages=plugins.package_versions(*_PACKAGES),
    )
    with context.worker(job.id, needs) as worker:
        model = revive(PortableModel, worker.call("describe_graph", path=str(graph)))
        return _reduced(context, worker, diagnosis, job, model, needs, out)


# ---------------------------------------------------------------------------------------------------------------- within


class _Work:
    """One job of a policy."""

    def __init__(
        self,
        context: Context,
        home: Worker,
        made: Plan,
        target_policy: TargetPolicy,
        portable: PortableModel,
        samples: Mapping[str, SampleSet],
        expected: Reference,
        out: Path,
        count: int,
    ) -> None:
        self.context, self.home, self.made, self.target_policy = context, home, made, target_policy
        self.portable, self.samples, self.expected, self.out, self.count = portable, samples, expected, out, count

    def diagnose(self, candidate: Candidate) -> Diagnosis:
        job, artifact = candidate.job, candidate.artifact
        needs = Needs.within(self.made.policy.budget, job.target.threads)
        model = candidate.portable or self.portable
        diagnosis = Diagnosis(
            title=job.id,
            precision=job.scheme.precision,
            backend=job.backend,
            reference=self.portable.path,
            candidate=str(Path(artifact.path) / artifact.entry) if artifact else model.path,
            misses=_misses(candidate.verdict),
            packages=plugins.package_versions(*_PACKAGES),
        )
        if artifact is None:
            if candidate.portable is None:
                return replace(diagnosis, failed=Failed(step="lower", problem=_problem(candidate)))
            return _reduced(self.context, self.home, diagnosis, job, candidate.portable, needs, self.out)
        hint, traced = str(artifact.options.get("hint", "f32")), diagnosis.candidate
        if Path(traced).suffix not in (".onnx", ".xml"):
            traced, note = model.path, f"{job.backend} can't be looked into; its graph was run by ONNX Runtime instead"
            diagnosis = replace(diagnosis, candidate=traced, notes=(note,))
        validation = self.samples["validation"]
        found = trace(
            self.context,
            self.home,
            job.id,
            diagnosis.reference,
            traced,
            validation,
            precision=job.scheme.precision,
            hint=hint,
            count=self.count,
            threads=job.target.threads,
        )
        diagnosis = self._searched(replace(diagnosis, trace=found), candidate, found, needs)
        return _bundled(self.context, self.home, diagnosis, validation, hint, self.out / "bundle")

    def _searched(self, diagnosis: Diagnosis, candidate: Candidate, found: Trace, needs: Needs) -> Diagnosis:
        """With the smallest set to keep in FP32, or a note that says why none was searched for."""
        verdict, note = candidate.verdict, ""
        if verdict is None:
            failed = Failed(step="validate", problem=_problem(candidate))
            return replace(diagnosis, failed=failed)
        if verdict.passed:
            note = "it passes its gates, so nothing needs to be kept in fp32"
        elif not any(check.outcome is Outcome.FAIL for check in verdict.checks):
            note = "no gate failed: some could not be looked at, and keeping nodes in fp32 does not change that"
        elif candidate.job.scheme.native:
            note = (
                f"{candidate.job.backend} lowers {candidate.job.scheme.name} itself, and can't keep named nodes in fp32"
            )
        if note:
            return replace(diagnosis, notes=(*diagnosis.notes, note))
        return replace(diagnosis, kept=self._search(candidate.job, found, needs))

    def _search(self, job: Job, found: Trace, needs: Needs) -> Kept:
        fallback, began = self.target_policy.fallback, time.monotonic()
        calibration, validation = self.samples.get("calibration"), self.samples["validation"]
        with self.context.worker(job.id, needs) as worker:

            def evaluate(kept: tuple[str, ...]) -> tuple[bool, str]:
                self.context.events.progress("search", job.id, f"{len(kept)} nodes in fp32")
                try:
                    model = lower(self.context, worker, job, self.portable, calibration, kept)
                    built = compile_job(self.context, worker, job, model, calibration)
                    proof = validate(
                        self.context, worker, job, built.artifact, self.expected, validation, self.made.policy.data
                    )
                except CompileStageError as error:
                    return False, error.problem
                missed = _misses(proof.verdict)
                return proof.verdict.passed, missed[0] if missed else "every gate holds"

            with self.context.events.step("search", job.id):
                return smallest_kept(
                    found,
                    evaluate,
                    max_evaluations=fallback.max_evaluations,
                    out_of_time=lambda: time.monotonic() - began > fallback.max_minutes * 60,
                )


def _reduced(
    context: Context, worker: Worker, diagnosis: Diagnosis, job: Job, model: PortableModel, needs: Needs, out: Path
) -> Diagnosis:
    """With the small graph that fails as the whole one does, in a bundle."""
    with tempfile.TemporaryDirectory(prefix="compile-stage-reduce-", dir=context.scratch) as folder:
        failed = reduce_failure(context, job, model, needs, Path(folder))
        if failed is None:
            note = f"{job.backend} compiles this graph" + (f" as {job.scheme.name}" if not job.scheme.native else "")
            return replace(diagnosis, notes=(*diagnosis.notes, note))
        found = replace(diagnosis, failed=failed)
        graph = Path(folder) / "reduced" / "model.onnx"
        into = bundle_failure(context, worker, job, graph, facts=_facts(found), into=out / "bundle")
        return replace(found, bundle=into)


def _bundled(
    context: Context, worker: Worker, diagnosis: Diagnosis, samples: SampleSet, hint: str, into: Path
) -> Diagnosis:
    """With a bundle about the tensor at which the error departs, or the one with the largest share of it."""
    if diagnosis.trace is None or not diagnosis.trace.nodes:
        return diagnosis
    shown = diagnosis.trace.find(diagnosis.trace.first or "") or next(iter(rank(diagnosis.trace)), None)
    if shown is None:
        return replace(diagnosis, notes=(*diagnosis.notes, "both answer the same, so there is nothing to report"))
    bundle = bundle_trace(
        context,
        worker,
        diagnosis.title,
        diagnosis.reference,
        diagnosis.candidate,
        samples,
        shown.tensor,
        hint=hint,
        facts=_facts(diagnosis),
        into=into,
    )
    return replace(diagnosis, bundle=bundle)


def _facts(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "title": diagnosis.title,
        "summary": diagnosis.headline,
        "problem": diagnosis.failed.problem if diagnosis.failed else "",
        "packages": diagnosis.packages,
    }


def _misses(verdict: Verdict | None) -> tuple[str, ...]:
    checks: tuple[Check, ...] = verdict.checks if verdict else ()
    return tuple(check.reason for check in checks if check.outcome is not Outcome.PASS)


def _problem(candidate: Candidate) -> str:
    if candidate.failure is not None:
        return candidate.failure.problem
    return candidate.refused or "it was not looked at"


def _nothing_matches(made: Plan, pattern: str) -> NoReturn:
    refused = next((r for r in made.refused if fnmatchcase(r.job_id, pattern)), None)
    if refused is not None:
        raise UsageError(f"{refused.job_id} was refused: {refused.reason}")
    listed = ", ".join(job.id for job in made.jobs) or "none"
    near = plugins.did_you_mean(pattern, [job.id for job in made.jobs])
    hint = f"did you mean {near!r}? " if near else ""
    raise UsageError(f"no job matches {pattern!r}", fix=f"{hint}the policy has {listed}")
