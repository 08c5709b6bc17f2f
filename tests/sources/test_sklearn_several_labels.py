"""Classifiers of scikit-learn that answer several labels for each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import scipy.sparse
from mlflow.models import infer_signature
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier, RegressorChain
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier

from compile_stage.core.records import Compliance, SourceModel
from compile_stage.serving.prediction_io import from_outputs
from compile_stage.sources.sklearn import SklearnSource

from .conftest import Proof, run_onnx, source_of

PICKLES = Compliance(allow_pickle=True)
DRAW = np.random.default_rng(0)
ROWS = DRAW.normal(size=(400, 4)).astype(np.float32)
SIDES = ROWS[:, 0] + DRAW.normal(size=400) / 2
LABELS = np.column_stack([SIDES > 0, SIDES * ROWS[:, 1] > 0, ROWS[:, 2] > 1]).astype(int)
TEXTS = np.array(["no", "yes"])[LABELS]


def save(path: Path, model: Any) -> SourceModel:
    mlflow.sklearn.save_model(
        model,
        path,
        signature=infer_signature(ROWS, LABELS),
        input_example=ROWS[:20],
        serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],
    )
    return source_of(path, "sklearn")


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (OneVsRestClassifier(LogisticRegression()), LABELS),
        (RidgeClassifier(), LABELS),
        (MLPClassifier((8,), max_iter=50, random_state=0), LABELS),
        (RandomForestClassifier(10, random_state=0), LABELS),
        (KNeighborsClassifier(), LABELS),
        (MultiOutputClassifier(LogisticRegression()), LABELS.astype(bool)),
        (MultiOutputClassifier(LogisticRegression()), LABELS[:, :1]),
        (MultiOutputClassifier(SVC()), LABELS),
        (MultiOutputClassifier(HistGradientBoostingClassifier(max_iter=5)), LABELS),
        (MultiOutputClassifier(RandomForestClassifier(10, random_state=0)), TEXTS),
        (make_pipeline(StandardScaler(), MultiOutputClassifier(DecisionTreeClassifier(max_depth=4))), LABELS + 5),
        (MultiOutputClassifier(make_pipeline(StandardScaler(), LogisticRegression())), TEXTS),
        (MultiOutputClassifier(make_pipeline(StandardScaler(), LinearSVC())), LABELS),
        (MultiOutputClassifier(LinearSVC()), LABELS),
        (ClassifierChain(LogisticRegression(), order=[2, 0, 1]), LABELS),
        (make_pipeline(StandardScaler(), ClassifierChain(SVC(), order=[1, 2, 0])), LABELS + 5),
        (
            ClassifierChain(
                make_pipeline(StandardScaler(), RandomForestClassifier(3, random_state=0)),
                order=[1, 0, 2],
                chain_method="predict_proba",
            ),
            LABELS,
        ),
    ],
)
def test_several_labels_at_once_are_answered(tmp_path: Path, model: Any, labels: Any) -> None:
    """Broken: models of several labels would be refused, or answer one of them, or in another shape or type."""
    source, exporter = save(tmp_path / "model", model.fit(ROWS, labels)), SklearnSource()
    assert exporter.refuse(source, PICKLES) is None
    made = exporter.export(source, {}, tmp_path / "made")
    for rows in (ROWS, ROWS[:1]):
        answered = from_outputs(run_onnx(made, {"X": rows}), rows, exporter.prediction_format(source))
        np.testing.assert_array_equal(answered, model.predict(rows), strict=labels is not TEXTS)


@pytest.mark.parametrize(
    ("model", "labels", "advice", "advised"),
    [
        (
            ClassifierChain(LogisticRegression(), chain_method="decision_function"),
            LABELS,
            "chain_method='predict' or 'predict_proba'",
            ClassifierChain(LogisticRegression(), chain_method="predict_proba"),
        ),
        (
            RandomForestClassifier(5, random_state=0),
            TEXTS,
            "MultiOutputClassifier(RandomForestClassifier(...))",
            MultiOutputClassifier(RandomForestClassifier(5, random_state=0)),
        ),
        (
            KNeighborsClassifier(),
            TEXTS,
            "MultiOutputClassifier(KNeighborsClassifier(...))",
            MultiOutputClassifier(KNeighborsClassifier()),
        ),
        (
            OneVsRestClassifier(LogisticRegression()),
            scipy.sparse.csr_matrix(LABELS),
            "y.toarray()",
            OneVsRestClassifier(LogisticRegression()),
        ),
        (KNeighborsClassifier(), scipy.sparse.csr_matrix(LABELS), "y.toarray()", KNeighborsClassifier()),
    ],
)
def test_several_labels_that_are_refused_come_with_what_works(
    tmp_path: Path, model: Any, labels: Any, advice: str, advised: Any
) -> None:
    """Broken: the converter's own error alone, or advice that is refused too."""
    source = save(tmp_path / "model", model.fit(ROWS, labels))
    assert advice in (SklearnSource().refuse(source, PICKLES) or "")
    plain = labels.toarray() if scipy.sparse.issparse(labels) else labels
    taken = save(tmp_path / "advised", advised.fit(ROWS, plain))
    assert SklearnSource().refuse(taken, PICKLES) is None


@pytest.mark.parametrize("model", [LinearRegression(), make_pipeline(StandardScaler(), LinearRegression())])
def test_each_regressor_of_a_chain_reads_what_those_before_it_answered(
    tmp_path: Path, prove: Proof, model: Any
) -> None:
    """Broken: chains would be refused, or answer their targets in the order of the chain. Squares tell the targets
    apart that a line does not."""
    targets = np.column_stack([ROWS[:, 0] ** 2, ROWS[:, 1], ROWS[:, 0] ** 2 + ROWS[:, 1]])
    chain = RegressorChain(model, order=[2, 0, 1]).fit(ROWS, targets)
    source = save(tmp_path / "model", make_pipeline(StandardScaler(), chain).fit(ROWS, targets))
    prove(source, {"X": ROWS}, compliance=PICKLES)
