"""PyTorch's own compiler, ahead of time: AOTInductor.

The artifact is a package with a shared library: the program in C++, compiled for this machine's instruction set, and
its weights; for an NVIDIA GPU also kernels, which Triton compiled for that GPU (`inductor_cuda.py`). Making it takes a
C++ compiler; loading it takes PyTorch alone, whose library kernels it calls, and runs none of the model's Python. What
was compiled is read back from the generated source: its calls of library kernels, its own fused loops or kernels, and
the types of its weights.

`open` needs nothing but torch and numpy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.backends import inductor_cuda
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.environment import hardware
from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form
from compile_stage.plugin_support.killed_compilers import CompilerKilledError
from compile_stage.plugin_support.options import FLAG, Option, refuse_options, valid_options
from compile_stage.plugin_support.recorded_calls import OPTION as CUDA_GRAPHS
from compile_stage.plugin_support.recorded_calls import record_where_possible
from compile_stage.plugin_support.sessions import in_place_or_copied
from compile_stage.plugin_support.torch_cuda import CUDA, exact_fp32, moved
from compile_stage.plugin_support.torch_programs import TorchSession, free_axes, opened

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_ENTRY = "model.pt2"

# Options of a target, and what holds when it says nothing.
_DEFAULTS: Mapping[str, bool] = {
    "freezing": True,  # weights are constants: folded into their neighbours, and packed for the kernels
    "max_autotune": False,  # matrix products are timed in several forms while the model is compiled
}
_OPTIONS: Mapping[str, Option] = dict.fromkeys((*_DEFAULTS, CUDA_GRAPHS), FLAG)

_HALVES = {"fp16": "float16", "bf16": "bfloat16"}  # precision → PyTorch's name of the type

_NOT_DRIVEN = "PyTorch's quantisers are not driven by this backend"
_LACKS = {
    "fp16": "Inductor computes float16 on a CPU by way of float32, so nothing would be gained",
    "bf16": "this CPU has no bfloat16 instructions",
    "int8": _NOT_DRIVEN,
    "int8-dynamic": _NOT_DRIVEN,
    "int4": _NOT_DRIVEN,
    "fp8": "Inductor has no kernels for it on a CPU",
}
_LACKS_ON_CUDA = dict.fromkeys(("int8", "int8-dynamic", "int4", "fp8"), _NOT_DRIVEN)

# Generated code calls a kernel of a library through a function of this name, which says whose kernel it is.
_KERNEL_CALL = re.compile(r"\bAOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_(?:cpu|cuda)_(\w+)\(")
_PROXY_CALL = re.compile(r"\baoti_torch_(?:proxy_executor_)?call_(?:function|dispatcher)\(")
_LOOP_CALL = re.compile(r"^\s+cpp_(?:CppMicroGemm\w*|fused\w*|\w*gemm\w*|\w*bmm\w*)\(", re.MULTILINE)
_TRITON_CALL = re.compile(r"^\s+call_(?!function|dispatcher)\w+\(", re.MULTILINE)
_WEIGHT_TYPE = re.compile(r"constants_info_\[(\d+)\]\.dtype = cached_torch_dtype_(\w+);")
_WEIGHT_SHAPE = re.compile(r"constants_info_\[(\d+)\]\.shape = \{([^}]*)\};")
_MATRIX_OPS = re.compile(r"convolution|linear|mm\b|mm_|matmul|attention|lstm|gru|rnn", re.IGNORECASE)


_KILLED = "killed"
_LATE_PROBE = re.compile(r"VecISA dlopen probe for (.+) hung")
_COMPILER_SCRIPT = """\
#!/bin/sh
for attempt in 1 2; do
    said=$(LC_ALL=C '{real}' "$@" {flags} 2>&1 >&3)
    code=$?
    case "$code $said" in
        137*|*"Killed signal terminated"*|*"command failed due to signal"*|*"execute command: Killed"*) ;;
        *) break ;;
    esac
    [ $attempt = 1 ] || : > '{killed}'
done 3>&1
[ -z "$said" ] || printf '%s\\n' "$said" >&2
exit $code
"""


class Inductor(Backend):
    """The backend."""

    name: ClassVar[str] = "inductor"
    requires: ClassVar[tuple[str, ...]] = ("torch",)
    extra: ClassVar[str] = "torch"
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("torch-export",),
        devices=("cpu", CUDA),
        precisions=("fp32", "fp16", "bf16"),
        runtime=("torch",),
        lacks=_LACKS,
        times_kernels=True,
    )

    def toolchain(self) -> Mapping[str, str]:
        return {**package_versions("torch", "numpy"), **_compiler_version()}

    def refuse_target(self, target: Target) -> str | None:
        if (reason := super().refuse_target(target)) is not None:
            return reason
        if sys.platform not in ("linux", "darwin"):
            return f"inductor is served on Linux and macOS; {sys.platform} is not served by this backend yet"
        if not _compiler_version():
            return (
                f"inductor needs a C++ compiler, and {_compiler()} can't be run here: install g++, or name one in CXX"
            )
        if target.device == CUDA and (reason := _refuse_cuda()):
            return reason
        if target.device != CUDA and CUDA_GRAPHS in target.options.get(self.name, {}):
            return f"inductor's option {CUDA_GRAPHS} needs a target with device: cuda, and it is {target.device}"
        return refuse_options(self.name, _OPTIONS, target)

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        halves = {CUDA: tuple(_HALVES), "cpu": ("bf16",) if hardware().multiplies_bf16 else ()}
        if target.device in halves and precision in ("fp32", *halves[target.device]):
            return (Scheme(precision=precision, name=precision, native=True),)
        return ()

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        if target.device == CUDA:  # Triton's kernels are timed in several forms whatever is asked
            return replace(self.capabilities, times_kernels=True, lacks=_LACKS_ON_CUDA)
        return replace(self.capabilities, times_kernels=bool(target.options.get(self.name, {}).get("max_autotune")))

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        return refuse_form(self, model, target)

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        asked = valid_options(self.name, _OPTIONS, target)
        into.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {**_DEFAULTS, **asked}
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            built = _build(model, scheme, target.device, options, Path(scratch))
            executed, notes = _read_back(built, scheme)
            _write_package(built, into / _ENTRY)
        if target.device == CUDA:
            start = partial(_opened_calls, into / _ENTRY, model.signature)
            options, said = record_where_possible({**options, "device": CUDA}, model.signature, target, start)
            notes += said
        compiled = Compiled(entry=_ENTRY, options=options, executed=executed, notes=notes)
        return describe(self, model, scheme, job_id, into, compiled)

    def open(self, artifact: Artifact, threads: int) -> AbstractContextManager[Session]:
        path = Path(artifact.path) / artifact.entry
        if artifact.options.get("device") == CUDA:
            package = _loaded(path, for_recording=True)
            return inductor_cuda.opened(package, artifact.signature, threads, artifact.options)
        return opened(_InductorSession(_loaded(path), artifact.signature, threads))


def _loaded(path: Path, *, for_recording: bool = False) -> Any:
    """A package, in which one call runs at a time.

    What `torch._inductor.aoti_load_package` wraps, without the compiler that its module imports (6 s and 90 MB). The
    package holds one model, called `model`.
    """
    import torch

    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", for_recording, 1, -1)
    except RuntimeError as error:
        raise NothingCompiledError(f"PyTorch can't load the package: {_sentence(error)}") from error


def _opened_calls(
    path: Path, signature: Signature, options: Mapping[str, Any]
) -> AbstractContextManager[inductor_cuda.PackageOnCuda]:
    return inductor_cuda.opened_calls(_loaded(path, for_recording=True), signature, options)


class _InductorSession(TorchSession):
    """One loaded package. It allocates new outputs for every call, so they are the caller's."""

    def _answers(self, arrays: Sequence[Array]) -> Iterator[Array]:
        import torch

        # The generated code reads memory in row-major order, whatever the strides say, and tensors must be writeable.
        tensors = [torch.from_numpy(in_place_or_copied(array)) for array in arrays]
        with torch.no_grad():
            answers = self._program.run(tensors)
        kept = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for answer in answers:
            shared = answer.untyped_storage().data_ptr() in kept
            kept.add(answer.untyped_storage().data_ptr())  # two outputs may be one tensor
            yield answer.clone().numpy() if shared else answer.numpy()


# ---------------------------------------------------------------------------------------------- what it needs and takes


def _compiler() -> str:
    """The C++ compiler that Inductor calls."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _compiler_version() -> dict[str, str]:
    """Its name and version, for cache keys; empty when there is none."""
    return _version_of(_compiler())


@cache
def _version_of(compiler: str) -> dict[str, str]:
    if (found := shutil.which(compiler)) is None:
        return {}
    try:
        done = subprocess.run(  # noqa: S603 - the user's compiler
            [found, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    return {Path(found).name: lines[0].strip()} if lines else {}


# ----------------------------------------------------------------------------------------------------------- compiling


def _refuse_cuda() -> str | None:
    """Why nothing is compiled for a GPU here, as far as can be said without importing PyTorch."""
    if not hardware().accelerators:
        return "inductor compiles for the GPU that is here, and this machine has no NVIDIA GPU"
    version = package_versions("torch").get("torch", "")
    if (build := version.partition("+")[2]) and not build.startswith("cu"):
        return f"PyTorch {version} is built without CUDA: install a build for the CUDA of this machine's driver"
    return None


def _build(model: PortableModel, scheme: Scheme, device: str, options: Mapping[str, bool], scratch: Path) -> Path:
    """The package as Inductor writes it, below `scratch`, where all of its caches are too."""
    import torch

    settings: dict[str, Any] = {
        **{name: options[name] for name in _DEFAULTS},
        # The number of threads is asked for when the model runs, not written into the loops.
        "cpp.dynamic_threads": True,
        "cpp.cxx": (None, str(_wrap_compiler(scratch))),
        "compile_threads": 1,
        # A cache beside all others, in a place of the user's own, which no setting moves.
        "cpp_cache_precompile_headers": False,
        "aot_inductor.precompile_headers": False,
        # For profilers; it names every file that was read.
        "aot_inductor.enable_line_tables": False,
    }
    if device == CUDA:
        inductor_cuda.demand_gpu(scheme.precision)
    with _quiet(), _caches_in(scratch / "caches"), exact_fp32():
        try:
            program = torch.export.load(model.path)
            if device != "cpu":
                program = moved(program, device)
            if half := _HALVES.get(scheme.precision):
                program = _in_half(program, model.signature, device, half)
            if device == "cpu":
                with torch._inductor.config.patch(_known(settings)):
                    _try_vector_instructions()
            with torch.no_grad():
                built = torch._inductor.aoti_compile_and_package(
                    program,
                    package_path=str(scratch / _ENTRY),
                    inductor_configs=_known(settings),
                )
        except NothingCompiledError:
            raise
        except Exception as error:  # what fails in a compiler of Python shares no base class
            _demand_unkilled(scratch)
            raise NothingCompiledError(f"Inductor can't compile the program: {_sentence(error)}") from error
    _demand_unkilled(scratch)
    return Path(built)


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the installed PyTorch knows. It refuses others, and some are younger than the oldest version
    that the extra asks for."""
    import torch._inductor.config

    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in settings.items() if name in known}


def _try_vector_instructions() -> None:
    """Have Inductor try which sets of vector instructions the machine has, with no set left out for want of time.

    It loads a small library for each set in a process of its own, and takes a set for missing whose process needs more
    than 60 s: on a machine with hardly any CPU to spare, Python takes as long to start. The code is slower then, and
    nothing but a warning says so. What it found is kept for the process, so it is tried once more with that forgotten.

    Raises:
        NothingCompiledError: It took as long again.
    """
    from torch._inductor import cpu_vec_isa

    late: list[str] = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cpu_vec_isa.pick_vec_isa()
        late = [found[1] for one in said if (found := _LATE_PROBE.search(str(one.message)))]
        if not late:
            return
        sets = {cls for one in cpu_vec_isa.supported_vec_isa_list for cls in type(one).__mro__}
        for kept in (cpu_vec_isa.valid_vec_isa_list, *(one for cls in sets for one in vars(cls).values())):
            getattr(kept, "cache_clear", lambda: None)()
    raise NothingCompiledError(
        f"Inductor could not tell whether this machine has {' and '.join(late)}: the process that tries it took longer "
        "than 60 s, twice. Without these vector instructions the code would be slower",
        fix="run again when the machine is less busy",
    )


def _wrap_compiler(scratch: Path) -> Path:
    """A script in front of the compiler. Inductor lets no flag through, and without this one the paths of the machine
    are in the library.

    A compiler that is killed is run once more. Inductor tries each set of vector instructions with a small program, and
    would take one whose compiler was killed for one that the compiler lacks: the code is slower then, and nothing says
    so."""
    import torch

    real = shutil.which(_compiler())
    maps = {str(scratch): ".", str(Path(torch.__file__).parent): "torch"}
    flags = " ".join(f"'-ffile-prefix-map={path}={name}'" for path, name in maps.items())
    script = scratch / "bin" / Path(_compiler()).name  # Inductor tells by the name which compiler it is
    script.parent.mkdir()
    script.write_text(_COMPILER_SCRIPT.format(real=real, flags=flags, killed=scratch / _KILLED), encoding="utf-8")
    script.chmod(0o700)
    return script


def _demand_unkilled(scratch: Path) -> None:
    """Raise CompilerKilledError where it was."""
    if (scratch / _KILLED).exists():
        raise CompilerKilledError("the C++ compiler")


@contextmanager
def _caches_in(folder: Path) -> Iterator[None]:
    """What Inductor reads from the environment at every use: where its caches are."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    if "distutils" in sys.modules and "setuptools" not in sys.modules:
        # Inductor imports setuptools, which refuses to replace a distutils that somebody else of this process has
        # imported.
        places["SETUPTOOLS_USE_DISTUTILS"] = "stdlib"
    before = {name: os.environ.get(name) for name in places}
    os.environ.update(places)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations between PyTorch's own parts
        yield


def _in_half(program: Any, signature: Signature, device: str, half: str) -> Any:
    """The program with matrix products and convolutions in a type of 16 bits, and in float32 what PyTorch's autocast
    leaves there. Its inputs are flat, in the same order; inputs and outputs keep their types.

    Args:
        half: `float16` or `bfloat16`.
    """
    import torch

    tree = torch.utils._pytree
    module, in_spec = program.module(), program.call_spec.in_spec
    types = [getattr(torch, spec.dtype) for spec in signature.outputs]

    class Flat(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            args, kwargs = tree.tree_unflatten(list(tensors), in_spec)
            with torch.autocast(device, getattr(torch, half)):
                leaves = tree.tree_leaves(self.module(*args, **kwargs))
            return tuple(leaf.to(kind) for leaf, kind in zip(leaves, types, strict=True))

    example = tuple(tree.tree_leaves(program.example_inputs))
    free = free_axes(signature)
    with torch.no_grad():
        return torch.export.export(Flat(), example, dynamic_shapes=(free,))


# ------------------------------------------------------------------------------------------------------- what was made


def _read_back(package: Path, scheme: Scheme) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the generated source calls, and in what types its weights are. Raises when the precision that was asked for
    was not taken."""
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".wrapper.cpp")]
    if len(sources) != 1:
        raise NothingCompiledError(
            f"the package should hold one generated source and holds {len(sources)}, so what it executes can't be read "
            "back"
        )
    source = sources[0]
    kernels = Counter(_KERNEL_CALL.findall(source))
    mkldnn = sum(count for name, count in kernels.items() if "mkldnn" in name or "pointwise" in name)
    loops, by_name = len(_LOOP_CALL.findall(source)), len(_PROXY_CALL.findall(source))
    on_gpu = len(_TRITON_CALL.findall(source))
    providers = {
        "oneDNN": mkldnn, "ATen": kernels.total() - mkldnn, "ATen, by name": by_name, "generated loops": loops,
        "Triton": on_gpu,
    }  # fmt: skip
    ops = {**kernels, "operator called by name": by_name, "generated loop": loops, "generated kernel": on_gpu}
    shapes = dict(_WEIGHT_SHAPE.findall(source))
    weights = Counter(
        kind for number, kind in _WEIGHT_TYPE.findall(source) if len(shapes.get(number, "").split(",")) > 1
    )
    if not any(providers.values()):
        raise NothingCompiledError("the generated source computes nothing: the program only hands on what it is given")
    executed = {
        "providers": {name: count for name, count in providers.items() if count},
        "ops": {name: count for name, count in sorted(ops.items()) if count},
        "precision": {
            "matrix_and_convolution": sum(n for name, n in kernels.items() if _MATRIX_OPS.search(name)),
            "weights": dict(sorted(weights.items())),
        },
    }
    half = _HALVES.get(scheme.precision, "")
    if half and not weights[half]:
        raise NothingCompiledError(
            f"Inductor was asked for {scheme.precision}, and none of the program's weights is in {half}"
        )
    if not half and (halves := sorted(set(_HALVES.values()) & set(weights))):
        return executed, (f"the source itself keeps weights in {' and '.join(halves)}",)
    if half and (rest := weights["float32"]):
        return executed, (f"{weights[half]} weights are in {half}, {rest} in float32",)
    return executed, ()


def _write_package(built: Path, target: Path) -> None:
    """The package without the generated source, whose comments hold the paths of this machine. Nothing reads it."""
    with zipfile.ZipFile(built) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if not name.endswith(".cpp"):
                with old.open(name) as source, new.open(zipfile.ZipInfo(name), "w", force_zip64=True) as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)


def _sentence(error: Exception) -> str:
    """What it says first, without the trace of the compiler's own calls."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Exception raised from", "frame #", "File "))]
    return (" ".join(said) or type(error).__name__)[:600]
