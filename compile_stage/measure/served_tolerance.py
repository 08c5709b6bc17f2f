"""How far answers of one model may be apart in two processes on one machine."""

from __future__ import annotations

from compile_stage.core.capabilities import SOURCE_PRECISION

SERVED_TOLERANCE = 1e-3
"""Of the largest value of an output: what the order of a sum may change. It is the shipped tolerance of fp32."""


def served_tolerance(precision: str) -> float:
    """Of an artifact in that precision: ten times as much in a lower one, where one rounding may fall otherwise."""
    return SERVED_TOLERANCE if precision == SOURCE_PRECISION else 10 * SERVED_TOLERANCE
