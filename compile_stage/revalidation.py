"""Is a published model still what it was (`verify`), and is it right and fast enough on this machine (`validate`)? The validation once more, here, believing
nothing but the registry and the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.cache import Cache
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree, plain, revive
from compile_stage.core.environment import python_version
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.core.ports import Needs
from compile_stage.core.records import (
    Artifact,
    Budget,
    Check,
    Compliance,
    Data,
    Gate,
    Job,
    SampleSet,
    SourceModel,
    Target,
    Verdict,
    Waiver,
    record,
)
from compile_stage.measure.metrics import apply_waivers
from compile_stage.measure.performance import calls_needed, check_performance
from compile_stage.pipeline.inputs import TargetInputs
from compile_stage.serving.manifest import artifact_of, data_folder
from compile_stage.steps.benchmark import benchmark
from compile_stage.steps.export import inspect
from compile_stage.steps.package import timings
from compile_stage.steps.resolve import resolve
from compile_stage.steps.validate import validate


@record
class _Proof:
    """What was run, and what the tolerances say of it."""

    source: SourceModel
    artifact: Artifact
    target: Target
    samples: SampleSet
    data: Data
    checks: tuple[Check, ...]


def prove_again(
    context: Context, manifest: Mapping[str, Any], model_dir: Path, *, allow_pickle: bool = False
) -> tuple[Verdict, tuple[str, ...]]:
    """Run the validation of a published model once more, here, against its pinned source. No result of another run is
    believed.

    Waivers that the model was published under hold as long as they said. Returns the verdict, and what a reader should
    know beside it.

    Args:
        manifest: The published model's own; what it was proven with is what it is proven with again.
        model_dir: The MLflow model directory that the manifest lies in.
        allow_pickle: The source may be a pickle. The manifest can't allow that: it comes with the files that are in
            doubt.

    Raises:
        IntegrityError: The source is not the one that the model was made from.
        RegistryError: The source can't be had any more.
        SourceError: The source is refused, or the samples can't be had any more.
    """
    context = replace(context, cache=Cache(context.scratch / "cache"))
    found = _prove(context, manifest, model_dir, Budget(), allow_pickle=allow_pickle)
    checks = apply_waivers(found.checks, _waivers(manifest), found.target.name, context.today)
    return Verdict(checks=checks), (*_waived(checks), *_other_samples(manifest, found.samples))


def prove_here(
    context: Context, manifest: Mapping[str, Any], model_dir: Path, *, allow_pickle: bool = False
) -> tuple[dict[str, Any], Verdict, tuple[str, ...]]:
    """Everything that a run asks of a candidate, of a published model on this machine: the tolerances against its pinned source, and, where they
    hold, the gates on speed, latency, size and memory, measured beside the original.

    Returns what `manifest.write_validation` seals, the verdict, and what a reader should know beside it.

    Raises:
        UsageError: This is not hardware that the model is for.
        IntegrityError, RegistryError, SourceError: As `prove_again`.
        WorkerError, NothingCompiledError: It can't be run here.
    """
    job: Job = revive(Job, manifest["job"])
    if "budget" not in manifest:
        raise UsageError(
            "an earlier compile-stage published it, whose manifest does not say by which gates it is to be measured",
            fix="run the stage again with its policy",
        )
    if (reason := context.hardware.refuse(dict(job.target.hardware))) is not None:
        raise UsageError(
            f"this machine is not what the model is for: {reason}", fix="run this where the model will be served"
        )
    plugins.demand(plugins.load("backends", job.backend))
    context = replace(context, cache=Cache(context.scratch / "cache"))
    budget: Budget = revive(Budget, manifest["budget"])
    found = _prove(context, manifest, model_dir, budget, allow_pickle=allow_pickle)
    waivers, target = _waivers(manifest), found.target
    checks = apply_waivers(found.checks, waivers, target.name, context.today)
    notes, measured = [*_other_samples(manifest, found.samples)], None
    if Verdict(checks=checks).passed:
        gates: tuple[Gate, ...] = revive(tuple[Gate, ...], manifest["performance"])
        race = benchmark(
            context, target.name, found.source, {job.id: found.artifact}, found.samples, target, budget,
            seed=found.data.seed, min_calls=calls_needed(gates),
        )  # fmt: skip
        measured = race.measurements.get(job.id)
        if (failure := race.failures.get(job.id)) is not None:
            notes.append(f"it died while it was measured: {failure.problem}")
        checks = apply_waivers(
            (*checks, *check_performance(gates, measured, found.artifact.size_bytes)),
            waivers,
            target.name,
            context.today,
        )
    verdict = Verdict(checks=checks)
    said: dict[str, Any] = plain(
        {
            "key": manifest["key"],
            "artifact": manifest["artifact"]["digest"],
            "hardware": context.hardware,
            "fingerprint": context.hardware.fingerprint,
            "passed": verdict.passed and measured is not None,
            "verdict": verdict,
            "timing": timings(measured),
            "samples": found.samples.digest,
            "runtime": plugins.package_versions(*manifest.get("runtime", {})),
            "python": python_version(),
            "compile_stage": plugins.package_versions("compile-stage").get("compile-stage", ""),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    return said, verdict, (*notes, *_waived(checks))


def _prove(
    context: Context, manifest: Mapping[str, Any], model_dir: Path, budget: Budget, *, allow_pickle: bool
) -> _Proof:
    job, data = revive(Job, manifest["job"]), revive(Data, manifest["data"]["spec"])
    artifact, target = artifact_of(manifest, data_folder(model_dir)), job.target
    source = resolve(context, manifest["source"]["uri"])
    if source.digest != manifest["source"]["digest"]:
        raise IntegrityError(f"{source.uri} is {source.digest} now, and was {manifest['source']['digest']}")
    if digest_tree(artifact.path) != artifact.digest:
        raise IntegrityError("the artifact's files do not have the digest that was proven", where=artifact.path)
    with (
        context.worker("source", Needs.within(budget)) as source_worker,
        context.worker(job.id, Needs.within(budget, target.threads, plugins.interpreter_of(job.backend))) as worker,
    ):
        inspect(context, source_worker, source, Compliance(allow_pickle=allow_pickle))
        inputs = TargetInputs(context, source_worker, source, data, target, (job,))
        checks = validate(context, worker, job, artifact, inputs.reference, inputs.validation, data).verdict.checks
    return _Proof(source=source, artifact=artifact, target=target, samples=inputs.validation, data=data, checks=checks)


def _waivers(manifest: Mapping[str, Any]) -> tuple[Waiver, ...]:
    """Those that the model was published under; of one without a verdict, the policy's."""
    if manifest["verdict"] is None:
        return tuple(revive(Waiver, waiver) for waiver in manifest["waivers"])
    published: Verdict = revive(Verdict, manifest["verdict"])
    return published.waivers


def _waived(checks: tuple[Check, ...]) -> list[str]:
    return [
        f"under a waiver of {w.gate} until {w.expires} ({w.owner}): {w.reason}" for w in Verdict(checks=checks).waivers
    ]


def _other_samples(manifest: Mapping[str, Any], samples: SampleSet) -> list[str]:
    if samples.digest == manifest["data"]["samples"]["validation"]["digest"]:
        return []
    return ["the validation samples are others than those that it was published with"]
