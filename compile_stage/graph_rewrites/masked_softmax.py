"""Attention whose softmax is guarded against rows without a single key.

PyTorch's attention answers zeros for a query that may look at no key, where a plain softmax of nothing but -inf is NaN.
Its exporter writes that as `Where(IsNaN(softmax), 0, softmax)`, over all scores [batch, heads, queries, keys] of every
layer. The same answers cost less:

- Where the mask hides no key, or there is none, no row is empty: the guard goes, and the mask with it.
- Where hidden keys have a finite score, such as the lowest float32, a row of nothing else is no NaN either: the guard
  goes.
- Else hidden keys get -30,000 instead of -inf, so that no row is NaN, and the answer of the layer [batch, heads,
  queries, size] is multiplied by 1, or by 0 for a query that may look at no key. That factor is computed once for all
  layers. A hidden key's weight is exp(-30,000 + difference of scores), which is 0 in float32 while scores of one query
  are less than 29,800 apart, and -30,000 is a number of float16 too.

A NaN of the input stays NaN, as in PyTorch; the guard made it 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from compile_stage.precision.graph_editor import GraphEditor
from compile_stage.precision.wiring import attribute

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NAME = "masked-softmax"

HIDDEN = -30_000.0
"""The score of a key that a query may not look at. See above."""


def rewrite(model: ModelProto) -> int:
    """Rewrite the guarded softmaxes of a graph in place.

    Returns:
        How many there were that could be rewritten.
    """
    return _Rewriter(model).run()


class _Guard(NamedTuple):
    """The nodes of a guarded softmax; `product` is the MatMul with the values."""

    softmax: NodeProto
    is_nan: NodeProto
    where: NodeProto
    product: NodeProto


class _Rewriter(GraphEditor):
    def __init__(self, model: ModelProto) -> None:
        super().__init__(model)
        self._factors: dict[str, tuple[str, str]] = {}  # mask → mask without -inf, factor of the answer

    def run(self) -> int:
        count = sum(self._rewrite(guard) for guard in self._guards())
        if count:
            self.write()
        return count

    def _guards(self) -> list[_Guard]:
        found = []
        for where in self.nodes:
            if not self.is_op(where, "Where") or not self._is_zero(where.input[1]):
                continue
            is_nan, softmax = self.made_by.get(where.input[0]), self.made_by.get(where.input[2])
            if not self.is_op(is_nan, "IsNaN") or not self.is_op(softmax, "Softmax"):
                continue
            assert is_nan is not None
            assert softmax is not None
            if is_nan.input[0] != softmax.output[0] or attribute(softmax, "axis", -1) not in (-1, 3):
                continue
            product = self.only_reader(where.output[0])
            inner = (softmax.output[0], is_nan.output[0], where.output[0])
            if product is None or product.op_type != "MatMul" or product.input[0] != where.output[0]:
                continue
            if self.kept.intersection(inner) or len(self.readers[is_nan.output[0]]) > 1:
                continue
            if {id(node) for node in self.readers[softmax.output[0]]} == {id(is_nan), id(where)}:
                found.append(_Guard(softmax, is_nan, where, product))
        return found

    def _rewrite(self, guard: _Guard) -> bool:
        if self._is_product(guard.softmax.input[0]):
            self._drop(guard)
            return True
        scores = self.made_by.get(guard.softmax.input[0])
        if scores is None or scores.op_type != "Add":
            return False
        for at in (0, 1):
            mask = self.made_by.get(scores.input[at])
            other = self.made_by.get(scores.input[1 - at])
            if mask is None or not self.is_op(other, "MatMul") or (hidden := self._hidden_score(mask)) is None:
                continue
            if self._hides_nothing(mask.input[0]):
                self._drop(guard)
                guard.softmax.input[0] = scores.input[1 - at]
                return True
            if math.isfinite(hidden):
                self._drop(guard)
                return True
            if self.only_reader(scores.output[0]) is None or self.kept.intersection(guard.product.output):
                return False
            scores.input[at], factor = self._factor_of(mask)
            self._drop(guard)
            self._multiply(guard.product, factor)
            return True
        return False

    def _is_product(self, name: str) -> bool:
        """Scores that hide nothing: products of queries and keys, which constants may scale. What is multiplied or
        divided by anything else may have a row of -inf, or 0 / 0."""
        made = self.made_by.get(name)
        if made is None or self.is_op(made, "MatMul"):
            return made is not None
        if not self.is_op(made, "Mul", "Div"):
            return False
        factor, scaled = self.constant(made.input[1]), made.input[0]
        if factor is None and made.op_type == "Mul":
            factor, scaled = self.constant(made.input[0]), made.input[1]
        if factor is None or not all(math.isfinite(one) and one for one in factor.ravel().tolist()):
            return False
        return self._is_product(scaled)

    def _drop(self, guard: _Guard) -> None:
        guard.product.input[0] = guard.softmax.output[0]
        self.dropped |= {id(guard.is_nan), id(guard.where)}

    def _hidden_score(self, mask: NodeProto) -> float | None:
        """What `Where(condition, 0, score)` gives hidden keys: -inf, or a finite number; None for another mask."""
        if not self.is_op(mask, "Where") or not self._is_zero(mask.input[1]):
            return None
        values = self.constant(mask.input[2])
        score = float(values.item()) if values is not None and values.size == 1 else math.inf
        return score if score < 0 else None

    def _hides_nothing(self, condition: str) -> bool:
        """The condition of a mask is always true, whatever shape it is expanded to."""
        made = self.made_by.get(condition)
        while made is not None and made.op_type in ("Expand", "Unsqueeze", "Reshape"):
            condition = made.input[0]
            made = self.made_by.get(condition)
        values = self.constant(condition)
        return values is not None and bool(values.all())

    def _factor_of(self, mask: NodeProto) -> tuple[str, str]:
        """A mask without -inf, and the factor [batch, 1, queries, 1] of the answers: once for all that read it."""
        from onnx import TensorProto, helper

        if mask.output[0] not in self._factors:
            name = mask.output[0]
            score = self.add_constant(f"{name}_hidden", TensorProto.FLOAT, [], [HIDDEN])
            masked, seen, factor = (self.names.fresh(f"{name}_{what}") for what in ("finite", "seen", "any"))
            self.put_before(
                mask,
                helper.make_node("Where", [mask.input[0], mask.input[1], score], [masked]),
                helper.make_node("Cast", [mask.input[0]], [seen], to=TensorProto.FLOAT),
                self._largest_of_last_axis(seen, factor),
            )
            self._factors[name] = masked, factor
        return self._factors[mask.output[0]]

    def _largest_of_last_axis(self, given: str, into: str) -> NodeProto:
        from onnx import helper

        if self.opset < 18:
            return helper.make_node("ReduceMax", [given], [into], axes=[-1], keepdims=1)
        axes = self.integers(f"{into}_axes", [-1])
        return helper.make_node("ReduceMax", [given, axes], [into], keepdims=1)

    def _multiply(self, product: NodeProto, factor: str) -> None:
        from onnx import helper

        name = product.output[0]
        product.output[0] = self.names.fresh(f"{name}_unmasked")
        node = helper.make_node("Mul", [product.output[0], factor], [name])
        node.name = self.names.fresh(f"{product.name}_masked")
        self.after.setdefault(id(product), []).append(node)

    def _is_zero(self, name: str) -> bool:
        values = self.constant(name)
        return values is not None and values.size == 1 and values.item() == 0
