"""Gradient-boosted trees in scikit-learn that read handwritten digits (scikit-learn's `digits`, 64 pixels as columns).

    python examples/digits_boosting.py

trains them in a few seconds and registers `digits-boosting` in the MLflow that MLFLOW_TRACKING_URI names.
"""

from __future__ import annotations

import mlflow
import numpy as np
import pandas as pd
import sklearn
from candidate import register
from mlflow.models import infer_signature
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import train_test_split

NAME = "digits-boosting"
SEED = 0

# Parts of the boosting model that skops doesn't know: whoever logs the model vouches for them.
TRUSTED_TYPES = [
    "_loss.CyHalfMultinomialLoss",
    "numpy.dtype",
    "sklearn._loss.link.Interval",
    "sklearn._loss.link.MultinomialLogit",
    "sklearn._loss.loss.HalfMultinomialLoss",
    "sklearn.ensemble._hist_gradient_boosting.binning._BinMapper",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
]


def load_data() -> tuple[pd.DataFrame, np.ndarray, pd.DataFrame, np.ndarray]:
    """Train and test frames and labels; columns are called `pixel_ROW_COLUMN`."""
    digits = load_digits(as_frame=True)
    pixels, labels = digits.data.astype(np.float32), digits.target.to_numpy(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=1 / 3, random_state=SEED, stratify=labels
    )
    return train_x, train_y, test_x, test_y


def train_and_register(name: str = NAME, rounds: int = 40) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    train_x, train_y, test_x, test_y = load_data()
    model = HistGradientBoostingClassifier(
        max_iter=rounds, max_leaf_nodes=15, early_stopping=False, random_state=SEED
    ).fit(train_x, train_y)
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
        parameters={"rounds": rounds, "seed": SEED},
        metrics={"accuracy": float(model.score(test_x, test_y))},
        validation={"X": test_x.to_numpy(), "y": test_y},
        calibration={"X": train_x.to_numpy()[:300], "y": train_y[:300]},
        tags={"task": "classification", "data": "digits"},
    )


if __name__ == "__main__":
    print(train_and_register())
