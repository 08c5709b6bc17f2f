"""The profile of an artifact that OpenVINO runs: the counters that it keeps for each layer, and the graph that it made.

The plug-in is compiled once more with `PERF_COUNT`, so what is measured keeps no counters. A layer of the executed
graph names those of the source graph that it computes (`originalLayersNames`).
"""

from __future__ import annotations

from collections import Counter
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


@dataclass(frozen=True)
class Means:
    """What OpenVINO counted of one infer request.

    Attributes:
        calls: Since the model was compiled.
        seconds: Name, type and kind of execution of a layer → the mean over all these calls, in whole microseconds. A
            layer of which that is 0 is not there.
    """

    calls: int
    seconds: Mapping[tuple[str, str, str], float]


def profile_artifact(backend: Backend, artifact: Artifact, request: ProfileRequest) -> Profile:
    """Profile the model that is compiled for the batch's shape."""
    import openvino

    path, options = Path(artifact.path) / artifact.entry, artifact.options
    sharing = int(options.get("requests", 1))
    # Requests that share a batch change places between OpenVINO's streams, and its counters are a stream's.
    counting = {**options, "config": {**options["config"], "PERF_COUNT": True}, "requests": 1}
    with open_model(path, counting, request.threads, artifact.signature) as session:
        calls: Counter[Any] = Counter()

        def run(batch: Batch) -> None:
            session.run(batch)
            calls[session.request_for(batch)] += 1

        warm_up(run, request.batches)
        before = {asked: _means(asked, count) for asked, count in calls.items()}
        taken = call_repeatedly(run, request.batches)
        after = {asked: _means(asked, count) for asked, count in calls.items()}
        layers = _layers(session.request_for(request.batches[0]).get_compiled_model(), _source_nodes(path))
    kernels = list(_kernels(before, after))
    operators = rank(kernels, {name: layer.sources for name, layer in layers.items()})
    trace, notes = write_trace(trace_events(kernels), request.into)
    shared = (f"{sharing} requests share a batch where it is served; profiled is one that takes all of its rows",)
    return profile_of(
        f"OpenVINO {openvino.__version__.split('-')[0]} (PERF_COUNT)",
        request,
        taken,
        operators,
        fusions=_fusions(layers),
        conversions=tuple(operator for operator in operators if _is_inserted(operator, layers)),
        notes=(
            *notes,
            *(shared if sharing > 1 else ()),
            "OpenVINO counts whole microseconds; it does not tell its memory, nor which nodes it folded into constants",
            "the trace shows each layer's mean in every call, one after the other: the counters have no single "
            "calls, and no beginnings",
        ),
        trace=trace,
    )


def seconds_a_call(before: Means, after: Means) -> dict[tuple[str, str, str], float]:
    """The mean of each layer over the calls between two readings of the same counters, in the order of the layers.

    OpenVINO's means are over all calls since the model was compiled; the first one, which loads kernels, can be a
    hundred times as long as another.
    """
    return {
        layer: max(0.0, after.calls * after.seconds.get(layer, 0.0) - before.calls * before.seconds.get(layer, 0.0))
        / (after.calls - before.calls)
        for layer in {**before.seconds, **after.seconds}
    }


def _means(asked: Any, calls: int) -> Means:
    counters = [info for info in asked.get_profiling_info() if info.status.name == "EXECUTED"]
    return Means(
        calls, {(info.node_name, info.node_type, info.exec_type): info.real_time.total_seconds() for info in counters}
    )


def _kernels(before: Mapping[Any, Means], after: Mapping[Any, Means]) -> Iterator[Kernel]:
    """The layers of each profiled call, in the order in which they run."""
    now_s = 0.0
    for asked, means in after.items():
        earlier = before.get(asked, Means(0, {}))
        if means.calls == earlier.calls:
            continue
        layers = seconds_a_call(earlier, means)
        for _ in range(means.calls - earlier.calls):
            for (name, kind, implementation), seconds in layers.items():
                yield Kernel(name=name, kind=kind, start_s=now_s, seconds=seconds, implementation=implementation)
                now_s += seconds


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
