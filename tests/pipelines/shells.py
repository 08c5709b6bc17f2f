"""Runs the shell steps of a CI system's definition as its runner would: the variables that the system sets, the step's
own script, an empty working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = Path(sys.executable).parent


def run(command: list[str], folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a step in which `compile-stage` is this environment's."""
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path, **variables}, capture_output=True, text=True, check=False
    )
