"""Answers of two predict()s to the same rows: the published model's, and the original's.

The artifact is proven by what it answers tensor by tensor. What stands around it when it is served (columns, labels'
types, params, which output is answered) is seen here only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.core.records import Gate
from compile_stage.measure.behaviour import refuse_call
from compile_stage.measure.predict_turns import ARRAY, read_item
from compile_stage.measure.resemblance import UNJUDGED_ROWS, measure_resemblance
from compile_stage.measure.tolerance import elementwise_gates

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_TEXT = "text"
_SAME = 1e-3
"""Of its size: predict() answers an output as it is where its answer and the output's are no further apart. The same
model computes both, in batches of other sizes."""


def refuse_answers(
    original: Mapping[str, Mapping[str, str]],
    published: Mapping[str, Mapping[str, str]],
    gates: Sequence[Gate] = (),
    outputs: Mapping[str, Array] | None = None,
) -> str | None:
    """Why the published predict() does not answer as the original's does; None where it does, or where there is no
    number of rows that both answered.

    An answer that is an output of the model, by its numbers, is held to the gates of that output, with twice their
    tolerance. Any other may have been computed from several outputs: the limits are those of answers that no gate looks
    at (`measure.resemblance`), of the rows at most half, and one, may be off.

    Args:
        original, published: As `measure.predict_turns.answer_parts`.
        gates: Of the published model's job.
        outputs: Output name → what the original answers to the samples that predict() was given, axis 0 being the
            sample.
    """
    for rows in sorted(original.keys() & published.keys(), key=int, reverse=True):
        answered = {name: _first_rows(array, int(rows)) for name, array in (outputs or {}).items()}
        if (reason := _refuse_parts(original[rows], published[rows], gates, answered)) is not None:
            return reason
    return None


def _refuse_parts(
    original: Mapping[str, str], published: Mapping[str, str], gates: Sequence[Gate], outputs: Mapping[str, Array]
) -> str | None:
    if set(original) != set(published):
        return f"it answers {_listed(published)}, and the original {_listed(original)}"
    numbers = []
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
        if (reason := _another(was, now)) is not None:
            return f"its answer{of} is another one in {reason}"
        numbers.append((of, was, now))
    # An output may be answered as a data frame of its columns.
    if len(numbers) > 1 and len({len(was) for _, was, _ in numbers}) == 1:
        was, now = (np.concatenate([one[side] for one in numbers], axis=1) for side in (1, 2))
        numbers.append(("", was, now))
    for of, was, now in numbers:
        for output, answers in outputs.items():
            if _is_output(was, answers) and (reason := _beyond_gates(gates, output, now, answers)):
                return f"its answer{of} is off: {reason}"
    return None


def _another(was: Array, now: Array) -> str | None:
    """In how many of the rows, `[n, k]` both, it is another answer at all; None where that is in few."""
    found = measure_resemblance(now, was)
    if found.value <= UNJUDGED_ROWS:
        return None
    rows = found.badness if found.badness is not None else np.ones(len(was))
    off = int(np.flatnonzero(rows)[0])
    return f"{int(rows.sum())} of {len(was)} rows: {_first(now[off])} where the original's is {_first(was[off])}"


def _is_output(was: Array, answers: Array) -> bool:
    """Whether predict() of the original answers that output of the model as it is."""
    if answers.dtype.kind != "f" or was.size != answers.size:
        return False
    apart = np.abs(was.reshape(answers.shape) - answers.astype(np.float64))
    return bool(np.all(apart <= _SAME * np.max(np.abs(answers), initial=0.0)))


def _beyond_gates(gates: Sequence[Gate], output: str, now: Array, answers: Array) -> str:
    """Why the answer does not hold the gates of that output; empty where it does."""
    suited = [
        gate for gate in elementwise_gates(gates, has_labels=True, few_rows=True) if gate.output in (None, output)
    ]
    own = now.reshape(answers.shape).astype(answers.dtype)
    return refuse_call(suited, {output: own}, {output: answers}, len(answers), 0)


def _first_rows(array: Array, rows: int) -> Array:
    """The samples that predict() was given (`measure.predict_turns.build_input`): again from the first on, where there
    are fewer."""
    return np.asarray(array[np.arange(rows) % len(array)])


def _kind(part: str) -> str:
    """`numbers`, `text`, or empty for what is not compared."""
    return "numbers" if part.startswith(ARRAY) else part


def _listed(parts: Mapping[str, str]) -> str:
    return ", ".join(map(repr, sorted(parts))) if any(parts) else "one array"


def _first(row: Array) -> str:
    shown = ", ".join(f"{value:.4g}" for value in row[:3].tolist())
    return f"{shown}, ..." if len(row) > 3 else shown
