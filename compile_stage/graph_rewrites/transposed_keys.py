"""The keys of attention, transposed in one step.

PyTorch's exporter writes the transposed keys [batch, heads, size, keys] as a reshape to three axes, a transposition
and a reshape back, with some ten nodes around it that compute the two shapes. One Transpose says the same, and runtimes
merge it into the product of queries and keys; the reshapes they do not see through.

It also multiplies queries and keys each by the root of the scale. Once is enough: the queries by all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_stage.graph_rewrites.lengths import LengthReader, says
from compile_stage.precision.wiring import permutation

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NAME = "transposed-keys"


def rewrite(model: ModelProto) -> int:
    """Rewrite the transposed keys of a graph in place.

    Returns:
        Of how many products of queries and keys.
    """
    return _Rewriter(model).run()


class _Rewriter(LengthReader):
    def run(self) -> int:
        products = [node for node in self.nodes if self.is_op(node, "MatMul")]
        if not products or not any(self.is_op(node, "Transpose") for node in self.nodes):
            return 0
        count = sum(self._rewrite(product) for product in products)
        if count:
            self.write()
        return count

    def _rewrite(self, product: NodeProto) -> bool:
        queries, keys = (self._scaling(name) for name in product.input)
        if not self._transpose(keys.input[0] if keys is not None else product.input[1]):
            return False
        alone = all(self.only_reader(name) is not None for name in product.input)
        if queries is not None and keys is not None and alone:
            self._scale_once(product, queries, keys)
        return True

    def _transpose(self, name: str) -> bool:
        """Make one Transpose of a reshape, a transposition and a reshape that swap the last two of four axes."""
        from onnx import helper

        back = self.made_by.get(name)
        swap = self.made_by.get(back.input[0]) if back is not None and self.is_op(back, "Reshape") else None
        flat = self.made_by.get(swap.input[0]) if swap is not None and self.is_op(swap, "Transpose") else None
        if back is None or swap is None or flat is None or not self.is_op(flat, "Reshape"):
            return False
        given = self.lengths_of(flat.input[0])
        if permutation(swap) != [0, 2, 1] or given is None or len(given) != 4:
            return False
        batch, heads, keys, size = given
        if not says(self.values_of(flat.input[1]), [None, keys, size]):
            return False
        if not says(self.values_of(back.input[1]), [batch, heads, size, keys]):
            return False
        back.op_type = "Transpose"
        del back.attribute[:], back.input[:]
        back.input.append(flat.input[0])
        back.attribute.append(helper.make_attribute("perm", [0, 1, 3, 2]))
        return True

    def _scaling(self, name: str) -> NodeProto | None:
        """The Mul by one number that makes a tensor."""
        node = self.made_by.get(name)
        factor = self.constant(node.input[1]) if node is not None and self.is_op(node, "Mul") else None
        return node if factor is not None and factor.size == 1 and factor.ndim <= 1 else None

    def _scale_once(self, product: NodeProto, queries: NodeProto, keys: NodeProto) -> None:
        from onnx import helper

        own, other = self.constant(queries.input[1]), self.constant(keys.input[1])
        if own.dtype != other.dtype:
            return
        kind = helper.np_dtype_to_tensor_dtype(own.dtype)
        queries.input[1] = self.add_constant(f"{queries.input[1]}_squared", kind, [], [float((own * other).item())])
        product.input[1] = keys.input[0]
