"""Steps and classifiers of scikit-learn that the stage converts itself: splines, approximated kernels, centroids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.models import infer_signature
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import SplineTransformer, StandardScaler

from compile_stage.core.records import Compliance, SourceModel
from compile_stage.sources.sklearn import SklearnSource

from .conftest import Proof, source_of

PICKLES = Compliance(allow_pickle=True)
DRAW = np.random.default_rng(0)
ROWS = DRAW.normal(size=(200, 3)).astype(np.float32)
TARGET = np.sin(2 * ROWS[:, 0]) + ROWS[:, 1] ** 2
CLASSES = np.digitize(TARGET, [0.0, 1.0])
BEYOND = np.concatenate([ROWS, 3 * ROWS])


def save(path: Path, model: Any) -> SourceModel:
    mlflow.sklearn.save_model(
        model,
        path,
        signature=infer_signature(ROWS, model.predict(ROWS)),
        serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],
    )
    return source_of(path, "sklearn")


@pytest.mark.parametrize(
    ("step", "rows"),
    [
        (SplineTransformer(), BEYOND),
        (SplineTransformer(n_knots=2, degree=2, include_bias=False), BEYOND),
        (SplineTransformer(extrapolation="linear", include_bias=False), BEYOND),
        (SplineTransformer(n_knots=4, degree=1, extrapolation="continue"), BEYOND),
        (Nystroem(n_components=30, random_state=0), ROWS),
        (Nystroem(gamma=0.1, n_components=10, random_state=0), ROWS),
        (RBFSampler(gamma=0.2, n_components=30, random_state=0), ROWS),
    ],
)
def test_a_step_that_makes_columns_of_columns_is_compiled(tmp_path: Path, prove: Proof, step: Any, rows: Any) -> None:
    """Broken: it would be refused, or another curve would be drawn, inside the knots or beyond them."""
    model = make_pipeline(StandardScaler(), step, Ridge(0.1)).fit(ROWS, TARGET)
    prove(save(tmp_path / "model", model), {"X": rows}, sizes=(1, len(rows)), compliance=PICKLES)


@pytest.mark.parametrize("extrapolation", ["constant", "linear"])
def test_knots_that_lie_on_each_other_are_taken_as_scikit_learn_does(
    tmp_path: Path, prove: Proof, extrapolation: Any
) -> None:
    """Broken: splines over quantiles of a column with few values would go on beyond its ends where scikit-learn cuts
    them off."""
    few = np.round(ROWS)
    step = SplineTransformer(n_knots=6, knots="quantile", extrapolation=extrapolation)
    model = make_pipeline(step, Ridge(0.1)).fit(few, TARGET)
    rows = np.concatenate([few, few + 0.3, 3 * few]).astype(np.float32)
    prove(save(tmp_path / "model", model), {"X": rows}, sizes=(1, len(rows)), compliance=PICKLES)


@pytest.mark.parametrize(
    ("model", "classes"),
    [
        (NearestCentroid(), CLASSES),
        (NearestCentroid(priors="empirical", shrink_threshold=0.2), np.array(["low", "mid", "top"])[CLASSES]),
        (NearestCentroid(metric="manhattan", priors="empirical"), CLASSES),
    ],
)
def test_the_nearest_centroid_is_answered(tmp_path: Path, prove: Proof, model: Any, classes: Any) -> None:
    """Broken: it would be refused, or the label would be that of the distances from which scikit-learn takes the
    probabilities, which is another one where all priors are alike."""
    prove(save(tmp_path / "model", model.fit(ROWS, classes)), {"X": ROWS}, sizes=(1, len(ROWS)), compliance=PICKLES)


@pytest.mark.parametrize(
    ("step", "advice", "advised"),
    [
        (SplineTransformer(extrapolation="periodic"), "'constant', 'linear' or 'continue'", SplineTransformer()),
        (
            SplineTransformer(degree=1, extrapolation="linear"),
            "degree=2",
            SplineTransformer(degree=2, extrapolation="linear"),
        ),
        (Nystroem(kernel="cosine", n_components=20), "kernel='rbf'", Nystroem(kernel="rbf", n_components=20)),
    ],
)
def test_what_is_refused_comes_with_what_works(tmp_path: Path, step: Any, advice: str, advised: Any) -> None:
    """Broken: a model would be refused without a way on, or with one that is refused too."""
    source = save(tmp_path / "model", make_pipeline(step, Ridge()).fit(ROWS, TARGET))
    assert advice in (SklearnSource().refuse(source, PICKLES) or "")
    taken = save(tmp_path / "advised", make_pipeline(advised, Ridge()).fit(ROWS, TARGET))
    assert SklearnSource().refuse(taken, PICKLES) is None


def test_splines_in_a_skops_file_are_data(tmp_path: Path) -> None:
    """Broken: a pipeline with splines would need compliance.allow_pickle, though its file is no pickle."""
    import skops.io

    model = make_pipeline(SplineTransformer(), Ridge()).fit(ROWS, TARGET)
    declared = skops.io.get_untrusted_types(data=skops.io.dumps(model))
    mlflow.sklearn.save_model(
        model,
        tmp_path / "model",
        signature=infer_signature(ROWS, TARGET),
        serialization_format="skops",
        skops_trusted_types=declared,
        pip_requirements=["scikit-learn"],
    )
    assert SklearnSource().refuse(source_of(tmp_path / "model", "sklearn"), Compliance()) is None
