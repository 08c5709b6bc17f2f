"""LiteRT and ExecuTorch by hand, both with XNNPACK, each in an environment of its own: ai.google.dev/edge/litert
(litert_torch, ai-edge-quantizer) and docs.pytorch.org/executorch (XNNPACK backend, its quantizer).

They take the network as a PyTorch program, since its code needs packages that those environments lack.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peers.recipe import BATCHES, Batch, Given, Recipe, Run

_SIGNATURE = "serving_default"


# --------------------------------------------------------------------------------------------------------------- LiteRT


def converted(given: Given, folder: Path) -> None:
    """litert_torch.convert for each batch size: LiteRT's files have fixed shapes."""
    import litert_torch
    import torch

    for batch in BATCHES:
        with torch.no_grad():
            model = litert_torch.convert(given.program(batch).module(), given.tensors(0, batch))
        model.export(str(folder / f"{batch}.tflite"))


def _quantised(recipe: str) -> Callable[[Given, Path], None]:
    def make(given: Given, folder: Path) -> None:
        from ai_edge_quantizer import calibrator, quantizer, recipe_manager
        from ai_edge_quantizer import recipe as recipes
        from ai_edge_quantizer.utils import qsv_utils

        plain = folder / "fp32"
        plain.mkdir(parents=True, exist_ok=True)
        converted(given, plain)
        for batch in BATCHES:
            file, rules = str(plain / f"{batch}.tflite"), getattr(recipes, recipe)()
            work, ranges = quantizer.Quantizer(file, rules), None
            if recipe.startswith("static"):
                count = len(next(iter(given.calibration.values())))
                batches = [given.rows(at, batch).values() for at in range(0, count, batch)]
                named = [{f"args_{at}": _narrow(array) for at, array in enumerate(arrays)} for arrays in batches]
                # Its default is a moving average: of few samples, nearly the range of the first.
                seen = calibrator.Calibrator(file, num_threads=1, qsv_update_func=qsv_utils.min_max_update)
                manager = recipe_manager.RecipeManager()
                manager.load_quantization_recipe(rules)
                seen.calibrate({_SIGNATURE: named}, manager)
                ranges = seen.get_model_qsvs()
            made = work.quantize(ranges)
            (folder / f"{batch}.tflite").write_bytes(bytes(made.quantized_model))

    return make


def _narrow(array: Any) -> Any:
    """LiteRT's files take whole numbers of 32 bits."""
    return array.astype("int32") if array.dtype == "int64" else array


def open_litert(given: Given, folder: Path, batch: int) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(folder / f"{batch}.tflite"), num_threads=given.threads)
    interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner(_SIGNATURE)
    details = sorted(runner.get_input_details().items(), key=lambda item: int(item[0].rpartition("_")[2]))
    places = [(tensor["index"], tensor["dtype"], tensor["quantization"]) for _, tensor in details]
    [answer] = runner.get_output_details().values()

    def run(inputs: Batch) -> Any:
        for (index, kind, steps), array in zip(places, inputs.values(), strict=True):
            rounded = _in_steps(array, *steps) if _is_rounded(kind, array) else array
            interpreter.set_tensor(index, rounded.astype(kind, copy=False))
        interpreter.invoke()
        found = interpreter.get_tensor(answer["index"])
        scale, zero = answer["quantization"]
        return (found.astype(np.float32) - zero) * np.float32(scale) if found.dtype == np.int8 else found

    return run


def _is_rounded(kind: Any, array: Any) -> bool:
    """The file takes integers where the network takes floats: the static recipe rounds inputs and outputs too."""
    return kind is np.int8 and array.dtype.kind == "f"


def _in_steps(array: Any, scale: float, zero: int) -> Any:
    """As the documentation quantises an input."""
    return np.clip(np.rint(array * np.float32(1 / scale)) + zero, -128, 127)


LITERT = (
    Recipe("LiteRT", "fp32", converted, open_litert),
    Recipe("LiteRT, static int8", "int8", _quantised("static_wi8_ai8"), open_litert),
    Recipe("LiteRT, dynamic int8", "int8-dynamic", _quantised("dynamic_wi8_afp32"), open_litert),
)


# ----------------------------------------------------------------------------------------------------------- ExecuTorch


def _lowered(quantise: str) -> Callable[[Given, Path], None]:
    def make(given: Given, folder: Path) -> None:
        import torch
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        for batch in BATCHES:
            with torch.no_grad():
                program = given.program(batch)
                if quantise:
                    module = _rounded(given, program.module(), batch, dynamic=quantise == "dynamic")
                    program = torch.export.export(module, given.tensors(0, batch))
                lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
                (folder / f"{batch}.pte").write_bytes(bytes(lowered.to_executorch().buffer))

    return make


def _rounded(given: Given, module: Any, batch: int, *, dynamic: bool) -> Any:
    import torch
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer()
    quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic))
    prepared = prepare_pt2e(module, quantizer)
    for start in range(0, len(next(iter(given.calibration.values()))), batch):
        prepared(*map(torch.from_numpy, given.rows(start, batch).values()))
    return convert_pt2e(prepared)


def open_executorch(given: Given, folder: Path, batch: int) -> Run:
    import torch
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(given.threads)
    module = portable_lib._load_for_executorch(str(folder / f"{batch}.pte"))

    def run(inputs: Batch) -> Any:
        return module.forward([torch.from_numpy(array) for array in inputs.values()])[0].numpy()

    return run


EXECUTORCH = (
    Recipe("ExecuTorch, XNNPACK", "fp32", _lowered(""), open_executorch),
    Recipe("ExecuTorch, XNNPACK static int8", "int8", _lowered("static"), open_executorch),
    Recipe("ExecuTorch, XNNPACK dynamic int8", "int8-dynamic", _lowered("dynamic"), open_executorch),
)
