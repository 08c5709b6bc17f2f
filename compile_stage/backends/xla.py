"""XLA on a CPU, by way of JAX.

The artifact is one executable of machine code for each batch size of the target, as PJRT, XLA's runtime, writes it. It
is loaded by jaxlib, without PyTorch; no pickle is in it. Such code runs on the version of jaxlib that made it and on a
CPU that has the instructions of the one that made it: both are compared when it is opened. What runs is read back from
the optimised program that the executable carries.

`open` needs nothing but jax, jaxlib and numpy.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.digest import canonical_json
from compile_stage.core.environment import hardware
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target, TuningOption
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form
from compile_stage.plugin_support.buckets import Router, Shapes, bucket_name, buckets, padding_note, refuse_buckets
from compile_stage.plugin_support.options import OneOf, refuse_options, valid_options
from compile_stage.plugin_support.sessions import demand_call

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_ENTRY, _WEIGHTS = "model.json", "weights.bin"

# A target's option: where the weights are.
_OPTIONS: Mapping[str, OneOf] = {"weights": OneOf("constants", "file")}

# XLA reads an array where it lies if it begins at such an address, and copies it otherwise.
_ALIGNMENT = 64

_NOT_DRIVEN = "quantisers are not driven by this backend"
_LACKS = {
    "fp16": "XLA computes float16 on a CPU by way of float32, so nothing would be gained",
    "bf16": "this CPU has no bfloat16 instructions",
    "int8": _NOT_DRIVEN,
    "int8-dynamic": _NOT_DRIVEN,
    "int4": _NOT_DRIVEN,
    "fp8": "XLA has no kernels for it on a CPU",
}


class Xla(Backend):
    """The backend."""

    name: ClassVar[str] = "xla"
    requires: ClassVar[tuple[str, ...]] = ("jax", "jaxlib")
    extra: ClassVar[str] = "xla"
    options: ClassVar[Mapping[str, OneOf]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("torch-export", "stablehlo"),
        devices=("cpu",),
        precisions=("fp32", "bf16"),
        runtime=("jax", "jaxlib"),
        toolchain="jax",
        form_requires={"torch-export": ("torch", "torchax")},
        opens_with=("jax", "jaxlib"),
        lacks=_LACKS,
        offers_tuning_options=True,
    )

    def toolchain(self) -> Mapping[str, str]:
        # XLA's own switches, which change what it makes.
        flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"]} if os.environ.get("XLA_FLAGS") else {}
        return {**package_versions("jax", "jaxlib", "torchax", "torch", "numpy"), **flags}

    def refuse_target(self, target: Target) -> str | None:
        if (reason := super().refuse_target(target)) is not None:
            return reason
        if sys.platform not in ("linux", "darwin"):
            return f"xla is served on Linux and macOS; {sys.platform} is not served by this backend yet"
        return refuse_options(self.name, _OPTIONS, target)

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        if target.device == "cpu" and (precision == "fp32" or (precision == "bf16" and hardware().multiplies_bf16)):
            return (Scheme(precision=precision, name=precision, native=True),)
        return ()

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        return (TuningOption(kind="memory", name="weights-in-file", options={"weights": "file"}),)

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        return refuse_form(self, model, target) or refuse_buckets(self.name, model.signature, target)

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        from compile_stage.backends import xla_hlo, xla_program
        from compile_stage.plugin_support import fixed_shapes

        asked = valid_options(self.name, _OPTIONS, target)
        if (reason := refuse_buckets(self.name, model.signature, target)) is not None:
            raise UsageError(reason)
        into.mkdir(parents=True, exist_ok=True)
        options = {"weights": str(asked.get("weights", _OPTIONS["weights"].words[0]))}
        if model.form == "stablehlo":
            index, types = _write_modules(model, scheme, target, into, options), fixed_shapes.types(model)
        else:
            program = xla_program.read(model.path, model.signature, half=scheme.precision == "bf16")
            index = _write(program, model.signature, target, into, constants=options["weights"] == "constants")
            types = program.types
        (into / _ENTRY).write_text(canonical_json(index) + "\n", encoding="utf-8")
        with _open(into / _ENTRY, model.signature, target.threads) as session:
            executed, notes = xla_hlo.read_back(session.programs(), scheme, types)
        notes = (*notes, *filter(None, [padding_note(model.signature, buckets(model.signature, target))]))
        compiled = Compiled(entry=_ENTRY, options=options, executed=executed, notes=notes)
        return describe(self, model, scheme, job_id, into, compiled)

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        with _open(Path(artifact.path) / artifact.entry, artifact.signature, threads) as session:
            yield session


@contextmanager
def _open(entry: Path, signature: Signature, threads: int) -> Iterator[_XlaSession]:
    session = _XlaSession(_start_client(threads), entry, signature)
    try:
        yield session
    finally:
        session.close()
        # A client and its devices refer to each other: until somebody collects them, its threads stay.
        gc.collect()


class _XlaSession:
    """Executables by the shapes of their inputs, in a client of their own. What is handed out are copies: XLA's buffers
    can't be written."""

    def __init__(self, client: Any, entry: Path, signature: Signature) -> None:
        import jax
        import numpy as np

        self.signature = signature
        index = json.loads(entry.read_text(encoding="utf-8"))
        _demand_machine(index["made_by"])
        (self._device,) = client.devices()
        self._place: Any = jax.sharding.SingleDeviceSharding(self._device)
        self._weights = []
        if index["weights"]:
            content = np.memmap(entry.with_name(_WEIGHTS), dtype=np.uint8, mode="r")
            self._weights = [self._put(_read_weight(content, one)) for one in index["weights"]]
        self._executables: dict[Shapes, Any] = {}
        for one in index["executables"]:
            shapes = tuple(tuple(shape) for shape in one["shapes"])
            self._executables[shapes] = self._load(client, entry.with_name(one["file"]).read_bytes())
        self._router = Router("xla", signature, tuple(self._executables))

    def run(self, batch: Batch) -> Batch:
        import numpy as np

        demand_call(self.signature, batch, closed=not self._executables)
        bucket, padded = self._router.fit(batch)
        arrays = [np.asarray(array, order="C") for array in padded]
        results = self._executables[bucket].execute_sharded([*self._weights, *map(self._put, arrays)])
        outputs = results.disassemble_into_single_device_arrays()
        named = {spec.name: np.asarray(output) for spec, (output,) in zip(self.signature.outputs, outputs, strict=True)}
        return {name: np.array(value) for name, value in self._router.cut(batch, bucket, named).items()}

    def programs(self) -> list[str]:
        """The optimised program of each executable, as XLA prints it."""
        return [executable.hlo_modules()[0].to_string() for executable in self._executables.values()]

    def close(self) -> None:
        self._executables.clear()
        self._weights.clear()
        self._place = self._device = None

    def _put(self, array: Any) -> Any:
        """The array for XLA: in its own type, where `jax.device_put` would halve an int64."""
        import jax
        from jaxlib import xla_client

        with_type = jax.core.ShapedArray(array.shape, array.dtype)
        return xla_client.batched_device_put(with_type, self._place, [array], [self._device], enable_x64=True)

    def _load(self, client: Any, content: bytes) -> Any:
        import jax
        from jaxlib import xla_client

        devices = xla_client.DeviceList((self._device,))
        try:
            return client.deserialize_executable(content, devices, xla_client.CompileOptions())
        except jax.errors.JaxRuntimeError as error:
            raise NothingCompiledError(f"XLA can't load the executable: {_sentence(error)}") from error


# ---------------------------------------------------------------------------------------------- what it needs and takes


# ---------------------------------------------------------------------------------------------------------- the machine


_STARTING = threading.Lock()


def _start_client(threads: int) -> Any:
    """XLA with as many threads as are asked for, for one session.

    A client starts its threads when it is made, one for every CPU of the process, or as many as the environment
    variable NPROC says; what XLA_FLAGS says of threads it does not look at. What it runs it runs in the caller's thread
    and in those.
    """
    import jax  # noqa: F401 - before jaxlib, which logs to standard error otherwise
    from jaxlib import xla_client

    with _STARTING:
        before = os.environ.get("NPROC")
        os.environ["NPROC"] = str(threads)
        try:
            return xla_client.make_cpu_client(asynchronous=False)
        finally:
            if before is None:
                del os.environ["NPROC"]
            else:
                os.environ["NPROC"] = before


def _maker() -> dict[str, Any]:
    """What the executables need: this version of jaxlib, and the instructions that this CPU has."""
    here = hardware()
    return {**package_versions("jaxlib"), "machine": here.machine, "system": here.system, "features": [*here.features]}


def _demand_machine(made_by: Mapping[str, Any]) -> None:
    """XLA itself only logs that an executable is of another machine, and then runs into an illegal instruction."""
    here = _maker()
    for key in ("jaxlib", "machine", "system"):
        if made_by[key] != here[key]:
            raise NothingCompiledError(
                f"the executable was made for {key} {made_by[key]}, and this is {here[key]}",
                fix=f"install jaxlib {made_by['jaxlib']}" if key == "jaxlib" else "compile the model on this machine",
            )
    if lacking := sorted(set(made_by["features"]) - set(here["features"])):
        raise NothingCompiledError(
            f"the executable was made for a CPU with {', '.join(lacking)}, which this one has not",
            fix="compile the model on this kind of machine",
        )


def _write(program: Any, signature: Signature, target: Target, into: Path, constants: bool) -> dict[str, Any]:
    """The artifact's files but its entry, of which this is the content."""
    from compile_stage.backends import xla_program

    client = _start_client(target.threads)
    (device,) = client.devices()
    types = [spec.dtype for spec in signature.inputs]
    index: dict[str, Any] = {"made_by": _maker(), "threads": target.threads, "executables": []}
    index["weights"] = [] if constants else _write_weights(into / _WEIGHTS, program.weights)
    for shapes in buckets(signature, target):
        name = bucket_name(signature, shapes)
        code, text = xla_program.to_stablehlo(program, list(zip(shapes, types, strict=True)), constants, device)
        (into / f"{name}.stablehlo.txt").write_text(text, encoding="utf-8")
        (into / f"{name}.xla").write_bytes(_build(client, code))
        index["executables"].append({"file": f"{name}.xla", "shapes": [list(shape) for shape in shapes]})
    return index


def _write_modules(
    model: PortableModel, scheme: Scheme, target: Target, into: Path, options: Mapping[str, str]
) -> dict[str, Any]:
    """As `_write`, of a model that is StableHLO already: a module for each shape, with its weights in it."""
    from compile_stage.backends import xla_program
    from compile_stage.plugin_support import fixed_shapes

    if scheme.precision != "fp32":
        raise UsageError(f"xla lowers PyTorch programs to {scheme.precision}, and compiles StableHLO as it is")
    if options["weights"] != "constants":
        raise UsageError("the weights of a StableHLO program are constants in it, and xla leaves them there")
    client = _start_client(target.threads)
    index: dict[str, Any] = {"made_by": _maker(), "threads": target.threads, "weights": [], "executables": []}
    for module in fixed_shapes.read_modules(model):
        code, text = xla_program.from_portable(module.file.read_bytes())
        name = module.file.stem
        (into / f"{name}.stablehlo.txt").write_text(text, encoding="utf-8")
        (into / f"{name}.xla").write_bytes(_build(client, code))
        index["executables"].append({"file": f"{name}.xla", "shapes": [list(shape) for shape in module.shapes]})
    return index


def _build(client: Any, code: bytes) -> bytes:
    """An executable from StableHLO."""
    import jax
    from jaxlib import xla_client

    devices = xla_client.DeviceList(tuple(client.devices()))
    try:
        built = client.compile_and_load(code, devices, xla_client.CompileOptions())
        return bytes(client.serialize_executable(built))
    except jax.errors.JaxRuntimeError as error:
        raise NothingCompiledError(f"XLA can't compile the program: {_sentence(error)}") from error


# ---------------------------------------------------------------------------------------------------------- the weights


def _write_weights(path: Path, weights: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One file with every weight at an aligned place, so that XLA reads it where it is mapped. Returns their places."""
    places: list[dict[str, Any]] = []
    with path.open("wb") as stream:
        for name, array in weights.items():
            stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
            places.append({"name": name, "type": array.dtype.name, "shape": [*array.shape], "at": stream.tell()})
            stream.write(array.tobytes())
    return places


def _read_weight(content: Any, one: Mapping[str, Any]) -> Any:
    import ml_dtypes
    import numpy as np

    dtype = np.dtype(ml_dtypes.bfloat16 if one["type"] == "bfloat16" else one["type"])
    count = int(np.prod(one["shape"], dtype=np.int64))
    end = one["at"] + count * dtype.itemsize
    if end > len(content):
        raise IntegrityError(f"{_WEIGHTS} ends before the weight {one['name']!r}")
    return content[one["at"] : end].view(dtype).reshape(one["shape"])


def _sentence(error: Exception) -> str:
    return (str(error).partition("\n")[0] or type(error).__name__)[:600]
