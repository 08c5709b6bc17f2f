"""Two small tabular models in scikit-learn, on data that comes with it.

    python examples/tabular.py

registers `breast-cancer` (a scaled logistic regression, by name of the diagnosis) and `diabetes` (boosted regression
trees) in the MLflow that MLFLOW_TRACKING_URI names.
"""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np
import sklearn
from candidate import register
from mlflow.models import infer_signature
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import mean_absolute_error
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

SEED = 0

# Parts of the boosting model that skops doesn't know: whoever logs the model vouches for them.
TRUSTED_TYPES = [
    "_loss.CyHalfSquaredError",
    "numpy.random._pickle.__randomstate_ctor",
    "sklearn._loss.link.IdentityLink",
    "sklearn._loss.link.Interval",
    "sklearn._loss.loss.HalfSquaredError",
    "sklearn.tree._tree.Tree",
]


def breast_cancer(name: str = "breast-cancer") -> str:
    """Benign or malignant, from 30 measurements of a cell nucleus. Returns `models:/NAME/VERSION`."""
    data = load_breast_cancer(as_frame=True)
    train_x, test_x, train_y, test_y = train_test_split(
        data.data.astype(np.float32), data.target, test_size=0.4, random_state=SEED, stratify=data.target
    )
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(train_x, train_y)
    metrics = {"accuracy": float(model.score(test_x, test_y))}
    return _register(name, model, (train_x, train_y), (test_x, test_y), metrics, "classification")


def diabetes(name: str = "diabetes") -> str:
    """Progression of the disease after a year, from 10 measurements. Returns `models:/NAME/VERSION`."""
    data = load_diabetes(as_frame=True)
    train_x, test_x, train_y, test_y = train_test_split(
        data.data.astype(np.float32), data.target, test_size=0.4, random_state=SEED
    )
    model = GradientBoostingRegressor(n_estimators=100, max_depth=3, learning_rate=0.05, random_state=SEED)
    model.fit(train_x, train_y)
    metrics = {"mae": float(mean_absolute_error(test_y, model.predict(test_x)))}
    return _register(name, model, (train_x, train_y), (test_x, test_y), metrics, "regression")


def train_and_register() -> tuple[str, str]:
    """Both models. Returns their URIs."""
    return breast_cancer(), diabetes()


def _register(name: str, model: Any, train: Any, test: Any, metrics: dict[str, float], task: str) -> str:
    (train_x, train_y), (test_x, test_y) = train, test
    return register(
        name,
        lambda: mlflow.sklearn.log_model(
            model,
            name="model",
            signature=infer_signature(train_x, model.predict(train_x)),
            input_example=train_x.head(8),
            serialization_format="skops",  # the default of newer MLflow alone; 3.11 would write a pickle
            skops_trusted_types=TRUSTED_TYPES,
            pip_requirements=[f"scikit-learn=={sklearn.__version__}"],
        ),
        parameters={"seed": SEED},
        metrics=metrics,
        validation={"X": test_x.to_numpy(), "y": test_y.to_numpy()},
        calibration={"X": train_x.to_numpy()[:300], "y": train_y.to_numpy()[:300]},
        tags={"task": task, "data": name},
    )


if __name__ == "__main__":
    for uri in train_and_register():
        print(uri)
