"""IREE, ahead of time: the graph becomes machine code in one `.vmfb` file, which IREE's small runtime runs.

What was compiled is read back from that file: for which CPU or GPU, and every dispatch function in it with the types that it computes in. The
file holds code for one kind of machine; `open` refuses on another. So a model can be compiled here for a phone or a GPU that is not here
(`target_triple`, `target_device`): it is not run then, and no gate passes.

`open` needs nothing but iree-base-runtime and numpy; `compile` also needs iree-base-compiler and onnx.
"""

from __future__ import annotations

import atexit
import contextlib
import platform
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.environment import hardware
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Session
from compile_stage.core.records import Artifact, PortableModel, SampleSet, Scheme, Target, TuningOption
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.artifacts import describe, refuse_form, trial_filler, without_folders

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

# Options of a target, with what each may be: words, a type, or a pattern.
_OPTIONS: Mapping[str, tuple[str, ...] | type | re.Pattern[str]] = {
    "optimization": ("O0", "O1", "O2", "O3"),
    "data_tiling": bool,
    "aggressive_fusion": bool,
    "stack_limit": int,
    "target_device": ("local", "cuda", "vulkan", "hip", "metal"),
    "target_chip": re.compile(r"[A-Za-z0-9_.-]+"),
    "target_triple": re.compile(r"(x86_64|aarch64|riscv64|wasm32)(-[A-Za-z0-9_.]+){1,3}"),
    "target_cpu": re.compile(r"[A-Za-z0-9_.-]+"),
    "target_features": re.compile(r"[+-][A-Za-z0-9_.-]+(,[+-][A-Za-z0-9_.-]+)*"),
}
_SMALLEST_STACK, _LARGEST_STACK = 4096, 131072
# A large matrix product of a transformer does not fit into the compiler's own default of 32 KiB; a thread of the runtime has 128 KiB.
_STACK = 65536

# The flag that names the chip, by device; a device without one takes no chip.
_CHIP_FLAGS = {"cuda": "--iree-cuda-target", "vulkan": "--iree-vulkan-target", "hip": "--iree-rocm-target"}
_DRIVERS = {"cuda": "cuda", "vulkan": "vulkan", "hip": "hip", "metal": "metal"}
# The device of a target, by the option target_device.
_DEVICES = {"local": "cpu", "cuda": "cuda", "vulkan": "vulkan", "hip": "rocm", "metal": "apple"}
_FORMATS = {"local": "llvm-cpu", "cuda": "cuda-", "vulkan": "vulkan-", "hip": "rocm-", "metal": "metal-"}

# The compiler's word for an instruction set, and the operating system's, where code that has it crashes on machines without.
_FEATURES = {
    "sse4.2": "sse4_2", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avxvnni": "avx_vnni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512vl": "avx512vl", "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "amx-tile": "amx_tile", "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16", "neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "i8mm": "i8mm",
    "bf16": "bf16", "sve": "sve", "sve2": "sve2",
}  # fmt: skip

_ENTRY = "main"
# main$async_dispatch_7_matmul_like_Dx16x32_f32: its number, what it does, its sizes, its types. Some names go on after these.
_DISPATCH = re.compile(rb"main\$async_dispatch_(\d+)_(\w+)")
_DOES = re.compile(r"[A-Za-z]\w*?(?=_(?:\d|D|$))")
_TYPES = re.compile(r"(?<![A-Za-z0-9])(?:(?:\d+|D)x)*((?:(?:bf|f|u?i)\d+x)*(?:bf|f|u?i)\d+)(?![A-Za-z0-9])")
_TARGET = re.compile(rb'#hal\.executable\.target<"([^"]+)", "([^"]+)", \{(.*?)\}>\]', re.DOTALL)
_ELEMENT_TYPES = {
    "FLOAT16": "f16", "BFLOAT16": "bf16", "DOUBLE": "f64", "INT8": "i8", "UINT8": "i8", "INT16": "i16", "UINT16": "i16", "INT32": "i32", "UINT32": "i32",
    "INT64": "i64", "UINT64": "i64",
}  # fmt: skip
"""ONNX's types and the compiler's."""
_MATRIX_KINDS = ("matmul", "conv", "contract", "mmt4d", "batch_matmul", "matvec", "vecmat", "dot", "attention")

_POOL: dict[int, Any] = {}  # how many threads the runtime's pool of this process has → its device, once it was made
_POOL_LOCK = threading.Lock()
_SETTLING_S = 0.05  # for the pool's threads to release the last buffers before the process ends


_LACKS: Mapping[str, str] = {
    "bf16": 'its compiler crashes on convolutions in bfloat16 ("do not know how to split the result of this operator") on x86 without AVX-512',
    "int8": "it computes the matrix products of an int8 transformer in float32, and its compiler crashes on symmetric int8 convolutions",
    "int8-dynamic": "it multiplies what was quantised as 32-bit integers with 64-bit sums",
    "int4": "its importer does not know weights that are quantised by blocks",
    "fp8": "it was never seen to run 8-bit floats here",
}


class Iree(Backend):
    """The backend."""

    name: ClassVar[str] = "iree"
    requires: ClassVar[tuple[str, ...]] = ("iree.compiler", "iree.runtime")
    extra: ClassVar[str] = "iree"
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("onnx",),
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
        if (reason := _refuse_options(asked)) is not None:
            return reason
        wanted = asked.get("target_device", "local")
        # The original is measured on the target's device, so that must be the artifact's too.
        if target.device != _DEVICES[wanted]:
            pairs = ", ".join(f"{option} for {device}" for option, device in _DEVICES.items())
            return (
                f"iree's option target_device is {wanted}, which is for targets of the device {_DEVICES[wanted]}, not of "
                f"{target.device!r} ({pairs})"
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
        self,
        model: PortableModel,
        scheme: Scheme,
        target: Target,
        job_id: str,
        into: Path,
        calibration: SampleSet | None = None,  # the graph carries its calibration: no scheme here calibrates natively
    ) -> Artifact:
        asked = dict(target.options.get(self.name, {}))
        if (reason := self.refuse_target(target)) is not None:
            raise UsageError(reason)
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            _import(Path(model.path), Path(scratch) / "main.mlir")
            asked, note = _compile(asked, Path(scratch))
            (into / "model.vmfb").write_bytes((Path(scratch) / "main.vmfb").read_bytes())
        executed, needs, said = _read_back(into / "model.vmfb", asked, scheme, _own_types(Path(model.path)))
        artifact = describe(
            self,
            model,
            scheme,
            job_id,
            into,
            entry="model.vmfb",
            options={**asked, "needs": needs},
            executed=executed,
            notes=(*((note,) if note else ()), *said),
            not_runnable_here=_refuse_machine(needs) or "",
        )
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
        session = _IreeSession(
            Path(artifact.path) / artifact.entry, artifact.options["needs"]["device"], threads, artifact.signature
        )
        try:
            yield session
        finally:
            session.close()


class _IreeSession:
    """One loaded module. What a call answers lies in the runtime's memory, so what is handed out are copies."""

    def __init__(self, path: Path, device: str, threads: int, signature: Signature) -> None:
        import iree.runtime

        self.signature = signature
        try:
            self._device = _device(device, threads)
            instance = iree.runtime.VmInstance()
            module = iree.runtime.VmModule.mmap(instance, str(path))
            hal = iree.runtime.create_hal_module(instance, self._device)
            context = iree.runtime.VmContext(instance, [hal, module])
            self._call = iree.runtime.FunctionInvoker(context, self._device, module.lookup_function(_ENTRY))
        except (RuntimeError, ValueError, KeyError) as error:
            raise NothingCompiledError(f"IREE can't load the module: {_sentence(str(error))}") from error

    def run(self, batch: Batch) -> Batch:
        if self._call is None:
            raise UsageError("this session is closed; call it inside its context")
        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        given = [np.asarray(batch[spec.name], order="C") for spec in self.signature.inputs]
        try:
            answer = self._call(*given)
            several = answer if isinstance(answer, tuple) else () if answer is None else (answer,)
            arrays = [np.array(one.to_host()) for one in several]
        except Exception as error:  # what its runtime raises shares no base class
            raise NothingCompiledError(f"IREE could not run the module: {_sentence(str(error))}") from error
        if len(arrays) != len(self.signature.outputs):
            raise IntegrityError(f"the module has {len(arrays)} outputs, the model {len(self.signature.outputs)}")
        return {spec.name: _own(spec, array) for spec, array in zip(self.signature.outputs, arrays, strict=True)}

    def close(self) -> None:
        self._call = self._device = None


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

    The runtime makes its pool of threads once per process. A single thread needs none: it is the caller's own. A device with a pool stays until
    the process ends: taking it down waits for its threads with Python's lock held, and a thread that is about to give a buffer back waits
    for that lock, so that one session in three of a network with large weights never closed (IREE 3.13).
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
                found += (task / "comm").read_text().startswith("iree-worker")
        if found == expected:
            break
        time.sleep(0.01)
    return found


def _trials(model: PortableModel, target: Target) -> Iterator[Batch]:
    """Something of every batch size that the target names, where the sizes of all other dimensions are known. A first axis of a fixed size is no batch: an
    operator's weights may be an input."""
    fill = trial_filler(model)
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


def _refuse_options(given: Mapping[str, Any]) -> str | None:
    for key, value in given.items():
        allowed = _OPTIONS.get(key)
        if allowed is None:
            return f"iree has no option {key!r}; it has {', '.join(_OPTIONS)}"
        if isinstance(allowed, tuple) and value not in allowed:
            return f"iree's option {key} can't be {value!r}; it can be {', '.join(allowed)}"
        if allowed is bool and not isinstance(value, bool):
            return f"iree's option {key} must be true or false, not {value!r}"
        if allowed is int and not (
            type(value) is int and _SMALLEST_STACK <= value <= _LARGEST_STACK and value & (value - 1) == 0
        ):
            return (
                f"iree's option {key} must be a power of two from {_SMALLEST_STACK} to {_LARGEST_STACK}, not {value!r}"
            )
        if isinstance(allowed, re.Pattern) and not (isinstance(value, str) and allowed.fullmatch(value)):
            return f"iree's option {key} can't be {value!r}; it must look like {_EXAMPLES[key]}"
    device = given.get("target_device", "local")
    if device in _CHIP_FLAGS and "target_chip" not in given:
        return f"iree's target_device {device} needs the option target_chip, such as {_CHIPS[device]}"
    if device not in _CHIP_FLAGS and "target_chip" in given:
        return f"iree's target_device {device} takes no target_chip"
    for key in ("target_triple", "target_cpu", "target_features", "stack_limit"):
        if device != "local" and key in given:
            return f"iree's option {key} is for a CPU, and target_device is {device}"
    return None


_CHIPS = {"cuda": "sm_80", "vulkan": "ampere", "hip": "gfx942"}
_EXAMPLES = {
    "target_chip": "sm_80",
    "target_triple": "aarch64-linux-gnu (x86_64, aarch64, riscv64 or wasm32, then vendor and system)",
    "target_cpu": "cortex-a76",
    "target_features": "+dotprod,-sve",
}


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


# ---------------------------------------------------------------------------------------------------------- the compiler


def _import(source: Path, into: Path) -> None:
    """The graph in IREE's input form. Nodes keep their names, which the compiler's errors then tell."""
    import onnx
    from iree.compiler.extras import onnx_importer
    from iree.compiler.ir import Context

    model = onnx.load(source)
    model.graph.name = _ENTRY  # it names the function
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        with Context() as context:
            info = onnx_importer.ModelInfo(model)
            module = info.create_module(context=context).operation
            onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
            with into.open("wb") as file:
                module.write_bytecode(file)
    except (onnx_importer.OnnxImportError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise NothingCompiledError(f"IREE can't import the graph: {_sentence(str(error))}") from error


def _compile(asked: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Compile with what was asked for, and where the target leaves that open, without an optimisation that fails. Returns the options that were
    used, and what a reader should know.

    With aggressive fusion, the compiler's own default from O2 on, it fails on some graphs with a free batch; tiling may ask for too large a stack.
    """
    without: list[dict[str, bool]] = [{}]
    if asked.get("optimization", "O3") not in ("O0", "O1"):
        without += [{"aggressive_fusion": False}, {"aggressive_fusion": False, "data_tiling": False}]
    tries = [{**asked, **changed} for changed in without if not set(changed) & set(asked)]
    first = ""
    for number, options in enumerate(tries, 1):
        try:
            _run_compiler(_flags(options), folder)
        except NothingCompiledError as error:
            first = first or error.problem
            if number == len(tries):
                raise NothingCompiledError(first) from error
        else:
            changed = {key: value for key, value in options.items() if key not in asked}
            named = " and ".join(key.replace("_", " ") for key in changed)
            return options, f"compiled without {named}, since with it: {first}" if changed else ""
    raise AssertionError("there is always a first try")


def _flags(asked: Mapping[str, Any]) -> list[str]:
    device = asked.get("target_device", "local")
    flags = [
        f"--iree-hal-target-device={device}",
        f"--iree-opt-level={asked.get('optimization', 'O3')}",
        f"--iree-dispatch-creation-data-tiling={_word(asked.get('data_tiling', True))}",
        # Neither source positions nor symbols: they name files of this machine.
        "--iree-vm-bytecode-module-strip-source-map=true",
        "--iree-llvmcpu-debug-symbols=false",
    ]
    if "aggressive_fusion" in asked:
        flags.append(f"--iree-dispatch-creation-enable-aggressive-fusion={_word(asked['aggressive_fusion'])}")
    if device in _CHIP_FLAGS:
        flags.append(f"{_CHIP_FLAGS[device]}={asked['target_chip']}")
    if device == "local":
        triple = asked.get("target_triple", "")
        cpu = asked.get("target_cpu", "generic" if triple else "host")
        flags += [
            "--iree-hal-local-target-device-backends=llvm-cpu",
            f"--iree-llvmcpu-target-cpu={cpu}",
            f"--iree-llvmcpu-stack-allocation-limit={asked.get('stack_limit', _STACK)}",
            *([f"--iree-llvmcpu-target-triple={triple}"] if triple else []),
        ]
        if features := asked.get("target_features", ""):
            flags.append(f"--iree-llvmcpu-target-cpu-features={features}")
    return flags


def _word(value: bool) -> str:
    return "true" if value else "false"


def _run_compiler(flags: list[str], folder: Path) -> None:
    """`main.mlir` of the folder → `main.vmfb`, in a process of its own: a bug in the compiler ends that one."""
    from iree.compiler.tools.binaries import find_tool

    # Relative names: the compiler writes its input's into the module.
    command = [find_tool("iree-compile"), "main.mlir", *flags, "-o", "main.vmfb"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, errors="replace")  # noqa: S603 - the package's own program
    if done.returncode < 0:
        raise NothingCompiledError(f"IREE's compiler crashed with signal {-done.returncode}: {_why(done.stderr)}")
    if done.returncode:
        raise NothingCompiledError(f"IREE can't compile the graph: {_why(done.stderr)}")


def _why(printed: str) -> str:
    """The first error of the compiler, without what it prints of its own intermediate program."""
    for line in printed.splitlines():
        place, found, said = line.partition("error: ")
        if found:
            node = re.search(r'"([^"]+)"', place)
            return _sentence(said + (f" (node {node[1]!r})" if node else ""))
        if "LLVM ERROR: " in line:
            return _sentence(line.partition("LLVM ERROR: ")[2])
    return _sentence(printed) or "it says nothing"


def _sentence(said: str) -> str:
    """One line, without folders of this machine and without the compiler's own intermediate program."""
    said = without_folders(" ".join(said.split()))
    return said.partition(": %")[0][:400]


# ---------------------------------------------------------------------------------------------------- what was compiled


def _own_types(path: Path) -> tuple[str, ...]:
    """In what the source itself holds its inputs and weights, as the compiler calls the types."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    held = {tensor.data_type for tensor in graph.initializer} | {
        value.type.tensor_type.elem_type for value in graph.input
    }
    return tuple(
        sorted({_ELEMENT_TYPES[kind] for kind in map(onnx.TensorProto.DataType.Name, held) if kind in _ELEMENT_TYPES})
    )


def _read_back(
    path: Path, asked: Mapping[str, Any], scheme: Scheme, own: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What the module holds, what a machine needs to run it, and what a reader should know. Raises when it is not what was asked for.

    Args:
        own: Types of the source itself.
    """
    raw = path.read_bytes()
    found = _TARGET.search(raw)
    if found is None:
        raise NothingCompiledError("the compiled module does not say what it was compiled for")
    kind, form, described = (part.decode(errors="replace") for part in found.groups())
    fields = dict(re.findall(r'(\w+) = "([^"]*)"', described))
    device = asked.get("target_device", "local")
    if not kind.startswith(_FORMATS[device]) and not form.startswith(_FORMATS[device]):
        raise NothingCompiledError(f"IREE was asked to compile for {device} and compiled {kind}, {form}")
    triple = fields.get("target_triple", "")
    machine = triple.partition("-")[0]
    wanted = str(asked.get("target_triple", "")).partition("-")[0] or platform.machine()
    if device == "local" and machine != {"arm64": "aarch64", "AMD64": "x86_64"}.get(wanted, wanted):
        raise NothingCompiledError(f"IREE was asked to compile for {wanted} and compiled for {machine}")
    dispatches = _dispatches(raw)
    if not dispatches:
        raise NothingCompiledError("the compiled module holds no dispatch function: it computes nothing")
    features = _switched_on(fields.get("cpu_features", ""))
    precisions: Counter[str] = Counter(types for _, types in dispatches)
    heavy = Counter(types for name, types in dispatches if name.startswith(_MATRIX_KINDS))
    executed = {
        "providers": {f"{kind} ({form})": len(dispatches)},
        "ops": dict(sorted(Counter(name for name, _ in dispatches).items())),
        "precision": {"matrix_and_convolution": dict(sorted(heavy.items())), "all": dict(sorted(precisions.items()))},
        "target": {"device": device, "triple": triple, "cpu": fields.get("cpu", ""), "features": features},
    }
    needs = {"device": device, "chip": str(asked.get("target_chip", "")), "machine": machine, "features": features}
    return executed, needs, _judge(scheme, heavy, own)


def _judge(scheme: Scheme, heavy: Counter[str], own: Sequence[str] = ()) -> list[str]:
    """What to say of the precision. Raises when it was not taken: the types of a dispatch are those of its inputs, then that of its sums.

    A source that is not in float32 itself stays as it is where fp32 is asked for, which is no lowering.
    """
    wanted = {"fp32": "f32", "fp16": "f16"}[scheme.precision]
    others = {types: count for types, count in sorted(heavy.items()) if not types.startswith(wanted)}
    listed = ", ".join(f"{count} in {types}" for types, count in others.items())
    if scheme.precision == "fp32" and others and all(types.startswith(tuple(own)) for types in others):
        return [f"the source's own graph has matrix products that are not in float32: {listed}"]
    if heavy and len(others) == len(heavy):
        raise NothingCompiledError(
            f"the graph is {scheme.precision}, and IREE compiled none of its matrix products in it: {listed}"
        )
    return [f"some matrix products are not in {scheme.precision}: {listed}"] if others else []


def _dispatches(raw: bytes) -> list[tuple[str, str]]:
    """What every dispatch function does, and the types that it computes in, from its name."""
    names: dict[int, str] = {}
    for digits, rest in _DISPATCH.findall(raw):
        number, name = int(digits), rest.decode()
        # What follows a name in the file may run into it, so of several places the shortest is the name.
        if number not in names or len(name) < len(names[number]):
            names[number] = name
    found = []
    for _, name in sorted(names.items()):
        does, types = _DOES.match(name), _TYPES.findall(name.replace("_", " "))
        found.append((does[0] if does else name, types[-1] if types else "other"))
    return found


def _switched_on(features: str) -> list[str]:
    """The instruction sets that the code may use, by the operating system's names; a later word of the list wins."""
    state = {word[1:]: word[0] == "+" for word in features.split(",") if word}
    return [ours for theirs, ours in _FEATURES.items() if state.get(theirs)]
