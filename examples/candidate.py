"""What the examples share: the last lines of a training job, as a data scientist writes them.

A run gets the model, its metrics and two data sets as artifacts, `datasets/validation.npz` and
`datasets/calibration.npz`, which a policy names as `mlflow-dataset:validation` and `mlflow-dataset:calibration`. Their
arrays are called as the model's inputs, and `y` for the labels.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np

ALIAS = "candidate"


def register(
    name: str,
    log_model: Callable[[], Any],
    *,
    parameters: Mapping[str, Any],
    metrics: Mapping[str, float],
    validation: Mapping[str, np.ndarray],
    calibration: Mapping[str, np.ndarray],
    tags: Mapping[str, str],
) -> str:
    """Log the run, register the model as a new version of `name` under the alias `candidate`, and return
    `models:/NAME/VERSION`.

    Args:
        log_model: Logs the model with its flavor (it is called inside of the run) and returns MLflow's ModelInfo.
        validation: Model input name → array, and `y` where there are labels.
        calibration: The same, from the training data.
    """
    mlflow.set_experiment("compile-stage-examples")
    with mlflow.start_run(run_name=name):
        mlflow.log_params(dict(parameters))
        mlflow.log_metrics(dict(metrics))
        for role, arrays in (("validation", validation), ("calibration", calibration)):
            with saved(role, arrays) as path:
                mlflow.log_artifact(str(path), "datasets")
            features = {key: value for key, value in arrays.items() if key != "y"}
            record = mlflow.data.from_numpy(features, targets=arrays.get("y"), name=f"{name}-{role}")
            mlflow.log_input(record, context=role)
        logged = log_model()
    client = mlflow.MlflowClient()
    with contextlib.suppress(mlflow.MlflowException):  # it exists already: another version of the same model
        client.create_registered_model(name, tags=dict(tags))
    version = client.create_model_version(
        name, logged.model_uri, run_id=logged.run_id, tags=dict(tags), model_id=logged.model_id
    )
    client.set_registered_model_alias(name, ALIAS, str(version.version))
    return f"models:/{name}/{version.version}"


@contextlib.contextmanager
def saved(role: str, arrays: Mapping[str, np.ndarray]) -> Iterator[Path]:
    """The arrays as `ROLE.npz` in a folder that lives as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{role}.npz"
        np.savez(path, **arrays)
        yield path
