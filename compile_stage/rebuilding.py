"""A published model made again from its source, by what its manifest says: are the bytes the same (`verify --rebuild`)?

Digests say that files are those that the manifest lists, and a validation that they answer well. Only making them again
says that they come from the source. What is compared: the graph that the compiler was given, and what it wrote. A
compiler that does not write the same bytes twice (it is asked twice) is held to its answers instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context, made_by
from compile_stage.core.digest import digest_file, list_tree, revive
from compile_stage.core.environment import python_version
from compile_stage.core.errors import UsageError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import (
    Artifact,
    Budget,
    Check,
    Data,
    Gate,
    Job,
    Outcome,
    PortableModel,
    SampleSet,
    SourceModel,
    record,
)
from compile_stage.pipeline.inputs import TargetInputs, source_errors, source_limits
from compile_stage.serving.manifest import ARTIFACT_NAME, artifact_of, data_folder, pin
from compile_stage.steps.compile import compile_job
from compile_stage.steps.export import inspect_published
from compile_stage.steps.lower import lower
from compile_stage.steps.resolve import resolve_made_from
from compile_stage.steps.serve import compare_answers

GRAPH, ARTIFACT, ANSWERS = "rebuilt_graph", "rebuilt_artifact", "rebuilt_answers"
_MIXED = "-mixed"  # in the name of a scheme that a search for nodes to keep has made


@record
class Rebuilt:
    """One build. `graph` is what the compiler was given; `calibration` the digest of those samples, empty for none."""

    graph: PortableModel
    artifact: Artifact
    calibration: str


@record
class _Recipe:
    """What a build is made of."""

    source: SourceModel
    job: Job
    data: Data
    budget: Budget
    kept: Mapping[str, tuple[str, ...]]
    allow_pickle: bool


def rebuild(
    context: Context, manifest: Mapping[str, Any], model_dir: Path, *, allow_pickle: bool
) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Make a published model again, and compare. Returns the checks, and what a reader should know beside them.

    Args:
        allow_pickle: The source may be a pickle. The manifest has no say in that.

    Raises:
        UsageError: The bytes differ, and so does what they are made with, or the compiler writes other bytes each time
            and its artifact can't be run here: it can't be known.
        IntegrityError: The source is not the one that the model was made from.
        RegistryError: The source can't be had any more.
        SourceError: The source is refused, or its samples can't be had any more.
    """
    recipe = _Recipe(
        source=_source(context, manifest),
        job=revive(Job, manifest["job"]),
        data=revive(Data, manifest["data"]["spec"]),
        budget=revive(Budget, manifest.get("budget", {})),
        kept=revive(Mapping[str, tuple[str, ...]], manifest.get("kept", {})),
        allow_pickle=allow_pickle,
    )
    published = artifact_of(manifest, data_folder(model_dir))
    built, samples = _build(context, recipe, "first")
    files = _differing(published, built.artifact)
    same_graph = published.made_from in ("", built.graph.digest)
    notes = (f"made again from {recipe.source.uri} ({recipe.source.digest}) with {_words(built.artifact.toolchain)}",)
    if same_graph and not files:
        return (_graph_check(published, built), _artifact_check(published, built, files)), notes
    if changed := list(_changed(context, manifest, published, built)):
        raise UsageError(
            f"whether it was made from {recipe.source.uri} can't be known: {_what(same_graph, files)} differs, and so "
            f"does what made it: {'; '.join(changed)}",
            fix=_remedy(manifest, published, built),
        )
    again, _ = _build(context, recipe, "second")
    if built.graph.digest != again.graph.digest:
        graph = _check(GRAPH, Outcome.NOT_RUN, None, "two exports of the source differ, so its bytes tell nothing")
    else:
        graph = _graph_check(published, built)
    if not files or not _differing(built.artifact, again.artifact):
        return (graph, _artifact_check(published, built, files)), notes
    return (graph, _answers_check(context, recipe, published, built, samples)), notes


# ------------------------------------------------------------------------------------------------------------ building


def _source(context: Context, manifest: Mapping[str, Any]) -> SourceModel:
    context = context.with_own_cache("rebuild")
    return resolve_made_from(context, manifest["source"])


def _build(context: Context, recipe: _Recipe, name: str) -> tuple[Rebuilt, SampleSet]:
    """The graph and the artifact, made with an empty cache; and the samples that answers can be compared on."""
    context = context.with_own_cache(f"rebuild/{name}")
    job, source, data, budget = recipe.job, recipe.source, recipe.data, recipe.budget
    limits = WorkerLimits.within(budget, job.target.threads)
    compiler = replace(limits, interpreter=plugins.interpreter_of(job.backend))
    plugins.demand(plugins.load("backends", job.backend))
    with (
        context.source_worker(source, source_limits(budget, source, data)) as source_worker,
        context.worker(job.id, limits) as worker,
        context.worker(job.id, compiler) as compiling,
    ):
        with source_errors(source):
            inspect_published(context, source_worker, source, allow_pickle=recipe.allow_pickle)
            inputs = TargetInputs(context, source_worker, source, data, job.target, (job,))
            given = inputs.model_for(job)
            samples = inputs.validation
        calibration = inputs.calibration
        graph = _lowered(context, worker, recipe, given, calibration)
        compiled = compile_job(context, compiling, job, graph, calibration)
    digest = calibration.digest if calibration is not None else ""
    return Rebuilt(graph=graph, artifact=compiled.artifact, calibration=digest), samples


def _lowered(
    context: Context, worker: Worker, recipe: _Recipe, model: PortableModel, calibration: SampleSet | None
) -> PortableModel:
    """As the run lowered it: of a mixed candidate the whole graph first, and then the nodes that it keeps, restored."""
    job = recipe.job
    name, mixed, _ = job.scheme.name.partition(_MIXED)
    if not mixed or job.scheme.native:
        return lower(context, worker, job, model, calibration)
    whole = replace(job, scheme=replace(job.scheme, name=name, float_type="fp32"))
    lowered = lower(context, worker, whole, model, calibration)
    into = Path(context.cache.root) / "mix"
    answer = worker.call(
        "mix", model=model, lowered=lowered, keep=list(recipe.kept.get(job.scheme.float_type, ())), into=str(into)
    )
    graph: PortableModel = revive(PortableModel, answer)
    return graph


# ----------------------------------------------------------------------------------------------------------- comparing


def _differing(one: Artifact, other: Artifact) -> list[str]:
    """The files of two artifacts that differ, or that one of the two has."""
    ours, theirs = ({name: digest_file(Path(a.path) / name) for name in list_tree(a.path)} for a in (one, other))
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _check(metric: str, outcome: Outcome, measured: float | None, reason: str) -> Check:
    gate = Gate(metric=metric, limit=0, direction="at_most")
    return Check(gate=gate, outcome=outcome, measured=measured, reason=reason)


def _graph_check(published: Artifact, built: Rebuilt) -> Check:
    if not published.made_from:
        return _check(GRAPH, Outcome.NOT_RUN, None, f"{published.backend} does not record the graph that it was given")
    if published.made_from == built.graph.digest:
        return _check(GRAPH, Outcome.PASS, 0.0, f"the graph that was compiled is {built.graph.digest}, as published")
    return _check(
        GRAPH, Outcome.FAIL, 1.0,
        f"the source gives the graph {built.graph.digest}, and {published.made_from} was compiled",
    )  # fmt: skip


def _artifact_check(published: Artifact, built: Rebuilt, files: list[str]) -> Check:
    if not files:
        count = len(list_tree(published.path))
        what = "its file has" if count == 1 else f"its {count} files have"
        return _check(ARTIFACT, Outcome.PASS, 0.0, f"{what} the bytes that {published.backend} writes again")
    reason = (
        f"{', '.join(f'{ARTIFACT_NAME}/{name}' for name in files[:3])}{' and others' if len(files) > 3 else ''}: "
        f"{published.backend} writes other bytes, the same ones twice, with {_words(built.artifact.toolchain)}"
    )
    return _check(ARTIFACT, Outcome.FAIL, float(len(files)), reason)


def _answers_check(context: Context, recipe: _Recipe, published: Artifact, built: Rebuilt, samples: SampleSet) -> Check:
    job = recipe.job
    twice = f"{published.backend} does not write the same bytes twice"
    if away := built.artifact.not_runnable_here:
        raise UsageError(
            f"whether it was made from {recipe.source.uri} can't be known: {twice}, and it can't be run here: {away}",
            fix="rebuild it where it runs",
        )
    limits = WorkerLimits.within(recipe.budget, job.target.threads, plugins.interpreter_of(job.backend))
    reason = compare_answers(context, (published, built.artifact), job.target, samples, limits)
    if reason is not None:
        return _check(ANSWERS, Outcome.FAIL, 1.0, f"{twice}, and what it writes now answers otherwise: {reason}")
    return _check(ANSWERS, Outcome.PASS, 0.0, f"{twice}, so the answers to one batch were compared: they are the same")


# -------------------------------------------------------------------------------------------------- what has changed


def _changed(context: Context, manifest: Mapping[str, Any], published: Artifact, built: Rebuilt) -> Iterator[str]:
    """What bytes depend on and is other than when it was published."""
    yield from _versions(published.toolchain, built.artifact.toolchain)
    if manifest["python"] != python_version():
        yield f"Python {manifest['python']} there, {python_version()} here"
    if manifest["fingerprint"] != context.hardware.fingerprint:
        yield f"the machine {manifest['fingerprint']} there, {context.hardware.fingerprint} here"
    recorded = manifest["data"]["samples"].get("calibration", {}).get("digest", "")
    if built.calibration and recorded != built.calibration:
        yield f"calibration samples {recorded or '(none)'} there, {built.calibration} here"
    then = manifest.get("made_by")
    if then is None:
        yield "an earlier compile-stage published it, which did not record its own version"
        return
    now = made_by(revive(Job, manifest["job"]), manifest["source"]["flavor"])
    for part in ("packages", "source", "lowering", "backend"):
        yield from _versions(then.get(part, {}), now[part])
    if then.get("code") != now["code"]:
        yield "the code of compile-stage"


def _versions(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            yield f"{name} {_short(there.get(name))} there, {_short(here.get(name))} here"


def _short(version: str | None) -> str:
    return version[:19] if version else "(none)"


def _words(toolchain: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(toolchain.items())) or "no package of its own"


def _what(same_graph: bool, files: list[str]) -> str:
    return f"{ARTIFACT_NAME}/{files[0]}" if files and same_graph else "the graph that the source gives"


def _remedy(manifest: Mapping[str, Any], published: Artifact, built: Rebuilt) -> str:
    """Packages by pip where they are all that differs that it can bring; else the machine that made it."""
    ours = manifest.get("made_by", {}).get("packages", {})
    pairs = ((ours, plugins.package_versions(*ours)), (published.toolchain, built.artifact.toolchain))
    wanted = {
        pin(name, version) for there, here in pairs for name, version in there.items() if here.get(name) != version
    }
    if wanted:
        return f"rebuild it with what made it: pip install {' '.join(sorted(wanted))}"
    return f"rebuild it where it was made ({manifest['fingerprint']}), with the compile-stage that made it"
