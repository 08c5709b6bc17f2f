"""PyTorch on the device of a target: where the original of the flavors `pytorch` and `transformers` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compile_stage.core.errors import SourceError

CUDA = "cuda"
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
        """The module of an exported program there. Devices that were written into its graph follow, which `Module.to`
        leaves."""
        if self.name == "cpu":
            return program.module()
        from torch.export.passes import move_to_device_pass

        return move_to_device_pass(program, self.name).module()

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
    import torch

    if device == CUDA and not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "finds no GPU that it can use"
        raise SourceError(
            f"the original can't be run on the target's device cuda: PyTorch {torch.__version__} here {why}",
            fix="install a build of PyTorch for the CUDA of this machine's driver, or set the target's device to cpu",
        )
    # TF32 keeps 10 bits of the 23 of each factor. It is PyTorch's default for convolutions on a GPU, but the baseline
    # is FP32: what artifacts are compared with, and what their FP32 is timed against, must be as exact as they have to
    # be.
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield Place(device)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
