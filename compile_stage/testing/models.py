"""Small real models for the kit: a convolutional net, a perceptron with two outputs, and a transformer block.

Weights are seeded, so that every run sees the same graph. Each function writes a model and samples below a folder that
it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.digest import digest_tree
from compile_stage.core.records import PortableModel, SampleSet
from compile_stage.core.sample_files import write_index
from compile_stage.core.tensors import Dim, Signature, TensorSpec

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

OPSET = 17
SAMPLES = 16


class Graph:
    """Collects nodes and seeded weights.

    Args:
        seed: Of the weights.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, *shape: int, scale: float | None = None, offset: float = 0.0) -> str:
        """A float32 weight, normally distributed; scaled by its fan-in unless `scale` says otherwise."""
        spread = scale if scale is not None else 1.0 / np.sqrt(np.prod(shape[1:] if len(shape) > 2 else shape[:1]))
        return self.constant((self.random.standard_normal(shape) * spread + offset).astype(np.float32))

    def constant(self, value: Any) -> str:
        """An initializer of the array's own type."""
        from onnx import numpy_helper

        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """A node with one output; returns that output's name."""
        from onnx import helper

        output = name or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"node_{output}", **attributes))
        return output


def conv_net(folder: Path, batch: Dim = "batch") -> tuple[PortableModel, SampleSet]:
    """Convolution, batch normalisation, ReLU, a residual sum, pooling and a linear layer: images [3, 16, 16] → 10
    scores."""
    g = Graph()

    def block(x: str, channels: int, into: int) -> str:
        y = g.add("Conv", x, g.weight(into, channels, 3, 3), g.weight(into, scale=0.1), pads=[1, 1, 1, 1])
        statistics = (g.weight(into, scale=0.1, offset=1), g.weight(into, scale=0.1), g.weight(into, scale=0.1))
        variance = g.constant(g.random.uniform(0.5, 1.5, into).astype(np.float32))
        return g.add("Relu", g.add("BatchNormalization", y, *statistics, variance))

    first = block("image", 3, 8)
    summed = g.add("Add", block(first, 8, 8), first)
    pooled = g.add("Flatten", g.add("GlobalAveragePool", summed))
    g.add("Gemm", pooled, g.weight(8, 10), g.weight(10, scale=0.1), name="scores")
    images = g.random.standard_normal((SAMPLES, 3, 16, 16)).astype(np.float32)
    return write(g, folder, {"image": images}, {"scores": ("float32", (batch, 10))}, batch)


def perceptron(folder: Path, batch: Dim = "batch") -> tuple[PortableModel, SampleSet]:
    """Two linear layers with two outputs, of which one is int64: features [12] → probabilities [4] and label []."""
    g = Graph(1)
    hidden = g.add("Relu", g.add("Gemm", "features", g.weight(12, 32), g.weight(32, scale=0.1)))
    logits = g.add("Gemm", hidden, g.weight(32, 4, scale=0.6), g.weight(4, scale=0.1))
    g.add("ArgMax", logits, name="label", axis=1, keepdims=0)
    g.add("Softmax", logits, name="probabilities", axis=1)
    features = g.random.standard_normal((SAMPLES, 12)).astype(np.float32)
    outputs: dict[str, tuple[str, tuple[Dim, ...]]] = {
        "label": ("int64", (batch,)),
        "probabilities": ("float32", (batch, 4)),
    }
    return write(g, folder, {"features": features}, outputs, batch)


def transformer(folder: Path, batch: Dim = "batch") -> tuple[PortableModel, SampleSet]:
    """One block with attention, over two int64 inputs: tokens and a mask [8] → hidden states [8, 16]."""
    g = Graph(2)
    length, width, heads = 8, 16, 2
    x = g.add("Gather", g.weight(50, width, scale=0.5), "input_ids")
    split = g.constant(np.array([0, 0, heads, width // heads], np.int64))

    def project(x: str) -> str:
        return g.add("Add", g.add("MatMul", x, g.weight(width, width)), g.weight(width, scale=0.1))

    query, key, value = (
        g.add("Transpose", g.add("Reshape", project(x), split), perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    scores = g.add("Mul", g.add("MatMul", query, key), g.constant(np.float32(1 / np.sqrt(width // heads))))
    hidden = g.add("Sub", g.constant(np.float32(1)), g.add("Cast", "attention_mask", to=1))
    hidden = g.add(
        "Unsqueeze", g.add("Mul", hidden, g.constant(np.float32(-10000))), g.constant(np.array([1, 2], np.int64))
    )
    attended = g.add("MatMul", g.add("Softmax", g.add("Add", scores, hidden), axis=-1), value)
    joined = g.add(
        "Reshape", g.add("Transpose", attended, perm=[0, 2, 1, 3]), g.constant(np.array([0, 0, width], np.int64))
    )
    ones, zeros = g.constant(np.ones(width, np.float32)), g.constant(np.zeros(width, np.float32))
    x = g.add("LayerNormalization", g.add("Add", project(joined), x), ones, zeros, axis=-1)
    wide = g.add("Add", g.add("MatMul", x, g.weight(width, 32)), g.weight(32, scale=0.1))
    narrow = g.add("MatMul", g.add("Relu", wide), g.weight(32, width))
    g.add("LayerNormalization", g.add("Add", narrow, x), ones, zeros, name="hidden_states", axis=-1)
    mask = np.ones((SAMPLES, length), np.int64)
    mask[::2, 6:] = 0
    inputs = {"input_ids": g.random.integers(0, 50, (SAMPLES, length)), "attention_mask": mask}
    return write(g, folder, inputs, {"hidden_states": ("float32", (batch, length, width))}, batch)


ALL: tuple[Callable[[Path], tuple[PortableModel, SampleSet]], ...] = (conv_net, perceptron, transformer)


def write(
    graph: Graph,
    folder: Path,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, tuple[str, tuple[Dim, ...]]],
    batch: Dim = "batch",
) -> tuple[PortableModel, SampleSet]:
    """Write a graph as `folder/model/model.onnx` and its inputs as samples, and describe both.

    Args:
        inputs: Name → samples, axis 0 being the sample.
        outputs: Name → dtype and shape.
        batch: A symbol, or the size that the model fixes.
    """
    import onnx
    from onnx import helper

    signature = Signature(
        inputs=tuple(
            TensorSpec(name=name, dtype=array.dtype.name, shape=(batch, *array.shape[1:]))
            for name, array in inputs.items()
        ),
        outputs=tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in outputs.items()),
    )

    def declare(spec: TensorSpec) -> Any:
        return helper.make_tensor_value_info(
            spec.name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), spec.shape
        )

    proto = helper.make_graph(
        graph.nodes, "conformance", [*map(declare, signature.inputs)], [*map(declare, signature.outputs)], graph.weights
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    place, samples = folder / "model", folder / "samples"
    place.mkdir(parents=True)
    (samples / "inputs").mkdir(parents=True)
    onnx.save(model, place / "model.onnx")
    for name, array in inputs.items():
        np.save(samples / "inputs" / f"{name}.npy", array)
    count = len(next(iter(inputs.values())))
    write_index(samples, {name: f"inputs/{name}.npy" for name in inputs}, labels=False, count=count)
    portable = PortableModel(
        path=str(place / "model.onnx"),
        digest=digest_tree(place),
        form="onnx",
        opset=OPSET,
        precision="fp32",
        signature=signature,
    )
    return portable, SampleSet(
        path=str(samples), digest=digest_tree(samples), count=count, real=True, source="conformance kit"
    )
