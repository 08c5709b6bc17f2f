"""What rewrites of a graph share: who makes and reads a tensor, which are constant, and nodes put in and taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.precision.onnx_graph import constant_tensor, read_opset
from compile_stage.precision.wiring import (
    Names,
    captured,
    constant_weights,
    drop_unused_weights,
    is_standard,
    reads,
    replace_nodes,
)

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


class GraphEditor:
    """The main graph of a model that is to be changed in place.

    Attributes:
        nodes: As the graph had them. Once: protobuf may make another object of a node each time it is asked.
        made_by: Tensor → the node that makes it.
        readers: Tensor → the nodes that read it.
        weights: Initializers by name, but for those that a caller may put others in the place of.
        kept: Tensors that must stay as they are: outputs, and what subgraphs read.
        before, after: id() of a node → nodes that are written before it, or behind it.
        dropped: id() of nodes that go.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph, self.opset = model, model.graph, read_opset(model)
        self.nodes = list(self.graph.node)
        self.names = Names(self.graph)
        self.made_by = {name: node for node in self.nodes for name in node.output}
        self.kept = captured(self.graph) | {value.name for value in self.graph.output}
        self.before: dict[int, list[NodeProto]] = {}
        self.after: dict[int, list[NodeProto]] = {}
        self.dropped: set[int] = set()
        self.readers: dict[str, list[NodeProto]] = {}
        self.note_readers()
        self.weights = constant_weights(self.graph)

    def note_readers(self) -> None:
        """Look at who reads what once more, after nodes were changed."""
        self.readers.clear()
        for node in self.nodes:
            for one in (*self.before.get(id(node), []), node, *self.after.get(id(node), [])):
                for name in reads(one) if id(one) not in self.dropped else ():
                    self.readers.setdefault(name, []).append(one)

    def is_op(self, node: NodeProto | None, *op_types: str) -> bool:
        """True for ONNX's own operators of these types."""
        return node is not None and node.op_type in op_types and is_standard(node)

    def only_reader(self, name: str) -> NodeProto | None:
        """The node that reads a tensor, where there is one and nothing else needs it."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.kept else None

    def constant(self, name: str) -> Any:
        """A constant as an array; None where it is none, or lies outside of the graph's file."""
        from onnx import numpy_helper

        made = self.made_by.get(name)
        tensor = constant_tensor(made) if made is not None and made.op_type == "Constant" else self.weights.get(name)
        # What lies outside of the graph's file is a weight, and may not have been read.
        return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)

    def add_constant(self, name: str, kind: int, shape: Sequence[int], values: Sequence[float]) -> str:
        """A new constant, by the name it got.

        Args:
            kind: TensorProto.DataType.
        """
        from onnx import helper

        name = self.names.fresh(name)
        tensor = helper.make_tensor(name, kind, shape, values)
        self.graph.initializer.append(tensor)
        self.weights[name] = tensor
        return name

    def integers(self, name: str, values: Sequence[int]) -> str:
        """A new constant of one axis: a shape, axes, places."""
        from onnx import TensorProto

        return self.add_constant(name, TensorProto.INT64, [len(values)], values)

    def put_before(self, node: NodeProto, *new: NodeProto) -> None:
        """Write nodes before one of the graph; each gets its output's name."""
        for one in new:
            one.name = self.names.fresh(one.output[0])
            self.made_by[one.output[0]] = one
        self.before.setdefault(id(node), []).extend(new)

    def write(self, changed: set[str] | None = None) -> None:
        """Let the graph hold the nodes as they are now, without those that nothing reads any more.

        Args:
            changed: Tensors whose shape is another one: what the graph declares of them goes.
        """
        nodes: list[NodeProto] = []
        for node in self.nodes:
            nodes += self.before.get(id(node), [])
            nodes += [] if id(node) in self.dropped else [node]
            nodes += self.after.get(id(node), [])
        replace_nodes(self.graph, _live(nodes, self.kept))
        drop_unused_weights(self.graph)
        if changed:
            declared = [value for value in self.graph.value_info if value.name not in changed]
            del self.graph.value_info[:]
            self.graph.value_info.extend(declared)


def _live(nodes: Sequence[NodeProto], wanted: set[str]) -> list[NodeProto]:
    """The nodes that something reads, in order."""
    read, kept = set(wanted), []
    for node in reversed(nodes):
        if read.intersection(node.output):
            kept.append(node)
            read |= reads(node)
    return kept[::-1]
