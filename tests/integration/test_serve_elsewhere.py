"""A published model serves where only its own `requirements.txt` is installed, and answers as its source did.

Where that is, and how it gets there, is said in `tests/elsewhere.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elsewhere import ask, importable, install, run, served

from compile_stage import api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "policies" / "cpu-server.yaml"


MODELS = {
    # name: (example, backend, what must not be importable elsewhere, largest difference to the source's answers)
    "digits-cnn": ("digits_cnn.py", "openvino", ("torch", "onnx", "onnxruntime", "compile_stage"), 1e-4),
    "breast-cancer": ("tabular.py", "onnxruntime", ("onnx", "openvino", "skl2onnx", "compile_stage"), 0.0),
}

LEARNED = {
    # example: what it registers, with the metric of its run and the bounds that say that it learned
    "digits_cnn.py": {"digits-cnn": ("accuracy", 0.97, 1.0)},
    "tabular.py": {"breast-cancer": ("accuracy", 0.94, 1.0), "diabetes": ("mae", 0.0, 52.0)},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_serves_with_its_own_requirements_alone(
    name: str, server: Any, free_port: int, tmp_path: Path
) -> None:
    """Broken: a published model would need compile-stage, or the source's framework, to be served; or would answer in
    another form than its source."""
    import mlflow

    example, backend, absent, tolerance = MODELS[name]
    run(ROOT / "examples" / example, cwd=tmp_path)
    for registered, (metric, low, high) in LEARNED[example].items():
        version = mlflow.MlflowClient().get_model_version_by_alias(registered, "candidate")
        assert low <= mlflow.get_run(version.run_id).data.metrics[metric] <= high
    settings = {
        "targets.cpu-server.backends": f"[{backend}]",
        "targets.cpu-server.precisions": "[fp32]",
        "budget.measure_seconds": "0.5",
        "budget.soak_seconds": "0.2",
        "budget.predict_seconds": "0",
        "report.profile": "false",
        "performance.min_speedup": "null",  # how fast it is on a busy machine is not what is asked here
    }
    sets = [f"{key}={value}" for key, value in settings.items()]
    result = api.run(f"models:/{name}@candidate", POLICY, sets=sets, out=tmp_path / "out")
    assert result.exit_code == 0, result.problem

    published = Path(mlflow.artifacts.download_artifacts(f"models:/{name}-compiled@cpu-server-prod"))
    programs = install(published / "requirements.txt", tmp_path / "elsewhere")
    assert importable(programs, "mlflow", backend, *absent) == ["mlflow", backend]

    source = Path(mlflow.artifacts.download_artifacts(f"models:/{name}@candidate"))
    example_input = mlflow.models.Model.load(source).load_input_example(str(source))
    expected = mlflow.pyfunc.load_model(str(source)).predict(example_input)
    with served(programs, f"models:/{name}-compiled@cpu-server-prod", free_port, tmp_path) as address:
        answers = ask(address, (source / "serving_input_example.json").read_bytes())
    found = np.asarray(answers)
    assert found.dtype.kind == expected.dtype.kind
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
