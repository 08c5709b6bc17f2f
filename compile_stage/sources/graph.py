"""What every source does to its ONNX graph at the end: names, shapes, cleanliness, the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import PortableModel, ShapeRange, SourceModel
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Dim, Signature, TensorSpec
from compile_stage.plugin_support import onnx_weights

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

OPSET = 18
ML_OPSET = 3
"""The newest operator sets that every backend of ours takes."""

IR_VERSION = 10
"""The newest file format that ONNX Runtime 1.20 reads; the oldest that we allow is 1.25."""

EXTERNAL_DATA_ABOVE = onnx_weights.INLINE_LIMIT_BYTES
"""Bytes of weights above which they lie beside the file."""

BATCH = "batch"


def signature_of(model: ModelProto) -> Signature:
    """Inputs (those that are no initializers) and outputs as the graph declares them."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return Signature(
        inputs=tuple(_spec(value) for value in model.graph.input if value.name not in constants),
        outputs=tuple(_spec(value) for value in model.graph.output),
    )


def dim(value: int | str | None, name: str, axis: int) -> Dim:
    """A dimension's own size or symbol; one that has neither is called `batch` on axis 0 and after its tensor
    elsewhere."""
    if value is None or value == "":
        return BATCH if axis == 0 else f"{name}_{axis}"
    return value


def name_dims(model: ModelProto) -> None:
    """Give every unnamed dimension of inputs and outputs the symbol that `signature_of` reports."""
    for value in [*model.graph.input, *model.graph.output]:
        if not value.type.tensor_type.HasField("shape"):
            continue
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value") and not size.dim_param:
                size.dim_param = str(dim(None, value.name, axis))


def rename_symbols(model: ModelProto, names: Mapping[str, str]) -> None:
    """Rename symbolic dimensions everywhere, also inside expressions such as `2*s0`."""
    rename = symbol_renamer(names)
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = rename(size.dim_param)


def symbol_renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that renames whole words of an expression."""
    if not names:
        return lambda text: text
    words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    return lambda text: words.sub(lambda match: names[match[0]], text)


def rename_values(model: ModelProto, names: Mapping[str, str]) -> None:
    """Rename tensors of the main graph: inputs, outputs and all that refers to them, subgraphs included."""
    graph = model.graph
    for value in [*graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        value.name = names.get(value.name, value.name)
    for node in nodes(graph):
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def clean(model: ModelProto) -> None:
    """Take out what differs between two exports of the same model, or tells of the machine: doc strings, stack traces,
    paths."""
    model.doc_string = ""
    model.graph.name = "model"  # some converters draw a random one
    model.graph.doc_string = ""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    for node in nodes(model.graph):
        node.doc_string = ""
        del node.metadata_props[:]
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer]:
        value.doc_string = ""
        del value.metadata_props[:]
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]


def finish(
    model: ModelProto,
    source: SourceModel,
    shapes: Mapping[str, ShapeRange],
    into: Path,
    *,
    notes: Sequence[str] = (),
    external_data_above: int | None = None,
) -> PortableModel:
    """Check the graph against what the policy asks for, write `into/model.onnx`, and describe it.

    Args:
        external_data_above: Bytes of weights above which they lie beside the file; `EXTERNAL_DATA_ABOVE` by default.

    Raises:
        SourceError: `shapes` asks for a size that the graph has fixed, or the graph is no valid ONNX.
    """
    import onnx

    name_dims(model)
    clean(model)
    model.ir_version = min(model.ir_version, IR_VERSION)
    signature = signature_of(model)
    demand_shapes(signature, shapes, source)
    into.mkdir(parents=True, exist_ok=True)
    path = into / "model.onnx"
    limit = EXTERNAL_DATA_ABOVE if external_data_above is None else external_data_above
    onnx_weights.write(model, path, "model.onnx.data", limit)
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise SourceError(f"its export is no valid ONNX: {first_line(error)}", where=source.uri) from error
    return PortableModel(
        path=str(path),
        digest=digest_tree(into),
        form="onnx",
        opset=opset(model),
        precision="fp32",
        signature=signature,
        made_from=source.digest,
        notes=tuple(notes),
    )


def put_behind(model: ModelProto, node: NodeProto, made: Sequence[NodeProto]) -> None:
    """Insert nodes, in their order, behind one of the graph."""
    at = list(model.graph.node).index(node) + 1
    for new in reversed(made):
        model.graph.node.insert(at, new)


def opset(model: ModelProto) -> int:
    """Version of the default operator set."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _spec(value: Any) -> TensorSpec:
    from onnx import TensorProto, helper

    tensor = value.type.tensor_type
    if not tensor.elem_type:
        raise SourceError(
            f"{value.name!r} is no tensor (a sequence or a map), which no backend takes",
            fix="where a converter of classifiers wrote a list of dicts (ZipMap), convert the model again with "
            "options={id(model): {'zipmap': False}} (skl2onnx), or zipmap=False (onnxmltools)",
        )
    dtype = "str" if tensor.elem_type == TensorProto.STRING else str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    sizes = [size.dim_value if size.HasField("dim_value") else size.dim_param for size in tensor.shape.dim]
    return TensorSpec(
        name=value.name, dtype=dtype, shape=tuple(dim(size, value.name, axis) for axis, size in enumerate(sizes))
    )


def sort_nodes(graph: Any) -> None:
    """Put each node behind those that it reads, in inner graphs too, as ONNX demands; a graph in order stays as it is.
    ONNX Runtime sorts a graph itself, so files in another order are in use: its converter to float16 writes the casts
    of the inputs last."""
    for node in graph.node:
        for inner in inner_graphs(node):
            sort_nodes(inner)
    made_by = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    needed = {at: {made_by[name] for name in reads(node) if name in made_by} for at, node in enumerate(graph.node)}
    if all(before < at for at, some in needed.items() for before in some):
        return
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError:
        return  # no order: the checker says what is wrong
    ordered = [graph.node[at] for at in order]
    del graph.node[:]
    graph.node.extend(ordered)


def inner_graphs(node: NodeProto) -> Iterator[Any]:
    """The graphs within a node: branches, and bodies of loops."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def reads(node: NodeProto) -> Iterator[str]:
    """The names of its inputs, and of what its inner graphs take, from outside or from each other."""
    yield from node.input
    for graph in inner_graphs(node):
        for one in graph.node:
            yield from reads(one)
        yield from (value.name for value in graph.output)


def nodes(graph: Any) -> Iterator[Any]:
    """All nodes, those of subgraphs (If, Loop, Scan) included."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from nodes(inner)
