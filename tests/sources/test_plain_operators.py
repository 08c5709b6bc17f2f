"""Graphs of scikit-learn models without ai.onnx.ml: they answer as skl2onnx's own, and other compilers read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, helper
from skl2onnx import to_onnx
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import BaggingClassifier, VotingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

from compile_stage.sources import graph, tabular
from compile_stage.sources.plain_operators import without_ml_operators

IRIS = load_iris()
X = IRIS.data.astype(np.float32)
Y = IRIS.target
TWO = (Y > 0).astype(np.int64)
HOLES = np.where(np.random.default_rng(0).random(X.shape) < 0.2, np.nan, X).astype(np.float32)

MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "ridge": lambda: (Ridge(), X[:, 0] * 2),
    "ridge of two targets": lambda: (Ridge(), np.c_[Y, X[:, 0]]),
    "two classes": lambda: (LogisticRegression(), TWO * 3),
    "three classes": lambda: (LogisticRegression(), Y),
    "labels that are texts": lambda: (LogisticRegression(), IRIS.target_names[Y]),
    "one against the rest": lambda: (OneVsRestClassifier(LogisticRegression()), Y),
    "scores alone": lambda: (LinearSVC(), TWO),
    "discriminant": lambda: (LinearDiscriminantAnalysis(), Y),
    "calibrated": lambda: (CalibratedClassifierCV(LogisticRegression(), cv=2), Y),
    "bagged": lambda: (BaggingClassifier(LogisticRegression(), 2, random_state=0), Y),
    "shares of each row": lambda: (make_pipeline(Normalizer("l1"), LogisticRegression()), Y),
    "columns by place": lambda: (
        make_pipeline(
            ColumnTransformer([("a", StandardScaler(), [2, 0]), ("b", MinMaxScaler(), [1])]), LogisticRegression()
        ),
        Y,
    ),
    "missing numbers": lambda: (make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression()), Y),
    "votes": lambda: (
        VotingClassifier(
            [("a", LogisticRegression()), ("b", LogisticRegression(C=0.1))], voting="soft", flatten_transform=False
        ),
        Y,
    ),
}


def _converted(model: Any) -> ModelProto:
    options = {"zipmap": False} if hasattr(model, "predict_proba") else None
    return to_onnx(model, X[:1], options=options, target_opset=tabular.opsets())


def _answers(model: ModelProto, rows: Any) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {model.graph.input[0].name: rows}))


@pytest.mark.parametrize("name", MODELS)
def test_linear_models_need_no_operator_of_onnx_runtimes_own(name: str) -> None:
    """Broken: OpenVINO and the others refuse LinearRegressor and LinearClassifier, and int8 finds no product; or the
    written graph answers otherwise than the converter's."""
    model, wanted = MODELS[name]()
    rows = HOLES if name == "missing numbers" else X
    converted = _converted(model.fit(rows, wanted))
    before = _answers(converted, rows)
    without_ml_operators(converted)
    assert {node.domain for node in graph.nodes(converted.graph)} == {""}
    assert "MatMul" in {node.op_type for node in converted.graph.node}
    for old, new in zip(before, _answers(converted, rows), strict=True):
        assert old.shape == new.shape
        assert old.dtype == new.dtype
        if old.dtype.kind == "f":
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)
        else:
            assert old.tolist() == new.tolist()


@pytest.mark.parametrize("name", ["two classes", "three classes", "missing numbers", "votes"])
def test_openvino_reads_linear_models(name: str) -> None:
    """Broken: what was written is read by ONNX Runtime alone."""
    openvino = pytest.importorskip("openvino")
    model, wanted = MODELS[name]()
    rows = HOLES if name == "missing numbers" else X
    converted = _converted(model.fit(rows, wanted))
    without_ml_operators(converted)
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(converted.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    label, probabilities = compiled([rows]).to_tuple()
    assert label.tolist() == model.predict(rows).tolist()
    np.testing.assert_allclose(probabilities, model.predict_proba(rows), atol=1e-5)


def test_a_row_of_zeros_has_no_shares() -> None:
    """Broken: 0 over 0 is NaN, where Normalizer and scikit-learn leave such a row as it is."""
    rows = np.array([[0, 0, 0, 0], [1, -1, 2, 0]], np.float32)
    converted = to_onnx(Normalizer("l1").fit(rows), rows, target_opset=tabular.opsets())
    without_ml_operators(converted)
    assert [node.domain for node in converted.graph.node if node.domain] == []
    assert _answers(converted, rows)[0].tolist() == [[0, 0, 0, 0], [0.25, -0.25, 0.5, 0]]


def test_whole_numbers_are_taken_as_by_the_operators_that_are_replaced() -> None:
    """Broken: the graph is invalid, since MatMul takes two tensors of one type and LinearRegressor any number."""
    made = helper.make_node(
        "LinearRegressor", ["x"], ["y"], domain="ai.onnx.ml", coefficients=[0.5, 0.25], intercepts=[1.0]
    )
    kinds = (helper.TensorProto.INT64, helper.TensorProto.FLOAT)
    x, y = (
        helper.make_tensor_value_info(name, kind, ["batch", size])
        for name, kind, size in zip("xy", kinds, (2, 1), strict=True)
    )
    sets = [helper.make_opsetid(domain, version) for domain, version in tabular.opsets().items()]
    model = helper.make_model(helper.make_graph([made], "g", [x], [y]), opset_imports=sets, ir_version=9)
    without_ml_operators(model)
    assert _answers(model, np.array([[2, 4]], np.int64))[0].tolist() == [[3.0]]


def test_a_graph_with_trees_keeps_its_linear_models() -> None:
    """Broken: beside trees, which only ONNX Runtime has, a scaler and a linear model become slower for nothing."""
    voters = [("a", LogisticRegression()), ("b", DecisionTreeClassifier(max_depth=2, random_state=0))]
    model = VotingClassifier(voters, voting="soft", flatten_transform=False).fit(X, Y)
    converted = _converted(model)
    before = converted.SerializeToString()
    without_ml_operators(converted)
    assert converted.SerializeToString() == before


def test_no_constant_is_left_over() -> None:
    """Broken: ONNX Runtime warns of each constant that nothing reads."""
    converted = _converted(MODELS["columns by place"]()[0].fit(X, Y))
    without_ml_operators(converted)
    read = {name for node in converted.graph.node for name in node.input}
    assert {tensor.name for tensor in converted.graph.initializer} <= read
