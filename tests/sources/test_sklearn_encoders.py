"""Encoders that were fitted on columns with missing values, texts or numbers, or put rare categories together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, TargetEncoder

from compile_stage.core.records import Compliance
from compile_stage.serving.prediction_io import from_outputs, to_batch
from compile_stage.sources.sklearn import SklearnSource

from .conftest import run_onnx, save_pickled

PICKLES = Compliance(allow_pickle=True)
UNKNOWN: dict[str, Any] = {"handle_unknown": "use_encoded_value", "unknown_value": -1}
ENCODERS = {
    "missing is NaN": OrdinalEncoder(**UNKNOWN),
    "missing is a fraction": OrdinalEncoder(**UNKNOWN, encoded_missing_value=-2.5),
    "rare ones together": OrdinalEncoder(**UNKNOWN, encoded_missing_value=-2, min_frequency=60),
    "unknown is NaN": OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan, encoded_missing_value=9),
    "whole numbers": OrdinalEncoder(**UNKNOWN, encoded_missing_value=-2, dtype=np.int32),
    "targets": TargetEncoder(random_state=0),
}
DRAW = np.random.default_rng(0)
CITIES = np.array(["Bern", "Chur", "Genf", "Zug"], object)
PLACES, SIZES = DRAW.integers(0, 4, 400), DRAW.normal(size=400)
TARGET = np.array([3.0, -4.0, 1.0, -1.0])[PLACES] + SIZES


def with_missing(values: Any, missing: Any) -> pd.DataFrame:
    column = [missing if at % 5 == 0 else value for at, value in enumerate(values)]
    return pd.DataFrame({"city": pd.Series(column, dtype=np.asarray(values).dtype), "size": SIZES})


def with_model(encoder: Any, model: Any) -> Any:
    return make_pipeline(ColumnTransformer([("c", encoder, ["city"])], remainder="passthrough"), model)


@pytest.mark.parametrize("missing", [np.nan, None], ids=["NaN", "None"])
@pytest.mark.parametrize("name", ENCODERS)
def test_texts_that_read_like_a_missing_one_are_unknown(tmp_path: Path, name: str, missing: Any) -> None:
    """Broken: the text "nan" or "None" is answered as a missing one, which the original does not know, and a missing
    one, which it knows, is refused."""
    frame = with_missing(CITIES[PLACES], missing)
    model = with_model(ENCODERS[name], HistGradientBoostingRegressor(max_iter=20)).fit(frame, TARGET)
    source = save_pickled(tmp_path / "model", model, frame)
    assert SklearnSource().refuse(source, PICKLES) is None
    made, how = SklearnSource().export(source, {}, tmp_path / "made"), SklearnSource().prediction_format(source)
    cities = ["nan", "None", "", "Basel", *CITIES, missing, missing]
    asked = pd.DataFrame({"city": pd.Series(cities, dtype=object), "size": 0.1})
    found = from_outputs(run_onnx(made, to_batch(asked, made.signature, how)), asked, how)
    np.testing.assert_allclose(found, model.predict(asked), atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_missing_number_is_the_category_that_the_encoder_knows(tmp_path: Path, name: str) -> None:
    """Broken: each NaN is answered as an unknown number, and a fraction of `encoded_missing_value` is cut off."""
    frame = with_missing(1.5 * PLACES, np.nan)
    model = with_model(ENCODERS[name], HistGradientBoostingRegressor(max_iter=20)).fit(frame, TARGET)
    source = save_pickled(tmp_path / "model", model, frame)
    assert SklearnSource().refuse(source, PICKLES) is None
    made = SklearnSource().export(source, {}, tmp_path / "made")
    asked = pd.DataFrame({"city": [np.nan, -0.0, 1.5, 4.5, 1.0, 7.0], "size": 0.1})
    found = run_onnx(made, {"X": asked.to_numpy(np.float32)})["prediction"]
    np.testing.assert_allclose(found, model.predict(asked), atol=1e-5)


def test_a_target_of_several_classes_has_a_column_for_each(tmp_path: Path) -> None:
    """Broken: a TargetEncoder before a classifier of three classes is refused."""
    frame = with_missing(CITIES[PLACES], None)
    classes = np.digitize(TARGET, [-2.0, 2.0])
    model = with_model(TargetEncoder(random_state=0), HistGradientBoostingClassifier(max_iter=5)).fit(frame, classes)
    source = save_pickled(tmp_path / "model", model, frame)
    assert SklearnSource().refuse(source, PICKLES) is None
    made, how = SklearnSource().export(source, {}, tmp_path / "made"), SklearnSource().prediction_format(source)
    asked = pd.DataFrame({"city": pd.Series(["None", "Basel", *CITIES, None], dtype=object), "size": 0.1})
    found = run_onnx(made, to_batch(asked, made.signature, how))["probabilities"]
    np.testing.assert_allclose(found, model.predict_proba(asked), atol=1e-5)


MISSED = pd.DataFrame({"shop": [np.nan, 1.0, 2.0, 2.0, 3.0] * 40, "day": [5.0, 6.0] * 100})


@pytest.mark.parametrize("columns", [["shop"], ["shop", "day"]], ids=["one column", "two"])
@pytest.mark.parametrize("rare", [None, 50], ids=["each", "rare ones together"])
@pytest.mark.parametrize("unknown", ["ignore", "infrequent_if_exist", "error"])
def test_a_missing_number_is_a_category_of_a_one_hot_encoder(
    tmp_path: Path, unknown: Any, rare: int | None, columns: list[str]
) -> None:
    """Broken: the model is refused, by "cannot convert float NaN to integer"."""
    encoder = OneHotEncoder(handle_unknown=unknown, min_frequency=rare)
    model = make_pipeline(make_column_transformer((encoder, columns), remainder="passthrough"), Ridge())
    model.fit(MISSED, MISSED["shop"].fillna(7) ** 2)
    source = save_pickled(tmp_path / "model", model, MISSED)
    assert SklearnSource().refuse(source, PICKLES) is None
    made = SklearnSource().export(source, {}, tmp_path / "made")
    shops = [np.nan, 1.0, 2.0, 3.0] + ([] if unknown == "error" else [2.5, 9.0, -0.0])
    asked = pd.DataFrame({"shop": shops, "day": 5.0})
    found = run_onnx(made, {"X": asked.to_numpy(np.float32)})["prediction"]
    np.testing.assert_allclose(found, model.predict(asked), rtol=1e-5)


@pytest.mark.parametrize("unknown", ["ignore", "infrequent_if_exist", "error"])
def test_rare_texts_of_one_column_are_put_together(tmp_path: Path, unknown: Any) -> None:
    """Broken: the model is refused, by skl2onnx's "Infrequent categories are not implemented"."""
    frame = pd.DataFrame({"city": ["Bern", "Bern", "Bern", "Chur", "Zug"] * 40, "size": np.arange(200.0)})
    encoder = OneHotEncoder(handle_unknown=unknown, min_frequency=50)
    model = make_pipeline(make_column_transformer((encoder, ["city"]), remainder="passthrough"), Ridge())
    model.fit(frame, frame["city"].str.len())
    source = save_pickled(tmp_path / "model", model, frame)
    assert SklearnSource().refuse(source, PICKLES) is None
    made = SklearnSource().export(source, {}, tmp_path / "made")
    cities = ["Bern", "Chur", "Zug"] + ([] if unknown == "error" else ["Basel", ""])
    asked = pd.DataFrame({"city": pd.Series(cities, dtype=object), "size": 1.0})
    batch = {"city": asked[["city"]].to_numpy(object), "size": asked[["size"]].to_numpy(np.float32)}
    np.testing.assert_allclose(run_onnx(made, batch)["prediction"], model.predict(asked), rtol=1e-5)
