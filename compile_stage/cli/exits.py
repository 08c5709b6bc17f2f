"""Exit codes as people read them: in every command's help, and as the table of the documentation.

The numbers stand in `core.errors`, each with one meaning; a test holds this list, the classes and the documentation in
step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from compile_stage.core import errors
from compile_stage.core.errors import CompileStageError

MEANINGS: dict[int, str] = {
    errors.EXIT_OK: "done",
    errors.EXIT_USAGE: "wrong usage or policy",
    errors.EXIT_GATE: "a required target has no winner, or no target has one",
    errors.EXIT_REGISTRY: "registry trouble",
    errors.EXIT_SOURCE: "source model refused or unreadable",
    errors.EXIT_NOTHING_COMPILED: "nothing could be compiled",
    errors.EXIT_INTEGRITY: "an integrity check failed",
    errors.EXIT_INTERNAL: "a bug of ours",
    errors.EXIT_INTERRUPTED: "interrupted; run again to resume",
}


def help_text() -> str:
    """The end of every command's help."""
    return "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())


def markdown_table() -> str:
    """Code, meaning, and the error classes that end with it."""
    owners: dict[int, list[str]] = {}
    for cls in error_classes():
        owners.setdefault(cls.exit_code, []).append(f"`{cls.__name__}`")
    lines = ["| code | meaning | error classes |", "|---|---|---|"]
    lines += [f"| {code} | {meaning} | {', '.join(owners.get(code, []))} |" for code, meaning in MEANINGS.items()]
    return "\n".join(lines)


def error_classes() -> Iterator[type[CompileStageError]]:
    """Every class of `core.errors` that can end the program. A worker's failure never does; the base is never
    raised."""
    for _, cls in inspect.getmembers(errors, inspect.isclass):
        if issubclass(cls, CompileStageError) and cls not in (CompileStageError, errors.WorkerError):
            yield cls
