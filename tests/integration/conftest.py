"""A small real model in a folder registry, and policies for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from compile_stage.core import plugins

FAKES = Path(__file__).parents[1] / "fake_backends"


@pytest.fixture
def fake_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The misbehaving backends, installed as a distribution of their own: on the path of this process and of its workers."""
    monkeypatch.syspath_prepend(str(FAKES))
    plugins._entries.cache_clear()
    plugins.precisions.cache_clear()
    yield
    plugins._entries.cache_clear()
    plugins.precisions.cache_clear()
    for name in ("fake_backends", "fake_lowering", "fake_source"):
        sys.modules.pop(name, None)


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """An MLflow model directory with a two-layer network: x [batch, 8] → y [batch, 4] and z [batch, 2]."""
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
    folder = tmp_path / "small-net"
    mlflow.onnx.save_model(model, str(folder), pip_requirements=["onnx"])
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((64, 8)).astype(np.float32))
    return folder


@pytest.fixture
def write_policy(tmp_path: Path) -> Callable[..., Path]:
    """A policy for `small_model`; `body` is added to it, `target` holds the keys of its one target."""

    def write(target: str, body: str = "") -> Path:
        path = tmp_path / "policy.yaml"
        path.write_text(
            f"""\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: test
owner: tests
data:
  validation: {{source: "file:{tmp_path}/data.npz", max_samples: 64}}
  calibration: {{source: "file:{tmp_path}/data.npz", max_samples: 64}}
targets:
  cpu: {{device: cpu, threads: 1, {target}}}
{body}
"""
        )
        return path

    return write
