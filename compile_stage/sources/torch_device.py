"""PyTorch on the device of a target: where the original of the flavors `pytorch` and `transformers` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compile_stage.core.errors import SourceError
from compile_stage.plugin_support.torch_cuda import CUDA, exact_fp32, moved, why_not

DEVICES = ("cpu", CUDA)


class Place:
    """A device of PyTorch's.

    Args:
        name: `cpu`, `cuda`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def module(self, module: Any) -> Any:
        """The module there, its parameters and buffers too."""
        return module if self.name == "cpu" else module.to(self.name)

    def program(self, program: Any) -> Any:
        """The module of an exported program there."""
        return program.module() if self.name == "cpu" else moved(program, self.name).module()

    def tensor(self, tensor: Any) -> Any:
        """The tensor there."""
        return tensor if self.name == "cpu" else tensor.to(self.name)

    def arrays(self, tensors: Any) -> list[Any]:
        """The tensors as NumPy arrays in the host's memory, when the device has computed them: kernels on a GPU are
        only started by a call, and a call that was only started would be timed as one that is done."""
        if self.name == CUDA:
            import torch

            torch.cuda.synchronize()
        # By force: what is a parameter, or a view of one, would be refused for its gradient.
        return [tensor.numpy(force=True) for tensor in tensors]


@contextmanager
def place(device: str) -> Iterator[Place]:
    """PyTorch on a device, in FP32.

    Raises:
        SourceError: PyTorch has no such device here. It never falls back to the CPU.
    """
    if device == "cpu":
        yield Place(device)
        return
    if device == CUDA and (why := why_not()):
        raise SourceError(
            f"the original can't be run on the target's device cuda: {why}",
            fix="install a build of PyTorch for the CUDA of this machine's driver, or set the target's device to cpu",
        )
    with exact_fp32():  # what artifacts are compared with, and what their FP32 is timed against
        yield Place(device)
