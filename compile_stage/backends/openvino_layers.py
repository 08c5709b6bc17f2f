"""What OpenVINO runs: each layer of a compiled model with the precision that it computes in."""

from __future__ import annotations

from collections import Counter
from typing import Any

from compile_stage.core.environment import hardware
from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import Scheme

# Layers that do the arithmetic of a network, and the precisions that count as integer.
_HEAVY = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "RNNCell", "ScaledDotProductAttention")
_INTEGER = ("i8", "u8")
_BLOCKS = ("i4", "u4")  # of a layer whose weights are compressed; it computes in the hint's precision
_MATRIX_OPS = ("MatMul", "Convolution", "GroupConvolution")


def read_back(compiled: Any, graph: Any, scheme: Scheme) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What each layer of the executed graph runs in. Raises when the precision that was asked for was not taken.

    The plug-in may fuse matrix layers with their neighbours into one `Subgraph`; it is then recognised by the names of
    the layers in it.
    """
    operations = graph.get_ops()
    matrices = {op.get_friendly_name() for op in operations if op.get_type_name() in _MATRIX_OPS}
    quantised = any(op.get_type_name() == "FakeQuantize" or _opens_integers(op) for op in operations)
    layers: Counter[str] = Counter()
    precisions: Counter[str] = Counter()
    heavy: Counter[str] = Counter()
    for operation in compiled.get_runtime_model().get_ordered_ops():
        info = operation.get_rt_info()
        kind, precision = info["layerType"].astype(str), info["runtimePrecision"].astype(str)
        if kind in ("Const", "Input", "Output"):
            continue
        if kind == "Subgraph" and precision in _INTEGER and not quantised:
            # Named after its first input, which is a mask of truth values: nothing quantises by itself.
            precision = info["outputPrecisions"].astype(str).split(",")[0]
        layers[kind] += 1
        precisions[precision] += 1
        fused = set(info["originalLayersNames"].astype(str).split(",")) if "originalLayersNames" in info else set()
        if kind in _HEAVY or (kind == "Subgraph" and fused & matrices):
            heavy[precision] += 1
    executed = {
        "providers": {"CPU": sum(layers.values())},
        "ops": dict(sorted(layers.items())),
        "precision": {"matrix_and_convolution": dict(sorted(heavy.items())), "all": dict(sorted(precisions.items()))},
    }
    return executed, check_precision(scheme, heavy, quantised=quantised)


def _opens_integers(operation: Any) -> bool:
    """Whether it makes floats of weights that are kept in few bits."""
    if operation.get_type_name() != "Convert":
        return False
    made_of = operation.input_value(0).get_node()
    while made_of.get_type_name() in ("Reshape", "Unsqueeze", "Transpose"):
        made_of = made_of.input_value(0).get_node()
    return made_of.get_type_name() == "Constant" and made_of.get_element_type().to_string() in (*_INTEGER, *_BLOCKS)


def check_precision(scheme: Scheme, heavy: Counter[str], *, quantised: bool) -> tuple[str, ...]:
    """What to say of the precision that the matrix and convolution layers run in.

    Args:
        heavy: Their number by precision.
        quantised: Whether the source's own graph is.

    Raises:
        NothingCompiledError: It is not the one that was asked for.
    """
    wanted = {"int8": _INTEGER, "int4": _BLOCKS, "bf16": ("bf16",), "fp16": ("f16",), "fp32": ("f32",)}.get(
        scheme.precision
    )
    if wanted is None:  # a third party's precision: nobody here knows what its kernels run in
        return ()
    taken = sum(heavy[precision] for precision in wanted)
    rest = {precision: count for precision, count in sorted(heavy.items()) if precision not in wanted}
    listed = ", ".join(f"{count} in {precision}" for precision, count in rest.items())
    if scheme.precision == "fp32":
        if quantised and set(rest) <= {*_INTEGER, *_BLOCKS}:  # no lowering has touched it
            integer = sum(rest.values())
            return (
                (f"the source's own graph is quantised: {integer} matrix and convolution layers do not run in float",)
                if integer
                else ()
            )
        if rest:
            raise NothingCompiledError(
                f"the graph is fp32, and OpenVINO runs some of its layers in another precision: {listed}"
            )
        return ()
    if not taken:
        raise NothingCompiledError(
            f"OpenVINO was asked for {scheme.precision} and runs none of the matrix and convolution layers in it"
            + (f": {listed}" if listed else "; the graph has none")
        )
    if scheme.precision == "int4":
        how = "compute in floats" if hardware().sums_saturate else "multiply them with inputs rounded to 8 bits"
        return (f"{taken} matrix layers read weights in 4 bits and {how}, {listed or 'none in other precisions'}",)
    return (f"{taken} matrix and convolution layers run in {scheme.precision}, {listed}",) if rest else ()
