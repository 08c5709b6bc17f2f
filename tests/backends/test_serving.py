"""A published model carries a backend's file to where only the runtime and NumPy are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json
from compile_stage.core.records import Target
from compile_stage.testing import models

SCRIPT = """
import sys
for absent in ("onnx", "nncf", "torch", "mlflow", "sklearn", "pandas", "compile_stage.precision", "compile_stage.testing"):
    sys.modules[absent] = None
import json, importlib
import numpy as np
from compile_stage.core.digest import load_record
from compile_stage.core.records import Artifact
module, kind, text, inputs = sys.argv[1:]
artifact = load_record(Artifact, text)
with getattr(importlib.import_module(module), kind)().open(artifact, 1) as session:
    print(json.dumps(session.run({"image": np.load(inputs)})["scores"].tolist()))
"""


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_open_needs_only_the_runtime(name: str, tmp_path: Path) -> None:
    backend = plugins.load("backends", name)
    if (reason := plugins.missing(backend)) is not None:
        pytest.skip(reason)
    model, samples = models.conv_net(tmp_path / "model")
    target = Target(name="cpu")
    artifact = backend.compile(model, backend.schemes(target, "fp32")[0], target, "job", tmp_path / "art")
    images = tmp_path / "images.npy"
    np.save(images, np.load(Path(samples.path) / "inputs" / "image.npy")[:2])
    kind = type(backend)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind.__module__, kind.__name__, canonical_json(artifact), str(images)],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with backend.open(artifact, 1) as session:
        here = session.run({"image": np.load(images)})["scores"]
    np.testing.assert_allclose(np.array(json.loads(done.stdout), np.float32), here, atol=1e-6)
