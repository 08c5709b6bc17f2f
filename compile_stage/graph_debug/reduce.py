"""A graph that fails, made small: bisection of its end, then of its beginning, then node by node, as long as it fails
in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_file
from compile_stage.core.errors import SourceError, UsageError
from compile_stage.core.records import PortableModel, record
from compile_stage.plugin_support import onnx_weights

_ONE_BY_ONE = 24  # from here on a graph is small enough to try every node


@record
class Reduced:
    """The smallest graph found that still fails.

    Attributes:
        nodes: Positions in the whole graph, in the order in which they run.
        of: How many nodes the whole graph has.
        failure: What the smallest graph fails with.
        tries: How many graphs were tried.
        minimal: Every node of it was tried to be left out, and it did not fail in the same way without.
    """

    nodes: tuple[int, ...]
    of: int
    failure: str
    tries: int
    minimal: bool


Fails = Callable[[Sequence[int]], str | None]
"""Nodes, by position → what the graph of these nodes alone fails with; None when it does not, or can't be made."""


def same_failure(a: str, b: str) -> bool:
    """True when two messages are one failure: names, numbers and addresses in them differ from graph to graph."""
    return _outline(a) == _outline(b)


def reduce_nodes(count: int, failure: str, fails: Fails, *, max_tries: int = 48) -> Reduced:
    """The smallest part found, of `count` nodes in the order in which they run, that fails in the same way as all of
    them do.

    Args:
        failure: What the whole graph fails with; it is not tried again.
        fails: Tries a part, in a process of its own if it may crash.
        max_tries: After so many the smallest so far is taken.
    """
    return _Reducer(failure, fails, max_tries).shrink(count)


@dataclass
class _Reducer:
    failure: str
    fails: Fails
    most: int
    tries: int = 0
    _known: dict[tuple[int, ...], str | None] = field(default_factory=dict)

    def shrink(self, count: int) -> Reduced:
        nodes = list(range(count))
        nodes = nodes[: self._shortest(nodes, lambda length: nodes[:length])]
        # The latest beginning that still fails leaves the shortest remainder that does.
        nodes = nodes[-self._shortest(nodes, lambda length: nodes[-length:]) :]
        minimal = len(nodes) <= _ONE_BY_ONE
        index = len(nodes) - 1
        while minimal and index >= 0 and len(nodes) > 1:
            rest = nodes[:index] + nodes[index + 1 :]
            minimal = self.tries < self.most or tuple(rest) in self._known
            if self._fails(rest):
                nodes, index = rest, len(rest)  # what could not go before may go now
            index -= 1
        return Reduced(
            nodes=tuple(nodes),
            of=count,
            failure=self._known.get(tuple(nodes)) or self.failure,
            tries=self.tries,
            minimal=minimal,
        )

    def _shortest(self, nodes: Sequence[int], part: Callable[[int], list[int]]) -> int:
        """The smallest length whose part fails; all of `nodes` is known to."""
        low, high = 1, len(nodes)
        while low < high:
            middle = (low + high) // 2
            if self._fails(part(middle)):
                high = middle
            else:
                low = middle + 1
        return high

    def _fails(self, nodes: Sequence[int]) -> bool:
        key = tuple(nodes)
        if key not in self._known:
            if self.tries >= self.most:
                return False
            self.tries += 1
            failure = self.fails(nodes)
            self._known[key] = failure if failure is not None and same_failure(failure, self.failure) else None
        return self._known[key] is not None


class Cutter:
    """Cuts some of a graph's nodes out as a graph of their own."""

    def __init__(self, path: Path) -> None:
        import onnx

        from compile_stage.precision.onnx_graph import name_nodes

        model = self._model = onnx_weights.load_whole(path)
        name_nodes(model.graph)
        try:
            inferred = onnx.shape_inference.infer_shapes(model).graph
        except Exception:  # noqa: BLE001 - a graph that fails may fail here too; then only what it says itself is known
            inferred = model.graph
        self._types = {v.name: v for v in (*inferred.value_info, *inferred.input, *inferred.output)}
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}

    def nodes(self) -> list[list[str]]:
        """Name and operator of every node, in order."""
        return [[node.name, node.op_type] for node in self._model.graph.node]

    def write(self, nodes: Sequence[int], into: Path) -> PortableModel | None:
        """The graph of these nodes as `into/model.onnx`.

        None when it can't be made, or has no input or output that is a tensor.
        """
        from compile_stage.precision.onnx_graph import write_graph

        model = self.cut(nodes)
        if model is None or not model.graph.output:
            return None
        try:
            return describe(write_graph(model, into))
        except SourceError:
            return None

    def cut(self, nodes: Sequence[int]) -> Any | None:
        """The graph of these nodes: what they read and don't write is an input, what nobody in it reads, or what was an
        output, an output.

        None when the type of an input is not known.
        """
        from onnx import ModelProto, TensorProto, helper

        graph = self._model.graph
        chosen = [graph.node[i] for i in nodes]
        read = list(dict.fromkeys(name for node in chosen for name in _reads(node)))
        written = list(dict.fromkeys(name for node in chosen for name in node.output if name))
        inputs = [name for name in read if name not in written and name not in self._weights]
        if any(name not in self._types for name in inputs):
            return None
        was_output = {value.name for value in graph.output}
        outputs = [name for name in written if name not in read or name in was_output]
        model = ModelProto()
        model.CopyFrom(self._model)
        del model.graph.node[:], model.graph.initializer[:], model.graph.input[:], model.graph.output[:]
        del model.graph.value_info[:]
        model.graph.node.extend(chosen)
        model.graph.initializer.extend(self._weights[name] for name in read if name in self._weights)
        model.graph.input.extend(self._types[name] for name in inputs)
        unknown = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs}
        model.graph.output.extend(self._types.get(name, unknown[name]) for name in outputs)
        return model


def describe(path: Path) -> PortableModel:
    """An ONNX file as a portable model. Raises SourceError when an input or output is no tensor."""
    import onnx

    from compile_stage.sources.graph import opset, signature_of

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own error has no base class that onnx promises
        raise UsageError("this is not an ONNX graph", where=str(path)) from error
    return PortableModel(
        path=str(path),
        digest=digest_file(path),
        form="onnx",
        opset=opset(model),
        precision="fp32",
        signature=signature_of(model),
    )


def _reads(node: Any) -> Iterable[str]:
    """What a node reads, its subgraphs included."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            inner = {name for inside in graph.node for name in inside.output} | {v.name for v in graph.input}
            yield from (name for inside in graph.node for name in _reads(inside) if name not in inner)


def _outline(message: str) -> str:
    return " ".join(re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|/\S+|0x[0-9a-fA-F]+|\S*\d\S*", "", message).split())[:160]
