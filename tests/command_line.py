"""The command line in the test's own process: what it prints and its exit code, without the seconds that importing
MLflow takes each new process. That a process of its own does the same is tested in `tests/cli/test_process.py`."""

from __future__ import annotations

import io
import logging
import signal
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest

from compile_stage.cli.main import main


def command_line(*arguments: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    """Run `compile-stage ARGUMENTS`, on a terminal of so many columns.

    Returns:
        As of `subprocess.run` with `text=True`.
    """
    out, err = io.StringIO(), io.StringIO()
    # `main` makes these its own, for a whole process.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with pytest.MonkeyPatch.context() as environment, redirect_stdout(out), redirect_stderr(err):
            environment.setenv("COLUMNS", str(columns))
            with pytest.raises(SystemExit) as left:
                main(arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        root.handlers[:] = handlers
        root.setLevel(level)
    return subprocess.CompletedProcess(arguments, int(left.value.code or 0), out.getvalue(), err.getvalue())
