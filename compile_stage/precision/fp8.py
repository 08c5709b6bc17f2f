"""fp8: weights and activations rounded to E4M3FN, the 8-bit float of 4 exponent and 3 mantissa bits.

QuantizeLinear and DequantizeLinear stand around what a product or convolution reads; a compiler for hardware that has
the type merges them into it. Weights have a scale for each output channel, activations one from the samples: largest
magnitude over 448, the type's own largest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.errors import UsageError
from compile_stage.core.ports import Lowering
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.plugin_support.onnx_weights import values as weight_values
from compile_stage.precision.onnx_graph import (
    finish,
    is_finite,
    load_simplified,
    read_batches,
    refuse_form,
    refuse_without,
)
from compile_stage.precision.peaks import measure_peaks
from compile_stage.precision.wiring import (
    Names,
    attribute,
    constant_weights,
    drop_unused_weights,
    is_standard,
    replace_nodes,
)

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

    from compile_stage.core.tensors import Array

NEEDS_SAMPLES = "fp8 needs calibration samples: set data.calibration in the policy"

OPSET = 19
LARGEST = 448.0
_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class Float8(Lowering):
    """Inputs of Conv, ConvTranspose, Gemm and MatMul in E4M3FN; biases and everything else stay in float32."""

    name: ClassVar[str] = "fp8"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""
    capabilities: ClassVar[LoweringCapabilities] = LoweringCapabilities(needs_calibration=True, complexity=50)

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return refuse_form(model, self.name) or refuse_without(model, scheme.ops or _OPS)

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        if calibration is None or calibration.count < (model.signature.fixed_batch or 1):
            raise UsageError(NEEDS_SAMPLES)
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            return self._lower(model, scheme, calibration, load_simplified(model, keep, OPSET, Path(scratch)), into)

    def _lower(
        self,
        model: PortableModel,
        scheme: Scheme,
        calibration: SampleSet,
        simplified: tuple[ModelProto, tuple[str, ...]],
        into: Path,
    ) -> PortableModel:
        graph, kept = simplified
        weights = _float_weights(graph.graph)
        nodes = _candidates(graph.graph, scheme, kept)
        read = {name for node in nodes for name in node.input[:2]} - weights.keys()
        peaks = measure_peaks(graph, read_batches(model, calibration), only=read)
        chosen = _finite(nodes, weights, peaks)
        if not chosen:
            raise UsageError("nothing was quantised: every product and convolution is kept in fp32 or is not finite")
        _quantize(graph.graph, chosen, weights, peaks)
        drop_unused_weights(graph.graph)
        note = f"{len(chosen)} products and convolutions read E4M3FN, calibrated on {calibration.count} samples"
        return finish(graph, model, into, self.name, kept=kept, notes=[note])


def _candidates(graph: GraphProto, scheme: Scheme, kept: Collection[str]) -> list[NodeProto]:
    """The products and convolutions that may be quantised."""
    ops = scheme.ops or _OPS
    return [node for node in graph.node if node.op_type in ops and is_standard(node) and node.name not in kept]


def _finite(nodes: Sequence[NodeProto], weights: Mapping[str, TensorProto], peaks: Mapping[str, float]) -> set[str]:
    """Names of the nodes whose two factors are finite; an activation that was not measured counts as not finite."""

    def fits(name: str) -> bool:
        return is_finite(weights[name]) if name in weights else bool(np.isfinite(peaks.get(name, np.inf)))

    return {node.name for node in nodes if all(fits(name) for name in node.input[:2])}


def e4m3_bits(values: Array) -> Array:
    """Nearest E4M3FN, ties to even, what is too large at the largest (uint8 patterns)."""
    magnitude = np.minimum(np.nan_to_num(np.abs(values.astype(np.float64)), nan=0.0), LARGEST)
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, -6), -6)
    eighths = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)  # 8 to 16, or less below 2**-6
    # Adding carries by itself: 16 eighths are the next exponent's 8.
    bits = (exponent + 6) * 8 + eighths
    signed = bits.astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)
    patterns: Array = np.where(np.isnan(values), np.uint8(0x7F), signed)
    return patterns


def _quantize(
    graph: GraphProto, chosen: Collection[str], weights: Mapping[str, TensorProto], peaks: Mapping[str, float]
) -> None:
    quantised: dict[tuple[str, int | None], str] = {}
    nodes: list[NodeProto] = []
    names = Names(graph)
    for node in graph.node:
        if node.name in chosen:
            for place, name in enumerate(node.input[:2]):
                axis = _channel_axis(node, place, weights[name].dims) if name in weights else None
                if (name, axis) not in quantised:
                    result = names.fresh(f"{name}.fp8" if axis is None else f"{name}.fp8_{axis}")
                    quantised[name, axis] = result
                    nodes += (
                        _dequantize_weight(graph, weights[name], axis, result)
                        if name in weights
                        else _round_trip(graph, name, peaks[name], result)
                    )
                node.input[place] = quantised[name, axis]
        nodes.append(node)
    replace_nodes(graph, nodes)
    del graph.value_info[:]


def _dequantize_weight(graph: GraphProto, tensor: TensorProto, axis: int | None, result: str) -> list[NodeProto]:
    """The weight in 8 bits and what makes it float32 again."""
    from onnx import TensorProto, helper, numpy_helper

    values = weight_values(tensor)
    others = None if axis is None else tuple(one for one in range(values.ndim) if one != axis)
    peak = np.max(np.abs(values), axis=others, keepdims=True, initial=0.0).astype(np.float32)
    scale = np.where(peak > 0, peak / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    bits = e4m3_bits(values / scale)
    names = [f"{result}.values", f"{result}.scale"]
    graph.initializer.append(
        helper.make_tensor(names[0], TensorProto.FLOAT8E4M3FN, values.shape, bits.tobytes(), raw=True)
    )
    graph.initializer.append(numpy_helper.from_array(scale.reshape(() if axis is None else -1), names[1]))
    node = helper.make_node("DequantizeLinear", names, [result], name=f"{result}/node")
    if axis is not None:
        node.attribute.append(helper.make_attribute("axis", axis))
    return [node]


def _round_trip(graph: GraphProto, name: str, peak: float, result: str) -> list[NodeProto]:
    """An activation to 8 bits and back."""
    from onnx import TensorProto, helper, numpy_helper

    scale, zero, values = f"{result}.scale", f"{result}.zero", f"{result}.values"
    step = np.float32(peak / LARGEST) if peak > 0 else np.float32(1)
    graph.initializer.append(numpy_helper.from_array(np.asarray(step, np.float32), scale))
    graph.initializer.append(helper.make_tensor(zero, TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True))
    return [
        helper.make_node("QuantizeLinear", [name, scale, zero], [values], name=f"{result}/quantize"),
        helper.make_node("DequantizeLinear", [values, scale, zero], [result], name=f"{result}/node"),
    ]


def _channel_axis(node: NodeProto, place: int, dims: Sequence[int]) -> int | None:
    """The axis of a weight's output channels; None where one scale has to do."""
    if place == 0 or len(dims) < 2:
        return None
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1 if attribute(node, "group", 1) == 1 else None
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    return len(dims) - 1


def _float_weights(graph: GraphProto) -> dict[str, TensorProto]:
    from onnx import TensorProto

    weights = constant_weights(graph)
    return {name: tensor for name, tensor in weights.items() if tensor.data_type == TensorProto.FLOAT}
