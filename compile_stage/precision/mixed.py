"""Mixed precision: which nodes of a lowered graph can be kept in float32, and the graph that keeps some of them.

A source graph and its quantised twin share most tensors by name. Between two shared tensors the twin holds a *unit*:
quantise, compute, dequantise. To keep a node is to put the source's nodes in the place of the unit, so that they read
and write the shared tensors in float32. Nothing is calibrated again, so a mixed graph costs well under a second, and it
does not matter which lowering wrote the twin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel
from compile_stage.plugin_support import onnx_weights
from compile_stage.precision.onnx_graph import QUANTISED_OPS, finish, name_nodes, raise_opset, read_opset
from compile_stage.precision.widening import WIDENED, widen_float16
from compile_stage.precision.wiring import copy_message, free_name, has_subgraph, reads, replace_nodes

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "Attention")
_CLIPPING = ("Relu", "Clip")


@dataclass(frozen=True)
class Unit:
    """One node of the source that the twin computes in integers.

    Attributes:
        node: Its name in the source; of several that the twin has merged (Conv, BatchNormalization, Relu), the
            heaviest.
        tensors: What it produces, shared by both graphs.
        cone: The twin's nodes that produce `tensors` from shared tensors and constants.
        source: The source's nodes that do the same.
        together: Names of the other matrix nodes of `source`: they are kept with it.
    """

    node: str
    op: str
    tensors: tuple[str, ...]
    cone: tuple[NodeProto, ...]
    source: tuple[NodeProto, ...]

    @property
    def together(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.source if part.op_type in _HEAVY and part.name != self.node)


def mix(model: PortableModel, lowered: PortableModel, keep: Sequence[str], into: Path) -> PortableModel:
    """The lowered graph with the source's nodes named in `keep` in float32, and what goes `together` with each.

    Same input, same bytes.

    Raises:
        UsageError: A name is no quantised node of the source, or none would remain quantised.
    """
    source, twin = load_pair(model, lowered)
    activations = restore_activations(source.graph, twin.graph)
    units = {unit.node: unit for unit in find_units(source.graph, twin.graph)}
    if unknown := [name for name in keep if name not in units]:
        raise UsageError(f"the lowered graph has no quantised node called {unknown[0]!r} that could stay in fp32")
    restored = [unit for name, unit in units.items() if name in set(keep)]
    if len(restored) == len(units):
        raise UsageError("every quantised node would stay in fp32: that is the fp32 model itself")
    named = {name for unit in restored for name in (unit.node, *unit.together)}
    kept = tuple(node.name for node in source.graph.node if node.name in named)
    _restore_source(source.graph, twin.graph, restored)
    _merge_activations(twin.graph, activations)
    mixed = finish(twin, model, into, lowered.precision)
    return replace(mixed, kept={**lowered.kept, "fp32": kept}, notes=lowered.notes, made_from=lowered.digest)


def load_pair(model: PortableModel, lowered: PortableModel) -> tuple[ModelProto, ModelProto]:
    """Both graphs, the source with names for all nodes, in the same version of ONNX's operators."""
    source, twin = onnx_weights.load(model.path), onnx_weights.load(lowered.path)
    source = raise_opset(source, read_opset(twin))
    name_nodes(source.graph)
    if WIDENED in lowered.notes:
        widen_float16(source)
    known = {entry.domain for entry in twin.opset_import}
    twin.opset_import.extend(entry for entry in source.opset_import if entry.domain not in known)
    return source, twin


def restore_activations(source: GraphProto, twin: GraphProto) -> list[str]:
    """Put back each Relu or Clip that a quantizer dropped because the Q/DQ pair after it clips to the same range.

    Without it a node that reads the tensor in float32 would see values that the source never has. Returns the tensors.
    """
    made_by_twin = _producers(twin)
    restored = []
    for node in source.node:
        twin_node = made_by_twin.get(node.output[0]) if node.output else None
        if node.op_type not in _CLIPPING or twin_node is None or twin_node.op_type in (*_CLIPPING, "DequantizeLinear"):
            continue
        name = node.output[0]
        copy = copy_message(node)
        copy.input[0] = f"{name}.unclipped"
        limits = [_constant(source, limit) if limit else None for limit in node.input[1:]]
        for place, limit in enumerate(limits, start=1):
            if limit is not None:
                copy.input[place] = f"{name}.limit{place}"
                twin.initializer.append(copy_message(limit, name=copy.input[place]))
        twin_node.output[:] = [copy.input[0] if out == name else out for out in twin_node.output]
        twin.node.append(copy)
        restored.append(name)
    merge_orders(twin)
    return restored


def find_units(source: GraphProto, twin: GraphProto) -> list[Unit]:
    """The source's nodes that the twin computes in integers, in the source's order."""
    made_by_source, made_by_twin = _producers(source), _producers(twin)
    shared = (made_by_source.keys() & made_by_twin.keys()) | {value.name for value in source.input}
    wanted = _used(twin)
    units: list[Unit] = []
    for node in source.node:
        tensors = tuple(name for name in node.output if name in shared)
        if not tensors:
            continue
        cone = _cone(tensors, shared, made_by_twin, twin)
        roots = {name for tensor in tensors for name in made_by_twin[tensor].output}
        whole = not (roots & wanted) - set(tensors)  # a root that also makes what the source has not can't be replaced
        if whole and _is_quantised(cone):
            replacement = _cone(tensors, shared, made_by_source, source)
            named = next((part for part in reversed(replacement) if part.op_type in _HEAVY), node)
            if named.name in {unit.node for unit in units}:  # it feeds two units; each needs a name of its own
                named = node
            units.append(Unit(named.name, named.op_type, tensors, tuple(cone), tuple(replacement)))
    return units


def _is_quantised(cone: Sequence[Any]) -> bool:
    """True when the nodes compute in integers and can be replaced: what a subgraph reads must keep its name."""
    return any(part.op_type in QUANTISED_OPS for part in cone) and not any(map(has_subgraph, cone))


def merge_orders(graph: GraphProto) -> None:
    """Order nodes of two exports, which stand one after the other, so that each comes after what it reads, otherwise as
    they are.

    Raises:
        UsageError: The two graphs compute what they share in orders that exclude each other.
    """
    available = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
    produced = {name for node in graph.node for name in node.output}
    waiting, ordered = list(graph.node), []
    while waiting:
        later = []
        for node in waiting:
            if all(name in available or name not in produced for name in reads(node)):
                ordered.append(node)
                available.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise UsageError("the two graphs compute their shared tensors in different orders, so they can't be mixed")
        waiting = later
    replace_nodes(graph, ordered)


def _restore_source(source: GraphProto, twin: GraphProto, units: Iterable[Unit]) -> None:
    """Replace each unit's cone in the twin's graph by the source's nodes, and drop what nothing reads any more."""
    replaced = {tensor for unit in units for tensor in unit.tensors}
    nodes = [node for node in twin.node if not replaced.intersection(node.output)]
    present = {name for node in nodes for name in node.output}
    names = {node.name for node in nodes}
    weights = _WeightCopies(source, twin)
    for unit in units:
        for part in unit.source:
            if present.intersection(part.output):  # a node between shared tensors, restored for another unit already
                continue
            copy = copy_message(part, name=free_name(part.name, names))
            copy.input[:] = [weights.name_of(name) for name in part.input]
            names.add(copy.name)
            nodes.append(copy)
            present.update(part.output)
    replace_nodes(twin, nodes)
    del twin.value_info[:]  # runtimes infer them; those of tensors that are gone would be wrong
    _drop_unused(twin)
    merge_orders(twin)


class _WeightCopies:
    """The source's weights in the twin's graph, each copied when it is first asked for."""

    def __init__(self, source: GraphProto, twin: GraphProto) -> None:
        self._weights = {tensor.name: tensor for tensor in source.initializer}
        self._twin = twin
        self._taken = {tensor.name for tensor in twin.initializer}
        self._taken |= {name for node in twin.node for name in node.output}
        self._names: dict[str, str] = {}

    def name_of(self, tensor: str) -> str:
        """The name under which the twin has this tensor of the source: its own, unless it is a weight whose name is
        taken."""
        if tensor in self._weights and tensor not in self._names:
            name = free_name(f"{tensor}.fp32", self._taken) if tensor in self._taken else tensor
            self._twin.initializer.append(copy_message(self._weights[tensor], name=name))
            self._taken.add(name)
            self._names[tensor] = name
        return self._names.get(tensor, tensor)


def _merge_activations(twin: GraphProto, restored: Sequence[str]) -> None:
    """Drop again the activations whose every reader quantises: so they were before, and so runtimes fuse them."""
    outputs = {value.name for value in twin.output}
    readers: dict[str, list[Any]] = {}
    for node in twin.node:
        for name in reads(node):
            readers.setdefault(name, []).append(node)
    for name in restored:
        unclipped = f"{name}.unclipped"
        quantised = all(node.op_type == "QuantizeLinear" for node in readers.get(name, []))
        if unclipped in readers and name not in outputs and quantised:
            _drop_activation(twin, unclipped, name)
    _drop_unused(twin)


def _drop_activation(graph: GraphProto, source: str, result: str) -> None:
    """Remove the node that makes `result` of `source`; the node before it makes `result` itself."""
    for node in list(graph.node):
        if source in node.input:
            graph.node.remove(node)
        elif source in node.output:
            node.output[:] = [result if name == source else name for name in node.output]


def _drop_unused(graph: GraphProto) -> None:
    needed = {value.name for value in graph.output}
    makers, alive, queue = _producers(graph), set(), [value.name for value in graph.output]
    while queue:
        node = makers.get(queue.pop())
        if node is None or id(node) in alive:
            continue
        alive.add(id(node))
        inputs = reads(node)
        needed |= inputs
        queue.extend(inputs)
    makers_alive = [node for node in graph.node if any(id(makers[name]) in alive for name in node.output if name)]
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    replace_nodes(graph, makers_alive)
    del graph.initializer[:]
    graph.initializer.extend(weights)


def _cone(
    tensors: Sequence[str], shared: set[str], makers: Mapping[str, NodeProto], graph: GraphProto
) -> list[NodeProto]:
    """The nodes from shared tensors and constants to `tensors`, in the graph's order."""
    producers: dict[str, Any] = {}
    queue = list(tensors)
    while queue:
        name = queue.pop()
        if name in producers or (name in shared and name not in tensors):
            continue
        node = makers.get(name)
        if node is None:  # a constant
            continue
        producers.update(dict.fromkeys((out for out in node.output if out), node))
        queue.extend(reads(node))
    members = {node.output[0] for node in producers.values()}
    return [node for node in graph.node if node.output and node.output[0] in members]


def _producers(graph: GraphProto) -> dict[str, NodeProto]:
    return {name: node for node in graph.node for name in node.output if name}


def _used(graph: GraphProto) -> set[str]:
    return {name for node in graph.node for name in reads(node)} | {value.name for value in graph.output}


def _constant(graph: GraphProto, name: str) -> Any:
    """The tensor of that name, be it an initializer or what a Constant node holds."""
    for tensor in graph.initializer:
        if tensor.name == name:
            return tensor
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output and node.attribute[0].HasField("t"):
            return node.attribute[0].t
    raise UsageError(f"the limit {name!r} of an activation is computed, not constant, so it can't be put back")
