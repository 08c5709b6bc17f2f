"""The kit over one backend by the interpreter of its toolchain: `in_toolchain.py BACKEND MODEL BATCH FOLDER`, findings
as JSON on the last line.

A toolchain holds the backend's packages and what they need. What the kit needs beside, to make a model and to judge
answers, is taken from the environment that tests, and comes last: where both have a package, the toolchain's is used,
as in a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.digest import plain, revive
from compile_stage.testing import PRECISIONS, Finding, check_backend, models


def check(backend: str, model: str, folder: Path, batch: int | None = None) -> tuple[Finding, ...]:
    """`check_backend` there."""
    ours = [entry for entry in map(os.path.abspath, sys.path) if Path(entry).name == "site-packages"]
    done = subprocess.run(
        [plugins.interpreter_of(backend), "-P", __file__, backend, model, json.dumps(batch), str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": str(plugins.link_packages(folder / "linked")),
            "THEN_FROM": os.pathsep.join(ours),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1200,
    )
    return revive(tuple[Finding, ...], json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    name, kind, size, place = sys.argv[1:]
    sys.path += os.environ["THEN_FROM"].split(os.pathsep)
    made = {} if json.loads(size) is None else {"batch": json.loads(size)}
    asked = ("fp32", "int8") if made else PRECISIONS
    portable, samples = getattr(models, kind)(Path(place) / "model", **made)
    print()
    print(json.dumps(plain(check_backend(plugins.load("backends", name), portable, samples, Path(place), asked))))
