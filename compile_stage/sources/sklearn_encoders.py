"""OneHotEncoder, OrdinalEncoder and TargetEncoder: the numbers that stand for the categories of a column.

skl2onnx's graph of a missing category has its number in the order of categories, and not `encoded_missing_value`: NaN
by default, by which trees and imputers know a missing number. In columns of numbers it takes each NaN for an unknown
one, since ONNX Runtime's LabelEncoder finds no NaN. It converts one-hot encoders that take an unknown category for a
rare one to ones that refuse it; those that put rare categories together it refuses where they have a single column, or
a matrix, and all that know a missing number.
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


def register_encoders(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator."""
    from skl2onnx import update_registered_converter

    converters = {
        "OneHotEncoder": (_infer_one_hot, _convert_one_hot),
        "OrdinalEncoder": (_infer_shape, _convert),
        "TargetEncoder": (_infer_shape, _convert),
    }
    for kind in {type(part) for part in parts(estimator) if type(part).__name__ in converters}:
        update_registered_converter(kind, f"Sklearn{kind.__name__}", *converters[kind.__name__])


# ------------------------------------------------------------------------------------------------ ordinals and targets


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

    encoder, columns = operator.raw_operator, _columns(operator)
    encoded = [
        _write_column(scope, container, columns[number], encoder.categories_[number], values, unknown)
        for number, values, unknown in _encodings(encoder)
    ]
    joined = _join(scope, container, encoded)
    kind = TensorProto.FLOAT if _answers_floats(encoder) else TensorProto.INT64
    add_node(scope, container, "Cast", joined, made=operator.outputs[0].full_name, to=kind)


def _encodings(encoder: Any) -> Sequence[tuple[int, Array, float]]:
    """For each column that it answers: the number of the column that it is made of, what stands for each category of
    that, [categories] in float32, and what for an unknown one."""
    count = len(encoder.categories_)
    if not hasattr(encoder, "encodings_"):
        unknown = -1.0 if encoder.unknown_value is None else float(encoder.unknown_value)
        return [(number, _numbers(encoder, number), unknown) for number in range(count)]
    classes = len(encoder.encodings_) // count  # of more than two, each has a column
    means = np.atleast_1d(encoder.target_mean_)
    return [
        (at // classes, values.astype(np.float32), float(means[at % len(means)]))
        for at, values in enumerate(encoder.encodings_)
    ]


def _numbers(encoder: Any, column: int) -> Array:
    """What an OrdinalEncoder makes of each category of a column, as itself says: [categories] in float32."""
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
        made: Array = np.asarray(encoder.transform(rows), np.float32)[:, column]
    return made


# ------------------------------------------------------------------------------------------------------------- one-hot


def _infer_one_hot(operator: Any) -> None:
    from skl2onnx.shape_calculators.one_hot_encoder import calculate_sklearn_one_hot_encoder_output_shapes

    calculate_sklearn_one_hot_encoder_output_shapes(operator)
    operator.outputs[0].type.shape[1] = sum(operator.raw_operator._n_features_outs)  # it counts each rare category


def _convert_one_hot(scope: Any, operator: Any, container: Any) -> None:
    from skl2onnx.operator_converters.one_hot_encoder import convert_sklearn_one_hot_encoder

    encoder = operator.raw_operator
    if _has_groups(encoder):
        _convert_groups(scope, operator, container)
        return
    written = len(container.nodes)
    convert_sklearn_one_hot_encoder(scope, operator, container)
    for node in container.nodes[written:]:
        if node.op_type == "OneHotEncoder":
            next(entry for entry in node.attribute if entry.name == "zeros").i = _zeros(encoder)


def _has_groups(encoder: Any) -> bool:
    rare = encoder.infrequent_categories_ if encoder._infrequent_enabled else ()
    return encoder.drop is None and (
        any(values is not None for values in rare) or any(_knows_nan(known) for known in encoder.categories_)
    )


def _knows_nan(known: Array) -> bool:
    return known.dtype.kind == "f" and bool(np.isnan(known).any())


def _zeros(encoder: Any) -> int:
    """1 where it has zeros for a category that it does not know, and refuses none."""
    return int(encoder.handle_unknown != "error")


def _convert_groups(scope: Any, operator: Any, container: Any) -> None:
    """Write an encoder that puts rare categories together, or knows a missing number: the number of each category's
    group, -1 of an unknown one, and a column for each group."""
    from onnx import TensorProto

    encoder, made = operator.raw_operator, []
    for number, (column, known) in enumerate(zip(_columns(operator), encoder.categories_, strict=True)):
        grouped = encoder._default_to_infrequent_mappings[number] if encoder._infrequent_enabled else None
        groups = np.arange(len(known)) if grouped is None else np.asarray(grouped)
        count = int(groups.max()) + 1
        takes_rare = grouped is not None and encoder.handle_unknown in ("infrequent_if_exist", "warn")
        unknown = count - 1 if takes_rare else -1
        group = _write_column(scope, container, column, known, groups.astype(np.int64), unknown)
        numbers: dict[str, Any] = {"cats_int64s": np.arange(count, dtype=np.int64), "zeros": _zeros(encoder)}
        made.append(add_node(scope, container, "OneHotEncoder", group, op_domain="ai.onnx.ml", **numbers))
    kind = TensorProto.INT64 if np.issubdtype(encoder.dtype, np.signedinteger) else TensorProto.FLOAT
    shape = scope.get_unique_variable_name("shape")
    container.add_initializer(shape, TensorProto.INT64, [2], [-1, sum(encoder._n_features_outs)])
    matrix = add_node(scope, container, "Reshape", _join(scope, container, made), shape)
    add_node(scope, container, "Cast", matrix, made=operator.outputs[0].full_name, to=kind)


# ------------------------------------------------------------------------------------------------------------- of both


def _columns(operator: Any) -> list[tuple[Any, int]]:
    """Of each column that it is given: the input, and its number there."""
    return [(given, at) for given in operator.inputs for at in range(given.type.shape[1])]


def _write_column(
    scope: Any, container: Any, column: tuple[Any, int], known: Array, numbers: Array, unknown: float
) -> str:
    """Write the number that stands for each value of a column, and give its name: [batch, 1] in the type of `numbers`.

    Args:
        known, numbers: The categories, and what stands for each: [categories], in float32 or int64.
        unknown: What stands for every other value.
    """
    from onnx import TensorProto
    from skl2onnx.common.data_types import StringTensorType

    given, at = column
    index = scope.get_unique_variable_name("column")
    container.add_initializer(index, TensorProto.INT64, [1], [at])
    values = add_node(scope, container, "Gather", given.full_name, index, axis=1)
    held, keys = np.ones(len(known), bool), dict[str, Any]()
    if isinstance(given.type, StringTensorType):
        keys["keys_strings"] = [str(category).encode() for category in known]
    else:
        categories = np.asarray(known, np.float32)  # None, and what is missing else, as NaN
        held, values = ~np.isnan(categories), add_node(scope, container, "Cast", values, to=TensorProto.FLOAT)
        keys["keys_floats"] = categories[held]
    kind, of_onnx = ("int64", TensorProto.INT64) if numbers.dtype == np.int64 else ("float", TensorProto.FLOAT)
    keys |= {f"values_{kind}s": numbers[held], f"default_{kind}": unknown}
    encoded = add_node(scope, container, "LabelEncoder", values, op_domain="ai.onnx.ml", op_version=2, **keys)
    if held.all():
        return encoded
    missing = scope.get_unique_variable_name("missing_category")
    container.add_initializer(missing, of_onnx, [], [numbers[~held][-1].item()])
    return add_node(scope, container, "Where", add_node(scope, container, "IsNaN", values), missing, encoded)


def _join(scope: Any, container: Any, columns: Sequence[str]) -> str:
    return add_node(scope, container, "Concat", *columns, axis=-1) if len(columns) > 1 else columns[0]
