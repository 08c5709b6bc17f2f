"""The profile of an artifact that OpenVINO runs: the counters that it keeps for each layer, and the graph that it made.

The plug-in is compiled once more with `PERF_COUNT`, so what is measured keeps no counters. A layer of the executed
graph names those of the source graph that it computes (`originalLayersNames`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.backends.openvino_session import open_model
from compile_stage.core.records import Artifact, Fusion, GraphNode, Operator, Profile
from compile_stage.plugin_support.profiling import (
    Kernel,
    ProfileRequest,
    call_repeatedly,
    profile_of,
    rank,
    trace_events,
    warm_up,
    write_trace,
)

if TYPE_CHECKING:
    from compile_stage.core.ports import Backend
    from compile_stage.core.tensors import Batch

_CONVERSIONS = ("Reorder", "Convert", "Transpose")
_NO_WORK = ("Parameter", "Constant", "Result")
_NO_LAYER = ("Const", "Input", "Output")


@dataclass(frozen=True)
class _Layer:
    kind: str
    sources: tuple[GraphNode, ...]


def profile_artifact(backend: Backend, artifact: Artifact, request: ProfileRequest) -> Profile:
    """Profile the model that is compiled for the batch's shape."""
    import openvino

    path, options = Path(artifact.path) / artifact.entry, artifact.options
    counting = {**options, "config": {**options["config"], "PERF_COUNT": True}}
    kernels: list[Kernel] = []
    now_s = 0.0
    with open_model(path, counting, request.threads, artifact.signature) as session:

        def run(batch: Batch) -> None:
            session.run(batch)

        def run_and_read(batch: Batch) -> None:
            nonlocal now_s
            session.run(batch)
            for kernel in _counters(session.request_for(batch), now_s):
                kernels.append(kernel)
                now_s = kernel.start_s + kernel.seconds

        warm_up(run, request.batches)
        taken = call_repeatedly(run_and_read, request.batches)
        layers = _layers(session.request_for(request.batches[0]).get_compiled_model(), _source_nodes(path))
    operators = rank(kernels, {name: layer.sources for name, layer in layers.items()})
    trace, notes = write_trace(trace_events(kernels), request.into)
    return profile_of(
        f"OpenVINO {openvino.__version__.split('-')[0]} (PERF_COUNT)",
        request,
        taken,
        operators,
        fusions=_fusions(layers),
        conversions=tuple(operator for operator in operators if _is_inserted(operator, layers)),
        notes=(
            *notes,
            "OpenVINO counts whole microseconds; it does not tell its memory, nor which nodes it folded into constants",
            "the trace lays its layers one after the other: the counters have durations, and no beginnings",
        ),
        trace=trace,
    )


def _counters(request: Any, begin_s: float) -> Iterator[Kernel]:
    """The layers of the last call, in the order in which they run."""
    for info in request.get_profiling_info():
        if info.status.name == "EXECUTED":
            seconds = info.real_time.total_seconds()
            yield Kernel(
                name=info.node_name,
                kind=info.node_type,
                start_s=begin_s,
                seconds=seconds,
                implementation=info.exec_type,
            )
            begin_s += seconds


def _source_nodes(path: Path) -> dict[str, str]:
    """Name of a node of the artifact's graph → its type."""
    import openvino

    operations = openvino.Core().read_model(path).get_ops()
    types = {operation.get_friendly_name(): operation.get_type_name() for operation in operations}
    return {name: kind for name, kind in types.items() if kind not in _NO_WORK}


def _layers(compiled: Any, nodes: Mapping[str, str]) -> dict[str, _Layer]:
    """Name of an executed layer → what it computes."""
    found = {}
    for operation in compiled.get_runtime_model().get_ordered_ops():
        info = operation.get_rt_info()
        kind = info["layerType"].astype(str)
        names = info["originalLayersNames"].astype(str).split(",") if "originalLayersNames" in info else []
        if kind not in _NO_LAYER:
            sources = tuple(GraphNode(name=name, kind=nodes[name]) for name in names if name in nodes)
            found[operation.get_friendly_name()] = _Layer(kind=kind, sources=sources)
    return found


def _fusions(layers: Mapping[str, _Layer]) -> tuple[Fusion, ...]:
    return tuple(
        Fusion(kernel=name, kind=layer.kind, sources=layer.sources)
        for name, layer in layers.items()
        if len(layer.sources) > 1
    )


def _is_inserted(operator: Operator, layers: Mapping[str, _Layer]) -> bool:
    layer = layers.get(operator.name)
    return operator.kind in _CONVERSIONS and (layer is None or not layer.sources)
