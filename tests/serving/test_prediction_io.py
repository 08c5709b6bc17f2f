"""What predict() is given becomes the same inputs by every way, with pandas only where it came in."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest

from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.prediction_io import (
    InputRefusedError,
    demand_params,
    from_outputs,
    run_any_rows,
    to_batch,
)

SIGNATURE = Signature(
    inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 3)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
)
HOW = {"kind": "array", "outputs": ["y"], "columns": ["a", "b", "c"], "frame_in_frame_out": False}
FRAME = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "c": [True, False]})


@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        FRAME[["c", "a", "b"]],
        FRAME.assign(text="not a column of the model"),
        FRAME.astype(object),
        FRAME.assign(b=[Decimal("0.5"), Decimal("1.5")]),  # as a database gives them
        {name: FRAME[name].to_numpy() for name in FRAME},
        {name: FRAME[name].tolist() for name in reversed(FRAME.columns)},
        {name: FRAME[name].iloc[::-1] if name == "a" else FRAME[name] for name in FRAME},  # aligned by the index
        {"a": np.array([1, 2]), "b": np.array([0.5, 1.5]), "c": np.array([1, 0], np.uint8)},
        FRAME.to_numpy(np.float32),
        {"X": FRAME.to_numpy(np.float32)},
    ],
)
def test_every_way_gives_the_same_matrix(data: Any) -> None:
    """Broken: columns in another order, of other types, or as a dict change the model's answer."""
    batch = to_batch(data, SIGNATURE, HOW)
    assert batch["X"].dtype == np.float32
    np.testing.assert_array_equal(batch["X"], [[1, 0.5, 1], [2, 1.5, 0]])


@pytest.mark.parametrize(
    "data",
    [
        FRAME.drop(columns="b"),
        FRAME.assign(a="text"),
        {"a": [1, 2], "b": ["x", "y"], "c": [1, 2]},
        {"a": np.zeros((2, 2)), "b": np.zeros((2, 2)), "c": np.zeros((2, 2))},
    ],
)
def test_what_does_not_fit_is_still_refused(data: Any) -> None:
    """Broken: the short way lets through what the long one refuses."""
    with pytest.raises((InputRefusedError, ValueError)):
        to_batch(data, SIGNATURE, HOW)


def test_a_missing_text_is_filled_in_as_the_original_fills_in_its_kind() -> None:
    """Broken: NaN, which the original fills in, is refused; or None, for which it has another answer, gets the same."""
    signature = Signature(inputs=(TensorSpec(name="t", dtype="str", shape=("batch", 1)),), outputs=())
    how = {"kind": "array", "outputs": ["y"], "columns": ["t"], "fills": {"t": {"NaN": "Rome", "None": ""}}}
    frame = pd.DataFrame({"t": pd.Series(["Oslo", np.nan, None], dtype=object)})
    assert to_batch(frame, signature, how)["t"].ravel().tolist() == ["Oslo", "Rome", ""]
    assert frame["t"].isna().sum() == 2, "the caller's own frame was changed"
    with pytest.raises(
        InputRefusedError, match="as NA, which this model does not take: send a text in its place, or NaN or None w"
    ):
        to_batch(frame.assign(t=[pd.NA] * 3), signature, how)
    with pytest.raises(InputRefusedError, match="must be text, and holds 3"):
        to_batch(pd.DataFrame({"t": pd.Series(["Oslo", 3], dtype=object)}), signature, how)


_WITHOUT = """
import sys
import numpy as np
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.prediction_io import from_outputs, to_batch
signature = Signature(inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 2)),), outputs=())
how = {"kind": "array", "outputs": ["y"], "columns": ["a", "b"], "frame_in_frame_out": True}
for data in (np.ones((1, 2)), {"X": np.ones((1, 2))}, {"a": [1], "b": np.ones(1)}):
    assert to_batch(data, signature, how)["X"].shape == (1, 2)
    assert from_outputs({"y": np.ones(1)}, data, how).shape == (1,)
print("pandas" in sys.modules)
"""


def test_pandas_is_not_imported_where_none_came_in() -> None:
    """Broken: a service that hands arrays or dicts over pays for pandas, in memory and in its first answer."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


def test_a_frame_is_answered_row_by_row_where_outputs_differ_in_size() -> None:
    """Broken: rows that are asked for as a frame, as `mlflow deployments predict` does, are refused with pandas' words
    about arrays of one length, as by MLflow's own ONNX flavor."""
    frame = pd.DataFrame({"x": [[1.0, 2.0], [3.0, 4.0]]})
    how = {"kind": "dict", "outputs": ["y", "z"], "columns": None, "frame_in_frame_out": True}
    answered = from_outputs({"y": np.ones((2, 1)), "z": np.arange(6.0).reshape(2, 3)}, frame, how)
    assert [list(map(float, row)) for row in answered["z"]] == [[0, 1, 2], [3, 4, 5]]
    assert answered["y"].tolist() == [1, 1]


def test_a_list_is_answered_in_the_order_of_the_outputs() -> None:
    """Broken: clients that read the first and second array of the original's answer would get a dict, or the arrays in
    another order."""
    outputs = {"classes": np.ones((2, 3)), "size": np.zeros((2, 1))}
    how = {"kind": "list", "outputs": [], "columns": None, "frame_in_frame_out": False}
    answered = from_outputs(outputs, np.ones((2, 4)), how)
    assert isinstance(answered, list)
    assert [array.shape for array in answered] == [(2, 3), (2, 1)]


@pytest.mark.parametrize("kind", ["array", "dict", "dataframe"])
def test_whole_numbers_are_answered_in_numpys_own_type(kind: str) -> None:
    """Broken: ONNX Runtime's int64 is C's other type of 64 bits. pandas' select_dtypes finds no int64 in it, and so
    MLflow's spark_udf says that the model answers no long, of every classifier with numbers as labels."""
    given = np.array([1, 0], dtype=np.longlong if np.dtype(np.int64).char == "l" else np.int_)
    answer = from_outputs({"label": given}, pd.DataFrame({"x": [1.0, 2.0]}), {"kind": kind, "outputs": ["label"]})
    table = pd.DataFrame(answer)
    assert list(table.select_dtypes([np.int64]).columns) == list(table.columns)
    assert table.to_numpy().ravel().tolist() == [1, 0]


TWO = Signature(
    inputs=(
        TensorSpec(name="ids", dtype="int32", shape=("batch", 2)),
        TensorSpec(name="age", dtype="float32", shape=("batch", 1)),
    ),
    outputs=(),
)
CELLS = pd.DataFrame({"age": [30.0, 40.0], "note": ["not", "an input"], "ids": [[1, 2], np.array([3, 4])]})


def test_each_input_of_several_has_the_column_of_its_name() -> None:
    """Broken: an input gets another one's column, or a frame that lacks one is answered all the same."""
    how = {"kind": "array", "outputs": ["y"], "columns": None}
    batch = to_batch(CELLS, TWO, how)
    assert batch["ids"].dtype == np.int32
    np.testing.assert_array_equal(batch["ids"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(batch["age"], [[30], [40]])
    with pytest.raises(InputRefusedError, match="the data frame lacks 'age': one column for each input"):
        to_batch(CELLS[["ids", "note"]], TWO, how)
    with pytest.raises(InputRefusedError, match="the cells of column 'ids' do not all have one shape"):
        to_batch(CELLS.assign(ids=[[1, 2], [3]]), TWO, how)


def test_columns_that_nobody_named_are_taken_in_their_order() -> None:
    """Broken: a frame made of an array is refused; or one that lacks a column is taken by position."""
    unnamed = pd.DataFrame(FRAME.to_numpy(np.float32))
    np.testing.assert_array_equal(to_batch(unnamed, SIGNATURE, HOW)["X"], [[1, 0.5, 1], [2, 1.5, 0]])
    with pytest.raises(InputRefusedError, match="the data frame lacks 'a', 'b', 'c'"):
        to_batch(unnamed.iloc[:, :2], SIGNATURE, HOW)
    renamed = FRAME.rename(columns={"c": "d"})
    with pytest.raises(InputRefusedError, match="the data frame lacks 'c'; the model takes a, b, c"):
        to_batch(renamed, SIGNATURE, HOW)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (np.array([[1.0, -2.0]]), None),
        (np.array([[1, 2**31 - 1]], dtype=np.int64), None),
        (np.array([[True, False]]), None),
        (np.array([[1.5, 2.0]]), "holds a number that is not whole"),
        (np.array([[np.nan, 2.0]]), "holds a number that is not whole"),
        (np.array([[0, 2**31]], dtype=np.int64), "holds a value that int32 can't hold"),
        (np.array([[0, -(2**31) - 1]], dtype=np.int64), "holds a value that int32 can't hold"),
        (np.array([["1", "2"]]), "must be int32, not"),
    ],
)
def test_whole_number_inputs_take_whole_numbers_that_fit(given: np.ndarray, refusal: str | None) -> None:
    """Broken: a fraction is cut off, or a large token wraps round to another one, and the answer is to another
    question."""
    signature = Signature(inputs=TWO.inputs[:1], outputs=())
    if refusal is None:
        np.testing.assert_array_equal(to_batch({"ids": given}, signature, HOW | {"columns": None})["ids"], given)
        return
    with pytest.raises(InputRefusedError, match=refusal):
        to_batch({"ids": given}, signature, HOW | {"columns": None})


def test_a_number_that_float32_can_not_hold_is_refused() -> None:
    """Broken: 1e39 becomes infinite, and the model answers something else than to the number."""
    for value in (1e39, -1e39, np.inf):
        with pytest.raises(InputRefusedError):
            to_batch(np.array([[1.0, 2.0, value]]), SIGNATURE, HOW)
    assert np.isnan(to_batch(np.array([[1.0, 2.0, np.nan]]), SIGNATURE, HOW)["X"][0, 2]), "a missing number"


def test_answers_have_the_form_of_the_original() -> None:
    """Broken: a client that reads a series, an array or one name of a dict gets something else, or all outputs."""
    frame = pd.DataFrame({"x": [1.0, 2.0]}, index=["p", "q"])
    outputs = {"y": np.array([1, 2], dtype=np.int64), "z": np.array([3.0, 4.0])}
    series = from_outputs(outputs, frame, {"kind": "series", "outputs": ["y"]})
    assert isinstance(series, pd.Series)
    assert series.to_dict() == {"p": 1, "q": 2}
    assert isinstance(from_outputs(outputs, np.ones((2, 1)), {"kind": "series", "outputs": ["y"]}), np.ndarray)
    array = from_outputs(outputs, frame, {"kind": "array", "outputs": ["y"], "dtype": "float32"})
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float32
    assert list(from_outputs(outputs, frame, {"kind": "dict", "outputs": ["z"]})) == ["z"]
    assert list(from_outputs(outputs, frame, {})) == ["y", "z"]
    framed = from_outputs(outputs, frame, {"kind": "array", "outputs": ["z"], "frame_in_frame_out": True})
    assert framed.to_dict() == {0: {"p": 3.0, "q": 4.0}}


def test_a_param_that_is_compiled_in_can_be_sent_with_its_own_value_alone() -> None:
    """Broken: a request for other answers gets those of the compiled value without a word."""
    how = {"params": {"top_k": 3, "labels": ["a", "b"]}}
    for same in (None, {}, {"top_k": 3}, {"labels": ("a", "b")}, {"labels": np.array(["a", "b"])}, {"other": 1}):
        demand_params(same, how)
    demand_params({"top_k": 5}, {})
    for other in ({"top_k": 5}, {"labels": ["b", "a"]}, {"top_k": 3, "labels": ["a"]}):
        with pytest.raises(InputRefusedError, match="is compiled for"):
            demand_params(other, how)


@pytest.mark.parametrize(
    "given", [np.zeros((0, 2), np.float32), pd.DataFrame({"a": [], "b": []})], ids=["array", "frame"]
)
def test_no_rows_are_answered_with_none_where_the_original_does_that(given: Any) -> None:
    """Broken: a job that scores what came in today fails on a day on which nothing did."""
    signature = Signature(
        inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 2)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
    )
    how = {"kind": "array", "outputs": ["y"], "columns": ["a", "b"], "dtype": "float64"}
    with pytest.raises(InputRefusedError, match="is empty"):
        to_batch(given, signature, how)
    seen: list[Any] = []

    def run(batch: Any) -> Any:
        seen.append(batch["X"])
        return {"y": batch["X"].sum(axis=1)}

    how = {**how, "no_rows": True}
    batch = to_batch(given, signature, how)
    answer = from_outputs(run_any_rows(run, batch, how), given, how)
    assert (answer.shape, answer.dtype, seen[0].shape) == ((0,), np.float64, (1, 2))
    assert len(run_any_rows(run, {"X": np.ones((3, 2), np.float32)}, how)["y"]) == 3
    with pytest.raises(InputRefusedError, match="does not fit"):
        to_batch(np.zeros((0, 3), np.float32), signature, {**how, "columns": None})
