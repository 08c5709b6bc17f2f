"""Steps that make many columns of few, which skl2onnx has no converter for: splines, and approximated kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compile_stage.sources.sklearn_parts import parts


def refuse_expansions(estimator: Any) -> str | None:
    """The reason when one of them does something that is not written in ONNX."""
    for part in _expansions(estimator):
        kind = type(part).__name__
        if kind == "Nystroem" and part.kernel != "rbf":
            return f"its Nystroem has kernel={part.kernel!r}, and 'rbf' alone is compiled: fit it with kernel='rbf'"
        if kind == "SplineTransformer" and part.degree < (2 if part.extrapolation == "linear" else 1):
            # Of splines of degree 1 scikit-learn draws the line in each column but the first from the second knot.
            return (
                f"its SplineTransformer has degree={part.degree} and extrapolation={part.extrapolation!r}, which is "
                "not compiled: fit it with degree=2 or more"
            )
        if kind == "SplineTransformer" and part.extrapolation in ("error", "periodic"):
            return (
                f"its SplineTransformer has extrapolation={part.extrapolation!r}, which is not compiled: fit it with "
                "'constant', 'linear' or 'continue'"
            )
        if kind == "SplineTransformer" and getattr(part, "handle_missing", "error") != "error":
            return (
                "its SplineTransformer makes zeros of missing numbers, which is not compiled: fill them in before it "
                "(SimpleImputer), and fit it with handle_missing='error'"
            )
    return None


def register_expansions(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator."""
    from skl2onnx import update_registered_converter

    for kind in {type(part) for part in _expansions(estimator)}:
        update_registered_converter(kind, f"CompileStage{kind.__name__}", _infer_shape, _CONVERTERS[kind.__name__])


def _expansions(estimator: Any) -> list[Any]:
    return [part for part in parts(estimator) if type(part).__name__ in _CONVERTERS]


def _infer_shape(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    step = operator.raw_operator
    if type(step).__name__ == "SplineTransformer":
        width = step.n_features_out_
    else:
        width = step.normalization_.shape[0] if hasattr(step, "normalization_") else step.random_weights_.shape[1]
    operator.outputs[0].type = FloatTensorType([operator.inputs[0].get_first_dimension(), int(width)])


def _rows(operator: Any, opset: Any) -> Any:
    from skl2onnx.algebra.onnx_ops import OnnxConcat

    return OnnxConcat(*operator.inputs, axis=1, **opset)


def _convert_nystroem(scope: Any, operator: Any, container: Any) -> None:
    """exp(-gamma |x - c|^2) for each of its components c, times its normalization. The square of the distance is
    summed column by column: that of the norms and the product loses digits in float32."""
    import numpy as np
    from skl2onnx.algebra.onnx_ops import (
        OnnxExp,
        OnnxMatMul,
        OnnxMul,
        OnnxReduceSumApi11,
        OnnxSub,
        OnnxUnsqueezeApi11,
    )

    step, opset = operator.raw_operator, {"op_version": container.target_opset}
    gamma = step._get_kernel_params().get("gamma")
    gamma = 1.0 / step.components_.shape[1] if gamma is None else gamma
    each = OnnxUnsqueezeApi11(_rows(operator, opset), axes=[1], **opset)  # [rows, 1, columns]
    apart = OnnxSub(each, np.asarray(step.components_, np.float32), **opset)
    far = OnnxReduceSumApi11(OnnxMul(apart, apart, **opset), axes=[2], keepdims=0, **opset)
    near = OnnxExp(OnnxMul(far, np.array([-gamma], np.float32), **opset), **opset)
    OnnxMatMul(near, np.asarray(step.normalization_.T, np.float32), output_names=operator.outputs[:1], **opset).add_to(
        scope, container
    )


def _convert_rbf_sampler(scope: Any, operator: Any, container: Any) -> None:
    import numpy as np
    from skl2onnx.algebra.onnx_ops import OnnxAdd, OnnxCos, OnnxMatMul, OnnxMul

    step, opset = operator.raw_operator, {"op_version": container.target_opset}
    weights, offset = (np.asarray(one, np.float32) for one in (step.random_weights_, step.random_offset_))
    angle = OnnxAdd(OnnxMatMul(_rows(operator, opset), weights, **opset), offset, **opset)
    scale = np.array([np.sqrt(2.0 / step.random_weights_.shape[1])], np.float32)
    OnnxMul(OnnxCos(angle, **opset), scale, output_names=operator.outputs[:1], **opset).add_to(scope, container)


def _convert_splines(scope: Any, operator: Any, container: Any) -> None:
    """Each spline is a polynomial between two knots: the piece is found by counting the knots up to a number, and its
    coefficients are looked up. Pieces are written in the distance from their first knot, which keeps float32's digits.
    """
    import numpy as np
    from onnx import TensorProto
    from skl2onnx.algebra.onnx_ops import (
        OnnxAdd,
        OnnxCast,
        OnnxGather,
        OnnxGreater,
        OnnxGreaterOrEqual,
        OnnxLess,
        OnnxMul,
        OnnxReduceSumApi11,
        OnnxReshapeApi13,
        OnnxSub,
        OnnxUnsqueezeApi11,
        OnnxWhere,
    )

    step, opset = operator.raw_operator, {"op_version": container.target_opset}
    knots, pieces = _pieces(step)
    columns, count, powers, splines = pieces.shape
    low, high, zero = knots[:, 0], knots[:, -1], np.zeros(1, np.float32)
    x = _rows(operator, opset)
    # A number below all knots belongs to the first piece.
    starts = np.column_stack([np.full(columns, np.finfo(np.float32).min), knots[:, 1:-1]]).astype(np.float32)
    reached = OnnxGreaterOrEqual(OnnxUnsqueezeApi11(x, axes=[2], **opset), starts, **opset)
    place = OnnxReduceSumApi11(OnnxCast(reached, to=TensorProto.INT64, **opset), axes=[2], keepdims=0, **opset)
    place = OnnxAdd(place, np.arange(columns, dtype=np.int64) * count - 1, **opset)  # [rows, columns]
    start = OnnxGather(knots[:, :-1].reshape(-1), place, axis=0, **opset)
    inside = OnnxUnsqueezeApi11(OnnxSub(x, start, **opset), axes=[2], **opset)
    value: Any = None
    for power in range(powers):  # Horner's scheme, from the highest power on
        table = pieces[:, :, power].reshape(columns * count, splines)
        coefficients = OnnxGather(table, place, axis=0, **opset)  # [rows, columns, splines]
        value = coefficients if value is None else OnnxAdd(OnnxMul(value, inside, **opset), coefficients, **opset)
    if step.extrapolation != "continue":
        for beyond, knot, (height, slope) in zip(
            (OnnxLess, OnnxGreater), (low, high), _lines(step, splines), strict=True
        ):
            away = OnnxUnsqueezeApi11(OnnxSub(x, knot, **opset), axes=[2], **opset)
            line = OnnxAdd(OnnxMul(away, slope, **opset), height, **opset)
            value = OnnxWhere(beyond(away, zero, **opset), line, value, **opset)
    flat = np.array([-1, columns * splines], np.int64)
    OnnxReshapeApi13(value, flat, output_names=operator.outputs[:1], **opset).add_to(scope, container)


def _kept(step: Any, spline: Any) -> int:
    """How many splines of a column are answered: without a bias the last one is left out."""
    return int(spline.c.shape[1]) - (0 if step.include_bias else 1)


def _pieces(step: Any) -> tuple[Any, Any]:
    """The knots of each column, [columns, knots], and the coefficients of the polynomials between them in the distance
    from the knot before, [columns, pieces, powers, splines], the highest power first; in float32."""
    import numpy as np
    from scipy.interpolate import PPoly

    knots, pieces = [], []
    for spline in step.bsplines_:
        inner = slice(spline.k, len(spline.t) - spline.k)
        made = [PPoly.from_spline((spline.t, spline.c[:, at], spline.k)).c for at in range(_kept(step, spline))]
        knots.append(spline.t[inner])
        pieces.append(np.moveaxis(np.array(made), 0, -1)[:, inner.start : inner.stop - 1].swapaxes(0, 1))
    return np.array(knots, np.float32), np.array(pieces, np.float32)


def _lines(step: Any, splines: int) -> list[tuple[Any, Any]]:
    """Height and slope of the lines by which the splines go on before the first knot and behind the last, each
    [columns, splines] in float32. Like scikit-learn only `degree` splines at either end go on: where knots lie on each
    other, as quantiles may, others are cut off."""
    import numpy as np

    lines = []
    for at, ends in ((step.degree, slice(None, step.degree)), (-step.degree - 1, slice(-step.degree, None))):
        line = []
        for derivative in (0, 1):
            values = np.zeros((len(step.bsplines_), step.bsplines_[0].c.shape[1]), np.float32)
            if derivative == 0 or step.extrapolation == "linear":
                values[:, ends] = [spline(spline.t[at], nu=derivative)[ends] for spline in step.bsplines_]
            line.append(values[:, :splines])
        lines.append((line[0], line[1]))
    return lines


_CONVERTERS: Mapping[str, Callable[..., None]] = {
    "Nystroem": _convert_nystroem,
    "RBFSampler": _convert_rbf_sampler,
    "SplineTransformer": _convert_splines,
}
