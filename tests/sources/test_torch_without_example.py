"""PyTorch modules that were logged with a signature alone, as `mlflow.pytorch.log_model(model, signature=...)` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.models import ModelSignature, infer_signature
from mlflow.types import Schema, TensorSpec

from compile_stage.core.records import Compliance
from compile_stage.sources.torch import TorchSource

from .conftest import Proof, source_of

PICKLES = Compliance(allow_pickle=True)
ROWS = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)


class Both(torch.nn.Module):
    def forward(self, wide: Any, narrow: Any) -> Any:
        return wide @ torch.ones(4, 2) + narrow


def save(path: Path, model: torch.nn.Module, signature: ModelSignature) -> Any:
    mlflow.pytorch.save_model(
        model.eval(), path, signature=signature, serialization_format="pickle", pip_requirements=["torch"]
    )
    return source_of(path, "pytorch")


def tensors(*specs: tuple[Any, tuple[int, ...], str | None]) -> ModelSignature:
    return ModelSignature(Schema([TensorSpec(np.dtype(dtype), shape, name) for dtype, shape, name in specs]))


@pytest.mark.parametrize(
    "signature",
    [infer_signature(ROWS), infer_signature(pd.DataFrame(ROWS.astype(np.float64), columns=["a", "b", "c"]))],
    ids=["array", "data frame"],
)
def test_the_signature_says_what_a_module_is_called_with(tmp_path: Path, prove: Proof, signature: Any) -> None:
    """Broken: a module that was logged without an input example would be refused, though its signature says enough."""
    torch.manual_seed(0)
    source = save(tmp_path / "net", torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), signature)
    assert str(prove(source, {"input": ROWS}, compliance=PICKLES).signature.inputs[0]) == "input: float32[batch, 3]"


def test_inputs_of_a_signature_go_where_their_names_say(tmp_path: Path, prove: Proof) -> None:
    """Broken: two tensors would be given to forward in the order of the signature."""
    source = save(tmp_path / "net", Both(), tensors((np.float32, (-1, 2), "narrow"), (np.float32, (-1, 4), "wide")))
    wide = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    prove(source, {"wide": wide, "narrow": ROWS[:, :2]}, compliance=PICKLES)


@pytest.mark.parametrize("spec", [(np.int64, (-1, 3), "ids"), (np.float32, (-1, -1), "steps")])
def test_what_no_signature_says_is_asked_for(tmp_path: Path, spec: Any) -> None:
    """Broken: a module of tokens would be traced on numbers that it has no row for, one of any length on a length that
    somebody guessed."""
    reason = TorchSource().refuse(save(tmp_path / "net", torch.nn.Identity(), tensors(spec)), PICKLES)
    assert "log it with input_example=" in str(reason)
