"""What a worker's log shows: our own calls raise no warning of a third party at people who can't act on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .test_torch import saved_net

SCRIPT = """
import sys, pathlib
from compile_stage.core.records import Compliance, SourceModel, Target
from compile_stage.sources.torch import TorchSource
source = SourceModel(uri="u", name="n", version="1", flavor="pytorch", path=sys.argv[1], digest="sha256:0")
assert TorchSource().refuse(source, Compliance()) is None
with TorchSource().open(source, Target(name="cpu")) as session:
    session.run(TorchSource().example(source))
TorchSource().export(source, {}, pathlib.Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_refuse_open_and_export_are_silent(tmp_path: Path) -> None:
    source = saved_net(tmp_path / "net")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, source.path, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "Warning" not in ran.stderr
    assert "torchvision" not in ran.stderr


def test_importing_every_source_imports_no_framework() -> None:
    code = (
        "import sys; from compile_stage.core import plugins\n"
        "for name in plugins.names('sources'): plugins.load('sources', name)\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'sklearn', 'mlflow', 'xgboost', 'lightgbm', 'transformers', "
        "'pandas', 'skl2onnx'}\nprint(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
