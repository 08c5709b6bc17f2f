"""What float32 loses of the samples: the original is asked whether it answers as it does to them as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import prepare

from compile_stage.core.errors import SourceError
from compile_stage.core.records import DataSpec
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.rounding import differing

TABLE = Signature(inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 2)),), outputs=())
TIMES = 1.7e9 + np.arange(200.0) * 7.0


def written(folder: Path, **columns: Any) -> DataSpec:
    np.savez(folder / "data.npz", **columns)
    return DataSpec(source=f"file:{folder / 'data.npz'}")


def late(inputs: Mapping[str, Any]) -> list[Any]:
    """A model of float64 that branches by a time stamp's minutes, and one more that no rounding matters to."""
    rows = np.asarray(inputs["X"], np.float64)
    return [rows[:, 1] % 60 > 30, rows[:, 0] * 2]


def test_samples_that_float32_rounds_to_other_answers_are_refused(tmp_path: Path) -> None:
    """Broken: original and artifact are compared on rounded time stamps, agree, and pass; the original's own predict()
    answers otherwise."""
    spec = written(tmp_path, size=np.linspace(0.1, 3, 200), time=TIMES)
    with pytest.raises(SourceError, match=r"answers \d+ of 200 samples otherwise.*'time' loses digits"):
        prepare(spec, TABLE, tmp_path / "out", seed=0, unrounded=late, columns=lambda: ["size", "time"])


def test_a_sample_beside_a_threshold_is_noted(tmp_path: Path) -> None:
    """Broken: one sample that takes another branch of a tree refuses the model; or nobody is told."""
    values = np.linspace(0.1, 0.9, 200)
    threshold = float(values[77])
    spec = written(tmp_path, a=values, b=values)

    def tree(inputs: Mapping[str, Any]) -> list[Any]:
        kept = np.asarray(inputs["X"], np.float64)[:, 0]
        return [kept == threshold]

    found = prepare(spec, TABLE, tmp_path / "out", seed=0, unrounded=tree)
    assert any("answers 1 of 200 samples otherwise" in note for note in found.notes)


@pytest.mark.parametrize(
    ("columns", "answers"),
    [
        ({"size": np.linspace(0.1, 3, 200), "time": TIMES}, None),
        ({"size": np.linspace(0.1, 3, 200), "time": np.float64(np.float32(TIMES))}, late),
        ({"size": np.linspace(0.1, 3, 200), "time": np.linspace(0, 59.9, 200)}, lambda given: [given["X"].sum(axis=1)]),
    ],
    ids=["the original rounds too", "nothing is lost", "rounding does not matter"],
)
def test_rounding_that_changes_no_answer_is_let_through(columns: Any, answers: Any, tmp_path: Path) -> None:
    """Broken: a model is refused for rounding that its own framework does too, or that changes nothing."""
    found = prepare(written(tmp_path, **columns), TABLE, tmp_path / "out", seed=0, unrounded=answers)
    assert not any("otherwise" in note for note in found.notes)


def test_answers_that_are_missing_infinite_or_text_are_compared() -> None:
    """Broken: a NaN in both answers counts as a difference, or a text or an infinity that changed does not."""
    given = {"X": np.arange(4.0)}
    rounded = {"X": np.arange(4.0, dtype=np.float32)}
    texts = np.array(["a", "b", "c", "d"])
    numbers = np.array([np.nan, np.inf, 1.0, 2.0])

    def ask(inputs: Mapping[str, Any]) -> list[Any]:
        if inputs is given:
            return [texts, numbers]
        return [np.array(["a", "b", "c", "x"]), np.array([np.nan, np.inf, np.inf, 2.0])]

    assert differing(ask, given, rounded) == (2, True)
    assert differing(lambda _: [texts, numbers], given, rounded) == (0, False)
