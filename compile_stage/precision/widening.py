"""A graph that computes in float16 → the same graph in float32, for lowerings that read float32 weights.

Each float16 number is a float32 number, so weights keep their values. What the original rounds to 11 bits between two
operators, and what it has as an infinity past 65504, the wide graph does not: the proof is against the original's
answers all the same. Inputs and outputs keep their type, behind a Cast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_stage.plugin_support import onnx_weights
from compile_stage.precision.wiring import Names

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

WIDENED = "quantised from a copy in float32: the model itself computes in float16"

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
"""What says in which type a node answers: Cast; EyeLike and random numbers; QuantizeLinear and DequantizeLinear."""


def has_float16_weights(model: ModelProto) -> bool:
    """Whether a weight of more than one axis is float16."""
    from onnx import TensorProto

    return any(tensor.data_type == TensorProto.FLOAT16 and len(tensor.dims) > 1 for tensor in model.graph.initializer)


def widen_float16(model: ModelProto) -> None:
    """Have all that is float16 in the graph, and in those within it, be float32; in place. Same graph, same names."""
    from onnx import TensorProto

    for graph in onnx_weights.all_graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.FLOAT16:
                _widen(tensor)
        for value in (*graph.value_info, *(() if graph is model.graph else (*graph.input, *graph.output))):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = [node for graph in onnx_weights.all_graphs(model.graph) for node in graph.node]
    for node in (*nodes, *(node for function in model.functions for node in function.node)):
        for attribute in node.attribute:
            _widen_attribute(attribute)
    _keep_types(model.graph)


def _widen(tensor: Any) -> None:
    import numpy as np
    from onnx import numpy_helper

    wide = numpy_helper.from_array(onnx_weights.values(tensor).astype(np.float32), tensor.name)
    tensor.CopyFrom(wide)


def _widen_attribute(attribute: AttributeProto) -> None:
    from onnx import AttributeProto, TensorProto

    if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT16:
        _widen(attribute.t)
    elif attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
        attribute.i = TensorProto.FLOAT


def _keep_types(graph: GraphProto) -> None:
    """A Cast behind each input in float16, and before each output."""
    from onnx import TensorProto, helper

    names = Names(graph)
    weights = {tensor.name for tensor in graph.initializer}
    made = {name for node in graph.node for name in node.output}
    first, last, renamed = [], [], {}
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16 and value.name not in weights:
            renamed[value.name] = wide = names.fresh(f"{value.name}.float32")
            first.append(helper.make_node("Cast", [value.name], [wide], name=wide, to=TensorProto.FLOAT))
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16 and value.name in made:
            renamed[value.name] = wide = names.fresh(f"{value.name}.float32")
            name = names.fresh(f"{value.name}.float16")
            last.append(helper.make_node("Cast", [wide], [value.name], name=name, to=TensorProto.FLOAT16))
    for node in (node for part in onnx_weights.all_graphs(graph) for node in part.node):
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in (value for part in onnx_weights.all_graphs(graph) if part is not graph for value in part.output):
        value.name = renamed.get(value.name, value.name)
    nodes: list[NodeProto] = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)
