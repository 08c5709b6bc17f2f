"""Products of one input as one product: queries, keys and values of an attention, gate and up of a network behind it.

At each token of a language model a product rounds its input anew and wakes all threads, whatever it computes. Weights
are put side by side, so that one product does both once. What it gives is split again; but
`com.microsoft.GroupQueryAttention` takes queries, keys and values as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_stage.precision.wiring import (
    Names,
    attribute,
    captured,
    constant_weights,
    drop_unused_weights,
    is_standard,
    reads,
    replace_nodes,
)

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

_SPLIT_OPSET = 13
"""From here on sizes of a Split are an input."""


@dataclass(frozen=True)
class _Product:
    """x · W, or x · W + b.

    Attributes:
        place: Of the MatMul among the nodes.
        node: The MatMul.
        unpacked: The DequantizeLinear that makes W of integers by blocks of rows; None where W is floats.
        weights: W [k, n]; or its integers [k, n], scales and zero points [k / block, n].
        bias: b [n] and the Add, or None.
    """

    place: int
    node: NodeProto
    unpacked: NodeProto | None
    weights: tuple[TensorProto, ...]
    bias: tuple[TensorProto, NodeProto] | None

    @property
    def width(self) -> int:
        return int(self.weights[0].dims[1])

    @property
    def output(self) -> str:
        return str((self.bias[1] if self.bias else self.node).output[0])

    @property
    def nodes(self) -> list[NodeProto]:
        """Those that the merged product replaces."""
        return [one for one in (self.unpacked, self.node, self.bias[1] if self.bias else None) if one is not None]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for products that can be one."""
        settings = sorted(one.SerializeToString() for one in self.unpacked.attribute) if self.unpacked else []
        tensors = [(one.data_type, one.dims[0]) for one in self.weights]
        return self.node.input[0], tuple(settings), tuple(tensors), self.bias is not None


def merge(model: ModelProto) -> tuple[int, int]:
    """Make one product of those that read the same tensor and have weights of a kind, in place.

    Weights that lie outside of the file stay where they are: they would have to be written anew.

    Returns:
        How many products were merged, and into how many.
    """
    if max((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default=0) < _SPLIT_OPSET:
        return 0, 0
    merging = _Merging(model)
    by_kind: dict[tuple[Any, ...], list[_Product]] = {}
    for product in merging.products():
        by_kind.setdefault(product.kind, []).append(product)
    several = [products for products in by_kind.values() if len(products) > 1]
    for products in several:
        merging.merge(products)
    if several:
        merging.write()
    return sum(map(len, several)), len(several)


class _Merging:
    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._names = Names(model.graph)
        self._weights = constant_weights(model.graph)
        self._nodes = list(model.graph.node)
        self._made_by = {name: node for node in self._nodes for name in node.output}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self._nodes:
            for name in reads(node):
                self._readers.setdefault(name, []).append(node)
        self._kept = {value.name for value in model.graph.output} | captured(model.graph)
        self._at: dict[int, list[NodeProto]] = {}  # place of a node → those that stand before it now
        self._dropped: set[int] = set()

    def products(self) -> Iterator[_Product]:
        """Those whose weights are constants in the file, and read by nobody else."""
        for place, node in enumerate(self._nodes):
            if node.op_type != "MatMul" or not is_standard(node) or not self._is_alone(node.input[1]):
                continue
            unpacked = self._made_by.get(node.input[1])
            names = [node.input[1]] if unpacked is None else list(unpacked.input)
            if unpacked is not None and not _unpacks_rows(unpacked):
                continue
            weights = [tensor for name in names if (tensor := self._own(name, 2)) is not None]
            if weights and len(weights) == len(names):
                yield _Product(place, node, unpacked, tuple(weights), self._bias(node, int(weights[0].dims[1])))

    def _bias(self, node: NodeProto, width: int) -> tuple[TensorProto, NodeProto] | None:
        name = node.output[0]
        added = self._readers[name][0] if self._is_alone(name) else None
        if added is None or added.op_type != "Add" or not is_standard(added):
            return None
        bias = self._own(next((one for one in added.input if one != name), ""), 1)
        return None if bias is None or bias.dims[0] != width else (bias, added)

    def _own(self, name: str, axes: int) -> TensorProto | None:
        """A constant of so many axes, in the file, that one node reads."""
        tensor = self._weights.get(name)
        known = tensor is not None and not tensor.external_data and len(tensor.dims) == axes
        return tensor if known and self._is_alone(name) else None

    def _is_alone(self, name: str) -> bool:
        return len(self._readers.get(name, [])) == 1 and name not in self._kept

    def merge(self, products: Sequence[_Product]) -> None:
        """Where the first of them stood, their weights side by side."""
        attention = self._attention_of(products)
        if attention is not None:
            products = [next(one for one in products if one.output == name) for name in attention.input[:3]]
        first, new = products[0], []
        weights = [self._side_by_side(parts, 1) for parts in zip(*(one.weights for one in products), strict=True)]
        if first.unpacked is not None:
            new.append(self._node("DequantizeLinear", weights, f"{first.node.input[1]}_and_others"))
            new[-1].attribute.extend(first.unpacked.attribute)
            weights = list(new[-1].output)
        new.append(self._node("MatMul", [first.node.input[0], *weights], f"{first.node.output[0]}_and_others"))
        if first.bias is not None:
            bias = self._side_by_side([one.bias[0] for one in products if one.bias], 0)
            new.append(self._node("Add", [new[-1].output[0], bias], f"{first.output}_and_others"))
        if attention is not None:
            attention.input[0], attention.input[1], attention.input[2] = new[-1].output[0], "", ""
        else:
            new.append(self._split(new[-1].output[0], products))
        self._at[min(one.place for one in products)] = new
        self._dropped |= {id(node) for one in products for node in one.nodes}

    def _attention_of(self, products: Sequence[_Product]) -> NodeProto | None:
        """The attention whose queries, keys and values these are, and nobody else's; None where there is none."""
        outputs = {one.output for one in products}
        readers = [self._readers.get(name, []) for name in outputs]
        if len(outputs) != 3 or any(len(one) != 1 for one in readers) or outputs & self._kept:
            return None
        attention = readers[0][0]
        known = attention.op_type == "GroupQueryAttention" and set(attention.input[:3]) == outputs
        return attention if known else None

    def _side_by_side(self, tensors: Sequence[TensorProto], axis: int) -> str:
        import numpy as np
        from onnx import numpy_helper

        together = np.concatenate([numpy_helper.to_array(one) for one in tensors], axis)
        name = self._names.fresh(f"{tensors[0].name}_and_others")
        self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(together), name))
        return name

    def _split(self, name: str, products: Sequence[_Product]) -> NodeProto:
        from onnx import TensorProto, helper

        sizes, widths = self._names.fresh(f"{name}_sizes"), [one.width for one in products]
        self._graph.initializer.append(helper.make_tensor(sizes, TensorProto.INT64, [len(widths)], widths))
        outputs = [one.output for one in products]
        return helper.make_node("Split", [name, sizes], outputs, self._names.fresh(f"split_{name}"), axis=-1)

    def _node(self, op_type: str, inputs: Sequence[str], output: str) -> NodeProto:
        from onnx import helper

        output = self._names.fresh(output)
        return helper.make_node(op_type, list(inputs), [output], self._names.fresh(f"node_{output}"))

    def write(self) -> None:
        """The new nodes into the graph, and the weights that nobody reads any more out of it."""
        nodes: list[NodeProto] = []
        for place, node in enumerate(self._nodes):
            nodes += self._at.get(place, [])
            if id(node) not in self._dropped:
                nodes.append(node)
        replace_nodes(self._graph, nodes)
        drop_unused_weights(self._graph)


def _unpacks_rows(node: NodeProto) -> bool:
    """A DequantizeLinear whose blocks are of rows, so that its columns stand for themselves."""
    blocks = attribute(node, "block_size", 0) > 0 and attribute(node, "axis", 1) in (0, -2)
    return node.op_type == "DequantizeLinear" and is_standard(node) and blocks
