"""What a network must compute and read, from the ONNX graph and its tensors' shapes: multiplications and additions of
its matrix operators, and bytes of its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
Shape = Sequence[int]


@dataclass(frozen=True)
class Cost:
    """Of one call.

    Attributes:
        flops: Operations of Conv, ConvTranspose, Gemm, MatMul and LSTM; a multiplication and an addition are two.
        weights: How many numbers their constant operands hold.
        ends: How many numbers the inputs and outputs of the network hold.
        by_operator: The flops by operator.
    """

    flops: int
    weights: int
    ends: int
    by_operator: Mapping[str, int]

    def bytes_at(self, precision: str) -> int:
        """Least bytes that come from or go to memory: the weights once in that precision, inputs and outputs in four
        bytes. What lies between two operators may stay in a cache."""
        return self.weights * BYTES[precision] + 4 * self.ends


def shapes_of(model: onnx.ModelProto, names: Sequence[str], inputs: Mapping[str, np.ndarray]) -> dict[str, Shape]:
    """Of these tensors, in one call of ONNX Runtime: inference by ONNX's rules stops where a shape is computed from
    values, as exporters write attention masks."""
    import onnxruntime

    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    have = {value.name for value in shown.graph.output}
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {name: array.shape for name, array in zip(names, session.run(list(names), dict(inputs)), strict=True)}


def cost(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> Cost:
    """Of one call with these inputs.

    Args:
        model: Below 2 GB, with its weights as initializers.
    """
    constants = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    matrix = [node for node in model.graph.node if node.op_type in _FLOPS]
    touched = {name for node in matrix for name in (*node.input[:3], node.output[0]) if name}
    outputs = [value.name for value in model.graph.output]
    given = {name: array.shape for name, array in inputs.items()}
    asked = sorted((touched | set(outputs)) - set(constants) - set(given))
    shapes: dict[str, Shape] = {**constants, **given, **shapes_of(model, asked, inputs)}
    flops: Counter[str] = Counter()
    weights: dict[str, int] = {}  # by name, since two operators may read one
    for node in matrix:
        taken = [shapes[name] if name else () for name in node.input[:3]]
        flops[node.op_type] += _FLOPS[node.op_type](taken, shapes[node.output[0]], _attributes(node))
        weights |= {name: math.prod(constants[name]) for name in node.input if name in constants}
    ends = sum(math.prod(shapes[name]) for name in (*given, *outputs))
    return Cost(sum(flops.values()), sum(weights.values()), ends, dict(flops))


def _attributes(node: onnx.NodeProto) -> dict[str, int]:
    return {item.name: item.i for item in node.attribute if item.type == onnx.AttributeProto.INT}


def _conv(given: Sequence[Shape], made: Shape, _: Mapping[str, int]) -> int:
    """Each output is a sum over a group's input channels and the kernel: `weight` is [out, in / groups, kernel...]."""
    return 2 * math.prod(made) * math.prod(given[1][1:])


def _conv_transpose(given: Sequence[Shape], _: Shape, __: Mapping[str, int]) -> int:
    """Each input is multiplied by its channel's weights: `weight` is [in, out / groups, kernel...]."""
    return 2 * math.prod(given[0]) * math.prod(given[1][1:])


def _gemm(given: Sequence[Shape], made: Shape, attributes: Mapping[str, int]) -> int:
    return 2 * math.prod(made) * given[0][0 if attributes.get("transA") else 1]


def _matmul(given: Sequence[Shape], made: Shape, _: Mapping[str, int]) -> int:
    return 2 * math.prod(made) * given[0][-1]


def _lstm(given: Sequence[Shape], _: Shape, __: Mapping[str, int]) -> int:
    """X is [steps, batch, in], W [directions, 4 hidden, in], R [directions, 4 hidden, hidden]."""
    steps, batch, _in = given[0]
    return 2 * steps * batch * (math.prod(given[1]) + math.prod(given[2]))


_FLOPS = {"Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm, "MatMul": _matmul, "LSTM": _lstm}
