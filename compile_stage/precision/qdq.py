"""Where a static int8 graph has Q/DQ pairs: which nodes compute in integers, and which tensors are quantised for them.

Runtimes recognise integer arithmetic by QuantizeLinear and DequantizeLinear (a Q/DQ pair) before each operand of a node
and, for some nodes, after it. There are two placements. *Operands*: only what a matrix operator reads is quantised; its
output stays in float until the next one reads it, so a sum that follows is exact (OpenVINO merges all of it into one
kernel). *Chain*: a convolution's output is quantised too, and what lies between two convolutions (sums, pools,
concatenations) stays in integers, since the outputs of ONNX Runtime's integer kernels are integers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.plugin_support.onnx_weights import values as weight_values
from compile_stage.precision.wiring import Names, attribute, captured, is_plain_gemm, is_standard, replace_nodes

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Their second operand is a weight; MatMul may also multiply two activations."""

CHAINED = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid")
"""In a chain these compute in integers when all their inputs are quantised already."""

KNOWN = (*WEIGHTED, *CHAINED)

# They move values and compute none: their outputs have the range of their inputs.
_MOVING = (
    "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Identity", "Split", "DepthToSpace",
    "SpaceToDepth", "Expand", "Tile",
)  # fmt: skip

# They pick values out. Before one the whole tensor would be quantised for the few that it picks, so the integers are
# only carried on where there are some: `x[:, -1]` behind a convolution.
_PICKING = ("Gather",)

# Activations that a Q/DQ pair after them replaces: they only clip.
_CUTTING = ("Relu", "Clip")


class View:
    """A graph's nodes by what they make and read."""

    def __init__(self, graph: GraphProto) -> None:
        self.graph = graph
        self.constants: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = {value.name for value in graph.input} - self.constants.keys()
        self.outputs = {value.name for value in graph.output}
        self.makers: dict[str, NodeProto] = {name: node for node in graph.node for name in node.output if name}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                if name:
                    self.readers.setdefault(name, []).append(node)
        self.captured = captured(graph)  # by subgraphs: these keep their names and meaning
        self._kinds = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}

    def rank(self, tensor: str) -> int | None:
        """How many axes it has; None where shape inference does not know."""
        kind = self._kinds.get(tensor)
        return len(kind.shape.dim) if kind is not None and kind.HasField("shape") else None

    def is_float(self, tensor: str) -> bool:
        """False for what is known to be no float32; a tensor of unknown type is decided when samples are observed."""
        from onnx import TensorProto

        kind = self._kinds.get(tensor)
        return kind is None or kind.elem_type in (TensorProto.FLOAT, TensorProto.UNDEFINED)

    def sole_reader(self, tensor: str) -> NodeProto | None:
        """The one node that reads it; None where there are more, or where it is an output or read by a subgraph."""
        readers = self.readers.get(tensor, [])
        alone = len(readers) == 1 and list(readers[0].input).count(tensor) == 1
        return readers[0] if alone and tensor not in self.outputs | self.captured else None

    def values(self, tensor: str) -> Any:
        """A constant as an array."""
        return weight_values(self.constants[tensor])


@dataclass(frozen=True)
class Layer:
    """A node that multiplies an activation by a weight in integers.

    Attributes:
        axis: Of the weight's output channels, from 0; None: the weight has one scale.
        depthwise: A convolution in which each channel is its own.
    """

    node: NodeProto
    x: str
    weight: str
    bias: str
    axis: int | None
    depthwise: bool = False


@dataclass
class Plan:
    """What is quantised.

    Attributes:
        layers: By name of the node, in graph order.
        reads: Node → the positions of the inputs that it reads quantised.
        rounded: Tensors that are quantised, each with the tensor whose range it takes (itself, unless it was only
            moved).
        everywhere: Of them, those that every reader reads quantised.
        products: Of them, those that a MatMul multiplies with each other.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    reads: dict[str, set[int]] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    everywhere: set[str] = field(default_factory=set)
    products: set[str] = field(default_factory=set)

    @property
    def factors(self) -> set[str]:
        """Of `ranges`, those of activations that are multiplied by activations."""
        return {self.rounded[name] for name in self.products if name in self.rounded}

    @property
    def ranges(self) -> list[str]:
        """The tensors whose ranges are needed."""
        return list(dict.fromkeys(self.rounded.values()))


def plan(
    view: View,
    ops: Collection[str],
    kept: Collection[str],
    *,
    chain: bool,
    per_channel: bool = True,
    products: bool = True,
) -> Plan:
    """Decide what is quantised.

    Args:
        ops: Operator types that may compute in integers.
        kept: Names of nodes that may not.
        chain: The placement: True is *chain*, False is *operands*.
        products: Whether a MatMul of two activations computes in integers.
    """
    plan = Plan()
    for node in view.graph.node:
        if node.name in kept or not is_standard(node) or node.op_type not in ops:
            continue
        if (layer := _as_layer(view, node, per_channel)) is not None:
            plan.layers[node.name] = layer
            _read(view, plan, node, (0,))
            if chain and node.op_type.startswith("Conv"):
                output = _after_cut(view, node.output[0], kept)
                plan.rounded.setdefault(output, output)
                plan.everywhere.add(output)
        elif products and node.op_type == "MatMul" and not any(name in view.constants for name in node.input):
            _read(view, plan, node, (0, 1))
            plan.products.update(node.input)
    if chain:
        _extend(view, plan, ops, kept)
    return plan


def _as_layer(view: View, node: NodeProto, per_channel: bool) -> Layer | None:
    """The node as a layer; None when it is none: no float32 weight, or a Gemm that scales or transposes its input."""
    if node.op_type not in WEIGHTED or node.input[0] in view.constants or node.input[1] not in view.constants:
        return None
    if not _has_float_operands(view, node) or (node.op_type == "Gemm" and not is_plain_gemm(node)):
        return None
    dims, group = view.constants[node.input[1]].dims, attribute(node, "group", 1)
    bias = node.input[2] if len(node.input) > 2 else ""
    axis = _channel_axis(node, len(dims)) if per_channel else None
    depthwise = node.op_type == "Conv" and group > 1 and dims[0] == group and dims[1] == 1
    return Layer(node, node.input[0], node.input[1], bias, axis, depthwise)


def _has_float_operands(view: View, node: NodeProto) -> bool:
    from onnx import TensorProto

    weight = view.constants[node.input[1]]
    return weight.data_type == TensorProto.FLOAT and bool(np.prod(weight.dims)) and view.is_float(node.input[0])


def _channel_axis(node: NodeProto, rank: int) -> int | None:
    """The axis of the output channels of a node's weight, which has `rank` axes; None where one scale has to do."""
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    if node.op_type == "ConvTranspose":
        return 1 if attribute(node, "group", 1) == 1 else None
    if node.op_type == "MatMul":
        return 1 if rank == 2 else None
    return 0


def _read(view: View, plan: Plan, node: NodeProto, positions: Sequence[int]) -> None:
    if not all(view.is_float(node.input[position]) for position in positions):
        return
    plan.reads.setdefault(node.name, set()).update(positions)
    for position in positions:
        _round_back(view, plan, node.input[position])


def _round_back(view: View, plan: Plan, tensor: str) -> None:
    """Quantise a tensor; where it was only moved, quantise what it was before too, and let it take that range."""
    path = [tensor]
    while tensor not in plan.rounded:
        maker = view.makers.get(path[-1])
        source = maker.input[0] if maker is not None and maker.op_type in _MOVING and maker.input else ""
        if not source or source in view.constants or view.sole_reader(source) is not maker or not view.is_float(source):
            break
        path.append(source)
    root = plan.rounded.setdefault(path[-1], path[-1])
    for name in path:
        plan.rounded.setdefault(name, root)
    for name in path[1:]:
        plan.reads.setdefault(view.readers[name][0].name, set()).add(0)


def _after_cut(view: View, tensor: str, kept: Collection[str]) -> str:
    """The tensor itself, or the output of the ReLU or Clip that is its only reader."""
    reader = view.sole_reader(tensor)
    if reader is not None and reader.op_type in _CUTTING and reader.input[0] == tensor and reader.name not in kept:
        return str(reader.output[0])
    return tensor


def _extend(view: View, plan: Plan, ops: Collection[str], kept: Collection[str]) -> None:
    """Carry the integers on through sums, pools and moves."""
    for node in view.graph.node:
        if node.name in kept or not node.output or not is_standard(node):
            continue
        carried = node.op_type in (*_MOVING, *_PICKING) and len(node.output) == 1
        if carried and node.input[0] in plan.everywhere:
            plan.rounded[node.output[0]] = plan.rounded[node.input[0]]
            plan.everywhere.add(node.output[0])
        elif node.op_type in CHAINED and node.op_type in ops and all(name in plan.everywhere for name in node.input):
            plan.reads.setdefault(node.name, set()).update(range(len(node.input)))
            output = _after_cut(view, node.output[0], kept)
            plan.rounded.setdefault(output, output)
            plan.everywhere.add(output)


# ------------------------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True)
class QuantParams:
    """Scale and zero point of one range of 8 bits: value = (integer - zero) * scale."""

    scale: np.float32
    zero: Any  # np.uint8 or np.int8

    def apply(self, values: Any) -> Any:
        """An array of any shape, quantised and dequantised: float32."""
        limits = np.iinfo(self.zero.dtype)
        whole = np.clip(np.rint(values / self.scale) + self.zero, limits.min, limits.max)
        return ((whole - self.zero) * self.scale).astype(np.float32)


def write(view: View, plan: Plan, params: Mapping[str, QuantParams]) -> None:
    """Put the Q/DQ pairs of activations into the graph; the readers that `plan` names read what comes out of them.

    Args:
        params: By the tensor whose range it is (`Plan.ranges`). A tensor without one is not quantised.
    """
    graph, names = view.graph, Names(view.graph)
    pairs: dict[str, list[NodeProto]] = {}  # tensor → the two nodes that stand behind the node that makes it
    dequantised: dict[str, str] = {}
    scales: dict[str, tuple[str, str]] = {}
    for tensor, root in plan.rounded.items():
        if root not in params:
            continue
        if root not in scales:
            scales[root] = (names.fresh(f"{root}_scale"), names.fresh(f"{root}_zero_point"))
            add_constant(graph, scales[root][0], params[root].scale)
            add_constant(graph, scales[root][1], params[root].zero)
        source = tensor
        if tensor in plan.everywhere and tensor in view.outputs:  # the output is what comes out of the pair
            source = names.fresh(f"{tensor}/unrounded")
            maker = view.makers[tensor]
            maker.output[:] = [source if name == tensor else name for name in maker.output]
        pairs[source] = _pair(names, tensor, source, scales[root])
        dequantised[tensor] = pairs[source][1].output[0]
    for node in graph.node:
        positions = plan.reads.get(node.name, set())
        for position, name in enumerate(node.input):
            if name in dequantised and (position in positions or name in plan.everywhere):
                node.input[position] = dequantised[name]
    ordered = [part for value in graph.input for part in pairs.get(value.name, ())]
    for node in graph.node:
        ordered.append(node)
        ordered.extend(part for name in node.output for part in pairs.get(name, ()))
    replace_nodes(graph, ordered)


def _pair(names: Names, tensor: str, source: str, scale: tuple[str, str]) -> list[NodeProto]:
    """QuantizeLinear and DequantizeLinear of `source`; their names are those of `tensor`.

    Args:
        scale: Names of the scale and of the zero point.
    """
    whole = names.fresh(f"{tensor}_QuantizeLinear_Output")
    back = tensor if source != tensor else names.fresh(f"{tensor}_DequantizeLinear_Output")
    return [
        _node("QuantizeLinear", (source, *scale), whole, names.fresh(f"{tensor}_QuantizeLinear")),
        _node("DequantizeLinear", (whole, *scale), back, names.fresh(f"{tensor}_DequantizeLinear")),
    ]


def weight_node(view: View, names: Names, layer: Layer, whole: Any, scale: Any) -> Any:
    """A layer's weight in integers, and the DequantizeLinear that makes floats of it.

    Args:
        whole: int8, of the weight's shape.
        scale: float32 [channels], or a scalar.
    """
    return _constant_node(view, names, layer.weight, whole, scale, layer.axis if scale.ndim else None)


def bias_node(view: View, names: Names, layer: Layer, bias: Any, units: Any) -> Any:
    """The same for its bias, in 32 bits and units of both scales: so do integer kernels add it.

    The layer then reads it.
    """
    whole = np.rint(bias / units).astype(np.int32)
    node = _constant_node(view, names, _name_of_bias(layer), whole, units, 0 if units.ndim else None)
    _read_bias(layer, node.output[0])
    return node


def set_bias(view: View, names: Names, layer: Layer, bias: Any) -> None:
    """Have the layer read this bias, float32 [channels]. The constant that it read may be another layer's too."""
    written = names.fresh(f"{_name_of_bias(layer)}_corrected")
    add_constant(view.graph, written, np.asarray(bias, np.float32))
    _read_bias(layer, written)


def _name_of_bias(layer: Layer) -> str:
    return layer.bias or f"{layer.node.name}/bias"


def _read_bias(layer: Layer, name: str) -> None:
    inputs = [*layer.node.input[:2], name]
    layer.node.input[:] = inputs


def _constant_node(view: View, names: Names, base: str, whole: Any, scale: Any, axis: int | None) -> Any:
    from onnx import helper

    written = names.fresh(f"{base}_quantized")
    scales, zeros = names.fresh(f"{base}_scale"), names.fresh(f"{base}_zero_point")
    add_constant(view.graph, written, whole)
    add_constant(view.graph, scales, np.asarray(scale, np.float32))
    add_constant(view.graph, zeros, np.zeros(np.shape(scale), whole.dtype))
    back = names.fresh(f"{base}_DequantizeLinear_Output")
    node = _node("DequantizeLinear", (written, scales, zeros), back, names.fresh(f"{base}_DequantizeLinear"))
    if axis is not None:
        node.attribute.append(helper.make_attribute("axis", axis))
    return node


def _node(op: str, inputs: Sequence[str], output: str, name: str) -> Any:
    from onnx import helper

    return helper.make_node(op, list(inputs), [output], name=name)


def add_constant(graph: GraphProto, name: str, value: Any) -> None:
    """An initializer with the array's own type."""
    from onnx import numpy_helper

    graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
