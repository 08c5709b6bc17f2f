"""Dynamic int8: ONNX Runtime's quantizer writes the operators, and the weights are rounded here.

The quantizer (onnxruntime 1.32) holds a model's weights six times, 13 GB for a model of 2.2 GB. It is given an outline
of the graph, in which a weight has its channels and nothing else. Afterwards the integers and scales of the true
weights, which are what it would make of them, take the place of the outline's, one weight at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.plugin_support import onnx_weights
from compile_stage.precision import weights
from compile_stage.precision.onnx_graph import INLINE_LIMIT_BYTES, read_types, write_graph
from compile_stage.precision.wiring import (
    Names,
    attribute,
    captured,
    constant_weights,
    copy_message,
    drop_unused_weights,
    is_plain_gemm,
    is_standard,
    replace_nodes,
)

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

OPS = ("Conv", "Gemm", "MatMul", "LSTM", "Attention")
"""Operators with kernels that quantise what they are given while they run."""

_LARGE_BYTES = 1_000_000  # of a weight that no quantised operator reads: a smaller one stays in the outline


@dataclass(frozen=True)
class _Read:
    """How an operator reads a weight: transposed or not, and which axis, as it is read, its channels lie on."""

    weight: str
    turned: bool
    axis: int


@dataclass(frozen=True)
class _Rounded:
    """A weight that is rounded here, and how it is read."""

    tensor: TensorProto
    read: _Read

    @property
    def values(self) -> Any:
        """As it is read."""
        values = onnx_weights.values(self.tensor)
        return values.T if self.read.turned else values


def quantise(simple: Path, ops: Collection[str], kept: Sequence[str], *, per_channel: bool, levels: int) -> ModelProto:
    """The graph with matrix operators that quantise their input while they run.

    Args:
        simple: The float graph, simplified; beside it is room for scratch files.
        kept: Nodes that stay in float32.
        levels: The largest integer of a weight: 127, or 64 for CPUs whose 16-bit sums saturate.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx_weights.load(simple)
    if per_channel:
        kept = [*kept, *_stacks(model.graph)]
    rounded = _make_outline(model, ops, frozenset(kept))
    others = _set_aside(model.graph, rounded)
    outline, written = write_graph(model, simple.parent, "outline.onnx"), simple.parent / "quantised.onnx"
    quantize_dynamic(
        str(outline),
        str(written),
        op_types_to_quantize=list(ops),
        per_channel=per_channel,
        reduce_range=levels < 127,
        weight_type=QuantType.QInt8,
        # The quantizer first splits each Gemm that is left into a MatMul of this name and an Add.
        nodes_to_exclude=[*kept, *(f"{name}_MatMul" for name in kept)],
        use_external_data_format=onnx_weights.weight_bytes(model) >= INLINE_LIMIT_BYTES,
    )
    quantised = onnx_weights.load(written)
    del quantised.graph.value_info[:]  # they know the outline's weights
    _fill(quantised.graph, rounded, others, levels)
    return quantised


def _stacks(graph: GraphProto) -> Iterator[str]:
    """Products by a constant of more than two axes: of these, MatMulInteger (onnxruntime 1.32) refuses channels."""
    constants = constant_weights(graph)
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in constants and len(constants[node.input[1]].dims) > 2:
            yield node.name


# ---------------------------------------------------------------------------------------------------------- the outline


def _make_outline(model: ModelProto, ops: Collection[str], kept: frozenset[str]) -> dict[str, _Rounded]:
    """Turn the graph into its outline; the true weights, by their names in it.

    A Gemm becomes a MatMul and an Add, as the quantizer would have it, which transposes weights in memory. A weight
    that somebody else reads, too, gets a second name.
    """
    graph, names = model.graph, Names(model.graph)
    constants, types = constant_weights(graph), read_types(model)
    reads = [_read(node, constants) if node.op_type in ops and node.name not in kept else None for node in graph.node]
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update((*captured(graph), *(value.name for value in graph.output)))
    places, rounded = dict[_Read, str](), dict[str, _Rounded]()
    for read, count in Counter(filter(None, reads)).items():
        alone = not read.turned and readers[read.weight] == count
        places[read] = read.weight if alone else names.fresh(f"{read.weight}/{'turned' if read.turned else 'rounded'}")
        rounded[places[read]] = _Rounded(copy_message(constants[read.weight]), read)
    nodes: list[NodeProto] = []
    for node, found in zip(graph.node, reads, strict=True):
        if found is not None:
            node.input[1] = places[found]
        nodes += _as_product(node, names, types) if found is not None and node.op_type == "Gemm" else [node]
    replace_nodes(graph, nodes)
    rest = [tensor for tensor in graph.initializer if tensor.name not in rounded]
    del graph.initializer[:]
    graph.initializer.extend([*rest, *(_channels_alone(name, weight) for name, weight in rounded.items())])
    drop_unused_weights(graph)
    _declare_types(graph, types)
    return rounded


def _read(node: NodeProto, constants: Mapping[str, TensorProto]) -> _Read | None:
    """How a node reads the weight that is rounded here; None where it has none, or its weights are the quantizer's."""
    from onnx import TensorProto

    if not is_standard(node) or node.op_type not in ("Conv", "Gemm", "MatMul") or node.input[1] not in constants:
        return None
    weight = constants[node.input[1]]
    if (
        weight.data_type != TensorProto.FLOAT
        or len(weight.dims) < 2
        or (node.op_type == "Gemm" and not is_plain_gemm(node))
    ):
        return None
    turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    return _Read(weight.name, turned, axis=0 if node.op_type == "Conv" else len(weight.dims) - 1)


def _as_product(gemm: NodeProto, names: Names, types: dict[str, int]) -> Iterator[NodeProto]:
    """A plain Gemm as MatMul and Add."""
    from onnx import helper

    x, weight, *bias = gemm.input
    (output,) = gemm.output
    added = any(bias)
    product = names.fresh(f"{output}/product") if added else output
    if output in types:
        types[product] = types[output]
    yield helper.make_node("MatMul", [x, weight], [product], name=names.fresh(f"{gemm.name}_MatMul"))
    if added:
        yield helper.make_node("Add", [product, *bias], [output], name=names.fresh(f"{gemm.name}_Add"))


def _channels_alone(name: str, weight: _Rounded) -> TensorProto:
    """Zeros in the place of a weight, one for each channel."""
    from onnx import numpy_helper

    values, axis = weight.values, weight.read.axis
    shape = [length if place == axis else 1 for place, length in enumerate(values.shape)]
    return numpy_helper.from_array(np.zeros(shape, np.float32), name)


def _set_aside(graph: GraphProto, rounded: Collection[str]) -> dict[str, TensorProto]:
    """Put a small tensor in the place of each large weight that is not quantised, such as a table of embeddings; the
    weights themselves, by name."""
    from onnx import numpy_helper

    quantizers = {name for node in graph.node if node.op_type in OPS for name in node.input}
    aside: dict[str, TensorProto] = {}
    for tensor in graph.initializer:
        values = None if tensor.name in rounded or tensor.name in quantizers else onnx_weights.values(tensor)
        if values is not None and values.nbytes > _LARGE_BYTES:
            aside[tensor.name] = copy_message(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.zeros([1] * values.ndim, values.dtype), tensor.name))
    return aside


def _declare_types(graph: GraphProto, types: Mapping[str, int]) -> None:
    """The quantizer asks for types, which can't be inferred where shapes contradict each other."""
    from onnx import helper

    outputs = {value.name for value in graph.output}
    made = [name for node in graph.node for name in node.output if name in types and name not in outputs]
    del graph.value_info[:]
    graph.value_info.extend(helper.make_tensor_value_info(name, types[name], None) for name in made)


# ---------------------------------------------------------------------------------------------------- the true weights


def _fill(graph: GraphProto, rounded: Mapping[str, _Rounded], others: Mapping[str, TensorProto], levels: int) -> None:
    """Put the true weights in the outline's place: integers and scales of those that were quantised, and the others."""
    from onnx import numpy_helper

    held = {tensor.name: tensor for tensor in graph.initializer}
    for name, tensor in others.items():
        if name in held:
            held[name].CopyFrom(tensor)
    for name, weight in rounded.items():
        values = weight.values
        if f"{name}_quantized" not in held:  # the quantizer left it as it is
            held[name].CopyFrom(numpy_helper.from_array(values, name))
            continue
        integers, scales = held[f"{name}_quantized"], held[f"{name}_scale"]
        axis = weight.read.axis if scales.dims else None
        rows = weights.as_rows(values, axis)
        scale = weights.scale_rows(rows, 1.0, levels, search=False)
        whole = weights.round_rows(rows, scale, levels).astype(np.int8)
        whole = weights.from_rows(whole, values.shape, axis)
        integers.CopyFrom(numpy_helper.from_array(whole, integers.name))
        scales.CopyFrom(numpy_helper.from_array(scale.reshape(tuple(scales.dims)), scales.name))
