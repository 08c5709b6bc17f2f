"""ExecuTorch with XNNPACK, PyTorch's runtime for phones and small devices, on this machine's CPU.

The artifact is one `.pte` file. XNNPACK takes the parts of the program that it has kernels for; the rest runs in
ExecuTorch's portable operators, which are written to run anywhere, not to be fast. Which nodes went where, and in what
types, is read back from the file itself.

`open` needs nothing but executorch's extension module, torch and numpy: not the compiler, whose import takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.backends.executorch_program import DELEGATE, compile_program, read_back, sentence
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.artifacts import Compiled, describe
from compile_stage.plugin_support.compiler import Compiler
from compile_stage.plugin_support.options import FLAG, Option, valid_options
from compile_stage.plugin_support.pool_threads import PoolCores
from compile_stage.plugin_support.sessions import demand_call, in_place_or_copied, quiet_logs

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_ENTRY = "model.pte"
_METHOD = "forward"

_LACKS = {
    "fp16": "this backend does not drive XNNPACK's float16 kernels",
    "bf16": "this backend does not drive XNNPACK's bfloat16 kernels",
    "int4": "this backend does not drive the quantisers that pack blocks for XNNPACK",
    "fp8": "XNNPACK has no 8-bit floats",
}

# ExecuTorch's numbers for the types of elements.
_DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 11: "bool",
}  # fmt: skip


class ExecuTorch(Compiler):
    """The backend."""

    name: ClassVar[str] = "executorch"
    requires: ClassVar[tuple[str, ...]] = ("executorch", "torch", "torchao")
    extra: ClassVar[str] = "executorch"
    options: ClassVar[Mapping[str, Option]] = {"affinity": FLAG}
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("torch-export",),
        devices=("cpu",),
        precisions=("fp32", "int8", "int8-dynamic"),
        runtime=("executorch", "torch"),
        opens_with=("executorch", "torch"),
        follows_others=True,
        artifact_is_code=False,
        lacks=_LACKS,
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("executorch", "torch", "torchao", "numpy")

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        return (_SCHEMES[precision],) if target.device == "cpu" and precision in _SCHEMES else ()

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := super().refuse(model, target)) is not None:
            return reason
        try:
            _bounds(model.signature, target)
        except UsageError as error:
            return error.problem
        return None

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        if (reason := self.refuse_target(target)) is not None:
            raise UsageError(reason)
        if scheme.precision == "int8" and calibration is None:
            raise UsageError("int8 needs calibration samples: set data.calibration in the policy")
        bounds = _bounds(model.signature, target)
        into.mkdir(parents=True, exist_ok=True)
        with quiet_logs():
            program = compile_program(model, scheme, bounds, calibration)
            (into / _ENTRY).write_bytes(program)
            executed, notes = read_back(program, scheme, _runtime()._get_operator_names())
        session = _ExecuTorchSession(into / _ENTRY, model.signature, target.threads, pinned=False)
        try:
            limits = session.limits
        finally:
            session.close()
        _demand_room(bounds, limits)
        largest = {sizes[axis] for sizes, axes in zip(limits, bounds, strict=True) for axis in axes if axis == 0}
        if largest:
            notes += (f"takes batches of at most {min(largest)}, the largest that it was compiled for",)
        options = valid_options(self.name, self.options, target)
        compiled = Compiled(entry=_ENTRY, options=options, executed=executed, notes=notes)
        return describe(self, model, scheme, job_id, into, compiled)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        pinned = bool(artifact.options.get("affinity", True))
        session = _ExecuTorchSession(Path(artifact.path) / artifact.entry, artifact.signature, threads, pinned=pinned)
        try:
            yield session
        finally:
            session.close()


_SCHEMES: Mapping[str, Scheme] = {
    "fp32": Scheme(precision="fp32", name="fp32", native=True),
    "int8": Scheme(
        precision="int8", name="int8-xnnpack", native=True, activations="int8", weights="int8", calibrates=True
    ),
    "int8-dynamic": Scheme(precision="int8-dynamic", name="int8-dynamic-xnnpack", native=True, weights="int8"),
}


# ---------------------------------------------------------------------------------------------------------- the session

# The threads of ExecuTorch are one pool of the process, and a loaded program keeps the address of the pool that it was
# loaded with. So there is one lock, and before the pool is replaced every open session lets go of its program; it loads
# it again at its next call.
_LOCK = threading.RLock()
_OPEN: weakref.WeakSet[_ExecuTorchSession] = weakref.WeakSet()


class _ExecuTorchSession:
    """One loaded program. Its outputs are copies, so they are the caller's.

    Attributes:
        limits: By input, the sizes that the program has room for.
    """

    def __init__(self, path: Path, signature: Signature, threads: int, *, pinned: bool) -> None:
        import torch

        self.signature = signature
        self._path = path
        self._threads, self._pinned = threads, pinned
        self._method: Any = None
        self._closed = False
        self._from_numpy = torch.from_numpy
        self._inputs = [spec.name for spec in signature.inputs]
        self._outputs = [spec.name for spec in signature.outputs]
        self._fitting: set[tuple[tuple[int, ...], ...]] = set()  # shapes that the program has room for
        _OPEN.add(self)
        with _LOCK:
            meta = self._ready().method_meta()
        self.limits = tuple(tuple(meta.input_tensor_meta(at).sizes()) for at in range(meta.num_inputs()))
        _demand_same(signature, meta)

    def run(self, batch: Batch) -> Batch:
        demand_call(self.signature, batch, closed=self._closed)
        arrays = [batch[name] for name in self._inputs]
        shapes = tuple([array.shape for array in arrays])  # a list first: a generator takes longer
        if shapes not in self._fitting:
            self._demand_fitting(shapes)
            self._fitting.add(shapes)
        tensors = [self._from_numpy(in_place_or_copied(array)) for array in arrays]
        with _LOCK:
            program = self._ready()
            _POOL.cores.leave()
            answers = program(tensors, True)  # True: copies, not the program's own memory
        return {name: answer.numpy() for name, answer in zip(self._outputs, answers, strict=True)}

    def close(self) -> None:
        with _LOCK:
            self._closed, self._method = True, None
            _OPEN.discard(self)

    def let_go(self) -> None:
        """Unload the program; the next call loads it again."""
        self._method = None

    def _ready(self) -> Any:
        """The loaded program, with the pool that the session wants."""
        if (_POOL.threads, _POOL.pinned) != (self._threads, self._pinned):
            for session in list(_OPEN):
                session.let_go()
            _POOL.make(self._threads, pinned=self._pinned)
        if self._method is None:
            try:
                self._method = _runtime()._load_program(str(self._path)).load_method(_METHOD)
            except RuntimeError as error:
                raise NothingCompiledError(f"ExecuTorch can't load the program: {sentence(error)}") from error
        return self._method

    def _demand_fitting(self, shapes: Sequence[tuple[int, ...]]) -> None:
        for spec, shape, room in zip(self.signature.inputs, shapes, self.limits, strict=True):
            if any(size > limit for size, limit in zip(shape, room, strict=True)):
                raise UsageError(
                    f"input {spec.name!r} of shape {list(shape)} is larger than the program has room for, "
                    f"{list(room)}: "
                    "compile it with larger batch_sizes or shapes of the target"
                )


class _Pool:
    """The process's pool of threads.

    Attributes:
        threads: As it was last made here; 0 before.
        pinned: As was asked: each thread has a core of its own, where there is one for each.
        cores: Those that they were pinned to.
    """

    def __init__(self) -> None:
        self.threads, self.pinned, self.cores = 0, False, PoolCores()

    def make(self, threads: int, *, pinned: bool) -> None:
        """Replace the pool. No session may have its program loaded. Raises UsageError."""
        runtime, self.threads, self.cores = _runtime(), 0, PoolCores()
        with _silent():  # it tells of the new number on standard error
            runtime._unsafe_reset_threadpool(1)  # one of the wanted number would be kept, with its threads
            with self.cores.pinned(threads, wanted=pinned):
                runtime._unsafe_reset_threadpool(threads)
        # Noted, and not asked for at each call: that takes 3 us, and a call of a small network 57.
        if (made := runtime._threadpool_get_thread_count()) != threads:
            raise UsageError(f"ExecuTorch was asked for {threads} threads and runs {made}")
        self.threads, self.pinned = threads, pinned


_POOL = _Pool()


def _runtime() -> Any:
    """ExecuTorch's extension module. `executorch.runtime` wraps it, and imports the whole compiler for a warning (7
    s)."""
    import importlib

    import torch  # noqa: F401 - the extension needs its libraries loaded

    name = "executorch.extension.pybindings._C"
    if name in sys.modules:
        return sys.modules[name]
    with _silent(), quiet_logs():
        runtime = importlib.import_module(name)
        runtime._threadpool_get_thread_count()  # makes the pool, and tells of the CPU on standard error
    if DELEGATE not in runtime._get_registered_backend_names():
        raise NothingCompiledError("this build of ExecuTorch has no XNNPACK")
    return runtime


def _demand_same(signature: Signature, meta: Any) -> None:
    """An input or output that was lost or retyped on the way is an error here, not a surprise later. Names are not in
    the file: order counts."""
    inputs = [meta.input_tensor_meta(at) for at in range(meta.num_inputs())]
    outputs = [meta.output_tensor_meta(at) for at in range(meta.num_outputs())]
    for word, specs, found in (("inputs", signature.inputs, inputs), ("outputs", signature.outputs, outputs)):
        wanted = [(spec.dtype, len(spec.shape)) for spec in specs]
        have = [(_DTYPES.get(info.dtype(), str(info.dtype())), len(info.sizes())) for info in found]
        if wanted != have:
            listed = "; ".join(f"{dtype} of {rank} dimensions" for dtype, rank in have)
            raise IntegrityError(
                f"the {word} changed on the way: the model has {'; '.join(map(str, specs))}, the program {listed}"
            )


# --------------------------------------------------------------------------------------------------------------- shapes


def _bounds(signature: Signature, target: Target) -> tuple[dict[int, tuple[int, int]], ...]:
    """By input, each free axis with the smallest and the largest size that the program must take: memory is planned for
    the largest. Where the two are the same the axis is fixed, which a quarter less time compiles.

    The batch goes from 1 up to the largest of the target's sizes.

    Raises:
        UsageError: Another axis is free, and the policy does not say between which sizes.
    """
    found = []
    for spec in signature.inputs:
        axes: dict[int, tuple[int, int]] = {}
        given = target.shapes.get(spec.name)
        for axis, size in enumerate(spec.shape):
            if isinstance(size, int):
                continue
            if axis and given is None:
                raise UsageError(
                    f"axis {axis} of input {spec.name!r} is free, and ExecuTorch plans memory for the largest size: "
                    f"give its min, typical and max shape under shapes.{spec.name} of the target"
                )
            low, high = (given.min[axis], given.max[axis]) if given is not None else (1, 1)
            if axis == 0:
                low, high = min(low, *target.batch_sizes), max(high, *target.batch_sizes)
            axes[axis] = (low, high)
        found.append(axes)
    return tuple(found)


def _demand_room(bounds: Sequence[Mapping[int, tuple[int, int]]], limits: Sequence[Sequence[int]]) -> None:
    for at, (axes, sizes) in enumerate(zip(bounds, limits, strict=True)):
        for axis, (_, high) in axes.items():
            if sizes[axis] < high:
                raise NothingCompiledError(
                    f"the program must take {high} along axis {axis} of input {at}, and ExecuTorch planned memory for "
                    f"{sizes[axis]}"
                )


# ---------------------------------------------------------------------------------------------------------------- quiet


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what ExecuTorch's C++ writes by way of Python's standard error; its package has no setting for that."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
