"""A new interpreter that has nothing of the test's: it plans, or opens and runs an artifact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from compile_stage.testing.case import Case

_SCRIPT = """
import importlib, importlib.util, json, sys
from pathlib import Path
task = json.load(sys.stdin)
sys.path[:] = task["sys_path"]
try:
    module = importlib.import_module(task["module"])
except ImportError:
    spec = importlib.util.spec_from_file_location(task["module"], task["file"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[task["module"]] = module
    spec.loader.exec_module(module)
backend = getattr(module, task["kind"])()
from compile_stage.core.digest import revive
from compile_stage.core.records import Artifact, Target
if task["what"] == "plan":
    target = revive(Target, task["target"])
    backend.refuse_target(target)
    for precision in task["precisions"]:
        backend.schemes(target, precision)
    answer = {"loaded": sorted(sys.modules)}
else:
    import numpy as np
    artifact, given = revive(Artifact, task["artifact"]), Path(task["given"])
    inputs = {s.name: np.load(given / f"{i}.npy") for i, s in enumerate(artifact.signature.inputs)}
    with backend.open(artifact, 1) as session:
        outputs = session.run(inputs)
    for i, value in enumerate(outputs.values()):
        np.save(given / f"out-{i}.npy", value)
    answer = {"outputs": {name: f"out-{i}.npy" for i, name in enumerate(outputs)}}
print("\\n" + json.dumps(answer))
"""


def in_fresh_process(case: Case, what: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Let a new interpreter load the plug-in's class and plan, or open and run an artifact."""
    kind = type(case.backend)
    module = sys.modules[kind.__module__]
    where = {"module": kind.__module__, "file": module.__file__, "kind": kind.__qualname__, "sys_path": sys.path}
    done = subprocess.run(  # noqa: S603 - our own interpreter and script
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps({"what": what, **where, **task}),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        cwd=case.folder,
        env=dict(os.environ),
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise RuntimeError(f"a fresh process could not {what} it: {said}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
