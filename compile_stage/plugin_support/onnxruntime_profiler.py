"""ONNX Runtime's own profile, and what its optimiser made of a graph: for the backend and for sources that run on it.

The profile is the JSON that a session writes with `SessionOptions.enable_profiling`. Which node became which kernel it
does not say. That is read from the graph that the session optimised and wrote (`optimized_model_filepath`): tensors
keep their names, so what a kernel computes is what the source graph computes between the tensors that are still there.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.records import Fusion, GraphNode, Operator, Profile
from compile_stage.plugin_support.profiling import (
    WARM_UP_CALLS,
    Kernel,
    ProfileRequest,
    call_repeatedly,
    profile_of,
    rank,
    undisturbed,
    warm_up,
    write_trace,
)

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_KERNEL = "_kernel_time"  # the end of an event's name
_CONVERSIONS = (
    "ReorderInput", "ReorderOutput", "Transpose", "Cast", "QuantizeLinear", "DequantizeLinear", "MemcpyFromHost",
    "MemcpyToHost",
)  # fmt: skip
_NOTHING = ("Constant", "Identity", "Dropout")  # they compute nothing, so no kernel is named for them
# Nodes in blocks of channels (NCHWc) get new outputs, and are named after what the node had.
_IN_BLOCKS = re.compile(r"(.+)_nchwc(?:_token_\d+|_\d+)?$")


@dataclass(frozen=True)
class Optimised:
    """What the optimiser made of a graph.

    Attributes:
        sources: Kernel's name → the nodes that it computes.
        conversions: Names of kernels that the source graph does not ask for, and that only change layout or type.
    """

    sources: dict[str, tuple[GraphNode, ...]]
    fusions: tuple[Fusion, ...]
    conversions: frozenset[str]
    folded: tuple[GraphNode, ...]


def profile_session(start: Callable[[Any], Any], options: Any, graph: Path | None, request: ProfileRequest) -> Profile:
    """Profile a session.

    Args:
        start: `onnxruntime.SessionOptions` → the session, opened as it is when it is measured.
        options: Those that it is measured with; profiling is added to them.
        graph: The ONNX file that it opens; None where that, or what the runtime makes of it, can't be read.
    """
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="compile-stage-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        dump = Path(folder) / "optimised.onnx"
        if graph is not None:
            options.optimized_model_filepath = str(dump)
            # Weights go to a file of their own, which is not read back.
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        session = start(options)

        def run(batch: Batch) -> Any:
            return session.run(None, dict(batch))

        warm_up(run, request.batches)
        taken = call_repeatedly(run, request.batches)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        optimised = read_optimised(graph, dump) if graph is not None else None
    return _profile(f"ONNX Runtime {onnxruntime.__version__}", _measured(events), optimised, taken, request)


def _profile(
    runtime: str,
    events: Sequence[dict[str, Any]],
    optimised: Optimised | None,
    taken: Sequence[float],
    request: ProfileRequest,
) -> Profile:
    operators = rank(_kernels(events), optimised.sources if optimised is not None else None)
    trace, notes = write_trace(events, request.into)
    notes += ("ONNX Runtime counts whole microseconds: a kernel of less is 0",)
    if optimised is None:
        notes += ("what this provider made of the graph can't be written down, so no fusions are known",)
    return profile_of(
        f"{runtime} (SessionOptions.enable_profiling)",
        request,
        undisturbed(taken),
        operators,
        fusions=optimised.fusions if optimised is not None else None,
        conversions=_conversions(operators, optimised),
        folded=optimised.folded if optimised is not None else None,
        memory=_memory(events),
        notes=notes,
        trace=trace,
    )


def _measured(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and kernels after the warm-up, from 0 on."""
    calls = sorted(event["ts"] for event in events if event.get("name") == "model_run")
    begin = calls[WARM_UP_CALLS]
    kept = []
    for event in events:
        is_kernel = event.get("cat") == "Node" and event["name"].endswith(_KERNEL)
        if event.get("ts", -1) >= begin and (is_kernel or event["name"] == "model_run"):
            told = {key: value for key, value in event["args"].items() if key != "thread_scheduling_stats"}
            kept.append({**event, "ts": event["ts"] - begin, "name": event["name"].removesuffix(_KERNEL), "args": told})
    return sorted(kept, key=lambda event: event["ts"])


def _kernels(events: Sequence[dict[str, Any]]) -> Iterator[Kernel]:
    for event in events:
        if event["cat"] == "Node":
            told = event["args"]
            yield Kernel(
                name=event["name"],
                kind=str(told.get("op_name", "")),
                start_s=event["ts"] / 1e6,
                seconds=event["dur"] / 1e6,
                implementation=str(told.get("provider", "")).removesuffix("ExecutionProvider"),
            )


def _memory(events: Sequence[dict[str, Any]]) -> dict[str, int]:
    """What the allocator says beside each kernel, since the session was made; older versions say nothing."""
    told = [event["args"] for event in events if event["cat"] == "Node"]
    sizes = {
        "peak_bytes": max((int(one.get("mem_in_use_peak", 0)) for one in told), default=0),
        "arena_bytes": max((int(one.get("mem_arena_held", 0)) for one in told), default=0),
    }
    return {name: size for name, size in sizes.items() if size}


def _conversions(operators: Sequence[Operator], optimised: Optimised | None) -> tuple[Operator, ...] | None:
    if optimised is None:
        return None
    return tuple(operator for operator in operators if operator.name in optimised.conversions)


# ----------------------------------------------------------------------------------------------- what became of a graph


def read_optimised(graph: Path, dump: Path) -> Optimised:
    """Compare a graph with what ONNX Runtime made of it."""
    import onnx

    return _Reading(
        onnx.load(graph, load_external_data=False).graph, onnx.load(dump, load_external_data=False).graph
    ).result()


class _Reading:
    """One comparison. A kernel's *anchors* are the tensors of the source graph that it computes."""

    def __init__(self, source: Any, optimised: Any) -> None:
        self._nodes, self._kernels = list(source.node), list(optimised.node)
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._named = {node.name: node for node in self._nodes if node.name}
        self._constants = _constants(source, self._nodes)
        self._left = {name for kernel in self._kernels for name in (*kernel.input, *kernel.output)}
        self._anchors = [self._anchors_of(kernel) for kernel in self._kernels]

    def result(self) -> Optimised:
        covered = [self._covered(number) for number in range(len(self._kernels))]
        self._add_swallowed(covered)
        sources, fusions, conversions = {}, [], set()
        for kernel, nodes in zip(self._kernels, covered, strict=True):
            asked = [node for node in nodes if node.op_type not in _NOTHING]
            if kernel.op_type in _CONVERSIONS and kernel.op_type not in (node.op_type for node in asked):
                conversions.add(kernel.name)
                continue
            listed = tuple(GraphNode(name=_name(node), kind=node.op_type) for node in asked)
            sources[kernel.name] = listed
            if len(listed) > 1:
                fusions.append(Fusion(kernel=kernel.name, kind=kernel.op_type, sources=listed))
        return Optimised(
            sources=sources, fusions=tuple(fusions), conversions=frozenset(conversions), folded=tuple(self._folded())
        )

    def _anchors_of(self, kernel: Any) -> list[str]:
        if known := self._known(kernel):
            return known
        if (named := _IN_BLOCKS.match(kernel.name)) and named[1] in self._producer:
            return [named[1]]
        same = self._unchanged(kernel)
        return list(same.output) if same is not None else []

    def _unchanged(self, kernel: Any) -> Any | None:
        """The node that a kernel still is, where only its tensors are others, in blocks of channels."""
        node = self._named.get(kernel.name)
        kept = node is not None and node.op_type == kernel.op_type and not self._known(kernel)
        return node if kept else None

    def _known(self, kernel: Any) -> list[str]:
        return [name for name in kernel.output if name in self._producer]

    def _covered(self, number: int) -> list[Any]:
        """The nodes between a kernel's anchors and what other kernels compute, in the source graph's order."""
        kernel = self._kernels[number]
        if kernel.op_type in _CONVERSIONS:  # of what stands before it, only a conversion is its own work
            made = [self._producer[name] for name in kernel.output if name in self._producer]
            return [node for node in made if node.op_type == kernel.op_type]
        if (same := self._unchanged(kernel)) is not None:
            return [same]
        others = {name for other, anchors in enumerate(self._anchors) if other != number for name in anchors}
        ends = (self._left - set(kernel.output)) | (others - set(self._anchors[number]))
        found: dict[int, Any] = {}
        waiting = list(self._anchors[number])
        while waiting:
            node = self._producer.get(waiting.pop())
            if node is None or id(node) in found:
                continue
            found[id(node)] = node
            if self._is_in_blocks(number) and node.op_type == kernel.op_type:
                continue  # tensors in blocks have names of their own, so nothing says where the next kernel begins
            waiting += [name for name in node.input if name and name not in ends and name not in self._constants]
        return [node for node in self._nodes if id(node) in found]

    def _add_swallowed(self, covered: list[list[Any]]) -> None:
        """A kernel in blocks of channels also takes nodes behind its own, whose outputs then have no name any more."""
        owner = {name: number for number, nodes in enumerate(covered) for node in nodes for name in node.output}
        done = {id(node) for nodes in covered for node in nodes}
        for node in self._nodes:
            if id(node) in done or self._constants.issuperset(node.output):
                continue
            before = [owner[name] for name in node.input if name in owner and self._is_in_blocks(owner[name])]
            if before and not self._left.intersection(node.output):
                covered[max(before)].append(node)
                owner.update(dict.fromkeys(node.output, max(before)))

    def _is_in_blocks(self, number: int) -> bool:
        return "nchwc" in self._kernels[number].domain

    def _folded(self) -> Iterator[GraphNode]:
        for node in self._nodes:
            gone = not any(name in kernel.output for kernel in self._kernels for name in node.output)
            if gone and node.op_type not in _NOTHING and self._constants.issuperset(node.output):
                yield GraphNode(name=_name(node), kind=node.op_type)


def _constants(graph: Any, nodes: Sequence[Any]) -> set[str]:
    """Tensors that are the same in each call."""
    inputs = {value.name for value in graph.input}
    known = {tensor.name for tensor in graph.initializer} - inputs
    for node in nodes:
        draws = node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")
        has_graphs = any(attribute.g.node or attribute.graphs for attribute in node.attribute)
        if not draws and not has_graphs and all(name in known for name in node.input if name):
            known.update(node.output)
    return known


def _name(node: Any) -> str:
    return str(node.name or (node.output[0] if node.output else node.op_type))
