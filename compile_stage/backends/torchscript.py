"""TorchScript: the program traced, frozen and saved as PyTorch has long served models.

A row to compare with: PyTorch calls it deprecated, and its kernels are those of the original. The program's own module
is traced on one example, and traced operators are kept only while they answer alike at other batch sizes. What runs is
read back from the frozen graph.

`open` needs nothing but torch and numpy.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.artifacts import Compiled, describe
from compile_stage.plugin_support.compiler import Compiler
from compile_stage.plugin_support.sessions import in_place_or_copied
from compile_stage.plugin_support.torch_programs import TorchSession, flat_module, opened

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_ENTRY = "model.pt"
_LACKS = "TorchScript runs a traced program in the types it was traced in"

# Operators of the frozen graph that look at shapes or put values together, and compute nothing.
_NO_KERNELS = ("prim::", "aten::size", "aten::Int", "aten::ScalarImplicit", "aten::__", "aten::sym_")


class TorchScript(Compiler):
    """Traces, freezes and saves a PyTorch program; fp32 on CPUs only."""

    name: ClassVar[str] = "torchscript"
    requires: ClassVar[tuple[str, ...]] = ("torch",)
    extra: ClassVar[str] = "torch"
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("torch-export",),
        devices=("cpu",),
        precisions=("fp32",),
        runtime=("torch",),
        lacks={"*": _LACKS},
        profiler="compile_stage.plugin_support.torch_profiler:profile_artifact",
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("torch", "numpy")

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        if target.device == "cpu" and precision == "fp32":
            return (Scheme(precision="fp32", name="fp32", native=True),)
        return ()

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        if (reason := self.refuse_target(target)) is not None:
            raise UsageError(reason)
        into.mkdir(parents=True, exist_ok=True)
        with _quiet():
            traced = _trace(model, into / _ENTRY)
            executed = _read_back(traced)
        return describe(self, model, scheme, job_id, into, Compiled(entry=_ENTRY, executed=executed))

    def open(self, artifact: Artifact, threads: int) -> AbstractContextManager[Session]:
        return opened(_ScriptSession(Path(artifact.path) / artifact.entry, artifact.signature, threads))


class _ScriptSession(TorchSession):
    """One loaded module. What it answers is the caller's: copied where it is memory of an input or of a weight."""

    def __init__(self, path: Path, signature: Signature, threads: int) -> None:
        loaded = _load(path)
        super().__init__(loaded, signature, threads)
        self._own = {constant.data_ptr() for constant in _constants(loaded)}

    def _answers(self, arrays: Sequence[Array]) -> Iterator[Array]:
        import torch

        tensors = [torch.from_numpy(in_place_or_copied(array)) for array in arrays]
        # The executor would profile the first calls and then compile anew, for each shape again.
        with torch.no_grad(), torch.jit.optimized_execution(False):
            answers = self._program(*tensors)
        kept = self._own | {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for answer in answers:
            shared = answer.untyped_storage().data_ptr() in kept
            kept.add(answer.untyped_storage().data_ptr())  # two outputs may be one tensor
            yield answer.clone().numpy() if shared else answer.numpy()


def _load(path: Path) -> Any:
    import torch

    try:
        with _quiet():
            return torch.jit.load(str(path), map_location="cpu")
    except RuntimeError as error:
        raise NothingCompiledError(f"PyTorch can't load the module: {_sentence(error)}") from error


# -------------------------------------------------------------------------------------------------------------- tracing


def _trace(model: PortableModel, target: Path) -> Any:
    """The program's module as a frozen TorchScript module that takes its inputs flat and answers with a tuple, and
    `target`, the file of it.

    Raises:
        NothingCompiledError: It can't be traced, or what is read from the file answers otherwise, at the example's or
            another size: tracing writes sizes down where the program computes with them, and a file keeps less than
            the trace in memory.
    """
    import torch

    tree = torch.utils._pytree
    program = torch.export.load(model.path)
    flat = flat_module(program)
    _open_sizes(flat.module)
    _cast_whole_numbers(flat.module)
    example = tuple(tree.tree_leaves(program.example_inputs))
    try:
        with torch.no_grad():
            traced = torch.jit.freeze(torch.jit.trace(flat, example, check_trace=False))
    except Exception as error:  # what a module's Python raises shares no base class
        raise NothingCompiledError(f"PyTorch can't trace the program: {_sentence(error)}") from error
    _write(traced, target)
    loaded = _load(target)
    for tensors in (example, *_other_sizes(model.signature, example)):
        _demand_same(flat, loaded, tensors)
    return traced


def _open_sizes(module: Any) -> None:
    """Let the tracer follow sizes. The program asks for them by an operator that can't be traced, and hands them on to
    operators of a kind whose sizes are written down as numbers; PyTorch's own methods of the same name do both. The
    hook that checks inputs can't be traced either."""
    import torch

    module._forward_pre_hooks.clear()
    sizes = set()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.sym_size.int:
            node.target = torch.Tensor.size
            sizes.add(node)
        elif sizes.intersection(node.all_input_nodes) and isinstance(node.target, torch._ops.OpOverload):
            name = node.target._schema.name.partition("::")[2]
            node.target = getattr(torch.Tensor, name, None) or getattr(torch, name, node.target)
        elif sizes.intersection(node.all_input_nodes):  # arithmetic of sizes
            sizes.add(node)
    module.recompile()


def _cast_whole_numbers(module: Any) -> None:
    """Have whole numbers that meet a number with a fraction (`arange(n) + 0.5`) cast to the result's type first. The
    trace keeps that number as a tensor of float64, and what is read from a file promotes them to float64 by it."""
    import torch

    for node in list(module.graph.nodes):
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if dtype is None or not dtype.is_floating_point or not any(isinstance(given, float) for given in node.args):
            continue
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            if isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex):
                with module.graph.inserting_before(node):
                    cast = module.graph.call_function(torch.ops.aten.to.dtype, (given, dtype))
                node.replace_input_with(given, cast)
    module.recompile()


def _other_sizes(signature: Signature, example: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The example at other sizes, one and all free dimensions larger by 1 and by 3."""
    import torch

    symbols = sorted({size for spec in signature.inputs for size in spec.shape if isinstance(size, str)})
    batch = {spec.batch for spec in signature.inputs if isinstance(spec.batch, str)}
    changes: list[dict[str, int | None]] = [dict.fromkeys(symbols, more) for more in (1, 3)]
    changes += [{symbol: 2} for symbol in symbols]
    changes += [dict.fromkeys(batch, None)]
    for change in changes if symbols else []:
        taken = []
        for spec, tensor in zip(signature.inputs, example, strict=True):
            grown = tensor
            for axis, symbol in enumerate(spec.shape):
                if isinstance(symbol, str) and symbol in change:
                    more = change[symbol]
                    size = 1 if more is None else tensor.shape[axis] + more
                    rows = torch.arange(size) % tensor.shape[axis]
                    grown = grown.index_select(axis, rows)
            taken.append(grown.contiguous())
        yield tuple(taken)


def _demand_same(flat: Any, traced: Any, tensors: tuple[Any, ...]) -> None:
    import torch

    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    with torch.no_grad():
        try:
            wanted = flat(*(tensor.clone() for tensor in tensors))
        except (RuntimeError, IndexError):  # a size that the program does not take either, such as an odd height
            return
        try:
            with torch.jit.optimized_execution(False):
                found = traced(*(tensor.clone() for tensor in tensors))
        except RuntimeError as error:
            raise NothingCompiledError(
                f"the trace takes no inputs of {shapes}, though the program does: {_sentence(error)}"
            ) from error
    for one, other in zip(wanted, found, strict=True):
        same = one.shape == other.shape and one.dtype == other.dtype
        if not same or not torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise NothingCompiledError(f"the trace answers otherwise than the program for inputs of {shapes}")


def _write(traced: Any, target: Path) -> None:
    """The archive as PyTorch writes it, without the debugging records, which hold the paths of this machine, and a
    number that it draws."""
    import torch

    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if not name.endswith((".debug_pkl", "/.data/serialization_id")):
                new.writestr(zipfile.ZipInfo(name), old.read(name))


def _constants(module: Any) -> Iterator[Any]:
    import torch

    graph = module.inlined_graph  # its nodes live as long as it does
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            yield node.t("value")
    yield from (value for value in (*module.parameters(), *module.buffers()) if isinstance(value, torch.Tensor))


def _read_back(traced: Any) -> dict[str, Any]:
    """Operators of the frozen graph, and the types of its weights."""
    graph = traced.inlined_graph  # its nodes live as long as it does
    kinds = Counter(node.kind() for node in graph.nodes())
    ops = {kind: count for kind, count in sorted(kinds.items()) if not kind.startswith(_NO_KERNELS)}
    if not ops:
        raise NothingCompiledError("the traced graph computes nothing: the program only hands on what it is given")
    weights = Counter(str(value.dtype).removeprefix("torch.") for value in _constants(traced) if value.dim() > 1)
    return {
        "providers": {"ATen": sum(ops.values())},
        "ops": ops,
        "precision": {"weights": dict(sorted(weights.items()))},
    }


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # PyTorch says at every call that TorchScript is deprecated; so do our documents
        yield


def _sentence(error: Exception) -> str:
    """What it says last, without the traced program's own lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("RuntimeError", "Error"))] or lines[-1:]
    return (" ".join(errors) or type(error).__name__)[:600]
