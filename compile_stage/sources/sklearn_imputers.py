"""Imputers, and indicators of missing numbers. skl2onnx converts neither an indicator nor what an imputer adds of one,
refuses whole numbers that stand for a missing one, and keeps columns that scikit-learn drops."""

from __future__ import annotations

from typing import Any

import numpy as np

from compile_stage.sources.sklearn_nodes import add_node
from compile_stage.sources.sklearn_parts import parts
from compile_stage.sources.sklearn_texts import convert_text_imputer, keeps_texts


def register_imputers(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator."""
    from skl2onnx import update_registered_converter

    for kind in {type(part) for part in parts(estimator)}:
        if kind.__name__ == "SimpleImputer":
            update_registered_converter(kind, "SklearnSimpleImputer", _infer_imputed, _convert_imputer)
        elif kind.__name__ == "MissingIndicator":
            update_registered_converter(kind, "CompileStageMissingIndicator", _infer_indicated, _convert_indicator)


def _infer_imputed(operator: Any) -> None:
    from skl2onnx.shape_calculators.imputer import calculate_sklearn_imputer_output_shapes

    calculate_sklearn_imputer_output_shapes(operator)
    imputer, shape = operator.raw_operator, operator.outputs[0].type.shape
    if _is_plain(imputer):
        return
    shape[1] = len(_kept(imputer)) + len(_indicated(imputer))


def _infer_indicated(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    rows = operator.inputs[0].get_first_dimension()
    operator.outputs[0].type = FloatTensorType([rows, len(operator.raw_operator.features_)])


def _convert_imputer(scope: Any, operator: Any, container: Any) -> None:
    from onnx import TensorProto
    from skl2onnx.operator_converters.imputer_op import convert_sklearn_imputer

    imputer = operator.raw_operator
    if keeps_texts(imputer):
        convert_text_imputer(scope, operator, container)
        return
    if _is_plain(imputer):
        convert_sklearn_imputer(scope, operator, container)
        return
    rows = _joined(scope, operator, container)
    missing = _missing(scope, container, rows, imputer.missing_values)
    fill = scope.get_unique_variable_name("fill")
    statistics = np.asarray(imputer.statistics_, np.float32)
    container.add_initializer(fill, TensorProto.FLOAT, [1, len(statistics)], statistics.tolist())
    filled = add_node(scope, container, "Where", missing, fill, rows)
    blocks = [_picked(scope, container, filled, _kept(imputer))]
    if len(indicated := _indicated(imputer)):
        picked = _picked(scope, container, missing, indicated)
        blocks.append(add_node(scope, container, "Cast", picked, to=TensorProto.FLOAT))
    add_node(scope, container, "Concat", *blocks, made=operator.outputs[0].full_name, axis=1)


def _convert_indicator(scope: Any, operator: Any, container: Any) -> None:
    from onnx import TensorProto

    indicator = operator.raw_operator
    missing = _missing(scope, container, _joined(scope, operator, container), indicator.missing_values)
    picked = _picked(scope, container, missing, indicator.features_)
    add_node(scope, container, "Cast", picked, made=operator.outputs[0].full_name, to=TensorProto.FLOAT)


def _is_plain(imputer: Any) -> bool:
    """Whether skl2onnx's converter answers as it does, or is to say what it does not take."""
    is_number = isinstance(imputer.missing_values, float)
    return not _is_numeric(imputer) or (
        is_number and len(_kept(imputer)) == len(imputer.statistics_) and not len(_indicated(imputer))
    )


def _is_numeric(imputer: Any) -> bool:
    statistics = np.asarray(getattr(imputer, "statistics_", ())).tolist()  # a constant is held as an object
    numbers = all(isinstance(value, int | float) for value in statistics)
    return numbers and not isinstance(imputer.missing_values, str)


def _kept(imputer: Any) -> Any:
    """The columns that are left of those that it is given: some had no number in the training data."""
    empty = np.isnan(np.asarray(imputer.statistics_, np.float64))
    drops = imputer.strategy != "constant" and not imputer.keep_empty_features
    return np.flatnonzero(~empty) if drops else np.arange(len(empty))


def _indicated(imputer: Any) -> Any:
    indicator = getattr(imputer, "indicator_", None)
    return () if indicator is None else indicator.features_


def _joined(scope: Any, operator: Any, container: Any) -> str:
    from skl2onnx.operator_converters.common import concatenate_variables

    return str(concatenate_variables(scope, operator.inputs, container))


def _missing(scope: Any, container: Any, rows: str, missing: Any) -> str:
    """Where the rows hold what stands for a missing number: NaN, or a number."""
    from onnx import TensorProto

    if not isinstance(missing, int | float | np.number) or np.isnan(missing):  # None and pandas.NA are NaN in float32
        return add_node(scope, container, "IsNaN", rows)
    name = scope.get_unique_variable_name("missing_number")
    container.add_initializer(name, TensorProto.FLOAT, [], [float(missing)])
    return add_node(scope, container, "Equal", rows, name)


def _picked(scope: Any, container: Any, table: str, columns: Any) -> str:
    from onnx import TensorProto

    name = scope.get_unique_variable_name("columns")
    container.add_initializer(name, TensorProto.INT64, [len(columns)], [int(column) for column in columns])
    return add_node(scope, container, "Gather", table, name, axis=1)
