"""Fixed shapes, for compilers that need them: which are compiled, and how a batch of any size in between goes through
them.

A bucket gives every free dimension of the inputs one size. A batch is run in the smallest bucket that holds it: padded
up to the bucket's shapes, and what comes out cut back. Rows are padded with copies of the last row, since rows do not
see each other; all else with zeros, which is right for a model that is given what is padding (an attention mask), and
wrong for one that is not. Which of the two a model is, validation finds out: it runs sizes between those of the buckets
(`measure.corners`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from compile_stage.core.errors import UsageError
from compile_stage.core.records import Target
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

Shapes: TypeAlias = tuple[tuple[int, ...], ...]  # of the inputs, in order

LIMIT = 16
"""More buckets are refused: each is a compilation, and its weights may be in the artifact once more."""


def refuse_buckets(name: str, signature: Signature, target: Target) -> str | None:
    """The reason why a model can't be cut into buckets for a target: text, a dimension whose sizes nobody says, or too
    many of them.

    Args:
        name: The backend's, for the message.
    """
    for spec in signature.inputs:
        if spec.dtype == "str":
            return f"input {spec.name!r} is text, and {name} takes numbers only"
    sizes = _sizes(signature, target)
    for spec in signature.inputs:
        for dim in spec.shape:
            if isinstance(dim, str) and not sizes[dim]:
                return (
                    f"{name} compiles for fixed shapes, and the size of {dim!r} in {spec} is not known: say it under "
                    "the target's shapes"
                )
    count = math.prod(map(len, sizes.values()))
    if count > LIMIT:
        listed = "; ".join(f"{dim}: {', '.join(map(str, found))}" for dim, found in sizes.items() if len(found) > 1)
        return (
            f"{name} compiles for fixed shapes, and the target asks for {count} of them ({listed}), more than {LIMIT}: "
            "give fewer batch_sizes, or equal min, typical and max"
        )
    return None


def buckets(signature: Signature, target: Target) -> list[Shapes]:
    """The inputs' shapes of each bucket, smallest first: every combination of the target's batch sizes with the min,
    typical and max of each other free dimension. Ask `refuse_buckets` first."""
    sizes = _sizes(signature, target)
    found = (
        tuple(tuple(dim if isinstance(dim, int) else chosen[dim] for dim in spec.shape) for spec in signature.inputs)
        for chosen in (dict(zip(sizes, combination, strict=True)) for combination in product(*sizes.values()))
    )
    return sorted(dict.fromkeys(found), key=_elements)


def bucket_name(signature: Signature, shapes: Shapes) -> str:
    """Readable, and fit for a file or a function: `batch_8_sequence_128`; `fixed` where nothing is free."""
    chosen = _bound(signature, shapes)
    parts = (f"{_word(dim)}_{size}" for dim, size in chosen.items())
    return "_".join(parts) or "fixed"


def padding_note(signature: Signature, found: Sequence[Shapes]) -> str:
    """What padding costs at worst, for the artifact's notes; empty where there is one bucket."""
    if len(found) < 2:
        return ""
    worst, between = 1.0, ""
    for low, high in _neighbours(signature, found):
        ratio = math.prod(high[dim] / min(low[dim] + 1, high[dim]) for dim in high)
        if ratio > worst:
            worst = ratio
            between = ", ".join(f"{dim} {low[dim] + 1} runs as {high[dim]}" for dim in high if low[dim] < high[dim])
    listed = f"{len(found)} shapes are compiled, and what is between two of them is padded up"
    return f"{listed}, at worst to {worst:.3g} times the elements ({between})" if between else listed


class Router:
    """Batches to buckets and back."""

    def __init__(self, name: str, signature: Signature, found: Sequence[Shapes]) -> None:
        """Args:
        name: The backend's, for messages.
        found: The buckets that were compiled.
        """
        self._name, self._signature = name, signature
        self._buckets = sorted(found, key=_elements)

    def fit(self, batch: Batch) -> tuple[Shapes, list[Array]]:
        """The bucket for a batch that the signature takes, and its arrays in order, padded to the bucket's shapes.

        Raises:
            UsageError: It is larger than every bucket.
        """
        arrays = [batch[spec.name] for spec in self._signature.inputs]
        for shapes in self._buckets:
            if all(
                all(size <= room for size, room in zip(array.shape, shape, strict=True))
                for array, shape in zip(arrays, shapes, strict=True)
            ):
                return shapes, [_pad(array, shape) for array, shape in zip(arrays, shapes, strict=True)]
        raise self._too_large(arrays)

    def cut(self, batch: Batch, shapes: Shapes, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs without what came from padding.

        Args:
            batch: What was asked for.
            shapes: The bucket that it was run in.

        Raises:
            UsageError: The size of an output is free in another way than an input's is, so nobody knows where to cut.
        """
        asked = _bound(self._signature, tuple(batch[spec.name].shape for spec in self._signature.inputs))
        padded = {dim for dim, size in _bound(self._signature, shapes).items() if size != asked[dim]}
        if not padded:
            return dict(outputs)
        found = {}
        for spec in self._signature.outputs:
            unknown = [dim for dim in spec.shape if isinstance(dim, str) and dim not in asked]
            if unknown:
                raise self._uncut(spec.name, unknown[0], shapes)
            ends = (slice(asked[dim]) if isinstance(dim, str) else slice(None) for dim in spec.shape)
            found[spec.name] = outputs[spec.name][tuple(ends)]
        return found

    def _too_large(self, arrays: Sequence[Array]) -> UsageError:
        name, largest = self._signature.inputs[0].name, self._buckets[-1]
        return UsageError(
            f"{self._name} compiled this model for shapes up to {list(largest[0])} of {name!r}, and "
            f"{list(arrays[0].shape)} is larger",
            fix="name that size in the target's batch_sizes or shapes and compile it again",
        )

    def _uncut(self, output: str, dim: str, shapes: Shapes) -> UsageError:
        return UsageError(
            f"output {output!r} has the size {dim!r}, which is no input's, so this batch can't be padded to "
            f"{list(shapes[0])}",
            fix="name the batch's own size in the target's batch_sizes or shapes and compile it again",
        )


def _sizes(signature: Signature, target: Target) -> dict[str, list[int]]:
    """Free dimension → the sizes that the target asks for. An attention mask follows the ids that the target speaks of,
    since their dimension is one."""
    sizes: dict[str, set[int]] = {}
    for spec in signature.inputs:
        for axis, dim in enumerate(spec.shape):
            if not isinstance(dim, str):
                continue
            asked = sizes.setdefault(dim, set())
            asked |= set(target.batch_sizes) if axis == 0 else set()
            if (promised := target.shapes.get(spec.name)) is not None:
                asked |= {promised.min[axis], promised.typical[axis], promised.max[axis]} - {0}
    return {dim: sorted(found) for dim, found in sizes.items()}


def _bound(signature: Signature, shapes: Shapes) -> dict[str, int]:
    return {
        dim: size
        for spec, shape in zip(signature.inputs, shapes, strict=True)
        for dim, size in zip(spec.shape, shape, strict=True)
        if isinstance(dim, str)
    }


def _neighbours(signature: Signature, found: Sequence[Shapes]) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Each bucket with the next smaller size of each of its dimensions, or nothing below."""
    bound = [_bound(signature, shapes) for shapes in found]
    steps = {dim: sorted({one[dim] for one in bound}) for dim in bound[0]}
    for high in bound:
        yield (
            {dim: max((s for s in steps[dim] if s < size), default=size) for dim, size in high.items()},
            high,
        )


def _elements(shapes: Shapes) -> tuple[int, Shapes]:
    return sum(map(math.prod, shapes)), shapes


def _pad(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape == shape:
        return array
    import numpy as np

    rest = [(0, room - size) for size, room in zip(array.shape, shape, strict=True)]
    padded = np.pad(array, [(0, 0), *rest[1:]])
    return np.pad(padded, [rest[0], *[(0, 0)] * (array.ndim - 1)], mode="edge") if rest[0][1] else padded


def _word(dim: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in dim)
