"""An example does what it says: a user's run of it ends with a registered candidate whose data sets a policy can name.
The other two are run, and taken all the way, in tests/integration/test_serve_elsewhere.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compile_stage.core import plugins
from compile_stage.core.records import Compliance, Target
from compile_stage.registry.mlflow import MLflowRegistry

EXAMPLES = Path(__file__).parents[2] / "examples"

# Script → the models that it registers, the metric of each, and the bound that says it learned.
MODELS = {
    "digits_boosting.py": [("digits-boosting", "accuracy", 0.94)],
}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore"
)  # MLflow's database layer and its data sets are deprecated here and there; ours are not under test
@pytest.mark.parametrize("script", MODELS)
def test_an_example_registers_candidates_that_the_stage_can_take(script: str, embedded: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [f"models:/{name}/1" for name, _, _ in MODELS[script]]

    import mlflow

    registry = MLflowRegistry()
    for name, metric, bound in MODELS[script]:
        source = registry.resolve(f"models:/{name}@candidate", tmp_path / "sources")
        measured = mlflow.get_run(source.run_id).data.metrics[metric]
        assert measured >= bound

        exporter = plugins.load("sources", source.flavor)
        assert exporter.refuse(source, Compliance()) is None
        with exporter.open(source, Target(name="cpu")) as session:
            (taken,) = session.signature.inputs
            assert taken.batch == "batch"
            for role in ("validation", "calibration"):
                with np.load(registry.dataset(source, role, tmp_path / name)) as arrays:
                    assert set(arrays.files) == {taken.name, "y"}
                    assert len(arrays["y"]) == len(arrays[taken.name]) >= 150
                    session.run({taken.name: arrays[taken.name][:2]})
