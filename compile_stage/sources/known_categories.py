"""The categories that a fitted scikit-learn model's encoders know, by the number of the column that they stand in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
