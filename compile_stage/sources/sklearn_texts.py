"""Missing texts. ONNX has none, so the published model's predict() fills a text in where it reads its columns. In the
graph an imputer of texts hands them on as they are, and an encoder that was fitted on missing texts knows one in their
place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from compile_stage.serving.prediction_io import missing_kind
from compile_stage.sources.sklearn_parts import parts

_ROWS = 8  # of the example: imputers and encoders answer cell by cell

_UNKNOWN = ""
"""Stands for a missing text that an encoder takes for one that it does not know, where this is none that it knows."""

_CATEGORIES = {"NaN": "\ue000NaN", "None": "\ue000None"}
"""Stand for a missing text that is a category: with a character of Unicode's private use, so that nobody sends them."""


def name_missing(estimator: Any) -> Any:
    """The estimator, whose encoders know a text of ours in the place of a missing one that they were fitted on.
    skl2onnx would write the text "nan" or "None", which the original takes for one that it does not know."""
    for part in _encoders(estimator):
        named = [_named(values) for values in part.categories_]
        if any(new is not old for new, old in zip(named, part.categories_, strict=True)):
            part.fitted_categories_, part.categories_ = part.categories_, named
    return estimator


@contextmanager
def as_fitted(estimator: Any) -> Iterator[None]:
    """Meanwhile it is as it was before `name_missing`."""
    changed = [(part, part.categories_) for part in _encoders(estimator) if hasattr(part, "fitted_categories_")]
    for part, _ in changed:
        part.categories_ = part.fitted_categories_
    try:
        yield
    finally:
        for part, named in changed:
            part.categories_ = named


def find_fills(estimator: Any, rows: Any, texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Column → kind of missing text (`serving.prediction_io.missing_kind`) → the text that the model's steps before
    the last make the same numbers of. A kind that they refuse, or make other numbers of, is left out.

    scikit-learn tells the kinds apart: with `missing_values=np.nan` an imputer hands None on, for which an encoder has
    another answer.

    Args:
        rows: The logged example, a data frame; its other columns stay as they are.
        texts: The columns that hold text.
    """
    import pandas as pd

    model = getattr(estimator, "regressor_", estimator)  # of a TransformedTargetRegressor
    if len(getattr(model, "steps", ())) < 2:
        return {}
    encode, rows, fills = model[:-1].transform, _without_missing(rows, texts), {}
    kinds = {"NaN": np.nan, "None": None, "NA": pd.NA}
    for column in texts:
        known = [
            str(part.statistics_[names.index(column)])
            for part in _text_imputers(estimator)
            if column in (names := list(getattr(part, "feature_names_in_", ())))
        ]
        with as_fitted(model):
            numbers = {kind: _encoded(encode, rows, column, missing) for kind, missing in kinds.items()}
        tried = [*dict.fromkeys(known), *_CATEGORIES.values(), _UNKNOWN]
        found = {
            kind: text
            for kind, encoded in numbers.items()
            if encoded is not None
            for text in [_same(encode, rows, column, encoded, tried)]
            if text is not None
        }
        if found:
            fills[column] = found
    return fills


def _without_missing(rows: Any, texts: Sequence[str]) -> Any:
    """The first rows, with a text of the same column in the place of each that is missing: the estimator answers those
    otherwise than as it was fitted (`name_missing`), and one value is compared at a time."""
    held = rows.head(_ROWS).copy()
    for column in texts:
        given = [value for value in rows[column] if isinstance(value, str)]
        values = [value if isinstance(value, str) else given[0] for value in held[column]] if given else held[column]
        held[column] = _objects(values)
    return held


def keeps_texts(imputer: Any) -> bool:
    """Whether it answers each text with itself, fills each column with a text, and adds no column."""
    statistics = getattr(imputer, "statistics_", ())
    return (
        len(statistics) > 0
        and all(isinstance(text, str) for text in statistics)
        and not isinstance(imputer.missing_values, str)
        and not imputer.add_indicator
    )


def convert_text_imputer(scope: Any, operator: Any, container: Any) -> None:
    """Write into skl2onnx's container that such an imputer hands its columns on."""
    texts = [column.full_name for column in operator.inputs]  # the converter's own way to join columns takes no text
    name = scope.get_unique_operator_name("filled")
    container.add_node("Concat", texts, operator.outputs[0].full_name, name=name, axis=1)


def _encoders(estimator: Any) -> list[Any]:
    kinds = ("OneHotEncoder", "OrdinalEncoder", "TargetEncoder")
    found = (part for part in parts(estimator) if type(part).__name__ in kinds)
    return [part for part in found if hasattr(part, "categories_")]


def _named(values: Any) -> Any:
    """Categories with texts of ours in the place of missing ones; themselves where none is missing, or all are."""
    texts = [value for value in values if isinstance(value, str)]
    if values.dtype != object or not texts or len(texts) == len(values):
        return values
    named = [_CATEGORIES.get(missing_kind(value) or "", value) for value in values]
    made = np.empty(len(named), dtype=object)
    made[:] = named
    return made


def _text_imputers(estimator: Any) -> list[Any]:
    return [part for part in parts(estimator) if type(part).__name__ == "SimpleImputer" and keeps_texts(part)]


def _same(encode: Any, rows: Any, column: str, numbers: Sequence[Any], texts: Sequence[str]) -> str | None:
    for text in texts:
        found = _encoded(encode, rows, column, text)
        if found is not None and all(
            one.shape == other.shape and np.array_equal(one, other, equal_nan=True)
            for one, other in zip(found, numbers, strict=True)
        ):
            return text
    return None


def _encoded(encode: Any, rows: Any, column: str, value: Any) -> list[Any] | None:
    """What the rows become with that value in all of the column, and in the first row alone; None where a step refuses
    it."""
    changed = [part.assign(**{column: _column(value, len(part))}) for part in (rows, rows.head(1))]
    first = rows.copy()
    first[column] = first[column].astype(object)
    first.iloc[0, list(first.columns).index(column)] = value
    answers = []
    for frame in (*changed, first):
        try:
            answer = encode(frame)
        except Exception:  # noqa: BLE001 - whatever a step raises for what it does not take
            return None
        answers.append(np.asarray(answer.toarray() if hasattr(answer, "toarray") else answer, np.float64))
    return answers


def _column(value: Any, rows: int) -> Any:
    return _objects([value] * rows)


def _objects(values: Sequence[Any]) -> Any:
    import pandas as pd

    return pd.Series(list(values), dtype=object).to_numpy()
