"""What `mlflow deployments` gives a published version."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
from mlflow.types import ColSpec, Schema, TensorSpec

from compile_stage.deployments import with_floats

SCHEMA = Schema(
    [ColSpec("double", "income"), ColSpec("float", "rate"), ColSpec("long", "age"), ColSpec("string", "city")]
)


def test_whole_numbers_of_a_file_are_floats_where_the_signature_says_so() -> None:
    """Broken: `mlflow deployments predict` of an income of 30000.0 is refused, since pandas reads it as a whole number,
    and MLflow "can not safely convert int64 to float64"."""
    text = '[{"income": 30000.0, "rate": 2.0, "age": 30, "city": "Ulm", "more": 1}]'
    frame = with_floats(pd.read_json(io.StringIO(text)), SCHEMA)
    assert [frame[name].dtype for name in ("income", "rate", "age", "more")] == ["float64", "float32", "int64", "int64"]
    assert frame["income"].tolist() == [30000.0]
    rows = [{"x": [1, 2]}]
    tensors = pd.DataFrame(rows)
    assert with_floats(tensors, Schema([TensorSpec(np.dtype("float32"), (-1, 2), "x")]))["x"].tolist() == [[1, 2]]
    assert with_floats(tensors, None) is tensors
    assert with_floats(rows, SCHEMA) is rows
