"""Where in a decoder's graph its attentions are: what an exporter writes of them in standard operators.

The scores are a product of queries and keys and get a mask, a Softmax makes weights of them, and a second product
applies these to the values. Keys and values are outputs of the cache, repeated where several heads of queries share
one. PyTorch's guard around the Softmax may be there, or what the graph rewrite `masked-softmax` made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_stage.core.generation import cache_specs, present_of
from compile_stage.core.tensors import Signature
from compile_stage.precision.graph_editor import GraphEditor
from compile_stage.precision.wiring import attribute, is_standard, permutation, reads

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_SMALL = 3  # numbers of a mask's graph up to this are axes and steps
_NO_END = 2**31 - 1  # and from here on, or below its negative, they say that a slice has no end
_HIDES = -10_000.0  # the score of a hidden key is less
_PASSES_ON = {"Reshape", "Transpose", "Expand", "Unsqueeze", "Identity"}  # from a cache to its product


@dataclass(frozen=True)
class Attention:
    """The attention of one layer.

    Attributes:
        query: Tensor [batch, heads, tokens, size] before it is scaled.
        key, value: Tensors [batch, key heads, tokens, size] that are appended to the cache.
        past: Names of the cache's two inputs.
        scale: Of the products of queries and keys.
        cap: The scores are cap · tanh(score / cap); 0 where they are as they are.
        window: Tokens that a query sees, itself among them; 0 where it sees all before it.
        answer: Tensor [batch, tokens, heads · size], or what is made so by the Reshape that alone reads it.
    """

    query: str
    key: str
    value: str
    past: tuple[str, str]
    scale: float
    cap: float
    window: int
    answer: str


class DecoderGraph(GraphEditor):
    """A graph with a cache, and the attentions in it.

    Attributes:
        attentions: Of all layers; none where one layer's can't be replaced.
    """

    def __init__(self, model: ModelProto, signature: Signature) -> None:
        super().__init__(model)
        self._signature = signature
        self._past_of = {present_of(spec.name): spec.name for spec in cache_specs(signature)}
        self.attentions = self._find()

    def rotated(self, name: str) -> tuple[str, str, str] | None:
        """x, cosines and sines [batch, tokens, size] of x · cos + (-second half of x, first half of x) · sin."""
        total = self.made_by.get(name)
        if total is None or not self.is_op(total, "Add"):
            return None
        for at in (0, 1):
            plain, turned = (self.made_by.get(total.input[one]) for one in (at, 1 - at))
            if plain is None or turned is None or not self.is_op(plain, "Mul") or not self.is_op(turned, "Mul"):
                continue
            for x, cosines in (plain.input, plain.input[::-1]):
                for halves, sines in (turned.input, turned.input[::-1]):
                    if self._turns(halves, x) and (angles := self._angles(cosines, sines)) is not None:
                        return x, *angles
        return None

    def turned(self, name: str) -> tuple[str, str, str] | None:
        """As `rotated`, of whole heads, or of their first part alone: then cosines and sines are so much shorter."""
        joined = self.made_by.get(name)
        if joined is None or not self.is_op(joined, "Concat") or len(joined.input) != 2:
            return self.rotated(name)
        first = self.rotated(joined.input[0])
        parts = [self.made_by.get(one) for one in (first[0], joined.input[1])] if first is not None else [None]
        if first is None or any(one is None or one.op_type not in ("Slice", "Split") for one in parts):
            return None
        whole = {str(one.input[0]) for one in parts if one is not None}
        return (whole.pop(), *first[1:]) if len(whole) == 1 else None

    def _turns(self, name: str, x: str) -> bool:
        halves = self.made_by.get(name)
        if halves is None or not self.is_op(halves, "Concat") or len(halves.input) != 2:
            return False
        negated, first = (self.made_by.get(one) for one in halves.input)
        if negated is None or first is None or not self.is_op(negated, "Neg") or not self.is_op(first, "Slice"):
            return False
        second = self.made_by.get(negated.input[0])
        return second is not None and self.is_op(second, "Slice") and second.input[0] == first.input[0] == x

    def _angles(self, *names: str) -> tuple[str, str] | None:
        """Cosines and sines without their axis of heads."""
        made = [self.made_by.get(name) for name in names]
        if any(one is None or not self.is_op(one, "Unsqueeze") for one in made):
            return None
        cosines, sines = (str(one.input[0]) for one in made if one is not None)
        return cosines, sines

    def _find(self) -> tuple[Attention, ...]:
        """Every layer's attention; none where a layer's is not one that can be replaced."""
        sizes = {spec.name: spec.shape for spec in cache_specs(self._signature)}
        found = [one for node in self.nodes if (one := self._attention(node)) is not None]
        pasts = [name for one in found for name in one.past]
        whole = sorted(pasts) == sorted(sizes) and all(sizes[k][1:] == sizes[v][1:] for k, v in (f.past for f in found))
        return tuple(found) if whole else ()

    def _attention(self, product: NodeProto) -> Attention | None:
        softmax = self._softmax_of(product) if self.is_op(product, "MatMul") else None
        value = self._cached(product.input[1]) if softmax is not None else None
        scores = self.made_by.get(softmax.input[0]) if softmax is not None else None
        if softmax is None or value is None or scores is None or not self.is_op(scores, "Add"):
            return None
        for at in (0, 1):
            inner, scale, cap = self._uncapped(scores.input[at])
            matmul = self.made_by.get(inner)
            window = self._window(scores.input[1 - at]) if self.is_op(matmul, "MatMul") else None
            if window is None:
                continue
            assert matmul is not None
            query, of_query = self._unscaled(matmul.input[0])
            key, answer = self._cached(matmul.input[1]), self._answer_of(product.output[0])
            if key is not None and answer is not None and value[2] == 1:
                past = (self._past_of[key[0]], self._past_of[value[0]])
                return Attention(query, key[1], value[1], past, scale * of_query * key[2], cap, window, answer)
        return None

    def _softmax_of(self, product: NodeProto) -> NodeProto | None:
        """What makes the weights of a product, its guard against rows without a key left aside."""
        made = self.made_by.get(product.input[0])
        if self.is_op(made, "Where") and made is not None:
            guard, made = self.made_by.get(made.input[0]), self.made_by.get(made.input[2])
            if not self.is_op(guard, "IsNaN") or guard is None or made is None or guard.input[0] not in made.output:
                return None
        return (
            made
            if made is not None and self.is_op(made, "Softmax") and attribute(made, "axis", -1) in (-1, 3)
            else None
        )

    def _uncapped(self, name: str) -> tuple[str, float, float]:
        """Scores before they are scaled and capped, their scale, and the cap."""
        inner, factor = self._unscaled(name)
        made = self.made_by.get(inner)
        if made is None or not self.is_op(made, "Tanh"):
            return inner, factor, 0.0
        inner, scale = self._unscaled(made.input[0])
        before, again = self._unscaled(inner)
        return before, scale * again * factor, factor

    def _unscaled(self, name: str) -> tuple[str, float]:
        """A tensor before it is multiplied by a number, and that number."""
        made = self.made_by.get(name)
        if made is None or made.op_type not in ("Mul", "Div") or not is_standard(made):
            return name, 1.0
        for at in (1, 0) if made.op_type == "Mul" else (1,):
            number = self.constant(made.input[at])
            if number is not None and number.size == 1:
                factor = float(number.item())
                return made.input[1 - at], factor if made.op_type == "Mul" else 1 / factor
        return name, 1.0

    def _cached(self, name: str) -> tuple[str, str, float] | None:
        """The output of the cache that a tensor is made of alone, what it appends to the past, and its factor."""
        scale = 1.0
        while name not in self._past_of:
            name, factor = self._unscaled(name)
            scale *= factor
            made = self.made_by.get(name)
            if name in self._past_of:
                break
            if made is None or made.op_type not in _PASSES_ON:
                return None
            name = made.input[0]
        grown = self.made_by.get(name)
        if not self.is_op(grown, "Concat") or grown is None or len(grown.input) != 2:
            return None
        if grown.input[0] != self._past_of[name] or attribute(grown, "axis", 0) not in (-2, 2):
            return None
        return name, grown.input[1], scale

    def _answer_of(self, name: str) -> str | None:
        """What [batch, heads, tokens, size] becomes as [batch, tokens, heads · size], where nothing else reads it."""
        following = self.only_reader(name)
        if self.is_op(following, "Mul") and following is not None:  # 0 for queries without a key: there are none
            factor = next(one for one in following.input if one != name)
            if not self.is_op(self.made_by.get(factor), "ReduceMax"):
                return None
            following = self.only_reader(following.output[0])
        if self.is_op(following, "Reshape") and following is not None:  # to the shape that it has
            following = self.only_reader(following.output[0])
        if following is None or not swaps_heads(following):
            return None
        merged = self.only_reader(following.output[0])
        if merged is None or not self.is_op(merged, "Reshape"):
            return None
        keeps_tokens = self.is_op(
            self.only_reader(merged.output[0]), "MatMul"
        )  # a Gemm wants [batch · tokens, heads · size]
        return str(merged.output[0] if keeps_tokens else merged.input[0])

    def _window(self, mask: str) -> int | None:
        """The length of the window of a mask: the one number that it is made of, or 0 where there is none; None where
        it is no mask of this kind. How it looks at near tokens, and at those around the window's end, is compared."""
        seen: set[str] = set()
        numbers: set[int] = set()
        left, compares = [mask], False
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.weights or self.is_op(self.made_by.get(name), "Constant"):
                if (found := self._lengths(name)) is None:
                    return None
                numbers |= found
            elif (made := self.made_by.get(name)) is not None:
                compares |= made.op_type in ("LessOrEqual", "GreaterOrEqual", "Less", "Greater", "Trilu")
                left += [] if made.op_type in ("Shape", "Size") else list(reads(made))
        return max(numbers, default=0) if compares and len(numbers) < 2 else None

    def _lengths(self, name: str) -> set[int] | None:
        """Numbers of a constant that could be the length of a window; None where it is more than a few numbers."""
        numbers = self.constant(name)
        if numbers is None or numbers.size > 8:
            return None
        whole = numbers.dtype.kind in "iub"  # none of these is a score
        others = [
            float(one)
            for one in numbers.ravel().tolist()
            if not abs(one) <= _SMALL and not abs(one) >= _NO_END and (whole or not one <= _HIDES)
        ]
        return {abs(int(one)) for one in others} if all(one.is_integer() for one in others) else None


def swaps_heads(node: NodeProto | None) -> bool:
    """A Transpose between [batch, heads, tokens, size] and [batch, tokens, heads, size]."""
    if node is None or node.op_type != "Transpose" or not is_standard(node):
        return False
    return permutation(node) == [0, 2, 1, 3]
