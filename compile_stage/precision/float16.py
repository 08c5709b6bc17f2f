"""fp16 by graph rewrite, aware of overflow.

float16 ends at 65504. What would pass it stays in float32: nodes whose weights do, and, when there are calibration
samples, nodes whose inputs or outputs pass `DATA_MAX` on them. The inputs and outputs of the model keep their types.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.errors import UsageError
from compile_stage.core.ports import Lowering
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.plugin_support.onnx_weights import values as weight_values
from compile_stage.precision import halves
from compile_stage.precision.onnx_graph import constant_tensor, finish, load_named, read_batches
from compile_stage.precision.peaks import measure_peaks

if TYPE_CHECKING:
    from onnx import ModelProto

FLOAT16_MAX = 65504.0

# Samples show only some of what will come, and sums pass their terms: 512 leaves a factor of 128. It is the default of
# NVIDIA's ModelOpt AutoCast too.
DATA_MAX = 512.0

# Without float16 kernels in some runtime of ours, or counting: float16 has no odd numbers past 2048.
_FLOAT32_OPS = (
    "CumSum",
    "Max",
    "Min",
    "NonMaxSuppression",
    "RandomUniformLike",
    "Range",
    "RoiAlign",
    "TopK",
    "Upsample",
)

HALF = halves.Half("fp16", "float16", frozenset(_FLOAT32_OPS), halves.float16_bits)


class Float16(Lowering):
    """Weights and activations in float16.

    Scheme options:
        data_max: Largest magnitude that a node may see on the calibration samples and still go to float16; 512 by
            default.
    """

    name: ClassVar[str] = "fp16"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""
    capabilities: ClassVar[LoweringCapabilities] = LoweringCapabilities(needs_calibration=True, complexity=20)

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return halves.refuse(model, HALF)

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        graph = load_named(model, keep)
        overflowing = _constants_past(graph, FLOAT16_MAX)
        if calibration is not None:
            limit = float(scheme.options.get("data_max", DATA_MAX))
            peaks = measure_peaks(graph, read_batches(model, calibration))
            overflowing |= {tensor for tensor, peak in peaks.items() if not peak <= limit}  # a NaN is past it too
        too_large = {
            node.name
            for node in graph.graph.node
            if overflowing.intersection(node.input) or overflowing.intersection(node.output)
        }
        kept = tuple(node.name for node in graph.graph.node if node.name in too_large or node.name in keep)
        if len(kept) == len(graph.graph.node):
            raise UsageError(
                "every node would stay in fp32: all of them pass float16's range on the calibration samples, or hold "
                "NaN there"
            )
        notes = halves.convert(graph, HALF, kept)
        if too_large:
            notes = (f"kept in fp32, since their values come near float16's largest: {len(too_large)} nodes", *notes)
        return finish(graph, model, into, self.name, kept=kept, notes=notes)


def _constants_past(model: ModelProto, limit: float) -> set[str]:
    """Names of weights and constants that hold a finite value of a larger magnitude."""
    from onnx import TensorProto

    tensors = [(tensor.name, tensor) for tensor in model.graph.initializer]
    tensors += [
        (node.output[0], tensor)
        for node in model.graph.node
        if node.op_type in ("Constant", "ConstantOfShape") and (tensor := constant_tensor(node)) is not None
    ]
    names = set()
    for name, tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT:
            values = np.abs(weight_values(tensor))
            if np.any((values > limit) & np.isfinite(values)):
                names.add(name)
    return names
