"""Where the original takes missing numbers, and whether an artifact then answers as it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest

from compile_stage.core.digest import plain as to_plain
from compile_stage.core.errors import WorkerError
from compile_stage.core.records import DataSpec, Gate, SampleSet, Verdict
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.engine import open_model
from compile_stage.measure.missing import ask_original, check_missing
from compile_stage.serving.missing_numbers import proven_missing

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="x", dtype="float32", shape=("batch", 4)),
        TensorSpec(name="ids", dtype="int64", shape=("batch", 3)),
    ),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
)
GATES = (Gate(metric="max_abs", limit=1e-3, direction="at_most"),)


class Model:
    """A session that replaces NaN in `x`, and refuses it in some columns."""

    signature = SIGNATURE

    def __init__(self, value: Callable[[int], float] = lambda _: 0.0, refused: tuple[int, ...] = ()) -> None:
        self._value, self._refused = value, refused

    def run(self, batch: Any) -> Any:
        x = batch["x"].copy()
        for column in range(4):
            missing = np.isnan(x[:, column])
            if missing.any() and column in self._refused:
                message = f"column {column} contains NaN\nand more advice"
                raise ValueError(message)
            x[missing, column] = self._value(column)
        return {"y": (x.sum(axis=1) + batch["ids"].sum(axis=1)).astype(np.float32)}


class Here:
    """A worker in this process that has a model open."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model, self._patch = model, monkeypatch

    def call(self, name: str, /, **given: Any) -> Any:
        self._patch.setattr(open_model, "open_session", lambda: self._model)
        return getattr(open_model, name)(**{key: to_plain(value) for key, value in given.items()})


@pytest.fixture
def samples(tmp_path: Path) -> SampleSet:
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz", x=random.normal(size=(32, 4)).astype(np.float32), ids=random.integers(9, size=(32, 3))
    )
    return factories.prepare(DataSpec(source=f"file:{tmp_path}/data.npz"), SIGNATURE, tmp_path / "samples", seed=0)


def missing_of(
    original: Model, artifact: Model, samples: SampleSet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """What the manifest lists."""
    asked = ask_original(Here(original, monkeypatch), samples, 2, folder)  # type: ignore[arg-type]
    check = check_missing(Here(artifact, monkeypatch), GATES, asked, seed=0)  # type: ignore[arg-type]
    proven = proven_missing(Verdict(checks=(check,)))
    assert proven is not None
    refused: list[dict[str, Any]] = proven["refused"]
    assert check.measured == 0.0, "a verdict with it is read again, and it never fails"
    return refused


def test_columns_that_the_original_refuses_are_refused(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: one column without an imputer would close all columns, or be answered."""
    first, second = missing_of(Model(refused=(1, 3)), Model(), samples, tmp_path, monkeypatch)
    assert (first["input"], first["columns"], second["columns"]) == ("x", [1], [3])
    assert first["reason"] == "the original refuses it (ValueError: column 1 contains NaN)"


def test_what_is_answered_otherwise_is_refused_and_fails_nothing(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an artifact that fills a column with another number would be served where that is missing."""
    wrong = Model(lambda column: 5.0 if column == 2 else 0.0)
    (entry,) = missing_of(Model(), wrong, samples, tmp_path, monkeypatch)
    assert entry["columns"] == [0, 1, 2, 3]  # with all columns missing at once it is wrong too
    assert "otherwise than the original" in entry["reason"]


def test_an_artifact_that_does_not_take_a_nan_is_not_asked_for_one(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a request with a NaN would end in an error of the runtime's, or the run in a failure of the candidate."""

    def call(self: Here, name: str, /, **given: Any) -> Any:
        try:
            return plain(self, name, **given)
        except ValueError as error:
            raise WorkerError("exception", str(error)) from error

    plain = Here.call
    monkeypatch.setattr(Here, "call", call)
    (entry,) = missing_of(Model(), Model(refused=(0,)), samples, tmp_path, monkeypatch)
    assert entry["columns"] == [0, 1, 2, 3]
    assert "does not take it" in entry["reason"]


def test_nothing_is_refused_where_both_answer_alike(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: models of incomplete rows could not be served."""
    assert missing_of(Model(), Model(), samples, tmp_path, monkeypatch) == []
