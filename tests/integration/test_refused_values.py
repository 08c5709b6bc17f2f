"""A published model refuses missing numbers, numbers beyond a table and unknown categories where its original does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from factories import policy_text
from mlflow.exceptions import MlflowException
from mlflow.models import infer_signature

from compile_stage import api

pytest.importorskip("skl2onnx", reason="the scikit-learn source needs skl2onnx")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}\n"
    "compliance: {allow_pickle: true}"
)
TARGET = "backends: [onnxruntime], precisions: [fp32], batch_sizes: [1, 4]"
RANDOM = np.random.default_rng(0)


def published(folder: Path, estimator: Any, rows: Any, data: Path) -> Any:
    """The published model, as MLflow loads it."""
    model = folder / "model"
    mlflow.sklearn.save_model(
        estimator, str(model), serialization_format="cloudpickle", pip_requirements=["scikit-learn"],
        signature=infer_signature(rows, estimator.predict(rows)), input_example=rows[:20],
    )  # fmt: skip
    policy = folder / "policy.yaml"
    policy.write_text(policy_text(data, TARGET, BODY))
    result = api.run(f"folder:{model}", policy, out=folder / "out", publish=False)
    assert result.exit_code == 0, result.problem
    bundle = result.targets[0].bundle
    assert bundle is not None
    return mlflow.pyfunc.load_model(bundle.path)


def arrays(folder: Path, rows: Any) -> Path:
    np.savez(folder / "data.npz", X=rows)
    return folder / "data.npz"


def test_a_row_that_the_original_refuses_is_refused(tmp_path: Path) -> None:
    """Broken: a model that demands complete rows would invent an answer to an incomplete one."""
    from sklearn.linear_model import LogisticRegression

    rows = RANDOM.normal(size=(200, 6)).astype(np.float32)
    estimator = LogisticRegression().fit(rows, rows[:, 0] > 0)
    loaded = published(tmp_path, estimator, rows, arrays(tmp_path, rows))
    given = rows[:3].copy()
    np.testing.assert_array_equal(loaded.predict(given), estimator.predict(given))
    given[1, 2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        estimator.predict(given)
    with pytest.raises(MlflowException, match="holds a missing number") as refused:
        loaded.predict(given)
    assert refused.value.get_http_status_code() == 400


def test_columns_are_asked_one_by_one(tmp_path: Path) -> None:
    """Broken: a missing number in a column without an imputer would be answered, or one in a column with an imputer
    refused."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    frame = pd.DataFrame(
        {
            "age": RANDOM.integers(18, 80, 300),
            "income": RANDOM.normal(50, 9, 300),
            "debt": RANDOM.normal(9, 3, 300),
            "city": RANDOM.choice(["Rome", "Oslo", "Bonn"], 300),
        }
    )
    labels = np.where(frame["income"] + frame["age"] + frame["debt"] > 110, "yes", "no")
    columns = ColumnTransformer(
        [
            ("plain", "passthrough", ["age", "income"]),
            ("filled", SimpleImputer(), ["debt"]),
            ("city", OneHotEncoder(handle_unknown="ignore"), ["city"]),
        ]
    )
    estimator = make_pipeline(columns, LogisticRegression(max_iter=1000)).fit(frame, labels)
    frame.to_csv(tmp_path / "data.csv", index=False)
    loaded = published(tmp_path, estimator, frame, tmp_path / "data.csv")
    given = frame[:2].copy()
    given.loc[0, "debt"] = np.nan
    np.testing.assert_array_equal(loaded.predict(given), estimator.predict(given))
    given.loc[1, "income"] = np.nan
    with pytest.raises(MlflowException, match=r"input 'income' holds a missing number .* Input X contains NaN"):
        loaded.predict(given)
    given = frame[:2].copy()
    given.loc[0, "city"] = None  # to this encoder one that it does not know
    np.testing.assert_array_equal(loaded.predict(given), estimator.predict(given))


def test_trees_that_know_missing_numbers_go_on_to_take_them(tmp_path: Path) -> None:
    """Broken: a model that was trained on incomplete rows would refuse them once it is compiled."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    rows = RANDOM.normal(size=(400, 5)).astype(np.float32)
    labels = rows[:, 0] + rows[:, 1] > 0
    rows[RANDOM.random(rows.shape) < 0.1] = np.nan
    estimator = HistGradientBoostingClassifier(max_iter=20).fit(rows, labels)
    loaded = published(tmp_path, estimator, rows, arrays(tmp_path, rows))
    np.testing.assert_array_equal(loaded.predict(rows), estimator.predict(rows))
    assert loaded.get_raw_model().manifest["missing"] == {"refused": []}


@pytest.mark.parametrize("encoder", ["OneHotEncoder", "OrdinalEncoder"])
@pytest.mark.parametrize("texts", [True, False])
def test_a_category_that_the_original_does_not_know_is_refused(encoder: str, texts: bool, tmp_path: Path) -> None:
    """Broken: an unknown city would be answered as if it were a known one; or a known one that the samples lack be
    refused."""
    from sklearn import preprocessing
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    zones = np.where(RANDOM.random(300) < 0.5, 1, 5)
    zones[:3] = 9
    frame = pd.DataFrame({"age": RANDOM.normal(40, 9, 300), "zone": zones})
    if texts:
        frame["city"] = RANDOM.choice(["Rome", "Oslo", "Bonn"], 300)
    chosen = ["zone", "city"] if texts else ["zone"]
    columns = ColumnTransformer(
        [("coded", getattr(preprocessing, encoder)(), chosen), ("plain", "passthrough", ["age"])]
    )
    estimator = make_pipeline(columns, LogisticRegression(max_iter=1000)).fit(frame, frame["age"] + zones > 43)
    frame[3:].to_csv(tmp_path / "data.csv", index=False)
    loaded = published(tmp_path, estimator, frame, tmp_path / "data.csv")
    known = frame[:5]  # the samples have no zone 9
    np.testing.assert_array_equal(loaded.predict(known), estimator.predict(known))
    for column, value in [("zone", 7), *([("city", "Paris")] if texts else [])]:
        given = known.copy()
        given.loc[2, column] = value
        with pytest.raises(ValueError, match="unknown categories"):
            estimator.predict(given)
        with pytest.raises(MlflowException, match=rf"{column}.* holds {value!r}, and takes .*refuses any") as refused:
            loaded.predict(given)
        assert refused.value.get_http_status_code() == 400


def test_a_number_beyond_the_table_is_refused(tmp_path: Path) -> None:
    """Broken: OpenVINO answers any number, with what lies beside the table; the original raises."""
    pytest.importorskip("openvino", reason="ONNX Runtime itself refuses such numbers; OpenVINO does not")
    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    table = numpy_helper.from_array(RANDOM.normal(size=(50, 8)).astype(np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["rows"]), helper.make_node("Tanh", ["rows"], ["y"])],
        "embedding",
        [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3, 8])],
        [table],
    )
    network = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    original = onnxruntime.InferenceSession(network.SerializeToString())
    ids = RANDOM.integers(40, size=(200, 3))
    mlflow.onnx.save_model(
        network, str(tmp_path / "model"), signature=infer_signature({"ids": ids}, original.run(None, {"ids": ids})[0])
    )
    np.savez(tmp_path / "data.npz", ids=ids)
    policy = tmp_path / "policy.yaml"
    target = "backends: [openvino], precisions: [fp32], batch_sizes: [1, 4]"
    policy.write_text(policy_text(tmp_path / "data.npz", target, BODY))
    result = api.run(f"folder:{tmp_path / 'model'}", policy, out=tmp_path / "out", publish=False)
    assert result.exit_code == 0, result.problem
    bundle = result.targets[0].bundle
    assert bundle is not None
    loaded = mlflow.pyfunc.load_model(bundle.path)
    edges = np.array([[0, 49, -1], [-50, 45, 3]])  # ONNX counts negative numbers from the end
    (expected,) = original.run(None, {"ids": edges})
    np.testing.assert_allclose(loaded.predict({"ids": edges})["y"], expected, rtol=1e-5, atol=1e-6)
    for number in (50, -51, 2**40):
        with pytest.raises(
            MlflowException, match=f"input 'ids' holds {number}, and takes whole numbers from -50 to 49"
        ):
            loaded.predict({"ids": np.array([[0, number, 1]])})
