"""PyTorch on an NVIDIA GPU: whether it can be used, FP32 that is exact, and programs that were exported on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compile_stage.plugin_support.torch_programs import nodes_of

CUDA = "cuda"


def why_not() -> str:
    """Why PyTorch has no GPU here; empty when it has."""
    import torch

    if torch.cuda.is_available():
        return ""
    how = "is built without CUDA" if torch.version.cuda is None else "finds no GPU that it can use"
    return f"PyTorch {torch.__version__} here {how}"


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Products of float32 without TF32, which keeps 10 bits of the 23 of each factor. It is PyTorch's default for
    convolutions on a GPU; what is called FP32 here, the original and artifacts alike, must be as exact as that."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def moved(program: Any, device: str) -> Any:
    """An exported program on a device: its weights, its examples, and the devices that are written into its graph,
    which `Module.to` leaves.

    Args:
        program: A `torch.export.ExportedProgram`, which is changed.

    Views become reshapes. The trace left copies out that change nothing on a CPU; where a kernel of the GPU answers
    with other strides, attention's above all, PyTorch refuses the view after such a copy.
    """
    import torch
    from torch.export.passes import move_to_device_pass

    for module in program.graph_module.modules():
        views = [node for node in nodes_of(module) if node.target is torch.ops.aten.view.default]
        for node in views:
            node.target = torch.ops.aten.reshape.default
        if views:
            module.recompile()
    return move_to_device_pass(program, device)
