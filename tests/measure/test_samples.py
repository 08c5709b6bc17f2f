"""Samples from every source, chosen by seed, in the model's dtypes; what doesn't fit is refused in words."""

from __future__ import annotations

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from factories import prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.errors import IntegrityError, MissingDependencyError, PolicyError, SourceError
from compile_stage.core.records import DataSpec, ShapeRange
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.corners import corner_batches
from compile_stage.measure.samples import open_samples, overlap, tensor_files


def signature(*inputs: TensorSpec) -> Signature:
    return Signature(inputs=inputs, outputs=())


def spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=("batch", *shape))


IMAGE = signature(spec("image", "float32", 1, "h", "w"))
TABLE = signature(spec("features", "float32", 3))
BERT = signature(spec("ids", "int64", "sequence"), spec("mask", "int64", "sequence"))


def npz(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "data.npz", **arrays)
    return f"file:{folder / 'data.npz'}"


def test_npz_with_labels_is_sampled_by_seed_and_keeps_rows_together(tmp_path: Path) -> None:
    x = np.arange(100 * 3, dtype=np.float32).reshape(100, 3)
    source = DataSpec(source=npz(tmp_path, features=x, y=np.arange(100)), labels="y", max_samples=10)
    sets = [prepare(source, TABLE, tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert sets[0].digest == sets[1].digest != sets[2].digest
    found = open_samples(sets[0])
    assert found.count == sets[0].count == 10
    assert found.labels is not None
    assert np.array_equal(found.inputs["features"], x[found.labels])  # each row still has its own label
    assert sorted(found.labels.tolist()) == found.labels.tolist()
    assert sets[0].real
    assert sets[0].has_labels


@pytest.mark.parametrize(("odd", "said"), [(np.nan, r"missing \(NaN\)"), (np.inf, "infinite"), (-np.inf, "infinite")])
def test_labels_without_a_value_are_refused(tmp_path: Path, odd: float, said: str) -> None:
    """Broken: an infinite label is called a large whole number, with the advice to save it as int64, which has none."""
    y = np.arange(10, dtype=np.float64)
    y[3] = odd
    source = DataSpec(source=npz(tmp_path, features=np.zeros((10, 3), np.float32), y=y), labels="y")
    with pytest.raises(PolicyError, match=f"1 of the 10 labels are {said}"):
        prepare(source, TABLE, tmp_path / "s", seed=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3))
def test_no_sample_is_taken_twice(tmp_path_factory: pytest.TempPathFactory, count: int, most: int, seed: int) -> None:
    into = tmp_path_factory.mktemp("s")
    x = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    source = DataSpec(source="input_example", max_samples=most)
    made = prepare(source, TABLE, into, seed=seed, example={"features": x})
    rows = open_samples(made).inputs["features"][:, 0]
    assert len(set(rows.tolist())) == min(count, most) == made.count


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_groups_are_read_with_their_samples_and_are_no_input(tmp_path: Path, suffix: str) -> None:
    """Broken: a patient's name would be a feature, or the chosen samples would have others' groups."""
    x = np.arange(60 * 3, dtype=np.float32).reshape(60, 3)
    patients, labels = np.array([f"p{row // 4:02}" for row in range(60)]), np.arange(60)
    path = tmp_path / f"data.{suffix}"
    if suffix == "npz":
        np.savez(path, features=x, patient=patients, y=labels)
    else:
        frame = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "patient": patients, "y": labels})
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    source = DataSpec(source=f"file:{path}", labels="y", groups="patient", max_samples=40)
    made = prepare(source, TABLE, tmp_path / "s", seed=3)
    opened = open_samples(made)
    assert opened.groups is not None
    assert opened.labels is not None
    assert np.array_equal(np.unique(patients[opened.labels], return_inverse=True)[1], opened.groups)
    assert (made.count, made.groups) == (40, len(set(patients[opened.labels].tolist())))
    assert (made.independent, made.unit) == (made.groups, "groups of samples")
    plain = prepare(
        replace(source, groups=None, source=npz(tmp_path, features=x, y=labels)), TABLE, tmp_path / "t", seed=3
    )
    assert (plain.groups, plain.independent, open_samples(plain).groups) == (0, 40, None)
    assert plain.digest != made.digest


def test_a_group_that_is_missing_or_no_single_value_is_refused(tmp_path: Path) -> None:
    """Broken: samples of no group would count as a group of their own, all together."""
    x = np.zeros((4, 3), np.float32)
    for groups, says in (
        (np.array([0.0, 1.0, np.nan, 1.0]), "1 of the 4 samples have no group"),
        (np.array(["2026-01-05", "NaT", "NaT", "2026-01-06"], "M8[D]"), "2 of the 4 samples have no group"),
        (x, "one number or text"),
    ):
        source = DataSpec(source=npz(tmp_path, features=x, g=groups), groups="g")
        with pytest.raises(PolicyError, match=says):
            prepare(source, TABLE, tmp_path / "s", seed=0)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_missing_texts_of_a_file_are_filled_in_as_predict_fills_them_in(tmp_path: Path, suffix: str) -> None:
    """Broken: a model that fills missing texts in can't be proven on the data that it has them from."""
    path, frame = tmp_path / f"data.{suffix}", pandas.DataFrame({"t": ["a", None, "b"], "u": ["c", "d", "e"]})
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    texts = Signature(inputs=tuple(TensorSpec(name=name, dtype="str", shape=("batch", 1)) for name in "tu"), outputs=())
    fills = {"t": {"NaN": "b", "None": "b"}}
    made = prepare(DataSpec(source=f"file:{path}"), texts, tmp_path / "s", seed=0, fills=lambda: fills)
    assert open_samples(made).inputs["t"].ravel().tolist() == ["a", "b", "b"]
    with pytest.raises(PolicyError, match="'t' has 1 empty cells"):
        prepare(DataSpec(source=f"file:{path}"), texts, tmp_path / "u", seed=0, fills=lambda: {"u": fills["t"]})


def test_words_of_a_csv_are_those_that_it_has(tmp_path: Path) -> None:
    """Broken: a class or a group that is called None or NA is read as an empty cell, which the file does not have."""
    path = tmp_path / "data.csv"
    path.write_text("a,b,c,y,land\n1,2,3,None,NA\n1,NA,4,yes,DE\n2,3,4,null,FR\n")
    source = DataSpec(source=f"file:{path}", labels="y", groups="land", max_samples=40)
    made = prepare(source, TABLE, tmp_path / "s", seed=0)
    opened = open_samples(made)
    assert opened.labels is not None
    assert opened.labels.tolist() == ["None", "yes", "null"]
    assert made.groups == 3
    assert np.isnan(next(iter(opened.inputs.values()))[1, 1])  # a number that is not there
    path.write_text("a,b,c,y,land\n1,2,3,None,NA\n1,2,4,,DE\n2,3,4,yes,FR\n")
    with pytest.raises(PolicyError, match="'y' has 1 empty cells"):
        prepare(source, TABLE, tmp_path / "t", seed=0)


def test_a_column_too_many_may_be_the_groups_under_another_name(tmp_path: Path) -> None:
    """Broken: a wrong name in data.groups would be told as a model that lacks a feature."""
    path = npz(tmp_path, **{f"f{i}": np.zeros(4, np.float32) for i in range(4)}, patient=np.arange(4))
    with pytest.raises(PolicyError, match=r"none is called 'pateint' \(data.groups\)"):
        prepare(DataSpec(source=path, groups="pateint"), TABLE, tmp_path / "out", seed=0)


def test_compressed_and_fortran_ordered_arrays(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.savez_compressed(tmp_path / "c.npz", features=x)
    np.savez(tmp_path / "f.npz", features=np.asfortranarray(x))
    made = [
        prepare(DataSpec(source=f"file:{tmp_path / n}", max_samples=7), TABLE, tmp_path / n[0], seed=0)
        for n in ("c.npz", "f.npz")
    ]
    assert made[0].digest == made[1].digest


def test_a_large_file_is_read_by_rows(tmp_path: Path) -> None:
    """Ten samples of a data set need not fit in memory with the other millions."""
    source = npz(tmp_path, features=np.zeros((1_000_000, 3), np.float32))
    tracemalloc.start()
    prepare(DataSpec(source=source, max_samples=10), TABLE, tmp_path / "s", seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 12 MB in the file; what is allowed is the permutation of its row numbers (8 MB, twice) and little else
    assert peak < 22_000_000


def test_without_pyarrow_a_parquet_file_is_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever names a .parquet file gets the traceback of an import, or pandas's advice for another tool."""
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    for engine in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(MissingDependencyError) as caught:
        prepare(DataSpec(source=f"file:{tmp_path / 't.parquet'}"), BERT, tmp_path / "s", seed=0)
    assert (caught.value.exit_code, caught.value.fix) == (2, 'pip install "compile-stage[parquet]"')


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_make_one_matrix_in_the_files_order(suffix: str, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"b": [1.0, 2.5], "a": [3, 4], "target": ["x", "yy"], "c": [5.0, 6.0]})
    path = tmp_path / f"t.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    made = prepare(DataSpec(source=f"file:{path}", labels="target"), TABLE, tmp_path / "s", seed=0)
    found = open_samples(made)
    assert found.inputs["features"].tolist() == [[1, 3, 5], [2.5, 4, 6]]
    assert found.labels is not None
    assert found.labels.tolist() == ["x", "yy"]


@pytest.mark.parametrize(
    ("named", "row"), [(["c", "b", "a"], [3, 2, 1]), (["x", "b", "a"], [1, 2, 3]), (None, [1, 2, 3])]
)
def test_columns_make_the_matrix_by_the_models_names(named: list[str] | None, row: list[int], tmp_path: Path) -> None:
    """Broken: a file that has the model's columns in another order would be judged with them mixed up, in original and
    artifact alike, and pass."""
    pandas.DataFrame({"a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 4}).to_parquet(tmp_path / "data.parquet")
    source = DataSpec(source=f"file:{tmp_path / 'data.parquet'}")
    made = prepare(source, TABLE, tmp_path / "out", seed=0, columns=lambda: named)
    np.testing.assert_array_equal(open_samples(made).inputs["features"][0], row)


def test_columns_named_like_inputs_and_lists_in_cells(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"ids": [[1, 2, 3], [4, 5, 6]], "mask": [[1, 1, 1], [1, 1, 0]], "id": [8, 9]})
    frame.to_parquet(tmp_path / "t.parquet")
    made = prepare(DataSpec(source=f"file:{tmp_path / 't.parquet'}"), BERT, tmp_path / "s", seed=0)
    found = open_samples(made)
    assert found.inputs["mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert found.inputs["ids"].dtype == np.int64
    assert "not used: id" in made.notes


def test_a_fetched_data_set_is_read_like_a_file(tmp_path: Path) -> None:
    pandas.DataFrame({"a": [1.0], "b": [2.0], "c": [3.0]}).to_csv(tmp_path / "d.csv", index=False)
    source = DataSpec(source="mlflow-dataset:holdout")
    made = prepare(source, TABLE, tmp_path / "s", seed=0, dataset=str(tmp_path / "d.csv"))
    assert (made.count, made.source) == (1, "mlflow-dataset:holdout")


def test_a_function_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ourdata.py").write_text(
        "import numpy as np\n"
        "def rows(): return {'features': np.ones((4, 3), 'float32')}\n"
        "def labelled(): return rows(), [0, 1, 0, 1]\n"
        "def wrong(): return 5\n"
        "def raises(): raise OSError('the share is gone')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(name: str) -> Any:
        return prepare(DataSpec(source=f"python:ourdata:{name}"), TABLE, tmp_path / name, seed=0)

    assert not made("rows").has_labels
    assert made("labelled").has_labels
    with pytest.raises(PolicyError, match="answered with int"):
        made("wrong")
    with pytest.raises(PolicyError, match="the share is gone"):
        made("raises")
    with pytest.raises(PolicyError, match="can't be imported"):
        made("nothing")


def test_synthetic_samples_are_not_real_and_repeat(tmp_path: Path) -> None:
    shapes = {"ids": ShapeRange(min=(1, 4), typical=(1, 8), max=(4, 16))}
    source = DataSpec(source="synthetic", max_samples=5, labels="y")
    made = [prepare(source, BERT, tmp_path / str(i), seed=3, shapes=shapes) for i in range(2)]
    assert not made[0].real
    assert made[0].digest == made[1].digest
    assert open_samples(made[0]).inputs["mask"].shape == (5, 8)
    assert "prove nothing" in made[0].notes[0]
    guessed = prepare(source, IMAGE, tmp_path / "g", seed=0)
    assert open_samples(guessed).inputs["image"].shape == (5, 1, 16, 16)
    assert "h, w" in guessed.notes[1]


def test_no_input_example_is_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="without an input example"):
        prepare(DataSpec(source="input_example"), TABLE, tmp_path, seed=0)


ONES = np.ones((4, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"features": ONES[:0]}, "the samples are empty"),
        ({"features": ONES[:, :2]}, r"'features'.*\[batch, 2\].*\[batch, 3\] is wanted"),
        ({"features": ONES[0, 0]}, "axis 0 must be the sample"),
        ({"features": ONES[:, None]}, r"\[batch, 1, 3\]"),
        ({"a": ONES, "b": ONES}, "no array for input 'features'"),
        ({"a": ONES[:, 0], "b": ONES[:, 0]}, "takes 3 features, and the samples have 2 columns"),
        ({"features": ONES.astype(str)}, "no number"),
        ({"features": ONES.astype(np.float64) * 1e300}, "holds 1e\\+300, which float32 can't"),
        ({"features": ONES.astype(np.int64) * (2**24 + 1)}, "16777217"),
        ({"features": np.array([[None] * 3])}, "Python objects"),
        ({"features": ONES, "y": ONES[:2, 0]}, "the inputs have 4 rows, the labels 'y' have 2"),
        ({"features": ONES, "z": ONES[:, 0]}, "no labels 'y'.*'z'"),
        ({"features": ONES, "y": np.array([1, np.nan, 2, np.nan])}, "2 of the 4 labels are missing"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(arrays: dict[str, Any], says: str, tmp_path: Path) -> None:
    labels = "y" if {"y", "z"} & set(arrays) else None
    with pytest.raises(PolicyError, match=says):
        prepare(DataSpec(source="input_example", labels=labels), TABLE, tmp_path, seed=0, example=arrays)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    """A pickled array runs code when it is read."""

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    source = npz(tmp_path, features=np.array([Bomb()], dtype=object))
    with pytest.raises(PolicyError, match="not read"):
        prepare(DataSpec(source=source), TABLE, tmp_path / "s", seed=0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.npz", None, "no such file"),
        ("broken.npz", b"not a zip", "can't be read"),
        ("broken.parquet", b"nothing", "can't be read"),
        ("empty.csv", b"", "can't be read"),
        ("data.pkl", b"x", "not from '.pkl'"),
        ("holes.csv", b"a,b,c\nx,1,2\n,1,2\n", "'a' has 1 empty cells"),
    ],
)
def test_unreadable_files(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PolicyError, match=says):
        prepare(DataSpec(source=f"file:{tmp_path / name}"), TABLE, tmp_path / "s", seed=0)
    with pytest.raises(PolicyError, match="no source of samples"):
        prepare(DataSpec(source="s3://bucket"), TABLE, tmp_path / "s", seed=0)


def test_conversion_is_without_loss_but_for_rounded_floats(tmp_path: Path) -> None:
    made = prepare(
        DataSpec(source="input_example"), TABLE, tmp_path / "a", seed=0, example={"features": np.full((2, 3), 0.1)}
    )
    assert "rounded from float64 to float32" in made.notes[0]
    exact = prepare(
        DataSpec(source="input_example"), TABLE, tmp_path / "b", seed=0, example={"features": np.eye(3, dtype=bool)}
    )
    assert exact.notes == ()
    for wrong in (np.full((2, 4), 0.5), np.full((2, 4), np.nan)):
        with pytest.raises(PolicyError, match="int64 can't"):
            prepare(
                DataSpec(source="input_example"), BERT, tmp_path / "c", seed=0, example={"ids": wrong, "mask": wrong}
            )


@given(st.integers(-(2**63), 2**64 - 1), st.sampled_from(["int8", "uint8", "int32", "uint64", "float32", "float16"]))
def test_whole_numbers_arrive_or_are_refused(tmp_path_factory: pytest.TempPathFactory, number: int, dtype: str) -> None:
    """A number that wraps around would be another sample."""
    array = np.array([[number]])
    into = tmp_path_factory.mktemp("n")
    try:
        made = prepare(
            DataSpec(source="input_example"), signature(spec("x", dtype, 1)), into, seed=0, example={"x": array}
        )
    except PolicyError:
        return
    assert int(open_samples(made).inputs["x"][0, 0]) == number


def test_symbols_and_the_policys_shapes_must_agree(tmp_path: Path) -> None:
    """Broken: samples that the model can't take would be taken, or the error would ask for an array that is there."""
    source = DataSpec(source="input_example")
    uneven = {"ids": np.ones((2, 8), np.int64), "mask": np.ones((2, 9), np.int64)}
    with pytest.raises(PolicyError, match="9 for 'sequence', and input 'ids' has 8"):
        prepare(source, BERT, tmp_path, seed=0, example=uneven)
    long = {"ids": np.ones((2, 32), np.int64), "mask": np.ones((2, 32), np.int64)}
    with pytest.raises(PolicyError, match="outside the policy's") as caught:
        prepare(
            source,
            BERT,
            tmp_path,
            seed=0,
            example=long,
            shapes={"ids": ShapeRange(min=(1, 1), typical=(1, 8), max=(4, 16))},
        )
    assert "the target's shapes" in caught.value.fix


def test_nan_in_inputs_is_noted(tmp_path: Path) -> None:
    made = prepare(
        DataSpec(source="input_example"), TABLE, tmp_path, seed=0, example={"features": ONES * np.float32("nan")}
    )
    assert "12 values that are NaN or infinite" in made.notes[0]


def test_odd_tensor_names_become_safe_and_different_files(tmp_path: Path) -> None:
    names = ["serving_default_x:0", "../../etc/passwd", "A", "a", "名前", "x" * 300, "", "."]
    files = tensor_files(names)
    assert len({f.lower() for f in files.values()}) == len(names)
    assert all("/" not in f and len(f) < 200 for f in files.values())
    assert files["A"] == "A.npy"
    odd = signature(spec("../x", "float32", 3), spec("a/b:0", "float32", 3))
    made = prepare(
        DataSpec(source="input_example"), odd, tmp_path / "s", seed=0, example={"../x": ONES, "a/b:0": ONES * 2}
    )
    assert list(open_samples(made).inputs) == ["../x", "a/b:0"]
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["inputs", "samples.json"]


def test_what_was_written_is_what_is_opened(tmp_path: Path) -> None:
    made = prepare(DataSpec(source="input_example"), TABLE, tmp_path, seed=0, example={"features": ONES})
    found = open_samples(made)
    assert [len(b["features"]) for b in found.batches(3)] == [3, 1]
    assert isinstance(found.inputs["features"], np.memmap)
    (tmp_path / "samples.json").write_text(json.dumps({"inputs": {}}))
    with pytest.raises(IntegrityError):
        open_samples(made)


def test_overlap_of_calibration_and_validation_is_counted(tmp_path: Path) -> None:
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    a, b = (
        prepare(DataSpec(source="input_example"), TABLE, tmp_path / n, seed=0, example={"features": x})
        for n, x in (("a", rows[:6]), ("b", rows[4:]))
    )
    assert overlap(a, b) == overlap(b, a) == 2
    assert overlap(a, a) == 6


def test_corners_are_cropped_or_tiled_from_real_samples(tmp_path: Path) -> None:
    ids = np.arange(1, 33).reshape(4, 8)
    made = prepare(
        DataSpec(source="input_example"), BERT, tmp_path, seed=0, example={"ids": ids, "mask": np.ones_like(ids)}
    )
    samples = open_samples(made)
    shapes = {"ids": ShapeRange(min=(1, 2), typical=(1, 8), max=(8, 12))}
    corners = corner_batches(samples, BERT, shapes, [1, 8])
    assert [label for label, _ in corners] == ["min (ids 1x2, mask 1x2)", "max (ids 8x12, mask 8x12)"]
    small, large = (batch for _, batch in corners)
    assert small["ids"].tolist() == [[1, 2]]
    assert large["ids"][0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    assert large["ids"][5].tolist() == large["ids"][1].tolist()
    assert large["mask"].shape == (8, 12)


def test_corners_that_the_samples_have_are_not_run_again(tmp_path: Path) -> None:
    ids = np.ones((4, 8), np.int64)
    made = prepare(DataSpec(source="input_example"), BERT, tmp_path, seed=0, example={"ids": ids, "mask": ids})
    samples = open_samples(made)
    assert corner_batches(samples, BERT, {}, [1]) == []
    own = {"ids": ShapeRange(min=(1, 8), typical=(1, 8), max=(32, 8))}
    assert corner_batches(samples, BERT, own, [1, 32]) == []
    # A batch that the policy promises and that no batch size covers is a corner of its own.
    assert [label for label, _ in corner_batches(samples, BERT, own, [1, 8])] == ["max (ids 32x8, mask 32x8)"]
    same = {"ids": ShapeRange(min=(1, 4), typical=(1, 4), max=(1, 4))}
    assert len(corner_batches(samples, BERT, same, [1])) == 1
