"""Imputers of text columns. ONNX has no missing text, so the published model's predict() fills one in where it reads
its columns, and in the graph such an imputer hands texts on as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compile_stage.sources.sklearn_parts import parts

_ROWS = 8  # of the example: imputers and encoders answer cell by cell

_UNKNOWN = ""
"""Stands for a missing text that an encoder takes for one that it does not know, where this is none that it knows."""


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
    encode, rows, fills = model[:-1].transform, rows.head(_ROWS), {}
    kinds = {"NaN": np.nan, "None": None, "NA": pd.NA}
    for column in texts:
        known = [
            str(part.statistics_[names.index(column)])
            for part in _text_imputers(estimator)
            if column in (names := list(getattr(part, "feature_names_in_", ())))
        ]
        if not known:
            continue
        found = {
            kind: text
            for kind, missing in kinds.items()
            if (numbers := _encoded(encode, rows, column, missing)) is not None
            for text in [_same(encode, rows, column, numbers, [*dict.fromkeys(known), _UNKNOWN])]
            if text is not None
        }
        if found:
            fills[column] = found
    return fills


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
    import pandas as pd

    return pd.Series([value] * rows, dtype=object).to_numpy()
