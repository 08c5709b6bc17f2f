"""A predict() that is asked in a second process, with another seed of hash(), before anything is proven on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch

from compile_stage import pyfunc
from compile_stage.core.errors import SourceError
from compile_stage.core.records import SourceModel
from compile_stage.engine.other_process import _rows_apart, repeated_inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

WORDS = np.array([f"word{number}" for number in range(12)])


class Net(torch.nn.Module):
    """A vector for each of 97 words, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(97, 3)

    def forward(self, ids: Any) -> Any:
        return self.table(ids).sum(dim=1)


def source(folder: Path, number: str, answer: str = "scores") -> SourceModel:
    """A PythonModel whose predict() makes a word's number, and its answer, by these expressions."""

    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.net = pyfunc.compiled(Net(), example=np.zeros((2, 1), np.int64))
            self.number, self.answer = number, answer

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            import random
            import zlib

            import torch

            words, names = list(model_input["text"]), {"random": random, "zlib": zlib, "torch": torch}
            ids = torch.tensor([[eval(self.number, {**names, "word": word}) % 97] for word in words])
            with torch.no_grad():
                return eval(self.answer, {**names, "words": words, "scores": self.net(ids)}).numpy()

    mlflow.pyfunc.save_model(str(folder / "m"), python_model=Model(), pip_requirements=["torch"])
    return SourceModel(
        uri="models:/m/1", name="m", version="1", digest="", flavor="python_function", path=str(folder / "m"),
        registry="folder",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "answer", "says"),
    [
        ("hash(word)", "scores", "the network's input 'ids' differs in "),
        ("zlib.crc32(word.encode())", "scores + torch.tensor([[hash(word)] for word in words]) % 97", "predict() diff"),
    ],
)
def test_what_another_process_answers_otherwise_is_refused(tmp_path: Path, number: str, answer: str, says: str) -> None:
    """Broken: a model whose every server answers otherwise is proven, published and promoted."""
    with pytest.raises(SourceError) as refusal:
        repeated_inputs(source(tmp_path, number, answer), {"text": WORDS})
    assert f"in another process, so that what is proven here is not what is served: {says}" in refusal.value.problem
    assert "of 12 rows" in refusal.value.problem
    assert "zlib.crc32(text.encode()) in place of hash(text)" in (refusal.value.fix or "")


@pytest.mark.parametrize("number", ["zlib.crc32(word.encode())", "random.randrange(97) + len(word)"])
def test_what_repeats_is_taken_and_chance_is_left_to_the_gates(tmp_path: Path, number: str) -> None:
    """Broken: the advice of the refusal is refused too, or chance within a process is called a matter of processes."""
    inputs = repeated_inputs(source(tmp_path, number), {"text": WORDS})
    assert inputs["ids"].shape == (12, 1)


def test_one_row_that_differs_is_seen_among_many() -> None:
    """Broken: a word that few samples have is hashed, and the mean over all hides it."""
    ids = np.zeros((1000, 24), np.int64)
    other = ids.copy()
    other[7, 3] = 1
    assert _rows_apart(ids, other) == 1
    numbers = np.linspace(-1, 1, 1000, dtype=np.float32)
    assert _rows_apart(numbers, numbers * np.float32(1 + 1e-6)) == 0
    assert _rows_apart(numbers, np.where(numbers == numbers[7], np.nan, numbers)) == 1
    assert _rows_apart(numbers, numbers[:3]) == 1000
