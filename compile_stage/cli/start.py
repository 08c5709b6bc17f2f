"""What a shell starts: it is ready for an interruption before it imports the program."""

from __future__ import annotations

import os
import signal
import warnings
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130  # as `core.errors.EXIT_INTERRUPTED`, whose import is a part of what may be interrupted


def start() -> NoReturn:
    """Import the program, which takes some tenths of a second, and run it. An interruption meanwhile has the exit code
    of a later one. Signals that are ignored, as by `nohup`, stay so."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _leave)
    if takes_int := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    _let_libraries_warn()
    from compile_stage.cli.main import program

    if takes_int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    program()


def _let_libraries_warn() -> None:
    """Whoever turns warnings into errors, as a CI system does for all its commands, means their own code: MLflow and
    compilers warn while they are imported, here and in workers."""
    warnings.filters[:] = [one for one in warnings.filters if one[0] != "error"]  # type: ignore[index]
    if given := os.environ.get("PYTHONWARNINGS"):
        kept = [one for one in given.split(",") if not "error".startswith(one.partition(":")[0].strip() or "-")]
        os.environ["PYTHONWARNINGS"] = ",".join(kept)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing was begun, so there is nothing to keep. An exception could be caught by what is being imported."""
    try:
        os.write(2, b"\ninterrupted before anything was begun\n")
    finally:
        os._exit(_INTERRUPTED)
