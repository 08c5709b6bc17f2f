"""A Keras model from its folder to a bundle, the original in TensorFlow's toolchain and the compilers here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.toolchains import Toolchain

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # MLflow's own deprecations

MAKE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
import tensorflow_models as models
folder = Path(sys.argv[2])
(folder / "model").mkdir()
models.keras.utils.set_random_seed(3)
made = models.sequential()
models.archived(folder / "model", made)
image = np.random.default_rng(3).standard_normal((64, 8, 8, 3)).astype("float32")
np.savez(folder / "data.npz", image=image)
np.save(folder / "answers.npy", np.asarray(made(image, training=False)))
"""
POLICY = """
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: keras
data: {{validation: {{source: "file:{folder}/data.npz"}}}}
targets: {{cpu: {{backends: [onnxruntime, openvino], precisions: [fp32], batch_sizes: [1, 8]}}}}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 1}}
"""


@pytest.fixture
def tensorflow(toolchain: Callable[[str, Any], Toolchain]) -> Toolchain:
    """TensorFlow's toolchain, in the folder that COMPILE_STAGE_TOOLCHAINS names; made there at the first time."""
    if "keras" not in plugins.names("sources"):
        pytest.skip("the installed compile-stage is older than this clone: make its environment again")
    return toolchain("tensorflow", plugins.load("sources", "keras"))


def test_a_run_opens_exports_and_times_the_original_in_its_toolchain(tensorflow: Toolchain, tmp_path: Path) -> None:
    """Broken: a Keras model would be compiled against another original than the user's, the record would not say by
    which TensorFlow, or the bundle would answer otherwise than the model."""
    (tmp_path / "made").mkdir()
    folder = tmp_path / "made"
    sources = Path(__file__).parents[1] / "sources"
    subprocess.run(
        [tensorflow.interpreter, "-c", MAKE, str(sources), str(folder)],
        env={**os.environ, "PYTHONPATH": str(plugins.link_packages(tmp_path / "linked"))},
        check=True,
        timeout=280,
    )
    policy = tmp_path / "p.yaml"
    policy.write_text(POLICY.format(folder=folder))
    result = api.run(f"folder:{folder / 'model'}", policy, publish=False, out=tmp_path / "out")
    (target,) = result.targets
    assert {one.job.backend: one.failure for one in target.candidates} == {"onnxruntime": None, "openvino": None}
    assert all(one.verdict is not None and one.verdict.passed for one in target.candidates)
    assert target.baseline is not None
    assert result.baseline_framework == "Keras (TensorFlow graph)"
    assert result.environment["source_toolchain"]["lock"] == tensorflow.digest
    assert result.environment["source_toolchain"]["tensorflow-cpu"] == tensorflow.packages["tensorflow_cpu"]
    assert plugins.cache_identity("sources", "keras")["toolchain"] == tensorflow.digest

    (bundle,) = (tmp_path / "out" / "bundles").iterdir()
    manifest = json.loads((bundle / "data" / "manifest.json").read_text())
    assert manifest["source"]["toolchain"]["lock"] == tensorflow.digest
    import mlflow

    with np.load(folder / "data.npz") as arrays:
        answer = mlflow.pyfunc.load_model(str(bundle)).predict(arrays["image"])
    assert isinstance(answer, np.ndarray)
    np.testing.assert_allclose(answer, np.load(folder / "answers.npy"), rtol=1e-4, atol=1e-5)
