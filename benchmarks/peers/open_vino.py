"""OpenVINO by hand: https://docs.openvino.ai/ (conversion from PyTorch, performance hints, inference precision) and
NNCF's post-training quantisation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peers.recipe import CONVOLUTIONAL, TRANSFORMERS, Batch, Given, Recipe, Run

_FILE = "model.xml"


def _converted(given: Given) -> Any:
    """From PyTorch, as the documentation begins; inputs keep the network's names."""
    import openvino
    import torch

    with torch.no_grad():
        model = openvino.convert_model(given.module, example_input=given.tensors(0, 2))
    for port, (name, array) in zip(model.inputs, given.validation.items(), strict=True):
        port.get_node().set_partial_shape(openvino.PartialShape([-1, *array.shape[1:]]))
        port.set_names({name})
    model.validate_nodes_and_infer_types()
    return model


def _save(model: Any, folder: Path) -> None:
    import openvino

    openvino.save_model(model, str(folder / _FILE), compress_to_fp16=False)


def converted(given: Given, folder: Path) -> None:
    """The network's graph in FP32."""
    _save(_converted(given), folder)


def from_onnx(given: Given, folder: Path) -> None:
    """The same from the exported ONNX."""
    import openvino

    _save(openvino.convert_model(given.onnx), folder)


def quantised(given: Given, folder: Path) -> None:
    """nncf.quantize: mixed preset (symmetric weights, asymmetric activations), its rules for transformers for those."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    count = len(next(iter(given.calibration.values())))
    model = nncf.quantize(
        _converted(given),
        nncf.Dataset([given.rows(at) for at in range(count)]),
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=count,
        model_type=nncf.ModelType.TRANSFORMER if given.network in TRANSFORMERS else None,
    )
    _save(model, folder)


def quantised_performance(given: Given, folder: Path) -> None:
    """nncf.quantize with its defaults: the performance preset, all symmetric."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    count = len(next(iter(given.calibration.values())))
    dataset = nncf.Dataset([given.rows(at) for at in range(count)])
    _save(nncf.quantize(_converted(given), dataset, subset_size=count), folder)


def compressed(given: Given, folder: Path) -> None:
    """nncf.compress_weights to 8 bits; the CPU plug-in quantises activations as they come."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    _save(nncf.compress_weights(_converted(given), mode=nncf.CompressWeightsMode.INT8_SYM), folder)


def opener(precision: str, hint: str = "LATENCY") -> Callable[[Given, Path, int], Run]:
    """With an inference precision and a performance hint, shapes fixed.

    With THROUGHPUT the rows of a batch are shared among as many requests as the plug-in calls optimal, and run at the
    same time.
    """

    def open_model(given: Given, folder: Path, batch: int) -> Run:
        import openvino

        core, config = openvino.Core(), {"PERFORMANCE_HINT": hint, "INFERENCE_NUM_THREADS": given.threads}
        config["INFERENCE_PRECISION_HINT"] = precision
        model = core.read_model(folder / _FILE)
        requests = given.threads if hint == "THROUGHPUT" else 1
        rows = batch // requests
        model.reshape({port: [rows, *port.get_partial_shape()[1:]] for port in model.inputs})
        compiled = core.compile_model(model, "CPU", config)
        names = [port.get_any_name() for port in compiled.inputs]
        if requests == 1:
            request = compiled.create_infer_request()

            def run(inputs: Batch) -> Any:
                request.infer([inputs[name] for name in names], share_inputs=True)
                return request.output_tensors[0].data.copy()

            return run
        several = [compiled.create_infer_request() for _ in range(requests)]

        def run_shared(inputs: Batch) -> Any:
            for at, request in enumerate(several):
                request.start_async([inputs[name][at * rows : (at + 1) * rows] for name in names], share_inputs=True)
            for request in several:
                request.wait()
            return np.concatenate([request.output_tensors[0].data for request in several])

        return run_shared

    return open_model


def _every(name: str, precision: str, make: Callable[[Given, Path], None], hint: str) -> Iterator[Recipe]:
    """The recipe in one call, and, for batches, as two requests at a time."""
    yield Recipe(name, precision, make, opener(hint))
    yield Recipe(f"{name}, throughput hint", precision, make, opener(hint, "THROUGHPUT"), batches=(8,))


RECIPES = (
    *_every("OpenVINO", "fp32", converted, "f32"),
    Recipe("OpenVINO, from ONNX", "fp32", from_onnx, opener("f32")),
    *_every("OpenVINO, bf16 hint", "bf16", converted, "bf16"),
    *_every("OpenVINO, NNCF", "int8", quantised, "f32"),
    *_every("OpenVINO, NNCF, bf16 hint", "int8", quantised, "bf16"),
    Recipe("OpenVINO, NNCF performance preset", "int8", quantised_performance, opener("f32"), CONVOLUTIONAL),
    Recipe("OpenVINO, NNCF weights in int8", "int8-dynamic", compressed, opener("f32"), (*TRANSFORMERS, "lstm")),
)
