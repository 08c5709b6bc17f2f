"""Is a published model still what it was? The validation once more, here, believing nothing but the registry and the
files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.cache import Cache
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree, revive
from compile_stage.core.errors import IntegrityError
from compile_stage.core.ports import Needs
from compile_stage.core.records import Budget, Compliance, Data, Job, Verdict
from compile_stage.manifest import artifact_of, data_folder
from compile_stage.measure.metrics import apply_waivers
from compile_stage.steps.export import export, inspect
from compile_stage.steps.resolve import resolve
from compile_stage.steps.sample import sample
from compile_stage.steps.validate import reference, validate


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
    job, data = revive(Job, manifest["job"]), revive(Data, manifest["data"]["spec"])
    artifact, target = artifact_of(manifest, data_folder(model_dir)), job.target
    source = resolve(context, manifest["source"]["uri"])
    if source.digest != manifest["source"]["digest"]:
        raise IntegrityError(f"{source.uri} is {source.digest} now, and was {manifest['source']['digest']}")
    if digest_tree(artifact.path) != artifact.digest:
        raise IntegrityError("the artifact's files do not have the digest that was proven", where=artifact.path)
    context = replace(context, cache=Cache(context.scratch / "cache"))
    with (
        context.worker("source", Needs.within(Budget())) as home,
        context.worker(job.id, Needs.within(Budget(), target.threads, plugins.interpreter_of(job.backend))) as worker,
    ):
        inspect(context, home, source, Compliance(allow_pickle=allow_pickle))
        portable = export(context, home, source, target)
        samples = sample(context, home, source, "validation", data, portable.signature, target.shapes)
        expected = reference(context, home, source, samples, target)
        found = validate(context, worker, job, artifact, expected, samples, data).verdict
    published: Verdict = revive(Verdict, manifest["verdict"])
    checks = apply_waivers(found.checks, published.waivers, target.name, context.today)
    notes = [
        f"under a waiver of {w.gate} until {w.expires} ({w.owner}): {w.reason}" for w in Verdict(checks=checks).waivers
    ]
    if samples.digest != manifest["data"]["samples"]["validation"]["digest"]:
        notes.append("the validation samples are others than those that it was published with")
    return Verdict(checks=checks), tuple(notes)
