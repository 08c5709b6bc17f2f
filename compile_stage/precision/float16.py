"""fp16 by graph rewrite, aware of overflow.

float16 ends at 65504. What would pass it stays in float32: nodes whose weights do, and, when there are calibration samples, nodes
whose inputs or outputs pass `DATA_MAX` on them. The inputs and outputs of the model keep their types.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.precision.onnx_graph import finish, name_nodes, read_batches, refuse_form, write_graph

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

FLOAT16_MAX = 65504.0

# Samples show only some of what will come, and sums pass their terms: 512 leaves a factor of 128. It is the default of
# NVIDIA's ModelOpt AutoCast too.
DATA_MAX = 512.0


class Float16:
    """Weights and activations in float16.

    Scheme options:
        data_max: Largest magnitude that a node may see on the calibration samples and still go to float16; 512 by default.
    """

    name: ClassVar[str] = "fp16"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        if (reason := refuse_form(model, self.name)) is not None:
            return reason
        import onnx

        graph = onnx.load(model.path, load_external_data=False).graph
        blocked = _float32_ops()
        if all(node.op_type in blocked for node in graph.node):
            held = ", ".join(sorted({node.op_type for node in graph.node}))
            return f"no operator of the graph can run in float16 (it holds {held})"
        weights = any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in graph.initializer)
        if not weights and not any(
            spec.dtype == "float32" for spec in (*model.signature.inputs, *model.signature.outputs)
        ):
            return "the graph has no float32 tensor that float16 could replace"
        return None

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        graph = onnx.load(model.path)
        name_nodes(graph.graph)
        named = {node.name for node in graph.graph.node}
        if unknown := [name for name in keep if name not in named]:
            raise UsageError(f"the graph has no node called {unknown[0]!r} that could stay in fp32")
        overflowing = _constants_past(graph, FLOAT16_MAX)
        if calibration is not None:
            limit = float(scheme.options.get("data_max", DATA_MAX))
            peaks = _measure_peaks(graph, read_batches(model, calibration))
            overflowing |= {tensor for tensor, peak in peaks.items() if not peak <= limit}  # a NaN is past it too
        too_large = {
            node.name
            for node in graph.graph.node
            if overflowing.intersection(node.input) or overflowing.intersection(node.output)
        }
        kept = tuple(node.name for node in graph.graph.node if node.name in too_large or node.name in keep)
        if len(kept) == len(graph.graph.node):
            raise UsageError(
                "every node would stay in fp32: all of them pass float16's range on the calibration samples"
            )
        graph = convert_float_to_float16(graph, keep_io_types=True, node_block_list=list(kept))
        _join_float32(graph)
        note = f"kept in fp32, since their values come near float16's largest: {len(too_large)} nodes"
        return finish(
            graph,
            model,
            into,
            self.name,
            kept={"fp32": kept} if kept else {},
            notes=(*model.notes, note) if too_large else model.notes,
        )


def _join_float32(model: Any) -> None:
    """Let neighbours that stay in float32 meet in float32, and leave each cast once.

    The converter casts around every node by itself, so that between two of them values would pass through float16, and overflow there.
    """
    from onnx import TensorProto
    from onnxruntime.quantization.onnx_model import ONNXModel

    graph = model.graph
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    inserted = {
        name: node.input[0]
        for name, node in casts.items()
        if node.name.startswith("graph_input_cast") or node.name.endswith("_cast_to_fp16_node")
    }
    for node in casts.values():
        if node.attribute[0].i == TensorProto.FLOAT and node.input[0] in inserted:
            node.input[0] = inserted[node.input[0]]
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    nodes, seen = [], set()
    for node in graph.node:
        first = node.output[0] if node.output else node.name
        if first not in seen and not (first in inserted and first not in used):
            nodes.append(node)
        seen.add(first)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]  # some types of the tensors between no longer hold; every runtime infers them
    ONNXModel(model).topological_sort()


def _float32_ops() -> set[str]:
    """Operators that have no float16 kernels; the converter leaves them as they are."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    return set(DEFAULT_OP_BLOCK_LIST)


def _constants_past(model: Any, limit: float) -> set[str]:
    """Names of weights and constants that hold a finite value of a larger magnitude."""
    from onnx import TensorProto, numpy_helper

    tensors = [(tensor.name, tensor) for tensor in model.graph.initializer]
    for node in model.graph.node:
        if node.op_type == "Constant":
            tensors += [(node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value"]
    found = set()
    for name, tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT:
            values = np.abs(numpy_helper.to_array(tensor))
            if np.any((values > limit) & np.isfinite(values)):
                found.add(name)
    return found


def _measure_peaks(model: Any, batches: Iterator[Batch]) -> dict[str, float]:
    """Tensor → largest magnitude over all batches, for every float32 tensor that the graph computes or is given."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    inferred = onnx.shape_inference.infer_shapes(model) if model.ByteSize() < 2**31 - 1 else model
    typed = (*inferred.graph.value_info, *inferred.graph.output, *inferred.graph.input)
    floats = sorted({value.name for value in typed if value.type.tensor_type.elem_type == TensorProto.FLOAT})
    for position, name in enumerate(floats):
        # Reduced inside the graph, so that no activation is kept: one number for each tensor comes out.
        magnitude, peak = f"compile_stage/magnitude/{position}", f"compile_stage/peak/{position}"
        watched.graph.node.append(helper.make_node("Abs", [name], [magnitude]))
        watched.graph.node.append(helper.make_node("ReduceMax", [magnitude], [peak], keepdims=0))
        watched.graph.output.append(helper.make_tensor_value_info(peak, TensorProto.FLOAT, []))
    peaks = dict.fromkeys(floats, 0.0)
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        path = write_graph(watched, Path(scratch))
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        wanted = [f"compile_stage/peak/{position}" for position in range(len(floats))]
        for batch in batches:
            for name, peak in zip(floats, session.run(wanted, dict(batch)), strict=True):
                peaks[name] = float(np.fmax(peaks[name], peak)) if np.isfinite(peak) else float("inf")
    return peaks
