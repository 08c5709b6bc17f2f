"""int8: static quantisation with calibrated ranges, and dynamic quantisation.

Both rewrite the graph with ONNX Runtime's quantizer, which writes standard operators: QuantizeLinear and DequantizeLinear around
what is quantised (static), or MatMulInteger and its relatives (dynamic). The scheme decides what the quantizer is told.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.precision.onnx_graph import (
    INLINE_LIMIT_BYTES,
    QUANTISED_OPS,
    finish,
    map_kept,
    read_batches,
    read_ops,
    refuse_form,
    simplify,
)

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

NEEDS_SAMPLES = "int8 needs calibration samples: set data.calibration in the policy"

# What carries a network's arithmetic: without one of these there is nothing that integers would make faster.
_HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "EmbedLayerNormalization", "Attention")
_DYNAMIC = ("Conv", "Gemm", "MatMul", "LSTM", "Attention")

_METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}


class StaticInt8:
    """Weights and activations in int8, activation ranges from calibration samples.

    Scheme options:
        calibration: `minmax` (the default), `entropy` or `percentile`.
        percentile: For `percentile`; 99.999 by default.
        reduce_range: 7-bit weights, for CPUs whose 16-bit sums saturate.
    """

    name: ClassVar[str] = "int8"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        if (reason := refuse_form(model, self.name)) is not None:
            return reason
        if not (ops := read_ops(model)).intersection(_HEAVY):
            return f"there is nothing to quantise: the graph has no {', '.join(_HEAVY[:4])} (it holds {', '.join(sorted(ops))})"
        return _refuse_options(scheme.options)

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        if calibration is None or calibration.count < (model.signature.fixed_batch or 1):
            raise UsageError(NEEDS_SAMPLES)
        import onnx
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        options = scheme.options
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch, _quiet():
            simple = simplify(Path(model.path), Path(scratch))
            kept = map_kept(Path(model.path), simple, keep)
            quantised = Path(scratch) / "quantised.onnx"
            quantize_static(
                str(simple),
                str(quantised),
                _Reader(read_batches(model, calibration)),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(scheme.ops) or _every_op(),
                per_channel=scheme.per_channel,
                reduce_range=bool(options.get("reduce_range", False)),
                activation_type=QuantType.QInt8 if scheme.activations == "int8" else QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=list(kept),
                use_external_data_format=_is_large(simple),
                calibrate_method=CalibrationMethod[_METHODS[options.get("calibration", "minmax")]],
                extra_options={
                    "ActivationSymmetric": scheme.symmetric,
                    "WeightSymmetric": True,
                    **({"CalibPercentile": options["percentile"]} if "percentile" in options else {}),
                },
            )
            return _finish(
                onnx.load(quantised), model, into, scheme, kept, f"calibrated on {calibration.count} samples"
            )


class DynamicInt8:
    """Weights in int8; activations are quantised while the model runs, so no samples are needed.

    Scheme options:
        reduce_range: 7-bit weights, for CPUs whose 16-bit sums saturate.
    """

    name: ClassVar[str] = "int8-dynamic"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        if (reason := refuse_form(model, self.name)) is not None:
            return reason
        if not (ops := read_ops(model)).intersection(_DYNAMIC):
            return f"there is nothing to quantise: the graph has no {', '.join(_DYNAMIC[:3])} (it holds {', '.join(sorted(ops))})"
        return _refuse_options(scheme.options)

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch, _quiet():
            simple = simplify(Path(model.path), Path(scratch))
            kept = map_kept(Path(model.path), simple, keep)
            quantised = Path(scratch) / "quantised.onnx"
            quantize_dynamic(
                str(simple),
                str(quantised),
                op_types_to_quantize=list(scheme.ops) or list(_DYNAMIC),
                per_channel=scheme.per_channel,
                reduce_range=bool(scheme.options.get("reduce_range", False)),
                weight_type=QuantType.QInt8,
                # The quantizer first splits each Gemm into a MatMul of this name and an Add.
                nodes_to_exclude=[*kept, *(f"{name}_MatMul" for name in kept)],
                use_external_data_format=_is_large(simple),
            )
            return _finish(onnx.load(quantised), model, into, scheme, kept, "")


class _Reader:
    """The quantizer's way to ask for samples."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def get_next(self) -> Batch | None:
        return next(self._batches, None)


def _every_op() -> list[str]:
    """All that the quantizer knows, in an order that does not change from run to run (its own default does)."""
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return sorted({*QDQRegistry, *QLinearOpsRegistry})


def _finish(
    graph: Any, model: PortableModel, into: Path, scheme: Scheme, kept: tuple[str, ...], note: str
) -> PortableModel:
    quantised = sum(node.op_type in QUANTISED_OPS for node in graph.graph.node)
    if not quantised:
        raise UsageError(
            f"nothing was quantised: no {', '.join(scheme.ops) or 'operator'} has weights, or all are kept in fp32"
        )
    return finish(
        graph,
        model,
        into,
        scheme.precision,
        kept={"fp32": kept} if kept else {},
        notes=(*model.notes, note) if note else model.notes,
    )


def _is_large(path: Path) -> bool:
    return sum(file.stat().st_size for file in path.parent.iterdir()) >= INLINE_LIMIT_BYTES


def _refuse_options(given: Mapping[str, Any]) -> str | None:
    method = given.get("calibration", "minmax")
    if method not in _METHODS:
        return f"there is no calibration {method!r}; there is {', '.join(_METHODS)}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer logs advice and each node that it skips to the root logger; what matters is in the result."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
