"""Sizes of free dimensions that a target names: what a runtime can prepare itself for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from compile_stage.core.generation import cache_specs
from compile_stage.core.records import Target
from compile_stage.core.tensors import Signature

KNOWN_SIZES = "known_sizes"
"""The option of an artifact that says which sizes of its free dimensions the target asks for."""

Sizes: TypeAlias = Mapping[str, int]
"""Free dimension → size."""

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each input."""


def known_sizes(signature: Signature, target: Target) -> list[dict[str, int]]:
    """Free dimension → size, as far as the target names one: for each of its batch sizes, the ends of its shapes among
    them, or one map where its batch sizes change nothing. Of a graph with a cache nothing is known, since its lengths
    change from call to call."""
    if cache_specs(signature):
        return []
    found: list[dict[str, int]] = []
    ends = [end[0] for shape in target.shapes.values() for end in (shape.min, shape.max)]
    for batch_size in dict.fromkeys((*target.batch_sizes, *ends)):
        if (sizes := asked_sizes(signature, target, (batch_size,))) and sizes not in found:
            found.append(sizes)
    return found


def asked_sizes(signature: Signature, target: Target, batch_sizes: Sequence[int]) -> dict[str, int]:
    """Free dimension → the one size that the target asks for, in batches of these sizes; those of which it asks for
    several are left out."""
    wanted: dict[str, set[int]] = {}
    for spec in signature.inputs:
        promised = target.shapes.get(spec.name)
        for axis, dim in enumerate(spec.shape):
            if not isinstance(dim, str):
                continue
            asked = set(batch_sizes) if axis == 0 else {-1}
            if axis and promised is not None:
                asked = {promised.min[axis], promised.typical[axis], promised.max[axis]}
            wanted.setdefault(dim, set()).update(asked)
    return {dim: sizes.pop() for dim, sizes in wanted.items() if len(sizes) == 1 and -1 not in sizes}


def shapes_of(signature: Signature, sizes: Sequence[Sizes]) -> list[Shapes]:
    """The shapes that will come, where all dimensions of a size are known.

    Args:
        sizes: Empty where there is none.
    """
    found = []
    for size in sizes or ({},):
        shapes = [[size.get(dim) if isinstance(dim, str) else dim for dim in spec.shape] for spec in signature.inputs]
        if all(dim is not None for shape in shapes for dim in shape):
            found.append(tuple(tuple(dim for dim in shape if dim is not None) for shape in shapes))
    return found
