"""ONNX: the model is portable already; ONNX Runtime is the baseline, on the CPU or on CUDA as the target is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, Profile, ShapeRange, SourceModel, Target
from compile_stage.plugin_support import onnx_weights
from compile_stage.plugin_support.artifacts import refuse_types
from compile_stage.plugin_support.opset_conversion import converter_errors
from compile_stage.sources import graph, mlmodel
from compile_stage.sources.session import SourceSession

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

    from compile_stage.core.tensors import Batch, Signature, TensorSpec
    from compile_stage.plugin_support.profiling import ProfileRequest

OLDEST_OPSET = 13
"""Quantisation per channel starts here; an older graph is converted."""


_WEIGHTS_ARE_NO_INPUTS = 4
"""The file format from which weights need not be listed among the inputs."""

_RESIZE_SAYS_ITS_PLACES = 11
"""The operator set from which `Resize` has an attribute for them. Before, an output's place is divided by the scale,
and ONNX Runtime rounds it down for `nearest`, or up where a picture gets smaller."""


_PROVIDERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "cpu": ("CPUExecutionProvider", {}),
    # TF32 is its default, and keeps 10 bits of the 23 of each factor; the baseline is FP32. What it has no kernel for
    # runs on the CPU, as it does for anyone who opens the model so.
    "cuda": ("CUDAExecutionProvider", {"use_tf32": "0"}),
}


class OnnxSource(Exporter):
    """Models that `mlflow.onnx` logged."""

    name = "onnx"
    requires = ("onnx", "onnxruntime")
    extra = ""
    framework = "ONNX Runtime"
    capabilities = SourceCapabilities(
        forms=("onnx", "torch-export"),
        devices=tuple(_PROVIDERS),
        program_requires=("torch", "onnx2torch"),
        program_extra="onnx2torch",
        planned_by_graph=True,
        profiler="compile_stage.sources.onnx:profile_source",
    )

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        path = _file(source)
        if (reason := mlmodel.missing_file(path, source)) is not None:
            return reason
        try:
            model = _load(source, weights=False)
            signature = graph.signature_of(model)
        except SourceError as error:
            return error.reason
        if not signature.inputs:
            return "it has no input, so its outputs never change"
        return (
            refuse_types(signature)
            or _refuse_open_ranks(model, signature)
            or _refuse_scalars(signature)
            or _refuse_names(source, signature, [value.name for value in model.graph.input])
            or _refuse_graph(model, path.parent)
        )

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        runtime = _start(source, target, _options(target.threads))
        signature = graph.signature_of(_load(source, weights=False))
        inputs = [spec.name for spec in signature.inputs]
        outputs = [spec.name for spec in signature.outputs]

        def call(arrays: Sequence[Any]) -> Any:
            return runtime.run(outputs, dict(zip(inputs, arrays, strict=True)))

        yield SourceSession(signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        from onnx.inliner import inline_local_functions
        from onnx.shape_inference import infer_shapes

        model = _load(source, weights=True)
        # Files of the first formats list weights among the inputs; the ones that are no real inputs go.
        inputs = {spec.name for spec in graph.signature_of(model).inputs}
        for value in [value for value in model.graph.input if value.name not in inputs]:
            model.graph.input.remove(value)
        graph.sort_nodes(model.graph)
        model.ir_version = max(model.ir_version, _WEIGHTS_ARE_NO_INPUTS)
        if model.functions:  # compilers know ONNX's operators, and not what a file defines itself
            try:
                # With the types of what is between nodes: a function of another operator set is converted by them.
                model = inline_local_functions(infer_shapes(model), convert_version=True)
            except RuntimeError as error:
                raise SourceError(
                    f"its functions can't be replaced by what they consist of: {first_line(error)}",
                    fix="export the model again without functions (PyTorch: `export_modules_as_functions=False`)",
                    where=source.uri,
                ) from error
        model, notes = _modern(model)
        return graph.finish(model, source, shapes, into, notes=notes)

    def export_program(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        from compile_stage.sources import onnx_program

        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            model = self.export(source, shapes, Path(scratch))
            return onnx_program.export(model, source, shapes, self.example(source), into)

    def example(self, source: SourceModel) -> Batch | None:
        return mlmodel.named_example(source, graph.signature_of(_load(source, weights=False)))

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        signature = graph.signature_of(_load(source, weights=False))
        columns = mlmodel.columns(source) if len(signature.inputs) == 1 else None
        return {
            "kind": "dict",
            "outputs": [spec.name for spec in signature.outputs],
            "columns": list(columns) if columns else None,
            "frame_in_frame_out": not mlmodel.has_tensor_signature(source),
        }

    def packages(self) -> Mapping[str, str]:
        return package_versions("onnx", "onnxruntime", "onnx2torch", "torch")


def _refuse_open_ranks(model: ModelProto, signature: Signature) -> str | None:
    """The reason where the graph says nothing of the shape of an input or output, not even how many axes it has."""
    read = {spec.name for spec in signature.inputs}
    for number, value in enumerate(model.graph.input):
        tensor = value.type.tensor_type
        if value.name in read and not tensor.HasField("shape"):
            return (
                f"the graph declares no shape of its input {value.name!r}, so nobody can tell its axes: "
                f"model.graph.input[{number}].CopyFrom(onnx.helper.make_tensor_value_info({value.name!r}, "
                f"{tensor.elem_type}, ['batch', 8])), with its own sizes behind 'batch', and log it again"
            )
    for value in model.graph.output:
        if not value.type.tensor_type.HasField("shape"):
            return (
                f"the graph declares no shape of its output {value.name!r}: log onnx.shape_inference.infer_shapes("
                "model), which fills it in where it follows from the graph"
            )
    return None


def _refuse_scalars(signature: Signature) -> str | None:
    """The reason where an input has no axes, and so none along which samples lie."""
    for spec in signature.inputs:
        if not spec.shape:
            return (
                f"its input {spec.name!r} is a scalar, and each sample has its own part of every input, along axis 0: "
                "make it a weight of the graph, or a tensor [batch, 1]"
            )
    return None


def _refuse_names(source: SourceModel, signature: Signature, listed: Sequence[str]) -> str | None:
    """The reason where the logged signature names other tensors than the graph: MLflow hands on what the signature
    names alone, and ONNX Runtime refuses that, whatever predict() is given.

    Args:
        listed: All inputs of the graph, with weights that the first formats list among them.
    """
    named = [spec.get("name") for spec in mlmodel.read(source).inputs or ()]
    if not mlmodel.has_tensor_signature(source) or not all(named):
        return None
    wanted = [spec.name for spec in signature.inputs]
    if set(named) <= set(listed) and set(wanted) <= set(named):
        return None
    said, held = (", ".join(map(repr, names)) for names in (named, wanted))
    return (
        f"its signature has the inputs {said}, and the graph has {held}, so its own predict() refuses every input: log "
        "it with a signature of the graph's names"
    )


def profile_source(exporter: OnnxSource, source: SourceModel, target: Target, request: ProfileRequest) -> Profile:
    """Profile the original in a session like that of `open`."""
    from compile_stage.plugin_support.onnxruntime_profiler import profile_session

    options = _options(target.threads)
    graph = _file(source) if target.device == "cpu" else None
    return profile_session(lambda given: _start(source, target, given), options, graph, request)


def _start(source: SourceModel, target: Target, options: Any) -> Any:
    """The runtime's session, on the target's device and on no other."""
    import onnxruntime

    provider, provider_options = _PROVIDERS[target.device]
    if provider not in onnxruntime.get_available_providers():
        raise _lacking(provider, target.device, source)
    try:
        runtime = onnxruntime.InferenceSession(
            str(_file(source)), options, providers=[(provider, provider_options)], enable_fallback=0
        )
    except Exception as error:
        raise SourceError(f"ONNX Runtime can't open it: {first_line(error)}", where=source.uri) from error
    if runtime.get_providers()[0] != provider:  # its library or driver could not be loaded, which it only warns of
        raise _lacking(provider, target.device, source)
    return runtime


def _options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return options


def _file(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "onnx").get("data") or "model.onnx")


def _lacking(provider: str, device: str, source: SourceModel) -> SourceError:
    return SourceError(
        f"the original can't be run on the target's device {device}: ONNX Runtime has no working {provider} here",
        fix="install onnxruntime-gpu in place of onnxruntime, and the CUDA and cuDNN that it asks for, or set the "
        "target's device to cpu",
        where=source.uri,
    )


def _load(source: SourceModel, *, weights: bool) -> ModelProto:
    """Args:
    weights: It is to be written again, so it says where its weights lie.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return onnx_weights.load(_file(source)) if weights else onnx.load(_file(source), load_external_data=False)
    except (OSError, DecodeError, onnx.checker.ValidationError) as error:
        raise SourceError(f"its file is no readable ONNX: {error}", where=source.uri) from error


def _refuse_graph(model: ModelProto, folder: Path) -> str | None:
    """The reason when weights lie in a file that is absent, or outside of the model's folder, or when a node holds what
    was compiled for one machine; of any graph within the graph too."""
    from google.protobuf.message import Message
    from onnx import NodeProto, TensorProto

    waiting: list[Message] = [model]
    while waiting:
        message = waiting.pop()
        if isinstance(message, TensorProto):
            if (reason := _refuse_weights(message, folder)) is not None:
                return reason
            continue
        if isinstance(message, NodeProto) and message.op_type == "EPContext":
            return (
                f"its node {message.name!r} is a part that was compiled for one machine (EPContext): "
                "log the model that it was made from"
            )
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting.extend([value] if isinstance(value, Message) else value)
    return None


def _refuse_weights(tensor: TensorProto, folder: Path) -> str | None:
    from onnx.external_data_helper import uses_external_data

    if not uses_external_data(tensor):
        return None
    for location in [entry.value for entry in tensor.external_data if entry.key == "location"] or [""]:
        path = folder / location
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"its weights {tensor.name!r} point outside of the model's folder ({location})"
        if not path.is_file():
            return f"its file of weights {location} is missing: log the model again"
    return None


def _modern(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """The model at an operator set that quantisation takes; as it is, with a note, where the converter can't."""
    import onnx

    have = graph.opset(model)
    if have >= OLDEST_OPSET:
        return model, ()
    try:
        onnx_weights.take_in(model)
        converted = onnx.version_converter.convert_version(model, graph.OPSET)
        _keep_meaning(converted, have)
        onnx.checker.check_model(converted)
    except converter_errors():
        return model, (f"its operator set {have} could not be raised to {graph.OPSET}; some precisions may be refused",)
    if not _alike(graph.signature_of(converted), graph.signature_of(model)):  # a first Scan loses its batch
        return model, (
            f"raising its operator set {have} to {graph.OPSET} would change its inputs or outputs; some precisions may "
            "be refused",
        )
    for now, declared in zip(converted.graph.output, model.graph.output, strict=True):
        now.CopyFrom(declared)  # the converter writes down the sizes that it infers
    return converted, (f"its operator set was raised from {have} to {graph.OPSET}",)


def _alike(converted: Signature, before: Signature) -> bool:
    """The same but for sizes that one of them leaves open."""

    def same(a: TensorSpec, b: TensorSpec) -> bool:
        sizes = zip(a.shape, b.shape, strict=False)
        known = all(isinstance(x, str) or isinstance(y, str) or x == y for x, y in sizes)
        return (a.name, a.dtype, len(a.shape)) == (b.name, b.dtype, len(b.shape)) and known

    pairs = zip(converted.outputs, before.outputs, strict=True)
    return converted.inputs == before.inputs and all(same(a, b) for a, b in pairs)


def _keep_meaning(converted: ModelProto, have: int) -> None:
    """Fix what onnx's converter leaves out: where `Upsample` and the first `Resize` take their values from, which are
    other places than those that a later one takes by default, and a number of `Pad` that its mode does not use.

    Raises:
        ConvertError: An operator whose new version says something else, which is not fixed here."""
    import onnx
    from onnx import helper, numpy_helper

    weights = {tensor.name: tensor for tensor in converted.graph.initializer}
    for node in graph.nodes(converted.graph):
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            weights[node.output[0]] = node.attribute[0].t
        elif node.op_type == "Resize" and have < _RESIZE_SAYS_ITS_PLACES:
            scales = weights.get(node.input[2])
            smaller = scales is not None and (numpy_helper.to_array(scales) <= 1).all()
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", "ceil" if smaller else "floor"))
        elif node.op_type == "Hardmax" and have < OLDEST_OPSET:  # it took all axes from its own on as one
            raise onnx.version_converter.ConvertError("Hardmax has another meaning there")
        elif node.op_type == "Pad":
            for attribute in [attribute for attribute in node.attribute if attribute.name == "value"]:
                node.attribute.remove(attribute)
