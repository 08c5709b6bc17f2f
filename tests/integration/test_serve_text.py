"""A published text model, served where only its own `requirements.txt` is installed, answers text as its source did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_texts
from elsewhere import ask, importable, install, served

from compile_stage import api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: text
owner: tests
report:
  profile: false
data:
  validation: {source: "file:texts.csv", labels: label}
  min_samples: 20
targets:
  cpu: {backends: [onnxruntime], precisions: [fp32], batch_sizes: [1, 4], threads: 1}
performance: {min_speedup: null}
promote: {alias: "{target}-prod"}
budget: {measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}
"""


def test_a_published_text_model_answers_text_without_pytorch(free_port: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Broken: whoever sends text to the published model, as to its source, gets an error or other labels; or serving
    needs transformers and PyTorch; or samples that are texts with named labels can't be used."""
    import mlflow
    import pandas as pd

    pytest.importorskip("transformers", reason="the model is a transformers pipeline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    source = small_texts.save(
        tmp_path / "sorter", "BertForSequenceClassification", "text-classification",
        **small_texts.named(small_texts.LABELS),
    )  # fmt: skip
    texts = small_texts.corpus()[:40]
    original = mlflow.pyfunc.load_model(str(source))
    labels = original._model_impl.predict(texts, params={"truncation": True})["label"]
    pd.DataFrame({"text": texts, "label": labels}).to_csv(tmp_path / "texts.csv", index=False)
    (tmp_path / "policy.yaml").write_text(POLICY)
    ran = api.run(f"folder:{source}", tmp_path / "policy.yaml", out=tmp_path / "out")
    assert ran.exit_code == 0, ran.problem
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "passed"
    notes = [note for candidate in result["targets"][0]["candidates"] for note in candidate["notes"]]
    rewritten = [note.split(",")[0] for note in notes if note.startswith("graph rewrite ")]
    assert "graph rewrite masked-softmax: 2 places" in rewritten, "the guards of its attention are still in the graph"
    assert "graph rewrite early-selection: 1 place" in rewritten, "its last layer is computed for all tokens"
    (bundle,) = (tmp_path / "out" / "bundles").iterdir()
    programs = install(bundle / "requirements.txt", tmp_path / "elsewhere")
    assert importable(programs, "tokenizers", "torch", "transformers", "compile_stage") == ["tokenizers"]
    bodies = [
        {"inputs": small_texts.TEXTS},
        {"dataframe_split": {"columns": ["text"], "data": [[text] for text in small_texts.TEXTS]}},
    ]
    expected = original.predict(small_texts.TEXTS)
    with served(programs, str(bundle), free_port, tmp_path) as address:
        for body in bodies:
            answers = pd.DataFrame(ask(address, json.dumps(body).encode()))
            assert list(answers.columns) == ["label", "score"]
            assert answers["label"].tolist() == expected["label"].tolist()
            np.testing.assert_allclose(answers["score"], expected["score"], atol=1e-5)
