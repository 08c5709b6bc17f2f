"""A small real model in a folder registry, and a policy for it: what the pipelines' scripts are run on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: pipelines-test
owner: tests
targets:
  small:
    backends: [onnxruntime]
    precisions: [fp32]
performance: {min_speedup: null}    # what is tested is the way through, not the speed
budget: {measure_seconds: 0.5, soak_seconds: 0.2}
"""


class Registered(NamedTuple):
    """A model's URI, a policy under which it has a winner, and one under which it can't have one."""

    uri: str
    policy: Path
    unreachable: Path


@pytest.fixture
def registered(tmp_path: Path) -> Registered:
    """A perceptron with random weights, logged as an ONNX model with 64 rows of example input."""
    with warnings.catch_warnings():
        # mlflow warns of the type hints of a class of its own when it is imported
        warnings.filterwarnings("ignore", message=".*Any type hint is inferred as AnyType", category=UserWarning)
        import mlflow.pyfunc
    import mlflow.onnx
    import onnx
    from mlflow.models import infer_signature
    from onnx import TensorProto, helper, numpy_helper

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
