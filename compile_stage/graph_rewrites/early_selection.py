"""Rows that are selected late, and could be selected before they are computed.

A classifier reads the first token of a transformer's last layer, or the last one, and the rest of that layer is
computed for nothing: its feed-forward part, its norms, its queries and its attention, for all tokens but one. Only keys
and values are needed of all. The selection (a Gather or a Slice at constant places) moves up through whatever handles
rows one by one, until something needs them all. Of a transformer of six layers that is a seventh of the work.

Compilers for inference leave it as it was written. ONNX Runtime does this for training alone (`UpStreamGather`).

A selection moves through a node where, by the shapes, each selected place of its answer depends on the same place of
its inputs and on nothing else there: elementwise operators, products (rows of the left factor), softmax and norms over
other axes, transpositions, reshapes that keep the axis, slices of other axes. Sums of products of fewer rows may be
added in another order, so answers differ by what float32 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from compile_stage.core.tensors import CACHE_INPUTS
from compile_stage.precision.graph_editor import GraphEditor
from compile_stage.precision.onnx_graph import Dimension, read_shapes
from compile_stage.precision.wiring import attribute, is_standard, permutation

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NAME = "early-selection"

_UNARY = frozenset((
    "Abs", "Cast", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin",
    "Softplus", "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu",
))  # fmt: skip
"""Operators on the elements of their first input; what else they have are numbers."""

_BROADCAST = frozenset((
    "Add", "And", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum",
    "Where", "Xor",
))  # fmt: skip

_REDUCTIONS = frozenset(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceL2"))

_NORMS = frozenset(("LayerNormalization", "RMSNormalization"))

_WORK = "MatMul"  # a selection that moves through none gains nothing

_END = 2**31 - 1  # exporters write it, or the largest int64, for "to the end"

Shape: TypeAlias = tuple[Dimension, ...]


def rewrite(model: ModelProto) -> int:
    """Move the selections of a graph up, in place.

    Returns:
        How many moved through a product.
    """
    return _Rewriter(model).run()


@dataclass(frozen=True)
class _Rows:
    """The rows that are selected along some axis.

    Attributes:
        places: For a Gather, one or more; negative ones count from the end.
        bounds: For a Slice, its start and end; None for a Gather.
        count: How many rows are left.
    """

    places: tuple[int, ...]
    bounds: tuple[int, int] | None
    count: int


_Wanted: TypeAlias = tuple[_Rows, int]
"""These rows along that axis of a tensor. A reader that needs all of it wants None."""


@dataclass(frozen=True)
class _Narrowed:
    """A node that is to compute the selected rows alone.

    Attributes:
        axis: Of its output.
        inputs: What it wants of each input.
    """

    axis: int
    inputs: Sequence[_Wanted | None]


@dataclass
class _Selection:
    """Selections of the same rows of one tensor."""

    tensor: str
    rows: _Rows
    axis: int
    nodes: list[NodeProto] = field(default_factory=list)


class _Rewriter(GraphEditor):
    def __init__(self, model: ModelProto) -> None:
        super().__init__(model)
        self._shapes: dict[str, Shape] = {}

    def run(self) -> int:
        if self.opset < 13 or not any(node.op_type == _WORK for node in self.nodes):
            return 0
        # With a cache, attention is to become an operator that takes as many queries as keys (docs/decisions/0088).
        if any(value.name.startswith(CACHE_INPUTS) for value in self.graph.input):
            return 0
        self._shapes = read_shapes(self.model)
        moved, changed = 0, set[str]()
        for selection in self._selections():
            if names := self._move(selection):
                moved += 1
                changed |= names
        if moved:
            self.write(changed)
        return moved

    def _selections(self) -> list[_Selection]:
        """All of them, the last first, so that one of what another has selected stays below it."""
        found: dict[tuple[str, _Rows, int], _Selection] = {}
        for node in reversed(self.nodes):
            if (wanted := self._selects(node)) is not None:
                key = (node.input[0], *wanted)
                found.setdefault(key, _Selection(node.input[0], *wanted)).nodes.append(node)
        return list(found.values())

    def _selects(self, node: NodeProto) -> _Wanted | None:
        """Which rows of its input a node selects; None where it does something else, or with places that are not known,
        or selects most of them."""
        shape = self._shapes.get(node.input[0], ()) if node.input else ()
        if not is_standard(node) or len(shape) < 2:
            return None
        rows, axis = None, 0
        if node.op_type == "Gather":
            axis, places = int(attribute(node, "axis", 0)) % len(shape), self.constant(node.input[1])
            if places is not None and places.ndim <= 1 and 0 < places.size <= 16:
                rows = _Rows(tuple(int(place) for place in places.ravel()), None, int(places.size))
        elif node.op_type == "Slice":
            rows, axis = self._sliced(node, shape)
        length = shape[axis]
        if rows is None or length == 1 or (isinstance(length, int) and 2 * rows.count > length):
            return None
        return rows, axis

    def _sliced(self, node: NodeProto, shape: Shape) -> tuple[_Rows | None, int]:
        """The rows of a slice of one axis, in steps of 1, whose number is the same whatever the axis's length."""
        given = [self.constant(name) for name in node.input[1:] if name]
        if any(values is None for values in given) or len(given) < 2:
            return None, 0
        starts, ends = ([int(value) for value in values] for values in given[:2])
        axes = [int(axis) % len(shape) for axis in given[2]] if len(given) > 2 else list(range(len(starts)))
        if len(given) > 3 and any(step != 1 for step in given[3]):
            return None, 0
        cuts = [cut for cut in zip(axes, starts, ends, strict=True) if cut[1] != 0 or cut[2] < _END]
        if len(cuts) != 1:
            return None, 0
        axis, start, end = cuts[0]
        length = shape[axis]
        if start < 0 and end >= _END:
            count = -start
        elif (start >= 0) == (end >= 0):
            count = end - start
        else:
            return None, 0
        if count <= 0 or not isinstance(length, int) or max(abs(start), count) > length:
            return None, 0  # of a shorter axis there would be fewer
        return _Rows((), (start, end), count), axis

    # -------------------------------------------------------------------------------------------- what can be narrowed

    def _move(self, selection: _Selection) -> set[str]:
        """Move a selection as far up as it goes; the names of what is narrower now, none where that gains nothing."""
        group = {id(node) for node in selection.nodes}
        wants: dict[str, list[tuple[NodeProto, _Wanted | None]]] = {}
        narrowed: dict[int, _Narrowed] = {}
        for node in reversed(self.nodes):
            inputs: list[_Wanted | None] = [None] * len(node.input)
            if id(node) in group:
                inputs[0] = selection.rows, selection.axis
            elif (wanted := self._only_wish(node, wants)) is not None:
                axes = self._axes_of_inputs(node, wanted)
                if axes is not None:
                    inputs = [None if axis is None else (wanted[0], axis) for axis in axes]
                    narrowed[id(node)] = _Narrowed(wanted[1], inputs)
            for name, wish in zip(node.input, inputs, strict=True):
                if name:
                    wants.setdefault(name, []).append((node, wish))
        gains = any(id(node) in narrowed and node.op_type == _WORK for node in self.nodes)
        return self._apply(selection, narrowed) if gains else set()

    def _only_wish(self, node: NodeProto, wants: dict[str, list[tuple[NodeProto, _Wanted | None]]]) -> _Wanted | None:
        """The rows that all readers of a node want, where they want the same."""
        read = [name for name in node.output if name and (name in self.readers or name in self.kept)]
        if len(read) != 1 or read[0] != node.output[0] or read[0] in self.kept or not is_standard(node):
            return None
        wishes = {wish for _, wish in wants.get(read[0], [])}
        seen = {id(reader) for reader, _ in wants.get(read[0], [])}
        return wishes.pop() if len(wishes) == 1 and seen == {id(r) for r in self.readers[read[0]]} else None

    def _axes_of_inputs(self, node: NodeProto, wanted: _Wanted) -> list[int | None] | None:
        """Along which axis the rows are selected of each input, None for one that is read as it is; None for a node
        whose rows depend on each other."""
        axis, shape = wanted[1], self._shapes.get(node.output[0])
        shapes = [self._shapes.get(name) for name in node.input]
        if shape is None or not shapes or shapes[0] is None or shape[axis] == 1:
            return None
        if node.op_type in _BROADCAST:
            return _broadcast(shape, shapes, axis)
        if node.op_type == "MatMul":
            return _product(shape, shapes, axis)
        at = axis if node.op_type in _UNARY else self._axis_of_first(node, shape, shapes, axis)
        return None if at is None else [at, *[None] * (len(node.input) - 1)]

    def _axis_of_first(self, node: NodeProto, shape: Shape, shapes: Sequence[Shape | None], axis: int) -> int | None:
        """Of an operator whose other inputs have no rows: the axis of its first one; None where rows depend on each
        other."""
        kind, before = node.op_type, shapes[0] or ()
        if kind in ("Softmax", "LogSoftmax"):
            return axis if int(attribute(node, "axis", -1)) % len(shape) != axis else None
        if kind in _NORMS:
            normalised = len(shape) - int(attribute(node, "axis", -1)) % len(shape)  # so many last axes
            weights = all(one is not None and len(one) <= normalised for one in shapes[1:])
            return axis if axis < len(shape) - normalised and weights else None
        if kind in _REDUCTIONS:
            axes = self._reduced(node, len(before))
            return axis if attribute(node, "keepdims", 1) and axes and axis not in axes else None
        if kind == "Transpose":
            return (permutation(node) or list(range(len(shape)))[::-1])[axis]
        if kind == "Slice":
            cut = self.constant(node.input[3]) if len(node.input) > 3 else None
            return axis if cut is not None and axis not in {int(one) % len(shape) for one in cut} else None
        if kind == "Reshape":
            target, at = self.constant(node.input[1]), _kept_axis(before, shape, axis)
            # A zero copies the length at its own place, which is another one now.
            copies = not attribute(node, "allowzero", 0) and (target is None or 0 in target)
            return None if copies and at != axis else at
        return None

    def _reduced(self, node: NodeProto, rank: int) -> set[int] | None:
        if len(node.input) > 1 and node.input[1]:
            values = self.constant(node.input[1])
            axes = None if values is None else [int(value) for value in values]
        else:
            axes = next((list(one.ints) for one in node.attribute if one.name == "axes"), None)
        return None if axes is None else {axis % rank for axis in axes}

    # --------------------------------------------------------------------------------------------------- the new graph

    def _apply(self, selection: _Selection, narrowed: dict[int, _Narrowed]) -> set[str]:
        selected: dict[tuple[str, int], str] = {}
        changed = set[str]()
        for node in self.nodes:
            if (narrow := narrowed.get(id(node))) is None:
                continue
            for at, wish in enumerate(narrow.inputs):
                made = self.made_by.get(node.input[at])
                if wish is not None and (made is None or id(made) not in narrowed):
                    node.input[at] = self._selected(node, node.input[at], *wish, selected)
            if node.op_type == "Reshape":
                node.input[1] = self._narrower_shape(node, narrow.axis, selection.rows.count)
            name = node.output[0]
            self._shapes[name] = _with(self._shapes[name], narrow.axis, selection.rows.count)
            changed.add(name)
        for node in selection.nodes:
            self._end(node, selection)
        self.note_readers()
        return changed

    def _selected(self, reader: NodeProto, name: str, rows: _Rows, axis: int, done: dict[tuple[str, int], str]) -> str:
        """The rows of a tensor that is needed in full too, or can't be narrowed; the axis stays."""
        from onnx import helper

        if (name, axis) not in done:
            into = self.names.fresh(f"{name}_selected")
            if rows.bounds is None:
                places = self.integers(f"{into}_places", rows.places)
                node = helper.make_node("Gather", [name, places], [into], axis=axis)
            else:
                parts = zip(("start", "end", "axis"), (*rows.bounds, axis), strict=True)
                given = [self.integers(f"{into}_{part}", [value]) for part, value in parts]
                node = helper.make_node("Slice", [name, *given], [into])
            self.put_before(reader, node)
            if name in self._shapes:
                self._shapes[into] = _with(self._shapes[name], axis, rows.count)
            done[name, axis] = into
        return done[name, axis]

    def _narrower_shape(self, node: NodeProto, axis: int, count: int) -> str:
        """The target shape of a Reshape, with another length of one axis."""
        from onnx import helper

        name, target = node.input[1], self.constant(node.input[1])
        if target is not None:
            values = [int(value) for value in target]
            values[axis] = count
            return self.integers(f"{name}_narrower", values)
        into, rank = self.names.fresh(f"{name}_narrower"), len(self._shapes[node.output[0]])
        length = self.integers(f"{into}_length", [count])
        parts, written = [], []
        for start, end in ((0, axis), (axis + 1, rank)):
            if start < end:
                part = self.names.fresh(f"{into}_from_{start}")
                bounds = [self.integers(f"{part}_{which}", [at]) for which, at in (("start", start), ("end", end))]
                written.append(helper.make_node("Slice", [name, *bounds], [part]))
                parts.append(part)
        parts.insert(0 if axis == 0 else 1, length)
        written.append(helper.make_node("Concat", parts, [into], axis=0))
        self.put_before(node, *written)
        return into

    def _end(self, node: NodeProto, selection: _Selection) -> None:
        """A selection that is made above: what is left of it is its axis, which a Gather at one place drops."""
        places = self.constant(node.input[1]) if node.op_type == "Gather" else None
        del node.attribute[:]
        if places is not None and places.ndim == 0:
            axes = self.integers(f"{node.output[0]}_axis", [selection.axis])
            node.op_type, inputs = "Squeeze", [node.input[0], axes]
        else:
            node.op_type, inputs = "Identity", [node.input[0]]
        del node.input[:]
        node.input.extend(inputs)


def _broadcast(shape: Shape, shapes: Sequence[Shape | None], axis: int) -> list[int | None] | None:
    """Of operands that are broadcast: one that lacks the axis, or has one row there, is read as it is."""
    axes: list[int | None] = []
    for own in shapes:
        if own is None:
            return None
        at = axis - (len(shape) - len(own))
        if at < 0 or own[at] == 1:
            axes.append(None)
        elif own[at] == shape[axis] is not None:
            axes.append(at)
        else:
            return None
    return axes if any(at is not None for at in axes) else None


def _product(shape: Shape, shapes: Sequence[Shape | None], axis: int) -> list[int | None] | None:
    left, right = shapes
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    if axis == len(shape) - 2:
        return [len(left) - 2, None] if left[-2] == shape[-2] is not None else None
    return _broadcast(shape, shapes, axis) if axis < len(shape) - 2 else None


def _kept_axis(before: Shape, after: Shape, axis: int) -> int | None:
    """Which axis of what is reshaped the axis is: as long, with as many elements before it, or behind it."""
    for at, length in enumerate(before):
        if length is None or length != after[axis]:
            continue
        ahead, behind = _elements(before[:at]), _elements(before[at + 1 :])
        if ahead is not None and ahead == _elements(after[:axis]):
            return at
        if behind is not None and behind == _elements(after[axis + 1 :]):
            return at
    return None


def _elements(shape: Shape) -> tuple[int, list[str]] | None:
    """How many elements a shape has: a number, and the lengths that are names; None where one is not known."""
    if None in shape:
        return None
    names = sorted(length for length in shape if isinstance(length, str))
    return math.prod(length for length in shape if isinstance(length, int)), names


def _with(shape: Shape, axis: int, count: int) -> Shape:
    return (*shape[:axis], count, *shape[axis + 1 :])
