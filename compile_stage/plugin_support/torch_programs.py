"""What backends that are made of PyTorch share: a program's module with its tensors in a row, and PyTorch's threads."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compile_stage.core.ports import Session
from compile_stage.plugin_support.sessions import demand_call

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch, Signature


def flat_module(program: Any) -> Any:
    """The module of an exported program with its inputs in a row, in the order of the signature, and its outputs as a
    tuple.

    It takes sizes that the program was not exported for, a batch of 1 above all: who exports or traces it anew finds
    out which are right.
    """
    import torch

    tree = torch.utils._pytree
    module, in_spec = program.module(check_guards=False), program.call_spec.in_spec

    class Flat(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.training = False  # a program's module has no eval(): it is frozen already

        def forward(self, *tensors: Any) -> Any:
            args, kwargs = tree.tree_unflatten(list(tensors), in_spec)
            return tuple(tree.tree_leaves(self.module(*args, **kwargs)))

    return Flat()


@contextmanager
def tracing() -> Iterator[None]:
    """Around a call of torch.export.export: without its warnings of deprecations inside the tracer, and with the sizes
    in an einsum of three and more tensors left open. Where the package opt_einsum is installed, PyTorch has it choose
    their order by their sizes, and so the trace takes the example's batch for the only one; without, they are
    multiplied as they stand. LSTM and GRU keep an open length (`recurrent_lengths_open`). Distributions and
    `torch.nn.Transformer` are traced without a look at values, at which a trace ends: the former ask whether their
    arguments are valid, the latter whether its mask is a causal one, which it is applied as either way."""
    from torch.backends import opt_einsum
    from torch.distributions import Distribution
    from torch.nn.modules import transformer

    before, validated = opt_einsum.enabled, Distribution._validate_args
    looked: Any = getattr(transformer, "_detect_is_causal_mask", None)
    opt_einsum.enabled = False
    Distribution.set_default_validate_args(False)
    if looked is not None:
        transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        with warnings.catch_warnings(), recurrent_lengths_open():
            warnings.simplefilter("ignore")
            yield
    finally:
        opt_einsum.enabled = before
        Distribution.set_default_validate_args(validated)
        if looked is not None:
            transformer._detect_is_causal_mask = looked


@contextmanager
def recurrent_lengths_open() -> Iterator[None]:
    """Have PyTorch's traces take the shapes of LSTM and GRU from their inputs. To find them, PyTorch goes through each
    step of the sequence, and so takes the example's length for the only one. The values are computed as before."""
    import torch
    from torch._decomp import decomposition_table as steps

    alone = torch._C.DispatchKey.CompositeImplicitAutograd
    operators = [torch.ops.aten.lstm.input, torch.ops.aten.gru.input]
    before = [(operator, steps.get(operator), operator.py_kernels.get(alone)) for operator in operators]
    for operator in operators:
        steps[operator] = operator.py_kernels[alone] = _recurrent_shapes
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, step, kernel in before:
            for table, key, known in ((steps, operator, step), (operator.py_kernels, alone, kernel)):
                table.pop(key)
                if known is not None:
                    table[key] = known
            operator._dispatch_cache.clear()


def _recurrent_shapes(rows: Any, states: Any, _weights: Any, *settings: Any) -> tuple[Any, ...]:
    """What an LSTM or GRU answers, as tensors without values: all steps, and the last state or states.

    Args:
        settings: has_biases, num_layers, dropout, train, bidirectional and batch_first, as in the operators' schemas.
    """
    *_, bidirectional, batch_first = settings
    held = [states] if hasattr(states, "shape") else list(states)
    *sizes, _ = rows.shape
    width = held[0].shape[-1] * (2 if bidirectional else 1)
    if batch_first and len(sizes) > 1:  # as it lies in memory: the sequence goes before the batch
        answers = rows.new_empty(sizes[1], sizes[0], width).transpose(0, 1)
    else:
        answers = rows.new_empty(*sizes, width)
    return answers, *(state.new_empty(state.shape) for state in held)


def changed_tensors(program: Any) -> tuple[str, ...]:
    """The program's inputs, parameters and buffers that running it changes, as their placeholders are named.

    `torch.export` keeps operators that work in place, and its signature then names no tensor that changes. So the
    program is run without data, on tensors that count how often they, and what shares their memory, were written to.
    """
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not any(_writes(node) for module in program.graph_module.modules() for node in nodes_of(module)):
        return ()
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in placeholders]
    try:
        # Not in the mode that it was traced in: running there takes the example's sizes for the only ones, and leaves
        # symbols of sizes that depend on data, on which the next trace of the program fails.
        with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
            given = [_like(value) if isinstance(value, torch.Tensor) else value for value in values]
            torch.fx.Interpreter(program.graph_module).run(*given)
    except Exception:  # noqa: BLE001 - an operator that can't run without data: the slower way, which runs nothing
        signature = program.run_decompositions({}).graph_signature
        changed = {*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()}
        return tuple(
            spec.arg.name for spec in program.graph_signature.input_specs if changed & {spec.target, spec.arg.name}
        )
    return tuple(node.name for node, value in zip(placeholders, given, strict=True) if getattr(value, "_version", 0))


def _like(tensor: Any) -> Any:
    """A tensor as this one of a trace, in the example's sizes."""
    import torch

    sizes, strides = (
        [size.node.hint if isinstance(size, torch.SymInt) else size for size in both]
        for both in (tensor.shape, tensor.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def keep_inputs(program: Any) -> tuple[str, ...]:
    """Have the program work on copies of the inputs that it changes, and give their names.

    What is compiled leaves its inputs as they are. The original must too: it would change the samples on which it is
    compared and timed.
    """
    import torch

    inputs = set(map(str, program.graph_signature.user_inputs))
    changed = tuple(name for name in changed_tensors(program) if name in inputs)
    module = program.graph_module
    for node in [node for node in module.graph.nodes if node.op == "placeholder" and node.name in changed]:
        following = node.next
        while following.op == "placeholder":
            following = following.next
        with module.graph.inserting_before(following):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        use_instead(program, node, copy)
    if changed:
        module.recompile()
    return changed


def use_instead(program: Any, node: Any, new: Any) -> None:
    """Have all that reads a node's tensor read a new one of its type and shape, which is made of it; the program's
    outputs too."""
    new.meta = {**node.meta}
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    for spec in program.graph_signature.output_specs:
        if spec.arg.name == node.name:
            spec.arg.name = new.name


def read_for(nodes: Iterable[Any], *, sizes: bool = True) -> set[str]:
    """The names of the nodes that these are computed from, and theirs; not what is read for its `sizes` alone, if that
    is false."""
    import torch

    read: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.name not in read and (sizes or node.target is not torch.ops.aten.sym_size.int):
            read.add(node.name)
            waiting += node.all_input_nodes
    return read


def nodes_of(module: Any) -> Any:
    """The nodes of a module's graph; none where it has no graph."""
    return getattr(getattr(module, "graph", None), "nodes", ())


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(node.op == "call_function" and schema is not None and schema.is_mutable)


def free_axes(signature: Signature) -> tuple[dict[int, Any], ...]:
    """For `torch.export.export`: of each input, the axes whose sizes are free. Which can be, the export finds out."""
    import torch

    return tuple(
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in signature.inputs
    )


def use_threads(count: int) -> None:
    """Have PyTorch compute with so many threads, in the thread that calls: its own are a setting of the process, and
    OpenMP's one of the calling thread, which asking sets."""
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Leave the process with as many threads as it had."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TorchSession(ABC):
    """A loaded program that computes in PyTorch. A subclass says what a call of it answers."""

    def __init__(self, program: Any, signature: Signature, threads: int) -> None:
        self.signature = signature
        self._program = program
        self._threads = threads

    @abstractmethod
    def _answers(self, arrays: Sequence[Array]) -> Iterator[Array]:
        """The outputs in the signature's order, for inputs in that order; they are the caller's."""

    def run(self, batch: Batch) -> Batch:
        demand_call(self.signature, batch, closed=self._program is None)
        use_threads(self._threads)
        answers = self._answers([batch[spec.name] for spec in self.signature.inputs])
        return dict(zip((spec.name for spec in self.signature.outputs), answers, strict=True))

    def close(self) -> None:
        self._program = None


@contextmanager
def opened(session: TorchSession) -> Iterator[Session]:
    """What `Backend.open` returns for a session that computes in PyTorch: it is closed at the end, and the process has
    its threads back."""
    with threads_restored():
        try:
            yield session
        finally:
            session.close()
