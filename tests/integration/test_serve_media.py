"""A published model of pictures, served where only its own `requirements.txt` is installed, answers files as its source
did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_media
from elsewhere import ask, importable, install, served

from compile_stage import api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: pictures
owner: tests
report: {profile: false}
data:
  validation: {source: "file:pictures.npz"}
  min_samples: 16
targets:
  cpu: {backends: [onnxruntime], precisions: [fp32], batch_sizes: [1], threads: 1}
performance: {min_speedup: null}
budget: {measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}
"""


def test_a_published_model_of_pictures_answers_files_without_pytorch(
    free_port: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Broken: whoever posts a picture to the published classifier, as to its source, gets an error or other labels and
    scores; or serving needs transformers and PyTorch; or samples that are pictures can't be used."""
    import mlflow

    pytest.importorskip("transformers", reason="the model is a transformers pipeline")
    pytest.importorskip("PIL", reason="pictures are read by Pillow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    pictures = [small_media.picture(40 + number, 40) for number in range(3)]
    files = [small_media.encoded(picture, form) for picture, form in zip(pictures, ("PNG", "JPEG", "PNG"), strict=True)]
    source = small_media.save(tmp_path / "sorter", "vit", files[:1])
    np.savez(tmp_path / "pictures.npz", image=np.stack([np.roll(pictures[0], row, axis=0) for row in range(16)]))
    (tmp_path / "policy.yaml").write_text(POLICY)
    ran = api.run(f"folder:{source}", tmp_path / "policy.yaml", out=tmp_path / "out")
    assert ran.exit_code == 0, ran.problem
    (bundle,) = (tmp_path / "out" / "bundles").iterdir()
    programs = install(bundle / "requirements.txt", tmp_path / "elsewhere")
    assert importable(programs, "PIL", "torch", "transformers", "compile_stage") == ["PIL"]
    expected = mlflow.pyfunc.load_model(str(source)).predict(files)
    with served(programs, str(bundle), free_port, tmp_path) as address:
        answers = ask(address, json.dumps({"inputs": files}).encode())
    assert len(answers) == len(files)
    for row, original in zip(answers, expected.to_dict("records"), strict=True):
        assert list(row) == [str(rank) for rank in original]  # names in JSON are texts
        for rank, cell in original.items():
            assert row[str(rank)]["label"] == cell["label"]
            assert row[str(rank)]["score"] == pytest.approx(cell["score"], abs=1e-4)
