"""Histogram gradient boosting that splits on categories, against scikit-learn's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.models import infer_signature
from sklearn.base import is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor, VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

from compile_stage.core.records import Compliance
from compile_stage.sources.sklearn import SklearnSource

from .conftest import run_onnx, save_pickled, source_of

PICKLES = Compliance(allow_pickle=True)
DRAW = np.random.default_rng(0)
COUNT = 1200
ROWS = np.stack(
    [DRAW.normal(size=COUNT), DRAW.integers(0, 40, COUNT) * 3 - 6, DRAW.normal(size=COUNT), DRAW.integers(0, 5, COUNT)],
    axis=1,
).astype(np.float32)
NUMBER = DRAW.normal(size=120)[ROWS[:, 1].astype(int)] * ROWS[:, 0] + ROWS[:, 3] % 2
THREE = np.digitize(NUMBER, [0.0, 1.0])
GAPS = ROWS.copy()
GAPS[DRAW.random(GAPS.shape) < 0.1] = np.nan
FEW: dict[str, Any] = {"max_iter": 8, "categorical_features": [1, 3]}


def strange(rows: Any) -> Any:
    """As rows, half of them with categories that were never seen, between two that were, below 0, and missing."""
    found = rows.astype(np.float32)
    for column in (1, 3):
        values = [-1, -0.5, 0.9, 1, 2.5, 4, 41, 1000, 1e9, np.nan, -0.0]
        found[::2, column] = DRAW.choice(np.float32(values), len(found[::2]))
    return found


def numbered(model: Any) -> Any:
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    return make_pipeline(ColumnTransformer([("numbered", encoder, [1, 3])], remainder="passthrough"), model)


MODELS = {
    "regressor": lambda: HistGradientBoostingRegressor(**FEW).fit(ROWS, NUMBER),
    "gaps": lambda: HistGradientBoostingRegressor(**FEW).fit(GAPS, NUMBER),
    "poisson": lambda: HistGradientBoostingRegressor(loss="poisson", **FEW).fit(GAPS, THREE),
    "two classes": lambda: HistGradientBoostingClassifier(**FEW).fit(GAPS, THREE > 1),
    "three classes": lambda: HistGradientBoostingClassifier(**FEW).fit(ROWS, THREE),
    "texts as classes": lambda: HistGradientBoostingClassifier(**FEW).fit(GAPS, np.array(list("abc"))[THREE]),
    "of a mask": lambda: HistGradientBoostingRegressor(
        max_iter=8, categorical_features=[False, True, False, False]
    ).fit(GAPS, NUMBER),
    "in a pipeline": lambda: make_pipeline(
        ColumnTransformer([("scaled", StandardScaler(), [0, 2])], remainder="passthrough"),
        HistGradientBoostingClassifier(max_iter=8, categorical_features=[2, 3]),
    ).fit(GAPS, THREE),
    "behind an encoder": lambda: numbered(HistGradientBoostingClassifier(max_iter=8, categorical_features=[0, 1])).fit(
        ROWS, THREE
    ),
    "calibrated": lambda: CalibratedClassifierCV(HistGradientBoostingClassifier(**FEW), cv=2).fit(ROWS, THREE > 1),
    "in a vote": lambda: VotingClassifier(
        [("trees", HistGradientBoostingClassifier(**FEW)), ("line", LogisticRegression(max_iter=1000))], voting="soft"
    ).fit(ROWS, THREE),
}


@pytest.mark.parametrize("name", MODELS)
def test_splits_on_categories_are_converted(tmp_path: Path, name: str) -> None:
    """Broken: what scikit-learn's documentation recommends for categories would be refused, or an unknown or missing
    one be sent to the other side of a split."""
    model = MODELS[name]()
    source = save_pickled(tmp_path / "model", model, ROWS)
    assert SklearnSource().refuse(source, PICKLES) is None
    made = SklearnSource().export(source, {}, tmp_path / "made")
    takes_gaps = name != "in a vote"
    for rows in (ROWS, strange(GAPS if takes_gaps else ROWS)):
        asked = rows.astype(np.float32) if takes_gaps else np.nan_to_num(rows.astype(np.float32), nan=7)
        found = run_onnx(made, {"X": asked})
        if is_classifier(model):
            assert list(found["label"]) == list(model.predict(asked))
            np.testing.assert_allclose(found["probabilities"], model.predict_proba(asked), atol=1e-5)
        else:
            np.testing.assert_allclose(found["prediction"], model.predict(asked), atol=1e-5, rtol=1e-5)


def test_columns_of_a_data_frame_are_found_by_name(tmp_path: Path) -> None:
    """Broken: the categories of one column would be compared with the numbers of another."""
    frame = pd.DataFrame(GAPS.astype(np.float32), columns=["size", "shop", "age", "day"])
    model = HistGradientBoostingRegressor(max_iter=8, categorical_features=["day", "shop"]).fit(frame, NUMBER)
    source = save_pickled(tmp_path / "model", model, frame)
    assert SklearnSource().refuse(source, PICKLES) is None
    asked = strange(GAPS)
    found = run_onnx(SklearnSource().export(source, {}, tmp_path / "made"), {"X": asked})
    expected = model.predict(pd.DataFrame(asked, columns=frame.columns))
    np.testing.assert_allclose(found["prediction"], expected, atol=1e-5)


def test_the_model_itself_stays_as_it_is(tmp_path: Path) -> None:
    """Broken: the original would answer by the trees that were rewritten for ONNX."""
    from compile_stage.sources.sklearn_categories import compared_one_by_one

    model = MODELS["gaps"]()
    before, expected = [tree.nodes for trees in model._predictors for tree in trees], model.predict(GAPS)
    with compared_one_by_one(model):
        assert any(
            tree.nodes is not nodes
            for tree, nodes in zip([tree for trees in model._predictors for tree in trees], before, strict=True)
        )
    np.testing.assert_array_equal(model.predict(GAPS), expected)


def test_categories_that_are_texts_are_refused_with_what_works(tmp_path: Path) -> None:
    """Broken: skl2onnx's own error, of whichever step it is lost at; or advice that is refused too."""
    frame = pd.DataFrame({"shop": pd.Categorical(np.array(list("abcdef"))[np.arange(COUNT) % 6]), "size": ROWS[:, 0]})
    model = HistGradientBoostingRegressor(max_iter=4).fit(frame, NUMBER)
    texts = frame.astype({"shop": object})
    mlflow.sklearn.save_model(
        model,
        tmp_path / "model",
        signature=infer_signature(texts, NUMBER),
        input_example=texts[:20],
        serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],
    )
    reason = SklearnSource().refuse(source_of(tmp_path / "model", "sklearn"), PICKLES) or ""
    assert "OrdinalEncoder with handle_unknown='use_encoded_value'" in reason
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    advised = make_pipeline(
        ColumnTransformer([("shop", encoder, ["shop"])], remainder="passthrough"),
        HistGradientBoostingRegressor(max_iter=4, categorical_features=[0]),
    ).fit(texts, NUMBER)
    source = save_pickled(tmp_path / "advised", advised, texts)
    assert SklearnSource().refuse(source, PICKLES) is None
    made = SklearnSource().export(source, {}, tmp_path / "made")
    asked = texts[:40].assign(shop=["unknown", *texts["shop"][1:40]])
    batch = {"shop": asked[["shop"]].to_numpy(object), "size": asked[["size"]].to_numpy(np.float32)}
    np.testing.assert_allclose(run_onnx(made, batch)["prediction"], advised.predict(asked), atol=1e-5)


def test_categories_that_float32_rounds_are_refused(tmp_path: Path) -> None:
    """Broken: category 16,777,217 would be answered as 16,777,216."""
    rows = np.stack([2.0**24 + np.arange(400) % 5, np.arange(400.0)], axis=1)
    model = HistGradientBoostingRegressor(max_iter=3, categorical_features=[0]).fit(rows, np.arange(400) % 5)
    assert "float32 rounds" in (SklearnSource().refuse(save_pickled(tmp_path / "model", model, rows), PICKLES) or "")
