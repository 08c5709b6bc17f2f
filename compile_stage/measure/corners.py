"""The smallest and the largest input shapes that a policy promises, and odd ones in between, filled with real
samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.core.records import ShapeRange
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch
    from compile_stage.measure.samples import Samples


CORNERS = ("min", "max")

BETWEEN = ("just above min", "just above typical")
"""Where an artifact of fixed shapes pads by most. A model may have a step of its own, such as images in multiples of
32, that a policy can't say: what the original does not take is nothing to compare."""


def corner_batches(
    samples: Samples,
    signature: Signature,
    shapes: Mapping[str, ShapeRange],
    batch_sizes: Sequence[int],
    ends: Sequence[str] = CORNERS,
) -> list[tuple[str, Batch]]:
    """Batches at the corners of the dynamic dimensions, or between them, for those that the samples do not have
    themselves.

    Real samples are cropped, or repeated along the axis. The batch is the corner's own: a policy whose shapes go up to
    32 rows promises 32 rows, also when `batch_sizes` ends at 8.

    Args:
        batch_sizes: Those are run with the samples as they are, so that a corner which differs in nothing else is left
            out.

    Returns:
        `(label, batch)`, the label naming the corner and its shapes: `max (ids 1x512)`. Equal arguments give equal
        batches, so that a baseline and a candidate can be compared by label.
    """
    corners: list[tuple[str, Batch]] = []
    seen: list[dict[str, tuple[int, ...]]] = []  # a policy whose min is its max has one corner
    for end in ends:
        wanted = {name: _shape(shapes[name], end) for name in samples.inputs if name in shapes}
        rows = max((shape[0] for shape in wanted.values() if shape), default=min(batch_sizes, default=1))
        sizes = _sizes(signature, wanted)
        batch = {
            name: _resize(array, rows, _target(name, array, signature, wanted, sizes))
            for name, array in samples.inputs.items()
        }
        changed = {n: a.shape for n, a in batch.items() if a.shape[1:] != samples.inputs[n].shape[1:]}
        if rows not in batch_sizes:
            changed = {n: a.shape for n, a in batch.items()}
        if changed and changed not in seen:
            seen.append(changed)
            text = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in changed.items())
            corners.append((f"{end} ({text})", batch))
    return corners


def _shape(promised: ShapeRange, end: str) -> tuple[int, ...]:
    if end in CORNERS:
        shape: tuple[int, ...] = getattr(promised, end)
        return shape
    below: tuple[int, ...] = getattr(promised, end.rpartition(" ")[2])
    return tuple(min(size + 1, most) for size, most in zip(below, promised.max, strict=True))


def _sizes(signature: Signature, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Symbolic dimension → size: an attention mask follows the ids that the policy speaks of."""
    return {
        dim: size
        for tensor in signature.inputs
        if tensor.name in wanted
        for dim, size in zip(tensor.shape[1:], wanted[tensor.name][1:], strict=False)
        if isinstance(dim, str)
    }


def _target(
    name: str,
    array: Array,
    signature: Signature,
    wanted: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
) -> tuple[int, ...]:
    own: tuple[int, ...] = array.shape[1:]
    if name in wanted and len(wanted[name]) == array.ndim:
        return wanted[name][1:]
    spec = next((tensor for tensor in signature.inputs if tensor.name == name), None)
    if spec is None or len(spec.shape) != array.ndim:
        return own
    return tuple(
        sizes.get(dim, size) if isinstance(dim, str) else size for dim, size in zip(spec.shape[1:], own, strict=True)
    )


def _resize(array: Array, rows: int, shape: tuple[int, ...]) -> Array:
    resized: Array = np.asarray(array[np.arange(rows) % len(array)])
    for axis, size in enumerate(shape, start=1):
        if resized.shape[axis] != size:
            resized = np.take(resized, np.arange(size) % resized.shape[axis], axis=axis)
    return np.ascontiguousarray(resized)
