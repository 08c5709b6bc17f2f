"""int4: weights of matrix products in 4 bits, by blocks; activations stay in float32, so no samples are needed.

What is written, and which matrices have blocks, is `precision/block_weights.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.errors import UsageError
from compile_stage.core.ports import Lowering
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.precision import block_weights, blocks
from compile_stage.precision.onnx_graph import refuse_form, refuse_without

BLOCK = 32


class Int4(Lowering):
    """Weights of MatMul and Gemm in 4 bits; large embedding tables in 8, convolutions stay in float32.

    `Scheme.weights` is `uint4` (asymmetric: one zero point a block; 1.5 dB better on normal weights) or `int4`
    (symmetric).

    Scheme options:
        method: `hqq`, half-quadratic quantisation (the default), or `rtn`, rounding to nearest.
        block: Weights that share a scale, a power of two from 16 on; 32 by default. Where it does not divide a matrix's
            rows, the largest power of two below it that does is taken, down to 16; a matrix without one stays in
            float32.
        tables: Store embedding tables in 8 bits (`precision/tables.py`); True by default.
    """

    name: ClassVar[str] = "int4"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""
    capabilities: ClassVar[LoweringCapabilities] = LoweringCapabilities(
        needs_calibration=False, mixes=True, complexity=60
    )

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return (
            refuse_form(model, self.name)
            or refuse_without(model, scheme.ops or block_weights.OPS, word=" or ")
            or _refuse_scheme(scheme)
            or block_weights.refuse_shapes(model, scheme.ops or block_weights.OPS, _read(scheme)[1])
        )

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        if (reason := _refuse_scheme(scheme)) is not None:
            raise UsageError(reason)
        method, block = _read(scheme)
        quantise = partial(blocks.quantize, symmetric=scheme.weights == "int4", method=method)
        said = f"weights in 4 bits, by blocks of {block} ({method})"
        lowered = block_weights.lower(model, scheme, keep, into, block, quantise, said)
        if isinstance(lowered, str):
            raise UsageError(lowered)
        return lowered


def _read(scheme: Scheme) -> tuple[str, int]:
    return str(scheme.options.get("method", "hqq")), int(scheme.options.get("block", BLOCK))


def _refuse_scheme(scheme: Scheme) -> str | None:
    method, block = _read(scheme)
    if method not in blocks.METHODS:
        return f"there is no int4 method {method!r}; there is {', '.join(blocks.METHODS)}"
    if block < block_weights.SMALLEST_BLOCK or block & (block - 1):
        return f"a block of int4 weights is a power of two from {block_weights.SMALLEST_BLOCK} on, not {block}"
    if scheme.weights not in ("", "int4", "uint4"):
        return f"weights of int4 are int4 or uint4, not {scheme.weights}"
    if other := sorted(set(scheme.ops) - set(block_weights.OPS)):
        return f"int4 has weights of {' and '.join(block_weights.OPS)} only, not of {other[0]}"
    return None
