"""Diagnosis without a policy: two model files compared, or one that a backend may not take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import Budget, DataSpec, Job, PortableModel, SampleSet, Target
from compile_stage.diagnosis.findings import PACKAGES, SAMPLES, with_bundle, with_reduced_graph
from compile_stage.diagnosis.in_workers import trace
from compile_stage.graph_debug.comparison import Comparison
from compile_stage.graph_debug.diagnosis import Diagnosis
from compile_stage.measure.readers import SampleRequest


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
    reads = (str(reference_file.parent), str(candidate_file.parent), *([str(Path(data).absolute())] if data else []))
    with context.worker(title, replace(WorkerLimits.within(Budget()), reads=reads)) as worker:
        described = revive(PortableModel, worker.call("describe_graph", path=str(shape_of)))
        spec = DataSpec(source=f"file:{Path(data).absolute()}" if data else "synthetic", max_samples=count)
        request = SampleRequest(spec=spec, signature=described.signature, seed=0)
        answer = worker.call("prepare_samples", source=None, request=request, into=str(context.scratch / "samples"))
        samples: SampleSet = revive(SampleSet, answer)
        pair = Comparison(title=title, reference=str(reference_file), candidate=str(candidate_file), samples=samples)
        traced = trace(context, worker, pair, count)
        diagnosis = Diagnosis(
            title=title,
            precision=traced.precision,
            backend="",
            reference=str(reference_file),
            candidate=str(candidate_file),
            trace=traced,
            packages=plugins.package_versions(*PACKAGES),
            notes=() if data else ("the samples are random numbers; a model may behave otherwise on real ones",),
        )
        return with_bundle(context, worker, diagnosis, pair, out / "bundle")


def diagnose_compilation(context: Context, graph: Path, backend: str, out: Path) -> Diagnosis:
    """Does a backend take this ONNX file, and if not, which few of its nodes are enough to make it fail?"""
    plugin = plugins.load("backends", backend)
    plugins.demand(plugin)
    target = Target(name="debug", backends=(backend,))
    scheme = next(iter(plugin.schemes(target, "fp32")))
    job = Job(id=f"{graph.stem}--{backend}", source=str(graph), target=target, backend=backend, scheme=scheme, gates=())
    limits = replace(WorkerLimits.within(Budget()), reads=(str(graph.parent),))
    diagnosis = Diagnosis(
        title=job.id,
        precision="fp32",
        backend=backend,
        reference=str(graph),
        candidate=str(graph),
        packages=plugins.package_versions(*PACKAGES),
    )
    with context.worker(job.id, limits) as worker:
        model = revive(PortableModel, worker.call("describe_graph", path=str(graph)))
    return with_reduced_graph(context, limits, diagnosis, job, model, out)
