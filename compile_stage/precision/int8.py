"""int8: static quantisation with calibrated ranges, and dynamic quantisation.

Both write standard operators. The static lowering is our own: QuantizeLinear and DequantizeLinear around what is
quantised. The dynamic one has its operators of ONNX Runtime's quantizer, MatMulInteger and its relatives
(`precision/dynamic.py`). The scheme decides how.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from packaging.version import Version

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.errors import UsageError
from compile_stage.core.generation import has_cache
from compile_stage.core.parallel import granted_threads
from compile_stage.core.ports import Lowering
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.plugin_support import onnx_weights
from compile_stage.precision import block_weights, dynamic
from compile_stage.precision.blocks import round_to_bytes
from compile_stage.precision.onnx_graph import (
    QUANTISED_OPS,
    finish,
    map_kept,
    name_nodes,
    read_batches,
    refuse_form,
    refuse_without,
    simplify,
    write_graph,
)
from compile_stage.precision.qdq import WEIGHTED
from compile_stage.precision.ranges import METHODS
from compile_stage.precision.static import Settings, quantise
from compile_stage.precision.tables import round_tables, say_tables
from compile_stage.precision.widening import WIDENED, has_float16_weights, widen_float16
from compile_stage.precision.wiring import has_subgraph

NEEDS_SAMPLES = "int8 needs calibration samples: set data.calibration in the policy"

_BLOCK = 32
"""Weights of a language model that share a scale. With 16 a token takes 20 % more time and has 0.7 of the error, with
128 it takes 15 % less and has twice the error (a product of 768 by 3,072, one outlying channel, on a Zen 5)."""

# Options of a static scheme, with what each may be.
_OPTIONS: Mapping[str, tuple[str, ...] | type] = {
    "calibration": METHODS, "percentile": float, "placement": ("chain", "operands"), "one_sided": bool,
    "equalise": bool, "correct_biases": bool, "reduce_range": bool, "tables": bool, "products": bool,
    "biases": ("int32", "float32"),
}  # fmt: skip


class StaticInt8(Lowering):
    """Weights and activations in int8, activation ranges from calibration samples (`precision/static.py`).

    Scheme options:
        calibration: How a range is chosen from what the samples hold: `mse` (the default), `minmax`, `percentile` or
            `entropy`.
        percentile: For `percentile`: so many percent of a tensor's values are kept; 99.999 by default.
        placement: `chain` (the default): outputs of convolutions are quantised, and sums and pools between them compute
            in integers. `operands`: only what a matrix operator reads is quantised.
        one_sided: True: where activations are symmetric, a tensor that lies (nearly) on one side of 0 takes uint8 and a
            zero point, which is one bit more. False by default.
        equalise: Scale channels of large values down to the others where it pays; True by default.
        correct_biases: Correct the biases by what quantisation shifts the mean of an output; True by default.
        biases: What the bias of a convolution or Gemm is stored in: `int32` (the default), in units of both scales, as
            integer kernels add it, or `float32`, for compilers that dequantise 8 bits only.
        reduce_range: 7-bit weights, for CPUs whose 16-bit sums saturate.
        tables: Store embedding tables in 8 bits (`precision/tables.py`); True by default.
        products: A MatMul of two activations (attention) computes in integers; True by default.
    """

    name: ClassVar[str] = "int8"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""
    capabilities: ClassVar[LoweringCapabilities] = LoweringCapabilities(
        needs_calibration=True, mixes=True, complexity=40
    )

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return refuse_form(model, self.name) or refuse_without(model, WEIGHTED) or _refuse_static(scheme)

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        if calibration is None or calibration.count < (model.signature.fixed_batch or 1):
            raise UsageError(NEEDS_SAMPLES)
        if (reason := _refuse_static(scheme)) is not None:
            raise UsageError(reason)
        samples = calibration
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            source, notes = _in_float32(model, Path(scratch))
            simple = simplify(source, Path(scratch))
            kept = map_kept(source, simple, keep)
            graph, done = quantise(
                simple, _settings(scheme, kept), lambda: read_batches(model, samples), granted_threads()
            )
            notes += [f"calibrated on {calibration.count} samples", *done]
            if any(map(has_subgraph, graph.graph.node)):
                notes.append("what is inside of If, Loop and Scan stays in fp32")
            return _finish(graph, model, into, scheme, kept, notes)


def _settings(scheme: Scheme, kept: Sequence[str]) -> Settings:
    options = scheme.options
    return Settings(
        ops=scheme.ops,
        signed=scheme.activations == "int8",
        symmetric=scheme.symmetric,
        one_sided=bool(options.get("one_sided", False)),
        per_channel=scheme.per_channel,
        chain=options.get("placement", "chain") == "chain",
        method=str(options.get("calibration", METHODS[0])),
        percentile=float(options.get("percentile", 99.999)),
        levels=_levels(scheme),
        equalise=bool(options.get("equalise", True)),
        correct=bool(options.get("correct_biases", True)),
        whole_biases=options.get("biases", "int32") == "int32",
        tables=bool(options.get("tables", True)),
        products=bool(options.get("products", True)),
        kept=frozenset(kept),
    )


def _levels(scheme: Scheme) -> int:
    """The largest integer of a weight: 2 * 255 * 64 is the most that 16 bits hold."""
    return 64 if scheme.options.get("reduce_range", False) else 127


def _refuse_static(scheme: Scheme) -> str | None:
    for key, value in scheme.options.items():
        allowed = _OPTIONS.get(key)
        if allowed is None:
            return f"static int8 has no option {key!r}; it has {', '.join(_OPTIONS)}"
        if isinstance(allowed, tuple) and value not in allowed:
            return f"there is no {key} {value!r}; there is {', '.join(allowed)}"
        if allowed is bool and not isinstance(value, bool):
            return f"the option {key} is true or false, not {value!r}"
        if allowed is float and not (isinstance(value, int | float) and 0 < value <= 100):
            return f"the option {key} is a number above 0 and at most 100, not {value!r}"
    if scheme.activations not in ("", "uint8", "int8"):
        return f"activations can be uint8 or int8, not {scheme.activations!r}"
    if scheme.symmetric and scheme.activations != "int8":
        return "symmetric activations are int8: uint8 has no negative half"
    return None


class DynamicInt8(Lowering):
    """Weights in int8; activations are quantised while the model runs, so no samples are needed.

    A language model's products have weights by blocks, along which runtimes quantise activations too: a few activations
    of large magnitude, which such networks have, coarsen their own block and not the whole prompt (decision 0133).

    Scheme options:
        reduce_range: 7-bit weights, for CPUs whose 16-bit sums saturate.
        tables: Store embedding tables in 8 bits (`precision/tables.py`); True by default.
    """

    name: ClassVar[str] = "int8-dynamic"
    requires: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    extra: ClassVar[str] = ""
    capabilities: ClassVar[LoweringCapabilities] = LoweringCapabilities(
        needs_calibration=False, mixes=True, complexity=30
    )

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return refuse_form(model, self.name) or refuse_without(model, dynamic.OPS, dynamic.OPS[:3])

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        if has_cache(model.signature) and _reads_bytes_by_blocks():
            quantise = partial(round_to_bytes, levels=_levels(scheme))
            said = f"weights in 8 bits, by blocks of {_BLOCK}"
            lowered = block_weights.lower(model, scheme, keep, into, _BLOCK, quantise, said)
            if not isinstance(lowered, str):
                return lowered
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch, _quiet():
            source, notes = _in_float32(model, Path(scratch))
            simple = simplify(source, Path(scratch))
            kept = map_kept(source, simple, keep)
            graph = dynamic.quantise(
                simple,
                list(scheme.ops) or list(dynamic.OPS),
                kept,
                per_channel=scheme.per_channel,
                levels=_levels(scheme),
            )
            if (
                scheme.options.get("tables", True)
                and _count_quantised(graph)
                and (count := round_tables(graph.graph, kept))
            ):
                notes.append(say_tables(count))
            return _finish(graph, model, into, scheme, kept, notes)


def _reads_bytes_by_blocks() -> bool:
    """ONNX Runtime merges 8-bit blocks with the product since 1.25; before, it expands them to floats at each call."""
    import onnxruntime

    return Version(onnxruntime.__version__) >= Version("1.25")


def _finish(
    graph: Any, model: PortableModel, into: Path, scheme: Scheme, kept: tuple[str, ...], notes: Sequence[str]
) -> PortableModel:
    if not _count_quantised(graph):
        raise UsageError(
            f"nothing was quantised: no {', '.join(scheme.ops) or 'operator'} has weights, or all are kept in fp32"
        )
    return finish(graph, model, into, scheme.precision, kept=kept, notes=notes)


def _in_float32(model: PortableModel, scratch: Path) -> tuple[Path, list[str]]:
    """The graph, and what to say of it: of one with weights in float16 a copy in float32, which is what quantises
    reads."""
    graph = onnx_weights.load(model.path)
    if not has_float16_weights(graph):
        return Path(model.path), []
    name_nodes(graph.graph)
    widen_float16(graph)
    return write_graph(graph, scratch, "wide.onnx"), [WIDENED]


def _count_quantised(graph: Any) -> int:
    return sum(node.op_type in QUANTISED_OPS for node in graph.graph.node)


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer logs advice and each node that it skips to the root logger; what matters is in the result."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
