"""An exported model asked without our package: by a program in a process of its own, which is confined as the worker
is."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.records import SampleSet
from compile_stage.engine.fresh_load import serving_environment

_TIMEOUT_S = 600  # the worker's own limit comes first


def answer_export(
    script: str, task: Any, model: Any, into: str, samples: Any = None, trust: Any = None
) -> dict[str, Any]:
    """Have a program answer for an exported model.

    Args:
        script: The program: it reads `task` as a line of JSON, and prints its answer behind the task's `mark`.
        task: With what the program asks for. `home` is relative to the model's folder; of the samples it gets `inputs`,
            input name → `.npy` file, and `results`, the folder for its own.
        model: `{"path": ...}`, the folder of the export.
        samples: All of them are asked; None: the task holds what is asked.
        trust: `{"path": ...}`, the folder of the trust file that a signature is verified with; None for none.

    Returns:
        What the program answered.

    Raises:
        UsageError: It could not load the model or run it; the message has the error.
    """
    from compile_stage.measure.samples import open_samples

    results, mark = Path(into), secrets.token_hex(8)
    results.mkdir(parents=True, exist_ok=True)
    trusted = Path(trust["path"]) / "trust.json" if trust else None
    with tempfile.TemporaryDirectory(prefix="compile-stage-export-") as folder:
        whole = {**task, "mark": mark, "home": str(Path(model["path"]) / task["home"]), "results": str(results)}
        if samples:
            whole["inputs"] = _written(open_samples(revive(SampleSet, samples)).inputs, Path(folder))
        done = subprocess.run(  # noqa: S603 - our own interpreter and script
            [sys.executable, "-P", script], input=json.dumps(whole) + "\n", capture_output=True, encoding="utf-8",
            errors="replace", check=False, cwd=folder, env=serving_environment(folder, trusted), timeout=_TIMEOUT_S,
        )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith(mark)), None)
    if line is None:
        said = done.stderr.strip().splitlines()
        raise UsageError(said[-1] if said else f"it ended with exit code {done.returncode}")
    answer: dict[str, Any] = json.loads(line.removeprefix(mark))
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer


def _written(arrays: Any, folder: Path) -> dict[str, str]:
    import numpy as np

    files = {}
    for number, (name, array) in enumerate(arrays.items()):
        files[name] = str(folder / f"{number}.npy")
        np.save(files[name], np.ascontiguousarray(array), allow_pickle=False)
    return files
