"""The answers of an LSTM or GRU of one direction, without a transposition.

ONNX's recurrent operators answer [steps, directions, batch, hidden]. PyTorch's exporter transposes that to [steps,
batch, directions, hidden] and reshapes it to [steps, batch, directions * hidden], with some eight nodes around it that
compute the shape. For one direction nothing moves, and a Squeeze says the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_stage.graph_rewrites.lengths import LengthReader, says
from compile_stage.precision.wiring import permutation

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NAME = "single-direction"

_LAYERS = ("LSTM", "GRU", "RNN")
_DIRECTIONS = 1  # their axis


def rewrite(model: ModelProto) -> int:
    """Rewrite the answers of recurrent operators in place.

    Returns:
        Of how many.
    """
    return _Rewriter(model).run()


class _Rewriter(LengthReader):
    def run(self) -> int:
        if self.opset < 13 or not any(self.is_op(node, *_LAYERS) for node in self.nodes):
            return 0
        count = sum(self._squeeze(node) for node in self.nodes if self.is_op(node, "Reshape"))
        if count:
            self.write()
        return count

    def _squeeze(self, reshape: NodeProto) -> bool:
        """Make a Squeeze of a transposition and a reshape that only drop the axis of one direction."""
        swap = self.made_by.get(reshape.input[0])
        layer = self.made_by.get(swap.input[0]) if swap is not None and self.is_op(swap, "Transpose") else None
        if swap is None or layer is None or not self.is_op(layer, *_LAYERS):
            return False
        lengths = self.lengths_of(swap.input[0])
        if permutation(swap) != [0, 2, 1, 3] or lengths is None or len(lengths) != 4 or lengths[_DIRECTIONS] != 1:
            return False
        steps, _, batch, hidden = lengths
        if not says(self.values_of(reshape.input[1]), [steps, batch, hidden]):
            return False
        reshape.op_type = "Squeeze"
        del reshape.attribute[:], reshape.input[:]
        reshape.input.extend([swap.input[0], self.integers("directions", [_DIRECTIONS])])
        return True
