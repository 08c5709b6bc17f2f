"""A worker on a device: `python validator.pyz FOLDER SESSION`. It has one model open, and answers what `devices.calls`
has a function for.

Its first request confines it, as far as the system can (`engine.confinement`): the model's code that it loads then
reads no files but the interpreter's and the session's, and reaches no network. On systems other than Linux nothing of
that is in force.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_stage.devices.meter import own_usage
from compile_stage.engine.protocol import decode, describe_error, encode

_FILE_BYTES = 1 << 36


def main() -> None:
    """Serve until the agent closes its end."""
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    for line in incoming:
        outgoing.write(_answer(decode(line)))
        outgoing.flush()


def _answer(request: Mapping[str, Any]) -> bytes:
    number = request["id"]
    try:
        if request["function"] == "confine":
            return encode({"id": number, "result": _confine(sys.argv[1], sys.argv[2])})
        from compile_stage.devices.calls import CALLS

        result = CALLS[request["function"]](**request["arguments"])
        return encode({"id": number, "result": result, "used": own_usage()})
    except BaseException as error:  # noqa: BLE001 - what a runtime raises is its answer
        return encode({"id": number, "error": describe_error(error), "used": own_usage()})


def _confine(folder: str, session: str) -> dict[str, Any]:
    """What is in force, as `core.ports.Confinement` has it."""
    if not sys.platform.startswith("linux"):
        return {}
    try:
        from compile_stage.engine.confinement import confine, has_nvidia

        home = str(Path("~").expanduser())
        os.environ["TMPDIR"] = os.environ["HOME"] = folder
        return confine(
            reads=[session, *_linked()],
            writes=[folder],
            home=home,
            shared_memory_bytes=1 << 30,
            file_bytes=_FILE_BYTES,
            names_threads=has_nvidia(),
            namespaces=False,
        )
    except (ImportError, OSError, AttributeError):  # a system that is called Linux, and is Android
        return {}


def _linked() -> list[str]:
    """What packages that are links lead to: a link grants nothing."""
    found = []
    for entry in filter(os.path.isdir, sys.path):
        found += [os.path.realpath(part.path) for part in os.scandir(entry) if part.is_symlink()]
    return found
