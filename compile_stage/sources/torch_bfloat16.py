"""An exported graph that computes in bfloat16 → the same graph in float32.

ONNX Runtime has no CPU kernels for bfloat16, and OpenVINO's reader takes float32 beside a converted bfloat16 tensor for
an error. Each bfloat16 number is a float32 number, so weights keep their values; what the original rounds to 8 bits
between two operators, the graph doesn't."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDENED = (
    "The original computes in bfloat16, the exported graph in float32: they differ by the original's rounding, up to "
    "0.4 % of a value at each operator. FP32's tolerances may be too narrow for that, those of bf16 and int8 are made "
    "for it"
)


def widen_bfloat16(model: Any) -> bool:
    """Write all that is bfloat16 in an `onnxscript.ir.Model`, in place, as float32: weights, constants, casts, types.

    Weights are converted when they are written, one after the other.

    Returns:
        Whether there was any.
    """
    from onnxscript import ir

    narrow, wide = ir.DataType.BFLOAT16, ir.DataType.FLOAT
    found = False
    for value in _values(model):
        if value.dtype == narrow:
            found, value.dtype = True, wide
        if value.const_value is not None and value.const_value.dtype == narrow:
            found, value.const_value = True, _widened(value.const_value)
    for node in _nodes(model):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == narrow:
                found, node.attributes[name] = True, ir.AttrTensor(name, _widened(attribute.value))
            elif name in _TYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.value == narrow:
                found, node.attributes[name] = True, ir.AttrInt64(name, int(wide))
    return found


_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
"""What says in which type a node answers: Cast; EyeLike and random numbers; QuantizeLinear and DequantizeLinear."""


def _widened(tensor: Any) -> Any:
    import numpy as np
    from onnxscript import ir

    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name),
        dtype=ir.DataType.FLOAT,
        shape=tensor.shape,
        name=tensor.name,
    )


def _nodes(model: Any) -> Iterator[Any]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _values(model: Any) -> Iterator[Any]:
    """Inputs, weights and results of the graph, of those within it, and of its functions."""
    for graph in {id(one): one for one in (model.graph, *(node.graph for node in _nodes(model)))}.values():
        yield from graph.inputs
        yield from getattr(graph, "initializers", {}).values()  # a function has none
    for node in _nodes(model):
        yield from node.outputs
