"""Real networks with one thing wrong, so that what is at fault is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.precision.int8 import StaticInt8
from compile_stage.testing.models import Graph, write

LAYERS = 52
# Weights of 7 bits: with 8, the kernels of a CPU without VNNI saturate, and that is an error which a trace rightly
# reports.
U8 = Scheme(
    precision="int8", name="int8-u8", activations="uint8", weights="int8", options={"reduce_range": True}
)  # fmt: skip
SYMMETRIC = Scheme(
    precision="int8", name="int8-sym", activations="int8", weights="int8", symmetric=True,
    ops=("Conv", "Gemm", "MatMul"), options={"placement": "operands", "reduce_range": True},
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """FP32, its int8, and samples for both."""

    model: PortableModel
    samples: SampleSet
    lowered: dict[str, PortableModel]

    def batches(self, count: int = 4) -> list[dict[str, Any]]:
        inputs = np.load(Path(self.samples.path) / "inputs" / "image.npy")
        return [{"image": inputs[i : i + 1]} for i in range(count)]


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """52 convolutions with ReLU, then a linear layer: image [3, 8, 8] → 10 scores."""
    folder = tmp_path_factory.mktemp("network")
    g, x = Graph(3), "image"
    for layer in range(LAYERS):
        # He's scale for what a ReLU halves: values neither grow nor die over 52 layers.
        channels = 8 if layer else 3
        scale = float(np.sqrt(2 / (9 * channels)))
        weights = (g.weight(8, channels, 3, 3, scale=scale), g.weight(8, scale=0.1))
        x = g.add("Conv", x, *weights, name=f"conv{layer}", pads=[1, 1, 1, 1])
        x = g.add("Relu", x, name=f"relu{layer}")
    pooled = g.add("Flatten", g.add("GlobalAveragePool", x))
    g.add("Gemm", pooled, g.weight(8, 10), g.weight(10, scale=0.1), name="scores")
    images = g.random.standard_normal((16, 3, 8, 8)).astype(np.float32)
    model, samples = write(g, folder / "fp32", {"image": images}, {"scores": ("float32", ("batch", 10))}, "batch")
    lowered = {s.name: StaticInt8().lower(model, s, samples, (), folder / s.name) for s in (U8, SYMMETRIC)}
    return Network(model, samples, lowered)


@pytest.fixture
def sabotage(tmp_path: Path) -> Callable[[PortableModel, str], Path]:
    """A copy of an int8 graph with the weight scales of one layer half as large again."""

    def spoil(model: PortableModel, node: str) -> Path:
        graph = onnx.load(model.path)
        layer = next(n for n in graph.graph.node if n.name == node)
        back = next(n for n in graph.graph.node if layer.input[1] in n.output)
        for tensor in graph.graph.initializer:
            if tensor.name == back.input[1]:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))
        path = tmp_path / f"{model.precision}-spoiled.onnx"
        onnx.save(graph, path)
        return path

    return spoil


@pytest.fixture
def unsupported(tmp_path: Path) -> Path:
    """30 nodes, of which one, `the_culprit`, is an operator that no runtime knows."""
    nodes = [helper.make_node("Relu", ["x"], ["t0"], name="n0")]
    for i in range(1, 29):
        op, domain, name = ("Mystery", "vendor.example", "the_culprit") if i == 13 else ("Sigmoid", "", f"n{i}")
        nodes.append(helper.make_node(op, [f"t{i - 1}"], [f"t{i}"], name=name, domain=domain))
    nodes.append(helper.make_node("Relu", ["t28"], ["y"], name="n29"))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("vendor.example", 1)]
    path = tmp_path / "unsupported.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path
