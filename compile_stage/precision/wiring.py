"""Who reads what in a graph, its subgraphs included; free names, attributes, and nodes put in another order.

Graphs and nodes are ONNX's own messages (GraphProto, NodeProto); docs/decisions/0025 says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

Message = TypeVar("Message")


class Names:
    """Names of tensors and nodes that are free in a graph; each that is handed out is taken from then on."""

    def __init__(self, graph: GraphProto) -> None:
        self._taken = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
        self._taken |= {value.name for value in (*graph.initializer, *graph.input, *graph.output)}

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def fresh(self, name: str) -> str:
        """The name, with underscores behind it where it is taken."""
        name = free_name(name, self._taken)
        self._taken.add(name)
        return name


def free_name(name: str, taken: Iterable[str]) -> str:
    """The name, with underscores behind it until it is none of `taken`, which is a set or a dict."""
    while name in taken:
        name += "_"
    return name


def is_standard(node: NodeProto) -> bool:
    """True for ONNX's own operators, which are in the domain "" or, as some exporters write it, "ai.onnx"."""
    return node.domain in ("", "ai.onnx")


def attribute(node: NodeProto, name: str, default: float) -> float:
    """A node's attribute that is a number, or the default where the node does not set it."""
    from onnx import helper

    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)


def permutation(node: NodeProto) -> list[int] | None:
    """The order in which a Transpose puts the axes; None where it does not say one, and reverses them."""
    return next((list(one.ints) for one in node.attribute if one.name == "perm"), None)


def is_plain_gemm(node: NodeProto) -> bool:
    """True for a Gemm that neither scales its parts nor transposes its input: x · W + b, W transposed or not."""
    return attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1 and not attribute(node, "transA", 0)


def has_subgraph(node: NodeProto) -> bool:
    """True for If, Loop, Scan and their like."""
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)


def reads(node: NodeProto) -> set[str]:
    """All tensors that a node reads, those that its subgraphs take from around it among them."""
    read = {name for name in node.input if name}
    for one in node.attribute:
        for graph in [one.g] if one.HasField("g") else one.graphs:
            read |= _captured_by(graph)
    return read


def _captured_by(graph: GraphProto) -> set[str]:
    """What a subgraph reads, or hands out, that it does not make itself."""
    own = {value.name for value in (*graph.input, *graph.initializer)}
    own |= {name for node in graph.node for name in node.output}
    read = {name for node in graph.node for name in reads(node)} | {value.name for value in graph.output}
    return read - own


def captured(graph: GraphProto) -> set[str]:
    """Tensors that nodes with subgraphs read: such a tensor must keep its name and its meaning."""
    return {name for node in graph.node if has_subgraph(node) for name in reads(node)}


def constant_weights(graph: GraphProto) -> dict[str, TensorProto]:
    """Initializers by name. One that is also an input is none: a caller may put another in its place."""
    inputs = {value.name for value in graph.input}
    return {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}


def drop_unused_weights(graph: GraphProto) -> None:
    """Drop the weights that no node reads any more, and that are no output."""
    used = {value.name for value in graph.output} | {name for node in graph.node for name in reads(node)}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Let the graph hold these nodes, of which some may be its own."""
    nodes = list(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


def copy_message(message: Message, **changes: Any) -> Message:
    """A copy of a protobuf message with some of its plain fields set anew."""
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy
