"""XGBoost's and LightGBM's models inside scikit-learn's, and what stands before trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMClassifier, LGBMRegressor
from mlflow.models import infer_signature
from sklearn.base import is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier, StackingRegressor, VotingClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, OrdinalEncoder, RobustScaler, StandardScaler
from xgboost import XGBClassifier, XGBRegressor, XGBRFClassifier

from compile_stage.core.records import Compliance, SourceModel
from compile_stage.sources.sklearn import SklearnSource

from .conftest import run_onnx, source_of

RANDOM = np.random.default_rng(0)
ROWS = pd.DataFrame(RANDOM.normal(size=(300, 5)).astype(np.float32).astype(np.float64), columns=list("abcde"))
ROWS["d"] = RANDOM.integers(0, 4, 300).astype(np.float64)
TWO = (ROWS.a + ROWS.b * ROWS.c > 0).astype(int)
THREE = TWO + (ROWS.d > 2)
PICKLES = Compliance(allow_pickle=True)
LIGHT = {"n_estimators": 6, "verbose": -1, "n_jobs": 1}
FEW = {"n_estimators": 6, "n_jobs": 1}


def save(path: Path, model: Any, rows: pd.DataFrame = ROWS, **options: Any) -> SourceModel:
    mlflow.sklearn.save_model(
        model,
        path,
        signature=infer_signature(rows, model.predict(rows)),
        input_example=rows[:20],
        pip_requirements=["scikit-learn"],
        **(options or {"serialization_format": "cloudpickle"}),
    )
    return source_of(path, "sklearn")


def prove(tmp_path: Path, model: Any, rows: pd.DataFrame = ROWS) -> None:
    """The export answers as the model that the user has, which is given the rows as they are."""
    source = save(tmp_path / "model", model, rows)
    assert SklearnSource().refuse(source, PICKLES) is None
    found = run_onnx(SklearnSource().export(source, {}, tmp_path / "made"), {"X": rows.to_numpy(np.float64)})
    if is_classifier(model):
        assert list(found["label"]) == list(model.predict(rows))
        np.testing.assert_allclose(found["probabilities"], model.predict_proba(rows), atol=1e-5)
    else:
        np.testing.assert_allclose(found["prediction"], model.predict(rows), atol=1e-4)


def encoded(model: Any) -> Any:
    return make_pipeline(
        ColumnTransformer([("d", OneHotEncoder(handle_unknown="ignore"), ["d"])], remainder="passthrough"), model
    )


def numbered(model: Any) -> Any:
    """Categories that the encoder does not know are -1 to the model, and missing ones NaN."""
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    return make_pipeline(ColumnTransformer([("d", encoder, ["d"])], remainder="passthrough"), model)


def stopped(model: Any) -> Any:
    scaler = StandardScaler().fit(ROWS)
    rows = scaler.transform(ROWS)
    return make_pipeline(scaler, model.fit(rows[:200], THREE[:200], eval_set=[(rows[200:], THREE[200:])], verbose=0))


MODELS: dict[str, Callable[[], Any]] = {
    "xgboost": lambda: make_pipeline(StandardScaler(), XGBClassifier(**FEW)).fit(ROWS, TWO),
    "xgboost-forest": lambda: make_pipeline(StandardScaler(), XGBRFClassifier(**FEW)).fit(ROWS, THREE),
    "xgboost-numbers": lambda: make_pipeline(RobustScaler(), XGBRegressor(**FEW)).fit(ROWS, ROWS.a),
    "xgboost-stopped": lambda: stopped(
        XGBClassifier(
            n_estimators=60, n_jobs=1, num_parallel_tree=2, subsample=0.7, learning_rate=0.6, early_stopping_rounds=2
        )
    ),
    "xgboost-named": lambda: (
        make_pipeline(StandardScaler(), XGBClassifier(**FEW)).set_output(transform="pandas").fit(ROWS, THREE)
    ),
    "lightgbm": lambda: make_pipeline(StandardScaler(), LGBMClassifier(**LIGHT)).fit(ROWS, THREE),
    "lightgbm-categories": lambda: numbered(
        LGBMClassifier(min_child_samples=3, min_data_per_group=3, cat_smooth=0.0, **LIGHT)
    ).fit(ROWS, THREE, lgbmclassifier__categorical_feature=[0]),
    "lightgbm-text": lambda: encoded(LGBMClassifier(**LIGHT)).fit(ROWS, np.array(["no", "yes"])[TWO]),
    "search": lambda: GridSearchCV(encoded(XGBClassifier(**FEW)), {"xgbclassifier__max_depth": [2]}, cv=2).fit(
        ROWS, TWO
    ),
    "calibrated": lambda: CalibratedClassifierCV(XGBClassifier(**FEW), cv=2).fit(ROWS, TWO),
    "calibrated-scores": lambda: CalibratedClassifierCV(LGBMClassifier(**LIGHT), cv=2).fit(ROWS, TWO),
    "calibrated-scores-of-pipelines": lambda: CalibratedClassifierCV(encoded(LGBMClassifier(**LIGHT)), cv=2).fit(
        ROWS, THREE
    ),
    "vote": lambda: VotingClassifier(
        [("x", XGBClassifier(**FEW)), ("l", LGBMClassifier(**LIGHT))], voting="soft", weights=[1, 2]
    ).fit(ROWS, TWO),
    "stack": lambda: StackingRegressor([("x", XGBRegressor(**FEW)), ("l", LGBMRegressor(**LIGHT))], cv=2).fit(
        ROWS, ROWS.a
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_boosters_inside_of_other_models_are_converted(tmp_path: Path, name: str) -> None:
    """Broken: what most users of XGBoost and LightGBM log, a pipeline that ends with one, is refused as an estimator
    without converter, or is converted to other answers."""
    prove(tmp_path, MODELS[name]())


def test_what_a_sparse_matrix_does_not_store_is_missing_to_xgboost(tmp_path: Path) -> None:
    """Broken: behind a one-hot encoder XGBoost learns zeros as missing numbers, and the graph answers them as zeros."""
    model = encoded(XGBClassifier(**FEW))
    model[0].sparse_threshold = 1.0
    rows = ROWS.assign(a=ROWS.a.where(ROWS.a > 0, 0.0))
    prove(tmp_path, model.fit(rows, TWO), rows)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (XGBClassifier(**FEW, missing=-999), "takes -999 for a missing number"),
        (XGBClassifier(**FEW, booster="dart", rate_drop=0.5), "'dart'"),
        (LGBMClassifier(**LIGHT, linear_tree=True), "linear_tree"),
    ],
)
def test_boosters_that_would_be_converted_to_other_answers_are_refused(tmp_path: Path, model: Any, words: str) -> None:
    """Broken: what the sources of XGBoost and LightGBM refuse passes within a pipeline, where `missing` is kept too."""
    source = save(tmp_path / "model", make_pipeline(StandardScaler(), model).fit(ROWS, TWO))
    reason = SklearnSource().refuse(source, PICKLES) or ""
    assert words in reason
    assert reason.startswith(f"of its {type(model).__name__}: ")


@pytest.mark.parametrize("model", [XGBClassifier(**FEW), LGBMClassifier(**LIGHT)], ids=["xgboost", "lightgbm"])
def test_boosters_need_no_pickle(tmp_path: Path, model: Any) -> None:
    """Broken: a skops file with them is taken for one that may run code."""
    types = [
        "collections.OrderedDict",
        "lightgbm.basic.Booster",
        "lightgbm.sklearn.LGBMClassifier",
        "xgboost.core.Booster",
        "xgboost.sklearn.XGBClassifier",
    ]
    source = save(tmp_path / "model", make_pipeline(StandardScaler(), model).fit(ROWS, TWO), skops_trusted_types=types)
    assert SklearnSource().refuse(source, Compliance()) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "model",
    [RandomForestClassifier(20, random_state=0), HistGradientBoostingClassifier(max_iter=20), XGBClassifier(**FEW)],
    ids=["forest", "histogram", "xgboost"],
)
@pytest.mark.parametrize("scaler", [StandardScaler(), MinMaxScaler((-1, 2))], ids=["standard", "min-max"])
def test_a_scaler_before_trees_computes_as_the_original(tmp_path: Path, model: Any, dtype: Any, scaler: Any) -> None:
    """Broken: thresholds are values of the scaled training data, or the middle of two, and the graph's scaler rounds
    these to the other side: some rows get the answer of another leaf, and no candidate passes."""
    rows = ROWS.astype(dtype)
    prove(tmp_path, make_pipeline(scaler, model).fit(rows, THREE), rows)
