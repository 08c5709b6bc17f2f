"""The categories that a fitted scikit-learn model's encoders know, by the number of the column that they stand in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def known_categories(estimator: Any) -> Mapping[int, Sequence[Any]]:
    """Column → categories, of encoders that stand first in the model or after steps that keep each column in its place,
    such as imputers. What a step has scaled before is no category of the input: who asks finds that out."""
    return dict(_found(estimator, range(getattr(estimator, "n_features_in_", 0))))


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


def _found(step: Any, columns: Sequence[int]) -> list[tuple[int, Sequence[Any]]]:
    """Args: columns: The model's columns that the step is given, in order."""
    if hasattr(step, "steps"):
        found: list[tuple[int, Sequence[Any]]] = []
        for _, inner in step.steps:
            if getattr(inner, "n_features_in_", len(columns)) != len(columns):
                break
            found += _found(inner, columns)
            if hasattr(inner, "transformers_") or hasattr(inner, "categories_"):
                break  # from here on the columns are others
        return found
    if hasattr(step, "transformers_"):
        names = [str(name) for name in getattr(step, "feature_names_in_", ())]
        return [
            pair
            for _, inner, chosen in step.transformers_
            if not isinstance(inner, str)
            for pair in _found(inner, [columns[at] for at in _numbers(chosen, names, len(columns))])
        ]
    if len(known := getattr(step, "categories_", ())) == len(columns):
        return [(column, values.tolist()) for column, values in zip(columns, known, strict=True)]
    return []


def _numbers(chosen: Any, names: Sequence[str], count: int) -> list[int]:
    """The columns that a ColumnTransformer was given, by number: names, numbers, a slice or a mask."""
    if isinstance(chosen, slice):
        by_name = isinstance(chosen.start, str) or isinstance(chosen.stop, str)
        if not by_name:
            return list(range(count))[chosen]
        first = names.index(chosen.start) if chosen.start is not None else 0
        last = names.index(chosen.stop) if chosen.stop is not None else count - 1  # the last name is part of it
        return list(range(first, last + 1))
    listed = [chosen] if isinstance(chosen, str | int) else list(chosen)
    if len(listed) == count and all(isinstance(one, bool) or type(one).__name__ == "bool" for one in listed):
        return [at for at, taken in enumerate(listed) if taken]
    return [names.index(one) if isinstance(one, str) else int(one) % count for one in listed]
