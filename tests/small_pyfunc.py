"""A custom pyfunc as people write them: a tokenizer of its own, a PyTorch network, thresholds."""

from __future__ import annotations

import email.message
import http.client
import inspect
import statistics
import types
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, WORDS = 24, 2000
MODULES = {0: (email.message, http.client), 1: (statistics,)}


def sentences() -> tuple[list[str], list[int]]:
    """Lines of docstrings of the standard library: of mail and HTTP (0), or of statistics (1)."""
    texts, labels = [], []
    for label, modules in MODULES.items():
        for module in modules:
            for line in _lines(module):
                texts.append(line)
                labels.append(label)
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[n] for n in order], [labels[n] for n in order]


def _lines(module: types.ModuleType) -> list[str]:
    found = dict.fromkeys(line.strip() for line in inspect.getsource(module).splitlines() if len(line.split()) > 4)
    return [line for line in found if line[0].isalpha()]


def ids_of(texts: list[str]) -> np.ndarray:
    """Words as numbers, by a sum of their letters that is the same everywhere."""
    rows = np.zeros((len(texts), LENGTH), np.int64)
    for row, text in enumerate(texts):
        for place, word in enumerate(text.lower().split()[:LENGTH]):
            rows[row, place] = 1 + sum((n + 1) * ord(c) for n, c in enumerate(word)) % (WORDS - 1)
    return rows


def network(layers: int = 12, width: int = 32) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(WORDS, width)
            self.convolutions = torch.nn.ModuleList(torch.nn.Conv1d(width, width, 3, padding=1) for _ in range(layers))
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(layers))
            self.head = torch.nn.Linear(width, 2)

        def forward(self, ids: Any) -> Any:
            x = self.embedding(ids)
            for convolution, norm in zip(self.convolutions, self.norms, strict=True):
                x = x + layers**-0.5 * torch.relu(norm(convolution(x.transpose(1, 2)).transpose(1, 2)))
            return self.head(x.mean(dim=1))

    return Net()


def trained(steps: int = 60) -> Any:
    import torch

    torch.manual_seed(0)
    texts, labels = sentences()
    ids, truth, net = torch.from_numpy(ids_of(texts)), torch.tensor(labels), network()
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(steps):
        rows = slice(step * 64 % len(ids), step * 64 % len(ids) + 64)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(ids[rows]), truth[rows]).backward()
        optimiser.step()
    return net.eval()


def write_pyfunc(folder: Path, *, marks: bool = True, name: str = "texts") -> Path:
    """A model directory with a trained classifier of texts, and its samples as `folder/texts.csv`."""
    import mlflow
    import pandas as pd

    import compile_stage.pyfunc

    class Classifier(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def __init__(self, net: Any) -> None:
            self.net = net
            self.threshold = 0.6

        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            import numpy as np
            import pandas as pd
            import torch

            rows = np.zeros((len(model_input), 24), np.int64)
            for row, text in enumerate(model_input["text"]):
                for place, word in enumerate(text.lower().split()[:24]):
                    rows[row, place] = 1 + sum((n + 1) * ord(c) for n, c in enumerate(word)) % 1999
            with torch.no_grad():
                scores = torch.softmax(self.net(torch.from_numpy(rows)), dim=1).numpy()[:, 1]
            sure = np.maximum(scores, 1 - scores) >= self.threshold
            labels = np.where(sure, np.where(scores > 0.5, "statistics", "network"), "unsure")
            return pd.DataFrame({"label": labels, "score": scores})

    texts, labels = sentences()
    model = Classifier(trained())
    if marks:
        model.net = compile_stage.pyfunc.compiled(model.net, example=ids_of(texts[:4]))
    frame = pd.DataFrame({"text": texts})
    signature = mlflow.models.infer_signature(frame[:3], model.predict(None, frame[:3]))
    mlflow.pyfunc.save_model(
        str(folder / name), python_model=model, signature=signature, input_example=frame[:3],
        pip_requirements=["torch", "pandas", "cloudpickle"],
    )  # fmt: skip
    pd.DataFrame({"text": texts, "label": labels}).to_csv(folder / "texts.csv", index=False)
    return folder / name
