from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from compile_stage.core import plugins
from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.sources.mlmodel import name_tensors

from .conftest import source_of

NAMED_BY = {
    "onnx": "data",
    "sklearn": "pickled_model",
    "xgboost": "data",
    "lightgbm": "data",
    "pytorch": "model_data",
    "transformers": "model_binary",
}


@pytest.mark.parametrize("outside", ["../other", "/etc/hostname"])
@pytest.mark.parametrize(("flavor", "key"), NAMED_BY.items())
def test_a_file_outside_of_the_models_folder_is_refused(tmp_path: Path, flavor: str, key: str, outside: str) -> None:
    """Broken: whoever may log a model could have the stage read, and publish, any file of the machine that it runs
    on."""
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "other").write_bytes(b"not yours")
    (model / "MLmodel").write_text(f"flavors: {{{flavor}: {{{key}: {outside}, task: fill-mask}}}}\n")
    with pytest.raises(SourceError, match="outside of the model's folder"):
        plugins.load("sources", flavor).refuse(source_of(model, flavor), Compliance())


@pytest.mark.parametrize("kind", ["float64", "float32", "int64"])
def test_truth_values_beside_numbers_leave_these_in_their_type(kind: str) -> None:
    """Broken: an example with a column of truth values was rounded to float32 before the original was asked, and what
    rounding changes was not seen."""
    frame = pd.DataFrame({"id": np.array([16_777_217, 2], kind), "is_new": [True, False]})
    signature = Signature(inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 2)),), outputs=())
    named = name_tensors(frame, signature, as_given=True)
    assert named is not None
    assert named["X"].dtype == kind
    np.testing.assert_array_equal(named["X"], np.array([[16_777_217, 1], [2, 0]], kind))
