"""Answers of two predict()s to the same rows: the published model's, and the original's.

The artifact is proven by what it answers tensor by tensor. What stands around it when it is served (columns, labels'
types, params, which output is answered) is seen here only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.measure.predict_turns import ARRAY, read_item
from compile_stage.measure.resemblance import UNJUDGED_ROWS, measure_resemblance

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_TEXT = "text"


def refuse_answers(original: Mapping[str, str] | None, published: Mapping[str, str] | None) -> str | None:
    """Why the published predict() does not answer as the original's does; None where it does, or one of them was not
    asked.

    The limits are those of answers that no gate looks at (`measure.resemblance`): of the rows at most half, and one,
    may be off. The gates themselves are held where the artifact is validated.

    Args:
        original, published: As `measure.predict_turns.answer_parts`.
    """
    if original is None or published is None:
        return None
    if set(original) != set(published):
        return f"it answers {_listed(published)}, and the original {_listed(original)}"
    for name, text in original.items():
        of, kinds = f" of {name}" if name else "", {_kind(text), _kind(published[name])}
        if "" in kinds or kinds == {_TEXT}:
            continue
        if len(kinds) > 1:
            return f"its answer{of} is {_kind(published[name])}, and the original's {_kind(text)}"
        was, now = (np.atleast_1d(read_item(part)) for part in (text, published[name]))
        if was.size != now.size or len(was) != len(now):
            return f"its answer{of} has the shape {list(now.shape)}, and the original's {list(was.shape)}"
        was, now = (values.reshape(len(was), -1) for values in (was, now))
        if "f" in (was.dtype.kind, now.dtype.kind):
            was, now = was.astype(np.float64), now.astype(np.float64)
        found = measure_resemblance(now, was)
        if found.value > UNJUDGED_ROWS:
            rows = found.badness if found.badness is not None else np.ones(len(was))
            off = int(np.flatnonzero(rows)[0])
            return (
                f"its answer{of} is another one in {int(rows.sum())} of {len(was)} rows: "
                f"{_first(now[off])} where the original's is {_first(was[off])}"
            )
    return None


def _kind(part: str) -> str:
    """`numbers`, `text`, or empty for what is not compared."""
    return "numbers" if part.startswith(ARRAY) else part


def _listed(parts: Mapping[str, str]) -> str:
    return ", ".join(map(repr, sorted(parts))) if any(parts) else "one array"


def _first(row: Array) -> str:
    shown = ", ".join(f"{value:.4g}" for value in row[:3].tolist())
    return f"{shown}, ..." if len(row) > 3 else shown
