"""TransformedTargetRegressor, which skl2onnx has no converter for: the regressor in it, and behind that what brings its
answers back to the target's own scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile_stage.sources.sklearn_functions import FUNCTIONS, Step, write_steps
from compile_stage.sources.sklearn_parts import parts


def refuse_targets(estimator: Any) -> str | None:
    """The reason when answers are brought back by something that is not written in ONNX."""
    for model in _models(estimator):
        if _inverse(model) is None:
            held = model.transformer_
            by = getattr(getattr(held, "inverse_func", held), "__name__", type(held).__name__)
            return (
                f"its TransformedTargetRegressor brings answers back by {by}, which is not compiled: use func=np.log1p "
                "and inverse_func=np.expm1 (or another pair of NumPy's exp, log, sqrt, square), or a StandardScaler, "
                "MinMaxScaler, MaxAbsScaler or RobustScaler as its transformer"
            )
    return None


def register_target_converter(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator."""
    from skl2onnx import update_registered_converter

    for kind in {type(model) for model in _models(estimator)}:
        update_registered_converter(kind, "CompileStageTransformedTargetRegressor", _infer_shape, _convert)


def _models(estimator: Any) -> list[Any]:
    return [
        part
        for part in parts(estimator)
        if type(part).__name__ == "TransformedTargetRegressor" and hasattr(part, "regressor_")
    ]


def _inverse(model: Any) -> Sequence[Step] | None:
    """What its transformer's inverse_transform() computes; None where ONNX has no such steps here."""
    held = model.transformer_
    kind = type(held).__name__
    if kind == "FunctionTransformer" and not held.inv_kw_args:
        known = [steps for function, steps in FUNCTIONS.items() if held.inverse_func is function]
        return known[0] if known else None
    if kind == "MinMaxScaler":
        return (("Sub", held.min_), ("Div", held.scale_))
    if kind in ("StandardScaler", "RobustScaler", "MaxAbsScaler"):
        offset = getattr(held, "mean_" if kind == "StandardScaler" else "center_", None)
        steps = (("Mul", held.scale_), ("Add", offset if getattr(held, "with_mean", True) else None))
        return tuple(step for step in steps if step[1] is not None)
    return None


def _infer_shape(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    operator.outputs[0].type = FloatTensorType([operator.inputs[0].get_first_dimension(), None])


def _convert(scope: Any, operator: Any, container: Any) -> None:
    from skl2onnx._supported_operators import sklearn_operator_name_map
    from skl2onnx.common.data_types import FloatTensorType

    model = operator.raw_operator
    regressor = scope.declare_local_operator(sklearn_operator_name_map[type(model.regressor_)], model.regressor_)
    regressor.inputs = operator.inputs
    answer = scope.declare_local_variable("regressed", FloatTensorType())
    regressor.outputs.append(answer)
    value = write_steps(scope, container, answer.full_name, _inverse(model) or ())
    output = operator.outputs[0].full_name
    container.add_node("Identity", [value], output, name=scope.get_unique_operator_name("target"))
