"""Apache TVM (Relax) on a CPU, through LLVM.

The artifact is one shared library with a function for each bucket of the target's shapes (`plugin_support.buckets`):
TVM's kernels are made for fixed shapes. Kernels that nobody tuned are plain loops, fifty times slower than others'; so
the backend tunes within the policy's `budget.tuning_trials`, keeps what it measured, and takes what earlier runs
measured (`backends.tvm_tuning`).

`open` needs TVM's runtime library, tvm_ffi and numpy. It does not import `tvm`, which would load the compiler.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core import tuning_records
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.digest import digest_of
from compile_stage.core.environment import available_cores
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Samples, Session
from compile_stage.core.records import Artifact, Budget, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support import onnx_weights
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form, refuse_types, trial_filler
from compile_stage.plugin_support.buckets import Router, Shapes, bucket_name, buckets, padding_note, refuse_buckets
from compile_stage.plugin_support.options import Number, Option, refuse_options, valid_options
from compile_stage.plugin_support.sessions import demand_call

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

# Options of a target.
_OPTIONS: Mapping[str, Option] = {"trials": Number(low=0), "tuning_minutes": Number(low=0, whole=False)}
_TUNING_SHARE = 0.6  # of a job's time; the rest is for the build and the proof

_LACKS = {
    "fp16": "its kernels would convert every float16 to float32 and back; no gain was ever measured",
    "bf16": "its kernels would convert every bfloat16 to float32 and back; no gain was ever measured",
    "int8": "it runs a quantised ONNX graph operator by operator, with float32 between them",
    "int8-dynamic": "it runs a quantised ONNX graph operator by operator, with float32 between them",
    "int4": "it has no kernels that read 4-bit weights",
    "fp8": "it has no kernels for 8-bit floats on a CPU",
}

# What TVM looks for, in its order (tvm.support.cc.get_cc).
_LINKERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")

_CPU, _POOLED = 1, 2  # DLPack's device type; TVM's allocator that keeps buffers between calls
_SHARE_ALL_CORES = -3  # of runtime.config_threadpool: no thread is bound to a core of its own
_ROOM = 8  # workers of a pool at least, sleeping or not: another session may want more threads than there are cores
_ALIGNMENT = 64  # bytes; what TVM's kernels assume of a tensor


class Tvm(Backend):
    """The backend."""

    name: ClassVar[str] = "tvm"
    requires: ClassVar[tuple[str, ...]] = ("tvm", "tvm_ffi")
    extra: ClassVar[str] = "tvm"
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("onnx",),
        devices=("cpu",),
        precisions=("fp32",),
        runtime=("apache-tvm", "apache-tvm-ffi"),
        lacks=_LACKS,
        times_kernels=True,
        tunes=True,
        keeps_tuning_records=True,
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("apache-tvm", "apache-tvm-ffi", "xgboost-cpu", "xgboost", "onnx", "numpy")

    def refuse_target(self, target: Target) -> str | None:
        if (reason := super().refuse_target(target)) is not None:
            return reason
        if _linker() is None:
            return (
                "tvm links its kernels with a C++ compiler, and none is installed: apt-get install g++, or name one in "
                "CXX"
            )
        if (reason := refuse_options(self.name, _OPTIONS, target)) is not None:
            return reason
        here = importlib.util.find_spec("tvm") is not None  # its toolchain brings what tuning needs
        if target.options.get(self.name, {}).get("trials") and here and importlib.util.find_spec("xgboost") is None:
            return "tvm tunes with a model of its measurements, which needs xgboost: pip install xgboost-cpu"
        return None

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        if target.device != "cpu" or precision != "fp32":
            return ()
        return (Scheme(precision="fp32", name="fp32", native=True),)

    def budget_options(self, budget: Budget) -> Mapping[str, Any]:
        return {"trials": budget.tuning_trials, "tuning_minutes": budget.job_minutes * _TUNING_SHARE}

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        """Each trial is timed."""
        return replace(self.capabilities, times_kernels=bool(target.options.get(self.name, {}).get("trials")))

    def records_key(self, target: Target, packages: Mapping[str, str]) -> str | None:
        """Without trials, those that lie in the cache are used, and none are asked for."""
        from compile_stage.backends.tvm_tuning import records_key

        trials, version = target.options.get(self.name, {}).get("trials"), packages.get("apache-tvm")
        return records_key(version, target.threads) if trials and version else None

    def refuse_record(self, name: str, content: bytes) -> str | None:
        from compile_stage.backends.tvm_tuning import refuse_record

        return refuse_record(name, content)

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := refuse_form(self, model, target) or refuse_types(model.signature)) is not None:
            return reason
        if (reason := refuse_buckets(self.name, model.signature, target)) is not None:
            return reason
        try:
            _read(model, buckets(model.signature, target)[:1])
        except NothingCompiledError as error:
            return error.problem
        return None

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        from compile_stage.backends.tvm_tuning import RecordStore, records_key, tune

        asked = valid_options(self.name, _OPTIONS, target)
        if (reason := refuse_buckets(self.name, model.signature, target)) is not None:
            raise UsageError(reason)
        into.mkdir(parents=True, exist_ok=True)
        _use_threads(target.threads)  # before the compiler runs anything, since it makes the pool by its own count
        shapes = buckets(model.signature, target)
        module, machine = _read(model, shapes), _machine(target.threads)
        with _quietly():
            fused = _fuse(module, machine)
            database, tuned = tune(
                fused,
                machine,
                RecordStore(tuning_records.folder_of(records_key(self.toolchain()["apache-tvm"], target.threads))),
                trials=int(asked.get("trials", 0)),
                seconds=60 * float(asked.get("tuning_minutes", Budget().job_minutes * _TUNING_SHARE)),
                threads=target.threads,
            )
            kernels = _build(fused, machine, database, into / "model.so")
        options = {
            "functions": [
                {"name": bucket_name(model.signature, sizes), "shapes": [list(shape) for shape in sizes]}
                for sizes in shapes
            ]
        }
        executed, notes = _read_back(into / "model.so", options, target.threads, model, kernels)
        # The files are named by their content, so the digest of the names pins what the kernels were chosen by.
        pinned = {"records": len(tuned.records), "records_digest": digest_of(tuned.records)}
        executed["tuning"] |= {"trials": tuned.trials, **(pinned if tuned.records else {})}
        notes += tuple(filter(None, [padding_note(model.signature, shapes)]))
        if tuned.stopped:
            notes += (
                f"time ended tuning after {tuned.trials} trials: with a larger budget.job_minutes it goes on from "
                "there",
            )
        compiled = Compiled(entry="model.so", options=options, executed=executed, notes=notes)
        return describe(self, model, scheme, job_id, into, compiled)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        session = _TvmSession(Path(artifact.path) / artifact.entry, artifact.options, threads, artifact.signature)
        try:
            yield session
        finally:
            session.close()


class _TvmSession:
    """One open library. Inputs are copied to aligned buffers of the session, outputs out of TVM's pool."""

    def __init__(self, path: Path, options: Mapping[str, Any], threads: int, described: Signature) -> None:
        import tvm_ffi

        _use_threads(threads)
        self.library = tvm_ffi.load_module(str(path))
        machine = self.library["vm_load_executable"]()
        machine["vm_initialization"](_CPU, 0, _POOLED)
        self.signature = described
        self._threads = threads
        self._functions: dict[Shapes, tuple[Any, list[Any], list[Any]]] = {}
        for one in options["functions"]:
            shapes = tuple(tuple(shape) for shape in one["shapes"])
            buffers = [_aligned(shape, spec.dtype) for shape, spec in zip(shapes, described.inputs, strict=True)]
            tensors = [tvm_ffi.from_dlpack(buffer) for buffer in buffers]
            self._functions[shapes] = (machine[one["name"]], buffers, tensors)
        self._router = Router("tvm", described, tuple(self._functions))

    def run(self, batch: Batch) -> Batch:
        import numpy as np

        demand_call(self.signature, batch, closed=not self._functions)
        bucket, arrays = self._router.fit(batch)
        function, buffers, tensors = self._functions[bucket]
        _use_threads(self._threads)
        for buffer, array in zip(buffers, arrays, strict=True):
            np.copyto(buffer, array)
        try:
            answer = function(*tensors)
            outputs = [answer] if len(self.signature.outputs) == 1 and hasattr(answer, "__dlpack__") else list(answer)
            arrays = [np.from_dlpack(value) for value in outputs]
        except Exception as error:  # its checks raise all kinds
            raise NothingCompiledError(f"TVM could not run the graph: {_sentence(error)}") from error
        named = {spec.name: array for spec, array in zip(self.signature.outputs, arrays, strict=True)}
        return {name: value.copy() for name, value in self._router.cut(batch, bucket, named).items()}

    def close(self) -> None:
        self._functions.clear()
        self.library = None


# ------------------------------------------------------------------------------------------------------------ refusals


def _linker() -> str | None:
    named = os.environ.get("CXX") or os.environ.get("CC")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, _LINKERS)), None)


# ---------------------------------------------------------------------------------------------------------------- build


def _read(model: PortableModel, shapes: list[Shapes]) -> Any:
    """One Relax function for each of the shapes. Raises NothingCompiledError when TVM can't read the graph."""

    with _quietly():
        import tvm
        from tvm.relax.frontend.onnx import from_onnx

        graph, whole = onnx_weights.load_whole(model.path), tvm.IRModule()
        names = [spec.name for spec in model.signature.inputs]
        for sizes in shapes:
            try:
                given = dict(zip(names, map(list, sizes), strict=True))
                module = from_onnx(graph, shape_dict=given, keep_params_in_input=False)
            except Exception as error:  # whatever its front end raises
                raise NothingCompiledError(f"TVM can't read the graph: {_sentence(error)}") from error
            _demand_tensors(module["main"], model.signature)
            whole = _added(whole, module, bucket_name(model.signature, sizes))
    return whole


def _added(whole: Any, module: Any, name: str) -> Any:
    """`whole` with the function of one shape, and with the kernels that TVM's front end wrote for it (Einsum): they
    come under the same names for every shape, so that each gets one of its own here."""
    from tvm import relax
    from tvm.relax.expr_functor import PyExprMutator, mutator

    builder = relax.BlockBuilder(whole)
    own = {
        var: builder.add_func(function, f"{name}_{var.name_hint}")
        for var, function in module.functions.items()
        if var.name_hint != "main"
    }

    @mutator
    class Renamed(PyExprMutator):  # type: ignore[misc]  # its class is not typed
        def visit_global_var_(self, var: Any) -> Any:
            return own.get(var, var)

    whole = builder.get()
    whole[name] = Renamed().visit_expr(module["main"]).with_attr("global_symbol", name)
    return whole


def _demand_tensors(function: Any, described: Signature) -> None:
    """TVM keeps what ONNX's Shape answers as sizes of its own kind, which it hands out as such where they are an
    output."""
    from tvm import relax

    found = function.ret_ty
    fields = found.fields if isinstance(found, relax.TupleType) else [found]
    for spec, field in zip(described.outputs, fields, strict=True):
        if not isinstance(field, relax.TensorType):
            raise NothingCompiledError(
                f"TVM makes sizes of the output {spec.name!r} (operator Shape), which are no tensor: leave it out of "
                "the outputs"
            )


def _machine(threads: int) -> Any:
    """This processor. LLVM knows it by name and takes that for all of its features; a virtual machine may hide some, so
    each is named."""
    import tvm
    import tvm_ffi
    from tvm.target import codegen

    features = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return tvm.target.Target(
        {
            "kind": "llvm",
            "mtriple": codegen.llvm_get_system_triple(),
            "mcpu": codegen.llvm_get_system_cpu(),
            "mattr": sorted(f"{'+' if int(has) else '-'}{name}" for name, has in features.items()),
            "num-cores": threads,
        }
    )


def _fuse(module: Any, machine: Any) -> Any:
    """Operators as loops, merged with their neighbours: what is tuned, and what records are found by."""
    import tvm
    from tvm.relax import transform
    from tvm.relax.backend.cpu_generic import pipeline

    passes = [
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        *pipeline.library_dispatch_passes(machine),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FoldConstant(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.RewriteDataflowReshape(),  # before tuning: a view of a tensor is no kernel
    ]
    try:
        with machine:
            return tvm.transform.Sequential(passes)(module)
    except Exception as error:  # its passes raise all kinds
        raise NothingCompiledError(f"TVM can't lower the graph: {_sentence(error)}") from error


def _build(fused: Any, machine: Any, database: Any, out: Path) -> dict[str, tuple[str, bool]]:
    """Write the library; kernel → the type that it answers in, and whether it was tuned."""
    import tvm
    from tvm import relax
    from tvm.relax import transform
    from tvm.relax.backend.cpu_generic import pipeline

    lower = tvm.transform.Sequential(
        [*pipeline.dataflow_lower_passes(machine), *pipeline.finalize_passes(machine)], name="lower"
    )
    try:
        with machine, database:
            scheduled = transform.MetaScheduleApplyDatabase(enable_warning=False)(fused)
        built = relax.build(scheduled, target=machine, relax_pipeline=lower)
        with tempfile.TemporaryDirectory() as scratch:
            built.export_library(str(out), workspace_dir=scratch, options=["-Wl,--build-id=none", "-s"])
    except Exception as error:
        raise NothingCompiledError(f"TVM can't build the graph: {_sentence(error)}") from error
    return {
        variable.name_hint: (str(function.params[-1].dtype), bool(function.attrs.get("tirx.is_scheduled", False)))
        for variable, function in scheduled.functions.items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }


# ------------------------------------------------------------------------------------------------------ what really ran


def _read_back(
    path: Path, options: Mapping[str, Any], threads: int, model: PortableModel, kernels: Mapping[str, tuple[str, bool]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the library calls, from its own listing; each function is run once. Raises when what it answers is not what
    the model says."""
    described, fill = model.signature, trial_filler(model)
    session = _TvmSession(path, options, threads, described)
    try:
        for one in options["functions"]:
            trial = {spec.name: fill(spec, shape) for spec, shape in zip(described.inputs, one["shapes"], strict=True)}
            _demand_same(described, session.run(trial))
        listing = str(session.library["as_text"]())
    finally:
        session.close()
    calls = Counter(name for name in re.findall(r"^\s+call\s+(\S+)", listing, re.MULTILINE) if name in kernels)
    if not calls:
        raise NothingCompiledError(
            "TVM compiled no kernel: the model hands its inputs on, or is left to functions of TVM's runtime (NonZero, "
            "Unique)"
        )
    types: Counter[str] = Counter()
    tuned: Counter[bool] = Counter()
    for name, count in calls.items():
        dtype, scheduled = kernels[name]
        types[dtype] += count
        tuned[scheduled] += count
    executed = {
        "providers": {"llvm": sum(calls.values())},
        "ops": dict(sorted(calls.items())),
        "precision": {"all": dict(sorted(types.items()))},
        "tuning": {"tuned": tuned[True], "untuned": tuned[False]},
    }
    if not tuned[False]:
        return executed, ()
    left = (
        f"{tuned[False]} of {sum(calls.values())} kernels are not tuned, which makes them slow: raise "
        "budget.tuning_trials"
    )
    return executed, (left,)


def _demand_same(described: Signature, answer: Batch) -> None:
    for spec in described.outputs:
        value = answer[spec.name]
        if value.dtype.name != spec.dtype or value.ndim != len(spec.shape):
            raise IntegrityError(
                f"output {spec.name!r} changed on the way: the model has {spec}, TVM answers "
                f"{value.dtype}{list(value.shape)}"
            )


# -------------------------------------------------------------------------------------------------------------- runtime


_configured = threading.local()


def _use_threads(threads: int) -> None:
    """Let TVM's pool run kernels on so many threads. The pool is of the calling thread, and can't grow once it is made,
    so it is made large enough for all cores. None of its threads is bound to a core, which the process may not own."""
    if getattr(_configured, "threads", None) == threads:
        return
    _load_runtime()
    import tvm_ffi

    room = [str(core) for core in range(max(threads, available_cores(), _ROOM))]
    tvm_ffi.get_global_func("runtime.config_threadpool")(_SHARE_ALL_CORES, threads, room)
    taken = int(tvm_ffi.get_global_func("runtime.NumThreads")())
    if taken != threads:
        raise UsageError(
            f"TVM was asked for {threads} threads and takes {taken}: this thread made TVM's pool before, with that "
            "many",
            fix="open the model in a process or thread of its own, or set TVM_NUM_THREADS before",
        )
    _configured.threads = threads


def _load_runtime() -> None:
    os.environ.setdefault("TVM_BIND_THREADS", "0")  # TVM reads it whenever it makes or configures a pool
    # A worker without a task, used or not, yields 300,000 times before it sleeps: seconds on a busy machine, where each
    # yield waits, so that it counted as at work between turns. A thousand, half a millisecond, outlast the gap between
    # two kernels.
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "1000")
    if "tvm" in sys.modules:
        return
    import ctypes

    import tvm_ffi  # noqa: F401 - the library below needs what it loads

    spec = importlib.util.find_spec("tvm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    ending = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    found = [file for folder in folders for file in sorted(Path(folder, "lib").glob(f"*tvm_runtime.{ending}"))]
    if not found:
        raise IntegrityError(f"Apache TVM's runtime library is not where its package keeps it ({', '.join(folders)})")
    ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)


def _aligned(shape: tuple[int, ...], dtype: str) -> Any:
    """An array of zeros at an address that TVM's kernels take."""
    import numpy as np

    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    space = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -space.ctypes.data % _ALIGNMENT
    return space[start : start + size].view(kind).reshape(shape)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Its warnings are about its own insides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sentence(error: Exception) -> str:
    """The last line that says something, without the places in TVM's source."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("File ", "at ", "^"))]
    return (said[-1] if said else type(error).__name__)[:600]
