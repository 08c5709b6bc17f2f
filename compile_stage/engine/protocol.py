"""What the stage and a worker say to each other.

One message is one line: a canonical-JSON object (`core.digest`), UTF-8, ended by a newline, which JSON itself never
holds unescaped. The stage writes requests to the worker's standard input, the worker answers on what was its standard
output when it started:

    stage  → worker   {"id": 7, "function": "compile", "arguments": {...}}
    worker → stage    {"id": 7, "result": ...}      or      {"id": 7, "error": {"class": "SourceError", "problem": ...}}

Before anything is asked, the worker says `{"id": 0, "result": {"protocol": 2, "python": "3.11.7"}}`. The first request
has it `confine` itself, and it answers what is in force (`engine.confinement`). Requests are answered in order, one at
a time. Records travel as their plain JSON, arrays and models as files whose paths are in the message; nothing is ever
unpickled, so the two ends may be of different interpreters with different packages.
"""

from __future__ import annotations

import errno
import json
import traceback
from collections.abc import Mapping
from typing import Any, cast, get_args

from compile_stage.core import errors
from compile_stage.core.digest import canonical_json
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import CompileStageError, FailureKind, PolicyError, WorkerError
from compile_stage.core.storage import disk_full

PROTOCOL = 2
"""Raised when a message changes its meaning; the two ends must agree."""

MAX_MESSAGE_BYTES = 64_000_000
"""No message is larger: what is larger belongs in a file. It keeps garbage from filling the stage's memory."""

_SENTENCE_CHARS = 400
_DETAIL_CHARS = 20_000

# How runtimes say that memory ran out when they do not raise MemoryError, in lower case.
OUT_OF_MEMORY_PHRASES = (
    "bad_alloc",
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate memory",
    "memory allocation of",  # Rust: "memory allocation of 53687091200 bytes failed"
)


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as a line. Raises TypeError or ValueError for what JSON can't hold, RecursionError for what is nested
    too deep."""
    # surrogatepass: a file name that is not UTF-8 reaches Python with lone surrogates, and must get there and back.
    return canonical_json(message).encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line. Raises ValueError for bytes that are not one."""
    try:
        message = json.loads(line.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(message, dict) or not isinstance(message.get("id"), int):
        raise ValueError("not an object with an id")
    return message


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain JSON: ours for people by class and fields (a full disk is one of them), any other as a
    WorkerError that names it."""
    error = _of_this_copy(error)
    if not isinstance(error, CompileStageError) and (full := disk_full(error)) is not None:
        error = full
    if not isinstance(error, CompileStageError):
        kind: FailureKind = "out_of_memory" if _means_out_of_memory(error) else "exception"
        error = WorkerError(kind, _sentence(error), detail=_traceback(error))
    known = next(cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    described = {
        "class": known.__name__,
        "problem": str(error.problem),
        "fix": str(error.fix),
        "where": str(error.where),
        "code": str(error.code),
    }
    if isinstance(error, PolicyError):
        described["problems"] = [str(problem) for problem in error.problems]
    if isinstance(error, WorkerError):
        described |= {"kind": error.kind, "detail": str(error.detail)}
    return described


def _of_this_copy(error: BaseException) -> BaseException:
    """One of our errors that a published model's own copy of our code raised, as ours; any other as it is."""
    for cls in () if isinstance(error, CompileStageError) else type(error).__mro__:
        ours = getattr(errors, cls.__name__, None) if cls.__module__ == errors.__name__ else None
        if isinstance(ours, type) and issubclass(ours, CompileStageError) and not issubclass(ours, WorkerError):
            problem, fix, where = (str(getattr(error, key, "")) for key in ("problem", "fix", "where"))
            return ours(problem, fix=fix, where=where, code=_code(getattr(error, "code", None)))
    return error


def revive_error(described: Mapping[str, Any]) -> CompileStageError:
    """The inverse of `describe_error`. A class that this side does not know (a newer worker's) becomes a
    WorkerError."""
    problem, fix, where = (str(described.get(key, "")) for key in ("problem", "fix", "where"))
    cls = getattr(errors, str(described.get("class")), None)
    if not (isinstance(cls, type) and issubclass(cls, CompileStageError)) or cls is WorkerError:
        kind = described.get("kind")
        known = cast("FailureKind", kind) if kind in get_args(FailureKind) else "exception"
        return WorkerError(known, problem, detail=str(described.get("detail", "")), fix=fix)
    code = _code(described.get("code"))
    if issubclass(cls, PolicyError):
        return cls(problem, fix=fix, where=where, code=code, problems=tuple(map(str, described.get("problems", ()))))
    return cls(problem, fix=fix, where=where, code=code)


def _code(named: Any) -> Code | None:
    """One that this side knows; None for another release's."""
    try:
        return Code(str(named))
    except ValueError:
        return None


def says_out_of_memory(text: str) -> bool:
    """True if a message or a log says that memory ran out."""
    lowered = text.lower()
    return any(phrase in lowered for phrase in OUT_OF_MEMORY_PHRASES)


def _means_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if says_out_of_memory(_text(error)):
            return True
        error = error.__cause__
    return False


def _sentence(error: BaseException) -> str:
    words = " ".join(_text(error).split())
    named = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return named if len(named) <= _SENTENCE_CHARS else f"{named[: _SENTENCE_CHARS - 1]}…"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception of foreign code may fail to print itself
        return ""


def _traceback(error: BaseException) -> str:
    # The first frame is the worker's own loop, which tells a reader nothing.
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, inner))
    if len(text) <= _DETAIL_CHARS:
        return text
    half = _DETAIL_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
