"""The published model's predict() beside the original's, before anybody has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from factories import policy_text
from mlflow.models import infer_signature

from compile_stage import api
from compile_stage.steps import package

pytest.importorskip("skl2onnx", reason="the scikit-learn source needs skl2onnx")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0.2}\n"
    "compliance: {allow_pickle: true}"
)
TARGET = "backends: [onnxruntime], precisions: [fp32], batch_sizes: [1]"


def run(folder: Path, name: str) -> Any:
    from sklearn.linear_model import LogisticRegression

    rows = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    estimator = LogisticRegression().fit(rows, np.where(rows[:, 0] > 0, 7, 3))
    if not (model := folder / "model").is_dir():
        mlflow.sklearn.save_model(
            estimator, str(model), serialization_format="cloudpickle", pip_requirements=["scikit-learn"],
            signature=infer_signature(rows, estimator.predict(rows)),
        )  # fmt: skip
    np.savez(folder / "data.npz", X=rows)
    policy = folder / "policy.yaml"
    policy.write_text(policy_text(folder / "data.npz", TARGET, BODY))
    return api.run(f"folder:{model}", policy, out=folder / name, publish=False)


def test_a_package_that_answers_otherwise_than_the_original_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the artifact is proven tensor by tensor, and what stands around it when it is served answers another of
    its outputs, or otherwise; the run passes and publishes it."""
    whole = run(tmp_path, "right")
    assert whole.exit_code == 0, whole.problem
    assert whole.targets[0].predict_speedup.speedup > 0
    save = package.save_model

    def wrong(*given: Any, manifest: Any, **options: Any) -> None:
        answer = {**manifest["answer"], "outputs": ["probabilities"]}
        save(*given, manifest={**manifest, "answer": answer}, **options)

    monkeypatch.setattr(package, "save_model", wrong)
    result = run(tmp_path, "wrong")
    assert result.exit_code == 3
    assert "predict() of its published model does not answer as the original's" in result.problem
    assert "its answer has the shape [16, 2], and the original's [16]" in result.problem
    assert result.targets[0].bundle is None
    assert not list((tmp_path / "wrong").glob("bundles/*"))
    assert (tmp_path / "wrong" / "report.html").is_file()
