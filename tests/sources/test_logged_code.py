"""Pickles whose classes lie in a module that was logged beside them (`code_paths`), as MLflow's docs log a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.models import infer_signature
from sklearn.linear_model import LinearRegression

from compile_stage.core.records import Compliance, Target
from compile_stage.sources.sklearn import SklearnSource
from compile_stage.sources.torch import TorchSource

from .conftest import source_of

PICKLES = Compliance(allow_pickle=True)
X = np.arange(12, dtype=np.float32).reshape(4, 3)
NETWORK = """
import torch

class Scaled(torch.nn.Module):
    def forward(self, x):
        from own_helpers import factor
        return x * factor()
"""
MODEL = """
from sklearn.linear_model import LinearRegression

class Own(LinearRegression):
    pass
"""


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    yield
    forget("own_network", "own_helpers", "own_model")


def write(folder: Path, **modules: str) -> list[str]:
    """The modules as files in a folder that Python imports from."""
    folder.mkdir()
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return [str(folder / f"{name}.py") for name in modules]


def forget(*modules: str) -> None:
    for name in modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def test_a_network_of_a_logged_module_is_loaded_with_that_module(tmp_path: Path) -> None:
    """Broken: a network of `code_paths=["model.py"]` was refused where that file is not importable; and with another
    version of it in the working folder, what was compiled and called the original was that one."""
    names = ("own_network", "own_helpers")
    files = write(tmp_path / "logged", own_network=NETWORK, own_helpers="def factor(): return 3.0\n")
    network = importlib.import_module("own_network").Scaled()
    mlflow.pytorch.save_model(
        network,
        tmp_path / "model",
        signature=infer_signature(X, X),
        input_example=X,
        code_paths=files,
        serialization_format="pickle",
        pip_requirements=["torch"],
    )
    forget(*names)
    write(tmp_path / "elsewhere", own_network=NETWORK, own_helpers="def factor(): return 5.0\n")
    files_before = sorted((tmp_path / "model").rglob("*"))

    source = source_of(tmp_path / "model", "pytorch")
    assert TorchSource().refuse(source, PICKLES) is None
    with TorchSource().open(source, Target(name="cpu", threads=1)) as session:
        (answer,) = session.run({session.signature.inputs[0].name: X}).values()
    np.testing.assert_array_equal(answer, X * 3)
    assert sorted((tmp_path / "model").rglob("*")) == files_before, "its digest would be another"


def test_a_module_that_is_nowhere_is_named(tmp_path: Path) -> None:
    """Broken: the advice for a missing package (skorch, imbalanced-learn, the user's own) was to install another
    version of scikit-learn."""
    write(tmp_path / "own", own_model=MODEL)
    model = importlib.import_module("own_model").Own().fit(X, X[:, 0])
    assert isinstance(model, LinearRegression)
    mlflow.sklearn.save_model(
        model,
        tmp_path / "model",
        signature=infer_signature(X, model.predict(X)),
        serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],
    )
    sys.path.remove(str(tmp_path / "own"))
    forget("own_model")

    with pytest.raises(Exception, match="own_model") as refused:
        SklearnSource().example(source_of(tmp_path / "model", "sklearn"))
    assert "neither installed here nor logged with the model" in str(refused.value)
    assert "code_paths" in str(getattr(refused.value, "fix", ""))
