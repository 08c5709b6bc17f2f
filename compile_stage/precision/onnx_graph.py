"""What the lowerings share: reading a graph, naming its nodes, simplifying it, and writing it the same way every
time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from compile_stage.core import sample_files
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel, SampleSet
from compile_stage.plugin_support import onnx_weights
from compile_stage.plugin_support.opset_conversion import converter_errors

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

    from compile_stage.core.tensors import Batch

INLINE_LIMIT_BYTES = onnx_weights.INLINE_LIMIT_BYTES

QUANTISED_OPS = (
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "QLinearConv",
    "QLinearMatMul",
    "MatMulInteger",
    "ConvInteger",
)

# Quantised too, but of ONNX Runtime's own domain: no lowering of ours writes them.
_FUSED_QUANTISED_OPS = (
    "DynamicQuantizeMatMul",
    "MatMulBnb4",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QAttention",
    "QGemm",
)

_WEIGHT_BYTES = 1024
"""A constant of at least so many bytes is a weight, no shape or axis that rewriting has to look into."""

# int4 came with it, and ONNX Runtime reads it from 1.20 on.
IR_VERSION = 10


def read_ops(model: PortableModel) -> set[str]:
    """Operator types of the graph, without its weights."""
    import onnx

    return {node.op_type for node in onnx.load(model.path, load_external_data=False).graph.node}


def refuse_form(model: PortableModel, precision: str) -> str | None:
    """The reasons that hold for every lowering: another form, or a graph that is not in float32 any more."""
    if model.form != "onnx":
        return f"the lowering to {precision} rewrites ONNX graphs, and this model is in the form {model.form}"
    if model.precision != "fp32":
        return f"the model is in {model.precision} already; a lowering starts from fp32"
    if quantised := sorted(read_ops(model).intersection((*QUANTISED_OPS, *_FUSED_QUANTISED_OPS))):
        return f"the graph is quantised already (it holds {', '.join(quantised)})"
    return None


def refuse_without(
    model: PortableModel, ops: Sequence[str], listed: Sequence[str] = (), word: str = ", "
) -> str | None:
    """The reason when the graph holds none of these operators, or None.

    Args:
        listed: Those that the reason names; all by default.
    """
    if (held := read_ops(model)).intersection(ops):
        return None
    return (
        f"there is nothing to quantise: the graph has no {word.join(listed or ops)} (it holds "
        f"{', '.join(sorted(held))})"
    )


def name_nodes(graph: GraphProto) -> None:
    """Give a name to every node that has none or shares one: `Conv_12`, by position, so that it is the same in every
    run."""
    taken = {node.name for node in graph.node if node.name}
    seen: set[str] = set()
    for position, node in enumerate(graph.node):
        if not node.name or node.name in seen:
            name = f"{node.op_type}_{position}"
            while name in taken:
                name += "_"
            node.name = name
            taken.add(name)
        seen.add(node.name)


def read_opset(model: ModelProto) -> int:
    """Version of ONNX's own operators in a ModelProto."""
    return next(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def raise_opset(model: ModelProto, version: int) -> Any:
    """The model with ONNX's own operators at `version` or later: itself, or a converted copy with the same names.

    Weights are kept apart meanwhile, so that a model of any size can be converted: protobuf holds at most 2 GiB.

    Raises:
        UsageError: The converter can't; the message says at what.
    """
    import onnx
    from onnx.inliner import inline_local_functions

    if read_opset(model) < version:
        if model.functions:
            model = inline_local_functions(model)
        bare, weights = _split_weights(model)
        order = [tensor.name for tensor in model.graph.initializer]
        try:
            model = onnx.version_converter.convert_version(bare, version)
        except converter_errors() as error:
            reason = " ".join(str(error).split())[:300]
            raise UsageError(f"its operators could not be brought to opset {version}: {reason}") from error
        kept = [value for value in model.graph.input if value.name not in weights]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        tensors = {tensor.name: tensor for tensor in model.graph.initializer} | weights
        del model.graph.initializer[:]
        model.graph.initializer.extend(tensors[name] for name in sorted(tensors, key=_by_order(order)))
        name_nodes(model.graph)
    model.ir_version = max(model.ir_version, IR_VERSION)
    return model


def read_types(model: ModelProto) -> dict[str, int]:
    """Element type (TensorProto.DataType) of every tensor of the main graph whose type is known.

    Left out: sequences, outputs of operators that shape inference does not know, and declarations of tensors that are
    gone.
    """
    graph = _inferred(model).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {
        value.name: int(value.type.tensor_type.elem_type) for value in values if value.type.HasField("tensor_type")
    }
    types |= {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and (tensor := constant_tensor(node)) is not None:
            types[node.output[0]] = int(tensor.data_type)
    # Tools that rewrite graphs leave declarations behind of tensors that are gone.
    there = {name for node in graph.node for name in node.output}
    there |= {part.name for part in (*graph.input, *graph.initializer)}
    return {name: kind for name, kind in types.items() if kind and name in there}


Dimension: TypeAlias = int | str | None
"""Length of an axis: a number, the name of one that is free, None where nothing is known of it."""


def read_shapes(model: ModelProto) -> dict[str, tuple[Dimension, ...]]:
    """Shape of every tensor of the main graph whose rank is known."""
    graph = _inferred(model, data_prop=True).graph
    shapes: dict[str, tuple[Dimension, ...]] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            lengths = value.type.tensor_type.shape.dim
            shapes[value.name] = tuple(
                int(one.dim_value) if one.HasField("dim_value") else one.dim_param or None for one in lengths
            )
    for node in graph.node:
        if node.op_type == "Constant" and (tensor := constant_tensor(node)) is not None:
            shapes[node.output[0]] = tuple(tensor.dims)
    return shapes


def _inferred(model: ModelProto, *, data_prop: bool = False) -> ModelProto:
    """The graph with types and shapes, without its weights; as it is declared where inference fails."""
    import onnx

    bare, _ = _split_weights(model)
    inferred: ModelProto = bare
    with contextlib.suppress(onnx.shape_inference.InferenceError):
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=data_prop)
    return inferred


def constant_tensor(node: NodeProto) -> Any:
    """What a Constant node holds, when that is a tensor; else None."""
    return next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)


def is_finite(tensor: TensorProto) -> bool:
    """True when a TensorProto of floats holds neither NaN nor infinity."""
    import numpy as np

    return bool(np.isfinite(onnx_weights.values(tensor)).all())


def _split_weights(model: ModelProto) -> tuple[Any, dict[str, Any]]:
    """A copy in which the weights are inputs, for the tools that choke on large models, and the weights by name."""
    import onnx
    from onnx import helper

    weights = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if _tensor_bytes(tensor) >= _WEIGHT_BYTES or onnx_weights.is_outside(tensor)
    }
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    graph, given = bare.graph, {value.name for value in model.graph.input}
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    for tensor in model.graph.initializer:
        if tensor.name not in weights:
            graph.initializer.append(tensor)
        elif tensor.name not in given:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return bare, weights


def _tensor_bytes(tensor: TensorProto) -> int:
    return math.prod(tensor.dims) * 4 if tensor.dims else 0


def _by_order(order: Sequence[str]) -> Callable[[str], tuple[int, str]]:
    places = {name: place for place, name in enumerate(order)}
    return lambda name: (places.get(name, len(places)), name)


def demand_nodes(graph: GraphProto, names: Sequence[str]) -> None:
    """Raises UsageError when a name is no node of the graph."""
    known = {node.name for node in graph.node}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"the graph has no node called {unknown[0]!r} that could stay in fp32")


def simplify(source: Path, into: Path) -> Path:
    """The graph with constants folded, batch normalisation merged into convolutions, and shapes inferred.

    ONNX Runtime's portable optimisations only (level BASIC): the result holds standard operators. Names of inputs,
    outputs and of the nodes that remain are kept. Returns the file, below `into`.
    """
    import onnx
    import onnxruntime
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    optimised = into / "optimised.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(optimised)
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimised.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    _run_optimiser(source, options)
    inferred = into / "inferred.onnx"
    onnx.shape_inference.infer_shapes_path(str(optimised), str(inferred))
    model = onnx_weights.load(inferred)
    name_nodes(model.graph)
    # ONNX Runtime also notes the shapes of weights; the quantizer transposes some of them and would stumble over the
    # old shape.
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(shapes)
    add_pre_process_metadata(model)  # or the quantizer asks for what was just done
    return write_graph(model, into, "simplified.onnx")  # beside its weights, which are not copied


def _run_optimiser(source: Path, options: Any) -> None:
    """Have ONNX Runtime write its optimised graph, of the source with a name for every node."""
    import onnxruntime

    model = onnx_weights.load(source)
    name_nodes(model.graph)
    # Nothing is run, so no weight is laid out anew for a kernel.
    options.add_session_config_entry("session.disable_prepacking", "1")
    content = _content(model, options)
    del model
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def map_kept(source: Path, simplified: Path, keep: Sequence[str]) -> tuple[str, ...]:
    """The nodes of the simplified graph that stand for the source nodes named in `keep`, in graph order.

    A node that was merged into another is found by the tensor that it produced.

    Raises:
        UsageError: A name is no node of the source.
    """
    import onnx

    if not keep:
        return ()
    before = onnx.load(source, load_external_data=False).graph
    name_nodes(before)
    demand_nodes(before, keep)
    known = {node.name: node for node in before.node}
    tensors = {tensor for name in keep for tensor in known[name].output}
    after = onnx.load(simplified, load_external_data=False).graph
    return tuple(node.name for node in after.node if node.name in keep or tensors.intersection(node.output))


def write_graph(model: ModelProto, into: Path, name: str = "model.onnx") -> Path:
    """Write `into/NAME`, large weights beside it. Same graph, same bytes. Weights that lie in that folder already stay
    where they are.

    Returns the file.
    """
    return onnx_weights.write(model, into / name, f"{name}.data", INLINE_LIMIT_BYTES)


def load_named(model: PortableModel, keep: Sequence[str]) -> ModelProto:
    """The graph, with a name for every node. Its weights are read by `onnx_weights.values`.

    Raises:
        UsageError: A name in `keep` is no node of it.
    """
    graph = onnx_weights.load(model.path)
    name_nodes(graph.graph)
    demand_nodes(graph.graph, keep)
    return graph


def load_simplified(
    model: PortableModel, keep: Sequence[str], opset: int, scratch: Path
) -> tuple[ModelProto, tuple[str, ...]]:
    """The graph as `simplify` leaves it, at `opset` or later; and those of its nodes that stand for the nodes `keep`.

    Args:
        scratch: A folder that holds its weights, for as long as it is used.

    Raises:
        UsageError: A name in `keep` is no node of the model, or the converter of operators can't.
    """
    simple = simplify(Path(model.path), scratch)
    kept = map_kept(Path(model.path), simple, keep)
    return raise_opset(onnx_weights.load(simple), opset), kept


def finish(
    model: ModelProto,
    source: PortableModel,
    into: Path,
    precision: str,
    *,
    kept: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> PortableModel:
    """Write a lowered graph and describe it.

    Args:
        kept: Names of nodes that stay in float32.
        notes: What people should know of it, beside the source's own notes.

    Raises:
        UsageError: The inputs or outputs are not those of the source any more.
    """
    del model.metadata_props[:]  # tool marks: they say nothing of the model, and would differ between versions
    model.producer_name, model.producer_version, model.doc_string = "compile-stage", "", ""
    model.graph.name = "model"
    wanted = [spec.name for spec in (*source.signature.inputs, *source.signature.outputs)]
    actual = [value.name for value in (*model.graph.input, *model.graph.output)]
    if wanted != actual:
        raise UsageError(f"the lowering to {precision} changed inputs or outputs from {wanted} to {actual}")
    path = write_graph(model, into)
    return replace(
        source,
        path=str(path),
        precision=precision,
        made_from=source.digest,
        opset=read_opset(model),
        digest=digest_tree(into),
        kept={"fp32": tuple(kept)} if kept else {},
        notes=(*source.notes, *notes),
    )


def open_session(graph: Path | str | ModelProto, *, optimise: bool = True, threads: int = 0) -> Any:
    """An ONNX Runtime session of a graph on the CPU.

    Args:
        graph: Its file; or a graph whose weights, where they lie outside of it, are all in one folder.
        optimise: With ONNX Runtime's portable optimisations (level BASIC); False: every node runs as it is written.
        threads: Of one operator; 0: as many as there are cores.
    """
    import onnxruntime

    level = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level.ORT_ENABLE_BASIC if optimise else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only: what it warns of is our own doing
    content = str(graph) if isinstance(graph, Path | str) else _content(graph, options)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _content(model: ModelProto, options: Any) -> bytes:
    """The graph for a session that finds its weights where they are."""
    folder = onnx_weights.folder_of(model)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnx_weights.message(model, folder)


def read_batches(model: PortableModel, calibration: SampleSet) -> Iterator[Batch]:
    """The calibration samples in order, in batches that the model takes, read from disk one at a time."""
    return sample_files.read_batches(calibration, model.signature)
