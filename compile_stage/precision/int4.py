"""int4: weights of matrix products in 4 bits, by blocks; activations stay in float32, so no samples are needed.

The weight becomes a DequantizeLinear over 4-bit values, which is standard ONNX from opset 21. Runtimes merge it with
the product that reads it, and so never hold the whole weight in float32: ONNX Runtime as MatMulNBits, OpenVINO as a
compressed FullyConnected. What they take decides what is written: a matrix [K, N] with blocks along K, whole blocks
only, no transposition.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.errors import UsageError
from compile_stage.core.ports import Lowering
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.plugin_support.onnx_weights import values as weight_values
from compile_stage.precision import blocks
from compile_stage.precision.onnx_graph import (
    finish,
    is_finite,
    load_simplified,
    refuse_form,
    refuse_without,
)
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

OPSET = 21
BLOCK, SMALLEST_BLOCK = 32, 16
_OPS = ("MatMul", "Gemm")


class Int4(Lowering):
    """Weights of MatMul and Gemm in 4 bits; large embedding tables in 8, convolutions stay in float32.

    `Scheme.weights` is `uint4` (asymmetric: one zero point a block; 1.5 dB better on normal weights) or `int4`
    (symmetric).

    Scheme options:
        method: `hqq`, half-quadratic quantisation (the default), or `rtn`, rounding to nearest.
        block: Weights that share a scale, a power of two from 16 on; 32 by default. Where it does not divide a matrix's
            rows, the largest power of two below it that does is taken, down to 16; a matrix without one stays in
            float32.
        tables: Store embedding tables in 8 bits (`precision/tables.py`); True by default.
    """

    name: ClassVar[str] = "int4"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""
    capabilities: ClassVar[LoweringCapabilities] = LoweringCapabilities(
        needs_calibration=False, mixes=True, complexity=60
    )

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return (
            refuse_form(model, self.name)
            or refuse_without(model, scheme.ops or _OPS, word=" or ")
            or _refuse_scheme(scheme)
            or _refuse_shapes(model, scheme)
        )

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        if (reason := _refuse_scheme(scheme)) is not None:
            raise UsageError(reason)
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            graph, kept = load_simplified(model, keep, OPSET, Path(scratch))
            done, left = _quantize(graph.graph, scheme, kept)
            if not done:
                why = "; ".join(dict.fromkeys(left)) or "no matrix product is left to do it to"
                raise UsageError(f"nothing was quantised: {why}")
            drop_unused_weights(graph.graph)
            method, block = _read(scheme)
            notes = [f"{done} matrices have weights in 4 bits, by blocks of {block} ({method})"]
            if left:
                notes.append(f"{len(left)} matrix products stay in fp32: {'; '.join(dict.fromkeys(left))}")
            if scheme.options.get("tables", True) and (count := round_tables(graph.graph, kept)):
                notes.append(say_tables(count))
            return finish(graph, model, into, self.name, kept=kept, notes=notes)


def _quantize(graph: GraphProto, scheme: Scheme, kept: Collection[str]) -> tuple[int, list[str]]:
    """Put 4-bit weights before the products. Returns how many weights, and a reason for each product left as it is."""
    _, block = _read(scheme)
    weights = constant_weights(graph)
    names = Names(graph)
    written: dict[tuple[str, bool], str] = {}  # a weight, as it is or transposed → what stands for it
    left: list[str] = []
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type in (scheme.ops or _OPS) and is_standard(node) and node.name not in kept:
            size, reason = _fit_block(node, weights.get(node.input[1]), block)
            if reason or not is_finite(weights[node.input[1]]):
                left.append(reason or "a weight is not finite")
            else:
                weight, turned = node.input[1], attribute(node, "transB", 0) == 1
                if (weight, turned) not in written:
                    written[weight, turned] = names.fresh(f"{weight}{'.turned' if turned else ''}.int4")
                    quantised = _quantise_weight(weights[weight], turned, size, scheme)
                    nodes.append(_write(graph, written[weight, turned], quantised, size))
                node.input[1] = written[weight, turned]
                _untranspose(node)
        nodes.append(node)
    replace_nodes(graph, nodes)
    return len(written), left


def _quantise_weight(tensor: TensorProto, turned: bool, block: int, scheme: Scheme) -> blocks.Blocks:
    values = weight_values(tensor)
    matrix = np.ascontiguousarray(values.T) if turned else values
    return blocks.quantize(matrix, block, scheme.weights == "int4", _read(scheme)[0])


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


def _refuse_shapes(model: PortableModel, scheme: Scheme) -> str | None:
    """The reason when no weight can have blocks, as far as the unsimplified graph tells: a weight that is computed may
    be folded yet."""
    import onnx

    graph = onnx.load(model.path, load_external_data=False).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    computed = {name for node in graph.node for name in node.output}
    reasons = []
    for node in graph.node:
        if node.op_type in (scheme.ops or _OPS):
            _, reason = _fit_block(node, weights.get(node.input[1]), _read(scheme)[1])
            if not reason or node.input[1] in computed:
                return None
            reasons.append(reason)
    return f"nothing could be quantised: {'; '.join(dict.fromkeys(reasons))}"


def _write(graph: GraphProto, name: str, quantised: blocks.Blocks, block: int) -> Any:
    """Add the values to the graph; returns the node that makes `name` of them."""
    from onnx import TensorProto, helper, numpy_helper

    kind = TensorProto.INT4 if quantised.zero is None else TensorProto.UINT4

    def four_bits(part: str, values: Any) -> str:
        graph.initializer.append(
            helper.make_tensor(f"{name}.{part}", kind, values.shape, blocks.pack(values), raw=True)
        )
        return f"{name}.{part}"

    inputs = [four_bits("values", quantised.values), f"{name}.scale"]
    graph.initializer.append(numpy_helper.from_array(quantised.scale, inputs[1]))
    if quantised.zero is not None:  # with a zero point of 0 OpenVINO would not keep a symmetric weight compressed
        inputs.append(four_bits("zero", quantised.zero))
    return helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}/node", axis=0, block_size=block)


def _read(scheme: Scheme) -> tuple[str, int]:
    return str(scheme.options.get("method", "hqq")), int(scheme.options.get("block", BLOCK))


def _refuse_scheme(scheme: Scheme) -> str | None:
    method, block = _read(scheme)
    if method not in blocks.METHODS:
        return f"there is no int4 method {method!r}; there is {', '.join(blocks.METHODS)}"
    if block < SMALLEST_BLOCK or block & (block - 1):
        return f"a block of int4 weights is a power of two from {SMALLEST_BLOCK} on, not {block}"
    if scheme.weights not in ("", "int4", "uint4"):
        return f"weights of int4 are int4 or uint4, not {scheme.weights}"
    if other := sorted(set(scheme.ops) - set(_OPS)):
        return f"int4 has weights of {' and '.join(_OPS)} only, not of {other[0]}"
    return None
