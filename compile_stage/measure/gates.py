"""What a gate looks at, which side of its limit is good, and its value in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.core.language_models import LANGUAGE_MODELS_ONLY
from compile_stage.core.quantities import told_apart
from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.classes import CLASS_METRICS, has_classes
from compile_stage.measure.columns import COLUMN_METRICS
from compile_stage.measure.elementwise import DISTANCE_METRICS
from compile_stage.measure.label_needs import CLASSES_ONLY
from compile_stage.measure.resemblance import RESEMBLANCE
from compile_stage.measure.similarity import SIMILARITY_METRICS
from compile_stage.measure.speedups import RESOLUTION
from compile_stage.measure.structure import listed
from compile_stage.measure.tasks import classifies
from compile_stage.measure.tokens import TEXT_METRICS, TOKEN_METRICS, is_text

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

FLOAT_METRICS = (*DISTANCE_METRICS, "allclose", *COLUMN_METRICS)
"""Of floating outputs, whatever their axes mean."""


def fitting(gates: Sequence[Gate], baseline: Mapping[str, Array], labels: Array | None) -> tuple[list[Gate], list[str]]:
    """The gates without shipped ones that the labels say nothing of, and a sentence for what is left out.

    Where there are no labels at all a task metric says so itself.
    """
    texts = any(is_text(labels, output) for output in baseline.values())
    classes = labels is None or classifies(baseline, np.asarray(labels))
    why = "the samples have no text as labels"
    if labels is not None and not texts:
        why = f"the labels are {labels.dtype}{list(labels.shape)}, and not the tokens of an output"
    without = {
        "the labels are no classes of an output": [g for g in gates if g.options.get(CLASSES_ONLY) and not classes],
        why: [g for g in gates if g.options.get(LANGUAGE_MODELS_ONLY) and g.metric in TEXT_METRICS and not texts],
    }
    kept = [gate for gate in gates if not any(gate in left_out for left_out in without.values())]
    return kept, [
        f"the shipped limit on {listed([gate.metric for gate in left_out])} is left out: {why}"
        for why, left_out in without.items()
        if left_out
    ]


def in_force(gates: Sequence[Gate], output: str | None) -> list[Gate]:
    """The gates that hold for an output: those that name it, and those that name none, but where one of the same metric
    names it. Everything that looks at answers asks here, so that all apply the same limits.

    Args:
        output: None for what is of no output, such as a speedup.
    """
    named = {gate.metric for gate in gates if gate.output == output}
    return [gate for gate in gates if gate.output == output or (gate.output is None and gate.metric not in named)]


def that_held(gates: Sequence[Gate], checks: Sequence[Check]) -> tuple[Gate, ...]:
    """The gates without those that a check found missed or could not measure: what is waived has said so, and other
    answers are judged by the rest.

    A gate that names no output stays away from an output whose own gate is left out here, as it did before. Where
    nothing is waived, an output that no gate can judge must at least resemble the original's (`RESEMBLANCE`).
    """
    missed = [check.gate for check in checks if check.outcome is not Outcome.PASS]
    if not missed:
        return (*gates, RESEMBLANCE)
    own = {gate.metric for gate in missed if gate.output is not None}
    kept: list[Gate] = []
    for gate in (gate for gate in gates if gate not in missed):
        if gate.output is None and gate.metric in own:
            outputs = dict.fromkeys(check.output for check in checks if check.gate == gate)
            kept += [replace(gate, output=output) for output in outputs if output is not None]
        else:
            kept.append(gate)
    return tuple(kept)


def holds(gate: Gate, value: float, interval: tuple[float, float] | None = None, slack: float = 0.0) -> bool:
    """Whether what was measured holds the limit. The steps of a run ask this, and so does whoever reads their records.

    A speedup is resolved to ±2 %, so a candidate exactly at the limit must be able to pass: its interval may reach 2 %
    below the limit, if it reaches the limit at all. Of all else the `deciding` figure must be on the good side of the
    limit, or within `slack` of it.

    Args:
        interval: None where the value by itself decides.
    """
    if gate.metric == "speedup" and interval is not None:
        return interval[1] >= gate.limit and interval[0] >= (1 - RESOLUTION) * gate.limit
    value = deciding(gate, value, interval)
    return value <= gate.limit + slack if gate.direction == "at_most" else value >= gate.limit - slack


def deciding(gate: Gate, value: float, interval: tuple[float, float] | None) -> float:
    """The interval's worse end, or the value where that is worse still, or where there is no interval; NaN where that
    end is."""
    if interval is None:
        return value
    end = worse_end(gate, interval)  # first: Python's max and min give the first of two that can't be compared
    return max(end, value) if gate.direction == "at_most" else min(end, value)


def worse_end(gate: Gate, ends: tuple[float, float]) -> float:
    """Of an interval, as the gate sees it."""
    return ends[1] if gate.direction == "at_most" else ends[0]


def change_text(gate: Gate, value: float) -> str:
    """In words that fit a higher log loss and a lower accuracy alike."""
    if gate.options.get("drop") is None:
        return f"is {value:.4g}"
    if value == 0:
        return "does not change"
    share = " of the baseline's" if gate.options["drop"] == "max_relative_drop" else ""
    return f"gets {'worse' if value > 0 else 'better'} by {told_apart(abs(value), gate.limit)[0]}{share}"


def suits(gate: Gate, output: Array) -> bool:
    """Whether a gate that names no output looks at this one."""
    floats = output.dtype.kind == "f"
    if gate.metric in (*FLOAT_METRICS, *SIMILARITY_METRICS):
        return floats
    if gate.metric in CLASS_METRICS:
        return floats and has_classes(output, gate.options)
    if gate.metric in TOKEN_METRICS:
        return floats and output.ndim == 3
    return not floats if gate.metric == "agreement" else True
