"""IREE, ahead of time: the graph becomes machine code, a `.vmfb` file for each shape, which IREE's small runtime runs.

What was compiled is read back from those files: for which CPU or GPU, and every dispatch function in it with the types
that it computes in. The file holds code for one kind of machine; `open` refuses on another. So a model can be compiled
here for a phone or a GPU that is not here (`target_triple`, `target_device`): it is not run then, and no gate passes.

`open` needs nothing but iree-base-runtime and numpy; `compile` also needs iree-base-compiler and onnx.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from compile_stage.backends.iree_compiler import (
    CHIP_FLAGS,
    ENTRY,
    compile_graph,
    compile_modules,
    one_line,
)
from compile_stage.backends.iree_module import read_back_all, source_types
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.environment import hardware
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target, TuningOption
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form, trial_filler
from compile_stage.plugin_support.buckets import Router, Shapes, padding_note
from compile_stage.plugin_support.options import FLAG, Like, OneOf, Option, PowerOfTwo, refuse_options
from compile_stage.plugin_support.sessions import demand_call

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_SMALLEST_STACK, _LARGEST_STACK = 4096, 131072

# Options of a target.
_OPTIONS: Mapping[str, Option] = {
    "optimization": OneOf("O0", "O1", "O2", "O3"),
    "data_tiling": FLAG,
    "aggressive_fusion": FLAG,
    "shapes": OneOf("fixed", "free"),
    "channels_last": FLAG,
    "stack_limit": PowerOfTwo(low=_SMALLEST_STACK, high=_LARGEST_STACK),
    "target_device": OneOf("local", "cuda", "vulkan", "hip", "metal"),
    "target_chip": Like(pattern=re.compile(r"[A-Za-z0-9_.-]+"), example="sm_80"),
    "target_triple": Like(
        pattern=re.compile(r"(x86_64|aarch64|riscv64|wasm32)(-[A-Za-z0-9_.]+){1,3}"),
        example="aarch64-linux-gnu (x86_64, aarch64, riscv64 or wasm32, then vendor and system)",
    ),
    "target_cpu": Like(pattern=re.compile(r"[A-Za-z0-9_.-]+"), example="cortex-a76"),
    "target_features": Like(pattern=re.compile(r"[+-][A-Za-z0-9_.-]+(,[+-][A-Za-z0-9_.-]+)*"), example="+dotprod,-sve"),
}
_DRIVERS = {"cuda": "cuda", "vulkan": "vulkan", "hip": "hip", "metal": "metal"}
# The device of a target, by the option target_device.
_DEVICES = {"local": "cpu", "cuda": "cuda", "vulkan": "vulkan", "hip": "rocm", "metal": "apple"}

_POOL: dict[int, Any] = {}  # how many threads the runtime's pool of this process has → its device, once it was made
_POOL_LOCK = threading.Lock()
_SETTLING_S = 0.05  # for the pool's threads to release the last buffers before the process ends


_LACKS: Mapping[str, str] = {
    "bf16": 'its compiler crashes on convolutions in bfloat16 ("do not know how to split the result of this operator") '
    "on x86 without AVX-512",
    "int8": "it computes the matrix products of an int8 transformer in float32, and its compiler crashes on symmetric "
    "int8 convolutions",
    "int8-dynamic": "it multiplies what was quantised as 32-bit integers with 64-bit sums",
    "int4": "its importer does not know weights that are quantised by blocks",
    "fp8": "it was never seen to run 8-bit floats here",
}


class Iree(Backend):
    """The backend."""

    name: ClassVar[str] = "iree"
    requires: ClassVar[tuple[str, ...]] = ("iree.compiler", "iree.runtime")
    extra: ClassVar[str] = "iree"
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("onnx", "stablehlo"),
        devices=tuple(_DEVICES.values()),
        precisions=("fp32", "fp16"),
        runtime=("iree-base-runtime",),
        opens_with=("iree.runtime",),
        lacks=_LACKS,
        cross_compiles=True,
        offers_tuning_options=True,
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("iree-base-compiler", "iree-base-runtime", "onnx", "numpy")

    def refuse_target(self, target: Target) -> str | None:
        asked = target.options.get(self.name, {})
        if (reason := _refuse_options(target)) is not None:
            return reason
        wanted = asked.get("target_device", "local")
        # The original is measured on the target's device, so that must be the artifact's too.
        if target.device != _DEVICES[wanted]:
            pairs = ", ".join(f"{option} for {device}" for option, device in _DEVICES.items())
            return (
                f"iree's option target_device is {wanted}, which is for targets of the device {_DEVICES[wanted]}, not "
                f"of {target.device!r} ({pairs})"
            )
        return None

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        return {
            "fp32": (Scheme(precision="fp32", name="fp32", native=True),),
            # Products of float16 with sums in float32; a CPU without float16 arithmetic converts around each.
            "fp16": (Scheme(precision="fp16", name="fp16", weights="float16"),),
        }.get(precision, ())

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        asked = target.options.get(self.name, {})
        away = "target_triple" in asked or asked.get("target_device", "local") != "local"
        return replace(self.capabilities, cross_compiles=away)

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        asked = target.options.get(self.name, {})
        tiled = bool(asked.get("data_tiling", True))
        name = "no-data-tiling" if tiled else "data-tiling"
        return (TuningOption(kind="tuning", name=name, options={"data_tiling": not tiled}),)

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := refuse_form(self, model, target)) is not None:
            return reason
        if model.form == "stablehlo":
            return None
        import onnx

        graph = onnx.load(model.path, load_external_data=False).graph
        for node in graph.node:
            if node.domain not in ("", "ai.onnx"):
                return (
                    f"operator {node.domain}.{node.op_type} (node {node.name!r}) is not one that IREE's importer knows"
                )
        for spec in (*model.signature.inputs, *model.signature.outputs):
            if spec.dtype == "str":
                return f"{spec.name!r} is a tensor of text, which IREE does not have"
        return None

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        asked = dict(target.options.get(self.name, {}))
        if (reason := self.refuse_target(target)) is not None:
            raise UsageError(reason)
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            if model.form == "stablehlo":
                asked, modules, notes = compile_modules(model, asked, Path(scratch), into)
            else:
                asked, modules, notes = compile_graph(model, asked, target, Path(scratch), into)
        files = [one["file"] for one in modules] or ["model.vmfb"]
        found = read_back_all([into / file for file in files], asked, scheme, source_types(model))
        notes += filter(None, [padding_note(model.signature, [shapes_of(one) for one in modules])])
        executed, needs, said = found
        compiled = Compiled(
            entry=files[-1],
            options={**asked, "needs": needs, **({"modules": modules} if modules else {})},
            executed=executed,
            notes=(*notes, *said),
            not_runnable_here=_refuse_machine(needs) or "",
        )
        artifact = describe(self, model, scheme, job_id, into, compiled)
        if artifact.not_runnable_here:
            return artifact
        with self.open(artifact, target.threads) as session:
            for batch in _trials(model, target):
                session.run(batch)
        return artifact

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        if (reason := _refuse_machine(artifact.options["needs"])) is not None:
            raise NothingCompiledError(f"this artifact can't be run here: {reason}", where=artifact.job_id)
        session = _IreeSession(artifact, threads)
        try:
            yield session
        finally:
            session.close()


class _IreeSession:
    """One loaded module, or one for each shape. What a call answers lies in the runtime's memory, so what is handed out
    are copies."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        self.signature: Signature = artifact.signature
        folder = Path(artifact.path)
        modules = artifact.options.get("modules", [])
        self._router = Router("iree", self.signature, list(map(shapes_of, modules))) if modules else None
        self._calls: dict[Shapes, Any] = {}
        try:
            self._device = _device(artifact.options["needs"]["device"], threads)
            for one in modules or [{"file": artifact.entry, "shapes": []}]:
                self._calls[shapes_of(one)] = self._load(folder / one["file"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise NothingCompiledError(f"IREE can't load the module: {one_line(str(error))}") from error

    def run(self, batch: Batch) -> Batch:
        demand_call(self.signature, batch, closed=not self._calls)
        if self._router is None:
            return self._run((), [batch[spec.name] for spec in self.signature.inputs])
        bucket, padded = self._router.fit(batch)
        return self._router.cut(batch, bucket, self._run(bucket, padded))

    def _load(self, path: Path) -> Any:
        import iree.runtime

        instance = iree.runtime.VmInstance()
        module = iree.runtime.VmModule.wrap_buffer(instance, _mapped(path))
        hal = iree.runtime.create_hal_module(instance, self._device)
        context = iree.runtime.VmContext(instance, [hal, module])
        return iree.runtime.FunctionInvoker(context, self._device, module.lookup_function(ENTRY))

    def _run(self, bucket: Shapes, arrays: Sequence[Any]) -> dict[str, Any]:
        given = [np.asarray(array, order="C") for array in arrays]
        try:
            answer = self._calls[bucket](*given)
            several = answer if isinstance(answer, tuple) else () if answer is None else (answer,)
            arrays = [np.array(one.to_host()) for one in several]
        except Exception as error:  # what its runtime raises shares no base class
            raise NothingCompiledError(f"IREE could not run the module: {one_line(str(error))}") from error
        if len(arrays) != len(self.signature.outputs):
            raise IntegrityError(f"the module has {len(arrays)} outputs, the model {len(self.signature.outputs)}")
        return {spec.name: _own(spec, array) for spec, array in zip(self.signature.outputs, arrays, strict=True)}

    def close(self) -> None:
        self._calls.clear()
        self._device = None


def shapes_of(module: Mapping[str, Any]) -> Shapes:
    """Of a module's inputs, as an artifact's options keep them."""
    return tuple(map(tuple, module["shapes"]))


def _mapped(path: Path) -> mmap.mmap:
    """The file's pages, read only: IREE's own `VmModule.mmap` opens it for writing too, which a confined worker may
    not."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _own(spec: TensorSpec, found: Any) -> Any:
    """An output in the model's type. The module has integers without a sign."""
    wanted = np.dtype(spec.dtype)
    if found.dtype == wanted:
        return found
    if {found.dtype.kind, wanted.kind} <= set("iub") and found.dtype.itemsize == wanted.itemsize:
        return found.view(wanted)
    raise IntegrityError(f"output {spec.name!r} is {spec.dtype} in the model, and the module answers {found.dtype}")


def _device(device: str, threads: int) -> Any:
    """A device with that many compute threads.

    The runtime makes its pool of threads once per process. A single thread needs none: it is the caller's own. A device
    with a pool stays until the process ends: taking it down waits for its threads with Python's lock held, and a thread
    that is about to give a buffer back waits for that lock, so that one session in three of a network with large
    weights never closed (IREE 3.13).
    """
    import iree.runtime

    if device != "local":
        return iree.runtime.get_driver(_DRIVERS[device]).create_default_device()
    if threads == 1:
        return iree.runtime.get_driver("local-sync").create_default_device()
    with _POOL_LOCK:
        if _POOL and threads not in _POOL:
            raise UsageError(
                f"IREE's runtime has {min(_POOL)} threads in this process, and can't have {threads} in it too",
                fix="open the model in a process of its own",
            )
        if not _POOL:
            iree.runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
            _POOL[threads] = iree.runtime.get_driver("local-task").create_default_device()
            atexit.register(time.sleep, _SETTLING_S)
    if (found := _workers(threads)) not in (None, threads):
        raise NothingCompiledError(f"IREE's runtime was asked for {threads} threads and has {found}")
    return _POOL[threads]


def _workers(expected: int) -> int | None:
    """How many threads the pool has, as Linux lists them; None elsewhere. A new thread names itself after a moment."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    found = 0
    for _ in range(100):
        found = 0
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):  # one that ends meanwhile
                found += (task / "comm").read_text(encoding="utf-8").startswith("iree-worker")
        if found == expected:
            break
        time.sleep(0.01)
    return found


def _trials(model: PortableModel, target: Target) -> Iterator[Batch]:
    """Something of every batch size that the target names, where the sizes of all other dimensions are known. A first
    axis of a fixed size is no batch: an operator's weights may be an input."""
    # StableHLO reads no row of a table that is not there, and no size of 1 divides by nothing.
    fill = trial_filler(model) if model.form == "onnx" else lambda spec, shape: np.ones(shape, spec.dtype)
    for size in target.batch_sizes:
        batch = {}
        for spec in model.signature.inputs:
            typical = target.shapes[spec.name].typical if spec.name in target.shapes else spec.shape
            shape = tuple(
                size if isinstance(own, str) and at == 0 else dim
                for at, (own, dim) in enumerate(zip(spec.shape, typical, strict=True))
            )
            if not all(isinstance(dim, int) for dim in shape):
                return
            batch[spec.name] = fill(spec, [int(dim) for dim in shape])
        yield batch


# ------------------------------------------------------------------------------------------------------------ refusals


def _refuse_options(target: Target) -> str | None:
    if (reason := refuse_options(Iree.name, _OPTIONS, target)) is not None:
        return reason
    given = target.options.get(Iree.name, {})
    device = given.get("target_device", "local")
    if device in CHIP_FLAGS and "target_chip" not in given:
        return f"iree's target_device {device} needs the option target_chip, such as {_CHIPS[device]}"
    if device not in CHIP_FLAGS and "target_chip" in given:
        return f"iree's target_device {device} takes no target_chip"
    for key in ("target_triple", "target_cpu", "target_features", "stack_limit"):
        if device != "local" and key in given:
            return f"iree's option {key} is for a CPU, and target_device is {device}"
    return None


_CHIPS = {"cuda": "sm_80", "vulkan": "ampere", "hip": "gfx942"}


def _refuse_machine(needs: Mapping[str, Any]) -> str | None:
    """The reason why this machine can't run a module that needs this."""
    if (device := needs["device"]) != "local":
        return _refuse_gpu(device, needs["chip"])
    here = hardware()
    if (machine := {"arm64": "aarch64", "AMD64": "x86_64"}.get(here.machine, here.machine)) != needs["machine"]:
        return f"it is code for {needs['machine']}, and this machine is {machine}"
    if here.features and (absent := [name for name in needs["features"] if name not in here.features]):
        return f"its code uses {', '.join(absent)}, which this machine does not have"
    return None


def _refuse_gpu(device: str, chip: str) -> str | None:
    import iree.runtime

    named = f"{device} ({chip})" if chip else device
    if _DRIVERS[device] not in iree.runtime.query_available_drivers():
        return f"it is code for {named}, and this build of IREE's runtime has no driver for that"
    try:
        found = iree.runtime.get_driver(_DRIVERS[device]).query_available_devices()
    except (RuntimeError, ValueError, OSError):
        found = []  # the driver's own library is not here
    return None if found else f"it is code for {named}, and this machine has no such device"
