"""The sizes for which what was made of a PyTorch program is the original: what a portable model says of them, and what
a policy's `shapes` may ask. How they are found out: `torch_sizes`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError
from compile_stage.serving.size_conditions import SizeCondition
from compile_stage.sources import torch_sizes

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.records import PortableModel, ShapeRange, SourceModel

_Place = tuple[str, int]
"""An input and its axis."""

_Range = tuple[int | None, int | None]
"""The smallest and the largest size; None where there is no such limit."""


def with_size_limits(
    model: PortableModel,
    program: ExportedProgram,
    original: Callable[..., Any],
    shapes: Mapping[str, ShapeRange],
    source: SourceModel,
) -> PortableModel:
    """The model that was made of the program, with the sizes for which it is the network (`smallest`, `largest` and
    `conditions`). A forward that asks for a size goes one way in the trace, and the graph holds nothing of the other.
    Batches that are no larger than the policy's are tried in validation.

    Args:
        original: The network, called as the program is.

    Raises:
        SourceError: `shapes` asks for others.
    """
    names = [spec.name for spec in model.signature.inputs]
    ranges = _ranges(model, program)
    traced = torch_sizes.guards(program, names)
    ends = {
        (place, end): _condition(place, "<=" if end else ">=", limit)
        for place, both in ranges.items()
        for end, limit in enumerate(both)
        if limit is not None
    }
    # The tracer records nothing of a forward that asks for a size of 1: to it, an open size is never 1.
    ones = {place: _condition(place, ">=", 2) for place in _open(model) if ranges[place][0] is None}
    compared = torch_sizes.compare(model, program, original, [*ends.values(), *ones.values(), *traced])
    needed = {condition.text for condition in compared.needed}
    # What compiles a program anew relies on its ranges, and ONNX holds none.
    loose = compared.harmless - needed if model.form == "onnx" else frozenset()
    for (place, end), condition in ends.items():
        if condition.text in loose:
            ranges[place] = _without(ranges[place], end)
    ranges |= {place: (2, ranges[place][1]) for place, condition in ones.items() if condition.text in needed}
    conditions = [condition for condition in traced if condition.text in needed - {end.text for end in ends.values()}]
    _demand_sizes(ranges, conditions, shapes, source)
    smallest, largest = (
        {
            name: sizes
            for name in names
            if any(sizes := tuple(both[end] for (own, _), both in ranges.items() if own == name))
        }
        for end in (0, 1)
    )
    texts = tuple(dict.fromkeys(condition.text for condition in conditions))
    return replace(model, smallest=smallest, largest=largest, conditions=texts)


def _ranges(model: PortableModel, program: ExportedProgram) -> dict[_Place, _Range]:
    """The range that the trace left of each axis, by input and axis."""
    nodes = {node.name: node for node in program.graph.nodes}
    return {
        (spec.name, axis): _limits(program, size) if axis and not isinstance(size, int) else (None, None)
        for spec, own in zip(model.signature.inputs, program.graph_signature.user_inputs, strict=True)
        for axis, size in enumerate(nodes[str(own)].meta["val"].shape)
    }


def _open(model: PortableModel) -> list[_Place]:
    """The axes that have no size of their own, without the batch."""
    return [
        (spec.name, axis)
        for spec in model.signature.inputs
        for axis, size in enumerate(spec.shape)
        if axis and isinstance(size, str)
    ]


def _condition(place: _Place, sign: str, limit: int) -> SizeCondition:
    return SizeCondition(f"size({json.dumps(place[0])}, {place[1]}) {sign} {limit}")


def _without(both: _Range, end: int) -> _Range:
    return (both[0], None) if end else (None, both[1])


def _demand_sizes(
    ranges: Mapping[_Place, _Range],
    conditions: Sequence[SizeCondition],
    shapes: Mapping[str, ShapeRange],
    source: SourceModel,
) -> None:
    """Raise SourceError where `shapes` asks for a size that is not within the limits and conditions."""
    for (name, axis), (least, most) in ranges.items():
        if name not in shapes or axis >= len(shapes[name].min):
            continue
        if least is not None and shapes[name].min[axis] < least:
            raise _other_way(source, name, axis, "below", least, shapes[name].min[axis])
        if most is not None and shapes[name].max[axis] > most:
            raise _other_way(source, name, axis, "above", most, shapes[name].max[axis])
    for condition in conditions:
        if any(name not in shapes or axis >= len(shapes[name].min) for name, axis in condition.sizes):
            continue
        for end in ("min", "typical", "max"):
            sizes = {(name, axis): getattr(shapes[name], end)[axis] for name, axis in condition.sizes}
            if not condition.holds(sizes):
                raise SourceError(
                    f"its forward goes another way, or refuses the input, where {condition.text} does not hold, and "
                    f"{end} in the policy's shapes has "
                    + ", ".join(f"{size} for {name!r}" for (name, _), size in sizes.items()),
                    fix=f"set {end} in the target's shapes to sizes for which it holds",
                    where=source.uri,
                )


def _limits(program: ExportedProgram, size: Any) -> _Range:
    """The smallest and the largest size of an open axis that the trace left in; None where it excluded none."""
    expression: Any = getattr(getattr(size, "node", None), "expr", None)
    known = program.range_constraints.get(expression)
    if known is None:
        return None, None
    # The tracer lets every open size begin at 2, whatever the forward asks: 0 and 1 are constants to it. A size that
    # is one more than another then begins at 3.
    ranges = [program.range_constraints.get(symbol) for symbol in expression.free_symbols]
    excluded = any(each is not None and each.lower > 2 for each in ranges)
    least = int(known.lower) if excluded and known.lower.is_Integer else None
    return least, int(known.upper) if known.upper.is_Integer else None


def _other_way(source: SourceModel, name: str, axis: int, where: str, limit: int, asked: int) -> SourceError:
    end = "min" if where == "below" else "max"
    fix = f"set {end} in the target's shapes to {limit}"
    if source.flavor in ("pytorch", "python_function"):  # others are traced with inputs of our own
        fix += f". For sizes {where} {limit} alone, log it with an input example of such a size"
    return SourceError(
        f"its forward may go another way {where} {limit} in dimension {axis} of input {name!r}, and the policy asks "
        f"for {asked}",
        fix=fix,
        where=source.uri,
    )
