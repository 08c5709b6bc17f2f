"""Core ML: models for Apple's devices, converted anywhere, run on macOS alone.

The artifact is a model package (`.mlpackage`) with an ML program. Elsewhere than on macOS nothing can run it, and
nothing here says that it ran: what is read back is the saved program, its operators, its types and its inputs and
outputs, and `open` says why it can't be opened.

`open` needs nothing but macOS, coremltools and numpy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import uuid
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.digest import canonical_json, digest_file
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form
from compile_stage.plugin_support.options import OneOf, refuse_options, valid_options
from compile_stage.plugin_support.sessions import demand_call

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_PACKAGE = "model.mlpackage"
_ENTRY = f"{_PACKAGE}/Manifest.json"
_PROGRAM = "Data/com.apple.CoreML/model.mlmodel"
_DATE = "com.github.apple.coremltools.conversion_date"

# Deployment targets that have ML programs and what is asked of them here; and a target's options.
_SYSTEMS = ("iOS17", "iOS16", "iOS18", "iOS26", "macOS14", "macOS13", "macOS15", "macOS26")
_OPTIONS: Mapping[str, OneOf] = {
    "minimum_deployment_target": OneOf(*_SYSTEMS),
    "compute_units": OneOf("all", "cpu_only", "cpu_and_gpu", "cpu_and_ne"),
}
_NEW = ("iOS18", "iOS26", "macOS15", "macOS26")  # several enumerated inputs, and int4, begin with these

# What Core ML takes and gives, by what the source has. It has no 64-bit integers: the session narrows and widens, and
# refuses what does not fit.
_TYPES = {"float32": "FLOAT32", "float16": "FLOAT16", "int32": "INT32", "int64": "INT32"}
_MATRIX_OPS = (
    "conv",
    "conv_transpose",
    "linear",
    "matmul",
    "einsum",
    "lstm",
    "gru",
    "rnn",
    "scaled_dot_product_attention",
)

# coremltools leaves smaller weights as they are; its own default.
_SMALLEST_WEIGHT = 2048

_LACKS = {
    "bf16": "Core ML has no bfloat16",
    "int8-dynamic": "coremltools has no quantisation of activations without calibration",
    "int4": "int4 by blocks needs the minimum_deployment_target iOS18 or macOS15",
    "fp8": "Core ML has no 8-bit floats",
}
# Precisions that are of the weights alone.
_COMPRESSED = ("int8", "int4")


class CoreMl(Backend):
    """The backend."""

    name: ClassVar[str] = "coreml"
    requires: ClassVar[tuple[str, ...]] = ("coremltools", "torch")
    extra: ClassVar[str] = "coreml"
    options: ClassVar[Mapping[str, OneOf]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("torch-export",),
        devices=("apple",),
        precisions=("fp32", "fp16", "int8", "int4"),
        runtime=("coremltools",),
        opens_with=("coremltools",),
        artifact_is_code=False,
        lacks=_LACKS,
        cross_compiles=True,
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("coremltools", "torch", "numpy")

    def refuse_target(self, target: Target) -> str | None:
        # What the policy says wrongly first: it is wrong whatever is installed.
        reason = super().refuse_target(target) or refuse_options(self.name, _OPTIONS, target)
        if reason is not None:
            return reason
        numpy = package_versions("numpy").get("numpy", "")
        if tuple(map(int, re.findall(r"\d+", numpy)[:2])) >= (2, 4):
            return f"coremltools 9 needs a numpy below 2.4, and {numpy} is installed: pip install 'numpy<2.4'"
        return None

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        if target.device != "apple":
            return ()
        if precision in ("fp32", "fp16"):
            return (Scheme(precision=precision, name=precision, native=True, float_type=precision),)
        kinds = {"int8": ("linear", "palette"), "int4": ("palette", "linear") if _is_new(target) else ("palette",)}
        return tuple(
            Scheme(
                precision=precision,
                name=f"{precision}-weights" if kind == "linear" else f"{precision}-palette",
                native=True,
                weights=precision,
                symmetric=kind == "linear",
                options={"weights": kind},
                float_type="fp16",
            )
            for kind in kinds.get(precision, ())
        )

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        return refuse_form(self, model, target) or _refuse_signature(model.signature, target)

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        asked = valid_options(self.name, _OPTIONS, target)
        if (reason := _refuse_signature(model.signature, target)) is not None:
            raise UsageError(reason)
        into.mkdir(parents=True, exist_ok=True)
        options = {key: str(asked.get(key, allowed.words[0])) for key, allowed in _OPTIONS.items()}
        shapes, note = _shapes(model.signature, target)
        with _quiet():
            converted = _compress(_convert(model, scheme, options, shapes), scheme)
            converted.save(str(into / _PACKAGE))
        _settle(into / _PACKAGE)
        program = _read_program(into / _PACKAGE)
        _demand_signature(program.description, model.signature, target)
        executed, notes = _read_back(program, scheme)
        compiled = Compiled(
            entry=_ENTRY,
            options={**options, "batch_sizes": sorted({*target.batch_sizes})},
            executed=executed,
            notes=(*notes, *((note,) if note else ())),
            not_runnable_here=_not_run(),
        )
        return describe(self, model, scheme, job_id, into, compiled)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        if why := _not_run():
            raise NothingCompiledError(
                f"this artifact can't be run here: {why}", fix="validate it on a Mac", where=artifact.job_id
            )
        session = _CoreMlSession(Path(artifact.path) / _PACKAGE, artifact.options, artifact.signature)
        try:
            yield session
        finally:
            session.close()


def _not_run() -> str:
    """Why a package can only be compiled on this machine; empty on a Mac."""
    return "" if sys.platform == "darwin" else f"Core ML predicts on macOS only, and this is {sys.platform}"


class _CoreMlSession:
    """One loaded package. Core ML shares the work out among its processors itself: it has no setting for threads."""

    def __init__(self, path: Path, options: Mapping[str, Any], signature: Signature) -> None:
        import coremltools

        self.signature = signature
        self._sizes = tuple(options["batch_sizes"])
        units = getattr(coremltools.ComputeUnit, str(options["compute_units"]).upper())
        self._loaded: Any = coremltools.models.MLModel(str(path), compute_units=units)

    def run(self, batch: Batch) -> Batch:
        import numpy as np

        demand_call(self.signature, batch, closed=self._loaded is None)
        given: dict[str, Any] = {}
        for spec in self.signature.inputs:
            array = batch[spec.name]
            if array.shape[0] not in self._sizes:
                known = ", ".join(map(str, self._sizes))
                raise UsageError(f"coreml converted this model for batches of {known}, not of {array.shape[0]}")
            if spec.dtype == "int64":
                limits = np.iinfo(np.int32)
                if array.min() < limits.min or array.max() > limits.max:
                    raise UsageError(f"input {spec.name!r} holds integers that Core ML's 32 bits do not")
                array = array.astype(np.int32)
            given[spec.name] = np.ascontiguousarray(array)
        answer = self._loaded.predict(given)
        return {spec.name: np.array(answer[spec.name], dtype=spec.dtype) for spec in self.signature.outputs}

    def close(self) -> None:
        self._loaded = None


# ------------------------------------------------------------------------------------------------------------ refusals


def _refuse_signature(signature: Signature, target: Target) -> str | None:
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype not in _TYPES:
            return f"{spec.name!r} is {spec.dtype}, and Core ML's inputs and outputs are {', '.join(_TYPES)}"
        if not re.fullmatch(r"[A-Za-z_]\w*", spec.name):
            return f"Core ML would rename {spec.name!r}: a name is letters, digits and underscores"
    for spec in signature.inputs:
        for axis, dim in enumerate(spec.shape[1:], start=1):
            promised = target.shapes.get(spec.name)
            sizes = {promised.min[axis], promised.typical[axis], promised.max[axis]} if promised else set()
            if isinstance(dim, str) and len(sizes) != 1:
                return (
                    f"coreml converts for fixed shapes but for the batch, and {dim!r} in {spec} is free: fix it under "
                    "the target's shapes"
                )
    return None


def _is_new(target: Target) -> bool:
    return target.options.get("coreml", {}).get("minimum_deployment_target", _SYSTEMS[0]) in _NEW


# ---------------------------------------------------------------------------------------------------------- converting


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without coremltools' warnings that newer packages were not tested with it, and its progress bars, which go to
    standard error."""
    log = logging.getLogger("coremltools")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(_Nowhere()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


class _Nowhere:
    """A stream that keeps nothing."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """There is nothing to write out."""


def _shape(spec: TensorSpec, batch: int, target: Target) -> tuple[int, ...]:
    return tuple(
        dim if isinstance(dim, int) else batch if axis == 0 else target.shapes[spec.name].typical[axis]
        for axis, dim in enumerate(spec.shape)
    )


def _shapes(signature: Signature, target: Target) -> tuple[dict[str, Any], str]:
    """The shapes that each input takes: one, the target's as a list, or a range where a list can't be had; and what the
    report says of that."""
    sizes = sorted({*target.batch_sizes})
    listed = {spec.name: [_shape(spec, size, target) for size in sizes] for spec in signature.inputs}
    free = [spec for spec in signature.inputs if isinstance(spec.batch, str)]
    if len(sizes) == 1 or not free:
        return {name: shapes[0] for name, shapes in listed.items()}, ""
    if len(free) == 1 or _is_new(target):
        return {name: shapes if shapes[0] != shapes[-1] else shapes[0] for name, shapes in listed.items()}, ""
    ranges = {
        name: (range(sizes[0], sizes[-1]), *shapes[0][1:]) if shapes[0] != shapes[-1] else shapes[0]
        for name, shapes in listed.items()
    }
    return ranges, (
        f"several inputs with a list of shapes need iOS18 or macOS15: the batch is a range from {sizes[0]} to "
        f"{sizes[-1]}"
    )


def _convert(model: PortableModel, scheme: Scheme, options: Mapping[str, str], shapes: Mapping[str, Any]) -> Any:
    """coremltools' model, whose program is still in memory."""
    import coremltools as ct
    import numpy as np
    import torch

    batch: list[Any] = []

    def declare(spec: TensorSpec) -> Any:
        shape = shapes[spec.name]
        if isinstance(shape, list):
            shape = ct.EnumeratedShapes(shape)
        elif isinstance(shape[0], range):
            # One symbol for all inputs: they have one batch.
            if not batch:
                batch.append(ct.RangeDim(shape[0].start, shape[0].stop, symbol="batch"))
            shape = (batch[0], *shape[1:])
        return ct.TensorType(name=spec.name, shape=shape, dtype=np.dtype(_TYPES[spec.dtype].lower()).type)

    whole = scheme.float_type == "fp32"
    try:
        program = torch.export.load(model.path).run_decompositions({})
        return ct.convert(
            program,
            convert_to="mlprogram",
            inputs=[declare(spec) for spec in model.signature.inputs],
            outputs=[
                ct.TensorType(name=spec.name, dtype=np.dtype(_TYPES[spec.dtype].lower()).type)
                if spec.dtype.startswith("float")
                else ct.TensorType(name=spec.name)
                for spec in model.signature.outputs
            ],
            minimum_deployment_target=getattr(ct.target, options["minimum_deployment_target"]),
            compute_precision=ct.precision.FLOAT32 if whole else ct.precision.FLOAT16,
            skip_model_load=True,
        )
    except Exception as error:  # what fails in a converter of Python shares no base class
        raise NothingCompiledError(f"coremltools can't convert the program: {_sentence(error)}") from error


def _compress(converted: Any, scheme: Scheme) -> Any:
    """The weights in fewer bits, each channel or block with its scale, or from a palette (k-means); activations stay in
    float16."""
    if (kind := scheme.options.get("weights")) is None:
        return converted
    from coremltools.optimize import coreml as optimize

    if kind == "palette":
        bits = {"int8": 8, "int4": 4}[scheme.precision]
        how: Any = optimize.OpPalettizerConfig(mode="kmeans", nbits=bits, weight_threshold=_SMALLEST_WEIGHT)
        function = optimize.palettize_weights
    else:
        grain: dict[str, dict[str, Any]] = {
            "int8": {"granularity": "per_channel"},
            "int4": {"granularity": "per_block", "block_size": 32},
        }
        how = optimize.OpLinearQuantizerConfig(
            mode="linear_symmetric",
            dtype=scheme.precision,
            weight_threshold=_SMALLEST_WEIGHT,
            **grain[scheme.precision],
        )
        function = optimize.linear_quantize_weights
    try:
        return function(converted, optimize.OptimizationConfig(global_config=how))
    except Exception as error:  # as above
        raise NothingCompiledError(f"coremltools can't compress the weights: {_sentence(error)}") from error


def _settle(package: Path) -> None:
    """The same bytes for the same model: without the day, and with identifiers that come from the content instead of
    chance."""
    program = _read_program(package)
    program.description.metadata.userDefined.pop(_DATE, None)
    (package / _PROGRAM).write_bytes(program.SerializeToString(deterministic=True))
    manifest = json.loads((package / "Manifest.json").read_text(encoding="utf-8"))
    names = {}
    for name, item in manifest["itemInfoEntries"].items():
        place = package / "Data" / item["path"]
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        content = [item["path"], *(digest_file(file) for file in files if file.is_file())]
        names[name] = str(uuid.uuid5(uuid.NAMESPACE_OID, canonical_json(content))).upper()
    manifest["itemInfoEntries"] = {names[name]: item for name, item in manifest["itemInfoEntries"].items()}
    manifest["rootModelIdentifier"] = names[manifest["rootModelIdentifier"]]
    text = json.dumps(manifest, indent=4, sort_keys=True)
    (package / "Manifest.json").write_text(text + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- what was made


def _read_program(package: Path) -> Any:
    from coremltools.proto import Model_pb2

    program = Model_pb2.Model()
    program.ParseFromString((package / _PROGRAM).read_bytes())
    return program


def _demand_signature(description: Any, signature: Signature, target: Target) -> None:
    """Names, types and shapes of the saved program are the source's, and every batch size of the target fits."""
    for word, found, wanted in (
        ("inputs", description.input, signature.inputs),
        ("outputs", description.output, signature.outputs),
    ):
        have = [(one.name, _array_type(one.type.multiArrayType.dataType)) for one in found]
        want = [(spec.name, _TYPES[spec.dtype]) for spec in wanted]
        if have != want:
            raise IntegrityError(f"the {word} changed on the way: the model has {want}, the package {have}")
    for one, spec in zip(description.input, signature.inputs, strict=True):
        for size in target.batch_sizes:
            shape = _shape(spec, size, target)
            if not _takes(one.type.multiArrayType, shape):
                raise IntegrityError(f"the package's input {spec.name!r} does not take the shape {list(shape)}")


def _takes(kind: Any, shape: tuple[int, ...]) -> bool:
    match kind.WhichOneof("ShapeFlexibility"):
        case "enumeratedShapes":
            return shape in [tuple(one.shape) for one in kind.enumeratedShapes.shapes]
        case "shapeRange":
            ranges = kind.shapeRange.sizeRanges
            return len(ranges) == len(shape) and all(
                one.lowerBound <= size <= one.upperBound for one, size in zip(ranges, shape, strict=True)
            )
    return tuple(kind.shape) == shape


def _array_type(number: int) -> str:
    from coremltools.proto import FeatureTypes_pb2

    return str(FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Name(number))


def _read_back(program: Any, scheme: Scheme) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The saved program's operators and types. Raises when the precision that was asked for is not in it."""
    from coremltools.proto import MIL_pb2

    ops: Counter[str] = Counter()
    heavy: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for function in program.mlProgram.functions.values():
        for operation in function.block_specializations[function.opset].operations:
            kind = MIL_pb2.DataType.Name(operation.outputs[0].type.tensorType.dataType) if operation.outputs else ""
            if operation.type == "const":
                if operation.attributes["val"].WhichOneof("value") == "blobFileValue":
                    weights[kind] += 1
                continue
            ops[operation.type] += 1
            if operation.type in _MATRIX_OPS:
                heavy[kind] += 1
            # A compressed weight is held by the operation that expands it: as an attribute up to iOS 17, as an argument
            # later.
            arguments = (one for named in operation.inputs.values() for one in named.arguments)
            held = [one.value for one in arguments if one.WhichOneof("binding") == "value"]
            for value in (*operation.attributes.values(), *held):
                if value.WhichOneof("value") == "blobFileValue":
                    weights[MIL_pb2.DataType.Name(value.type.tensorType.dataType)] += 1
    compressed = sum(count for name, count in ops.items() if name.startswith("constexpr_"))
    executed = {
        "providers": {"ML program, not run": sum(ops.values())},
        "ops": dict(sorted(ops.items())),
        "precision": {
            "matrix_and_convolution": dict(sorted(heavy.items())),
            "weights": dict(sorted(weights.items())),
            "compressed_weights": compressed,
        },
    }
    return executed, _judge(scheme, heavy, compressed)


def _judge(scheme: Scheme, heavy: Counter[str], compressed: int) -> tuple[str, ...]:
    wanted = {"fp32": "FLOAT32", "fp16": "FLOAT16"}[scheme.float_type]
    rest = {kind: count for kind, count in sorted(heavy.items()) if kind != wanted}
    if rest and (scheme.precision == "fp32" or not heavy[wanted]):
        raise NothingCompiledError(f"coremltools was asked for {wanted}, and wrote matrix operations in {rest}")
    if scheme.precision in _COMPRESSED and not compressed:
        raise NothingCompiledError(
            f"coremltools was asked for {scheme.precision} and compressed no weight; it leaves those of fewer than "
            f"{_SMALLEST_WEIGHT} numbers"
        )
    notes = [f"matrix operations beside those in {wanted}: {rest}"] if rest else []
    if scheme.precision in _COMPRESSED:
        notes.append(f"{compressed} weights are in {scheme.precision}, and the arithmetic is in float16")
    return tuple(notes)


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (" ".join(lines) or type(error).__name__)[:600]
