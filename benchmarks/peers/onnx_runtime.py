"""ONNX Runtime by hand: https://onnxruntime.ai/docs/performance/ (graph optimisations, quantization, transformers
optimizer)."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import onnx

from peers.recipe import CONVOLUTIONAL, TRANSFORMERS, Batch, Given, Recipe, Run

_FILE = "model.onnx"


def open_session(given: Given, folder: Path, batch: int) -> Run:
    """All graph optimisations, the batch fixed (`add_free_dimension_override_by_name`), threads that spin: the
    defaults but for the threads."""
    import onnxruntime as ort

    path = folder / _FILE if (folder / _FILE).exists() else given.onnx
    options = ort.SessionOptions()
    options.intra_op_num_threads = given.threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    options.add_free_dimension_override_by_name("batch", batch)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: Batch) -> Any:
        return session.run(None, inputs)[0]

    return run


def plain(given: Given, folder: Path) -> None:
    """The exported graph as it is."""


def fused_by_onnxscript(given: Given, folder: Path) -> None:
    """Fusions of transformers into ONNX Runtime's own operators, for graphs of the dynamo exporter."""
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, _ = optimize_for_ort(onnx_ir.load(given.onnx))
    onnx_ir.save(model, folder / _FILE)


def fused_by_transformers_tool(given: Given, folder: Path) -> None:
    """onnxruntime.transformers.optimizer, with the heads and width of the network. Its patterns are those of the older
    exporter and of attention that is written out."""
    import torch
    from onnxruntime.transformers.optimizer import optimize_model

    source, names = folder / "older-exporter.onnx", list(given.validation)
    given.module.network.set_attn_implementation("eager")
    with torch.no_grad():
        torch.onnx.export(
            given.module, given.tensors(0, 2), str(source), dynamo=False, opset_version=17, input_names=names,
            output_names=["answer"], dynamic_axes={name: {0: "batch"} for name in (*names, "answer")},
        )  # fmt: skip
    kind, heads, width = {"bert6": ("bert", 12, 384), "vit": ("vit", 3, 192)}[given.network]
    optimised = optimize_model(str(source), model_type=kind, num_heads=heads, hidden_size=width, opt_level=0)
    optimised.save_model_to_file(str(folder / _FILE))


def _prepared(given: Given, folder: Path) -> str:
    """quant_pre_process: shape inference and graph optimisation before quantisation."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = folder / "prepared.onnx"
    quant_pre_process(str(given.onnx), str(prepared), skip_symbolic_shape=given.network in TRANSFORMERS)
    return str(prepared)


def _static(given: Given, folder: Path, activations: str, calibration: str = "MinMax") -> None:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    batches = iter([given.rows(at) for at in range(len(next(iter(given.calibration.values()))))])
    reader = types.SimpleNamespace(get_next=lambda: next(batches, None))
    quantize_static(
        _prepared(given, folder), str(folder / _FILE), reader, quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=getattr(QuantType, activations), weight_type=QuantType.QInt8,
        calibrate_method=getattr(CalibrationMethod, calibration),
    )  # fmt: skip


def static_s8s8(given: Given, folder: Path) -> None:
    """What the documentation names as the first choice: QDQ, signed activations and weights."""
    _static(given, folder, "QInt8")


def static_u8s8(given: Given, folder: Path) -> None:
    """Unsigned activations, which x86's integer instructions take."""
    _static(given, folder, "QUInt8")


def static_u8s8_percentile(given: Given, folder: Path) -> None:
    """The same with ranges that leave outliers out."""
    _static(given, folder, "QUInt8", "Percentile")


def dynamic(given: Given, folder: Path) -> None:
    """What the documentation names for transformers and recurrent networks."""
    _dynamic(Path(_prepared(given, folder)), folder)


def dynamic_after_fusion(given: Given, folder: Path) -> None:
    """The same of the graph that the transformers optimizer made: Attention becomes QAttention."""
    fused_by_transformers_tool(given, folder)
    _dynamic((folder / _FILE).rename(folder / "fused.onnx"), folder)


def _dynamic(source: Path, folder: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # the quantizer turns Gemm into MatMul, whose weights' shapes are others
    onnx.save(model, source)
    quantize_dynamic(
        str(source), str(folder / _FILE), per_channel=True, weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},  # behind operators that onnx does not know
    )  # fmt: skip


RECIPES = (
    Recipe("ONNX Runtime", "fp32", plain, open_session),
    Recipe("ONNX Runtime, onnxscript ort_fusions", "fp32", fused_by_onnxscript, open_session, TRANSFORMERS),
    Recipe("ONNX Runtime, transformers optimizer", "fp32", fused_by_transformers_tool, open_session, TRANSFORMERS),
    Recipe("ONNX Runtime, quantize_static S8S8", "int8", static_s8s8, open_session),
    Recipe("ONNX Runtime, quantize_static U8S8", "int8", static_u8s8, open_session),
    Recipe(
        "ONNX Runtime, quantize_static U8S8 percentile", "int8", static_u8s8_percentile, open_session, CONVOLUTIONAL
    ),
    Recipe("ONNX Runtime, quantize_dynamic", "int8-dynamic", dynamic, open_session, (*TRANSFORMERS, "lstm")),
    Recipe("ONNX Runtime, transformers optimizer, quantize_dynamic", "int8-dynamic", dynamic_after_fusion, open_session,
           TRANSFORMERS),
)  # fmt: skip
