"""A diagnosis with what was found beyond it: the small graph that fails to compile, the bundle for a bug report."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from compile_stage.core.context import Context
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Job, PortableModel
from compile_stage.diagnosis.in_workers import bundle_failure, bundle_trace, reduce_failure
from compile_stage.graph_debug.comparison import Comparison
from compile_stage.graph_debug.diagnosis import Diagnosis
from compile_stage.graph_debug.trace import Trace, rank

SAMPLES = 16
"""Samples of a trace: an error that matters shows in a few, and every tensor of every one is compared."""

PACKAGES = ("compile-stage", "onnx", "onnxruntime", "openvino", "nncf", "numpy")
"""What a bug report names the versions of."""


def with_reduced_graph(
    context: Context, limits: WorkerLimits, diagnosis: Diagnosis, job: Job, model: PortableModel, out: Path
) -> Diagnosis:
    """With the small graph that fails as the whole one does, in a bundle."""
    with tempfile.TemporaryDirectory(prefix="compile-stage-reduce-", dir=context.scratch) as folder:
        failed = reduce_failure(context, job, model, limits, Path(folder))
        if failed is None:
            note = f"{job.backend} compiles this graph" + (f" as {job.scheme.name}" if not job.scheme.native else "")
            return replace(diagnosis, notes=(*diagnosis.notes, note))
        diagnosis = replace(diagnosis, failed=failed)
        graph = Path(folder) / "reduced" / "model.onnx"
        with context.worker(job.id, limits) as worker:
            into = bundle_failure(context, worker, job, graph, facts=_facts(diagnosis), into=out / "bundle")
        return replace(diagnosis, bundle=into)


def with_bundle(context: Context, worker: Worker, diagnosis: Diagnosis, pair: Comparison, into: Path) -> Diagnosis:
    """With a bundle about the tensor at which the error departs, or the one with the largest share of it."""
    if diagnosis.trace is None or not diagnosis.trace.nodes:
        return diagnosis
    shown = diagnosis.trace.find(diagnosis.trace.first or "") or next(iter(rank(diagnosis.trace)), None)
    if shown is None:
        return replace(diagnosis, notes=(*diagnosis.notes, _no_bundle(diagnosis.trace)))
    bundle = bundle_trace(context, worker, pair, shown.tensor, _facts(diagnosis), into)
    return replace(diagnosis, bundle=bundle)


def _no_bundle(found: Trace) -> str:
    """Why there is no tensor to report: all are equal."""
    if any(served_db < math.inf for _, served_db in found.outputs.values()):
        return "every tensor that was compared is the same in both graphs, so there is no bundle of one"
    return f"on the {found.samples} samples that were compared both answer the same, so there is nothing to report"


def _facts(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "title": diagnosis.title,
        "summary": diagnosis.headline,
        "problem": diagnosis.failed.problem if diagnosis.failed else "",
        "packages": diagnosis.packages,
    }
