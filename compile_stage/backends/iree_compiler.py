"""IREE's compiler: ONNX graphs and StableHLO programs to modules, in a process of its own."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from compile_stage.backends.iree_graph import fix_shapes, gather_before_strided_products, has_convolutions
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import PortableModel, Target
from compile_stage.plugin_support import onnx_weights
from compile_stage.plugin_support.artifacts import without_folders
from compile_stage.plugin_support.buckets import Shapes, bucket_name, buckets, refuse_buckets
from compile_stage.plugin_support.fixed_shapes import read_modules
from compile_stage.plugin_support.killed_compilers import CompilerKilledError

if TYPE_CHECKING:
    import onnx

# What one module is called, the shapes of its inputs, and what writes its program to a file.
Source: TypeAlias = tuple[str, Shapes, Callable[[Path], object]]

# A large matrix product of a transformer does not fit into the compiler's own default of 32 KiB; a thread of the
# runtime has 128 KiB.
_STACK = 65536

# A pass that writes a convolution of [batch, channels, height, width], as ONNX has it, with its channels last.
_CHANNELS_LAST = "iree-preprocessing-convert-conv-to-channels-last"

# The flag that names the chip, by device; a device without one takes no chip.
CHIP_FLAGS = {"cuda": "--iree-cuda-target", "vulkan": "--iree-vulkan-target", "hip": "--iree-rocm-target"}
_WITH_DOUBLES = ("local", "cuda", "hip")
"""Devices that compute in float64; for the others IREE's own choice stands."""
ENTRY = "main"
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)


def import_graph(model: onnx.ModelProto, into: Path) -> None:
    """The graph in IREE's input form. Nodes keep their names, which the compiler's errors then tell."""
    import onnx
    from iree.compiler.extras import onnx_importer
    from iree.compiler.ir import Context

    model.graph.name = ENTRY  # it names the function
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        gather_before_strided_products(model.graph)
        with Context() as context:
            info = onnx_importer.ModelInfo(model)
            module = info.create_module(context=context).operation
            onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
            with into.open("wb") as file:
                module.write_bytecode(file)
    except (onnx_importer.OnnxImportError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise NothingCompiledError(f"IREE can't import the graph: {one_line(str(error))}") from error


def compile_graph(
    model: PortableModel, asked: Mapping[str, Any], target: Target, scratch: Path, into: Path
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """An ONNX graph as files in `into`: one for each bucket of the target's shapes, or one `model.vmfb` for all of them
    where sizes stay free. Returns as `compile_modules` does, with no modules for the latter.

    Code for a free batch took up to twice the time (docs/decisions/0092).
    """
    why_free = refuse_buckets("iree", model.signature, target)
    if why_free and asked.get("shapes") == "fixed":
        raise UsageError(why_free)
    shapes = "free" if why_free else asked.get("shapes", "fixed")
    graph = onnx_weights.load_whole(model.path)
    defaults = {"channels_last": asked.get("target_device", "local") == "local" and has_convolutions(graph.graph)}

    def source(name: str, found: Shapes | None) -> Source:
        def write(path: Path) -> None:
            given = graph if found is None else fix_shapes(graph, model.signature, found)
            import_graph(given, path)

        return name, found or (), write

    fixed = buckets(model.signature, target) if shapes == "fixed" else []
    sources = [source(bucket_name(model.signature, found), found) for found in fixed] or [source("model", None)]
    options, modules, notes = _compile_all(sources, asked, defaults, scratch, into, doubles=_has_doubles(model))
    if why_free:
        notes.append(f"compiled for free shapes, which is slower than for fixed ones: {why_free}")
    return {**options, "shapes": shapes}, modules if fixed else [], notes


def compile_modules(
    model: PortableModel, asked: Mapping[str, Any], scratch: Path, into: Path
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The modules of a StableHLO model as files in `into`. Returns the options that were used for all of them, file and
    shapes of each, and what a reader should know.

    The importer takes no sizes that are computed (`dynamic_reshape`), so there is a module for each shape.
    """

    sources = [(one.file.stem, one.shapes, partial(shutil.copyfile, one.file)) for one in read_modules(model)]
    return _compile_all(sources, asked, {}, scratch, into, doubles=_has_doubles(model))


def _compile_all(
    sources: Sequence[Source],
    asked: Mapping[str, Any],
    defaults: Mapping[str, Any],
    scratch: Path,
    into: Path,
    *,
    doubles: bool,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The largest comes first, since what can't be optimised fails there."""
    options, modules, notes = dict(asked), [], []
    for name, shapes, write in reversed(sources):
        write(scratch / "main.mlir")
        options, note = _compile_module(options, defaults, scratch, doubles=doubles)
        (into / f"{name}.vmfb").write_bytes((scratch / "main.vmfb").read_bytes())
        modules.append({"file": f"{name}.vmfb", "shapes": [list(shape) for shape in shapes]})
        notes += [note] if note and note not in notes else []
    return {**defaults, **options}, modules[::-1], notes


def _compile_module(
    asked: Mapping[str, Any], defaults: Mapping[str, Any], folder: Path, *, doubles: bool
) -> tuple[dict[str, Any], str]:
    """Compile with what was asked for, and where the target leaves that open, without an optimisation that fails.
    Returns what was asked for with what was left out, and what a reader should know.

    With aggressive fusion, the compiler's own default from O2 on, it fails on some graphs with a free batch; tiling may
    ask for too large a stack.
    """
    first = ""
    tries = list(_tries(asked, defaults))
    for number, changed in enumerate(tries, 1):
        try:
            _run_compiler(_flags({**defaults, **asked, **changed}, doubles=doubles), folder)
        except CompilerKilledError:  # no optimisation failed
            raise
        except NothingCompiledError as error:
            first = first or error.problem
            if number == len(tries):
                raise NothingCompiledError(first) from error
        else:
            named = " and ".join(key.replace("_", " ") for key in changed)
            return {**asked, **changed}, f"compiled without {named}, since with it: {first}" if changed else ""
    raise AssertionError("there is always a first try")


def _tries(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[dict[str, bool]]:
    """What to leave out, first nothing, then more and more of what the target leaves open."""
    left_out: dict[str, bool] = {}
    yield left_out
    fuses = asked.get("optimization", "O3") not in ("O0", "O1")
    for key, by_default in (("aggressive_fusion", fuses), ("data_tiling", fuses), *defaults.items()):
        if by_default and key not in asked:
            left_out = {**left_out, key: False}
            yield left_out


def _has_doubles(model: PortableModel) -> bool:
    """Whether an input or an output is float64."""
    return any(spec.dtype == "float64" for spec in (*model.signature.inputs, *model.signature.outputs))


def _flags(asked: Mapping[str, Any], *, doubles: bool) -> list[str]:
    device = asked.get("target_device", "local")
    tiles = bool(asked.get("data_tiling", True))
    flags = [
        f"--iree-hal-target-device={device}",
        f"--iree-opt-level={asked.get('optimization', 'O3')}",
        f"--iree-dispatch-creation-data-tiling={_word(tiles)}",
        # Neither source positions nor symbols: they name files of this machine.
        "--iree-vm-bytecode-module-strip-source-map=true",
        "--iree-llvmcpu-debug-symbols=false",
    ]
    if doubles and device in _WITH_DOUBLES:
        # IREE computes float64 as float32 by itself, which the proof judges. Inputs and outputs then have four bytes a
        # number, where the caller's have eight, and every call fails.
        flags.append("--iree-input-demote-f64-to-f32=false")
    if tiles and device == "local":
        # From O2 on, products become general loops, which are not laid out anew: data tiling would do nothing.
        flags.append("--iree-opt-generalize-matmul=false")
    if asked.get("channels_last"):
        flags.append(f"--iree-preprocessing-pass-pipeline=builtin.module(util.func({_CHANNELS_LAST}))")
    if "aggressive_fusion" in asked:
        flags.append(f"--iree-dispatch-creation-enable-aggressive-fusion={_word(asked['aggressive_fusion'])}")
    if device in CHIP_FLAGS:
        flags.append(f"{CHIP_FLAGS[device]}={asked['target_chip']}")
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
    """`main.mlir` of the folder → `main.vmfb`, in a process of its own: a bug in the compiler ends that one. Whose
    process is killed is run once more.

    Raises:
        CompilerKilledError: It was killed again.
        NothingCompiledError: It can't compile the program.
    """
    from iree.compiler.tools.binaries import find_tool

    # Relative names: the compiler writes its input's into the module.
    command = [find_tool("iree-compile"), "main.mlir", *flags, "-o", "main.vmfb"]
    run = partial(subprocess.run, command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace")
    done = run()
    if done.returncode in _KILLED and (done := run()).returncode in _KILLED:
        raise CompilerKilledError("IREE's compiler")
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
            return one_line(said + (f" (node {node[1]!r})" if node else ""))
        if "LLVM ERROR: " in line:
            return one_line(line.partition("LLVM ERROR: ")[2])
    return one_line(printed) or "it says nothing"


def one_line(said: str) -> str:
    """One line, without folders of this machine and without the compiler's own intermediate program."""
    said = without_folders(" ".join(said.split()))
    return said.partition(": %")[0][:400]
