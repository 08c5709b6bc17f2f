"""The example of a third party's backend: installed as its own distribution, found by name, and held to the kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "backend_plugin"

CHECK = """
import json, sys
from pathlib import Path
from compile_stage.core import plugins
from compile_stage.testing import check_backend, models
model, samples = models.perceptron(Path(sys.argv[1]) / "model")
findings = check_backend(plugins.load("backends", "reference"), model, samples, Path(sys.argv[1]) / "work")
print(json.dumps([len(findings), [f"{f.check}: {f.reason}" for f in findings if not f.passed]]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the example is installed, by pip, from a copy of it."""
    home = tmp_path_factory.mktemp("installed")
    command = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(home), str(EXAMPLE)]
    done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])])}


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
