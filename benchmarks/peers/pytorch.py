"""PyTorch by hand: its own execution, TorchScript, torch.compile with freezing, AOTInductor, and quantisation
(docs.pytorch.org: torch.compile, torch.jit.optimize_for_inference, quantization)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from peers.recipe import CONVOLUTIONAL, TRANSFORMERS, Batch, Given, Recipe, Run, nothing

Make = Callable[[Given, Path], None]


def _run(given: Given, call: Callable[..., Any], bf16: bool = False) -> Run:
    import torch

    torch.set_num_threads(given.threads)
    assert given.module is not None  # built here: tensors that are made under inference_mode can't be compiled

    def run(inputs: Batch) -> Any:
        cast = torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()
        with torch.inference_mode(), cast:
            return call(*map(torch.from_numpy, inputs.values())).float().numpy()

    return run


def open_eager(given: Given, folder: Path, batch: int) -> Run:
    """The network as it is: the original."""
    return _run(given, given.module)


def opened_script(given: Given, folder: Path, batch: int) -> Run:
    """Traced, frozen and optimised for inference."""
    import torch

    with torch.no_grad():
        traced = torch.jit.trace(given.module, given.tensors(0, batch))
        return _run(given, torch.jit.optimize_for_inference(torch.jit.freeze(traced)))


def compiled(bf16: bool = False) -> Callable[[Given, Path, int], Run]:
    """torch.compile with frozen weights, in FP32 or under autocast."""

    def open_compiled(given: Given, folder: Path, batch: int) -> Run:
        import torch
        import torch._inductor.config as inductor

        inductor.freezing = True
        return _run(given, torch.compile(given.module, dynamic=False), bf16)

    return open_compiled


def packaged(bf16: bool = False) -> Make:
    """AOTInductor with frozen weights: the same compiler, ahead of time, without Python around the calls."""

    def make(given: Given, folder: Path) -> None:
        import torch
        import torch._inductor.config as inductor

        class Cast(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = given.module

            def forward(self, *tensors: Any) -> Any:
                with torch.autocast("cpu", torch.bfloat16):
                    return self.network(*tensors).float()

        for batch in (1, 8):
            with torch.no_grad(), inductor.patch({"freezing": True}):
                module = Cast().eval() if bf16 else given.module
                program = torch.export.export(module, given.tensors(0, batch))
                torch._inductor.aoti_compile_and_package(program, package_path=str(folder / f"{batch}.pt2"))

    return make


def open_package(given: Given, folder: Path, batch: int) -> Run:
    import torch

    return _run(given, torch._inductor.aoti_load_package(str(folder / f"{batch}.pt2")))


def open_dynamic(given: Given, folder: Path, batch: int) -> Run:
    """torch.ao.quantization.quantize_dynamic of linear and recurrent layers."""
    import torch

    layers = {torch.nn.Linear, torch.nn.LSTM}
    return _run(given, torch.ao.quantization.quantize_dynamic(given.module, layers, dtype=torch.qint8))


def quantised(given: Given, folder: Path) -> None:
    """PT2E quantisation with the x86 quantizer, compiled by AOTInductor with frozen weights. Needs torchao."""
    import torch
    import torch._inductor.config as inductor
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    for batch in (1, 8):
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        with torch.no_grad():
            prepared = prepare_pt2e(torch.export.export(given.module, given.tensors(0, batch)).module(), quantizer)
            for start in range(0, len(next(iter(given.calibration.values()))), batch):
                prepared(*map(torch.from_numpy, given.rows(start, batch).values()))
            program = torch.export.export(convert_pt2e(prepared), given.tensors(0, batch))
            with inductor.patch({"freezing": True}):
                torch._inductor.aoti_compile_and_package(program, package_path=str(folder / f"{batch}.pt2"))


RECIPES = (
    Recipe("PyTorch eager", "fp32", nothing, open_eager),
    Recipe("TorchScript", "fp32", nothing, opened_script),
    Recipe("torch.compile, freezing", "fp32", nothing, compiled()),
    # An LSTM is unrolled there: 64 steps take minutes to compile.
    Recipe("AOTInductor, freezing", "fp32", packaged(), open_package, (*CONVOLUTIONAL, *TRANSFORMERS)),
    Recipe(
        "AOTInductor, freezing, autocast bf16",
        "bf16",
        packaged(bf16=True),
        open_package,
        (*CONVOLUTIONAL, *TRANSFORMERS),
    ),
    Recipe("PyTorch, quantize_dynamic", "int8-dynamic", nothing, open_dynamic, (*TRANSFORMERS, "lstm")),
    Recipe("AOTInductor, PT2E x86", "int8", quantised, open_package, (*CONVOLUTIONAL, *TRANSFORMERS)),
)
