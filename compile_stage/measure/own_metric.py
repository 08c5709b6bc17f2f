"""Metrics of the user's own: `python:package.module:function`.

They run in the stage's process, which no guard ends. So each is called in a thread of its own, and nobody waits for one
that does not end.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import F64, Measured, NotMeasurableError
from compile_stage.measure.skewed_means import interval_of_any

if TYPE_CHECKING:
    from compile_stage.core.records import Gate
    from compile_stage.core.tensors import Array

_FAILS = (Exception, SystemExit)
"""What a user's code may raise. A script that is imported, and ends in `sys.exit()`, must not end the run with its exit
code: that would be read as the verdict."""

RESAMPLES = 1000
"""Calls of a function that answers with one number; 400 more, at most, tell how skewed it is (`measure.stats`)."""

DEFAULT_S = 900.0
"""For one metric of one output, where no caller says how long it may take: what `budget.job_minutes` is by default."""


@dataclass
class _Allowance:
    """Seconds for all own metrics of one verdict: one that does not end is not waited for again at every batch size."""

    seconds: float
    left_s: float


@dataclass(eq=False)
class _Call:
    """One metric in its thread.

    Attributes:
        settled: It has ended, or nobody waits for it any more.
        ended: It has ended by itself.
    """

    settled: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    answer: Any = None
    error: BaseException | None = None


class _NobodyWaitsError(BaseException):
    """Ends the Python code of a metric that nobody waits for. No Exception, or it would be taken for one of the
    user's."""


Answer = TypeVar("Answer")

_ALLOWANCE: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)
_running: set[_Call] = set()
_LONGEST_PAUSE_S = 5.0  # native code may go on for hours


@contextmanager
def allowed(seconds: float) -> Iterator[None]:
    """All own metrics that this thread measures within the context may take so many seconds together; those that do not
    end by then are not measurable."""
    token = _ALLOWANCE.set(_Allowance(seconds, seconds))
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)


def stop_waiting() -> None:
    """Own metrics that are under way, in any thread, are not waited for any more: the run ends."""
    for call in tuple(_running):
        call.settled.set()


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

    Raises NotMeasurableError when it can't be imported or called, does not end within what is `allowed`, or when no
    interval can be had.
    """
    return _in_time(gate.metric, lambda: _measured(gate, own, expected, labels, seed, groups))


def unusable(metric: str) -> str | None:
    """None where the function of an own metric can be imported, within what is `allowed`, or the reason."""
    try:
        function = _in_time(metric, lambda: _imported(metric))
    except NotMeasurableError as error:
        return str(error)
    return None if callable(function) else f"{metric} is no function, but {type(function).__name__}"


def _in_time(path: str, ask: Callable[[], Answer]) -> Answer:
    allowance = _ALLOWANCE.get() or _Allowance(DEFAULT_S, DEFAULT_S)
    call, context, began = _Call(), copy_context(), time.monotonic()

    def work() -> None:
        with suppress(_NobodyWaitsError):  # it may come when all is done
            try:
                call.answer = context.run(ask)
            except BaseException as error:  # noqa: BLE001 - raised again by who waits
                call.error = error
            call.ended = True
            call.settled.set()

    thread = threading.Thread(target=work, name=f"metric {path}", daemon=True)  # the program ends without it
    _running.add(call)
    try:
        thread.start()
        in_time = call.settled.wait(allowance.left_s)
    finally:
        _running.discard(call)
        took_s, ended = time.monotonic() - began, call.ended
        allowance.left_s = max(0.0, allowance.left_s - took_s) if ended else 0.0
        if not ended and thread.is_alive():
            _end(thread, call)
    if not ended:
        why = "the run was ended" if in_time else f"it did not end within {allowance.seconds:.3g} s"
        advice = "" if in_time else "; make it faster, or raise budget.job_minutes"
        raise NotMeasurableError(f"{path} was not waited for: {why}{advice}")
    if call.error is not None:
        raise call.error
    answer: Answer = call.answer
    return answer


def _end(thread: threading.Thread, call: _Call) -> None:
    """Python code ends at its next line. A call into native code, or a sleep, ends first.

    It is asked again until it has ended: what is raised within a finalizer or a callback of the garbage collector is
    lost, and a function may catch it.
    """

    def ask() -> None:
        pause_s = 0.1
        while thread.is_alive() and not call.ended:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_NobodyWaitsError)
            )
            thread.join(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    threading.Thread(target=ask, name=f"end of {thread.name}", daemon=True).start()


def _measured(
    gate: Gate,
    own: Array,
    expected: Array,
    labels: Array | None,
    seed: int,
    groups: NDArray[np.int64] | None,
) -> Measured:
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
        interval = interval_of_any(
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
