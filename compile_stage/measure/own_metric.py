"""Metrics of the user's own: `python:package.module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import F64, Measured, NotMeasurableError
from compile_stage.measure.stats import bootstrap

if TYPE_CHECKING:
    from compile_stage.core.records import Gate
    from compile_stage.core.tensors import Array

_FAILS = (Exception, SystemExit)
"""What a user's code may raise. A script that is imported, and ends in `sys.exit()`, must not end the run with its exit
code: that would be read as the verdict."""

RESAMPLES = 1000
"""Calls of a function that answers with one number; 400 more, at most, tell how skewed it is (`measure.stats`)."""


def measure_own(
    gate: Gate,
    own: Array,
    expected: Array,
    labels: Array | None,
    *,
    seed: int,
    groups: NDArray[np.int64] | None = None,
) -> Measured:
    """A user's function of (candidate, baseline, labels), all `[n, ...]`.

    It answers with one number, or with `[n]` numbers whose mean counts. With the gate's confidence, one number has the
    interval of a paired bootstrap: the function is called with the same resampled samples of all three, in groups where
    there are any.

    Raises NotMeasurableError when it can't be imported or called, or when no interval can be had.
    """
    function = _imported(gate.metric)
    answer = _called(gate.metric, function, own, expected, labels)
    if answer.ndim == 1 and len(answer) == len(expected):
        return Measured(float(answer.mean()), parts=answer)
    if answer.ndim:
        raise NotMeasurableError(
            f"{gate.metric} answered with an array {list(answer.shape)}; one number, or one for each of "
            f"{len(expected)} samples, is wanted"
        )
    value = float(answer)
    if gate.confidence is None or np.isnan(value):
        return Measured(value)
    return Measured(value, interval=_interval(gate, function, (own, expected, labels), seed, groups))


def _interval(
    gate: Gate,
    function: Callable[..., Any],
    samples: tuple[Array, Array, Array | None],
    seed: int,
    groups: NDArray[np.int64] | None,
) -> tuple[float, float]:
    held = [None if array is None else np.asarray(array) for array in samples]
    count, raised = len(samples[1]), ""

    def of(weights: F64) -> F64:
        nonlocal raised
        values = np.full(len(weights), np.nan)
        for place, drawn in enumerate(weights):
            rows = np.repeat(np.arange(count), drawn.astype(np.int64))
            try:
                values[place] = float(function(*(array if array is None else array[rows] for array in held)))
            except _FAILS as error:
                values[place] = np.nan  # a resample of one class alone, say; one in ten may be undefined
                raised = f"; the last one raised {_words(error)}"
        return values

    with np.errstate(all="ignore"):
        interval = bootstrap(
            of, count, seed=seed, confidence=gate.confidence or 0.95, resamples=RESAMPLES, groups=groups
        )
    if interval is None:
        raise NotMeasurableError(
            f"{gate.metric} has no value on more than one resample of {count} samples in ten, so it has no interval"
            f"{raised}"
        )
    if interval.low == interval.high:
        raise NotMeasurableError(
            f"{gate.metric} is {interval.value:.4g} on every resample, which says nothing of other samples: leave "
            "`confidence` out, or return one value for each sample, between 0 and 1 where that can be"
        )
    return interval.low, interval.high


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.removeprefix("python:").partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotMeasurableError(f"{path} can't be imported: {error}; put its folder on PYTHONPATH") from error
    except _FAILS as error:
        raise NotMeasurableError(f"{path} can't be imported: its module raised {_words(error)}") from error
    return function


def _called(path: str, function: Callable[..., Any], own: Array, expected: Array, labels: Array | None) -> F64:
    try:
        return np.asarray(function(own, expected, labels), dtype=np.float64)
    except _FAILS as error:
        raise NotMeasurableError(f"{path} raised {_words(error)}") from error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
