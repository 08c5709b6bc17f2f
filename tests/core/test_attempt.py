"""One attempt at a job, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_folder_that_cant_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    """Broken: a full disk would show as a traceback of ours, before the error that names the disk."""
    (tmp_path / "job").write_text("no folder")
    command = [sys.executable, "-m", "compile_stage.core.attempt", str(tmp_path / "job" / "1"), "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"the attempt in {tmp_path}/job/1 can't go on: Not a directory\n"
