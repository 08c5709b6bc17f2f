"""Operators of TensorFlow that tf2onnx leaves as they are, in ONNX's; TensorFlow itself is not needed for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from compile_stage.sources import tf2onnx_graph


def answered(node: Any, given: np.ndarray, answer: int) -> np.ndarray:
    kind = helper.np_dtype_to_tensor_dtype(given.dtype)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", kind, [None])],
        [helper.make_tensor_value_info("y", answer, [None])],
    )
    tf2onnx_graph._write_composites(graph)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    outputs: list[Any] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": given})
    return np.asarray(outputs[0])


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize(("operator", "exact"), [("Log1p", np.log1p), ("Expm1", np.expm1)])
def test_small_numbers_lose_nothing(operator: str, exact: Callable[[Any], Any], kind: type) -> None:
    """Broken: log(1 + x) of 1e-8 is 0, and a feature that is a small rate vanishes in each compiled model; or an
    infinite one is no number."""
    small = np.logspace(-30, 1.9, 500)
    given = np.concatenate([small, -small, np.linspace(-1.5, 1.5, 301), [0, -1, -2, np.inf, -np.inf, np.nan]])
    given = given.astype(kind)
    with np.errstate(all="ignore"):
        expected = exact(given)
    got = answered(
        helper.make_node(operator, ["x"], ["y"], name="n"), given, helper.np_dtype_to_tensor_dtype(given.dtype)
    )
    np.testing.assert_allclose(got, expected, rtol=4 * np.finfo(kind).eps, atol=0)


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_buckets_are_tensorflows(kind: type) -> None:
    """Broken: a number at a boundary is in the bucket below it, and the model looks up another row of its table."""
    node = helper.make_node("Bucketize", ["x"], ["y"], name="n", boundaries=[-1.0, 0.0, 2.5])
    given = np.array([-7, -1, 0, 2, 3, 1000], kind)
    assert answered(node, given, TensorProto.INT32).tolist() == [0, 1, 2, 2, 3, 3]
    if kind is np.float32:
        odd = np.array([-1.0000001, 2.5, 2.4999998, np.nan, np.inf], kind)
        assert answered(node, odd, TensorProto.INT32).tolist() == [0, 3, 2, 3, 3]
