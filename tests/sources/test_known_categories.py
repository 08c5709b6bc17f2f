"""Which categories a fitted scikit-learn model's encoders know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the models are scikit-learn's")

from sklearn.compose import ColumnTransformer
from sklearn.ensemble import BaggingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from compile_stage.sources.known_categories import known_categories, refuse_dropped

RANDOM = np.random.default_rng(0)
ROWS = np.column_stack([RANDOM.normal(size=90), np.tile([1.0, 5.0, 9.0], 30), np.tile([0.0, 2.0], 45)])
CLASSES = RANDOM.integers(2, size=90)


def columns(*parts: Any, **options: Any) -> Any:
    return ColumnTransformer([(str(number), *part) for number, part in enumerate(parts)], **options)


def encoded(model: Any = None) -> Any:
    """A pipeline that encodes column 1."""
    return make_pipeline(columns((OrdinalEncoder(), [1]), remainder="passthrough"), model or LogisticRegression())


AROUND: dict[str, Callable[[], Any]] = {
    "search": lambda: GridSearchCV(encoded(), {"logisticregression__C": [1.0, 2.0]}, cv=2),
    "one against the rest": lambda: OneVsRestClassifier(encoded()),
    "bagging": lambda: BaggingClassifier(encoded(), n_estimators=2, random_state=0),
    "union": lambda: make_union(columns((OneHotEncoder(), [1])), columns((StandardScaler(), [0, 2]))),
    "union of a part": lambda: columns((make_union(OneHotEncoder(), OrdinalEncoder()), [1])),
    "columns put in order first": lambda: make_pipeline(
        columns(("passthrough", [2]), (SimpleImputer(), [1]), ("drop", [0])), columns((OrdinalEncoder(), [1]))
    ),
}


@pytest.mark.parametrize("kind", AROUND)
def test_encoders_inside_of_other_models_are_found(kind: str) -> None:
    """Broken: what is around a pipeline would hide its encoder, and the published model answer any category."""
    assert known_categories(AROUND[kind]().fit(ROWS, CLASSES)) == {1: [1.0, 5.0, 9.0]}


def test_bagging_of_some_columns_names_those_of_the_model() -> None:
    """Broken: the categories of one column would be those of another, and good requests be refused."""
    model = BaggingClassifier(make_pipeline(OrdinalEncoder(), LogisticRegression()), max_features=1, random_state=0)
    model.fit(ROWS[:, 1:], CLASSES)
    assert known_categories(model) == {0: [1.0, 5.0, 9.0], 1: [0.0, 2.0]}


@pytest.mark.parametrize("first", [True, False])
def test_categories_of_two_encoders_are_put_together(first: bool) -> None:
    """Broken: one that knows few and ignores the others would have the others refused."""
    few = (OneHotEncoder(categories=[[1.0]], handle_unknown="ignore"), [1])
    every = (OrdinalEncoder(), [1])
    model = columns(few, every) if first else columns(every, few)
    known = known_categories(model.fit(ROWS))
    assert {column: sorted(values) for column, values in known.items()} == {1: [1.0, 5.0, 9.0]}


def test_what_an_imputer_replaces_is_taken_too() -> None:
    """Broken: a request with the text that stands for a missing one would be refused."""
    cities = np.array([["Bonn"], ["Oslo"], [""]], dtype=object)
    filled = make_pipeline(SimpleImputer(missing_values="", strategy="most_frequent"), OneHotEncoder()).fit(cities)
    assert known_categories(filled) == {0: ["Bonn", "Oslo", ""]}


def test_columns_behind_an_encoder_are_others() -> None:
    """Broken: a second encoder's categories would be taken for those of the model's own column."""
    model = make_pipeline(columns((OrdinalEncoder(), [1, 2])), OrdinalEncoder()).fit(ROWS)
    assert known_categories(model) == {1: [1.0, 5.0, 9.0], 2: [0.0, 2.0]}


@pytest.mark.parametrize("chosen", [np.array([False, True, False]), [-2], slice(1, 2), np.array([1])])
def test_columns_may_be_numbers_a_slice_or_a_mask(chosen: Any) -> None:
    """Broken: another column's categories would be asked for."""
    assert known_categories(columns((OrdinalEncoder(), chosen)).fit(ROWS)) == {1: [1.0, 5.0, 9.0]}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, False),
        ({"drop": "first"}, False),
        ({"min_frequency": 2}, False),
        ({"drop": "first", "min_frequency": 2}, True),
    ],
)
def test_a_dropped_category_beside_rare_ones_is_refused_by_its_encoder(
    options: dict[str, Any], *, refused: bool
) -> None:
    """Broken: the message blames the classifier at the end of the pipeline, and says nothing that helps."""
    rows = np.array([["a"], ["a"], ["b"], ["b"], ["c"]], dtype=object)
    model = make_pipeline(OneHotEncoder(**options), LogisticRegression()).fit(rows, [0, 1, 0, 1, 0])
    reason = refuse_dropped(model)
    assert (reason is not None) is refused
    if reason is not None:
        assert "leave out its drop, or its min_frequency and max_categories" in reason
