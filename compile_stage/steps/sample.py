"""What the policy calls real samples → samples on disk, which every validation and measurement reads."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_file, revive
from compile_stage.core.errors import CompileStageError, PolicyError, UsageError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Data, PortableModel, SampleSet, SourceModel
from compile_stage.graph_debug.coverage import Coverage, coverage_note, overlap_note
from compile_stage.measure.readers import SampleRequest


def compare_samples(
    context: Context, limits: WorkerLimits, model: PortableModel, samples: Mapping[str, SampleSet]
) -> tuple[str, ...]:
    """What a reader should know of the two sets: samples that both hold, and, of an ONNX graph that is run as a whole,
    activations that the calibration set does not show.

    It decides nothing, so a model that can't be looked into, or a worker that dies of it, costs the run a note and no
    more.
    """
    if "calibration" not in samples:
        return ()
    calibration, validation = samples["calibration"], samples["validation"]
    key = {"model": model.digest, "calibration": calibration.digest, "validation": validation.digest}

    def make(_: Path) -> dict[str, Any]:
        with context.worker("samples", limits) as worker:
            answer: dict[str, Any] = worker.call(
                "compare_samples", model=model, calibration=calibration, validation=validation
            )
        return answer

    try:
        packages = plugins.package_versions("onnx", "onnxruntime")
        stored = context.cached("compare-samples/1", "", {**key, "packages": packages}, make)
    except CompileStageError as error:
        return (f"whether the calibration samples cover the validation samples is not known: {error.problem}",)
    shared = overlap_note(stored.value["overlap"], calibration.count, validation.count)
    coverage = stored.value["coverage"]
    uncovered = coverage_note(revive(Coverage, coverage)) if coverage is not None else None
    return tuple(note for note in (shared, uncovered) if note is not None)


def demand_even_lists(context: Context, worker: Worker, data: Data) -> None:
    """Raises PolicyError where the lists of a column of the validation samples differ in length. A run asks before it
    exports the model, which takes longer."""
    spec = data.validation
    if not (spec.source.startswith("file:") and spec.source.endswith(".parquet")):
        return
    placed = context.placed_spec(spec)

    def check(_: Path) -> dict[str, Any]:
        worker.call("demand_even_lists", spec=placed)
        return {}

    context.cached("check-lists/1", "", {"file": _file_digest(placed.source.partition(":")[2])}, check)


def sample(context: Context, worker: Worker, source: SourceModel, role: str, request: SampleRequest) -> SampleSet:
    """The samples of one role, `validation` or `calibration`, in the model's own tensor names; a data set of the
    registry is fetched."""
    spec = request.spec
    kind, _, name = spec.source.partition(":")
    dataset: Path | None = None
    if kind == "mlflow-dataset":
        dataset = plugins.load("registries", source.registry).dataset(source, name, context.scratch / "datasets")
    key: dict[str, Any] = {
        # Of a file counts what is in it (below) and how it is read, not where it lies: each job of a CI has its folder.
        "spec": replace(spec, source=f"file:{Path(name).suffix}") if kind == "file" else spec,
        "seed": request.seed,
        "signature": request.signature,
        "shapes": request.shapes,
    }
    key["source"] = source.identity  # its tokenizer and its classes' names make numbers of texts and labels
    capabilities = plugins.load("sources", source.flavor).capabilities
    raw = capabilities.reads_raw_samples  # its own code makes samples of rows
    if capabilities.computes_wider:
        request, key["given"] = replace(request, keep_given=True), True
    foreign = bool(plugins.third_party("sources", source.flavor))
    if raw or foreign:
        key["through"] = plugins.cache_identity("sources", source.flavor)
    if kind == "file":
        key["file"] = _file_digest(context.placed_spec(spec).source.partition(":")[2])
    elif kind == "mlflow-dataset":
        key["file"] = digest_file(dataset) if dataset else ""
    elif kind == "python":
        key["nonce"] = secrets.token_hex(16)  # what a function answers can't be known without calling it

    fetched = replace(request, spec=context.placed_spec(spec), dataset=str(dataset) if dataset else None)

    def prepare(into: Path, of: SourceModel | None) -> SampleSet:
        answer = worker.call("prepare_samples", source=of, request=fetched, into=str(into))
        prepared: SampleSet = revive(SampleSet, answer)
        return replace(prepared, path=".", source="")

    def make(into: Path) -> SampleSet:
        if foreign and not raw and kind != "input_example":
            # A third party's code must not choose what it is judged on: it is in the process only where nothing else
            # can make the samples, as of texts.
            try:
                return prepare(into, None)
            except PolicyError:
                shutil.rmtree(into, ignore_errors=True)
                into.mkdir()
        return prepare(into, source)

    stored = context.cached("sample/7", role, key, make)
    chosen: SampleSet = replace(revive(SampleSet, stored.value), path=stored.path, source=spec.source)
    if role == "validation" and spec.groups is not None and chosen.real and not chosen.groups:
        word = "queries" if spec.whole_groups else "groups"
        raise PolicyError(
            f"there are no {word} {spec.groups!r} in the validation samples",
            fix=f"correct data.{word} in the policy, or write `{word}: null` where each sample is independent",
            where=spec.source,
        )
    return chosen


def _file_digest(path: str) -> str:
    try:
        return digest_file(path)
    except OSError as error:
        raise UsageError(
            f"the policy's samples can't be read: {error.strerror}", fix="correct data.*.source", where=path
        ) from error
