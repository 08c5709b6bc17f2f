"""Pickles with bytecode of another Python are refused before they are loaded: Python 3.13 crashed on 3.11's."""

import pickle
import platform
from pathlib import Path

import cloudpickle
import factories
import pytest

from compile_stage.sources import pickles


def _model(folder: Path, python: str, content: bytes, name: str = "python_model.pkl"):
    (folder / name).write_bytes(content)
    (folder / "MLmodel").write_text(
        f"flavors:\n  python_function:\n    loader_module: mlflow.pyfunc.model\n    python_version: {python}\n",
        encoding="utf-8",
    )
    return factories.source(path=str(folder))


def test_bytecode_of_another_python_is_refused_with_both_versions(tmp_path: Path) -> None:
    model = _model(tmp_path, "3.4.1", cloudpickle.dumps(lambda x: x + 1))
    reason = pickles.refuse_other_python(model) or ""
    assert reason.startswith("its python_model.pkl holds functions or classes in the bytecode of Python 3.4.1")
    assert f"Python {platform.python_version()} here" in reason
    assert "run compile-stage with Python 3.4;" in reason


@pytest.mark.parametrize(
    ("python", "content"),
    [
        pytest.param(platform.python_version(), cloudpickle.dumps(lambda x: x + 1), id="the same Python"),
        pytest.param("3.4.1", pickle.dumps({"weights": [1.0, 2.0]}), id="no code in it"),
        pytest.param("3.4.1", cloudpickle.dumps(Path.exists), id="a function of a module"),
        pytest.param("3.4.1", b"", id="an empty file"),
    ],
)
def test_what_any_python_reads_is_not_refused(tmp_path: Path, python: str, content: bytes) -> None:
    assert pickles.refuse_other_python(_model(tmp_path, python, content)) is None


def test_a_network_that_pytorch_pickled_in_a_zip_file_is_searched_too(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch writes the file")
    made_here: dict[str, object] = {"__name__": "__main__"}
    exec("class Net:\n    def forward(self, x):\n        return x\n", made_here)  # as in a notebook
    (tmp_path / "data").mkdir()
    torch.save(made_here["Net"](), tmp_path / "data" / "model.pth", pickle_module=cloudpickle)  # type: ignore[operator]
    model = _model(tmp_path, "3.4.1", b"")
    assert "its data/model.pth holds" in (pickles.refuse_other_python(model) or "")
