"""What float32 loses of the samples: they are kept as they were for the original, and what it changes is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import prepare

from compile_stage.core.errors import PolicyError
from compile_stage.core.records import DataSpec
from compile_stage.core.sample_files import as_given, digest_of_samples, inputs_alone
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.robustness import round_samples, write_samples
from compile_stage.measure.rounding import blamed, changed, in_words
from compile_stage.measure.samples import open_samples

TABLE = Signature(inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 2)),), outputs=())
TIMES = 1.7e9 + np.arange(200.0) * 7.0
SIZES = np.linspace(0.1, 3, 200)


def written(folder: Path, **columns: Any) -> DataSpec:
    np.savez(folder / "data.npz", **columns)
    return DataSpec(source=f"file:{folder / 'data.npz'}")


def late(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A model of float64 that branches by a time stamp's minutes, and one more that no rounding matters to."""
    rows = np.asarray(inputs["X"], np.float64)
    return {"late": rows[:, 1] % 60 > 30, "double": rows[:, 0] * 2}


def test_samples_are_kept_as_they_were_for_the_original(tmp_path: Path) -> None:
    """Broken: the original is asked with the rounded samples that artifacts get, both lose the same digits, agree and
    pass; or a worker that runs an artifact is handed what it was not to see."""
    spec = written(tmp_path, size=SIZES, time=TIMES)
    found = prepare(spec, TABLE, tmp_path / "out", seed=0, keep_given=True)
    given = as_given(found)
    assert given is not None
    np.testing.assert_array_equal(open_samples(given).inputs["X"], np.stack([SIZES, TIMES], axis=1))
    assert open_samples(found).inputs["X"].dtype == np.float32
    handed = inputs_alone(tmp_path / "out")
    assert handed is not None
    assert not any("given" in file for file in handed[0])


def test_samples_that_differ_in_lost_digits_alone_are_other_samples(tmp_path: Path) -> None:
    """Broken: the answers to the time stamps of yesterday are taken from the cache for today's, which round to the
    same."""
    digests = set()
    for number, moved in enumerate((0, 1)):
        times = 1.7e9 + np.full(200, moved)
        spec = written(tmp_path, size=SIZES, time=times)
        found = prepare(spec, TABLE, tmp_path / str(number), seed=0, keep_given=True)
        digests.add(digest_of_samples(found))
    assert len(digests) == 2


def test_whole_numbers_are_rounded_like_others(tmp_path: Path) -> None:
    """Broken: a table of ids is refused, with the advice to give float32; whoever follows it compares rounded ids, and
    people send whole ones."""
    ids = 2**25 + np.arange(200)
    spec = written(tmp_path, id=ids, kind=ids % 3)
    found = prepare(spec, TABLE, tmp_path / "out", seed=0, keep_given=True)
    given = as_given(found)
    assert given is not None
    np.testing.assert_array_equal(open_samples(given).inputs["X"][:, 0], ids)
    with pytest.raises(PolicyError, match="which float32 can't"):
        prepare(spec, TABLE, tmp_path / "float32", seed=0)
    spec = written(tmp_path, id=2**53 + 1 + np.arange(200), kind=ids % 3)
    with pytest.raises(PolicyError, match="which float32 can't"):
        prepare(spec, TABLE, tmp_path / "float64", seed=0, keep_given=True)


@pytest.mark.parametrize("columns", [{"size": SIZES, "time": np.float64(np.float32(TIMES))}, {"size": SIZES}])
def test_samples_that_are_not_rounded_or_not_asked_for_are_kept_once(columns: Any, tmp_path: Path) -> None:
    """Broken: every network's samples lie on disk twice."""
    exact = {name: np.float64(np.float32(values)) for name, values in columns.items()}
    signature = replace(TABLE, inputs=(replace(TABLE.inputs[0], shape=("batch", len(columns))),))
    assert as_given(prepare(written(tmp_path, **columns), signature, tmp_path / "a", seed=0)) is None
    found = prepare(written(tmp_path, **exact), signature, tmp_path / "b", seed=0, keep_given=True)
    assert as_given(found) is None
    assert not (tmp_path / "b" / "given").exists()


def test_the_columns_that_do_it_are_named_with_how_many_samples_they_change() -> None:
    """Broken: a reader is told that rounding does it, and not of what."""
    given = {"X": np.stack([SIZES, TIMES], axis=1)}
    rounded = {"X": given["X"].astype(np.float32)}
    found = blamed(late, given, rounded)
    count = changed(late(given), late(rounded))
    assert found == [("X", 1, count)]
    assert count > 40
    said = in_words(count, 200, [{"column": "'time'", "samples": count}])
    assert f"answers {count} of 200 samples ({count / 2:.1f} %) otherwise" in said
    assert said.endswith(f"by the rounding of 'time' ({count})")


def test_an_input_of_its_own_for_each_column_is_rounded_alone() -> None:
    """Broken: of a model with text columns nobody is told which number it is."""
    given = {"word": np.array([["a"]] * 200), "time": TIMES[:, None], "size": SIZES[:, None]}
    rounded = {name: array if name == "word" else array.astype(np.float32) for name, array in given.items()}

    def ask(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"label": inputs["time"][:, 0].astype(np.float64) % 60 > 30}

    assert [(name, column) for name, column, _ in blamed(ask, given, rounded)] == [("time", None)]


def test_answers_that_are_missing_infinite_or_text_are_compared() -> None:
    """Broken: a NaN in both answers counts as a difference, or a text or an infinity that changed does not."""
    before = {"text": np.array(["a", "b", "c", "d"]), "number": np.array([np.nan, np.inf, 1.0, 2.0])}
    after = {"text": np.array(["a", "b", "c", "x"]), "number": np.array([np.nan, np.inf, np.inf, 2.0])}
    assert changed(before, after) == 2
    assert changed(before, before) == 0


def test_what_is_made_of_samples_as_they_were_is_rounded_for_artifacts(tmp_path: Path) -> None:
    """Broken: an artifact is given float64, which its network does not take, and refuses it."""
    found = prepare(written(tmp_path, size=SIZES, time=TIMES), TABLE, tmp_path / "out", seed=0, keep_given=True)
    wide = {"X": np.stack([SIZES, TIMES], axis=1)[:5]}
    made = write_samples(wide, found, tmp_path / "noise")
    rounded = round_samples(made, found)
    assert rounded.path == made.path
    assert rounded.digest != made.digest
    np.testing.assert_array_equal(open_samples(rounded).inputs["X"], wide["X"].astype(np.float32))
    assert open_samples(rounded).inputs["X"].dtype == np.float32
