"""Whether answers are those of the original at all, where none of the policy's gates can tell.

Calls and samples beyond the validation set have no labels. An output that a policy limits by labels alone would be
compared with nothing there, and any answer would hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compile_stage.core.records import Gate
from compile_stage.measure.elementwise import Measured, distances

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

FURTHEST = 0.7
"""However wide its limits, a row may not be further off than this share of the original's: an answer of zeros is off by
1, an unrelated one by 1.4."""

UNJUDGED_ROWS = 0.5
"""So many rows may be off of an output that no elementwise gate looks at: where the policy cares for labels or its own
metric alone, boxes may come in another order, and scores may be scaled."""

RESEMBLES = "rows_off"
"""The metric of `RESEMBLANCE`: the share of rows that are not those of the original."""

RESEMBLANCE = Gate(metric=RESEMBLES, limit=UNJUDGED_ROWS, direction="at_most")
"""Holds for the outputs that no other gate looks at."""


def measure_resemblance(a: Array, b: Array) -> Measured:
    """The share of rows that are off, of candidate `a` and the original's `b`, both `[rows, ...]` of one shape.

    A row of floats is off where the norm of the difference is more than `FURTHEST` of its own norm, or of the usual
    one, or where it is finite on one side only. Any other row is off where most of its elements differ. One row may
    always be off: of one row no share says anything.
    """
    if b.dtype.kind == "f":
        d = distances(a, b)
        size, apart = np.sqrt(d.norm_b) * d.peak_b, np.sqrt(d.noise) * d.max_abs
        usual = float(np.sqrt(np.mean(size * size)))
        off = (d.strange > 0) | ~(apart <= FURTHEST * np.maximum(size, usual))
    else:
        off = np.asarray(a != b).reshape(len(b), -1).mean(axis=1) > UNJUDGED_ROWS
    count = int(off.sum())
    share = count / len(b) if count > 1 else 0.0
    note = f"{count} of {len(b)} rows are off by more than {FURTHEST:g} of the answer's size; no gate judges it"
    return Measured(share, off.astype(np.float64), note)
