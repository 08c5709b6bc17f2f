"""Weights of matrix products that are read by blocks: what is written into the graph, and which matrices have blocks.

A weight becomes a DequantizeLinear over integers, which is standard ONNX from opset 21. Runtimes merge it with the
product that reads it, and so never hold the whole weight in float32: ONNX Runtime as MatMulNBits, OpenVINO as a
compressed FullyConnected. What they take decides what is written: a matrix [K, N] with blocks along K, whole blocks
only, no transposition.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.plugin_support.onnx_weights import values as weight_values
from compile_stage.precision.blocks import Blocks, pack
from compile_stage.precision.onnx_graph import finish, is_finite, load_simplified
from compile_stage.precision.tables import round_tables, say_tables
from compile_stage.precision.wiring import (
    Names,
    attribute,
    constant_weights,
    drop_unused_weights,
    is_plain_gemm,
    is_standard,
    replace_nodes,
)

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

    from compile_stage.core.records import PortableModel, Scheme
    from compile_stage.core.tensors import Array

OPSET = 21
SMALLEST_BLOCK = 16
OPS = ("MatMul", "Gemm")


def lower(
    model: PortableModel,
    scheme: Scheme,
    keep: Sequence[str],
    into: Path,
    block: int,
    quantise: Callable[[Array, int], Blocks],
    said: str,
) -> PortableModel | str:
    """The graph with its products' weights by blocks, and large embedding tables in 8 bits unless the scheme's option
    `tables` is False; or the reason where no weight can have blocks.

    Args:
        keep, into: As `core.ports.Lowering.lower` has them.
        block, quantise: As `write` has them.
        said: What a note says of the weights that have blocks, behind their number.
    """
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        graph, kept = load_simplified(model, keep, OPSET, Path(scratch))
        ops = [op for op in scheme.ops or OPS if op in OPS]
        done, left = write(graph.graph, ops, kept, block, quantise, scheme.precision.partition("-")[0])
        reasons = "; ".join(dict.fromkeys(left))
        if not done:
            return f"nothing was quantised: {reasons or 'no matrix product is left to do it to'}"
        drop_unused_weights(graph.graph)
        notes = [f"{done} matrices have {said}"]
        if left:
            notes.append(f"{len(left)} matrix products stay in fp32: {reasons}")
        if scheme.options.get("tables", True) and (count := round_tables(graph.graph, kept)):
            notes.append(say_tables(count))
        return finish(graph, model, into, scheme.precision, kept=kept, notes=notes)


def write(
    graph: GraphProto,
    ops: Sequence[str],
    kept: Collection[str],
    block: int,
    quantise: Callable[[Array, int], Blocks],
    suffix: str,
) -> tuple[int, list[str]]:
    """Put weights by blocks before the products.

    Args:
        ops: Which products: of `OPS`.
        kept: Names of nodes that are left as they are.
        block: Rows that share a scale, a power of two. Where it does not divide a matrix's rows, the largest power of
            two below it that does is taken, down to 16; a matrix without one is left.
        quantise: Quantises a finite float32 matrix [K, N] by blocks of so many rows.
        suffix: Of the new tensors' names.

    Returns:
        How many weights are written, and a reason for each product left as it is.
    """
    weights = constant_weights(graph)
    names = Names(graph)
    written: dict[tuple[str, bool], str] = {}  # a weight, as it is or transposed → the tensor in its place
    left: list[str] = []
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type in ops and is_standard(node) and node.name not in kept:
            size, reason = _fit_block(node, weights.get(node.input[1]), block)
            if reason or not is_finite(weights[node.input[1]]):
                left.append(reason or "a weight is not finite")
            else:
                weight, turned = node.input[1], attribute(node, "transB", 0) == 1
                if (weight, turned) not in written:
                    written[weight, turned] = names.fresh(f"{weight}{'.turned' if turned else ''}.{suffix}")
                    values = weight_values(weights[weight])
                    quantised = quantise(np.ascontiguousarray(values.T) if turned else values, size)
                    nodes.append(_write(graph, written[weight, turned], quantised, size))
                node.input[1] = written[weight, turned]
                _untranspose(node)
        nodes.append(node)
    replace_nodes(graph, nodes)
    return len(written), left


def refuse_shapes(model: PortableModel, ops: Sequence[str], block: int) -> str | None:
    """The reason when no weight can have blocks, as far as the unsimplified graph tells: a weight that is computed may
    be folded yet."""
    import onnx

    graph = onnx.load(model.path, load_external_data=False).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    computed = {name for node in graph.node for name in node.output}
    reasons = []
    for node in graph.node:
        if node.op_type in ops:
            _, reason = _fit_block(node, weights.get(node.input[1]), block)
            if not reason or node.input[1] in computed:
                return None
            reasons.append(reason)
    return f"nothing could be quantised: {'; '.join(dict.fromkeys(reasons))}"


def _untranspose(node: NodeProto) -> None:
    """The weight was written as the product reads it."""
    for one in [one for one in node.attribute if one.name == "transB"]:
        node.attribute.remove(one)


def _fit_block(node: NodeProto, tensor: TensorProto | None, block: int) -> tuple[int, str]:
    """How many rows of the node's weight share a scale, and why there is no such number ("" where there is).

    Args:
        tensor: The weight; None when it is no constant.
        block: The largest size, a power of two.
    """
    from onnx import TensorProto

    if tensor is None or tensor.data_type != TensorProto.FLOAT:
        return 0, "both factors are computed"
    if len(tensor.dims) != 2:
        return 0, "the weight is no matrix"
    if node.op_type == "Gemm" and not is_plain_gemm(node):
        return 0, "the Gemm scales or transposes its input"
    rows = int(tensor.dims[1 if attribute(node, "transB", 0) else 0])
    while rows % block and block > SMALLEST_BLOCK:
        block //= 2
    if rows % block or not rows:
        return 0, f"a weight's rows are no whole blocks of {SMALLEST_BLOCK}"
    return block, ""


def _write(graph: GraphProto, name: str, quantised: Blocks, block: int) -> Any:
    """Add the values to the graph; returns the node that makes `name` of them."""
    from onnx import TensorProto, helper, numpy_helper

    kind = TensorProto.UINT4 if quantised.zero is not None else TensorProto.INT4
    if quantised.bits == 8:
        kind = TensorProto.INT8

    def integers(part: str, values: Array) -> str:
        packed = values.tobytes() if quantised.bits == 8 else pack(values)
        graph.initializer.append(helper.make_tensor(f"{name}.{part}", kind, values.shape, packed, raw=True))
        return f"{name}.{part}"

    inputs = [integers("values", quantised.values), f"{name}.scale"]
    graph.initializer.append(numpy_helper.from_array(quantised.scale, inputs[1]))
    if quantised.zero is not None:  # with a zero point of 0 OpenVINO would not keep a symmetric weight compressed
        inputs.append(integers("zero", quantised.zero))
    return helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}/node", axis=0, block_size=block)
