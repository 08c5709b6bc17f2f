"""statsmodels' linear models: the original's predictions, by column, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from factories import target
from mlflow.models import infer_signature

from compile_stage.core.records import Compliance, SourceModel
from compile_stage.serving.prediction_io import from_outputs, to_batch

from .conftest import Proof, run_onnx, source_of

sm = pytest.importorskip("statsmodels.api")
smf = pytest.importorskip("statsmodels.formula.api")

from compile_stage.sources.statsmodels import StatsmodelsSource  # noqa: E402

PICKLES = Compliance(allow_pickle=True)
RANDOM = np.random.default_rng(0)
FRAME = pd.DataFrame(RANDOM.normal(size=(120, 3)), columns=["a", "b", "c"])
FRAME["y"] = 2 * FRAME.a - FRAME.b + 3 + RANDOM.normal(size=120)
FRAME["yes"] = (FRAME.y > 3).astype(int)
FRAME["count"] = RANDOM.poisson(np.exp(0.3 * FRAME.a))
MATRIX = sm.add_constant(FRAME[["a", "b"]])


def save(path: Path, fitted: Any, rows: pd.DataFrame) -> SourceModel:
    mlflow.statsmodels.save_model(
        fitted, path, signature=infer_signature(rows, fitted.predict(rows)), input_example=rows[:3],
        pip_requirements=["statsmodels"],
    )  # fmt: skip
    return source_of(path, "statsmodels")


COLUMNS = FRAME[["b", "c", "a"]]
MODELS: dict[str, tuple[Callable[[], Any], pd.DataFrame]] = {
    "matrix": (lambda: sm.OLS(FRAME.y, MATRIX).fit(), MATRIX),
    "weights": (lambda: sm.WLS(FRAME.y, MATRIX, weights=1 / (1 + FRAME.c**2)).fit(), MATRIX),
    # Other columns than the formula's, in another order: each has to find its own weight.
    "formula": (lambda: smf.ols("y ~ a + b", FRAME).fit(), COLUMNS),
    "logit": (lambda: smf.logit("yes ~ a + c", FRAME).fit(disp=0), COLUMNS),
    "probit": (lambda: sm.Probit(FRAME.yes, MATRIX).fit(disp=0), MATRIX),
    "poisson": (lambda: smf.poisson("count ~ a", FRAME).fit(disp=0), COLUMNS),
    "glm": (lambda: sm.GLM(FRAME.yes, MATRIX, family=sm.families.Binomial()).fit(), MATRIX),
    "glm-inverse": (
        lambda: sm.GLM(FRAME["count"] + 1.0, MATRIX[["const"]], family=sm.families.Gamma()).fit(), MATRIX[["const"]]
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_the_originals_by_column(
    tmp_path: Path, prove: Proof, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Broken: a column gets another's weight, a link is forgotten, or a data frame is answered with an array where the
    original answers with a Series."""
    fit, rows = MODELS[name]
    source = save(tmp_path / "model", fit(), rows)
    model = prove(source, {"X": rows.to_numpy(np.float32)}, compliance=PICKLES)
    assert str(model.signature.outputs[0]) == "prediction: float32[batch]"
    how = StatsmodelsSource().prediction_format(source)
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    shuffled = rows[5:9]
    expected = mlflow.pyfunc.load_model(source.path).predict(shuffled)
    answer = from_outputs(run_onnx(model, to_batch(shuffled, model.signature, how)), shuffled, how)
    assert isinstance(answer, pd.Series)
    pd.testing.assert_series_equal(answer.astype(np.float64), expected, rtol=1e-5, check_names=False)


@pytest.mark.filterwarnings("ignore")
def test_without_a_signature_a_formula_finds_its_columns_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: of a data frame whose columns are in another order than in the formula, each would get another's weight,
    in every answer of the published model."""
    mlflow.statsmodels.save_model(
        smf.ols("y ~ b + a", FRAME).fit(), tmp_path / "model", pip_requirements=["statsmodels"]
    )
    source = source_of(tmp_path / "model", "statsmodels")
    exporter = StatsmodelsSource()
    model, how = exporter.export(source, {}, tmp_path / "onnx"), exporter.prediction_format(source)
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    rows = FRAME[["a", "b"]][5:9]
    expected = mlflow.pyfunc.load_model(source.path).predict(rows)
    answer = from_outputs(run_onnx(model, to_batch(rows, model.signature, how)), rows, how)
    pd.testing.assert_series_equal(answer.astype(np.float64), expected, rtol=1e-5, check_names=False)


REFUSED = {
    "log": (lambda: smf.ols("y ~ a + np.exp(b)", FRAME).fit(), COLUMNS, r"its formula computes np.exp\(b\)"),
    "product": (lambda: smf.ols("y ~ a * b", FRAME).fit(), COLUMNS, "its formula computes a:b"),
    "other model": (lambda: sm.MNLogit(FRAME["count"].clip(upper=2), MATRIX).fit(disp=0), MATRIX, "class MNLogit"),
    "other link": (
        lambda: sm.GLM(FRAME.yes, MATRIX, family=sm.families.Binomial(sm.families.links.CLogLog())).fit(), MATRIX,
        "its link CLogLog",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_conversion_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    """Broken: a model is compiled without a part of its formula, and its numbers are wrong."""
    fit, rows, reason = REFUSED[name]
    source = save(tmp_path / "model", fit(), rows)
    said = StatsmodelsSource().refuse(source, PICKLES)
    assert said is not None
    assert re.search(reason, said), said


@pytest.mark.filterwarnings("ignore")
def test_pickles_are_refused_unless_the_policy_allows_them(tmp_path: Path) -> None:
    """Broken: a model from the registry runs code without anybody's opt-in."""
    source = save(tmp_path / "model", MODELS["matrix"][0](), MATRIX)
    said = StatsmodelsSource().refuse(source, Compliance())
    assert said is not None
    assert "compliance.allow_pickle" in said


@pytest.mark.parametrize("kind", ["matrix", "formula"])
def test_the_original_is_asked_about_numbers_that_float32_rounds(kind: str, tmp_path: Path) -> None:
    """Broken: the original gets rounded numbers where it is asked what their rounding changes."""
    rows = pd.DataFrame({"one": 1.0, "time": 2.0**26 + np.arange(100) * 7.0})
    late = rows.assign(late=np.arange(100.0))
    fitted = sm.OLS(late.late, rows).fit() if kind == "matrix" else smf.ols("late ~ one + time - 1", late).fit()
    source, given = save(tmp_path / kind, fitted, rows), {"X": rows.to_numpy()}
    with StatsmodelsSource().open_as_given(source, target()) as session:
        answers = session.run(given)
    np.testing.assert_array_equal(answers["prediction"], np.asarray(fitted.predict(rows), np.float32))
    with StatsmodelsSource().open(source, target()) as session:
        assert np.abs(session.run(given)["prediction"] - answers["prediction"]).max() > 0.3
