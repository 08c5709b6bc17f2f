"""One worker, of any interpreter: `python -m compile_stage.engine.worker`.

It reads requests from standard input and answers on what standard output was at its start (`engine.protocol`).
Compilers print where they like, from Python and from native code, so descriptor 1 is pointed at the log (descriptor 2)
before anything is loaded, and the protocol's own descriptors are out of their reach. What it can run is the table
`CALLS` of `compile_stage.engine.calls`, which is imported with the first request: a worker is up long before the
runtimes are. Before that it is asked to confine itself (`engine.confinement`), and refuses to work until it is.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import io
import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

from compile_stage.core.errors import InternalError, WorkerError
from compile_stage.engine.confinement import confine
from compile_stage.engine.guard import stand_guard
from compile_stage.engine.protocol import MAX_MESSAGE_BYTES, PROTOCOL, decode, describe_error, encode
from compile_stage.engine.starter import hand_over_confinement


def main() -> None:
    """Start: put the descriptors where they are safe, fork off the guard, serve until the requests end."""
    options = _options()
    requests, answers = _move_descriptors()
    sys.path.extend(entry for entry in options.path if entry not in sys.path)
    stand_guard(requests, answers, options.folder)
    faulthandler.enable(all_threads=False)  # a segfault leaves the Python stack in the log
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # line by line, so that a crash loses nothing; anything can be printed
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    serve(requests, answers, options.calls)


def serve(requests: int, answers: int, calls: str) -> None:
    """Answer requests, one after the other, until the stage closes its end.

    Args:
        requests: Descriptor to read from.
        answers: Descriptor to write to.
        calls: Module with the table `CALLS`: function name → callable that takes and returns plain JSON.
    """
    with open(requests, "rb") as incoming, open(answers, "wb") as outgoing:
        outgoing.write(encode({"id": 0, "result": {"protocol": PROTOCOL, "python": platform.python_version()}}))
        outgoing.flush()
        confined = False
        for line in incoming:
            request = decode(line)
            if request["function"] == "confine":
                outgoing.write(_confined(request))
                confined = True
            elif confined:
                outgoing.write(answer(request, calls))
            else:
                raise InternalError("a worker was asked to work before it was confined")
            outgoing.flush()


def _confined(request: Mapping[str, Any]) -> bytes:
    """Confine this process, before anything of a stranger's is loaded, and say what is in force."""
    hand_over_confinement(request["arguments"])
    return encode({"id": request["id"], "result": confine(**request["arguments"])})


def answer(request: Mapping[str, Any], calls: str) -> bytes:
    """The encoded answer to one request; whatever happens in the function becomes an answer too."""
    number, function = request["id"], request["function"]
    try:
        result = _find(function, calls)(**request["arguments"])
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a compiler's own main() must not end the worker
        return encode({"id": number, "error": describe_error(error)})
    try:
        reply = encode({"id": number, "result": result})
    except (TypeError, ValueError, RecursionError) as error:
        why = "nested too deep, or in a circle" if isinstance(error, RecursionError) else str(error)
        unfit = WorkerError("exception", f"{function!r} answered with something that is not JSON: {why}")
        return encode({"id": number, "error": describe_error(unfit)})
    except BaseException as error:  # noqa: BLE001 - a MemoryError, or a foreign object's own failure
        return encode({"id": number, "error": describe_error(error)})
    if len(reply) > MAX_MESSAGE_BYTES:
        problem = (
            f"{function!r} answered with {len(reply) / 1e6:.0f} MB, and at most {MAX_MESSAGE_BYTES / 1e6:.0f} MB can "
            "travel"
        )
        unfit = WorkerError("exception", problem, fix="return large data as a file and answer with its path")
        return encode({"id": number, "error": describe_error(unfit)})
    return reply


def _find(function: str, calls: str) -> Callable[..., Any]:
    table: Mapping[str, Callable[..., Any]] = importlib.import_module(calls).CALLS
    if function not in table:
        raise InternalError(f"a worker has no function {function!r}; it has: {', '.join(sorted(table))}", where=calls)
    return table[function]


def _move_descriptors() -> tuple[int, int]:
    """Take the protocol's pipes away from descriptors 0 and 1; what `os.dup` makes is not inherited by what compilers
    start."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m compile_stage.engine.worker", description=__doc__)
    parser.add_argument("--calls", default="compile_stage.engine.calls", help="module with the table CALLS")
    parser.add_argument("--folder", action="append", default=[], help="private folder, removed when the stage dies")
    parser.add_argument("--path", action="append", default=[], help="further entry of sys.path; may be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
