"""XGBoost, LightGBM and CatBoost: every objective that the sources take, so that no transformation of a converter goes
unproven."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from factories import target
from mlflow.models import infer_signature
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

from compile_stage.core import plugins
from compile_stage.core.records import Compliance, SourceModel, Target
from compile_stage.serving.prediction_io import from_outputs, run_any_rows, to_batch

from .conftest import Proof, run_onnx, source_of

TWO = load_breast_cancer(return_X_y=True)
TEN = load_digits(return_X_y=True)
NUMBER = load_diabetes(return_X_y=True)
DATA = {"binary": TWO, "multi": TEN, "multiclass": TEN}
TRUSTED = [
    "collections.OrderedDict",
    "lightgbm.basic.Booster",
    "lightgbm.sklearn.LGBMClassifier",
    "lightgbm.sklearn.LGBMRegressor",
    "sklearn.preprocessing._label.LabelEncoder",
]


def rows_of(data: Any) -> Any:
    return data[0].astype(np.float32)


def save(path: Path, flavor: str, model: Any, rows: Any, **options: Any) -> SourceModel:
    module = getattr(mlflow, flavor)
    signature = infer_signature(rows, np.zeros(len(rows), np.float32))
    module.save_model(model, path, signature=signature, input_example=rows[:3], pip_requirements=[flavor], **options)
    return source_of(path, flavor)


def prove_answer(source: SourceModel, rows: Any) -> None:
    """The output that `answer` names is what the source's pyfunc answers, and is answered in the pyfunc's type."""
    exporter = plugins.load("sources", source.flavor)
    how = exporter.prediction_format(source)
    answer = mlflow.pyfunc.load_model(source.path).predict(rows)
    assert how["kind"] == "array"
    with exporter.open(source, Target(name="cpu")) as session:
        found = session.run({"X": rows})[how["outputs"][0]]
    assert found.shape == answer.shape
    of_a_graph = found.astype(object) if found.dtype.kind == "U" else found
    assert from_outputs({how["outputs"][0]: of_a_graph}, rows, how).dtype == answer.dtype
    if answer.dtype.kind == "f":
        np.testing.assert_allclose(found, answer, rtol=1e-5)
    else:
        np.testing.assert_array_equal(found, answer)
    if not how.get("no_rows"):
        return
    none = mlflow.pyfunc.load_model(source.path).predict(rows[:0])
    with exporter.open(source, Target(name="cpu")) as session:
        of_none = run_any_rows(session.run, {"X": rows[:0]}, how)[how["outputs"][0]]
    of_none = of_none.astype(object) if of_none.dtype.kind == "U" else of_none
    ours = from_outputs({how["outputs"][0]: of_none}, rows[:0], how)
    assert (ours.shape, ours.dtype) == (none.shape, none.dtype)


XGBOOST = (
    "binary:logistic multi:softprob multi:softmax reg:squarederror reg:absoluteerror reg:pseudohubererror "
    "reg:squaredlogerror reg:quantileerror count:poisson reg:gamma reg:tweedie"
)


@pytest.mark.parametrize("objective", XGBOOST.split())
def test_xgboost_boosters(tmp_path: Path, prove: Proof, objective: str) -> None:
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    data = DATA.get(objective.partition(":")[0], NUMBER)
    options: dict[str, Any] = {"num_class": 10} if data is TEN else {}
    if objective == "reg:quantileerror":
        options["quantile_alpha"] = 0.8
    model = xgboost.train({"objective": objective, "nthread": 1, **options}, xgboost.DMatrix(rows_of(data), data[1]), 4)
    source = save(tmp_path / "model", "xgboost", model, rows_of(data))
    prove(source, {"X": rows_of(data)}, sizes=(1, 200))
    prove_answer(source, rows_of(data)[:50])


@pytest.mark.parametrize("kind", ["XGBClassifier", "XGBRegressor", "early"])
def test_xgboost_wrappers(tmp_path: Path, prove: Proof, kind: str) -> None:
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    data = NUMBER if kind == "XGBRegressor" else TWO
    rows, wanted = rows_of(data), data[1]
    if kind == "early":  # predictions end at the best round, not at the last one
        model = xgboost.XGBClassifier(n_estimators=40, early_stopping_rounds=2, learning_rate=1.0, n_jobs=1)
        model.fit(rows[:300], wanted[:300], eval_set=[(rows[300:], wanted[300:])], verbose=False)
        assert model.best_iteration < model.get_booster().num_boosted_rounds() - 1
    else:
        model = getattr(xgboost, kind)(n_estimators=4, n_jobs=1).fit(rows, wanted)
    source = save(tmp_path / "model", "xgboost", model, rows)
    made = prove(source, {"X": rows}, sizes=(1, 200))
    assert [spec.name for spec in made.signature.outputs] == (
        ["prediction"] if kind == "XGBRegressor" else ["label", "probabilities"]
    )
    prove_answer(source, rows[:50])


@pytest.mark.parametrize("kind", ["XGBClassifier", "XGBRFClassifier"])
def test_xgboosts_probabilities_are_probabilities(tmp_path: Path, prove: Proof, kind: str) -> None:
    """Broken: of the objective multi:softmax the graph answers with the sums of trees, from -3 to 5, in their place."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows = rows_of(TEN)
    model = getattr(xgboost, kind)(n_estimators=3, objective="multi:softmax", n_jobs=1).fit(rows, TEN[1])
    source = save(tmp_path / "model", "xgboost", model, rows)
    prove(source, {"X": rows}, sizes=(1, 200))
    prove_answer(source, rows[:50])


@pytest.mark.parametrize("objective", ["rank:ndcg", "rank:map", "rank:pairwise"])
@pytest.mark.parametrize("kind", ["booster", "XGBRanker", "early"])
def test_xgboost_rankers(tmp_path: Path, prove: Proof, objective: str, kind: str) -> None:
    """Broken: rankers, whose scores are the sum of their trees as those of regressions, would be refused, or answered
    by another number of trees than predict() takes."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows, wanted = rows_of(TWO), TWO[1]
    if kind == "booster":
        matrix = xgboost.DMatrix(rows, wanted, qid=np.arange(len(rows)) // 20)
        model = xgboost.train({"objective": objective, "nthread": 1, "base_score": 0.7}, matrix, 4)
    else:
        model = xgboost.XGBRanker(objective=objective, n_estimators=4, n_jobs=1, base_score=0.7)
        model.fit(rows, wanted, qid=np.arange(len(rows)) // 20)
        if kind == "early":
            everything = model.predict(rows)
            model.get_booster().set_attr(best_iteration="1")
            assert not np.allclose(everything, model.predict(rows))
    source = save(tmp_path / "model", "xgboost", model, rows)
    prove(source, {"X": rows}, sizes=(1, 200))
    prove_answer(source, rows[:50])


@pytest.mark.parametrize("objective", ["survival:cox", "survival:aft"])
@pytest.mark.parametrize("kind", ["booster", "early", "XGBRegressor"])
def test_xgboost_models_of_survival(tmp_path: Path, prove: Proof, objective: str, kind: str) -> None:
    """Broken: they would be refused, or answered without the exponential that predict() takes of the trees' sum."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows, times = rows_of(NUMBER), np.exp(NUMBER[1] / 100)
    ended = np.arange(len(rows)) % 3 > 0
    data = xgboost.DMatrix(rows, np.where(ended, times, -times))  # Cox: a negative time is one that is not over
    data.set_float_info("label_lower_bound", times)
    data.set_float_info("label_upper_bound", np.where(ended, times, np.inf))
    model = xgboost.train({"objective": objective, "nthread": 1, "base_score": 0.7}, data, 4)
    if kind != "booster":
        saved = tmp_path / "saved.ubj"
        model.save_model(saved)
        model = xgboost.XGBRegressor(n_jobs=1)
        model.load_model(saved)
    if kind == "early":
        model.get_booster().set_attr(best_iteration="1")
    source = save(tmp_path / "model", "xgboost", model, rows)
    prove(source, {"X": rows}, sizes=(1, 200))
    prove_answer(source, rows[:50])


@pytest.mark.parametrize("kind", ["forest", "forests", "booster", "early", "early of two", "early number"])
def test_xgboost_takes_several_trees_a_round(tmp_path: Path, prove: Proof, kind: str) -> None:
    """Broken: the trees of a random forest were given to classes in turn, so that three and more classes were answered
    wrongly, and early stopping kept fewer trees than predict() takes."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    data = {"early of two": TWO, "early number": NUMBER}.get(kind, TEN)
    rows, wanted = rows_of(data), data[1]
    if kind == "booster":
        options = {"objective": "multi:softprob", "num_class": 10, "num_parallel_tree": 3, "subsample": 0.5}
        model = xgboost.train({"nthread": 1, **options}, xgboost.DMatrix(rows, wanted), 2)
    elif kind == "forest":
        model = xgboost.XGBRFClassifier(n_estimators=3, n_jobs=1).fit(rows, wanted)
    else:
        made = xgboost.XGBRegressor if kind == "early number" else xgboost.XGBClassifier
        model = made(n_estimators=4, num_parallel_tree=3, subsample=0.5, n_jobs=1).fit(rows, wanted)
        if "early" in kind:
            everything = model.predict(rows, output_margin=True)
            model.get_booster().set_attr(best_iteration="1")
            assert not np.allclose(everything, model.predict(rows, output_margin=True))
    source = save(tmp_path / "model", "xgboost", model, rows)
    prove(source, {"X": rows}, sizes=(1, 200))


def test_xgboost_takes_truth_values_and_whole_numbers(tmp_path: Path, prove: Proof) -> None:
    """Broken: a model with a column of truth values was refused with "'split_condition'", and whole numbers beyond 32
    bits were compared with what is left of them there."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({"flag": draw.random(300) < 0.5, "count": draw.integers(0, 2**36, 300)})
    wanted = rows["flag"] * 3.0 + (rows["count"] > 2**35)
    model = xgboost.XGBRegressor(n_estimators=4, n_jobs=1).fit(rows, wanted)
    numbers = rows.to_numpy(np.float32)
    source = save(tmp_path / "model", "xgboost", model, numbers)
    made = prove(source, {"X": numbers}, sizes=(1, 200))
    np.testing.assert_allclose(
        run_onnx(made, {"X": numbers})["prediction"].ravel(), model.predict(rows), rtol=1e-4, atol=1e-4
    )


def test_xgboost_refuses_trees_that_answer_for_all_classes_in_the_plan(tmp_path: Path) -> None:
    """Broken: such a model passes the plan and fails in the export, by an assertion of XGBoost's own on tree dumps."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    exporter = plugins.load("sources", "xgboost")
    reasons = []
    for strategy in ("multi_output_tree", "one_output_per_tree"):
        model = xgboost.XGBClassifier(n_estimators=2, n_jobs=1, multi_strategy=strategy).fit(rows_of(TEN), TEN[1])
        reasons.append(exporter.refuse(save(tmp_path / strategy, "xgboost", model, rows_of(TEN)), Compliance()))
    assert "multi_strategy='one_output_per_tree'" in (reasons[0] or "")
    assert reasons[1] is None


# From XGBoost 3.4 on, `booster="dart"` is deprecated, and says so.
@pytest.mark.filterwarnings("ignore:.*`booster=dart` is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("options", "word"),
    [({"booster": "dart", "one_drop": 1}, "dart"), ({"objective": "binary:hinge"}, "binary:hinge")],
)
def test_xgboost_refuses_what_has_no_proven_conversion(tmp_path: Path, options: dict[str, object], word: str) -> None:
    """Broken: the graph of a model with dropout adds its trees as they are, without the weights that dropout gave
    them. XGBoost 3.4 and newer say `gbtree` of it too."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    model = xgboost.train({"nthread": 1, **options}, xgboost.DMatrix(rows_of(TWO), TWO[1]), 2)
    source = save(tmp_path / "model", "xgboost", model, rows_of(TWO))
    assert word in (plugins.load("sources", "xgboost").refuse(source, Compliance()) or "")


def test_xgboost_refuses_categories_whose_types_were_taken_away(tmp_path: Path) -> None:
    """Broken: a plan took the model, whose file says of no column that it holds categories, and only the proof saw that
    the graph compares them with a threshold."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows = np.stack([np.arange(400) % 7, np.arange(400)], axis=1).astype(np.float32)
    data = xgboost.DMatrix(rows, rows[:, 0] % 3, feature_types=["c", "q"], enable_categorical=True)
    model = xgboost.train({"nthread": 1}, data, 2)
    model.feature_types = None
    source = save(tmp_path / "model", "xgboost", model, rows)
    assert "it splits on categories" in (plugins.load("sources", "xgboost").refuse(source, Compliance()) or "")


@pytest.mark.parametrize("ending", ["json", "ubj"])
def test_xgboost_refuses_dropout_that_an_older_one_does_not_see(tmp_path: Path, ending: str) -> None:
    """Broken: XGBoost before 3.4 loads such a file of 3.4 without its weights, and artifacts would be proven against
    other answers than the model's."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows = pd.DataFrame(rows_of(TWO)[:, :2], columns=["weight_drop", "b"])
    model = xgboost.train({"nthread": 1}, xgboost.DMatrix(rows, TWO[1]), 2)
    source = save(tmp_path / "model", "xgboost", model, rows, model_format=ending)
    file = tmp_path / "model" / f"model.{ending}"
    if ending == "json":
        written = json.loads(file.read_text())
        written["learner"]["gradient_booster"]["model"]["weight_drop"] = [0.5, 1.0]
        file.write_text(json.dumps(written))
    else:
        key = b"L" + struct.pack(">q", 5) + b"trees["
        weights = b"L" + struct.pack(">q", 11) + b"weight_drop[#L" + struct.pack(">qcfcf", 2, b"d", 0.5, b"d", 1.0)
        written = file.read_bytes()
        assert written.count(key) == 1
        file.write_bytes(written.replace(key, weights + key))
    assert "dropout" in (plugins.load("sources", "xgboost").refuse(source, Compliance()) or "")


def test_xgboost_takes_dropout_that_is_not_there(tmp_path: Path, prove: Proof) -> None:
    """Broken: a model is refused, or not answered for, for an option that dropped nothing, or for a column's name."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows = pd.DataFrame(rows_of(TWO)[:, :2], columns=["weight_drop", "b"])
    model = xgboost.train({"nthread": 1, "rate_drop": 0.0}, xgboost.DMatrix(rows, TWO[1]), 2)
    source = save(tmp_path / "model", "xgboost", model, rows)
    prove(source, {"X": rows.to_numpy(np.float32)}, sizes=(1, 100))


def test_xgboost_does_not_import_a_class_that_the_model_names(tmp_path: Path) -> None:
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    model = xgboost.train({"nthread": 1}, xgboost.DMatrix(rows_of(TWO), TWO[1]), 1)
    source = save(tmp_path / "model", "xgboost", model, rows_of(TWO))
    about = mlflow.models.Model.load(source.path)
    about.flavors["xgboost"]["model_class"] = "evil.Booster"
    about.save(str(Path(source.path) / "MLmodel"))
    assert "evil.Booster" in (plugins.load("sources", "xgboost").refuse(source, Compliance()) or "")


LIGHTGBM = "binary multiclass regression regression_l1 huber quantile poisson gamma tweedie"


@pytest.mark.parametrize("objective", LIGHTGBM.split())
def test_lightgbm_boosters(tmp_path: Path, prove: Proof, objective: str) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    data = DATA.get(objective, NUMBER)
    options = {"num_class": 10} if data is TEN else {}
    parameters = {"objective": objective, "verbose": -1, "num_threads": 1, **options}
    model = lightgbm.train(parameters, lightgbm.Dataset(data[0], data[1]), 4)
    source = save(tmp_path / "model", "lightgbm", model, rows_of(data))
    prove(source, {"X": rows_of(data)}, sizes=(1, 200))
    prove_answer(source, rows_of(data)[:50])


@pytest.mark.parametrize("objective", ["lambdarank", "rank_xendcg"])
@pytest.mark.parametrize("kind", ["Booster", "LGBMRanker"])
def test_lightgbm_rankers(tmp_path: Path, prove: Proof, objective: str, kind: str) -> None:
    """Broken: rankers, whose scores are the sum of their trees as those of regressors, would be refused."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    rows = rows_of(NUMBER)[:440]
    options = {"objective": objective, "n_estimators": 4, "verbose": -1, "n_jobs": 1, "min_child_samples": 5}
    model = lightgbm.LGBMRanker(**options).fit(rows, NUMBER[1][:440] // 70, group=[44] * 10)
    trusted = [*TRUSTED, "lightgbm.sklearn.LGBMRanker"]
    source = (
        save(tmp_path / "model", "lightgbm", model.booster_, rows)
        if kind == "Booster"
        else save(tmp_path / "model", "lightgbm", model, rows, skops_trusted_types=trusted)
    )
    assert plugins.load("sources", "lightgbm").refuse(source, Compliance()) is None
    prove(source, {"X": rows}, sizes=(1, 200))
    prove_answer(source, rows[:50])


@pytest.mark.parametrize("kind", ["numbers", "text", "truth", "unsigned", "regressor", "early"])
def test_lightgbm_wrappers(tmp_path: Path, prove: Proof, kind: str) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    data = NUMBER if kind == "regressor" else TWO
    rows, wanted = rows_of(data), data[1]
    options = {"n_estimators": 4, "verbose": -1, "n_jobs": 1}
    if kind == "regressor":
        model = lightgbm.LGBMRegressor(**options).fit(rows, wanted)
    elif kind == "early":
        model = lightgbm.LGBMClassifier(**options | {"n_estimators": 40, "learning_rate": 1.0})
        stop = [lightgbm.early_stopping(2, verbose=False)]
        model.fit(rows[:300], wanted[:300], eval_set=[(rows[300:], wanted[300:])], callbacks=stop)
    else:
        labels = {
            "text": np.array(["benign", "malign"])[wanted],
            "truth": wanted > 0,
            "unsigned": wanted.astype("uint8"),
        }
        labels = labels.get(kind, wanted)
        model = lightgbm.LGBMClassifier(**options).fit(rows, labels)
    source = save(tmp_path / "model", "lightgbm", model, rows, skops_trusted_types=TRUSTED)
    made = prove(source, {"X": rows}, sizes=(1, 200))
    # The converter declares one label whatever the batch; the repair gives it the batch.
    assert made.signature.outputs[0].shape == ("batch",)
    prove_answer(source, rows[:50])


def test_lightgbm_compares_and_bends_as_the_original(tmp_path: Path, prove: Proof) -> None:
    """Broken: probabilities are those of another `sigmoid`, and a number that a threshold is in float32 goes to the
    side of the smaller ones where that is rounded up."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    decimals = np.random.default_rng(0).integers(0, 20, (400, 2)) / np.float32(10)
    wanted = decimals.sum(axis=1) + np.random.default_rng(1).normal(size=400) > 2
    settings = {"objective": "binary", "sigmoid": 2.5, "min_data_in_leaf": 2, "verbose": -1, "num_threads": 1}
    model = lightgbm.train(settings, lightgbm.Dataset(decimals.astype(np.float32), wanted), 10)
    asked = (np.random.default_rng(2).integers(0, 40, (400, 2)) / 20).astype(np.float32)
    prove(save(tmp_path / "model", "lightgbm", model, decimals.astype(np.float32)), {"X": asked}, sizes=(1, 400))


def test_lightgbm_refuses_the_square_root_of_a_target(tmp_path: Path) -> None:
    """Broken: every answer is the root of what it should be, and nothing passes."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    rows = rows_of(NUMBER)
    settings = {"objective": "regression", "reg_sqrt": True, "verbose": -1, "num_threads": 1}
    model = lightgbm.train(settings, lightgbm.Dataset(rows, NUMBER[1]), 3)
    source = save(tmp_path / "model", "lightgbm", model, rows)
    assert "reg_sqrt" in (plugins.load("sources", "lightgbm").refuse(source, Compliance()) or "")


def test_lightgbm_refuses_zeros_as_missing_numbers(tmp_path: Path) -> None:
    """Broken: what samples without a zero have proven answers a zero otherwise than the original: the converter reads
    these splits as any others."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    rows = np.where(np.random.default_rng(0).random((400, 3)) < 0.3, 0, np.random.default_rng(1).random((400, 3)))
    wanted = np.where(rows == 0, 2, rows).sum(axis=1)
    reasons = []
    for name, zero in (("zero", True), ("plain", False)):
        settings = {"objective": "regression", "verbose": -1, "num_threads": 1, "zero_as_missing": zero}
        model = lightgbm.train(settings, lightgbm.Dataset(rows, label=wanted), 3)
        source = save(tmp_path / name, "lightgbm", model, rows)
        reasons.append(plugins.load("sources", "lightgbm").refuse(source, Compliance()) or "")
    assert "it takes zeros for missing numbers (zero_as_missing)" in reasons[0]
    assert reasons[1] == ""


def test_lightgbm_refuses_linear_leaves(tmp_path: Path) -> None:
    """Broken: the converter takes each leaf for a constant, and every candidate misses its tolerances with no cause
    named."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    rows = np.random.default_rng(0).random((400, 3))
    settings = {"objective": "regression", "verbose": -1, "num_threads": 1, "linear_tree": True}
    model = lightgbm.train(settings, lightgbm.Dataset(rows, label=rows.sum(axis=1)), 3)
    source = save(tmp_path / "model", "lightgbm", model, rows)
    assert "linear_tree" in (plugins.load("sources", "lightgbm").refuse(source, Compliance()) or "")


def test_lightgbm_refuses_forests(tmp_path: Path) -> None:
    """Broken: the converter adds the trees up, and every candidate misses its tolerances with no cause named."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    rows = np.random.default_rng(0).random((400, 3))
    settings = {"objective": "regression", "verbose": -1, "num_threads": 1, "boosting_type": "rf"}
    settings |= {"bagging_freq": 1, "bagging_fraction": 0.6}
    model = lightgbm.train(settings, lightgbm.Dataset(rows, label=rows.sum(axis=1)), 3)
    source = save(tmp_path / "model", "lightgbm", model, rows)
    assert "boosting_type='rf'" in (plugins.load("sources", "lightgbm").refuse(source, Compliance()) or "")


def shop_data(categories: int) -> tuple[Any, Any]:
    """Rows [2000, 3] with two columns of categories, some of them missing, and a number that hangs on each."""
    draw = np.random.default_rng(categories)
    rows = np.stack([draw.integers(0, categories, 2000), draw.normal(size=2000), draw.integers(0, 3, 2000)], axis=1)
    wanted = draw.normal(size=categories)[rows[:, 0].astype(int)] * rows[:, 1] + rows[:, 2] % 2
    rows[draw.random(rows.shape) < 0.05] = np.nan
    return rows.astype(np.float32), wanted


def unlike(rows: Any) -> Any:
    """As rows, with categories that were never seen, below 0, with fractions, and infinite numbers, in both columns."""
    draw, found = np.random.default_rng(1), rows.copy()
    for column in (0, 2):
        strange = [-1, -0.5, 0.9, 1.5, 2.99, 1000, 5000.25, 1e9, np.inf, -np.inf, np.nan, -0.0]
        found[:1000, column] = draw.choice(np.float32(strange), 1000)
    return found


@pytest.mark.parametrize("categories", [3, 8, 70, 900])
@pytest.mark.parametrize("kind", ["LGBMClassifier", "LGBMRegressor", "Booster"])
def test_lightgbm_splits_on_categories(tmp_path: Path, prove: Proof, kind: str, categories: int) -> None:
    """Broken: what LightGBM's users do most, `categorical_feature`, would be refused, or an unknown category, a missing
    one, or one with a fraction be sent to the other side of a split."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    rows, wanted = shop_data(categories)
    options = {"n_estimators": 8, "n_jobs": 1, "verbose": -1, "min_child_samples": 5, "cat_smooth": 1}
    if kind == "LGBMClassifier":
        wanted = np.digitize(wanted, [0.0, 1.0])
    shape = lightgbm.LGBMRegressor if kind == "Booster" else getattr(lightgbm, kind)
    model = shape(**options).fit(rows, wanted, categorical_feature=[0, 2])
    assert "num_cat=0" not in model.booster_.model_to_string().partition("\nTree=1")[0]
    saved_as = {} if kind == "Booster" else {"serialization_format": "skops", "skops_trusted_types": TRUSTED}
    source = save(tmp_path / "model", "lightgbm", model.booster_ if kind == "Booster" else model, rows, **saved_as)
    prove(source, {"X": rows}, sizes=(1, 200))
    prove(source, {"X": unlike(rows)}, sizes=(1, 2000))
    prove_answer(source, unlike(rows)[:50])


def test_lightgbm_refuses_columns_of_the_type_category(tmp_path: Path) -> None:
    """Broken: the model would be compiled, though its own pyfunc answers nobody, and say the categories' numbers."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    frame = pd.DataFrame({"shop": pd.Categorical(np.arange(200) % 7 + 3), "size": np.arange(200.0)})
    model = lightgbm.LGBMRegressor(n_estimators=3, verbose=-1, n_jobs=1).fit(frame, np.arange(200) % 7)
    signature = infer_signature(frame, np.zeros(200))
    mlflow.lightgbm.save_model(model.booster_, tmp_path / "model", signature=signature, pip_requirements=["lightgbm"])
    reason = plugins.load("sources", "lightgbm").refuse(source_of(tmp_path / "model", "lightgbm"), Compliance()) or ""
    assert "pandas' type category" in reason
    assert "categorical_feature" in reason
    with pytest.raises(ValueError, match="categorical_feature do not match"):  # as the reason says
        mlflow.pyfunc.load_model(str(tmp_path / "model")).predict(frame.astype({"shop": "int64"}))


def test_lightgbm_refuses_categories_that_float32_rounds(tmp_path: Path) -> None:
    """Broken: category 16,777,217 would be answered as 16,777,216."""
    lightgbm = pytest.importorskip("lightgbm", reason="the LightGBM source needs lightgbm")
    rows = np.stack([2**24 + np.arange(400) % 5, np.arange(400)], axis=1).astype(np.float64)
    options = {"objective": "regression", "verbose": -1, "num_threads": 1, "min_data_per_group": 1, "cat_smooth": 0.0}
    data = lightgbm.Dataset(rows, np.arange(400) % 5, categorical_feature=[0])
    source = save(tmp_path / "model", "lightgbm", lightgbm.train(options, data, 2), rows)
    assert "number them from 0" in (plugins.load("sources", "lightgbm").refuse(source, Compliance()) or "")


def catboost_model(kind: str, loss: str, data: Any, **options: Any) -> Any:
    catboost = pytest.importorskip("catboost", reason="the CatBoost source needs catboost")
    settings = {"iterations": 4, "depth": 4, "verbose": 0, "thread_count": 1, "allow_writing_files": False, **options}
    return getattr(catboost, kind)(loss_function=loss, **settings).fit(rows_of(data), data[1])


CATBOOST = "RMSE MAE Quantile:alpha=0.9 Huber:delta=20 MAPE LogCosh"


@pytest.mark.parametrize("loss", CATBOOST.split())
def test_catboost_regressors(tmp_path: Path, prove: Proof, loss: str) -> None:
    """Broken: a loss whose transformation CatBoost's export leaves out would be taken, or one that it gets right
    refused."""
    model = catboost_model("CatBoostRegressor", loss, NUMBER)
    source = save(tmp_path / "model", "catboost", model, rows_of(NUMBER))
    prove(source, {"X": rows_of(NUMBER)}, sizes=(1, 200))
    prove_answer(source, rows_of(NUMBER)[:50])


CATBOOST_RANKS = (
    "YetiRank YetiRankPairwise PairLogit PairLogitPairwise QueryRMSE QuerySoftMax StochasticFilter "
    "StochasticRank:metric=NDCG LambdaMart GroupQuantile"
)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *(("CatBoostRanker", loss) for loss in CATBOOST_RANKS.split()),
        *(("CatBoost", loss) for loss in ("RMSE", "MAE", "YetiRank")),
    ],
)
def test_catboost_rankers_and_plain_models(tmp_path: Path, prove: Proof, kind: str, loss: str) -> None:
    """Broken: rankers, and models of the class that `catboost.train` answers with, were refused by their class."""
    catboost = pytest.importorskip("catboost", reason="the CatBoost source needs catboost")
    rows = rows_of(TWO)
    pool = catboost.Pool(rows, TWO[1].astype(float), group_id=np.arange(len(rows)) // 10)
    settings = {"iterations": 4, "depth": 4, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    settings["loss_function"] = loss
    model = (catboost.CatBoost(settings) if kind == "CatBoost" else getattr(catboost, kind)(**settings)).fit(pool)
    source = save(tmp_path / "model", "catboost", model, rows)
    assert plugins.load("sources", "catboost").refuse(source, Compliance()) is None
    prove(source, {"X": rows}, sizes=(1, 200))
    prove_answer(source, rows[:50])


@pytest.mark.parametrize("loss", ["Logloss", "CrossEntropy", "MultiClass", "text"])
def test_catboost_classifiers(tmp_path: Path, prove: Proof, loss: str) -> None:
    """Broken: labels or probabilities differ from the original's, or labels come in another shape than its own."""
    data = TEN if loss == "MultiClass" else TWO
    if loss == "text":
        data = (TWO[0], np.array(["benign", "malign"])[TWO[1]])
    model = catboost_model("CatBoostClassifier", "Logloss" if loss == "text" else loss, data)
    source = save(tmp_path / "model", "catboost", model, rows_of(data))
    portable = prove(source, {"X": rows_of(data)}, sizes=(1, 200))
    # CatBoost's own predict gives a column where there are more than two classes.
    assert portable.signature.outputs[0].shape == (("batch", 1) if data is TEN else ("batch",))
    prove_answer(source, rows_of(data)[:50])


@pytest.mark.parametrize(
    ("kind", "loss", "data", "word"),
    [
        ("CatBoostClassifier", "MultiClassOneVsAll", TEN, "'MultiClassOneVsAll' has no proven conversion"),
        ("CatBoostRegressor", "Poisson", NUMBER, "'Poisson' has no proven conversion"),
        ("CatBoost", "Poisson", NUMBER, "'Poisson' has no proven conversion"),
    ],
)
def test_catboost_refuses_what_has_no_proven_conversion(
    tmp_path: Path, kind: str, loss: str, data: Any, word: str
) -> None:
    """Broken: CatBoost 1.2.10 exports these with another meaning than its predict, without a word."""
    catboost = pytest.importorskip("catboost", reason="the CatBoost source needs catboost")
    if kind == "CatBoost":
        settings = {"iterations": 2, "loss_function": loss, "verbose": 0, "allow_writing_files": False}
        model = catboost.CatBoost(settings).fit(rows_of(data), data[1])
    else:
        model = catboost_model(kind, loss, data)
    source = save(tmp_path / "model", "catboost", model, rows_of(data))
    assert word in (plugins.load("sources", "catboost").refuse(source, Compliance()) or "")


def test_catboost_refuses_trees_that_are_not_symmetric(tmp_path: Path) -> None:
    """Broken: a plan took the model, and the run ended in a path of CatBoost's C++ source."""
    model = catboost_model("CatBoostRegressor", "RMSE", NUMBER, grow_policy="Depthwise")
    source = save(tmp_path / "model", "catboost", model, rows_of(NUMBER))
    assert "grow_policy='SymmetricTree'" in (plugins.load("sources", "catboost").refuse(source, Compliance()) or "")


@pytest.mark.parametrize("names", [[1, 2], [-1, 1], [0, 7]])
def test_catboost_of_two_classes_answers_with_their_numbers(tmp_path: Path, prove: Proof, names: list[int]) -> None:
    """Broken: every label is 0 or 1, whatever the classes are called, and no candidate of such a model passes."""
    model = catboost_model("CatBoostClassifier", "Logloss", (TWO[0], np.array(names)[TWO[1]]))
    source = save(tmp_path / "model", "catboost", model, rows_of(TWO))
    prove(source, {"X": rows_of(TWO)}, sizes=(1, 200))
    prove_answer(source, rows_of(TWO)[:50])


def test_catboost_with_truth_values_as_labels(tmp_path: Path, prove: Proof) -> None:
    """Broken: a model that was fitted on `y > 0` ended in CatBoost's "Unexpected label type"."""
    model = catboost_model("CatBoostClassifier", "Logloss", (TWO[0], TWO[1] > 0))
    source = save(tmp_path / "model", "catboost", model, rows_of(TWO))
    proven = prove(source, {"X": rows_of(TWO)})
    assert [str(spec.dtype) for spec in proven.signature.outputs] == ["bool", "float32"]


def test_catboost_refuses_floats_as_labels(tmp_path: Path) -> None:
    """Broken: a plan took the model, and the run ended in a path of CatBoost's C++ source."""
    model = catboost_model("CatBoostClassifier", "Logloss", (TWO[0], TWO[1] + 1.0))
    source = save(tmp_path / "model", "catboost", model, rows_of(TWO))
    assert "its labels are floats" in (plugins.load("sources", "catboost").refuse(source, Compliance()) or "")


def test_catboost_refuses_categories_and_thresholds(tmp_path: Path) -> None:
    """Broken: a model that splits on categories would end in CatBoost's own error, and a moved threshold be lost."""
    catboost = pytest.importorskip("catboost", reason="the CatBoost source needs catboost")
    rows = np.random.default_rng(0).integers(0, 5, (200, 2))
    settings = {"iterations": 3, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    model = catboost.CatBoostClassifier(**settings, cat_features=[0]).fit(rows, rows[:, 0] == 2)
    about = {"signature": infer_signature(rows, np.zeros(len(rows)))}
    mlflow.catboost.save_model(model, tmp_path / "categories", pip_requirements=["catboost"], **about)
    refuse = plugins.load("sources", "catboost").refuse
    assert "splits on categories (columns 0)" in (
        refuse(source_of(tmp_path / "categories", "catboost"), Compliance()) or ""
    )

    model = catboost_model("CatBoostClassifier", "Logloss", TWO)
    model.set_probability_threshold(0.3)
    source = save(tmp_path / "threshold", "catboost", model, rows_of(TWO))
    assert "probability threshold" in (refuse(source, Compliance()) or "")


@pytest.mark.parametrize("wrapped", [True, False])
def test_xgboost_refuses_params_whose_default_changes_the_answer(tmp_path: Path, wrapped: bool) -> None:
    """Broken: the original answers margins, by a param of its signature, and the published model predictions."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows = rows_of(TWO)
    model = (
        xgboost.XGBClassifier(n_estimators=2, n_jobs=1).fit(rows, TWO[1])
        if wrapped
        else xgboost.train({"objective": "binary:logistic", "nthread": 1}, xgboost.DMatrix(rows, TWO[1]), 2)
    )
    exporter = plugins.load("sources", "xgboost")
    reasons, compiled = [], []
    for name, params in (("other", {"output_margin": True}), ("own", {"output_margin": False, "unknown": 3})):
        path = tmp_path / name
        signature = infer_signature(rows, np.zeros(len(rows), np.float32), params=params)
        mlflow.xgboost.save_model(model, path, signature=signature, pip_requirements=["xgboost"])
        source = source_of(path, "xgboost")
        reasons.append(exporter.refuse(source, Compliance()) or "")
        compiled.append(exporter.prediction_format(source)["params"])
    assert "param output_margin with the default True" in reasons[0]
    assert "compiled is output_margin=False" in reasons[0]
    assert reasons[1] == ""
    assert compiled[1] == {"output_margin": False}


def reversed_frame(path: Path, flavor: str, model: Any, rows: Any) -> SourceModel:
    """The model, fitted on a data frame, logged with the signature of one whose columns come the other way round."""
    signature = infer_signature(rows[rows.columns[::-1]], np.zeros(len(rows), np.float32))
    getattr(mlflow, flavor).save_model(model, path, signature=signature, pip_requirements=[flavor])
    return source_of(path, flavor)


@pytest.mark.parametrize("wrapped", [True, False])
def test_xgboost_refuses_a_signature_of_other_columns_than_it_was_fitted_on(tmp_path: Path, wrapped: bool) -> None:
    """Broken: XGBoost refuses every data frame, and a published version answers, with its columns mixed up."""
    xgboost = pytest.importorskip("xgboost", reason="the XGBoost source needs xgboost")
    rows = pd.DataFrame(rows_of(TWO)[:, :3], columns=list("abc"))
    model = (
        xgboost.XGBClassifier(n_estimators=2, n_jobs=1).fit(rows, TWO[1])
        if wrapped
        else xgboost.train({"objective": "binary:logistic", "nthread": 1}, xgboost.DMatrix(rows, TWO[1]), 2)
    )
    source = reversed_frame(tmp_path / "model", "xgboost", model, rows)
    with pytest.raises(ValueError, match="feature_names mismatch"):
        mlflow.pyfunc.load_model(source.path).predict(rows)
    reason = plugins.load("sources", "xgboost").refuse(source, Compliance()) or ""
    assert "its signature has 'c' as column 1, where it was fitted on 'a'" in reason


def test_catboost_picks_columns_by_name(tmp_path: Path, prove: Proof) -> None:
    """Broken: logged with another order of columns than it was fitted on, CatBoost answers by their names, and the
    published version with its columns mixed up."""
    pytest.importorskip("catboost", reason="the CatBoost source needs catboost")
    rows = pd.DataFrame(rows_of(TWO)[:, :3], columns=list("abc"))
    model = catboost_model("CatBoostClassifier", "Logloss", (rows, TWO[1]))
    source = reversed_frame(tmp_path / "model", "catboost", model, rows)
    turned = rows[list("cba")]
    made = prove(source, {"X": turned.to_numpy()})
    answer = mlflow.pyfunc.load_model(source.path).predict(rows)
    how = plugins.load("sources", "catboost").prediction_format(source)
    published = from_outputs(run_onnx(made, to_batch(rows, made.signature, how)), rows, how)
    np.testing.assert_array_equal(published, answer)
    assert (model.predict(turned.to_numpy()) != answer).any()  # by place they would be others


def test_lightgbm_is_asked_about_numbers_that_float32_rounds(tmp_path: Path) -> None:
    """Broken: the original gets rounded numbers where it is asked what their rounding changes."""
    lightgbm = pytest.importorskip("lightgbm")
    rows = np.stack([1.7e9 + np.arange(400) * 7.0, np.linspace(0, 3, 400)], axis=1)
    settings = {"objective": "regression", "verbose": -1, "num_threads": 1, "min_data_in_leaf": 1}
    model = lightgbm.train(settings, lightgbm.Dataset(rows, label=rows[:, 0] % 60), 3)
    mlflow.lightgbm.save_model(model, tmp_path / "times", pip_requirements=["lightgbm"])
    source, exporter = source_of(tmp_path / "times", "lightgbm"), plugins.load("sources", "lightgbm")
    with exporter.open_as_given(source, target()) as session:
        answers = session.run({"X": rows})
    np.testing.assert_array_equal(answers["prediction"], model.predict(rows).astype(np.float32))
    assert np.any(answers["prediction"] != model.predict(rows.astype(np.float32)).astype(np.float32))
