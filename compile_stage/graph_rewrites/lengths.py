"""What a graph says of the lengths of its axes: enough to see what a reshape does that computes its target."""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

from compile_stage.precision.graph_editor import GraphEditor
from compile_stage.precision.onnx_graph import Dimension, read_shapes
from compile_stage.precision.wiring import attribute

Length: TypeAlias = int | str
"""Of an axis: a number, or a name that two axes share where they are equally long."""

_READ = ("Shape", "Slice", "Concat", "Gather", "Unsqueeze", "Squeeze", "Cast", "Mul", "Reshape")


class LengthReader(GraphEditor):
    """A graph that is to be changed, and the lengths that its shapes and the nodes that compute with them say."""

    @cached_property
    def shapes(self) -> dict[str, tuple[Dimension, ...]]:
        """Of every tensor whose rank is known, as they were at the first question."""
        return read_shapes(self.model)

    def lengths_of(self, name: str) -> list[Length] | None:
        """Of the axes of a tensor. One that is not known has a name of its own."""
        shape = self.shapes.get(name)
        return None if shape is None else [f"{name} {at}" if one is None else one for at, one in enumerate(shape)]

    def values_of(self, name: str) -> list[Length] | None:
        """The numbers of a tensor that holds lengths; None where they are not understood."""
        constant = self.constant(name)
        if constant is not None:
            return [int(value) for value in constant.ravel()] if constant.ndim <= 1 else None
        node = self.made_by.get(name)
        if node is None or not self.is_op(node, *_READ):
            return None
        if node.op_type == "Shape":
            lengths = self.lengths_of(node.input[0])
            end = attribute(node, "end", len(lengths or ()))
            return None if lengths is None else lengths[int(attribute(node, "start", 0)) : int(end)]
        if node.op_type == "Concat":
            parts = [self.values_of(one) for one in node.input]
            return None if None in parts else [length for part in parts for length in part or ()]
        values = self.values_of(node.input[0])
        if values is None or node.op_type in ("Unsqueeze", "Squeeze", "Cast"):
            return values
        if node.op_type == "Reshape":  # to one axis, or to a number
            return values if len(values) <= 1 else None
        if node.op_type == "Mul":
            factors = self.values_of(node.input[1])
            return None if factors is None or len(factors) != len(values) else _products(values, factors)
        others = [self.constant(one) for one in node.input[1:] if one]
        if any(one is None for one in others):
            return None
        if node.op_type == "Gather":
            return [values[int(at)] for at in others[0].ravel()]
        start, end = int(others[0].item()), int(others[1].item())
        steps = int(others[3].item()) if len(others) > 3 else 1
        return values[start:end:steps]


def _products(values: list[Length], factors: list[Length]) -> list[Length] | None:
    """Element by element; None where one is not a number and is not multiplied by 1."""
    products: list[Length] = []
    for one, other in zip(values, factors, strict=True):
        if isinstance(one, int) and isinstance(other, int):
            products.append(one * other)
        elif 1 in (one, other):
            products.append(other if one == 1 else one)
        else:
            return None
    return products


def says(values: list[Length] | None, lengths: list[Length | None]) -> bool:
    """The target of a reshape gives these lengths; None for what follows from the others. One may be left to the
    runtime (-1)."""
    if values is None or len(values) != len(lengths):
        return False
    open_ones = [one for one, length in zip(values, lengths, strict=True) if one == -1 or length is None]
    known = [(one, length) for one, length in zip(values, lengths, strict=True) if one != -1 and length is not None]
    return len(open_ones) <= 1 and all(one == length for one, length in known)
