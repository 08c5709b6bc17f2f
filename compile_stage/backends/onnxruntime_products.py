"""Products of one input as one product: queries, keys and values of an attention, gate and up of a network behind it.

At each token of a language model a product rounds its input anew and wakes all threads, whatever it computes. Weights
are put side by side, so that one product does both once. What it gives is split again; but
`com.microsoft.GroupQueryAttention` takes queries, keys and values as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_stage.precision.graph_editor import GraphEditor
from compile_stage.precision.wiring import attribute, is_standard

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

_SPLIT_OPSET = 13
"""From here on sizes of a Split are an input."""


@dataclass(frozen=True)
class _Product:
    """x · W, or x · W + b.

    Attributes:
        node: The MatMul.
        unpacked: The DequantizeLinear that makes W of integers by blocks of rows; None where W is floats.
        weights: W [k, n]; or its integers [k, n], scales and zero points [k / block, n].
        bias: b [n]; None without one.
        last: The node that makes the result: the MatMul, or the Add of the bias.
    """

    node: NodeProto
    unpacked: NodeProto | None
    weights: tuple[TensorProto, ...]
    bias: TensorProto | None
    last: NodeProto

    @property
    def width(self) -> int:
        return int(self.weights[0].dims[1])

    @property
    def output(self) -> str:
        return str(self.last.output[0])

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
    return _Merging(model).run()


class _Merging(GraphEditor):
    def run(self) -> tuple[int, int]:
        by_kind: dict[tuple[Any, ...], list[_Product]] = {}
        for product in self._products() if self.opset >= _SPLIT_OPSET else ():
            by_kind.setdefault(product.kind, []).append(product)
        several = [products for products in by_kind.values() if len(products) > 1]
        for products in several:
            self._merge(products)
        if several:
            self.write()
        return sum(map(len, several)), len(several)

    def _products(self) -> Iterator[_Product]:
        """Those whose weights are constants in the file, and read by nobody else; in the order of the nodes."""
        for node in self.nodes:
            if not self.is_op(node, "MatMul") or self.only_reader(node.input[1]) is None:
                continue
            unpacked = self.made_by.get(node.input[1])
            if unpacked is not None and not _unpacks_rows(unpacked):
                continue
            names = [node.input[1]] if unpacked is None else list(unpacked.input)
            weights = [tensor for name in names if (tensor := self._own(name, 2)) is not None]
            if weights and len(weights) == len(names):
                bias, last = self._bias(node, int(weights[0].dims[1]))
                yield _Product(node, unpacked, tuple(weights), bias, last)

    def _bias(self, node: NodeProto, width: int) -> tuple[TensorProto | None, NodeProto]:
        name = node.output[0]
        added = self.only_reader(name)
        if added is None or not self.is_op(added, "Add"):
            return None, node
        bias = self._own(next((one for one in added.input if one != name), ""), 1)
        return (None, node) if bias is None or bias.dims[0] != width else (bias, added)

    def _own(self, name: str, axes: int) -> TensorProto | None:
        """A constant of so many axes, in the file, that one node reads."""
        tensor = self.weights.get(name)
        known = tensor is not None and not tensor.external_data and len(tensor.dims) == axes
        return tensor if known and self.only_reader(name) is not None else None

    def _merge(self, products: Sequence[_Product]) -> None:
        """Where the first of them stood, their weights side by side."""
        from onnx import helper

        place, attention = products[0].node, self._attention_of(products)
        if attention is not None:
            products = [next(one for one in products if one.output == name) for name in attention.input[:3]]
        first = products[0]
        weights = [self._side_by_side(parts, 1) for parts in zip(*(one.weights for one in products), strict=True)]
        if first.unpacked is not None:
            name = self.names.fresh(f"{first.node.input[1]}_and_others")
            unpacked = helper.make_node("DequantizeLinear", weights, [name])
            unpacked.attribute.extend(first.unpacked.attribute)
            self.put_before(place, unpacked)
            weights = [name]
        result = self.names.fresh(f"{first.node.output[0]}_and_others")
        self.put_before(place, helper.make_node("MatMul", [first.node.input[0], *weights], [result]))
        if first.bias is not None:
            bias = self._side_by_side([one.bias for one in products if one.bias is not None], 0)
            product, result = result, self.names.fresh(f"{first.output}_and_others")
            self.put_before(place, helper.make_node("Add", [product, bias], [result]))
        if attention is not None:
            attention.input[0], attention.input[1], attention.input[2] = result, "", ""
        else:
            sizes = self.integers(f"{result}_sizes", [one.width for one in products])
            outputs = [one.output for one in products]
            self.put_before(place, helper.make_node("Split", [result, sizes], outputs, axis=-1))
        self.dropped |= {id(one.last) for one in products}

    def _attention_of(self, products: Sequence[_Product]) -> NodeProto | None:
        """The attention whose queries, keys and values these are, and nobody else's; None where there is none."""
        outputs = {one.output for one in products}
        readers = [self.only_reader(name) for name in outputs]
        attention = readers[0]
        if len(outputs) != 3 or attention is None or any(one is not attention for one in readers):
            return None
        known = attention.op_type == "GroupQueryAttention" and set(attention.input[:3]) == outputs
        return attention if known else None

    def _side_by_side(self, tensors: Sequence[TensorProto], axis: int) -> str:
        import numpy as np
        from onnx import numpy_helper

        together = np.concatenate([numpy_helper.to_array(one) for one in tensors], axis)
        name = self.names.fresh(f"{tensors[0].name}_and_others")
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(together), name))
        return name


def _unpacks_rows(node: NodeProto) -> bool:
    """A DequantizeLinear by blocks of rows: each column is unpacked by itself."""
    blocks = attribute(node, "block_size", 0) > 0 and attribute(node, "axis", 1) in (0, -2)
    return node.op_type == "DequantizeLinear" and is_standard(node) and blocks
