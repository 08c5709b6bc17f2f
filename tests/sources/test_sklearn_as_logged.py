"""scikit-learn models as people log them: the type of their answers, functions of their own, imbalanced-learn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_breast_cancer
from sklearn.decomposition import NMF
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.multiclass import OneVsOneClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeRegressor

from compile_stage.core.records import Compliance, SourceModel
from compile_stage.serving.prediction_io import from_outputs, to_batch
from compile_stage.sources.sklearn import SklearnSource

from .conftest import Proof, run_onnx, save_pickled, source_of

PICKLES = Compliance(allow_pickle=True)
X, Y = load_breast_cancer(return_X_y=True, as_frame=True)
COLUMNS = list(X.columns)


def save(path: Path, model: Any, frame: Any, **options: Any) -> SourceModel:
    return save_pickled(path, model, frame, examples=5, **options)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (make_pipeline(StandardScaler(), Ridge()), np.float64),
        (LinearRegression(), np.float32),
        (DecisionTreeRegressor(max_depth=3), np.float32),
        (LogisticRegression(), np.float64),
        (LogisticRegression(), np.float32),
    ],
)
def test_numbers_are_answered_in_the_originals_type(tmp_path: Path, model: Any, dtype: Any) -> None:
    """Broken: `json.dumps(model.predict(rows)[0])`, which writes NumPy's float64, fails with the published model, whose
    numbers were float32."""
    frame = X[COLUMNS[:4]].astype(dtype)
    model = clone(model).fit(frame, Y if is_classifier(model) else frame.iloc[:, 0].to_numpy() * 2)
    method = "predict_proba" if is_classifier(model) else "predict"
    source = save(tmp_path / "model", model, frame, pyfunc_predict_fn=method)
    made, how = SklearnSource().export(source, {}, tmp_path / "made"), SklearnSource().prediction_format(source)
    answer = mlflow.pyfunc.load_model(source.path).predict(frame)
    found = from_outputs(run_onnx(made, to_batch(frame, made.signature, how)), frame, how)
    assert found.dtype == answer.dtype
    np.testing.assert_allclose(found, answer, rtol=1e-3, atol=1e-5)


def with_ratio(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(ratio=frame.iloc[:, 0] / (frame.iloc[:, 1].abs() + 1))


def test_a_function_that_makes_columns_is_refused_by_name(tmp_path: Path) -> None:
    """Broken: the reason was "IndexError: list index out of range", since what stands behind the function was read with
    the columns before it."""
    frame = X[COLUMNS[:3]].assign(city=np.where(Y, "Bern", "Chur"))
    encoders = make_column_transformer((OneHotEncoder(), ["city"]), remainder=StandardScaler())
    model = make_pipeline(FunctionTransformer(with_ratio), encoders, LogisticRegression()).fit(frame, Y)
    source = save(tmp_path / "model", model, frame)
    reason = SklearnSource().refuse(source, PICKLES) or ""
    assert "its FunctionTransformer calls with_ratio" in reason
    assert "call it before the model" in reason


def test_a_model_of_another_package_is_to_be_logged_by_itself(tmp_path: Path) -> None:
    """Broken: the advice for a CatBoost model behind encoders is to write a converter for skl2onnx."""
    catboost = pytest.importorskip("catboost")
    model = make_pipeline(
        StandardScaler(), catboost.CatBoostClassifier(iterations=2, verbose=0, allow_writing_files=False)
    ).fit(X, Y)
    reason = SklearnSource().refuse(save(tmp_path / "model", model, X), PICKLES) or ""
    assert "its CatBoostClassifier: log that by itself, with mlflow.catboost.log_model(model, ...)" in reason


@pytest.mark.parametrize("kind", ["BalancedRandomForestClassifier", "RUSBoostClassifier", "BalancedBaggingClassifier"])
def test_ensembles_of_imbalanced_learn_are_compiled(tmp_path: Path, prove: Proof, kind: str) -> None:
    """Broken: a BalancedRandomForestClassifier was refused, which answers by the methods of scikit-learn's forest."""
    imblearn = pytest.importorskip("imblearn", reason="imbalanced-learn is not installed")
    frame = X[COLUMNS[:6]].astype(np.float32)
    model = getattr(imblearn.ensemble, kind)(n_estimators=4, random_state=0).fit(frame, Y)
    source = save(tmp_path / "model", model, frame)
    made = prove(source, {"X": frame.to_numpy()}, sizes=(1,), compliance=PICKLES, rtol=1e-4)
    label = run_onnx(made, {"X": frame.to_numpy()})["label"]
    np.testing.assert_array_equal(label, mlflow.pyfunc.load_model(source.path).predict(frame))


def test_the_samplers_of_imbalanced_learn_are_passed_over(tmp_path: Path, prove: Proof) -> None:
    """Broken: a pipeline with a SMOTE was refused, which resamples the rows of a fit and has no part in an answer."""
    imblearn = pytest.importorskip("imblearn", reason="imbalanced-learn is not installed")
    pipeline = importlib.import_module("imblearn.pipeline").Pipeline
    sampled = pipeline([("sample", imblearn.over_sampling.RandomOverSampler()), ("model", LogisticRegression())])
    few = np.arange(len(Y))[(np.asarray(Y) == 1) | (np.arange(len(Y)) % 5 == 0)]
    model = pipeline([("scale", StandardScaler()), ("inner", sampled)]).fit(X.iloc[few], Y[few])
    source = save(tmp_path / "model", model, X)
    made = prove(source, {"X": X.to_numpy(np.float32)}, sizes=(1,), compliance=PICKLES, rtol=1e-4)
    label = run_onnx(made, {"X": X.to_numpy(np.float32)})["label"]
    np.testing.assert_array_equal(label, mlflow.pyfunc.load_model(source.path).predict(X))


def test_a_step_that_takes_no_float32_is_refused_as_what_has_no_converter(tmp_path: Path) -> None:
    """Broken: scikit-learn's own TypeError, with a traceback: an NMF takes numbers in the type of its fit alone."""
    frame = X[COLUMNS[:4]]
    model = make_pipeline(NMF(2, max_iter=50), Ridge()).fit(frame, Y)
    reason = SklearnSource().refuse(save(tmp_path / "model", model, frame), PICKLES) or ""
    assert "NMF has no converter to ONNX" in reason


def test_an_example_that_the_model_refuses_is_named(tmp_path: Path) -> None:
    """Broken: scikit-learn's own ValueError, with a traceback."""
    frame = pd.DataFrame({"shop": np.arange(1, 401) % 5 + 1, "size": np.ones(400)})
    model = make_pipeline(OneHotEncoder(), Ridge()).fit(frame, frame["shop"])
    mlflow.sklearn.save_model(
        model,
        tmp_path / "model",
        signature=mlflow.models.infer_signature(frame, model.predict(frame)),
        input_example=frame[:5].assign(shop=9),
        serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],
    )
    reason = SklearnSource().refuse(source_of(tmp_path / "model", "sklearn"), PICKLES) or ""
    assert "it refuses rows of zeros, and its own input example: Found unknown categories" in reason


def test_truth_values_of_one_class_against_one_have_one_axis(tmp_path: Path, prove: Proof) -> None:
    """Broken: labels that are truth values came as [batch, 1], where the original answers [batch]."""
    frame = X[COLUMNS[:4]].astype(np.float32)
    model = OneVsOneClassifier(LogisticRegression()).fit(frame, Y == 1)
    source = save(tmp_path / "model", model, frame)
    prove(source, {"X": frame.to_numpy()}, compliance=PICKLES)
