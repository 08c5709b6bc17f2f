"""Whether a model's own predict() answers in a new process as here.

Every process of Python has another `hash()` of texts, and another order of sets of texts, unless PYTHONHASHSEED is set.
Workers have that set, servers don't: a predict() that makes numbers of texts by `hash()` is proven here, and answers
otherwise in each process that serves it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core import plugins
from compile_stage.core.digest import plain, revive
from compile_stage.core.errors import SourceError, UsageError
from compile_stage.core.records import SourceModel
from compile_stage.engine.fresh_load import FreshProcess, import_path

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

_THREADS = 1
_SCRIPT = """
import json, os, sys
task = json.loads(sys.stdin.readline())
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the model may print what it likes
try:
    from compile_stage.engine.other_process import answer_task
    answer = answer_task(task)
except BaseException as error:
    answer = {"error": f"{type(error).__name__}: {getattr(error, 'problem', error)}"}
said.write("\\n" + task["mark"] + json.dumps(answer) + "\\n")
said.flush()
os._exit(0)
"""


def repeated_inputs(source: SourceModel, columns: Mapping[str, Array]) -> Batch:
    """What the network of a source that `reads_raw_samples` is given while predict() answers these rows
    (`Exporter.network_inputs`).

    Raises:
        SourceError: As that; or a new process, with another seed of `hash()`, gives the network something else, or
            answers otherwise. Floats may differ by 1 % of their root mean square (`measure.behaviour.REPEAT_LIMIT`).
            What two calls in one process do not repeat either is left to the gates, which name it.
    """
    inputs, answers = _asked(source, columns)
    here = _named(inputs, answers)
    elsewhere = _elsewhere(source, columns)
    differs = {name: rows for name, array in here.items() if (rows := _rows_apart(array, elsewhere.get(name)))}
    if differs:
        again = _named(*_asked(source, columns))
        differs = {name: rows for name, rows in differs.items() if not _rows_apart(here[name], again.get(name))}
    if differs:
        count = len(next(iter(columns.values())))
        what = "; ".join(f"{name} differs in {rows} of {count} rows" for name, rows in differs.items())
        raise SourceError(
            f"its predict() answers otherwise in another process, so that what is proven here is not what is served: "
            f"{what}. Python's hash() of a text, and the order of a set of texts, change with each process "
            "(PYTHONHASHSEED), as does what load_context draws without a seed",
            fix="in its code, take zlib.crc32(text.encode()) in place of hash(text), sorted(texts) in place of a set, "
            "and a seed for what is drawn; then train and log it again",
            where=source.uri,
        )
    return inputs


def answer_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """In the new process: `named`, what the network is given and predict() answers by name, as `.npy` files below the
    current folder.

    Args:
        task: `source`, the model as plain values; `columns`, column → `.npy` file.
    """
    columns = {name: np.load(file, allow_pickle=False) for name, file in task["columns"].items()}
    files = {}
    for number, (name, array) in enumerate(_named(*_asked(revive(SourceModel, task["source"]), columns)).items()):
        files[name] = str(Path.cwd() / f"answer-{number}.npy")
        np.save(files[name], array, allow_pickle=False)
    return {"named": files}


def _asked(source: SourceModel, columns: Mapping[str, Array]) -> tuple[Batch, dict[str, Array]]:
    """The network's inputs, and predict()'s answer by name."""
    from compile_stage.measure.whole_predict import arrays_of

    exporter = plugins.load("sources", source.flavor)
    inputs = exporter.network_inputs(source, columns)
    with exporter.whole(source, _THREADS) as predict:
        return inputs, arrays_of(predict(columns, None))


def _named(inputs: Batch, answers: Mapping[str, Array]) -> dict[str, Array]:
    return {**{f"the network's input {name!r}": array for name, array in inputs.items()}, **answers}


def _elsewhere(source: SourceModel, columns: Mapping[str, Array]) -> dict[str, Array]:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": import_path()}
    process = FreshProcess(Path(source.path), None, _SCRIPT, environment=environment)
    try:
        answer = process.ask({"source": plain(source), "columns": process.keep(columns, "column")})
        load = partial(np.load, allow_pickle=False)
        return {name: load(file) for name, file in answer["named"].items()}
    except UsageError as error:
        raise SourceError(
            f"its predict() answers here, and not in a new process: {error.problem}",
            fix="load it by mlflow.pyfunc.load_model in a new process, and call predict() first there",
            where=source.uri,
        ) from error
    finally:
        process.close()


def _rows_apart(one: Array, other: Array | None) -> int:
    """How many rows differ."""
    from compile_stage.measure.behaviour import REPEAT_LIMIT

    if other is None or one.shape != other.shape or one.ndim == 0:
        same = other is not None and one.shape == other.shape and bool(np.array_equal(one, other))
        return 0 if same else max(len(one) if one.ndim else 1, 1)
    apart = np.asarray(one != other)
    if one.dtype.kind == "f":
        a, b = one.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(a)
        size = float(np.sqrt(np.mean(a[finite] ** 2))) if finite.any() else 0.0
        with np.errstate(invalid="ignore"):
            near = np.abs(a - b) <= REPEAT_LIMIT * size
        apart &= ~near & ~(np.isnan(a) & np.isnan(b))
    return int(apart.reshape(len(one), -1).any(axis=1).sum())
