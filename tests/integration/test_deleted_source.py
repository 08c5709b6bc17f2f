"""A published version whose source was deleted from the registry: what can still be said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlflow
import onnx
import pytest

from compile_stage import api
from compile_stage.core.errors import RegistryError

pytestmark = [
    pytest.mark.usefixtures("known_original", "embedded"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}"


def test_a_deleted_source_is_found_by_its_logged_model_or_said_with_what_works_without_it(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: who clears up old versions of a model can't verify what was made from them, and is told to check a name
    that was right."""
    client = mlflow.MlflowClient()
    logged = mlflow.onnx.log_model(
        onnx.load(small_model / "model.onnx"), name="net", registered_model_name="net", pip_requirements=["onnx"]
    )
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    result = api.run("models:/net/1", policy, out=tmp_path / "out")
    receipt = result.targets[0].receipt
    assert receipt is not None, result.problem

    client.delete_model_version("net", "1")
    assert api.verify(receipt.uri).passed, "its logged model is still there, with the same files"

    client.delete_logged_model(logged.model_id)
    with pytest.raises(RegistryError) as gone:
        api.verify(receipt.uri)
    assert gone.value.where == "models:/net/1"
    assert gone.value.problem.startswith("the source that it was made from can't be had any more: ")
    assert "compile-stage verify URI --no-revalidate" in gone.value.fix
    assert api.verify(receipt.uri, revalidate=False).passed, "the advice is right"
    with pytest.raises(RegistryError, match="can't be had any more"):
        api.validate(receipt.uri)
