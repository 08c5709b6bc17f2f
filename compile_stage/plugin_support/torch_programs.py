"""What backends that are made of PyTorch share: a program's module with its tensors in a row, and PyTorch's threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
