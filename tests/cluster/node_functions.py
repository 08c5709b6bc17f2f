"""What the tests have nodes do; on the path of their processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from compile_stage.core.errors import GateError


def wait_for(node: Any, began: str, until: str) -> dict[str, Any]:
    """Write this process's number below `began`, and wait until a file is there."""
    node.reporter.began("compile", "job")
    Path(began, str(os.getpid())).write_text(os.environ["COMPILE_STAGE_TEST_NODE"])
    while not Path(until).exists():
        time.sleep(0.05)
    node.reporter.ended("compile", "job", 0.1, "done")
    return {"node": os.environ["COMPILE_STAGE_TEST_NODE"], "cores": len(os.sched_getaffinity(0))}


def fail(node: Any, began: str) -> None:
    """Raise an error for people, and leave a mark at each call."""
    Path(began, f"{os.getpid()}-{time.monotonic_ns()}").touch()
    raise GateError("it is not fast enough", where="here")
