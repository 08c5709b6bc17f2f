"""The shapes that a published model runs: up to those that the policy promised, and validation proved; and none for
which what was compiled is not the original.

Vendored into every published model beside `compile_stage.flavor`. The manifest lists them, for the inputs that the
target's `shapes`, or the trace of the original, give a limit, without the batch, for which there is a rule of its own
(`serving.batches`):

    largest     {"ids": [null, 40]}
    smallest    {"ids": [null, 8]}
    conditions  ["size(\"ids\", 1) % 2 == 0"]

Only the trace gives a smallest, and conditions (`serving.size_conditions`). Where the validation samples were larger or
smaller than the limit, theirs counts. A dimension that is null has no limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import UsageError
from compile_stage.serving.size_conditions import SizeCondition

if TYPE_CHECKING:
    from compile_stage.core.records import PortableModel, Target
    from compile_stage.core.tensors import Batch

_Sizes = Mapping[str, Sequence[int | None]]


class ShapeLimits:
    """The rule of one model."""

    def __init__(
        self, largest: _Sizes, smallest: _Sizes, promised: Sequence[str], conditions: Sequence[str] = ()
    ) -> None:
        """`promised`: the inputs whose largest sizes are those of the policy."""
        self._conditions = [SizeCondition(text) for text in conditions]
        self._largest, self._smallest, self._promised = _listed(largest), _listed(smallest), frozenset(promised)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> ShapeLimits:
        """The rule that a manifest names; one without limits where it names none, as of earlier versions."""
        largest, smallest = manifest.get("largest"), manifest.get("smallest")
        target = manifest.get("target")
        shapes = target.get("shapes") if isinstance(target, Mapping) else None
        return cls(
            largest if isinstance(largest, Mapping) else {},
            smallest if isinstance(smallest, Mapping) else {},
            list(shapes) if isinstance(shapes, Mapping) else [],
            manifest.get("conditions") or [],
        )

    def described(self) -> str:
        """Which sizes are taken, such as `size("ids", 1) <= 40` and `size("ids", 1) >= 8`; empty where all are."""
        ends = [
            f"size({json.dumps(name)}, {axis}) {sign} {size}"
            for sign, listed in (("<=", self._largest), (">=", self._smallest))
            for name, axis, size in listed
        ]
        return " and ".join(f"`{text}`" for text in (*ends, *(condition.text for condition in self._conditions)))

    def demand(self, batch: Batch) -> None:
        """Raise UsageError for an input that is larger than what was proven, or of a size for which what was compiled
        is not the original."""
        for name, axis, most in self._largest:
            size = _size(batch, name, axis)
            if size is None or size <= most:
                continue
            if name not in self._promised:
                raise _other_way(name, axis, size, f"at most {most}", "larger")
            raise UsageError(
                f"input {name!r} has {size} in dimension {axis}, and at most {most} was proven",
                fix=f"set max in the target's shapes to {size} and run compile-stage again, or send less",
            )
        for name, axis, least in self._smallest:
            size = _size(batch, name, axis)
            if size is not None and size < least:
                raise _other_way(name, axis, size, f"at least {least}", "smaller")
        for condition in self._conditions:
            sizes = {place: _size(batch, *place) for place in condition.sizes}
            known = {place: size for place, size in sizes.items() if size is not None}
            if len(known) == len(sizes) and not condition.holds(known):
                given = ", ".join(
                    f"{size} in dimension {axis} of {name!r}" for (name, axis), size in sorted(known.items())
                )
                raise UsageError(
                    f"the inputs have {given}, and what was compiled is right where {condition.text}: for other sizes "
                    "the original may compute in another way, or refuses them",
                    fix="send inputs of such sizes, or call the original",
                )


def shape_limits(target: Target, samples: Mapping[str, Sequence[int]], model: PortableModel | None) -> dict[str, Any]:
    """What a manifest says under `largest`, `smallest` and `conditions`.

    Args:
        samples: Input → shape of the validation samples, axis 0 being the sample.
        model: What was compiled; its own largest sizes are for inputs that the target's `shapes` do not name.
    """
    largest: dict[str, list[int | None]] = {}
    for name, shape in target.shapes.items():
        own = tuple(samples.get(name, ()))
        own = own if len(own) == len(shape.max) else shape.max
        largest[name] = [None, *(max(pair) for pair in zip(shape.max[1:], own[1:], strict=True))]
    if model is None:
        return {"largest": largest, "smallest": {}, "conditions": []}
    for name, sizes in model.largest.items():
        largest.setdefault(name, _with_samples(sizes, samples.get(name, ()), max))
    smallest = {name: _with_samples(sizes, samples.get(name, ()), min) for name, sizes in model.smallest.items()}
    return {"largest": largest, "smallest": smallest, "conditions": list(model.conditions)}


def _with_samples(sizes: Sequence[int | None], samples: Sequence[int], chosen: Any) -> list[int | None]:
    proven = samples if len(samples) == len(sizes) else sizes
    return [size if size is None else chosen(size, own) for size, own in zip(sizes, proven, strict=True)]


def _listed(limits: _Sizes) -> list[tuple[str, int, int]]:
    return [
        (str(name), axis, int(size))
        for name, sizes in limits.items()
        for axis, size in enumerate(sizes)
        if size is not None
    ]


def _size(batch: Batch, name: str, axis: int) -> int | None:
    shape = getattr(batch.get(name), "shape", ())
    return int(shape[axis]) if axis < len(shape) else None


def _other_way(name: str, axis: int, size: int, limit: str, sizes: str) -> UsageError:
    return UsageError(
        f"input {name!r} has {size} in dimension {axis}, and what was compiled is right for {limit}: for {sizes} ones "
        "the original may compute in another way",
        fix="send " + ("less" if sizes == "larger" else "more") + ", or call the original",
    )
