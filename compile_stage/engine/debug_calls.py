"""What a worker can do for `debug` and for the notes on samples: it looks into graphs. `engine.calls` has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compile_stage.core.digest import revive
from compile_stage.core.generation import has_cache
from compile_stage.core.records import PortableModel, SampleSet


def compare_samples(model: Any, calibration: Any, validation: Any) -> dict[str, Any]:
    """How many samples both sets hold, and what of the validation samples' activations lies outside of the calibrated
    ranges; None for that where the two sets are one, and for a graph that is no ONNX or is run token by token."""
    from compile_stage.core.parallel import granted_threads
    from compile_stage.graph_debug.coverage import coverage
    from compile_stage.measure.samples import overlap

    graph, ours, theirs = revive(PortableModel, model), revive(SampleSet, calibration), revive(SampleSet, validation)
    covers = graph.form == "onnx" and not has_cache(graph.signature) and ours.digest != theirs.digest
    return {
        "overlap": overlap(ours, theirs),
        "coverage": coverage(graph, ours, theirs, granted_threads()) if covers else None,
    }


def trace_nodes(pair: Any, count: int) -> Any:
    """Two model files side by side, on the first samples of `Comparison.order`: a `graph_debug.trace.Trace`."""
    from compile_stage.graph_debug.comparison import Comparison
    from compile_stage.graph_debug.graphs import open_graph
    from compile_stage.graph_debug.trace import trace
    from compile_stage.measure.samples import open_samples

    compared: Comparison = revive(Comparison, pair)
    opened, size = open_samples(compared.samples), _fixed_batch(compared.reference) or 1
    taken = max(size, min(count, opened.count) // size * size)
    order = compared.order(taken)
    batches = (opened.some(order[start : start + size]) for start in range(0, taken, size))
    graphs = open_graph(compared.reference), open_graph(compared.candidate, hint=compared.hint)
    return trace(*graphs, batches, precision=compared.precision, threads=compared.threads)


def describe_graph(path: str) -> PortableModel:
    """An ONNX file as a portable model. Raises SourceError when an input or output is no tensor."""
    from compile_stage.graph_debug.reduce import describe

    return describe(Path(path))


def list_nodes(path: str) -> list[list[str]]:
    """Name and operator of every node of an ONNX file, in order."""
    from compile_stage.graph_debug.reduce import Cutter

    return Cutter(Path(path)).nodes()


def cut_graph(path: str, nodes: list[int], into: str) -> PortableModel | None:
    """Some nodes of an ONNX file as a file of their own; None when that can't be made."""
    from compile_stage.graph_debug.reduce import Cutter

    return Cutter(Path(path)).write(nodes, Path(into))


def write_trace_bundle(pair: Any, tensor: str, facts: dict[str, Any], into: str) -> None:
    """What is attached to a bug report about a wrong answer."""
    from compile_stage.graph_debug.bundle import write_trace_bundle as write
    from compile_stage.graph_debug.comparison import Comparison

    compared: Comparison = revive(Comparison, pair)
    write(compared, tensor, facts, Path(into), fixed_batch=_fixed_batch(compared.reference))


def write_failure_bundle(graph: str, backend: str, facts: dict[str, Any], into: str) -> None:
    """What is attached to a bug report about a graph that can't be compiled."""
    from compile_stage.graph_debug.bundle import write_failure_bundle as write

    write(Path(graph), backend, facts, Path(into))


def _fixed_batch(path: str) -> int | None:
    return describe_graph(path).signature.fixed_batch if path.endswith(".onnx") else None
