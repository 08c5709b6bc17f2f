"""Whether two models' answers can be laid side by side at all: enough samples, the same outputs, shapes and kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compile_stage.measure.task_intervals import Amount
from compile_stage.serving.batches import LARGER, OTHER_SIZES
from compile_stage.serving.missing_numbers import MISSING
from compile_stage.serving.taken_values import TAKEN

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

BEHAVIOUR = ("permuted_batch", OTHER_SIZES, LARGER, "repeatable", "input_unchanged", "answer_kept")
"""Checks of how a model behaves from call to call (`measure.behaviour`)."""

CLAIMED = "claimed_precision"
"""The check that answers of an fp32 artifact have the bits of one."""

SOAK = "soak"
"""The check of many calls in a row (`measure.soak`)."""

SERVED = "served"
"""The check of a published version that serving loads it and answers as what was proven (`steps.serve`)."""

STRUCTURE = ("samples", "outputs", "shape", "finite", *BEHAVIOUR, MISSING, TAKEN, CLAIMED, SOAK, SERVED)
"""Checks of our own making: no policy asks for them, no policy can leave them out, and no waiver reaches them."""


def samples_problem(amount: Amount, distinct: int, min_samples: int, *, real: bool) -> str:
    """Why so many samples prove nothing; empty when they do.

    Args:
        distinct: Those that differ beyond rounding, and that the baseline has a finite answer for.
    """
    if amount.samples == 0:
        return "there are no samples, so nothing was compared"
    if not real:
        return (
            f"the {amount.samples} samples are synthetic, and synthetic samples prove nothing about a model's answers"
        )
    asked = f"fewer than the {min_samples} that the policy asks for (data.min_samples)"
    if amount.independent < min_samples:
        return f"{amount.real} are {asked}"
    if distinct < min_samples:
        return f"of {amount.real} {distinct} differ beyond rounding and have a finite answer of the baseline, {asked}"
    return ""


def outputs_problem(candidate: Mapping[str, Array], baseline: Mapping[str, Array]) -> tuple[int, str]:
    """How many outputs are lost or new, and which; the text is empty when there are none."""
    lost = [name for name in baseline if name not in candidate]
    extra = [name for name in candidate if name not in baseline]
    parts = [f"it lost {listed(lost)}"] if lost else []
    parts += [f"it has {listed(extra)}, which the baseline has not"] if extra else []
    return len(lost) + len(extra), "; ".join(parts)


def shape_problem(own: Array, expected: Array, count: int) -> str:
    """Why an output's answers don't fit the baseline's, of `count` samples; empty when they do."""
    if own.ndim == 0 or expected.ndim == 0:
        return "a single number has no axis of samples"
    if len(own) != len(expected):
        return f"it has answers for {len(own)} samples, the baseline for {len(expected)}"
    if len(expected) != count:
        return f"the baseline has {len(expected)} answers for it, and {count} for other outputs"
    if own.shape != expected.shape:
        return f"each sample has the shape {list(own.shape[1:])}, the baseline's {list(expected.shape[1:])}"
    if expected.size == 0:
        return f"it is empty (shape {list(expected.shape)}), so there is nothing to compare"
    if _kind(own) != _kind(expected):
        return f"it holds {own.dtype}, the baseline {expected.dtype}"
    return ""


def _kind(array: Array) -> str:
    """What a consumer has to treat alike: float16 and float32 are both floats, an int is not a truth value."""
    return {"f": "float", "i": "integer", "u": "integer", "b": "bool", "U": "text", "S": "text", "c": "complex"}.get(
        array.dtype.kind, array.dtype.kind
    )


def values_are(count: int) -> str:
    """The subject and verb of a sentence about so many values."""
    return "1 value is" if count == 1 else f"{count} values are"


def listed(names: Mapping[str, object] | Sequence[str]) -> str:
    """Names in quotes, or `none`."""
    return ", ".join(map(repr, names)) or "none"
