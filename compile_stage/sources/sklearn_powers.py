"""PowerTransformer: skl2onnx makes zeros of missing numbers, and raises to powers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_stage.sources.sklearn_nodes import add_node
from compile_stage.sources.sklearn_parts import parts


def register_power_transformers(estimator: Any, *, is_given_float32: bool) -> None:
    """Have skl2onnx convert those in the estimator as scikit-learn computes.

    Args:
        is_given_float32: The estimator gets no other numbers, and scikit-learn rounds each step to float32.
    """
    from skl2onnx import update_registered_converter
    from skl2onnx.shape_calculators.scaler import calculate_sklearn_scaler_output_shapes

    for kind in {type(part) for part in parts(estimator) if type(part).__name__ == "PowerTransformer"}:
        update_registered_converter(
            kind,
            "CompileStagePowerTransformer",
            calculate_sklearn_scaler_output_shapes,
            _converter(is_given_float32),
        )


def _converter(is_given_float32: bool) -> Callable[[Any, Any, Any], None]:
    """In float64: `x ** power - 1` is the difference of numbers that are nearly alike where a column varies little, and
    the scaler behind it magnifies what float32 has left of it. A missing number stays one."""

    def convert(scope: Any, operator: Any, container: Any) -> None:
        import numpy as np
        from onnx import TensorProto
        from skl2onnx.operator_converters.common import concatenate_variables

        step = operator.raw_operator

        def node(kind: str, *taken: str, **attributes: Any) -> str:
            return add_node(scope, container, kind, *taken, **attributes)

        def constant(values: Any) -> str:
            name = str(scope.get_unique_variable_name("power"))
            held = np.atleast_1d(np.asarray(values, np.float64))
            container.add_initializer(name, TensorProto.DOUBLE, list(held.shape), held.tolist())
            return name

        def rounded(wide: str) -> str:
            if not is_given_float32:
                return wide
            return node("Cast", node("Cast", wide, to=TensorProto.FLOAT), to=TensorProto.DOUBLE)

        rows = node("Cast", str(concatenate_variables(scope, operator.inputs, container)), to=TensorProto.DOUBLE)
        zero, one = constant(0.0), constant(1.0)
        powers = np.asarray(step.lambdas_, np.float64)
        if step.method == "box-cox":  # scikit-learn refuses numbers that are not above 0
            logarithms = node("Log", node("Where", node("Greater", rows, zero), rows, constant(np.nan)))
            changed = _raised(node, constant, logarithms, powers, one)
        else:
            logarithms = rounded(node("Log", node("Add", node("Abs", rows), one)))
            above = _raised(node, constant, logarithms, powers, one)
            below = node("Neg", _raised(node, constant, logarithms, 2 - powers, one))
            changed = node("Where", node("Less", rows, zero), below, above)
        if step.standardize:
            centred = rounded(node("Sub", rounded(changed), constant(step._scaler.mean_)))
            changed = node("Div", centred, constant(step._scaler.scale_))
        node("Cast", changed, made=operator.outputs[0].full_name, to=TensorProto.FLOAT)

    return convert


def _raised(node: Callable[..., str], constant: Callable[..., str], logarithms: str, powers: Any, one: str) -> str:
    """(exp(power * logarithm) - 1) / power; the logarithm where the power is 0, to which that tends."""
    import numpy as np

    is_none = np.abs(powers) < np.finfo(np.float64).eps
    safe = constant(np.where(is_none, 1.0, powers))
    raised = node("Div", node("Sub", node("Exp", node("Mul", logarithms, safe)), one), safe)
    if not is_none.any():
        return raised
    share = constant(is_none)
    return node("Where", node("Greater", share, constant(0.5)), logarithms, raised)
