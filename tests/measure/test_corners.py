"""The shapes that a policy promises, and odd ones in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from compile_stage.core.records import ShapeRange
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.corners import BETWEEN, CORNERS, corner_batches

SIGNATURE = Signature(
    inputs=tuple(TensorSpec(name=name, dtype="int64", shape=("batch", "sequence")) for name in ("ids", "mask")),
    outputs=(),
)
SAMPLES: Any = SimpleNamespace(inputs={name: np.arange(24).reshape(3, 8) for name in ("ids", "mask")})


def shapes_of(low: int, typical: int, high: int) -> dict[str, tuple[int, ...]]:
    shapes = {"ids": ShapeRange(min=(1, low), typical=(1, typical), max=(1, high))}
    found = corner_batches(SAMPLES, SIGNATURE, shapes, [1], (*CORNERS, *BETWEEN))
    return {label.partition(" (")[0]: batch["mask"].shape for label, batch in found}


def test_what_lies_between_the_corners_is_run_too() -> None:
    """Broken: an artifact that pads would be judged only where it does not."""
    found = {"min": (1, 4), "max": (1, 16), "just above min": (1, 5), "just above typical": (1, 9)}
    assert shapes_of(4, 8, 16) == found
    assert set(shapes_of(4, 4, 4)) == {"min"}
    assert set(shapes_of(4, 5, 5)) == {"min", "max"}  # just above the one is the other
