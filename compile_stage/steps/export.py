"""Source model → portable model; the original stays the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.environment import python_version
from compile_stage.core.errors import IntegrityError, SourceError
from compile_stage.core.file_trees import written_below
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Compliance,
    Job,
    Origin,
    PortableModel,
    Predictions,
    SampleSet,
    SourceModel,
    Target,
)
from compile_stage.core.shapes import how_to_open_the_batch
from compile_stage.core.tensors import Signature


def inspect(context: Context, worker: Worker, source: SourceModel, compliance: Compliance) -> Origin:
    """Ask the source plug-in whether it takes the model under this policy, before anything else loads it.

    Raises:
        SourceError: The model is refused, with the reason.
    """
    if source.flavor not in plugins.names("sources"):
        raise _unsupported(source)
    exporter = plugins.load("sources", source.flavor)
    if not plugins.has_toolchain(exporter):
        plugins.demand(exporter)
    key = {
        "source": source.identity,
        "made_by": plugins.cache_identity("sources", source.flavor),
        "compliance": compliance,
        "python": python_version() if compliance.allow_pickle else "",  # a pickle may hold bytecode
    }
    stored = context.cached(
        "inspect/20",
        "",
        key,
        lambda into: worker.call("inspect_source", source=source, compliance=compliance, into=str(into)),
    )
    plugins.demand(exporter)  # after the model's own faults, so that nobody installs gigabytes to be refused
    origin: Origin = revive(Origin, stored.value)
    return replace(origin, processor=replace(origin.processor, path=stored.path))


def inspect_published(context: Context, worker: Worker, source: SourceModel, *, allow_pickle: bool) -> Origin:
    """As `inspect`, of what a published model was made from: an option allows pickles there, and no policy."""
    try:
        return inspect(context, worker, source, Compliance(allow_pickle=allow_pickle))
    except SourceError as error:
        if allow_pickle or "compliance.allow_pickle" not in f"{error.problem} {error.fix}":
            raise
        fix = "if you trust where it comes from: --allow-pickle, or from Python allow_pickle=True"
        raise SourceError(error.problem, fix=fix, where=source.uri) from error


def predict_original(context: Context, worker: Worker, source: SourceModel, samples: SampleSet) -> Predictions | None:
    """What the original's predict() answers to texts, those of the samples among them."""
    key = {
        "source": source.identity,
        "samples": samples.digest,
        "made_by": plugins.cache_identity("sources", source.flavor),
    }
    stored = context.cached(
        "predict/4", "", key, lambda _: {"predictions": worker.call("predict_original", source=source, samples=samples)}
    )
    found: Predictions | None = revive(Predictions | None, stored.value["predictions"])
    return found


_BY_ONNX = "then log that file: mlflow.onnx.log_model(onnx.load('model.onnx'), name='model')"


# Flavors of MLflow whose framework has no converter to ONNX.
_WITHOUT_CONVERTER = (
    "spacy",
    "prophet",
    "pmdarima",
    "langchain",
    "llama_index",
    "dspy",
    "crewai",
    "openai",
    "johnsnowlabs",
)


def _unsupported(source: SourceModel) -> SourceError:
    supported = f"supported are {', '.join(plugins.names('sources'))}"
    if source.flavor in _WITHOUT_CONVERTER:
        return SourceError(
            f"a model of flavor {source.flavor!r} can't be compiled: its framework has no converter to ONNX; "
            f"{supported}",
            fix="serve the original; or train a model of one of these flavors in its place",
            where=source.uri,
        )
    return SourceError(
        f"a model of flavor {source.flavor!r} can't be compiled: it is not supported yet; {supported}",
        fix=f"export it to ONNX with its framework's converter, {_BY_ONNX}",
        where=source.uri,
    )


def export(context: Context, worker: Worker, source: SourceModel, target: Target, jobs: Sequence[Job]) -> PortableModel:
    """The source as ONNX, for what a target asks for. Where it has no ONNX: as StableHLO, if it is given so, or as a
    PyTorch program, if that is what one of the jobs, all of this target, starts from.

    Raises:
        SourceError: It can't be exported, or has fixed a shape that the target wants otherwise.
    """
    try:
        model = _in_form("onnx", context, worker, source, target)
    except SourceError:
        if plugins.load("sources", source.flavor).capabilities.forms[0] == "stablehlo":
            model = _in_form("stablehlo", context, worker, source, target)
        elif any(job.form == "torch-export" for job in jobs):
            model = _in_form("torch-export", context, worker, source, target)
        else:
            raise
    demand_batch_sizes(source, model.signature, target)
    return model


def other_forms(
    context: Context, worker: Worker, source: SourceModel, jobs: Sequence[Job], exported: str = "onnx"
) -> dict[str, PortableModel | str]:
    """The source in each form, beside the one that it was exported in, that one of the jobs, all of one target, asks
    for; or why it can't be had in it."""
    forms: dict[str, PortableModel | str] = {}
    for form in sorted({job.form for job in jobs} - {exported}):
        try:
            forms[form] = _in_form(form, context, worker, source, jobs[0].target)
        except SourceError as error:
            forms[form] = f"the source can't be had as {form}: {error.problem}"
    return forms


def _in_form(form: str, context: Context, worker: Worker, source: SourceModel, target: Target) -> PortableModel:
    shapes, made_by = target.shapes, plugins.cache_identity("sources", source.flavor)
    key: dict[str, Any] = {"source": source.identity, "shapes": shapes, "made_by": made_by}

    def made(call: str, **given: Any) -> Callable[[Path], Any]:
        return lambda into: _relative(worker.call(call, source=source, **given, into=str(into)), into)

    if form == "onnx":
        stored = context.cached("export/19", "", key, made("export", shapes=shapes))
    elif form == "torch-export":
        stored = context.cached("export-program/12", "", key, made("export_program", shapes=shapes))
    else:  # its files are for the shapes that the target asks for
        key["batch_sizes"] = target.batch_sizes
        stored = context.cached(f"export-{form}/1", "", key, made("export_for", form=form, target=target))
    model: PortableModel = revive(PortableModel, stored.value)
    return replace(model, path=str(Path(stored.path) / model.path))


def demand_batch_sizes(source: SourceModel, signature: Signature, target: Target) -> None:
    """Raise SourceError when the model takes one batch size and the target asks for another."""
    fixed = signature.fixed_batch
    if fixed is not None and (others := [size for size in target.batch_sizes if size != fixed]):
        raise SourceError(
            f"the model takes batches of {fixed} only, and target {target.name!r} asks for batches of "
            f"{', '.join(map(str, others))}",
            fix=f"{how_to_open_the_batch(signature, source.flavor)}, or set batch_sizes: [{fixed}]",
            where=source.uri,
        )


def _relative(answer: Any, into: Path) -> PortableModel:
    """A cache entry is moved into place after it is made, so no path of the folder it was made in may stay in it.

    Raises:
        SourceError: The model is no file of that folder.
    """
    try:
        return written_below(revive(PortableModel, answer), into)
    except IntegrityError as error:
        raise SourceError(f"its export can't be used: {error.problem}") from error
