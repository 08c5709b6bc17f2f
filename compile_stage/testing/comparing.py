"""Comparing answers: how near is near enough, and what is never near."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.quantities import percent

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

# Largest error against the reference, as a share of the output's range. fp32 differs by the order of sums only; the
# others must be the same model, how close they come is for a policy's tolerances to judge.
RELATIVE_ERROR = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1}
RELATIVE_ERROR_ELSE = 0.25


def off(name: str, value: Any, wanted: Array, limit: float) -> str | None:
    """None when an output is what it should be within `limit` (a share of its range), or the reason why not."""
    if not isinstance(value, np.ndarray):
        return f"output {name!r} is {type(value).__name__}, not an array"
    if value.shape != wanted.shape:
        return f"output {name!r} has the shape {list(value.shape)}, and should have {list(wanted.shape)}"
    if not value.size:
        return f"output {name!r} is empty"
    if value.dtype != wanted.dtype:
        return f"output {name!r} is {value.dtype}, and should be {wanted.dtype}"
    if value.dtype.kind != "f":
        agreement = float(np.mean(value == wanted))
        return None if agreement >= 1 - limit else f"{percent(agreement)} of output {name!r} agrees with the reference"
    if not np.array_equal(np.isfinite(value), np.isfinite(wanted)):
        return f"output {name!r} holds NaN or infinity where the reference does not"
    finite = np.isfinite(wanted)
    error = float(np.max(np.abs(value[finite].astype(np.float64) - wanted[finite].astype(np.float64)), initial=0.0))
    span = float(np.max(np.abs(wanted[finite]), initial=0.0)) or 1.0
    return (
        None
        if error <= limit * span
        else f"output {name!r} is off by {error / span:.2g} of its range (limit {limit:g})"
    )


def differ(wanted: Batch, found: Batch, *, exact: bool, what: str) -> str | None:
    """None when two answers are the same, bit for bit or as near as float32 sums are; `what` begins the reason why
    not."""
    if list(wanted) != list(found):
        return f"{what} has the outputs {list(found)}, and should have {list(wanted)}"
    for name, value in wanted.items():
        if exact and not np.array_equal(value, found[name], equal_nan=value.dtype.kind == "f"):
            return f"{what} has another {name!r}"
        if not exact and (reason := off(name, found[name], value, RELATIVE_ERROR["fp32"])) is not None:
            return f"{what}: {reason}"
    return None
