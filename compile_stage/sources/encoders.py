"""The categories that a fitted scikit-learn model's encoders know, by the number of the column that they stand in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compile_stage.sources.sklearn_nodes import add_node
from compile_stage.sources.sklearn_parts import parts

_INNER = ("best_estimator_", "estimators_", "estimator_", "regressor_", "calibrated_classifiers_", "estimator")
"""Where searches, ensembles and other models around a model keep it."""


def known_categories(estimator: Any) -> Mapping[int, Sequence[Any]]:
    """Column → categories, of encoders that stand first in the model or after steps that keep each column in its place,
    such as imputers. Those of several encoders are put together: one may refuse what another ignores. What a step has
    scaled before is no category of the input, and another encoder may refuse one: who asks finds that out."""
    found: dict[int, dict[Any, None]] = {}
    columns: list[int | None] = list(range(getattr(estimator, "n_features_in_", 0)))
    for column, values in _found(estimator, columns):
        if column is not None:
            found.setdefault(column, {}).update(dict.fromkeys(values))
    return {column: list(values) for column, values in found.items()}


def refuse_rounded(estimator: Any) -> str | None:
    """The reason when an encoder knows a number that float32 has not: it would know none of the rounded ones."""
    import numpy as np

    names = getattr(estimator, "feature_names_in_", ())
    for column, values in known_categories(estimator).items():
        for value in values:
            if isinstance(value, int | float) and np.isfinite(value) and float(np.float32(value)) != value:
                name = repr(str(names[column])) if column < len(names) else str(column)
                return (
                    f"its encoder knows the category {value!r} of column {name}, which float32 rounds, and a compiled "
                    "model takes numbers in float32: train it on that column as text"
                )
    return None


def refuse_dropped(estimator: Any) -> str | None:
    """The reason when an encoder both drops a category and puts rare ones together, which skl2onnx does not convert."""
    for part in parts(estimator):
        rare = getattr(part, "infrequent_categories_", None) if type(part).__name__ == "OneHotEncoder" else None
        if rare is not None and part.drop is not None and any(values is not None for values in rare):
            return (
                "skl2onnx converts no OneHotEncoder that drops a category and puts rare ones together: leave out its "
                "drop, or its min_frequency and max_categories"
            )
    return None


def register_encoders(estimator: Any) -> None:
    """Have skl2onnx convert one-hot encoders that take an unknown category for a rare one: it converts them to ones
    that refuse it. Those that put rare categories together it refuses where they have a single column, or a matrix, and
    all that know a missing number."""
    from skl2onnx import update_registered_converter

    for kind in {type(part) for part in parts(estimator) if type(part).__name__ == "OneHotEncoder"}:
        update_registered_converter(kind, "SklearnOneHotEncoder", _infer_one_hot, _convert_one_hot)


def _infer_one_hot(operator: Any) -> None:
    from skl2onnx.shape_calculators.one_hot_encoder import calculate_sklearn_one_hot_encoder_output_shapes

    calculate_sklearn_one_hot_encoder_output_shapes(operator)
    operator.outputs[0].type.shape[1] = sum(operator.raw_operator._n_features_outs)  # it counts each rare category


def _convert_groups(scope: Any, operator: Any, container: Any) -> None:
    """Write an encoder that puts rare categories together, or knows a missing number: the number of each category's
    group, -1 of an unknown one, and a column for each group."""
    import numpy as np
    from onnx import TensorProto
    from skl2onnx.common.data_types import StringTensorType

    encoder, made = operator.raw_operator, []
    columns = [(given, at) for given in operator.inputs for at in range(given.type.shape[1])]
    for number, ((given, at), known) in enumerate(zip(columns, encoder.categories_, strict=True)):
        grouped = encoder._default_to_infrequent_mappings[number] if encoder._infrequent_enabled else None
        groups = np.arange(len(known)) if grouped is None else np.asarray(grouped)
        count = int(groups.max()) + 1
        takes_rare = grouped is not None and encoder.handle_unknown in ("infrequent_if_exist", "warn")
        place = scope.get_unique_variable_name("column")
        container.add_initializer(place, TensorProto.INT64, [1], [at])
        column = add_node(scope, container, "Gather", given.full_name, place, axis=1)
        if isinstance(given.type, StringTensorType):
            keys: dict[str, Any] = {"keys_strings": [str(category).encode() for category in known]}
        else:
            column = add_node(scope, container, "Cast", column, to=TensorProto.FLOAT)
            keys = {"keys_floats": np.asarray(known, np.float32)}
        keys |= {"values_int64s": groups.astype(np.int64), "default_int64": count - 1 if takes_rare else -1}
        group = add_node(scope, container, "LabelEncoder", column, op_domain="ai.onnx.ml", op_version=2, **keys)
        if _knows_nan(known):  # the last of them; LabelEncoder finds no NaN
            of_nan, is_nan = scope.get_unique_variable_name("of_nan"), add_node(scope, container, "IsNaN", column)
            container.add_initializer(of_nan, TensorProto.INT64, [], [int(groups[-1])])
            group = add_node(scope, container, "Where", is_nan, of_nan, group)
        numbers: dict[str, Any] = {
            "cats_int64s": np.arange(count, dtype=np.int64),
            "zeros": int(encoder.handle_unknown != "error"),
        }
        made.append(add_node(scope, container, "OneHotEncoder", group, op_domain="ai.onnx.ml", **numbers))
    joined = add_node(scope, container, "Concat", *made, axis=-1) if len(made) > 1 else made[0]
    kind = TensorProto.INT64 if np.issubdtype(encoder.dtype, np.signedinteger) else TensorProto.FLOAT
    shape = scope.get_unique_variable_name("shape")
    container.add_initializer(shape, TensorProto.INT64, [2], [-1, sum(encoder._n_features_outs)])
    matrix = add_node(scope, container, "Reshape", joined, shape)
    add_node(scope, container, "Cast", matrix, made=operator.outputs[0].full_name, to=kind)


def _has_groups(encoder: Any) -> bool:
    rare = encoder.infrequent_categories_ if encoder._infrequent_enabled else ()
    return encoder.drop is None and (
        any(values is not None for values in rare) or any(_knows_nan(known) for known in encoder.categories_)
    )


def _knows_nan(known: Any) -> bool:
    return known.dtype.kind == "f" and bool(known[-1:] != known[-1:])


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
            next(entry for entry in node.attribute if entry.name == "zeros").i = int(encoder.handle_unknown != "error")


def column_parts(step: Any, columns: Sequence[int | None]) -> list[tuple[str, Any, list[int | None]]]:
    """Of a ColumnTransformer that is given these columns: name, transformer and columns of each part."""
    names = [str(name) for name in getattr(step, "feature_names_in_", ())]
    return [
        (name, inner, [columns[at] for at in _numbers(chosen, names, len(columns))])
        for name, inner, chosen in step.transformers_
    ]


def _found(step: Any, columns: Sequence[int | None]) -> Iterator[tuple[int | None, Sequence[Any]]]:
    """Args: columns: The model's columns that the step is given, in order; None for what is none of them."""
    if step is None or isinstance(step, str) or getattr(step, "n_features_in_", len(columns)) != len(columns):
        return
    known = getattr(step, "categories_", None)
    if known is not None and len(known) == len(columns):
        yield from ((column, values.tolist()) for column, values in zip(columns, known, strict=True))
    elif hasattr(step, "steps"):
        filled: list[Any] = []  # what an imputer takes in the place of a category
        for _, inner in step.steps:
            yield from ((column, [*values, *filled]) for column, values in _found(inner, columns))
            if hasattr(inner, "missing_values"):
                filled.append(inner.missing_values)
            columns = _after(inner, columns)
    elif hasattr(step, "transformers_"):
        for _, inner, chosen in column_parts(step, columns):
            yield from _found(inner, chosen)
    elif hasattr(step, "transformer_list"):
        for _, inner in step.transformer_list:
            yield from _found(inner, columns)
    else:
        chosen_of = getattr(step, "estimators_features_", None)  # of models that are given some columns each
        for number, inner in enumerate(_inner(step)):
            own = chosen_of[number] if chosen_of is not None and number < len(chosen_of) else range(len(columns))
            yield from _found(inner, [columns[at] for at in own])


def _inner(model: Any) -> list[Any]:
    """The fitted models that it is made around."""
    for name in _INNER:
        if (held := getattr(model, name, None)) is not None:
            if hasattr(held, "ravel"):  # boosted trees lie in an array: one column for each class
                return list(held.ravel())
            return held if isinstance(held, list) else [held]
    return []


def _after(step: Any, columns: Sequence[int | None]) -> Sequence[int | None]:
    """The columns behind a step, in order. Where it keeps their count it is taken to keep their places. None behind a
    step that was fitted on another number of them, since what stands before it made columns of its own."""
    if getattr(step, "n_features_in_", len(columns)) != len(columns):
        return []
    if hasattr(step, "transformers_"):
        places = step.output_indices_
        behind: list[int | None] = [None] * max((part.stop for part in places.values()), default=0)
        for name, inner, chosen in column_parts(step, columns):
            after = _after(inner, chosen)
            if name in places and inner != "drop" and len(after) == places[name].stop - places[name].start:
                behind[places[name]] = after
        return behind
    if hasattr(step, "steps"):
        for _, inner in step.steps:
            columns = _after(inner, columns)
        return columns
    if hasattr(step, "categories_") or hasattr(step, "transformer_list"):
        return []
    return columns


def _numbers(chosen: Any, names: Sequence[str], count: int) -> list[int]:
    """The columns that a ColumnTransformer was given, by number: names, numbers, a slice or a mask."""
    if isinstance(chosen, slice):
        by_name = isinstance(chosen.start, str) or isinstance(chosen.stop, str)
        if not by_name:
            return list(range(count))[chosen]
        first = names.index(chosen.start) if chosen.start is not None else 0
        last = names.index(chosen.stop) if chosen.stop is not None else count - 1  # the last name is part of it
        return list(range(first, last + 1))
    listed = [chosen] if isinstance(chosen, str) or not hasattr(chosen, "__iter__") else list(chosen)
    if len(listed) == count and all(type(one).__name__ in ("bool", "bool_") for one in listed):  # NumPy's is a bool_
        return [at for at, taken in enumerate(listed) if taken]
    return [names.index(one) if isinstance(one, str) else int(one) % count for one in listed]
