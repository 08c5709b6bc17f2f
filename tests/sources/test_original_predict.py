"""When MLflow may load the original, and what its predict() is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance, Predictions, SourceModel
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.sources import original_predict

CAREFUL, OPEN = Compliance(), Compliance(allow_pickle=True)
MATRIX = Signature(inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 2)),), outputs=())


def model(flavor: str, own: dict[str, Any], pyfunc: dict[str, Any] | None, **more: Any) -> SourceModel:
    flavors = {flavor: own, **({"python_function": pyfunc} if pyfunc is not None else {})}
    return SourceModel(
        uri="models:/m/1",
        name="m",
        version="1",
        flavor=flavor,
        path=str(more.pop("path", "/nowhere")),
        digest="d",
        registry="mlflow",
        mlmodel={"flavors": flavors, **more},
    )


def mlflows(flavor: str, **conf: Any) -> dict[str, Any]:
    return {"loader_module": f"mlflow.{flavor}", **conf}


SKOPS = {"pickled_model": "model.skops", "serialization_format": "skops"}


@pytest.mark.parametrize(
    ("flavor", "own", "pyfunc", "said"),
    [
        ("sklearn", SKOPS, mlflows("sklearn", model_path="model.skops"), None),
        ("sklearn", SKOPS, mlflows("sklearn", model_path="other.pkl"), "reads other files than its flavor"),
        ("sklearn", SKOPS, mlflows("sklearn", model_path="model.skops", data="x.pkl"), "reads other files"),
        ("sklearn", SKOPS, {"loader_module": "evil"}, "loaded by evil, which is not MLflow's own for sklearn"),
        ("sklearn", SKOPS, mlflows("sklearn", model_path="model.skops", code="code"), "brings code of its own"),
        ("sklearn", SKOPS, None, "it has no predict()"),
        ("onnx", {"data": "model.onnx"}, mlflows("onnx", data="model.onnx"), None),
        (
            "onnx",
            {"data": "model.onnx", "providers": [["TensorrtExecutionProvider", {"trt_extra_plugin_lib_paths": "x"}]]},
            mlflows("onnx", data="model.onnx"),
            "may name libraries",
        ),
        ("xgboost", {"data": "m.json", "model_class": "xgboost.core.Booster"}, mlflows("xgboost", data="m.json"), None),
        ("xgboost", {"data": "m.json", "model_class": "os.abort"}, mlflows("xgboost", data="m.json"), "not XGBoost's"),
        ("lightgbm", {"data": "m.lgb"}, mlflows("lightgbm", data="m.lgb"), None),
        ("catboost", {"data": "m.cbm"}, mlflows("catboost", data="m.cbm"), None),
        ("sentence_transformers", {}, mlflows("sentence_transformers", data="m"), "may run code"),
        ("tensorflow", {"data": "data"}, mlflows("tensorflow", data="data"), "may run code"),
        ("jax", {"data": "data"}, {"loader_module": "exported_jax", "data": "data", "code": "code"}, "not what this"),
    ],
)
def test_without_the_opt_in_only_loaders_that_read_data_are_called(
    flavor: str, own: dict[str, Any], pyfunc: dict[str, Any] | None, said: str | None
) -> None:
    """Broken: the code of a registry's model would run because a report wants a figure."""
    reason = original_predict.refuse(model(flavor, own, pyfunc), CAREFUL)
    assert reason is None if said is None else said in (reason or "")
    if pyfunc is not None:
        assert original_predict.refuse(model(flavor, own, pyfunc), OPEN) is None


def test_a_pytorch_archive_is_loaded_and_a_pickle_beside_it_is_not(tmp_path: Path) -> None:
    """Broken: MLflow takes the pickle where both are there; the source took the archive."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "model.pt2").touch()
    found = model("pytorch", {"model_data": "data"}, mlflows("pytorch", data="data"), path=tmp_path)
    assert original_predict.refuse(found, CAREFUL) is None
    (tmp_path / "data" / "model.pth").touch()
    assert "it is a pickle" in (original_predict.refuse(found, CAREFUL) or "")


def test_a_jax_model_is_loaded_by_the_loader_of_this_release(tmp_path: Path) -> None:
    """Broken: a changed loader in the model's folder would run as if it were ours; or ours would be refused."""
    code = tmp_path / "code"
    code.mkdir()
    ours = Path(original_predict.__file__).parents[1] / "serving" / "exported_jax.py"
    shutil.copyfile(ours, code / "exported_jax.py")
    pyfunc = {"loader_module": "exported_jax", "data": "data", "code": "code"}
    found = model("jax", {"data": "data"}, pyfunc, path=tmp_path)
    assert original_predict.refuse(found, CAREFUL) is None
    (code / "more.py").touch()
    assert original_predict.refuse(found, CAREFUL) is not None


def described(signature: Signature, inputs: list[dict[str, Any]] | None, asked: Predictions | None = None) -> Any:
    more = {} if inputs is None else {"signature": {"inputs": json.dumps(inputs)}}
    return original_predict.describe_input(model("onnx", {}, {}, **more), signature, asked)


def test_the_signature_says_what_predict_is_given() -> None:
    """Broken: a data frame would be timed where clients send arrays, which is by far slower."""
    columns = [{"type": "double", "name": "a"}, {"type": "long", "name": "b"}]
    assert described(MATRIX, columns)["columns"] == [["a", "float64"], ["b", "int64"]]
    tensor = {"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-1, 2]}}
    assert described(MATRIX, [tensor])["dtypes"] == {"X": "float64"}
    assert described(MATRIX, [{**tensor, "name": "X"}])["kind"] == "dict"
    assert described(MATRIX, None)["kind"] == "array"
    texts = Predictions(texts=("a", "b"), ids=(), answer={}, column="text")
    assert described(MATRIX, columns, texts)["words"] == "a data frame"


def test_tensors_are_not_given_to_a_predict_that_takes_text() -> None:
    """Broken: the report would give pandas' error for numbers in a text column as the reason."""
    with pytest.raises(SourceError, match=r"its predict\(\) takes text \(text\), and the published one tensors"):
        described(MATRIX, [{"type": "string", "name": "text"}])


def test_an_onnx_session_has_the_targets_threads(tmp_path: Path) -> None:
    """Broken: the original would have all cores, and the artifact the target's one."""
    from factories import target
    from small_net import write_small_net

    path = write_small_net(tmp_path)
    source = SourceModel(
        uri="folder:x", name="x", version="", flavor="onnx", path=str(path), digest="d", registry="folder"
    )
    with original_predict.open_predict(source, CAREFUL, target(threads=1)) as loaded:
        assert loaded._model_impl.rt.get_session_options().intra_op_num_threads == 1
        assert loaded.predict(np.zeros((2, 8), np.float32))["y"].shape == (2, 4)
    assert "intra_op_num_threads" not in (path / "MLmodel").read_text()
