"""Calls of a model's predict() that take turns with those of another process.

It is loaded by its path in the process that holds a published model, where `compile_stage` is that model's own copy:
so it imports nothing of the package, and pandas only where predict() is given a data frame.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

RUNS = 9
LEAST_RUNS = 3
RUNS_S = 0.5
WARM_UP_CALLS = 5
WARM_UP_S = 0.2
QUICK_S = 0.02  # calls shorter than this are preceded by one that is not timed: the other process had the caches
_SETTLE_S = 0.25
ARRAY = "npy:"  # as `serving.predictions` writes arrays among texts
COMPARED_ROWS = 16
_LONG_S = 2.0  # a call of more rows takes several times as long
_MOST_VALUES = 1_000_000  # of a part of an answer


def build_input(how: Mapping[str, Any], arrays: Mapping[str, Any], rows: int) -> Any:
    """One input of predict(), of so many rows.

    Args:
        how: `kind`, and with `frame` its `columns` (pairs of name and NumPy type; None keeps the samples' type) and
            the `fills` of missing texts (column → kind of missing text → the text in its place), if any, with `array`
            and `dict` the `dtypes` of the inputs by name, with `items` the `texts`, the data frame's `column`
            (empty for a list) and `pair` (a second one, with each text one place further; empty for none), and `each`
            where they are given one by one.
        arrays: Input name → samples, axis 0 being the sample; not used for `items`.

    Raises:
        ValueError: The samples do not fill the columns, or a value does not fit a column's type.
    """
    if how["kind"] == "items":
        items = [read_item(text) for text in how["texts"]]
        if how["each"]:
            return items[0]
        chosen = [items[number % len(items)] for number in range(rows)]
        pairs = {how["pair"]: chosen[1:] + chosen[:1]} if how.get("pair") else {}
        return _frame({how["column"]: chosen, **pairs}) if how["column"] else chosen
    count = len(next(iter(arrays.values())))
    batch = {name: np.ascontiguousarray(values[np.arange(rows) % count]) for name, values in arrays.items()}
    if how["kind"] == "frame":
        return _frame(_with_missing(_columns(how["columns"], batch), how.get("fills") or {}))
    typed = {name: _cast(name, values, how["dtypes"].get(name)) for name, values in batch.items()}
    return typed if how["kind"] == "dict" else next(iter(typed.values()))


def answer_parts(
    predict: Callable[[Any], Any], how: Mapping[str, Any], arrays: Mapping[str, Any], rows: int, call_s: float
) -> dict[str, dict[str, str]]:
    """What predict() answers to so many rows, and to `COMPARED_ROWS` where that does not take long: number of rows, as
    text → the parts of the answer. A number that is refused is left out: a model may be fixed to another.

    A part is numbers as `npy:` and base64, `text` of texts, empty of whatever else; by column, by key, or "" for an
    answer of one part.

    Args:
        rows: Of the calls that are timed.
        call_s: Seconds of such a call.
    """
    if how["kind"] == "items":  # answers to texts, pictures and recordings are compared elsewhere
        return {}
    answers = {}
    for count in {rows, COMPARED_ROWS} if call_s <= _LONG_S else {rows}:
        try:
            answer = predict(build_input(how, arrays, count))
        except Exception:  # noqa: BLE001, S112 - its own answers to the rows of the target are proven in `run`
            continue
        answers[str(count)] = {name: _written(values) for name, values in _named(answer).items()}
    return answers


def _named(answer: Any) -> Mapping[str, Any]:
    if hasattr(answer, "columns"):
        return {str(name): answer[name] for name in answer.columns}
    return {str(name): values for name, values in answer.items()} if isinstance(answer, Mapping) else {"": answer}


def _written(values: Any) -> str:
    try:
        part = np.asarray(values)
        if part.dtype == object and part.size <= _MOST_VALUES:  # of pandas, whose cells may be arrays too
            part = np.asarray(part.tolist())
    except ValueError:  # rows of different lengths
        return ""
    if part.dtype.kind == "U":
        return "text"
    if part.dtype.kind not in "biuf" or part.size > _MOST_VALUES:
        return ""
    buffer = io.BytesIO()
    np.save(buffer, part, allow_pickle=False)
    return ARRAY + base64.b64encode(buffer.getvalue()).decode()


class PredictTurns:
    """predict() with one input, warm.

    Attributes:
        call_s: Seconds of the last call of the warm-up.
    """

    def __init__(self, predict: Callable[[Any], Any], given: Any) -> None:
        self._predict, self._given = predict, given
        began = time.perf_counter()
        for _ in range(WARM_UP_CALLS):
            self.call_s = self._call()
            if time.perf_counter() - began > WARM_UP_S:
                break

    def turn(self) -> float:
        """Seconds of one call; when it returns, the runtime's threads are at rest."""
        if self.call_s < QUICK_S:
            self._call()
        seconds = self._call()
        _settle()
        return seconds

    def time_runs(self, run: Callable[[Any], Any], batch: Any) -> list[float]:
        """Seconds of calls of the artifact by itself: as many as fit in `RUNS_S`, at least `LEAST_RUNS` and at most
        `RUNS`, after one that is not timed.

        Args:
            run: Of the published model, without predict().
            batch: What it is given.
        """
        ends, taken = time.perf_counter() + RUNS_S, list[float]()
        run(batch)
        while len(taken) < LEAST_RUNS or (len(taken) < RUNS and time.perf_counter() < ends):
            began = time.perf_counter()
            run(batch)
            taken.append(time.perf_counter() - began)
        _settle()
        return taken

    def _call(self) -> float:
        began = time.perf_counter()
        self._predict(self._given)
        return time.perf_counter() - began


def _columns(wanted: list[list[Any]], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Each column by its own name, or those of the one matrix in order."""
    names = [name for name, _ in wanted]
    if all(name in batch for name in names):
        found = {name: batch[name] for name in names}
    else:
        matrix = next(iter(batch.values()))
        flat = matrix.reshape(len(matrix), -1)
        if len(batch) != 1 or flat.shape[1] != len(names):
            message = f"the model's samples do not fill its data frame of {len(names)} columns"
            raise ValueError(message)
        found = {name: flat[:, number] for number, name in enumerate(names)}
    return {name: _cast(name, _cells(found[name]), dtype) for name, dtype in wanted}


def _with_missing(columns: dict[str, Any], fills: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """With every second of the texts that missing ones are filled in with missing: the answers stay the same."""
    for name, fill in fills.items():
        if "NaN" in fill:
            columns[name][np.flatnonzero(columns[name] == fill["NaN"])[::2]] = np.nan
    return columns


def _cells(values: Any) -> Any:
    if values.ndim == 1 or values.size == len(values):
        return values.reshape(-1)
    return list(values)


def _cast(name: str, values: Any, dtype: str | None) -> Any:
    if dtype is None or isinstance(values, list):
        return values
    if dtype == "str":
        return values.astype(object)
    cast = values.astype(dtype)
    if values.dtype.kind == "f" and cast.dtype.kind in "iu" and not np.array_equal(cast, values):
        message = f"the samples of {name!r} do not fit its type {dtype}"
        raise ValueError(message)
    return cast


def _frame(columns: Mapping[str, Any]) -> Any:
    import pandas as pd

    return pd.DataFrame(dict(columns))


def read_item(text: str) -> Any:
    """A text as it is, or the array that it holds behind `npy:`."""
    if not text.startswith(ARRAY):
        return text
    return np.load(io.BytesIO(base64.b64decode(text.removeprefix(ARRAY))), allow_pickle=False)


def _settle() -> None:
    """As `measure.timing.settle`: threads of a runtime wait for the next call in a busy loop."""
    ends = time.perf_counter() + _SETTLE_S
    while time.perf_counter() < ends:
        began, used = time.perf_counter(), time.process_time()
        time.sleep(0.002)
        if time.process_time() - used < 0.2 * (time.perf_counter() - began):
            return
