"""JAX in its toolchain: what its source makes of a real artifact, and a whole run without ONNX."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.toolchains import Toolchain

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # MLflow's own deprecations

MAKE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
import jax_exports
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import SourceError
from compile_stage.core.records import SourceModel, Target
from compile_stage.jax import write_artifact
from compile_stage.sources.jax import JaxSource

folder = Path(sys.argv[2])
draw = np.random.default_rng(3)
kernel, dense = draw.standard_normal((3, 3, 3, 8), "float32"), draw.standard_normal((128, 4), "float32")

def network(image):
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=layout)
    return jax.nn.relu(x).reshape(x.shape[0], 128) @ dense

image = draw.standard_normal((64, 8, 8, 3), "float32")
data = folder / "model" / "data"
data.mkdir(parents=True)
write_artifact(network, image[:2], data, {"onnx": False})
(folder / "model" / "MLmodel").write_text('{"flavors": {"jax": {"data": "data"}}}')
np.savez(folder / "data.npz", image=image)

# An artifact that names a function of the process: its bytes look harmless, and JAX's parser shows it.
(folder / "foreign" / "data").mkdir(parents=True)
(folder / "foreign" / "data" / "model.jaxexport").write_bytes(jax_exports.FOREIGN)
tensor = '{"name": "%s", "dtype": "float32", "shape": [2, 4]}'
said = '{"format": 1, "inputs": [%s], "outputs": [%s], "answer": "array"}' % (tensor % "x", tensor % "y")
(folder / "foreign" / "data" / "model.json").write_text(said)
(folder / "foreign" / "MLmodel").write_text('{"flavors": {"jax": {"data": "data"}}}')
path = folder / "foreign"
described = {"flavors": {"jax": {"data": "data"}}}
foreign = SourceModel(
    uri="m", name="m", version="1", flavor="jax", path=str(path), digest=digest_tree(path), mlmodel=described
)
try:
    with JaxSource().open(foreign, Target(name="cpu")):
        print("opened")
except SourceError as error:
    print(error.problem)
"""
POLICY = """
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: jax
data: {{validation: {{source: "file:{folder}/data.npz"}}}}
targets: {{cpu: {{backends: [xla, onnxruntime], precisions: [fp32], batch_sizes: [1, 8], threads: 1}}}}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 1}}
"""


@pytest.fixture
def jax(toolchain: Callable[[str, Any], Toolchain]) -> Toolchain:
    """JAX's toolchain, in the folder that COMPILE_STAGE_TOOLCHAINS names; made there at the first time."""
    if "jax" not in plugins.names("sources"):
        pytest.skip("the installed compile-stage is older than this clone: make its environment again")
    return toolchain("jax", plugins.load("sources", "jax"))


def test_a_run_compiles_stablehlo_where_there_is_no_onnx(jax: Toolchain, tmp_path: Path) -> None:
    """Broken: a JAX model without ONNX would end the run, a backend that needs ONNX would say nothing of why it is left
    out, and an artifact that calls a function of the process would be opened."""
    sources = Path(__file__).parents[1] / "sources"
    done = subprocess.run(
        [jax.interpreter, "-c", MAKE, str(sources), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(plugins.link_packages(tmp_path / "linked"))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    assert "its program calls launch_missiles" in done.stdout

    policy = tmp_path / "p.yaml"
    policy.write_text(POLICY.format(folder=tmp_path))
    result = api.run(f"folder:{tmp_path / 'model'}", policy, publish=False, out=tmp_path / "out")
    (target,) = result.targets
    by_backend = {one.job.backend: one for one in target.candidates}
    assert by_backend["onnxruntime"].state == "refused"
    assert "it was logged with onnx=False" in by_backend["onnxruntime"].reason
    compiled = by_backend["xla"]
    assert compiled.failure is None
    assert compiled.verdict is not None
    assert compiled.verdict.passed
    assert (compiled.job.form, result.baseline_framework) == ("stablehlo", "JAX (jit)")
    assert target.baseline is not None
    assert result.environment["source_toolchain"]["lock"] == jax.digest
    (bundle,) = (tmp_path / "out" / "bundles").iterdir()
    manifest = json.loads((bundle / "data" / "manifest.json").read_text())
    assert manifest["source"]["toolchain"]["jax"] == jax.packages["jax"]
