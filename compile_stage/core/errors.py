"""Every error that a user can meet, drawn once.

    CompileStageError            base; carries problem, fix, where
    ├── PolicyError          2   the policy (or the command line) is wrong
    │   └── UsageError       2   the same exit code: both mean "what you wrote is invalid"
    ├── MissingDependencyError 2 a plug-in's package is not installed
    ├── StorageError         2   the folder that results, the cache or temporary files were to go to can't take them
    │   └── RemovedError     2   files of the cache, or temporary ones, were removed while they were used
    ├── KilledError          2   somebody ended the process that held the original: SIGKILL, and memory was not short
    ├── DeviceError          2   a device can't be reached, or can't do what is asked of it
    ├── GateError            3   a required target has no winner, or no target has one
    ├── RegistryError        4   the registry can't be reached, or refuses
    │   └── AliasMovedError  4   somebody else moved an alias while we were about to
    ├── SourceError          5   the source model is refused or unreadable
    ├── NothingCompiledError 6   no job yielded an artifact
    ├── IntegrityError       7   a digest, a signature or a manifest does not hold
    ├── WorkerError          -   one job's failure; becomes that job's result, never the program's exit
    └── InternalError        70  a bug of ours

Ctrl-C is `KeyboardInterrupt`, exit code 130.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from compile_stage.core.error_codes import Code
from compile_stage.core.redaction import redacted

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_GATE = 3
EXIT_REGISTRY = 4
EXIT_SOURCE = 5
EXIT_NOTHING_COMPILED = 6
EXIT_INTEGRITY = 7
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130

FailureKind = Literal["crash", "out_of_memory", "timeout", "exception"]


def first_line(error: BaseException) -> str:
    """What a library's error says, without the pages of advice and stack that follow it: at most 300 characters; its
    type where it says nothing, as a MemoryError does."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class CompileStageError(Exception):
    """Base of all errors that are shown to people. Passwords and signatures in addresses are left out of them.

    Args:
        problem: What is wrong, as one sentence.
        fix: How to fix it, as one sentence or a command. Empty when nothing can be advised.
        where: `file:line:column`, a URI or a name. Empty when the problem names the place itself.
        code: Its page in docs/errors.md, where it has one of its own; the class's page otherwise.
    """

    exit_code: ClassVar[int] = EXIT_INTERNAL
    code: Code = Code.INTERNAL

    def __init__(self, problem: str, *, fix: str = "", where: str = "", code: Code | None = None) -> None:
        self.problem = redacted(problem)
        self.fix = redacted(fix)
        self.where = redacted(where)
        if code is not None:
            self.code = code
        super().__init__(self.problem)

    def __str__(self) -> str:
        located = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{located}\n  fix: {self.fix}" if self.fix else located

    @property
    def reason(self) -> str:
        """The problem and how to fix it as one sentence, for a caller who names the place and has one text to give."""
        return f"{self.problem}: {self.fix}" if self.fix else self.problem


class PolicyError(CompileStageError):
    """One or more mistakes in policy files; `problems` holds one located line for each, `codes` the code of each."""

    exit_code = EXIT_USAGE
    code = Code.POLICY

    def __init__(
        self,
        problem: str,
        *,
        fix: str = "",
        where: str = "",
        code: Code | None = None,
        problems: tuple[str, ...] = (),
        codes: tuple[Code, ...] = (),
    ) -> None:
        super().__init__(problem, fix=fix, where=where, code=code)
        self.problems = tuple(map(redacted, problems))
        self.codes = codes or (self.code,) * len(problems)


class UsageError(PolicyError):
    """The command line, or an argument of the API, is invalid."""

    code = Code.USAGE


class GateError(CompileStageError):
    """A required target has no winner, or an alias may not move to what was published."""

    exit_code = EXIT_GATE
    code = Code.GATE


class RegistryError(CompileStageError):
    """The registry is unreachable, refuses, or does not hold what was asked for."""

    exit_code = EXIT_REGISTRY
    code = Code.REGISTRY


class FilesGoneError(RegistryError):
    """The registry lists a version whose files were removed for good: nobody can serve it any more."""

    code = Code.NOT_IN_REGISTRY


class AliasMovedError(RegistryError):
    """An alias no longer points to what it was compared with: somebody else moved it meanwhile."""

    code = Code.ALIAS_MOVED


class SourceError(CompileStageError):
    """The source model is refused (with the reason) or can't be read."""

    exit_code = EXIT_SOURCE
    code = Code.SOURCE


class NothingCompiledError(CompileStageError):
    """A backend could not make, or not open, an artifact as it was asked for. That is one job's failure; the program
    ends with this code when it is true of every job."""

    exit_code = EXIT_NOTHING_COMPILED
    code = Code.NOTHING_COMPILED


class IntegrityError(CompileStageError):
    """A digest, a signature or a manifest does not hold: the files are not what was published."""

    exit_code = EXIT_INTEGRITY
    code = Code.INTEGRITY


class InternalError(CompileStageError):
    """Something that can't happen did: a bug of ours."""

    exit_code = EXIT_INTERNAL


class StorageError(CompileStageError):
    """A disk of this machine is full, or a folder that we have to write into can't be written.

    Which folders these are the user chose (--out, COMPILE_STAGE_CACHE, TMPDIR), and can choose otherwise: the code of
    wrong usage.
    """

    exit_code = EXIT_USAGE
    code = Code.STORAGE


class RemovedError(StorageError):
    """Files of the cache, or temporary ones, were removed while a run used them. It ends the run: no other candidate
    can do without them."""

    code = Code.FILES_REMOVED


class WorkerError(CompileStageError):
    """A worker's failure, by kind. The engine raises it; the job's result records it.

    Args:
        kind: `crash` (the process ended without an answer), `out_of_memory`, `timeout`, or `exception` (the call
            raised).
        problem: One sentence.
        detail: The traceback or the log's tail, for the report.

    Attributes:
        killed: Somebody else ended it with SIGKILL, and memory was not short.
        starved: The kernel ended it with SIGKILL since the machine's or the container's memory was short.
    """

    code = Code.WORKER

    def __init__(
        self, kind: FailureKind, problem: str, *, detail: str = "", fix: str = "", killed: bool = False
    ) -> None:
        super().__init__(problem, fix=fix)
        self.kind: FailureKind = kind
        self.killed = killed
        self.starved = False
        self.detail = redacted(detail)

    @property
    def worker_is_gone(self) -> bool:
        """True but where the call raised: then the worker takes further calls."""
        return self.kind != "exception"


class KilledError(CompileStageError):
    """Somebody, or the kernel for want of memory, ended a process of the run with SIGKILL: no fault of the model's."""

    exit_code = EXIT_USAGE
    code = Code.KILLED


class DeviceError(CompileStageError):
    """A device that is reached over ssh or adb can't be reached, was lost, or lacks what a validation needs there."""

    exit_code = EXIT_USAGE
    code = Code.DEVICE


class MissingDependencyError(CompileStageError):
    """A plug-in's package is not installed. The fix is the exact pip line."""

    exit_code = EXIT_USAGE
    code = Code.MISSING_DEPENDENCY
