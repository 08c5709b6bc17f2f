"""Two whole stages at once, as on two machines, against a server with several workers on PostgreSQL: one version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here


@pytest.mark.slow
@pytest.mark.postgres
def test_two_stages_that_publish_the_same_thing_at_once_make_one_version(
    postgres_server: Any, small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: two pipelines that were triggered by one event would publish everything twice, or fail each other."""
    import mlflow
    import numpy as np
    import onnx

    with mlflow.start_run():
        mlflow.onnx.log_model(
            onnx.load(small_model / "model.onnx"), name="net", registered_model_name="net",
            input_example=np.zeros((2, 8), np.float32), pip_requirements=["onnx"],
        )  # fmt: skip
    policy = write_policy(
        "backends: [onnxruntime], precisions: [fp32], batch_sizes: [1]",
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}\n"
        'promote: {alias: "{target}-prod"}',
    )

    def start(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "compile_stage", "run", "models:/net/1", "-p", str(policy), "--json", "--out",
             str(tmp_path / f"out-{number}")],
            env={**os.environ, "COMPILE_STAGE_CACHE": str(tmp_path / f"cache-{number}")},  # no lock in common
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip

    stages = [start(number) for number in range(2)]
    answers = [stage.communicate(timeout=500) for stage in stages]
    assert [stage.returncode for stage in stages] == [0, 0], [err[-2000:] for _, err in answers]

    receipts = [json.loads(out)["targets"][0]["receipt"] for out, _ in answers]
    assert [receipt["version"] for receipt in receipts] == ["1", "1"]
    assert sorted(receipt["created"] for receipt in receipts) == [False, True]
    client = mlflow.MlflowClient()
    assert [str(v.version) for v in client.search_model_versions("name = 'net-compiled'")] == ["1"]
    assert client.get_registered_model("net-compiled").aliases == {"cpu-prod": "1"}
