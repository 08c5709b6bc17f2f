"""The example of a third party's backend: installed as its own distribution, found by name, and held to the kit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import policy_text
from small_net import write_small_net

CHECK = """
import json, sys
from pathlib import Path
from compile_stage.core import plugins
from compile_stage.testing import check_backend, models
model, samples = models.perceptron(Path(sys.argv[1]) / "model")
findings = check_backend(plugins.load_here("backends", "reference"), model, samples, Path(sys.argv[1]) / "work")
print(json.dumps([len(findings), [f"{f.check}: {f.reason}" for f in findings if not f.passed]]))
"""


@pytest.fixture
def installed(install_example: Callable[[str], dict[str, str]]) -> dict[str, str]:
    """The environment of a process in which the example is installed."""
    return install_example("backend_plugin")


def test_it_is_found_by_name_and_conforms(installed: dict[str, str], tmp_path: Path) -> None:
    """Broken: what we tell authors of backends to do would not work, or would not be held to what ours are."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path)], capture_output=True, text=True, check=False, env=installed
    )
    assert done.returncode == 0, done.stderr
    count, failed = json.loads(done.stdout.splitlines()[-1])
    assert count >= 10
    assert failed == []


def test_the_doctor_lists_it(installed: dict[str, str]) -> None:
    """Broken: a user could not see whether the plug-in that they installed is there."""
    done = subprocess.run(
        [sys.executable, "-m", "compile_stage", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=installed,
    )
    entries = json.loads(done.stdout)["entries"]
    (entry,) = (entry for entry in entries if (entry["kind"], entry["name"]) == ("backend", "reference"))
    assert entry["ready"]
    assert "onnx" in entry["version"]


@pytest.mark.slow
def test_what_it_compiled_is_published_promoted_and_served(installed: dict[str, str], tmp_path: Path) -> None:
    """Broken: the model carries files of ours that hide the installed compile-stage, and lacked those that the plug-in
    imports, so that it loaded nowhere."""
    write_small_net(tmp_path)
    policy = tmp_path / "policy.yaml"
    body = (
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}\n"
        'promote: {alias: "{target}-prod"}'
    )
    policy.write_text(policy_text(tmp_path / "data.npz", "backends: [reference], precisions: [fp32]", body))
    command = ["run", f"folder:{tmp_path / 'small-net'}", "-p", str(policy), "--out", str(tmp_path / "out"), "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "compile_stage", *command], capture_output=True, text=True, check=False, env=installed
    )
    assert done.returncode == 0, done.stderr
    model = tmp_path / "compiled-models" / "small-net-compiled" / "1" / "model"
    assert json.loads((model.parents[1] / "aliases.json").read_text()) == {"cpu-prod": "1"}
    assert "compile-stage-reference==1.0" in (model / "requirements.txt").read_text()
    script = f"""
import mlflow, numpy as np
print(sorted(mlflow.pyfunc.load_model({str(model)!r}).predict(np.ones((2, 8), np.float32))))
"""
    served = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=installed, cwd=tmp_path
    )
    assert served.returncode == 0, served.stderr
    assert served.stdout.splitlines()[-1] == "['y', 'z']"
