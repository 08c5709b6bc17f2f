"""May an alias move to a published version, by hand? What was measured of it must make it pass, and serving must load
it and answer as what was proven.

The second is looked at here, where the artifact can run here; else by a validation that is attached to the version,
whose machine looked at it (the check `served`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, GateError
from compile_stage.core.generation import call_signature
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.provenance import refuse_code
from compile_stage.core.records import (
    Budget,
    Data,
    DataSpec,
    FetchedVersion,
    Job,
    Receipt,
    SampleSet,
    SourceModel,
    Verdict,
)
from compile_stage.measure.readers import SampleRequest
from compile_stage.measure.structure import SERVED
from compile_stage.pipeline.inputs import source_limits
from compile_stage.revalidation import sample_notes
from compile_stage.serving.approval import demand_approved
from compile_stage.serving.manifest import artifact_of, data_folder, validations
from compile_stage.serving.variants import every_variant, holds_variants
from compile_stage.steps.promote import demand_passed
from compile_stage.steps.resolve import resolve_made_from
from compile_stage.steps.sample import sample
from compile_stage.steps.serve import demand_served
from compile_stage.verification import Published

_BY_THE_SOURCE = ("input_example", "mlflow-dataset")  # samples that come with it


def demand_promotable(
    context: Context, published: Published, *, allow_code: bool = False, serve_check: bool = True
) -> str:
    """Raise GateError unless what was measured of a version makes it pass today, who must approve it did, and MLflow
    loads it in a new process and answers there as what was proven. Returns how the latter is known, as a sentence.

    Args:
        allow_code: Its artifact may be run here though nothing that this machine knows vouches for it.
        serve_check: False: it is neither loaded nor asked for a validation that loaded it.
    """
    manifest, folder, trust = published.manifest, published.folder, published.trust
    for one in _that_must_pass(published):
        demand_passed(one, folder, context.today, published.uri, trust)
    demand_approved(manifest, published.tags, published.uri)
    if not serve_check:
        return "it was not loaded, as the option says"
    passed = [one for one in validations(manifest, folder, trust) if one["passed"]]
    machines = {one["fingerprint"] for one in passed}
    machines |= {manifest["fingerprint"]} if manifest["verdict"] is not None else set()
    reason = refuse_here(context, published, allow_code=allow_code)
    if reason is None and context.hardware.fingerprint in machines:
        return _load_here(context, published)
    if (elsewhere := next(filter(_was_served, passed), None)) is not None:
        return f"it was loaded where it was validated, on {elsewhere['fingerprint']}"
    if reason is None:
        return _load_here(context, published)
    raise GateError(
        f"whether serving loads it can't be known: {reason}, and no validation is attached to it that loaded it",
        fix=f"where it runs: compile-stage promote, or compile-stage validate {published.uri}; --skip-serve-check "
        "promotes it as it is",
        where=published.uri,
    )


def cautions(manifest: Mapping[str, Any], moved: Receipt) -> list[str]:
    """What whoever moved an alias by hand should know: a sentence for each waiver that the version passed under, and
    for what it was not compared with."""
    said = []
    verdict = revive(Verdict, manifest["verdict"]) if manifest["verdict"] is not None else Verdict(checks=())
    if waived := list(dict.fromkeys(check.gate.metric for check in verdict.checks if check.waived is not None)):
        said.append(f"it passed under a waiver of {' and '.join(waived)}")
    if moved.previous and moved.previous != moved.version:
        said.append(f"it was not compared with version {moved.previous}, to which the alias pointed")
    return said


def _that_must_pass(published: Published) -> list[Mapping[str, Any]]:
    """Of several variants those that a run proved; where it proved none, one that a validation must have."""
    if not holds_variants(published.whole):
        return [published.manifest]
    return [one for one in every_variant(published.whole) if one["verdict"] is not None] or [published.manifest]


def refuse_here(context: Context, published: Published, *, allow_code: bool) -> str | None:
    """None when the artifact may be run and can run on this machine, or the reason."""
    manifest, data = published.manifest, data_folder(published.folder)
    artifact, target = artifact_of(manifest, data), revive(Job, manifest["job"]).target
    if (absent := plugins.missing(plugins.load("backends", artifact.backend))) is not None:
        return absent
    if (reason := context.hardware.refuse(dict(target.hardware))) is not None:
        return f"this machine is not what it is for: {reason}"
    if artifact.not_runnable_here and context.hardware.fingerprint == artifact.hardware:
        return artifact.not_runnable_here
    if allow_code or published.signed_by is not None:
        return None
    reason = refuse_code(published.uri, data, manifest)
    return f"{reason} (--allow-code runs it, if you trust where it comes from)" if reason is not None else None


def _was_served(validation: Mapping[str, Any]) -> bool:
    return any(
        check["gate"]["metric"] == SERVED and check["outcome"] == "pass" for check in validation["verdict"]["checks"]
    )


def _load_here(context: Context, published: Published) -> str:
    manifest = published.manifest
    job: Job = revive(Job, manifest["job"])
    version = FetchedVersion(
        uri=published.uri,
        path=str(published.folder),
        artifact=artifact_of(manifest, data_folder(published.folder)),
        variant=manifest.get("variant", ""),
    )
    budget = revive(Budget, manifest.get("budget", {}))
    limits = WorkerLimits.within(budget, job.target.threads, plugins.interpreter_of(job.backend))
    context = context.with_own_cache()
    samples, doubt = _samples(context, published, job, budget)
    note = demand_served(context, version, job.target, samples, limits, published.trust)
    if samples is not None and samples.real:
        doubt = "; ".join(sample_notes(manifest, samples))
    return f"{note}; {doubt}" if doubt else note


def published_samples(context: Context, published: Published, job: Job, budget: Budget, count: int) -> SampleSet | None:
    """At most `count` of the validation samples; where they can't be had here, synthetic ones; None where these can't
    be made either."""
    return _samples(context, published, job, budget, count)[0]


def _samples(
    context: Context, published: Published, job: Job, budget: Budget, count: int | None = None
) -> tuple[SampleSet | None, str]:
    """That, and why the validation samples can't be had here; empty where they can. Without a count all of them, whose
    digest says whether they are those of the publication."""
    manifest, reason = published.manifest, ""
    data: Data = revive(Data, manifest["data"]["spec"])
    signature = call_signature(artifact_of(manifest, data_folder(published.folder)))
    answer = manifest.get("answer", {})
    columns, fills = tuple(answer.get("columns") or ()), answer.get("fills") or {}
    real = replace(data.validation, max_samples=count) if count is not None else data.validation
    for spec in (real, DataSpec(source="synthetic", max_samples=count or job.target.batch_sizes[0])):
        wanted = replace(data, validation=spec)
        request = SampleRequest(
            spec=spec, signature=signature, seed=data.seed, shapes=job.target.shapes, columns=columns, fills=fills
        )
        try:
            source = _source(context, published, spec)
            with context.worker("samples", source_limits(budget, source, wanted)) as worker:
                return sample(context, worker, source, "validation", request), reason
        except CompileStageError as error:
            reason = reason or f"the validation samples can't be had here: {_said(error)}"
    return None, reason


def _said(error: CompileStageError) -> str:
    return f"{error.problem} ({error.where})" if error.where else error.problem


def _source(context: Context, published: Published, spec: DataSpec) -> SourceModel:
    """The source where samples come with it; else what the manifest says of it, whose files nobody reads."""
    made_from = published.manifest["source"]
    if spec.source.partition(":")[0] in _BY_THE_SOURCE:
        return resolve_made_from(context, made_from)
    named = {field: made_from[field] for field in ("uri", "name", "version", "flavor", "digest")}
    return SourceModel(path=str(published.folder), **named)
