"""JAX: functions that `jax.export` wrote, as `compile_stage.jax` logs them.

The baseline is the jitted call of the artifact, on the CPU. What XLA and IREE compile is its StableHLO, made for each
shape that the target asks for: their compilers take fixed sizes, and JAX knows how sizes follow from each other. ONNX
can't be made of StableHLO by any library that is kept up; jax2onnx reads the Python function, which the artifact does
not hold. So the ONNX is made where the model is logged and lies beside the artifact, and is held against the baseline
as any export is.

`open` and the exports may run in a toolchain. `refuse`, `example` and `prediction_format` read the files without JAX
(`sources.jax_export`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.digest import canonical_json, digest_tree
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.buckets import bucket_name, buckets, refuse_buckets
from compile_stage.plugin_support.fixed_shapes import ENTRY, element_types
from compile_stage.sources import graph, jax_export, mlmodel
from compile_stage.sources.jax_export import EXPORTED, RefusedError, Settings
from compile_stage.sources.session import SourceSession

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_WIDE = ("int64", "uint64", "float64")


class _Opened(NamedTuple):
    """The artifact in JAX.

    Attributes:
        call: Arrays in order → arrays in order, for JAX to trace.
        wide: It has 64-bit inputs or outputs, which JAX halves by default.
    """

    signature: Signature
    call: Callable[..., Any]
    wide: bool


class JaxSource(Exporter):
    """Models that `compile_stage.jax` logged."""

    name: ClassVar[str] = "jax"
    requires = ("jax", "jaxlib", "flatbuffers", "onnx")
    extra = "jax"
    framework: ClassVar[str] = "JAX (jit)"
    capabilities = SourceCapabilities(forms=("stablehlo", "onnx"), toolchain="jax")

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        folder = _folder(source)
        if (reason := mlmodel.missing_file(folder / EXPORTED, source)) is not None:
            return reason
        return jax_export.refuse(folder)

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        jax = _jax(target.threads)
        import numpy as np

        opened = _open(source)
        with jax.enable_x64(opened.wide):
            function = jax.jit(opened.call)

        def call(arrays: Sequence[Any]) -> list[Any]:
            with jax.enable_x64(opened.wide):
                return [np.asarray(answer) for answer in function(*arrays)]

        def call_narrow(arrays: Sequence[Any]) -> list[Any]:
            return [np.asarray(answer) for answer in function(*arrays)]

        yield SourceSession(opened.signature, call if opened.wide else call_narrow)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        described = _settings(source)
        if not described.graph:
            raise SourceError(
                f"it holds StableHLO and no ONNX ({described.no_graph or 'none lies beside it'}), and no library that "
                "is kept up makes ONNX of StableHLO",
                fix="log it where jax2onnx is installed: compile_stage.jax.log_model then stores ONNX too",
                where=source.uri,
            )
        file = mlmodel.within(source, _folder(source).relative_to(source.path) / described.graph)
        if (reason := mlmodel.missing_file(file, source)) is not None:
            raise SourceError(reason, where=source.uri)
        try:
            model = onnx.load(str(file), load_external_data=False)
        except (OSError, DecodeError) as error:
            raise SourceError(f"its {described.graph} is no readable ONNX: {error}", where=source.uri) from error
        _demand_closed(model, described, source)
        return graph.finish(model, source, shapes, into)

    def export_for(self, form: str, source: SourceModel, target: Target, into: Path) -> PortableModel:
        jax = _jax(target.threads)
        opened = _open(source)
        demand_shapes(opened.signature, target.shapes, source)
        if (reason := refuse_buckets("StableHLO", opened.signature, target)) is not None:
            raise SourceError(reason, where=source.uri)
        into.mkdir(parents=True, exist_ok=True)
        index: dict[str, Any] = {"modules": [], "types": []}
        types: set[str] = set()
        for shapes in buckets(opened.signature, target):
            given = [
                jax.ShapeDtypeStruct(shape, spec.dtype)
                for shape, spec in zip(shapes, opened.signature.inputs, strict=True)
            ]
            name = f"{bucket_name(opened.signature, shapes)}.mlirbc"
            code, found = _static_module(opened, given, source)
            (into / name).write_bytes(code)
            types |= found
            index["modules"].append({"file": name, "shapes": [list(shape) for shape in shapes]})
        index["types"] = sorted(types)
        (into / ENTRY).write_text(canonical_json(index) + "\n", encoding="utf-8")
        return PortableModel(
            path=str(into / ENTRY),
            digest=digest_tree(into),
            form="stablehlo",
            opset=0,
            precision="fp32",
            signature=opened.signature,
            made_from=source.digest,
        )

    def example(self, source: SourceModel) -> Batch | None:
        return mlmodel.named_example(source, _settings(source).signature)

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        return {
            "kind": "dict" if _settings(source).answers_a_dict else "array",
            "outputs": [],  # all that the function gives
            "columns": None,
            "frame_in_frame_out": not mlmodel.has_tensor_signature(source),
        }

    def packages(self) -> Mapping[str, str]:
        return package_versions("jax", "jaxlib", "flatbuffers", "onnx")


# -------------------------------------------------------------------------------------------------------- without JAX


def _folder(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, JaxSource.name).get("data") or "data")


def _settings(source: SourceModel) -> Settings:
    try:
        return jax_export.settings(_folder(source))
    except RefusedError as error:
        raise SourceError(str(error), where=source.uri) from error


def _demand_closed(model: Any, described: Settings, source: SourceModel) -> None:
    """The graph holds all its weights, is of no one machine, and has the artifact's inputs and outputs."""
    from onnx.external_data_helper import uses_external_data

    for node in graph.nodes(model.graph):
        if node.op_type == "EPContext":
            raise SourceError(f"its ONNX has a part that was compiled for one machine ({node.name})", where=source.uri)
    tensors = [
        *model.graph.initializer,
        *(a.t for n in graph.nodes(model.graph) for a in n.attribute if a.HasField("t")),
    ]
    if any(uses_external_data(tensor) for tensor in tensors):
        raise SourceError("its ONNX has weights in another file", where=source.uri)
    found, wanted = graph.signature_of(model), described.signature
    for word, ours, theirs in (("inputs", found.inputs, wanted.inputs), ("outputs", found.outputs, wanted.outputs)):
        if [(spec.name, spec.dtype) for spec in ours] != [(spec.name, spec.dtype) for spec in theirs]:
            raise SourceError(
                f"its ONNX has the {word} {', '.join(map(str, ours))}, and the JAX artifact has "
                f"{', '.join(map(str, theirs))}",
                fix="log it again with compile_stage.jax.log_model",
                where=source.uri,
            )


# ----------------------------------------------------------------------------------------------------------- with JAX


def _jax(threads: int) -> Any:
    """JAX on the CPU, with so many threads: XLA's client starts as many as NPROC says when the process first asks for
    it. Timed is only what a fresh worker opens, which is the first there."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if threads:
        os.environ["NPROC"] = str(threads)
    import jax

    return jax


def _open(source: SourceModel) -> _Opened:
    import jax
    from jax import export

    folder, described = _folder(source), _settings(source)
    try:
        exported = export.deserialize(bytearray((folder / EXPORTED).read_bytes()))
        targets = _calls(exported.mlir_module_serialized)
    except Exception as error:  # bytes that are wrong raise what FlatBuffers, JAX and MLIR like
        raise SourceError(
            f"JAX {jax.__version__} can't read its {EXPORTED}: {type(error).__name__}: {first_line(error)}",
            fix="log it again with this version of JAX",
            where=source.uri,
        ) from error
    if (reason := jax_export.refuse_calls(targets)) is not None:
        raise SourceError(reason, where=source.uri)
    if "cpu" not in exported.platforms:
        raise SourceError(
            f"it was exported for {', '.join(exported.platforms)}, and the original runs on a CPU here",
            fix='export it with platforms=["cpu"] too',
            where=source.uri,
        )
    signature = described.signature
    for word, specs, avals in (
        ("inputs", signature.inputs, exported.in_avals), ("outputs", signature.outputs, exported.out_avals),
    ):  # fmt: skip
        _demand_alike(word, specs, avals, source)

    def call(*arrays: Any) -> Any:
        given, named = jax.tree_util.tree_unflatten(exported.in_tree, list(arrays))
        return tuple(jax.tree_util.tree_leaves(exported.call(*given, **named)))

    wide = any(spec.dtype in _WIDE for spec in (*signature.inputs, *signature.outputs))
    return _Opened(signature, call, wide)


def _demand_alike(word: str, specs: Sequence[Any], avals: Sequence[Any], source: SourceModel) -> None:
    """What the JSON says is what the artifact takes and gives."""
    said = [(spec.dtype, tuple(map(str, spec.shape))) for spec in specs]
    found = [(str(aval.dtype), tuple(map(str, aval.shape))) for aval in avals]
    if said != found:
        raise SourceError(
            f"its model.json says that the {word} are {', '.join(map(str, specs))}, and the artifact has "
            f"{', '.join(map(str, avals))}",
            fix="log it again with compile_stage.jax.log_model",
            where=source.uri,
        )


def _calls(module: bytes) -> set[str]:
    """The targets of all custom calls of a module, functions within it included."""
    from jax.extend import mlir as _  # noqa: F401 - makes MLIR's dialects known
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    targets: set[str] = set()

    def look(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            targets.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
        return ir.WalkResult.ADVANCE

    with _context() as context:
        stablehlo.deserialize_portable_artifact(context, module).operation.walk(look)
    return targets


def _context() -> Any:
    from jax._src.interpreters import mlir

    return mlir.make_ir_context()


def _static_module(opened: _Opened, given: Sequence[Any], source: SourceModel) -> tuple[bytes, set[str]]:
    """The program for fixed sizes, in StableHLO's lasting form, and the types of its tensors by NumPy's names."""
    import jax
    from jaxlib import _jax as native
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import stablehlo

    def model(*arrays: Any) -> Any:
        return opened.call(*arrays)

    try:
        with jax.enable_x64(opened.wide):
            lowered = jax.jit(model, keep_unused=True).trace(*given).lower(lowering_platforms=("cpu",))
        code = io.BytesIO()
        lowered.compiler_ir("stablehlo").operation.write_bytecode(code)
        refined = native.mlir.refine_polymorphic_shapes(code.getvalue(), True, True)
        with _context():
            module = ir.Module.parse(refined)
            # Debug information names files of the machine that it was traced on.
            passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
            text = module.operation.get_asm(large_elements_limit=1)
            return stablehlo.serialize_portable_artifact(module, stablehlo.get_minimum_version()), element_types(text)
    except Exception as error:
        raise SourceError(
            f"JAX can't make its program for the sizes {', '.join(str(list(one.shape)) for one in given)}: "
            f"{type(error).__name__}: {first_line(error)}",
            where=source.uri,
        ) from error
