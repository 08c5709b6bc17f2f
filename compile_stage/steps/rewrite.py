"""Portable model → portable model with cheaper forms of what its exporter wrote, before anything is lowered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import WorkerError
from compile_stage.core.file_trees import read_below, written_below
from compile_stage.core.ports import Worker
from compile_stage.core.records import PortableModel, SampleSet


def rewrite(context: Context, worker: Worker, model: PortableModel, samples: SampleSet) -> PortableModel:
    """The model with the rewrites of `compile_stage.graph_rewrites` that hold on the samples; what was done stands in
    its notes. Itself where it is no ONNX graph, or nothing was found.

    Args:
        worker: The one that prepares samples: it may have the graph's weights in memory twice.
        samples: Those that artifacts are validated on.
    """
    if model.form != "onnx":
        return model
    key = {
        "model": model.digest,
        "samples": samples.digest,
        "packages": plugins.package_versions("onnx", "onnxruntime", "numpy"),  # a rewrite is kept by what these answer
    }

    def make(into: Path) -> PortableModel:
        answer = worker.call("rewrite_graph", source=None, model=model, samples=samples, into=str(into))
        made: PortableModel = revive(PortableModel, answer)
        return replace(made, path="") if made.path == model.path else written_below(made, into)

    try:
        stored = context.cached("rewrite/6", "", key, make)
    except WorkerError as error:  # what was exported is still there
        problem = f"the graph was not rewritten: {error.problem}"
        return replace(model, notes=(*model.notes, problem))
    made: PortableModel = revive(PortableModel, stored.value)
    if not made.path:
        return replace(model, notes=made.notes)
    return read_below(made, stored.path, of=model)
