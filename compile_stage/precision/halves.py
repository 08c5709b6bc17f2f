"""A float32 graph in 16-bit floats, fp16 or bf16: what the two lowerings share.

Each node computes either in the 16-bit type or in float32. A tensor has the type of the node that makes it, and a Cast
stands, once, where a reader wants the other one: neighbours that stay in float32 meet in float32. A node takes the
16-bit type where ONNX's own definition of its operator allows it, input by input: the scales of a Resize stay what they
are. Inputs and outputs of the model, and what a subgraph reads from around it, keep name and type; a subgraph is left
as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import UsageError
from compile_stage.plugin_support.onnx_weights import values as weight_values
from compile_stage.precision.onnx_graph import (
    constant_tensor,
    name_nodes,
    read_opset,
    read_types,
    refuse_form,
)
from compile_stage.precision.wiring import (
    Names,
    captured,
    constant_weights,
    copy_message,
    has_subgraph,
    is_standard,
    replace_nodes,
)

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

    from compile_stage.core.records import PortableModel
    from compile_stage.core.tensors import Array

# The type of these outputs is what an attribute says.
_TYPED_BY_ATTRIBUTE = ("Cast", "ConstantOfShape")


@dataclass(frozen=True)
class Half:
    """A 16-bit floating-point type.

    Attributes:
        precision: The policy's word for it.
        name: ONNX's word: `float16` or `bfloat16`.
        float32_ops: Operators that stay in float32 for the precision's or the runtimes' sake.
        encode: float32 values → their 16-bit patterns (uint16).
    """

    precision: str
    name: str
    float32_ops: frozenset[str]
    encode: Callable[[Array], Array]

    @property
    def kind(self) -> int:
        """ONNX's number for it."""
        from onnx import TensorProto

        return int(TensorProto.DataType.Value(self.name.upper()))

    @property
    def word(self) -> str:
        """As operator definitions call it."""
        return f"tensor({self.name})"


@dataclass(frozen=True)
class _Places:
    """Positions of a node's inputs and outputs that take the 16-bit type."""

    inputs: frozenset[int]
    outputs: frozenset[int]


def convert(model: ModelProto, half: Half, keep: Collection[str]) -> tuple[str, ...]:
    """Rewrite the graph in place; every node must have a name of its own.

    Args:
        keep: Names of nodes that stay in float32.

    Returns:
        Notes on what else stayed in float32, for people.

    Raises:
        UsageError: No node could take the type.
    """
    types = read_types(model)
    places, left = _plan(model.graph, half, types, read_opset(model), keep)
    if (reason := _nothing_converts(places, left, half)) is not None:
        raise UsageError(reason)
    _Rewriter(model.graph, half, places).rewrite()
    return tuple(_notes(model.graph, half, left))


def refuse(model: PortableModel, half: Half, oldest_opset: int = 0) -> str | None:
    """The reason why a model can't have the type, or None. An older graph is judged as if at `oldest_opset`."""
    import onnx

    if (reason := refuse_form(model, half.precision)) is not None:
        return reason
    graph = onnx.load(model.path, load_external_data=False)
    opset = max(read_opset(graph), oldest_opset)
    name_nodes(graph.graph)
    return _nothing_converts(*_plan(graph.graph, half, read_types(graph), opset, ()), half)


def float16_bits(values: Array) -> Array:
    """Nearest float16.

    What is not zero stays so, since a divisor or its epsilon that became zero would make infinities.
    """
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):
        halves = values.astype(np.float16)
    smallest = np.copysign(np.float16(6e-8), values).astype(np.float16)
    halves = np.where((halves == 0) & (values != 0), smallest, halves)
    return np.ascontiguousarray(halves).view(np.uint16)


def bfloat16_bits(values: Array) -> Array:
    """Nearest bfloat16, ties to even.

    A finite value stays finite (float32's largest, as in masks, would round to infinity).
    """
    import numpy as np

    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    cut = (bits >> 16).astype(np.uint16)
    largest = (cut & 0x8000) | 0x7F7F
    overflowed = np.isfinite(values) & ((rounded & 0x7F80) == 0x7F80)
    return np.where(np.isnan(values), cut | 0x0040, np.where(overflowed, largest, rounded)).astype(np.uint16)


# ----------------------------------------------------------------------------------------------------- what may convert


def _plan(
    graph: GraphProto, half: Half, types: dict[str, int], opset: int, keep: Collection[str]
) -> tuple[dict[str, _Places], Counter[str]]:
    """By node name, what takes the type; and by operator, what its kind leaves in float32."""
    places: dict[str, _Places] = {}
    left: Counter[str] = Counter()
    for node in graph.node:
        if node.name in keep or node.op_type == "Constant":
            continue
        if (taken := _find_places(node, types, opset, half)) is not None:
            places[node.name] = taken
        elif node.op_type != "Cast" and not has_subgraph(node) and _touches_float(node, types):
            left[node.op_type] += 1
    return places, left


def _nothing_converts(places: dict[str, _Places], left: Counter[str], half: Half) -> str | None:
    if any(place.inputs for place in places.values()):
        return None
    if not left:
        return f"the graph has no operator on float32 tensors that {half.name} could replace"
    return f"no operator of the graph can run in {half.name} (it holds {', '.join(sorted(left))})"


def _touches_float(node: NodeProto, types: dict[str, int]) -> bool:
    from onnx import TensorProto

    return any(types.get(name) == TensorProto.FLOAT for name in (*node.input, *node.output))


def _find_places(node: NodeProto, types: dict[str, int], opset: int, half: Half) -> _Places | None:
    """Where a node may take the type; None when it stays in float32."""
    import onnx

    if _must_stay(node, types, half):
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    allowed = _allowed_variables(schema, node.op_type, half)
    inputs = _float_places(node.input, schema.inputs, types)
    outputs = _float_places(node.output, schema.outputs, types)
    taken_in = frozenset(place for place, kind in inputs.items() if kind in allowed)
    taken_out = frozenset(place for place, kind in outputs.items() if kind in allowed)
    first = inputs.get(0) or outputs.get(0)
    return _Places(taken_in, taken_out) if (taken_in or taken_out) and first in allowed else None


def _must_stay(node: NodeProto, types: dict[str, int], half: Half) -> bool:
    """True where the node computes in float32 whatever ONNX's definition of its operator allows."""
    from onnx import TensorProto

    if not is_standard(node) or node.op_type in half.float32_ops or has_subgraph(node):
        return True
    if any(name and name not in types for name in (*node.input, *node.output)):
        return True
    # A Cast to integers reads float32, where that is what there is: 16 bits would round before it counts.
    return node.op_type == "Cast" and types[node.output[0]] != TensorProto.FLOAT


def _allowed_variables(schema: Any, op: str, half: Half) -> set[str]:
    """The type variables of an operator's definition (its "T") that may be the 16-bit type."""
    allowed = {one.type_param_str for one in schema.type_constraints if half.word in one.allowed_type_strs}
    if op not in _TYPED_BY_ATTRIBUTE:
        # A variable that only outputs have (the statistics of a LayerNormalization) is set by an attribute or the
        # operator.
        allowed &= {formal.type_str for formal in schema.inputs}
    return allowed


def _float_places(names: Iterable[str], formals: Any, types: dict[str, int]) -> dict[int, str]:
    """Position → type variable of each float32 tensor; a variadic operator's last formal stands for all that follow."""
    from onnx import TensorProto

    return {
        place: str(formals[min(place, len(formals) - 1)].type_str)
        for place, name in enumerate(names)
        if name and types.get(name) == TensorProto.FLOAT
    }


# ------------------------------------------------------------------------------------------------------------ rewriting


class _Rewriter:
    """Gives every tensor its type, and every reader the tensor in the type that it wants.

    Attributes:
        as_half: Tensor → its name in the 16-bit type, where someone reads it so.
        as_float: Tensor that a node now makes in 16 bits → its name in float32, where someone reads it so.
        nodes: The graph's nodes with the casts between them, in order.
    """

    def __init__(self, graph: GraphProto, half: Half, places: dict[str, _Places]) -> None:
        self.graph, self.half, self.places = graph, half, places
        self.public = {value.name for value in graph.output} | captured(graph)  # these keep name and type
        self.wanted_half, self.wanted_float = _readers(graph, places, self.public)
        self.as_half: dict[str, str] = {}
        self.as_float: dict[str, str] = {}
        self.nodes: list[NodeProto] = []
        self._fresh = Names(graph).fresh

    def rewrite(self) -> None:
        self._convert_constants()
        for value in self.graph.input:
            if value.name in self.wanted_half:
                self._cast_to_half(value.name)
        for node in self.graph.node:
            places = self.places.get(node.name)
            in_half = {node.output[place] for place in places.outputs} if places else set()
            for place, name in enumerate(node.input):
                takes_half = places is not None and place in places.inputs
                node.input[place] = self.as_half[name] if takes_half else self.as_float.get(name, name)
            if node.op_type in _TYPED_BY_ATTRIBUTE and in_half:
                _retype(node, self.half)
            self.nodes.append(node)
            for place, name in enumerate(node.output):
                if name in in_half:
                    self._made_in_half(node, place)
                elif name in self.wanted_half and name not in self.as_half:
                    self._cast_to_half(name)
        replace_nodes(self.graph, self.nodes)
        del self.graph.value_info[:]  # some types of the tensors between no longer hold; every runtime infers them

    def _convert_constants(self) -> None:
        """A constant that is read in both types is stored in both."""
        constants = _float_constants(self.graph)
        for name in sorted(self.wanted_half & constants.keys()):
            tensor = constants[name]
            self.as_half[name] = name
            if name in self.wanted_float:
                self.as_half[name] = self._fresh(f"{name}.{self.half.precision}")
                self.graph.initializer.append(copy_message(tensor, name=self.as_half[name]))
                tensor = self.graph.initializer[-1]
            _encode(tensor, self.half)

    def _made_in_half(self, node: NodeProto, place: int) -> None:
        """The node makes this output in 16 bits; readers in float32 get a Cast."""
        from onnx import TensorProto

        name = node.output[place]
        public = name in self.public
        self.as_half[name] = self._fresh(f"{name}.{self.half.precision}") if public else name
        node.output[place] = self.as_half[name]
        if name in self.wanted_float:
            self.as_float[name] = name if public else self._fresh(f"{name}.fp32")
            self._cast(self.as_half[name], self.as_float[name], TensorProto.FLOAT)

    def _cast_to_half(self, name: str) -> None:
        self.as_half[name] = self._fresh(f"{name}.{self.half.precision}")
        self._cast(name, self.as_half[name], self.half.kind)

    def _cast(self, source: str, result: str, kind: int) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node("Cast", [source], [result], name=self._fresh(f"{result}/cast"), to=kind))


def _readers(graph: GraphProto, places: dict[str, _Places], public: set[str]) -> tuple[set[str], set[str]]:
    """Tensors that someone reads in the 16-bit type, and those that someone reads as they were."""
    in_half: set[str] = set()
    in_float = set(public)
    for node in graph.node:
        taken = places.get(node.name)
        for place, name in enumerate(node.input):
            (in_half if taken and place in taken.inputs else in_float).add(name)
    return in_half, in_float


def _float_constants(graph: GraphProto) -> dict[str, Any]:
    """float32 weights and what Constant nodes hold, by name.

    A weight that is also an input can be overridden, so it is none.
    """
    from onnx import TensorProto

    tensors = constant_weights(graph)
    for node in graph.node:
        if node.op_type == "Constant" and (tensor := constant_tensor(node)) is not None:
            tensors[node.output[0]] = tensor
    return {name: tensor for name, tensor in tensors.items() if tensor.data_type == TensorProto.FLOAT}


def _encode(tensor: TensorProto, half: Half) -> None:
    """Turn a float32 tensor into one of the type, in place."""
    raw = half.encode(weight_values(tensor)).astype("<u2").tobytes()
    for name in ("float_data", "external_data", "data_location"):
        tensor.ClearField(name)
    tensor.data_type, tensor.raw_data = half.kind, raw


def _retype(node: NodeProto, half: Half) -> None:
    """A Cast or ConstantOfShape that made float32 makes the type."""
    from onnx import helper

    if node.op_type == "Cast":
        next(attribute for attribute in node.attribute if attribute.name == "to").i = half.kind
    elif (held := constant_tensor(node)) is not None:
        _encode(held, half)
    else:  # it says nothing, and means a float32 zero
        node.attribute.append(helper.make_attribute("value", helper.make_tensor("", half.kind, [1], b"\0\0", raw=True)))


def _notes(graph: GraphProto, half: Half, left: Counter[str]) -> Iterable[str]:
    subgraphs = sum(has_subgraph(node) for node in graph.node)
    if subgraphs:
        yield f"left in fp32 with all that is in them: the subgraphs of {subgraphs} nodes"
    listed = ", ".join(f"{count} {op}" for op, count in sorted(left.items()))
    if listed:
        yield f"left in fp32, since the operator has no {half.name} or needs more than it holds: {listed}"
