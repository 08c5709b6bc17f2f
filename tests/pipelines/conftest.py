"""A small real model in a folder registry, and a policy for it: what the pipelines' scripts are run on; and the
orchestrators that are no part of the development environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: pipelines-test
owner: tests
report:
  profile: false
targets:
  small:
    backends: [onnxruntime]
    precisions: [fp32]
performance: {min_speedup: null}    # what is tested is the way through, not the speed
budget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}
"""


class Registered(NamedTuple):
    """A model's URI, a policy under which it has a winner, and one under which it can't have one."""

    uri: str
    policy: Path
    unreachable: Path


HOSTILE = "--x $(touch pwned)`touch pwned`; touch pwned; {{ 1 / 0 }} '\" *"
"""What a shell, Groovy or Jinja would make something else of."""

PINS = Path(__file__).parents[2] / "requirements" / "orchestrators.txt"


@pytest.fixture(autouse=True)
def common_cache(
    isolated_home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step cache is one for all of these tests, which run the same model: only the first one compiles it."""
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path_factory.getbasetemp() / "pipelines-cache"))


@pytest.fixture(scope="session")
def orchestrator() -> Callable[[str], Path]:
    """Makes the environment of an orchestrator, once, in the folder that COMPILE_STAGE_ORCHESTRATORS names; gives the
    folder of its programs."""
    pins = dict(re.findall(r"^(\S+?)(==\S+)", PINS.read_text(encoding="utf-8"), flags=re.MULTILINE))

    def make(name: str) -> Path:
        root = os.environ.get("COMPILE_STAGE_ORCHESTRATORS")
        if root is None:
            pytest.skip(
                f"{name} is no part of the development environment: name a folder for its own, made there once "
                "from the package index, in COMPILE_STAGE_ORCHESTRATORS"
            )
        folder = Path(root).absolute() / f"{name}-{pins[name].removeprefix('==')}"
        if not (folder / "made").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, f"{name}{pins[name]}"], check=True)
            (folder / "made").touch()
        return folder / "bin"

    return make


@pytest.fixture
def hostile() -> str:
    """A name that no shell, Groovy or Jinja may read."""
    return HOSTILE


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder is in which this environment's `compile-stage` lies; orchestrators are told of it."""
    programs = Path(sys.executable).parent
    monkeypatch.setenv("COMPILE_STAGE", str(programs / "compile-stage"))
    return programs


@pytest.fixture(scope="session")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Registered:
    """A perceptron with random weights, logged as an ONNX model with 64 rows of example input."""
    with warnings.catch_warnings():
        # mlflow warns of the type hints of a class of its own when it is imported
        warnings.filterwarnings("ignore", message=".*Any type hint is inferred as AnyType", category=UserWarning)
        import mlflow.pyfunc
    import mlflow.onnx
    import onnx
    from mlflow.models import infer_signature
    from onnx import TensorProto, helper, numpy_helper

    tmp_path = tmp_path_factory.mktemp("registered")
    random = np.random.default_rng(0)
    weights = {"first": (8, 16), "second": (16, 3)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["hidden"], name="hidden_layer"),
            helper.make_node("Relu", ["hidden"], ["active"], name="activation"),
            helper.make_node("MatMul", ["active", "second"], ["y"], name="output_layer"),
        ],
        "perceptron",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(random.normal(size=s).astype(np.float32), name) for name, s in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    rows = random.normal(size=(64, 8)).astype(np.float32)
    folder = tmp_path / "registry" / "perceptron"
    signature = infer_signature(rows, np.zeros((64, 3), np.float32))
    mlflow.onnx.save_model(
        model,
        str(folder),
        signature=signature,
        input_example=rows,
        pip_requirements=["onnx"],  # else MLflow loads the model in another process to find out
    )
    policy, unreachable = tmp_path / "policy.yaml", tmp_path / "unreachable.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    unreachable.write_text(POLICY.replace("min_speedup: null", "min_speedup: 100000"), encoding="utf-8")
    return Registered(f"folder:{folder}", policy, unreachable)
