"""NVIDIA TensorRT on a CUDA device.

Networks are strongly typed: a layer computes in the type that the graph says, so every precision is a lowering's, and
there are neither precision flags nor calibrators (TensorRT 11 has dropped both; 10 knows strong typing too). Polygraphy
builds, since it keeps what differs between versions; the engine is run with TensorRT and PyCUDA. What each layer really
takes and gives is read back with the engine inspector.

The artifact is an engine for one kind of GPU and one version of TensorRT, unless an option asks for more, and beside it
the timing cache of its kernels: with that, the same kernels are chosen again. Timing caches are kept as tuning records
(`core.tuning_records`) by version and machine, so later builds start from what was timed before, here or on another
machine.

**Never run by us**: there was no GPU where it was written. Calls are type-checked against the bindings of TensorRT 11.4
(typings/tensorrt).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core import tuning_records
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.environment import hardware
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form
from compile_stage.plugin_support.options import FLAG, TEXT, Number, OneOf, Option, refuse_options, valid_options

if TYPE_CHECKING:
    import tensorrt as trt

    from compile_stage.core.tensors import Batch

ENGINE, TIMINGS = "model.engine", "timing.cache"
_TIMED = "timings"  # what a record's name begins with

Shape = tuple[int, ...]

# Options of a target: what each may be.
_OPTIONS: Mapping[str, Option] = {
    "workspace_mb": Number(low=0),  # scratch memory that a layer may use; all of the device's by default
    "optimization_level": Number(low=0, high=5),  # TensorRT's own scale; 3 is its default
    "hardware_compatibility": OneOf("none", "same_compute_capability", "ampere_plus"),
    "version_compatible": FLAG,  # the engine also loads in later versions of TensorRT, and brings a lean runtime
    "timing_cache": TEXT,  # a file to start from, in place of the machine's own
    "max_aux_streams": Number(low=0),
}

_LACKS = {"int8-dynamic": "it takes scales that were fixed when the model was compiled"}

_DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "UINT8": "uint8", "INT32": "int32",
    "INT64": "int64", "BOOL": "bool",
}  # fmt: skip

# How the inspector's texts name a type: `Half`, or `Row major linear FP16 format`.
_TYPE_WORDS = {
    "float32": r"fp32|float",
    "float16": r"fp16|half",
    "bfloat16": r"bf16|bfloat16",
    "int8": r"int8",
    "fp8": r"fp8",
    "int4": r"int4",
    "int32": r"int32",
    "int64": r"int64",
    "bool": r"bool",
}
_TYPE_OF = [(name, re.compile(rf"\b(?:{words})\b", re.IGNORECASE)) for name, words in _TYPE_WORDS.items()]
# The type that a lowered graph's arithmetic must show, or the precision was not taken.
_SHOWS = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8", "fp8": "fp8", "int4": "int4"}


class TensorRt(Backend):
    """The backend."""

    name: ClassVar[str] = "tensorrt"
    requires: ClassVar[tuple[str, ...]] = ("tensorrt", "pycuda", "polygraphy")
    extra: ClassVar[str] = "tensorrt"
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("onnx",),
        devices=("cuda",),
        precisions=("fp32", "fp16", "bf16", "int8", "fp8", "int4"),
        runtime=("tensorrt", "pycuda"),
        lacks=_LACKS,
        times_kernels=True,
        keeps_tuning_records=True,
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("tensorrt", "polygraphy", "pycuda", "numpy")

    def refuse_target(self, target: Target) -> str | None:
        if (reason := super().refuse_target(target)) is not None:
            return reason
        if not hardware().accelerators:
            return "tensorrt builds for the GPU that it finds, and this machine has none that nvidia-smi lists"
        return refuse_options(self.name, _OPTIONS, target)

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        return _SCHEMES.get(precision, ()) if target.device == "cuda" else ()

    def records_key(self, target: Target, packages: Mapping[str, str]) -> str | None:
        """Every build times kernels, except one that is given its timings by option."""
        pinned = "timing_cache" in target.options.get(self.name, {})
        return None if pinned else f"tensorrt-{packages.get('tensorrt', 'unknown')}/{hardware().fingerprint}"

    def refuse_record(self, name: str, content: bytes) -> str | None:
        """Only TensorRT can read one, and leaves out what is of another device or version."""
        return None if name.startswith(f"{_TIMED}-") and content else "it is no timing cache"

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := refuse_form(self, model, target)) is not None:
            return reason
        try:
            profile_shapes(model.signature, target)
        except UsageError as error:
            return error.problem
        return None

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        asked = valid_options(self.name, _OPTIONS, target)
        into.mkdir(parents=True, exist_ok=True)
        _build(model, target, asked, into, self.records_key(target, self.toolchain()))
        engine = _load((into / ENGINE).read_bytes(), bool(asked.get("version_compatible")))
        executed = read_layers(_inspect(engine))
        if (shown := _SHOWS.get(scheme.precision)) is not None and not executed["precision"].get(shown):
            took = ", ".join(executed["precision"]) or "nothing"
            raise NothingCompiledError(
                f"asked for {scheme.precision}, and no layer of the engine computes in it: {took}"
            )
        compiled = Compiled(
            entry=ENGINE,
            signature=_read_signature(engine, model.signature),
            options=asked,
            executed=executed,
        )
        return describe(self, model, scheme, job_id, into, compiled)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        import pycuda.driver as cuda

        cuda.init()
        primary = cuda.Device(0).retain_primary_context()  # shared with whatever else of this process uses the GPU
        with _current(primary):
            content = (Path(artifact.path) / artifact.entry).read_bytes()
            engine = _load(content, bool(artifact.options.get("version_compatible")))
            session = _TensorRtSession(engine, artifact.signature, primary)
            del engine  # the session's execution context keeps it, and ends with it
        try:
            yield session
        finally:
            session.close()


@contextlib.contextmanager
def _current(primary: Any) -> Iterator[None]:
    """Make the CUDA context current in this thread for as long. It is never left so: a server loads in one thread and
    calls from others, and a thread that ends with a context on its stack ends the process (PyCUDA)."""
    import pycuda.driver as cuda

    primary.push()
    try:
        yield
    finally:
        cuda.Context.pop()


class _TensorRtSession:
    """One open engine on one stream. Device buffers are kept and grow with what is asked; outputs are new arrays, so
    they are the caller's."""

    def __init__(self, engine: trt.ICudaEngine, described: Signature, primary: Any) -> None:
        import pycuda.driver as cuda

        self.signature = _read_signature(engine, described)
        self._cuda, self._primary = cuda, primary
        self._context: trt.IExecutionContext | None = engine.create_execution_context()
        if self._context is None:
            raise NothingCompiledError("TensorRT can't make an execution context: the GPU's memory may be used up")
        self._stream: Any = cuda.Stream()
        self._done: Any = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._buffers: dict[str, tuple[Any, int]] = {}

    def run(self, batch: Batch) -> Batch:
        context = self._context
        if context is None:
            raise UsageError("this session is closed; call it inside its context")
        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        with _current(self._primary):
            return self._run(context, batch)

    def _run(self, context: trt.IExecutionContext, batch: Batch) -> Batch:
        import numpy as np

        held = []  # until the stream is through: copies to the device go on after the call that starts them
        for spec in self.signature.inputs:
            array = np.asarray(batch[spec.name], order="C")  # not ascontiguousarray, which gives a scalar an axis
            held.append(array)
            if not context.set_input_shape(spec.name, array.shape):
                raise UsageError(
                    f"input {spec.name!r} of shape {list(array.shape)} lies outside of the shapes that the engine was "
                    "built for"
                )
            context.set_tensor_address(spec.name, int(self._buffer(spec.name, array.nbytes)))
            self._cuda.memcpy_htod_async(self._buffers[spec.name][0], array, self._stream)
        outputs = {}
        for spec in self.signature.outputs:
            outputs[spec.name] = np.empty(tuple(context.get_tensor_shape(spec.name)), spec.dtype)
            context.set_tensor_address(spec.name, int(self._buffer(spec.name, outputs[spec.name].nbytes)))
        if not context.execute_async_v3(self._stream.handle):
            raise NothingCompiledError("TensorRT could not run the engine; what it says of that is in the worker's log")
        for name, array in outputs.items():
            self._cuda.memcpy_dtoh_async(array, self._buffers[name][0], self._stream)
        self._done.record(self._stream)
        self._done.synchronize()
        return outputs

    def close(self) -> None:
        with _current(self._primary):
            self._context = self._stream = self._done = None
            for buffer, _ in self._buffers.values():
                buffer.free()
            self._buffers.clear()

    def _buffer(self, name: str, size: int) -> Any:
        """Device memory of at least `size` bytes for a tensor; a tensor without elements has an address too."""
        held = self._buffers.get(name)
        if held is None or held[1] < size:
            if held is not None:
                held[0].free()
            self._buffers[name] = (self._cuda.mem_alloc(max(1, size)), size)
        return self._buffers[name][0]


# ------------------------------------------------------------------------------------------------------------ schemes

# Quantised values are symmetric: TensorRT takes no zero points. What matrix operators read is rounded, and what they
# give is not, so that sums and activations are fused behind them in floating point.
_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SCHEMES: Mapping[str, tuple[Scheme, ...]] = {
    "fp32": (Scheme(precision="fp32", name="fp32", native=True),),
    "fp16": (Scheme(precision="fp16", name="fp16", weights="float16"),),
    "bf16": (Scheme(precision="bf16", name="bf16"),),
    "int8": (
        Scheme(
            precision="int8",
            name="int8-sym",
            activations="int8",
            weights="int8",
            symmetric=True,
            ops=_OPERATORS,
            # Its parser dequantises 8 bits and less, so no bias in int32. Whether it takes a Gather of int8 constants
            # was never seen.
            options={"placement": "operands", "biases": "float32", "tables": False},
        ),
    ),
    "fp8": (Scheme(precision="fp8", name="fp8"),),
    "int4": tuple(
        Scheme(
            precision="int4",
            name=f"int4-{method}",
            weights="int4",
            options={"method": method, "block": 128, "tables": False},
        )
        for method in ("hqq", "rtn")
    ),
}


# ------------------------------------------------------------------------------------------------------------ refusals


def profile_shapes(signature: Signature, target: Target) -> dict[str, tuple[Shape, Shape, Shape]]:
    """The smallest, the typical and the largest shape of each input, for which the engine is built.

    They are the policy's, widened to the batch sizes that it promises. An input whose only free axis is the batch needs
    no shapes in the policy.

    Raises:
        UsageError: Another axis is free, and the policy does not say between which sizes.
    """
    sizes = target.batch_sizes
    found = {}
    for spec in signature.inputs:
        given = target.shapes.get(spec.name)
        if given is not None:
            low, usual, high = given.min, given.typical, given.max
        else:
            free = [axis for axis, size in enumerate(spec.shape) if not isinstance(size, int) and axis]
            if free:
                raise UsageError(
                    f"axis {free[0]} of input {spec.name!r} is free, and TensorRT builds for a range: "
                    f"give its min, typical and max shape under shapes.{spec.name} of the target"
                )
            low = usual = high = tuple(size if isinstance(size, int) else sizes[0] for size in spec.shape)
        if spec.shape and not isinstance(spec.shape[0], int):
            low, high = (min(low[0], *sizes), *low[1:]), (max(high[0], *sizes), *high[1:])
            usual = (min(max(usual[0], low[0]), high[0]), *usual[1:])
        found[spec.name] = (low, usual, high)
    return found


# ----------------------------------------------------------------------------------------------------------- building


def _build(model: PortableModel, target: Target, asked: Mapping[str, Any], into: Path, key: str | None) -> None:
    """Write the engine and its timing cache, which is kept under the key of tuning records."""
    import tensorrt as trt
    from polygraphy.backend.trt import CreateConfig, Profile, engine_bytes_from_network, network_from_onnx_path
    from polygraphy.exception import PolygraphyException

    profile = Profile()
    for name, (low, usual, high) in profile_shapes(model.signature, target).items():
        profile.add(name, min=low, opt=usual, max=high)
    if "timing_cache" in asked and not Path(asked["timing_cache"]).is_file():
        raise UsageError(f"tensorrt's option timing_cache names {asked['timing_cache']}, which is no file")
    known = _known(key) if key else [Path(asked["timing_cache"]).read_bytes()]
    if known:
        (into / TIMINGS).write_bytes(known[0] if len(known) == 1 else _combined(known))
    limits = {trt.MemoryPoolType.WORKSPACE: asked["workspace_mb"] << 20} if "workspace_mb" in asked else None
    compatible = {
        "same_compute_capability": trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,
        "ampere_plus": trt.HardwareCompatibilityLevel.AMPERE_PLUS,
    }.get(asked.get("hardware_compatibility", "none"))
    # No precision flags: CreateConfig then sets none, and takes back TensorFloat-32, which TensorRT would otherwise use
    # for float32.
    config = CreateConfig(
        profiles=[profile],
        load_timing_cache=str(into / TIMINGS) if known else None,
        memory_pool_limits=limits,
        profiling_verbosity=trt.ProfilingVerbosity.DETAILED,  # for the inspector
        builder_optimization_level=asked.get("optimization_level"),
        hardware_compatibility_level=compatible,
        version_compatible=asked.get("version_compatible"),
        max_aux_streams=asked.get("max_aux_streams"),
    )
    try:
        network = network_from_onnx_path(model.path, strongly_typed=True)
    except PolygraphyException as error:
        reason = _refused_node(model.path) or _sentence(error)
        raise NothingCompiledError(f"TensorRT can't read the graph: {reason}") from error
    try:
        content = engine_bytes_from_network(network, config=config, save_timing_cache=str(into / TIMINGS))
    except PolygraphyException as error:
        raise NothingCompiledError(f"TensorRT can't build the engine: {_sentence(error)}") from error
    with open(into / ENGINE, "wb") as file:
        file.write(memoryview(content))
    if key:
        made = (into / TIMINGS).read_bytes()
        tuning_records.write(tuning_records.folder_of(key), tuning_records.name_of(_TIMED, "cache", made), made)


def _refused_node(path: str) -> str:
    """What TensorRT's parser says of the first node that it refuses, which Polygraphy's error leaves out; "" where it
    says nothing."""
    import tensorrt as trt
    from polygraphy.backend.trt import create_network

    builder, network = create_network(strongly_typed=True)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.WARNING))
    if parser.parse_from_file(path) or parser.num_errors == 0:
        return ""
    first = parser.get_error(0)
    said = "; ".join(line.strip() for line in first.desc().splitlines() if line.strip())
    sentence = f"{first.node_operator()} {first.node_name()!r}: {said}"
    del first, parser, network, builder  # in this order: each lies in what the next one owns
    return sentence


def _known(key: str) -> list[bytes]:
    """What was timed for such a GPU with this version, by earlier builds here and elsewhere."""
    folder = tuning_records.folder_of(key)
    return [path.read_bytes() for path in tuning_records.intact_in(folder).values()]


def _combined(known: Sequence[bytes]) -> bytes:
    """One timing cache of all that belong to this device and version."""
    import tensorrt as trt

    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    config = builder.create_builder_config()
    whole = config.create_timing_cache(b"")
    if whole is None:
        return known[0]
    for content in known:
        if (one := config.create_timing_cache(content)) is not None:
            whole.combine(one, ignore_mismatch=False)
    return bytes(memoryview(whole.serialize()))


def _load(content: bytes, version_compatible: bool) -> trt.ICudaEngine:
    import tensorrt as trt

    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    # A version-compatible engine brings code of its own, which runs only where that is allowed.
    runtime.engine_host_code_allowed = version_compatible
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise NothingCompiledError(
            f"TensorRT {trt.__version__} can't load the engine: it was built for another version, or for another GPU"
        )
    return engine


# ----------------------------------------------------------------------------------------------------------- read back


def _inspect(engine: trt.ICudaEngine) -> str:
    import tensorrt as trt

    return engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)


def read_layers(document: str) -> dict[str, dict[str, int]]:
    """Layers by kind (`ops`) and by the type that they compute in (`precision`), from what the engine inspector says as
    JSON.

    A layer counts under the narrowest floating or quantised type that it reads or writes: a convolution that reads int8
    and writes float32 computes in int8. One that only moves data counts as `moves`; one of which only the name is known
    as `untold`.
    """
    ops: Counter[str] = Counter()
    precision: Counter[str] = Counter()
    for layer in json.loads(document).get("Layers", []):
        described = layer if isinstance(layer, Mapping) else {}
        kind = str(described.get("LayerType", "untold"))
        ops[kind] += 1
        if kind.lower() in _MOVES:
            precision["moves"] += 1
            continue
        tensors = [*described.get("Inputs", []), *described.get("Outputs", [])]
        seen = {_type_in(str(tensor.get("Format/Datatype", ""))) for tensor in tensors if isinstance(tensor, Mapping)}
        precision[next((name for name in _NARROWEST_FIRST if name in seen), "untold")] += 1
    return {
        "providers": {"tensorrt": ops.total()},
        "ops": dict(sorted(ops.items())),
        "precision": dict(sorted(precision.items())),
    }


_MOVES = ("reformat", "shuffle", "noop", "constant", "memcpy")
_NARROWEST_FIRST = ("int4", "fp8", "int8", "float16", "bfloat16", "float32", "int32", "int64", "bool")


def _type_in(text: str) -> str:
    return next((name for name, words in _TYPE_OF if words.search(text)), "")


def _read_signature(engine: trt.ICudaEngine, described: Signature) -> Signature:
    """The engine's tensors, in the model's order; where an axis is free, by the model's own symbol."""
    import tensorrt as trt

    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    modes = {name: engine.get_tensor_mode(name) for name in names}

    def read(mode: trt.TensorIOMode, known: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        held = {name for name in names if modes[name] == mode}
        ordered = [spec for spec in known if spec.name in held]
        if len(ordered) != len(held) or len(held) != len(known):
            raise NothingCompiledError(
                f"the engine has the tensors {', '.join(sorted(held))}, and the model "
                f"{', '.join(spec.name for spec in known)}"
            )
        return tuple(_read_spec(engine, spec) for spec in ordered)

    return Signature(
        inputs=read(trt.TensorIOMode.INPUT, described.inputs), outputs=read(trt.TensorIOMode.OUTPUT, described.outputs)
    )


def _read_spec(engine: trt.ICudaEngine, known: TensorSpec) -> TensorSpec:
    kind = engine.get_tensor_dtype(known.name).name
    if kind not in _DTYPES:
        raise NothingCompiledError(f"tensor {known.name!r} is {kind}, which arrays don't have")
    sizes = tuple(engine.get_tensor_shape(known.name))
    if len(sizes) != len(known.shape):
        raise NothingCompiledError(
            f"tensor {known.name!r} has {len(sizes)} dimensions in the engine, and {known} in the model"
        )
    shape = tuple(size if size >= 0 else known_size for size, known_size in zip(sizes, known.shape, strict=True))
    return TensorSpec(name=known.name, dtype=_DTYPES[kind], shape=shape)


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
