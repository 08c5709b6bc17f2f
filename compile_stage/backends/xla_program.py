"""From a PyTorch program to StableHLO: torchax's operators, traced by JAX. Needed to compile, not to open.

torchax writes PyTorch's operators in JAX. Here the program's graph is run node by node with them, so that JAX sees the
whole; two traps are taken care of at each node. JAX halves 64-bit types by default, and with that switched off some of
torchax's float32 operators compute in float64 (pooling does). So 64-bit types are on for the nodes that have any, and
off elsewhere; and each answer gets the type that the program says.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_stage.backends.xla_depthwise import depthwise
from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

# What the program demands of its sizes; they are fixed and known here, and PyTorch checked them when it exported.
_CHECKS = ("_assert", "sym_constrain")

_BYTECODE = b"ML\xefR"

# Operators that do the arithmetic of a network: in bf16 they get bfloat16, as under PyTorch's autocast.
_MATRIX_OPS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linear", "matmul", "mv", "dot")


@dataclass
class Program:
    """A PyTorch program that JAX can run.

    Attributes:
        run: `(weights, inputs) → outputs`, for JAX to trace.
        weights: By name, in the order in which `run` takes them; those that nothing reads are left out.
        types: Of all its tensors, as PyTorch names them: `float32`, `int64`, ...
    """

    run: Any
    weights: Mapping[str, Array]
    types: frozenset[str]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the deprecations between the parts of PyTorch, torchax and JAX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read(path: str, signature: Signature, half: bool) -> Program:
    """The program in `path`, as `torch.export.save` wrote it.

    Args:
        half: Matrix products and convolutions get bfloat16.

    Raises:
        NothingCompiledError: It can't be read, changes what it is given or keeps, or needs an operator that torchax
            lacks.
    """
    import torch

    with quiet():
        operators, decompositions = _torchax()
        try:
            program = torch.export.load(path).run_decompositions().run_decompositions(decompositions)
        except Exception as error:  # what fails in PyTorch's tracer shares no base class
            raise NothingCompiledError(f"PyTorch can't read or take apart the program: {_sentence(error)}") from error
    _demand_pure(program, signature)
    _demand_operators(program.graph, operators)
    weights, places = _weights(program)
    interpreter = _interpreter(program.graph_module, operators, half)
    steady = sum(1 for spec in program.graph_signature.input_specs if spec.kind.name != "USER_INPUT")

    def run(given: Sequence[Any], inputs: Sequence[Any]) -> Any:
        kept: list[Any] = [None] * steady
        for place, value in zip(places, given, strict=True):
            kept[place] = value
        return tuple(interpreter.run(*kept, *inputs, enable_io_processing=False))

    values = (node.meta.get("val") for node in program.graph.nodes)
    types = frozenset(_type_name(value.dtype) for value in values if isinstance(value, torch.Tensor))
    return Program(run=run, weights=weights, types=types)


def to_stablehlo(
    program: Program, inputs: Sequence[tuple[tuple[int, ...], str]], constants: bool, device: Any
) -> tuple[bytes, str]:
    """The program for these inputs (shape and type of each): as StableHLO for the compiler, and as text for people, in
    which large constants are left out.

    Args:
        constants: The weights are a part of the program; else they are its first arguments.
        device: Where JAX computes what does not depend on the inputs; without it, JAX starts a client for every device
            that it finds.

    Raises:
        NothingCompiledError: JAX can't trace it.
    """
    import jax

    weights = list(program.weights.values())
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs]

    def with_constants(*inputs: Any) -> Any:
        # As JAX's arrays: NumPy's can't be indexed by what is traced (`table[ids]`).
        return program.run([jax.numpy.asarray(weight) for weight in weights], inputs)

    def with_arguments(*arguments: Any) -> Any:
        return program.run(arguments[: len(weights)], arguments[len(weights) :])

    if not constants:
        given = [*(jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in weights), *given]
    function = with_constants if constants else with_arguments
    function.__name__ = "model"
    try:
        with quiet(), jax.enable_x64(True), jax.default_device(device):
            traced = jax.jit(function, keep_unused=True).trace(*given)
            module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
            return _written(module, len(given))
    except NothingCompiledError:
        raise
    except Exception as error:  # JAX and torchax raise what they like
        raise NothingCompiledError(f"JAX can't trace the program: {_sentence(error)}") from error


def from_portable(content: bytes) -> tuple[bytes, str]:
    """A module in StableHLO's lasting form, or its text, as `to_stablehlo` gives one. Raises NothingCompiledError when
    it can't be read."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context() as context:
        try:
            if content.startswith(_BYTECODE):
                module = stablehlo.deserialize_portable_artifact(context, content)
            else:
                module = ir.Module.parse(content.decode())
        except Exception as error:  # MLIR's own errors share no base class
            raise NothingCompiledError(f"XLA can't read the StableHLO module: {_sentence(error)}") from error
        code = io.BytesIO()
        module.operation.write_bytecode(code)
        return code.getvalue(), module.operation.get_asm(large_elements_limit=16)


def _written(module: Any, arguments: int) -> tuple[bytes, str]:
    """Without debug information, which names files of this machine."""
    from jax.extend import mlir as _  # noqa: F401 - makes the module's context known
    from jaxlib.mlir import passmanager

    with module.context:
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
    (main,) = (op for op in module.body.operations if getattr(op, "sym_name", None) and op.sym_name.value == "main")
    if len(main.type.inputs) != arguments:
        raise NothingCompiledError(
            f"JAX was given {arguments} arguments, and the program that it wrote takes {len(main.type.inputs)}"
        )
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return code.getvalue(), module.operation.get_asm(large_elements_limit=16)


# ---------------------------------------------------------------------------------------------------------- the program


def _demand_pure(program: Any, signature: Signature) -> None:
    """XLA's executable keeps nothing between calls, and the flattened tensors must be those that the signature
    names."""
    described = program.graph_signature
    for what in ("buffers_to_mutate", "user_inputs_to_mutate", "parameters_to_mutate"):
        if changed := sorted(getattr(described, what, {}).values()):
            raise NothingCompiledError(
                f"the program changes {changed[0]!r} while it runs, and an executable of XLA keeps nothing"
            )
    inputs = [spec for spec in described.input_specs if spec.kind.name == "USER_INPUT"]
    outputs = [spec for spec in described.output_specs if spec.kind.name == "USER_OUTPUT"]
    for word, found, named in (("inputs", inputs, signature.inputs), ("outputs", outputs, signature.outputs)):
        if len(found) != len(named):
            raise NothingCompiledError(f"the program has {len(found)} {word}, and its signature names {len(named)}")


def _demand_operators(graph: Any, operators: Mapping[Any, Any]) -> None:
    import torch

    lacking = sorted(
        {
            str(node.target)
            for node in graph.nodes
            if node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and not _is_check(node)
            and _find(operators, node.target) is None
        }
    )
    if lacking:
        raise NothingCompiledError(f"torchax does not know the operators {', '.join(lacking)}")


def _weights(program: Any) -> tuple[dict[str, Array], list[int]]:
    """Parameters, buffers and constants that something reads, and the places of the graph's arguments that they
    take."""
    import torch

    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    weights: dict[str, Array] = {}
    places = []
    for place, (node, spec) in enumerate(zip(placeholders, program.graph_signature.input_specs, strict=True)):
        if spec.kind.name == "USER_INPUT" or not node.users:
            continue
        held = program.state_dict.get(spec.target, program.constants.get(spec.target))
        if not isinstance(held, torch.Tensor):
            raise NothingCompiledError(f"the program's {spec.target!r} is no tensor")
        weights[spec.target] = _to_numpy(held)
        places.append(place)
    return weights, places


def _to_numpy(tensor: Any) -> Array:
    import torch
    from ml_dtypes import bfloat16

    tensor = tensor.detach().contiguous()
    array: Array = tensor.view(torch.int16).numpy().view(bfloat16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return array


def _type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# --------------------------------------------------------------------------------------------------------- node by node


def _interpreter(module: Any, operators: Mapping[Any, Any], half: bool) -> Any:
    """Runs the graph with torchax's operators on JAX's arrays."""
    import jax
    import torch

    def is_array(value: Any) -> bool:
        return hasattr(value, "dtype") and hasattr(value, "astype")

    class Interpreter(torch.fx.Interpreter):  # type: ignore[misc]  # torch is untyped here
        def run_node(self, node: Any) -> Any:
            target = node.target
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                return super().run_node(node)
            if _is_check(node):
                return None
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            if half and target.overloadpacket.__name__ in _MATRIX_OPS:
                args, kwargs = jax.tree_util.tree_map(to_half, (args, kwargs))
            said = jax.tree_util.tree_leaves(node.meta.get("val"))
            # Pooling gives indices beside its answer: they are counted in 32 bits, and widened below.
            pooling = "pool" in target.overloadpacket.__name__
            taken = [leaf for leaf in jax.tree_util.tree_leaves((args, kwargs)) if is_array(leaf)]
            wide = any(_is_wide(value) for value in (*taken, *(() if pooling else said)))
            # In bf16 what is read back must name the type that convolutions multiply in, so they stay there.
            own = None if half or kwargs else depthwise(target.overloadpacket.__name__, args)
            with jax.enable_x64(wide):
                answer = own() if own is not None else _find(operators, target).func(*args, **kwargs)
            leaves, shape = jax.tree_util.tree_flatten(answer)
            if len(leaves) != len(said):
                return answer
            return shape.unflatten([cast(leaf, value) for leaf, value in zip(leaves, said, strict=True)])

    def to_half(value: Any) -> Any:
        return value.astype("bfloat16") if is_array(value) and str(value.dtype) == "float32" else value

    def cast(value: Any, said: Any) -> Any:
        """The answer in the type that the program says."""
        if is_array(value) and isinstance(said, torch.Tensor) and str(value.dtype) != _type_name(said.dtype):
            return value.astype(_type_name(said.dtype))
        return value

    return Interpreter(module)


def _is_wide(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).removeprefix("torch.") in (
        "int64", "uint64", "float64", "complex128",
    )  # fmt: skip


def _is_check(node: Any) -> bool:
    return any(part in str(node.target) for part in _CHECKS)


def _find(operators: Mapping[Any, Any], target: Any) -> Any:
    found = operators.get(target) or operators.get(target.overloadpacket)
    return found if found is not None and found.is_jax_function else None


# -------------------------------------------------------------------------------------------------------------- torchax


def _torchax() -> tuple[Mapping[Any, Any], Any]:
    """torchax's operators, and how it takes apart what it has none for.

    It names overloads that PyTorch no longer has (2.13 dropped those for named dimensions) and ends there; while it is
    imported, such an overload is a string that no program holds. What it changes in the process is put back, but for
    the name that it gives to a device.
    """
    import torch

    packet = torch._ops.OpOverloadPacket
    strict = packet.__getattr__

    def lenient(self: Any, key: str) -> Any:
        try:
            return strict(self, key)
        except AttributeError:
            if key.startswith("_"):
                raise
            return f"{self}.{key}, which this PyTorch has not"

    fast, reporting = torch.backends.mha.get_fastpath_enabled(), os.environ.get("ENABLE_RUNTIME_UPTIME_TELEMETRY")
    packet.__getattr__ = lenient
    try:
        from torchax import decompositions
        from torchax.ops import jaten, ops_registry  # noqa: F401 - jaten fills the registry
    except ImportError as error:
        raise NothingCompiledError(f"torchax can't be imported: {_sentence(error)}") from error
    finally:
        packet.__getattr__ = strict
        torch.backends.mha.set_fastpath_enabled(fast)
        if reporting is None:
            os.environ.pop("ENABLE_RUNTIME_UPTIME_TELEMETRY", None)
    return ops_registry.all_aten_ops, decompositions.DECOMPOSITIONS


def _sentence(error: Exception) -> str:
    """What it says first, without the trace of the tracer's own calls."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = " ".join(lines[: lines.index("")] if "" in lines else lines)
    return f"{type(error).__name__}: {said}"[:600] if said else type(error).__name__
