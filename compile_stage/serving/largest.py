"""The largest shapes that a published model runs: those that the policy promised, and validation proved.

Vendored into every published model beside `compile_stage.flavor`. The manifest lists them, for the inputs that the
target's `shapes`, or the trace of the original, give a limit, without the batch, for which there is a rule of its own
(`serving.batches`):

    largest     {"ids": [null, 40]}

Where the validation samples were larger than the policy's `max`, theirs counts. A dimension that is null has no limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import UsageError

if TYPE_CHECKING:
    from compile_stage.core.records import Target
    from compile_stage.core.tensors import Batch


class LargestShapes:
    """The rule of one model."""

    def __init__(self, largest: Mapping[str, Sequence[int | None]]) -> None:
        self._limits = [
            (str(name), axis, int(size))
            for name, sizes in largest.items()
            for axis, size in enumerate(sizes)
            if size is not None
        ]

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> LargestShapes:
        """The rule that a manifest names; one without limits where it names none, as of earlier versions."""
        named = manifest.get("largest")
        return cls(named if isinstance(named, Mapping) else {})

    def demand(self, batch: Batch) -> None:
        """Raise UsageError for an input that is larger than what was proven."""
        for name, axis, most in self._limits:
            shape = getattr(batch.get(name), "shape", ())
            if axis < len(shape) and shape[axis] > most:
                raise UsageError(
                    f"input {name!r} has {shape[axis]} in dimension {axis}, and at most {most} was proven",
                    fix=f"set max in the target's shapes to {shape[axis]} and run compile-stage again, or send less",
                )


def largest_shapes(
    target: Target, samples: Mapping[str, Sequence[int]], traced: Mapping[str, Sequence[int | None]]
) -> dict[str, list[int | None]]:
    """What a manifest says under `largest`.

    Args:
        samples: Input → shape of the validation samples, axis 0 being the sample.
        traced: As `PortableModel.largest`; for inputs that the target's `shapes` do not name.
    """
    found: dict[str, list[int | None]] = {}
    for name, shape in target.shapes.items():
        own = tuple(samples.get(name, ()))
        own = own if len(own) == len(shape.max) else shape.max
        found[name] = [None, *(max(pair) for pair in zip(shape.max[1:], own[1:], strict=True))]
    for name, sizes in traced.items():
        own = tuple(samples.get(name, ()))
        own = own if len(own) == len(sizes) else (0,) * len(sizes)
        limits = [size if size is None else max(size, proven) for size, proven in zip(sizes, own, strict=True)]
        found.setdefault(name, limits)
    return found
