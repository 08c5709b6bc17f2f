"""Functions of NumPy that a model's steps call, in operators of ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compile_stage.sources.sklearn_parts import parts

# What an operator of ONNX takes beside what stands before it: nothing, or a number for each column.
Step = tuple[str, Any]

FUNCTIONS: Mapping[Any, Sequence[Step]] = {
    None: (),
    np.abs: (("Abs", None),),
    np.exp: (("Exp", None),),
    np.expm1: (("Exp", None), ("Sub", 1.0)),
    np.exp2: (("Mul", np.log(2.0)), ("Exp", None)),
    np.log: (("Log", None),),
    np.log1p: (("Add", 1.0), ("Log", None)),
    np.log2: (("Log", None), ("Div", np.log(2.0))),
    np.log10: (("Log", None), ("Div", np.log(10.0))),
    np.sqrt: (("Sqrt", None),),
    np.square: (("Mul", "itself"),),
    np.negative: (("Neg", None),),
}


def refuse_functions(estimator: Any) -> str | None:
    """The reason when a step calls another function of Python. What brings a target back is `sklearn_targets`' to
    judge."""
    for part in _transformers(estimator):
        if part.func not in FUNCTIONS or part.kw_args:
            name = getattr(part.func, "__name__", type(part.func).__name__)
            known = ", ".join(f"np.{one.__name__}" for one in FUNCTIONS if one is not None)
            return (
                f"its FunctionTransformer calls {name}, and of functions these alone are compiled, without kw_args: "
                f"{known}; call it before the model, and log the model that takes what it gives"
            )
    return None


def register_functions(estimator: Any) -> None:
    """Have skl2onnx convert them."""
    from skl2onnx import update_registered_converter

    for kind in {type(part) for part in _transformers(estimator)}:
        update_registered_converter(kind, "SklearnFunctionTransformer", _infer_shape, _convert)


def write_steps(scope: Any, container: Any, value: str, steps: Sequence[Step]) -> str:
    """Write them behind a value into skl2onnx's container. Returns the name of what they give."""
    from onnx import TensorProto

    for kind, beside in steps:
        made, taken = str(scope.get_unique_variable_name("computed")), [value]
        if isinstance(beside, str):
            taken.append(value)
        elif beside is not None:
            constant = np.asarray(beside, np.float32)
            taken.append(scope.get_unique_variable_name("of_column"))
            container.add_initializer(taken[1], TensorProto.FLOAT, list(constant.shape), constant.ravel().tolist())
        container.add_node(kind, taken, made, name=scope.get_unique_operator_name(kind))
        value = made
    return value


def _transformers(estimator: Any) -> list[Any]:
    held = list(parts(estimator))
    of_targets = {id(part.transformer_) for part in held if hasattr(part, "transformer_")}
    return [part for part in held if type(part).__name__ == "FunctionTransformer" and id(part) not in of_targets]


def _infer_shape(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType
    from skl2onnx.shape_calculators.function_transformer import calculate_sklearn_function_transformer_output_shapes

    if operator.raw_operator.func is None:
        calculate_sklearn_function_transformer_output_shapes(operator)
        return
    columns = [column.type.shape[1] for column in operator.inputs]
    width = None if None in columns else sum(columns)
    operator.outputs[0].type = FloatTensorType([operator.inputs[0].get_first_dimension(), width])


def _convert(scope: Any, operator: Any, container: Any) -> None:
    from skl2onnx.operator_converters.function_transformer import convert_sklearn_function_transformer

    transformer = operator.raw_operator
    if transformer.func is None:
        convert_sklearn_function_transformer(scope, operator, container)
        return
    rows = scope.get_unique_variable_name("rows")
    columns = [column.full_name for column in operator.inputs]
    container.add_node("Concat", columns, rows, name=scope.get_unique_operator_name("rows"), axis=1)
    value = write_steps(scope, container, rows, FUNCTIONS[transformer.func])
    output = operator.outputs[0].full_name
    container.add_node("Identity", [value], output, name=scope.get_unique_operator_name("function"))
