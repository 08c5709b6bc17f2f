"""A published model validated again: is it still what it was (`verify`), and is it right and fast enough on this
machine (`validate`)?

No result of another run is believed: the source is fetched anew, the artifact is validated again, and the cache is a
new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree, plain, revive
from compile_stage.core.environment import Hardware, python_version
from compile_stage.core.errors import GateError, IntegrityError, UsageError
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import (
    Artifact,
    Budget,
    Candidate,
    Check,
    Data,
    FetchedVersion,
    Gate,
    Job,
    Outcome,
    PortableModel,
    SampleSet,
    ServingCost,
    SourceModel,
    TargetPolicy,
    Verdict,
    Waiver,
    record,
)
from compile_stage.measure.one_thread import say_held_up
from compile_stage.measure.performance import calls_needed
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.served_load import judge_served
from compile_stage.measure.structure import SERVED
from compile_stage.measure.timed_answers import Proof
from compile_stage.pipeline.inputs import TargetInputs, source_limits
from compile_stage.serving.batches import proven_batches
from compile_stage.serving.manifest import artifact_of, data_folder
from compile_stage.serving.missing_numbers import proven_missing
from compile_stage.serving.taken_values import TAKEN, proven_taken
from compile_stage.serving.trust import Trust
from compile_stage.steps.benchmark import BASELINE, are_decided, benchmark
from compile_stage.steps.export import inspect_published
from compile_stage.steps.judge import judge_performance, judge_tolerances
from compile_stage.steps.package import timings
from compile_stage.steps.resolve import resolve_made_from
from compile_stage.steps.serve import demand_served
from compile_stage.steps.validate import validate

_NO_SERVER = ServingCost(
    reason="a validation starts no server: run the stage on this hardware, or without this limit in the policy"
)


@record
class Revalidation:
    """What a validation on this machine came to.

    Attributes:
        passed: The verdict's word, and it was measured.
        document: What `serving.manifest.write_validation` seals and attaches.
        notes: What a reader should know beside the verdict.
    """

    passed: bool
    verdict: Verdict
    document: Mapping[str, Any]
    notes: tuple[str, ...]


@record
class Validated:
    """A published model's artifact as a candidate, validated.

    Attributes:
        portable: The source as ONNX, or in the form that it has (`TargetInputs.portable`); None where nobody asked.
    """

    candidate: Candidate
    artifact: Artifact
    source: SourceModel
    samples: SampleSet
    data: Data
    proof: Proof
    portable: PortableModel | None = None

    @property
    def verdict(self) -> Verdict:
        return self.candidate.verdict or Verdict(checks=())


def validate_again(
    context: Context, manifest: Mapping[str, Any], model_dir: Path, *, allow_pickle: bool = False
) -> tuple[Verdict, tuple[str, ...]]:
    """Run the validation of a published model once more, here, against its pinned source.

    Waivers that the model was published under hold until they expire. Returns the verdict, and what a reader should
    know beside it.

    Args:
        manifest: The published model's own; what it was validated with is what it is validated with again.
        model_dir: The MLflow model directory that the manifest lies in.
        allow_pickle: The source may be a pickle. The manifest can't allow that: it comes with the files that are in
            doubt.

    Raises:
        IntegrityError: The source is not the one that the model was made from.
        RegistryError: The source can't be had any more.
        SourceError: The source is refused, or the samples can't be had any more.
    """
    context = context.with_own_cache()
    validated = compare(context, manifest, model_dir, Budget(), allow_pickle=allow_pickle)
    return validated.verdict, (*waived_notes(validated.verdict), *sample_notes(manifest, validated.samples))


def validate_here(
    context: Context,
    manifest: Mapping[str, Any],
    version: tuple[str, Path],
    trust: Trust | None,
    *,
    allow_pickle: bool = False,
) -> Revalidation:
    """Everything that a run asks of a candidate, of a published model on this machine: the tolerances against its
    pinned source, and, where they hold, the gates on speed, latency, size and memory, measured beside the original; and
    that serving loads it and answers as what was validated.

    Args:
        version: Its URI, and the MLflow model directory that was fetched.
        trust: Whose signatures it is loaded with.

    Raises:
        UsageError: This is not hardware that the model is for.
        IntegrityError, RegistryError, SourceError: As `validate_again`.
        WorkerError, NothingCompiledError: It can't be run here.
    """
    job: Job = revive(Job, manifest["job"])
    uri, model_dir = version
    _demand_this_machine(context, manifest, job)
    context = context.with_own_cache()
    budget: Budget = revive(Budget, manifest["budget"])
    validated = compare(context, manifest, model_dir, budget, allow_pickle=allow_pickle)
    notes = sample_notes(manifest, validated.samples)
    if validated.verdict.passed:
        loaded = FetchedVersion(
            uri=uri, path=str(model_dir), artifact=validated.artifact, variant=manifest.get("variant", "")
        )
        validated = _served(context, loaded, validated, budget, trust)
    if validated.verdict.passed:
        validated, failures = measure(context, manifest, budget, validated)
        notes += failures
    return attachable(context.hardware, manifest, validated, notes)


def attachable(
    hardware: Hardware,
    manifest: Mapping[str, Any],
    validated: Validated,
    notes: tuple[str, ...],
    found: Mapping[str, Any] | None = None,
) -> Revalidation:
    """What is attached to the version.

    Args:
        hardware: Of the machine that ran it.
        found: What else that machine says of itself: `runtime` and `python` where it is not this one.
    """
    verdict, measurement = validated.verdict, validated.candidate.measurement
    passed = verdict.passed and measurement is not None
    job: Job = validated.candidate.job
    document: dict[str, Any] = plain(
        {
            "key": manifest["key"],
            **({"variant": manifest["variant"]} if "variant" in manifest else {}),
            "artifact": manifest["artifact"]["digest"],
            "hardware": hardware,
            "fingerprint": hardware.fingerprint,
            "passed": passed,
            "verdict": verdict,
            "batches": proven_batches(verdict, job.target),
            "missing": proven_missing(verdict),
            TAKEN: proven_taken(verdict),
            "timing": timings(measurement),
            "samples": validated.samples.digest,
            "runtime": plugins.package_versions(*manifest.get("runtime", {})),
            "python": python_version(),
            "compile_stage": plugins.package_versions("compile-stage").get("compile-stage", ""),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            **(found or {}),
        }
    )
    return Revalidation(passed=passed, verdict=verdict, document=document, notes=(*notes, *waived_notes(verdict)))


def _demand_this_machine(context: Context, manifest: Mapping[str, Any], job: Job) -> None:
    demand_gates(manifest)
    if (reason := context.hardware.refuse(dict(job.target.hardware))) is not None:
        raise UsageError(
            f"this machine is not what the model is for: {reason}", fix="run this where the model will be served"
        )
    plugins.demand(plugins.load("backends", job.backend))


def demand_gates(manifest: Mapping[str, Any]) -> None:
    """Raise UsageError for a manifest of before it named what a validation goes by."""
    if "budget" not in manifest:
        raise UsageError(
            "an earlier compile-stage published it, and its manifest does not name the performance gates",
            fix="run the stage again with its policy",
        )


def compare(
    context: Context,
    manifest: Mapping[str, Any],
    model_dir: Path,
    budget: Budget,
    *,
    there: Context | None = None,
    allow_pickle: bool,
) -> Validated:
    """The artifact's answers, compared with those of the original here.

    Args:
        there: Where the artifact runs, when that is not here.
    """
    run_by = there or context
    job, data = revive(Job, manifest["job"]), revive(Data, manifest["data"]["spec"])
    artifact, target = artifact_of(manifest, data_folder(model_dir)), job.target
    waivers = _waivers(manifest)
    source = resolve_made_from(context, manifest["source"])
    if digest_tree(artifact.path) != artifact.digest:
        raise IntegrityError("the artifact's files do not have the digest that was validated", where=artifact.path)
    with (
        context.source_worker(source, source_limits(budget, source, data)) as source_worker,
        run_by.worker(
            job.id, WorkerLimits.within(budget, target.threads, plugins.interpreter_of(job.backend))
        ) as worker,
    ):
        inspect_published(context, source_worker, source, allow_pickle=allow_pickle)
        inputs = TargetInputs(context, source_worker, source, data, target, (job,))
        expected = inputs.reference
        checks = validate(run_by, worker, job, artifact, inputs.validation_set(waivers)).verdict.checks
        portable = inputs.portable if there is not None else None
    candidate = judge_tolerances(Candidate(job=job, artifact=artifact), checks, waivers, context.today)
    proof = Proof.beside(expected, [candidate])
    return Validated(
        candidate=candidate,
        artifact=artifact,
        source=source,
        samples=inputs.validation,
        data=data,
        proof=proof,
        portable=portable,
    )


def _served(
    context: Context, version: FetchedVersion, validated: Validated, budget: Budget, trust: Trust | None
) -> Validated:
    """With the check that serving loads it and answers as what was validated."""
    candidate, target = validated.candidate, validated.candidate.job.target
    limits = WorkerLimits.within(budget, target.threads, plugins.interpreter_of(candidate.job.backend))
    gate = Gate(metric=SERVED, limit=0, direction="at_most")
    try:
        reason = demand_served(context, version, target, validated.samples, limits, trust)
        check = Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason=reason)
    except GateError as error:
        check = Check(gate=gate, outcome=Outcome.FAIL, measured=1.0, reason=error.problem)
    checks = (*validated.verdict.checks, check)
    return replace(validated, candidate=replace(candidate, verdict=Verdict(checks=checks)))


def measure(
    context: Context,
    manifest: Mapping[str, Any],
    budget: Budget,
    validated: Validated,
    baseline: SourceModel | Artifact | None = None,
) -> tuple[Validated, tuple[str, ...]]:
    """With its measurement beside the original, and the performance gates in its verdict; and notes: where it failed,
    and which gates were not looked at again.

    Gates on what is served are NOT_RUN, unless the run that published it measured them on this hardware.

    Args:
        baseline: What it is measured beside in the original's place. Its own artifact is nothing to be faster than:
            then no speedup is known.
    """
    candidate, job = validated.candidate, validated.candidate.job
    gates: tuple[Gate, ...] = revive(tuple[Gate, ...], manifest["performance"])
    beside_itself = baseline == validated.artifact
    looked_at = tuple(gate for gate in gates if not (beside_itself and gate.metric == "speedup"))
    size_bytes = validated.artifact.size_bytes
    request = MeasurementRequest(
        label=job.target.name,
        samples=validated.samples,
        target=job.target,
        budget=budget,
        seed=validated.data.seed,
        min_calls=calls_needed(gates),
        decided=lambda _, found: are_decided(looked_at, found, size_bytes),
        proof=validated.proof,
        each_time=True,
    )
    measured = benchmark(context, baseline or validated.source, {job.id: validated.artifact}, request)
    measurement = measured.measurements.get(job.id)
    held_up = say_held_up(measured.measurements.get(BASELINE), job.target.threads)
    if measurement is not None and (beside_itself or held_up):
        alone = (
            replace(timing, speedup=None, speedup_interval=None, mean_speedup_interval=None, stable=True)
            for timing in measurement.timings
        )
        measurement = replace(measurement, timings=tuple(alone))
    candidate = replace(candidate, measurement=measurement)
    policy = TargetPolicy(target=job.target, tolerances={}, performance=gates)
    judged = judge_performance(candidate, policy, _waivers(manifest), context.today)
    failure = measured.failures.get(job.id)
    notes = [f"it failed during benchmarking: {failure.problem}"] if failure is not None else []
    notes += [f"{held_up}: none is shown; validate it again when the machine is idle"] if held_up else []
    served = judge_served(gates, _NO_SERVER)
    if served and _published_here(context.hardware, manifest):
        named = " and ".join(check.gate.metric for check in served)
        return replace(validated, candidate=judged), (*notes, f"{named}: as its run measured, not measured again")
    checks = (*(judged.verdict or Verdict(checks=())).checks, *served)
    return replace(validated, candidate=replace(judged, verdict=Verdict(checks=checks))), tuple(notes)


def _published_here(machine: Hardware, manifest: Mapping[str, Any]) -> bool:
    """Whether a run on such a machine judged it. Its verdict has the gates on what is served, and a validation that
    can't look at them must not make the model unfit for its own machine."""
    return manifest["verdict"] is not None and manifest["fingerprint"] == machine.fingerprint


def _waivers(manifest: Mapping[str, Any]) -> tuple[Waiver, ...]:
    """Those that the model was published under; of one without a verdict, the policy's."""
    if manifest["verdict"] is None:
        return tuple(revive(Waiver, waiver) for waiver in manifest["waivers"])
    published: Verdict = revive(Verdict, manifest["verdict"])
    return published.waivers


def waived_notes(verdict: Verdict) -> tuple[str, ...]:
    """The waivers that it passes under."""
    return tuple(f"under a waiver of {w.gate} until {w.expires} ({w.owner}): {w.reason}" for w in verdict.waivers)


def sample_notes(manifest: Mapping[str, Any], samples: SampleSet) -> tuple[str, ...]:
    """That they are not those of before, where they are not."""
    if samples.digest == manifest["data"]["samples"]["validation"]["digest"]:
        return ()
    return ("the validation samples are not those that it was published with",)
