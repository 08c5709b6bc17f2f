"""docs/get-started.md: what its reader copies works, from an empty folder to an answer of the published version."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

PAGE = Path(__file__).parents[2] / "docs" / "get-started.md"

# The page's run takes minutes; what a test adds to it takes seconds.
QUICK = (
    "targets.cpu.backends=[onnxruntime]",
    "targets.cpu.precisions=[fp32]",
    "budget.measure_seconds=1",
    "budget.soak_seconds=0",
    "budget.predict_seconds=0",
    "performance.min_speedup=null",
    "report.profile=false",
)

ANSWER = """
import json, sys
import mlflow
model = mlflow.pyfunc.load_model("models:/digits-compiled/1")
import numpy as np
print(json.dumps(model.predict(np.array(json.loads(sys.argv[1])["inputs"], np.float32)).tolist()))
"""


@pytest.mark.slow
def test_the_page_leads_from_an_empty_folder_to_an_answer(
    copy_database: Callable[[Path, str], str], tmp_path: Path
) -> None:
    """Broken: the first thing that a newcomer tries fails, or the page shows what the program no longer does."""
    text = PAGE.read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    copy_database(tmp_path, str(tmp_path / "mlruns" / "0"))  # making its tables would take the script seconds
    environment = os.environ | {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr[-2000:]}{done.stdout[-2000:]}"
        return done.stdout

    python("train.py")
    commands = [shlex.split(line) for line in re.findall(r"^    compile-stage ((?:init|lint|run) .*)$", text, re.M)]
    assert [words[0] for words in commands] == ["init", "lint", "run"]
    for words in commands:
        quick = [part for setting in QUICK for part in ("--set", setting)] if words[0] == "run" else []
        python("-m", "compile_stage", *words, *quick)
    asked = re.search(r"-d '(\{.*?\})' localhost", text)
    assert asked is not None
    answer = re.search(r'answers `(\{"predictions": .*?\})`', text)
    assert answer is not None
    assert {"predictions": json.loads(python("-c", ANSWER, asked[1]).splitlines()[-1])} == json.loads(answer[1])
