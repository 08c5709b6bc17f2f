"""Isotonic calibration: skl2onnx takes the probability of the nearest threshold, and scikit-learn interpolates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.sources.sklearn_nodes import add_node

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


@contextmanager
def isotonic_interpolated() -> Iterator[None]:
    """While in it, skl2onnx writes isotonic calibrators as `write_interpolation` does."""
    from skl2onnx.operator_converters import calibrated_classifier_cv as converter

    before = converter._transform_isotonic
    converter._transform_isotonic = write_interpolation
    try:
        yield
    finally:
        converter._transform_isotonic = before


def ramps(x: Array, y: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """The line through points `x`, `y` (`[n]`, x ascending), constant outside of them, as a sum of ramps:
    y[0] + Σ rise · clip((value - start) / width, 0, 1).

    Where two x are one number in `dtype`, the ramp is as wide as the step to the next number.

    Returns:
        Starts, widths and rises, each `[n - 1]`; of a single point one ramp that does not rise.
    """
    if len(x) == 1:
        x, y = np.append(x, x + 1), np.append(y, y)
    at = np.asarray(x, dtype)
    widths = np.maximum(np.diff(at), np.spacing(np.abs(at[:-1])))
    return at[:-1], widths, np.diff(np.asarray(y, np.float64)).astype(dtype)


def write_interpolation(
    scope: Any, container: Any, model: Any, scores: str, k: int, dtype: Any, proto_type: int
) -> str:
    """Write class k's calibrator, in place of skl2onnx's own function, whose arguments it has.

    Args:
        model: scikit-learn's `_CalibratedClassifier`.
        scores: Name of a tensor with a score for each row.

    Returns:
        The name of its probabilities, `[batch, 1]`.
    """
    from onnx import TensorProto

    calibrator = model.calibrators[k]
    starts, widths, rises = ramps(calibrator.X_thresholds_, calibrator.y_thresholds_, dtype)
    kind = TensorProto.DOUBLE if dtype == np.float64 else TensorProto.FLOAT

    def constant(name: str, values: Array, *shape: int) -> str:
        unique = scope.get_unique_variable_name(name)
        container.add_initializer(unique, kind, list(shape), values.ravel().tolist())
        return str(unique)

    node = partial(add_node, scope, container)

    def sizes(name: str, *values: int) -> str:
        unique = scope.get_unique_variable_name(name)
        container.add_initializer(unique, TensorProto.INT64, [len(values)], list(values))
        return str(unique)

    count, first = len(starts), np.asarray(calibrator.y_thresholds_[:1])
    score = node("Reshape", scores, sizes("column", -1, 1))
    beyond = node("Sub", score, constant("starts", starts, 1, count))
    part = node("Div", beyond, constant("widths", widths, 1, count))
    within = node("Clip", part, constant("none", np.zeros(1)), constant("all", np.ones(1)))
    # A sum, since a product of matrices would be taken for what int8 makes faster.
    risen = node("ReduceSum", node("Mul", within, constant("rises", rises, 1, count)), sizes("ramps", 1))
    return node("Add", risen, constant("least", first, 1, 1))
