"""A small network in an MLflow model directory, with samples: what integration tests compile."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np


def write_small_net(folder: Path) -> Path:
    """Write `folder/small-net`, x [batch, 8] → y [batch, 4] and z [batch, 2], and 64 samples as `folder/data.npz`;
    returns the former."""
    import mlflow
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((8, 64)).astype(np.float32),
        "w2": rng.standard_normal((64, 4)).astype(np.float32),
        "w3": rng.standard_normal((64, 2)).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h"], name="fc1"),
            helper.make_node("Relu", ["h"], ["r"], name="act"),
            helper.make_node("MatMul", ["r", "w2"], ["y"], name="fc2"),
            helper.make_node("MatMul", ["r", "w3"], ["z"], name="fc3"),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 2]),
        ],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    model_dir = folder / "small-net"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, where it is imported for the first time
        mlflow.onnx.save_model(model, str(model_dir), pip_requirements=["onnx"])
    np.savez(folder / "data.npz", x=rng.standard_normal((64, 8)).astype(np.float32))
    return model_dir
