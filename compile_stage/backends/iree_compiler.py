"""IREE's compiler: an ONNX graph to a module, in a process of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import PortableModel
from compile_stage.plugin_support.artifacts import without_folders
from compile_stage.plugin_support.fixed_shapes import read_modules

# A large matrix product of a transformer does not fit into the compiler's own default of 32 KiB; a thread of the
# runtime has 128 KiB.
_STACK = 65536


# The flag that names the chip, by device; a device without one takes no chip.
CHIP_FLAGS = {"cuda": "--iree-cuda-target", "vulkan": "--iree-vulkan-target", "hip": "--iree-rocm-target"}
ENTRY = "main"


def import_graph(source: Path, into: Path) -> None:
    """The graph in IREE's input form. Nodes keep their names, which the compiler's errors then tell."""
    import onnx
    from iree.compiler.extras import onnx_importer
    from iree.compiler.ir import Context

    model = onnx.load(source)
    model.graph.name = ENTRY  # it names the function
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        with Context() as context:
            info = onnx_importer.ModelInfo(model)
            module = info.create_module(context=context).operation
            onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
            with into.open("wb") as file:
                module.write_bytecode(file)
    except (onnx_importer.OnnxImportError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise NothingCompiledError(f"IREE can't import the graph: {one_line(str(error))}") from error


def compile_module(asked: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Compile with what was asked for, and where the target leaves that open, without an optimisation that fails.
    Returns the options that were used, and what a reader should know.

    With aggressive fusion, the compiler's own default from O2 on, it fails on some graphs with a free batch; tiling may
    ask for too large a stack.
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


def compile_modules(
    model: PortableModel, asked: Mapping[str, Any], scratch: Path, into: Path
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The modules of a StableHLO model as files in `into`. Returns the options that were used for all of them, file and
    shapes of each, and what a reader should know.

    The importer takes no sizes that are computed (`dynamic_reshape`), so there is a module for each shape. The largest
    comes first, since what can't be optimised fails there.
    """
    options, modules, notes = dict(asked), [], []
    for module in reversed(read_modules(model)):
        (scratch / "main.mlir").write_bytes(module.file.read_bytes())
        options, note = compile_module(options, scratch)
        name = f"{module.file.stem}.vmfb"
        (into / name).write_bytes((scratch / "main.vmfb").read_bytes())
        modules.append({"file": name, "shapes": [list(shape) for shape in module.shapes]})
        notes += [note] if note else []
    return options, modules[::-1], notes


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
            return one_line(said + (f" (node {node[1]!r})" if node else ""))
        if "LLVM ERROR: " in line:
            return one_line(line.partition("LLVM ERROR: ")[2])
    return one_line(printed) or "it says nothing"


def one_line(said: str) -> str:
    """One line, without folders of this machine and without the compiler's own intermediate program."""
    said = without_folders(" ".join(said.split()))
    return said.partition(": %")[0][:400]
