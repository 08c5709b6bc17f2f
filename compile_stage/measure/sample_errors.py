"""How far each output of a candidate is from the original's, sample by sample: what a report shows beside the verdict.

No gate reads this: what decides is in `measure.metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.core.records import OutputErrors, WorstAnswer
from compile_stage.measure.elementwise import F64, distances

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

WORST = 3
"""Samples that are shown of an output."""

MOST_ELEMENTS = 50_000_000
"""Of an output: beyond this the second look at it would cost as much as the checks themselves."""

_SHOWN = 4  # values of an answer that is not one row of scores
_MOST_CLASSES = 100_000


def errors_of(candidate: Mapping[str, Array], original: Mapping[str, Array]) -> tuple[OutputErrors, ...]:
    """The errors of each output that both have in one shape, `[samples, ...]`, in the original's order. Outputs of more
    than `MOST_ELEMENTS` are left out."""
    return tuple(
        OutputErrors(output=name, errors=tuple(_three_digits(errors)), worst=_worst(errors, candidate[name], expected))
        for name, expected in original.items()
        if name in candidate and candidate[name].shape == expected.shape
        if expected.ndim and 0 < expected.size <= MOST_ELEMENTS
        for errors in [_errors(candidate[name], expected)]
    )


def _errors(own: Array, expected: Array) -> F64:
    """`[samples]`, as `OutputErrors.errors` says."""
    if expected.dtype.kind != "f" or own.dtype.kind != "f":
        differ: F64 = np.asarray(own != expected).reshape(len(expected), -1).mean(axis=1, dtype=np.float64)
        return differ
    d = distances(own, expected)
    noise, signal = np.sqrt(d.noise) * d.max_abs, np.sqrt(d.norm_b) * d.peak_b
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(noise == 0, 0.0, noise / signal)
    result: F64 = np.where(d.strange > 0, np.inf, relative)
    return result


def _worst(errors: F64, own: Array, expected: Array) -> tuple[WorstAnswer, ...]:
    order = np.argsort(-errors, kind="stable")[:WORST]
    return tuple(
        WorstAnswer(
            sample=int(at),
            error=float(f"{errors[at]:.3g}"),
            original=answer_in_words(expected[at]),
            candidate=answer_in_words(own[at]),
        )
        for at in order
        if errors[at] > 0
    )


def answer_in_words(answer: Array) -> str:
    """`largest at 3: 0.98` of a row of scores, the values themselves of a few, the first of many."""
    flat = np.asarray(answer).reshape(-1)
    if answer.ndim == 1 and flat.dtype.kind == "f" and 2 <= len(flat) <= _MOST_CLASSES and np.isfinite(flat).all():
        place = int(np.argmax(flat))
        return f"largest at {place}: {flat[place]:.4g}"
    shown = ", ".join(f"{value:.4g}" if flat.dtype.kind == "f" else str(value)[:40] for value in flat[:_SHOWN].tolist())
    return f"{shown}, ..." if len(flat) > _SHOWN else shown


def _three_digits(errors: F64) -> list[float]:
    """More digits are of no use to a chart, and four times the size of the file."""
    return [float(f"{error:.3g}") for error in errors]
