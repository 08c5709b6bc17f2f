"""How many times its tolerance a check used: what answers to other samples than those of the policy are judged by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.classes import LOOKS_LIKE_SCORES
from compile_stage.measure.columns import COLUMN_METRICS
from compile_stage.measure.resemblance import RESEMBLES
from compile_stage.measure.similarity import SIMILARITY_METRICS
from compile_stage.measure.structure import STRUCTURE

_CHANGED_ROWS = 2
"""So many rows may have another label, however few there are: one row of eight is no share of anything."""

_MEANS_ONLY = ("python:", "token_")
"""Metrics whose intervals say nothing of few rows, or take a thousand calls."""

_DEAD = {"column_nrmse": 0.95, "top1_regret": 0.9, "column_spread": 0.02, "max_rel": 0.95}
"""Where a metric says that the answer has nothing of the baseline's, whatever multiple of the tolerance that is."""


def elementwise_gates(gates: Iterable[Gate], *, has_labels: bool, few_rows: bool) -> tuple[Gate, ...]:
    """The gates that can judge samples without labels.

    Args:
        has_labels: Of the policy's samples: an own metric may then want them.
        few_rows: Gates on the spread over samples, and on classes, are left out too.
    """
    return tuple(
        replace(gate, confidence=None) if gate.metric.startswith(_MEANS_ONLY) else gate
        for gate in gates
        if "drop" not in gate.options
        and not (few_rows and gate.metric in (*COLUMN_METRICS, *SIMILARITY_METRICS, LOOKS_LIKE_SCORES))
        and not (has_labels and gate.metric.startswith("python:"))
    )


def tolerance_used(check: Check) -> float:
    """1 at the limit of its gate, 2 for twice the error, infinite for a failure of structure or a dead answer; 0 for
    what could not be measured, which other checks say."""
    gate, value = check.gate, check.measured
    if check.outcome is Outcome.NOT_RUN or value is None:
        return 0.0
    if gate.metric in ("outputs", "shape", "finite", RESEMBLES):
        return math.inf if check.outcome is Outcome.FAIL else 0.0
    if gate.metric == "samples":
        return 0.0
    if gate.metric in _DEAD and (
        value >= _DEAD[gate.metric] if gate.direction == "at_most" else value <= _DEAD[gate.metric]
    ):
        return math.inf
    return _used(gate, value, check.samples)


def worst(checks: Sequence[Check]) -> tuple[float, Check]:
    """The check that used most of its tolerance, and how much; of several that used as much, one of a gate: it says
    what was compared."""
    return max(
        ((tolerance_used(check), check) for check in checks),
        key=lambda pair: (pair[0], pair[1].outcome is not Outcome.NOT_RUN and pair[1].gate.metric not in STRUCTURE),
    )


def times_text(used: float) -> str:
    """The end of a sentence; empty where no multiple of the tolerance says it."""
    return f": {used:.3g} times the tolerance" if math.isfinite(used) else ""


def _used(gate: Gate, value: float, rows: int) -> float:
    own = gate.metric.startswith("python:")  # whatever its name holds: a cosine distance is no cosine
    if gate.unit == "dB":  # an amplitude: 6 dB less is twice the error
        return float(10 ** ((gate.limit - value) / 20)) if value > -math.inf else math.inf
    if "cosine" in gate.metric and not own:  # 1 - cosine is a power
        return _over(math.sqrt(max(1 - value, 0)), math.sqrt(max(1 - gate.limit, 0)))
    if gate.metric == "token_kl":  # a divergence grows with the square of the logits' error
        return _over(math.sqrt(max(value, 0)), math.sqrt(gate.limit))
    if gate.metric.endswith("agreement") and not own:
        return _over(1 - value, max(1 - gate.limit, _CHANGED_ROWS / max(rows, 1)))
    return _times(-value, -gate.limit) if gate.direction == "at_least" else _times(value, gate.limit)


def _times(value: float, limit: float) -> float:
    """Of the largest value that is allowed. Below zero twice the tolerance is half of the magnitude: -0.5 of a limit of
    -1."""
    if limit < 0:
        return limit / value if value < 0 else math.inf
    return _over(value, limit)


def _over(error: float, allowed: float) -> float:
    """An error of nothing is within any tolerance."""
    if error <= 0:
        return 0.0
    return error / allowed if allowed > 0 else math.inf
