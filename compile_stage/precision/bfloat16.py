"""bf16 by graph rewrite: weights and activations in bfloat16.

bfloat16 has float32's range, so nothing overflows and no samples are needed; it has 8 bits of precision, so what sums,
counts or normalises stays in float32. Graphs are brought to opset 22, where ONNX's convolutions and poolings took
bfloat16.

No backend here declares a scheme for it: OpenVINO does bf16 natively, and ONNX Runtime's CPU kernels have none (see
docs/lowerings.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.ports import Lowering
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.precision import halves
from compile_stage.precision.onnx_graph import finish, load_named, raise_opset

OPSET = 22

# As PyTorch's autocast keeps them: sums of many terms, powers and logarithms, and what divides by them. And counting:
# bfloat16 has no odd numbers past 256.
_FLOAT32_OPS = (
    "CumSum", "Exp", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "Log", "LogSoftmax",
    "LpNormalization", "MeanVarianceNormalization", "Mod", "NonMaxSuppression", "Pow", "RMSNormalization", "Range",
    "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "RoiAlign", "Softmax", "TopK", "Upsample",
)  # fmt: skip

HALF = halves.Half("bf16", "bfloat16", frozenset(_FLOAT32_OPS), halves.bfloat16_bits)


class BFloat16(Lowering):
    """Weights and activations in bfloat16; inputs and outputs keep their types."""

    name: ClassVar[str] = "bf16"
    requires: ClassVar[tuple[str, ...]] = ("onnx",)
    extra: ClassVar[str] = ""
    capabilities: ClassVar[LoweringCapabilities] = LoweringCapabilities(needs_calibration=False, complexity=10)

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return halves.refuse(model, HALF, OPSET)

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        graph = raise_opset(load_named(model, keep), OPSET)
        kept = tuple(node.name for node in graph.graph.node if node.name in keep)
        notes = halves.convert(graph, HALF, kept)
        return finish(graph, model, into, self.name, kept=kept, notes=notes)
