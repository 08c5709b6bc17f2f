"""MaxAbsScaler with `clip`, which skl2onnx converts without the limits; and the edges of bins, which numbers that
float32 rounds are to reach."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compile_stage.sources.sklearn_parts import parts

_STEPS = 4
"""A number and an edge are each rounded by half a step; a scaler's mean, where it is as large, adds two."""


def register_clipped_scalers(estimator: Any) -> None:
    """Have skl2onnx keep the answers of each MaxAbsScaler(clip=True) in the estimator within -1 and 1."""
    from skl2onnx import update_registered_converter
    from skl2onnx.shape_calculators.scaler import calculate_sklearn_scaler_output_shapes

    kinds = {type(part) for part in parts(estimator) if type(part).__name__ == "MaxAbsScaler"}
    for kind in kinds:
        update_registered_converter(
            kind,
            "SklearnMaxAbsScaler",
            calculate_sklearn_scaler_output_shapes,
            _convert,
            options={"div": ["std", "div", "div_cast"]},
        )


@contextmanager
def edges_moved(estimator: Any, *, is_given_float32: bool) -> Iterator[None]:
    """Move the edges of each KBinsDiscretizer to where float32 compares as float64 does. A number at an edge belongs to
    the bin above.

    Edges from quantiles are values of the training data, and go down by a few of float32's steps: where float32 rounds
    such a value down, on the way through a scaler too, it fell into the bin below. Others are computed, such as
    0.6000000000000001 between bins of equal width: 0.6 falls into the bin below it, and 0.2 into the bin above 0.2.
    Each goes to where float32 has the decimal number that is nearest to it on the same side.

    Args:
        is_given_float32: No other numbers reach the model.
    """
    import numpy as np

    bins = [part for part in parts(estimator) if type(part).__name__ == "KBinsDiscretizer" and hasattr(part, "n_bins_")]
    before = [part.bin_edges_ for part in bins]
    for part, edges in zip(bins, before, strict=True):
        moved = np.empty(len(edges), object)
        for column, held in enumerate(edges):
            if part.strategy == "quantile":
                largest = np.float32(np.abs(held).max(initial=0.0))
                moved[column] = held - _STEPS * float(np.spacing(largest))
            else:
                moved[column] = np.array([_computed_edge(edge, is_given_float32) for edge in held])
        part.bin_edges_ = moved
    try:
        yield
    finally:
        for part, edges in zip(bins, before, strict=True):
            part.bin_edges_ = edges


def _computed_edge(edge: float, is_given_float32: bool) -> float:
    """The edge in float32: the next number above where the one at it belongs to the bin below. Of what float64 has
    there, that is the decimal number that float32 prints."""
    import numpy as np

    nearest = np.float32(edge)
    given = float(nearest) if is_given_float32 else float(str(nearest))
    return float(nearest if given >= edge else np.nextafter(nearest, np.float32(np.inf)))


def _convert(scope: Any, operator: Any, container: Any) -> None:
    from onnx import TensorProto
    from skl2onnx.operator_converters.scaler_op import convert_sklearn_scaler

    scaler = operator.raw_operator
    if not getattr(scaler, "clip", False):
        convert_sklearn_scaler(scope, operator, container)
        return
    plain = copy.copy(scaler)
    plain.clip = False
    for holder in (scope, container):
        holder.add_options(id(plain), options=container.get_options(scaler, {"div": "std"}))
    inner = scope.declare_local_operator("SklearnMaxAbsScaler", plain)
    inner.inputs = operator.inputs
    scaled = scope.declare_local_variable("scaled", type(operator.outputs[0].type)())
    inner.outputs.append(scaled)
    low, high = (scope.get_unique_variable_name(name) for name in ("low", "high"))
    container.add_initializer(low, TensorProto.FLOAT, [], [-1.0])
    container.add_initializer(high, TensorProto.FLOAT, [], [1.0])
    clipped = scope.get_unique_operator_name("clipped")
    container.add_node("Clip", [scaled.full_name, low, high], operator.outputs[0].full_name, name=clipped)
