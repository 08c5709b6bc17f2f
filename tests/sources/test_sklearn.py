from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.models import infer_signature
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.semi_supervised import LabelSpreading
from sklearn.svm import LinearSVC

from compile_stage.core.records import Compliance, ShapeRange, SourceModel, Target
from compile_stage.sources.sklearn import SklearnSource

from .conftest import Proof, source_of

CANCER = load_breast_cancer(as_frame=True)
X, Y = CANCER.data.astype(np.float32), CANCER.target
DIABETES = load_diabetes(as_frame=True)
COLUMNS = list(X.columns)
PICKLES = Compliance(allow_pickle=True)

TRUSTED = [
    "_loss.CyHalfBinomialLoss",
    "_loss.CyHalfSquaredError",
    "numpy.dtype",
    "numpy.random._pickle.__randomstate_ctor",
    "sklearn._loss.link.IdentityLink",
    "sklearn._loss.link.Interval",
    "sklearn._loss.link.LogitLink",
    "sklearn._loss.loss.HalfBinomialLoss",
    "sklearn._loss.loss.HalfSquaredError",
    "sklearn.ensemble._hist_gradient_boosting.binning._BinMapper",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.tree._tree.Tree",
]


def save(path: Path, model: Any, frame: Any = X, **options: Any) -> SourceModel:
    if "serialization_format" not in options:
        options["skops_trusted_types"] = TRUSTED
    mlflow.sklearn.save_model(
        model,
        path,
        signature=infer_signature(frame, model.predict(frame)),
        input_example=frame[:3],
        pip_requirements=["scikit-learn"],
        **options,
    )
    return source_of(path, "sklearn")


def scaled(model: Any) -> Any:
    return make_pipeline(StandardScaler(), model)


CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "logistic": lambda: scaled(LogisticRegression()).fit(X, Y),
    "forest": lambda: RandomForestClassifier(5, random_state=0).fit(X, Y),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=10, random_state=0).fit(X, Y),
    "histogram": lambda: HistGradientBoostingClassifier(max_iter=10).fit(X, Y),
    "text-labels": lambda: scaled(LogisticRegression()).fit(X, CANCER.target_names[Y]),
    "bool-labels": lambda: scaled(LogisticRegression()).fit(X, Y.astype(bool)),
    "no-probabilities": lambda: scaled(LinearSVC()).fit(X, Y),
    "columns-by-name": lambda: make_pipeline(
        ColumnTransformer([("a", StandardScaler(), COLUMNS[:5]), ("b", MinMaxScaler(), COLUMNS[9:4:-1])]),
        LogisticRegression(),
    ).fit(X, Y),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_answer_with_labels_and_probabilities(tmp_path: Path, prove: Proof, name: str) -> None:
    source = save(tmp_path / "model", CLASSIFIERS[name]())
    model = prove(source, {"X": X.to_numpy()}, sizes=(1, len(X)))
    names = [spec.name for spec in model.signature.outputs]
    assert names == (["label"] if name == "no-probabilities" else ["label", "probabilities"])
    assert str(model.signature.inputs[0]) == "X: float32[batch, 30]"
    # The published model must answer as the source's pyfunc does.
    how, answer = SklearnSource().answer(source), mlflow.pyfunc.load_model(source.path).predict(X)
    assert how == {"kind": "array", "outputs": ["label"], "columns": COLUMNS, "frame_in_frame_out": False}
    with SklearnSource().open(source, Target(name="cpu")) as session:
        label = session.run({"X": X.to_numpy()})["label"]
    np.testing.assert_array_equal(answer, label)
    assert answer.dtype.kind == label.dtype.kind


@pytest.mark.parametrize("targets", [1, 2])
def test_regressors_answer_with_a_number_for_each_row_and_target(tmp_path: Path, prove: Proof, targets: int) -> None:
    rows = DIABETES.data.astype(np.float32)
    wanted = DIABETES.target if targets == 1 else np.stack([DIABETES.target, -DIABETES.target], axis=1)
    model = GradientBoostingRegressor(n_estimators=10) if targets == 1 else Ridge()
    source = save(tmp_path / "model", model.fit(rows, wanted), rows)
    made = prove(source, {"X": rows.to_numpy()})
    assert made.signature.outputs[0].shape == (("batch",) if targets == 1 else ("batch", 2))
    answer = mlflow.pyfunc.load_model(source.path).predict(rows)
    with SklearnSource().open(source, Target(name="cpu")) as session:
        np.testing.assert_allclose(session.run({"X": rows.to_numpy()})["prediction"], answer, rtol=1e-5)


def test_the_pyfunc_method_of_the_source_is_kept(tmp_path: Path) -> None:
    source = save(tmp_path / "model", CLASSIFIERS["logistic"](), pyfunc_predict_fn="predict_proba")
    assert SklearnSource().answer(source)["outputs"] == ["probabilities"]
    assert mlflow.pyfunc.load_model(source.path).predict(X).shape == (len(X), 2)


def test_the_input_example_comes_as_the_models_matrix(tmp_path: Path) -> None:
    example = SklearnSource().example(save(tmp_path / "model", CLASSIFIERS["logistic"]()))
    assert example is not None
    np.testing.assert_array_equal(example["X"], X[:3].to_numpy())
    assert example["X"].dtype == np.float32


def test_a_pickle_is_refused_unless_the_policy_allows_it(tmp_path: Path, prove: Proof) -> None:
    source = save(tmp_path / "model", CLASSIFIERS["logistic"](), serialization_format="cloudpickle")
    assert "compliance.allow_pickle" in (SklearnSource().refuse(source, Compliance()) or "")
    prove(source, {"X": X.to_numpy()}, compliance=PICKLES)


def test_skops_types_that_nobody_declared_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "model", CLASSIFIERS["forest"]())
    model = mlflow.models.Model.load(source.path)
    model.flavors["sklearn"]["skops_trusted_types"] = []
    model.save(str(Path(source.path) / "MLmodel"))
    assert "sklearn.tree._tree.Tree" in (SklearnSource().refuse(source, Compliance()) or "")


def test_a_model_can_not_vouch_for_code_of_another_package(tmp_path: Path) -> None:
    class Odd(LogisticRegression):
        pass

    Odd.__module__ = "mlflow.odd"
    source = save(tmp_path / "model", CLASSIFIERS["logistic"]())
    import skops.io

    from compile_stage.sources import saved

    file = tmp_path / "odd.skops"
    skops.io.dump(Odd().fit(X.to_numpy()[:, :2], Y), file)
    reason = saved.refuse(file, "skops", ["mlflow.odd.Odd", *TRUSTED], Compliance())
    assert reason is not None
    assert "other packages" in reason or "can't be read" in reason
    assert SklearnSource().refuse(source, Compliance()) is None


def test_an_estimator_without_converter_is_named(tmp_path: Path) -> None:
    source = save(tmp_path / "model", scaled(LabelSpreading()).fit(X[:50], Y[:50]), serialization_format="cloudpickle")
    assert "LabelSpreading has no converter" in (SklearnSource().refuse(source, PICKLES) or "")


def test_columns_of_text_are_refused_by_name(tmp_path: Path) -> None:
    frame = pd.DataFrame({"city": ["a", "b", "a", "c"] * 5, "size": np.arange(20, dtype=np.float32)})
    encode = ColumnTransformer([("city", OneHotEncoder(), ["city"])], remainder="passthrough")
    source = save(tmp_path / "model", make_pipeline(encode, LogisticRegression()).fit(frame, [0, 1] * 10), frame)
    assert "city" in (SklearnSource().refuse(source, Compliance()) or "")


def test_missing_files_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "model", CLASSIFIERS["logistic"]())
    next(Path(source.path).glob("model.*")).unlink()
    assert "missing" in (SklearnSource().refuse(source, Compliance()) or "")


def test_another_number_of_columns_is_refused(tmp_path: Path) -> None:
    from compile_stage.core.errors import SourceError

    source = save(tmp_path / "model", CLASSIFIERS["logistic"]())
    with pytest.raises(SourceError, match="dimension 1 of input 'X' to 30, the policy asks for 31"):
        SklearnSource().export(source, {"X": ShapeRange(min=(1, 30), typical=(1, 30), max=(8, 31))}, tmp_path / "out")
