from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage.core import plugins
from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance

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
