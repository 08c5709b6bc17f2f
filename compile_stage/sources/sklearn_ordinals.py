"""OrdinalEncoder and TargetEncoder.

skl2onnx's graph of a missing category has its number in the order of categories, and not `encoded_missing_value`: NaN
by default, by which trees and imputers know a missing number. In columns of numbers it takes each NaN for an unknown
one, since ONNX Runtime's LabelEncoder finds no NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.sources.sklearn_nodes import add_node
from compile_stage.sources.sklearn_parts import parts

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_ALIASES = {"OrdinalEncoder": "SklearnOrdinalEncoder", "TargetEncoder": "SklearnTargetEncoder"}


def register_ordinals(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator."""
    from skl2onnx import update_registered_converter

    for kind in {type(part) for part in parts(estimator) if type(part).__name__ in _ALIASES}:
        update_registered_converter(kind, _ALIASES[kind.__name__], _infer_shape, _convert)


def _infer_shape(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType, Int64TensorType

    encoder = operator.raw_operator
    kind = FloatTensorType if _answers_floats(encoder) else Int64TensorType
    width = len(getattr(encoder, "encodings_", encoder.categories_))
    operator.outputs[0].type = kind([operator.inputs[0].get_first_dimension(), width])


def _answers_floats(encoder: Any) -> bool:
    return np.issubdtype(getattr(encoder, "dtype", np.float64), np.floating)


def _convert(scope: Any, operator: Any, container: Any) -> None:
    from onnx import TensorProto

    encoder = operator.raw_operator
    columns = [(given, at) for given in operator.inputs for at in range(given.type.shape[1])]
    encoded = [
        _column(scope, container, columns[number], encoder.categories_[number], values, unknown)
        for number, values, unknown in _encodings(encoder)
    ]
    joined = add_node(scope, container, "Concat", *encoded, axis=1) if len(encoded) > 1 else encoded[0]
    kind = TensorProto.FLOAT if _answers_floats(encoder) else TensorProto.INT64
    add_node(scope, container, "Cast", joined, made=operator.outputs[0].full_name, to=kind)


def _encodings(encoder: Any) -> Sequence[tuple[int, Array, float]]:
    """For each column that it answers: the number of the column that it is made of, what stands for each category of
    that, [categories], and what for an unknown one."""
    count = len(encoder.categories_)
    if not hasattr(encoder, "encodings_"):
        unknown = -1.0 if encoder.unknown_value is None else float(encoder.unknown_value)
        return [(number, _numbers(encoder, number), unknown) for number in range(count)]
    classes = len(encoder.encodings_) // count  # of more than two, each has a column
    means = np.atleast_1d(encoder.target_mean_)
    return [(at // classes, values, float(means[at % len(means)])) for at, values in enumerate(encoder.encodings_)]


def _numbers(encoder: Any, column: int) -> Array:
    """What an OrdinalEncoder makes of each category of a column, as itself says: [categories]."""
    import pandas as pd

    count = len(encoder.categories_[column])
    names = getattr(encoder, "feature_names_in_", range(len(encoder.categories_)))
    rows = pd.DataFrame(
        {
            name: known if at == column else np.repeat(known[:1], count)
            for at, (name, known) in enumerate(zip(names, encoder.categories_, strict=True))
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a data frame, where it was fitted on an array
        made: Array = np.asarray(encoder.transform(rows), np.float64)[:, column]
    return made


def _column(scope: Any, container: Any, place: tuple[Any, int], known: Array, values: Array, unknown: float) -> str:
    """Write what stands for each value of a column, and give its name, [batch, 1] in float32."""
    from onnx import TensorProto
    from skl2onnx.common.data_types import StringTensorType

    given, at = place
    index = scope.get_unique_variable_name("column")
    container.add_initializer(index, TensorProto.INT64, [1], [at])
    column = add_node(scope, container, "Gather", given.full_name, index, axis=1)
    options: dict[str, Any] = {"op_domain": "ai.onnx.ml", "op_version": 2, "default_float": unknown}
    if isinstance(given.type, StringTensorType):
        keys = [str(category).encode() for category in known]
        return add_node(
            scope,
            container,
            "LabelEncoder",
            column,
            keys_strings=keys,
            values_floats=np.asarray(values, np.float32),
            **options,
        )
    numbers = np.asarray([np.nan if category is None else category for category in known], np.float32)
    held, column = ~np.isnan(numbers), add_node(scope, container, "Cast", column, to=TensorProto.FLOAT)
    encoded = add_node(
        scope,
        container,
        "LabelEncoder",
        column,
        keys_floats=numbers[held],
        values_floats=np.asarray(values, np.float32)[held],
        **options,
    )
    if held.all():
        return encoded
    missing = scope.get_unique_variable_name("missing_category")
    container.add_initializer(missing, TensorProto.FLOAT, [], [float(values[~held][-1])])
    return add_node(scope, container, "Where", add_node(scope, container, "IsNaN", column), missing, encoded)
