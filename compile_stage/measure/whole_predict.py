"""A model's own predict() as a whole: with its network, and with the artifact in the network's place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.behaviour import all_apart, not_repeated
from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
from compile_stage.measure.original_cause import blame_original
from compile_stage.measure.predict import open_outputs
from compile_stage.measure.stats import F64, bootstrap, median
from compile_stage.measure.tolerance import elementwise_gates

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

PREDICT = "predict"
_REPEATED = 8  # batches that the original's predict() is asked twice
SPEEDUP = "predict_speedup"

Predict = Callable[[Mapping[str, "Array"], Callable[["Batch"], "Batch"] | None], Any]
"""(columns, the artifact or None for the network) → predict()'s answer."""


def predict_both(
    predict: Predict,
    run: Callable[[Batch], Batch],
    columns: Mapping[str, Array],
    batch_size: int,
    rounds: int,
    into: Path,
) -> dict[str, Any]:
    """Answers to all rows in calls of `batch_size`, and the seconds of calls of one batch, in turns.

    Returns:
        `original`, `compiled`: name → `.npy` file below `into`; `seconds`: `[rounds]` pairs (original, compiled);
        `rows`: of a timed call; `repeated`: how far the original's answers to the first batches are from those that it
        gave before (`measure.behaviour`).
    """
    count = len(next(iter(columns.values())))
    parts = [np.arange(start, start + batch_size) % count for start in range(0, count, batch_size)]
    given = {
        kind: [predict(_rows(columns, part), artifact) for part in parts]
        for kind, artifact in (("original", None), ("compiled", run))
    }
    again = [predict(_rows(columns, part), None) for part in parts[:_REPEATED]]
    repeated = all_apart(_joined(given["original"][: len(again)]), _joined(again))
    answers = {kind: _written(_joined(found), count, into / kind) for kind, found in given.items()}
    seconds = []
    for number in range(rounds):
        batch = _rows(columns, parts[number % len(parts)])
        pair = {}
        for kind, artifact in ((("original", None), ("compiled", run)), (("compiled", run), ("original", None)))[
            number % 2
        ]:
            began = time.perf_counter()
            predict(batch, artifact)
            pair[kind] = time.perf_counter() - began
        seconds.append([pair["original"], pair["compiled"]])
    return {**answers, "seconds": seconds, "rows": batch_size, "repeated": repeated}


def judge_predict(gates: Sequence[Gate], answers: Mapping[str, Any], seed: int) -> list[Check]:
    """The gates on what predict() answers, those of all outputs: `agreement` looks at labels and texts, the others at
    numbers. A gate that is left out because it names an output of the network does not apply here. Where the original's
    predict() does not repeat its own answers, each gate that failed says so."""
    own, original = open_outputs(answers["compiled"]), open_outputs(answers["original"])
    general = [gate for gate in elementwise_gates(gates, has_labels=True, few_rows=False) if gate.output is None]
    checks = check_outputs(general, own, original, SINGLE_CALL, batch_size=0, seed=seed)
    judged = [replace(check, batch_size=None, reason=f"predict(): {check.reason}") for check in checks]
    if by_chance := not_repeated(answers):
        cause = f"its predict() does not repeat its answers ({by_chance}): log one without chance in it"
        judged = list(blame_original(judged, cause))
    return [*judged, _speedup(answers["seconds"], answers["rows"], seed)]


def _speedup(seconds: Sequence[Sequence[float]], rows: int, seed: int) -> Check:
    pairs = np.sort([before / after for before, after in seconds])

    def middle(weights: F64) -> F64:
        """The median of the drawn pairs, which a call that was interrupted does not move."""
        return np.asarray(
            pairs[np.argmax(np.cumsum(weights, axis=1) >= weights.sum(axis=1, keepdims=True) / 2, axis=1)]
        )

    ratio = float(middle(np.ones((1, len(pairs))))[0])
    interval = bootstrap(middle, len(pairs), seed=seed)
    ends = (interval.low, interval.high) if interval is not None else None
    before, after = (median([pair[side] for pair in seconds]) * 1e3 for side in (0, 1))
    spread = f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
    reason = (
        f"predict() of {rows} row{'s' if rows != 1 else ''} is {ratio:.2f} times as fast as with the original network"
        f"{spread}: "
        f"{before:.3g} ms before, {after:.3g} ms after, {len(pairs)} calls of each in turns; no limit is set on it"
    )
    gate = Gate(metric=SPEEDUP, limit=0.0, direction="at_least", unit="ratio")
    return Check(gate=gate, outcome=Outcome.PASS, measured=ratio, reason=reason, interval=ends, samples=len(pairs))


def _rows(columns: Mapping[str, Array], rows: Array) -> dict[str, Array]:
    return {name: values[rows] for name, values in columns.items()}


def _joined(parts: Sequence[Any]) -> dict[str, Array]:
    """The answers to several calls as one, by name."""
    if all(isinstance(part, list) for part in parts):  # whose rows may have one form together only
        return arrays_of([row for part in parts for row in part])
    named = [arrays_of(part) for part in parts]
    return {name: np.concatenate([part[name] for part in named]) for name in named[0]}


def _written(answers: Mapping[str, Array], count: int, into: Path) -> dict[str, str]:
    """Each column of the answers as a `.npy` file; the copies that filled the last batch are dropped."""
    into.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, (name, rows) in enumerate(answers.items()):
        files[name] = str(into / f"{number}.npy")
        np.save(files[name], rows[:count], allow_pickle=False)
    return files


def arrays_of(answer: Any) -> dict[str, Array]:
    """predict()'s answer by name: a data frame's columns, a dict's values, what a list's rows have in common, or the
    answer itself."""
    if hasattr(answer, "columns"):
        return {f"predict() {name}": _plain(answer[name].to_numpy()) for name in answer.columns}
    if isinstance(answer, Mapping):
        return {f"predict() {name}": _plain(np.asarray(value)) for name, value in answer.items()}
    if hasattr(answer, "detach"):
        answer = answer.detach().cpu().numpy()
    if isinstance(answer, list | tuple):
        return _by_place("predict()", list(answer))
    return {"predict()": _plain(np.asarray(answer))}


def _by_place(name: str, rows: list[Any]) -> dict[str, Array]:
    """Rows of one form, such as `[{"label": "a", "score": 0.9}, {...}]` each, as an array for each place in it, so that
    a number is compared as a number and a label as a label. Rows of different forms as texts."""
    if rows and all(isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows):
        places: list[Any] = list(rows[0])
    elif rows and all(isinstance(row, list | tuple) and len(row) == len(rows[0]) for row in rows):
        kinds = {type(item) for row in rows for item in row}
        if not kinds & {dict, list, tuple} and not (str in kinds and len(kinds) > 1):
            return {name: _plain(np.asarray(rows))}
        places = list(range(len(rows[0])))
    else:
        nested = any(isinstance(row, Mapping | list | tuple) for row in rows)
        return {name: np.array([str(row) for row in rows]) if nested else _plain(np.asarray(rows))}
    found: dict[str, Array] = {}
    for place in places:
        found |= _by_place(f"{name} {place}", [row[place] for row in rows])
    return found


def _plain(values: Array) -> Array:
    if values.dtype != object:
        return values
    stacked = np.asarray(values.tolist())
    return stacked if stacked.dtype.kind in "biufU" else np.array([str(value) for value in values])
