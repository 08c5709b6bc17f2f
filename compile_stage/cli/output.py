"""What commands write without a table: JSON, errors, and nothing more once the reader has gone."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from compile_stage.core.errors import CompileStageError, PolicyError, UsageError
from compile_stage.core.storage import STANDARD_OUTPUT

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_STANDARD_ERROR = 2  # its descriptor
_WRITTEN = f"{__name__}.written"  # in the context of click


def print_error(error: CompileStageError) -> None:
    """`error: where: problem [CODE]` and `fix: ...` on standard error; the problems of a policy each on its own line.
    The code is that of a page in docs/errors.md, which `compile-stage rule CODE` prints."""
    if isinstance(error, PolicyError) and error.problems:
        for problem, code in zip(error.problems, error.codes, strict=True):
            click.echo(f"error: {problem} [{code}]", err=True)
    else:
        located = f"{error.where}: {error.problem}" if error.where else error.problem
        click.echo(f"error: {located} [{error.code}]", err=True)
    if error.fix:
        click.echo(f"fix: {error.fix}", err=True)


def print_json(value: Any) -> None:
    """A record, or plain values, as indented JSON on standard output."""
    from compile_stage.core.digest import plain

    print_text(json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


def print_json_error(error: CompileStageError) -> None:
    """An error as `compile-stage/error/v1` on standard output: `exit_code`, `problem`, `fix`, `where`, and `problems`,
    each with its `code`; of a policy one for each mistake."""
    lines = [(error.problem, error.code)]
    if isinstance(error, PolicyError) and error.problems:
        lines = list(zip(error.problems, error.codes, strict=True))
    print_json(
        {
            "schema": "compile-stage/error/v1",
            "exit_code": error.exit_code,
            "problem": error.problem,
            "where": error.where or None,
            "fix": error.fix or None,
            "problems": [{"problem": problem, "code": code} for problem, code in lines],
        }
    )


def print_text(text: str) -> None:
    """To standard output, at once."""
    if context := click.get_current_context(silent=True):
        context.meta[_WRITTEN] = True
    sys.stdout.write(text)
    sys.stdout.flush()


def is_written() -> bool:
    """Whether the running command has given standard output its document."""
    return bool(click.get_current_context().meta.get(_WRITTEN))


def write_file(file: Path, text: str, option: str) -> None:
    """What an option asks to be written; folders that are not there are made. Raises UsageError, which names the
    option, where it can't be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"it can't be written: {error.strerror}"
        raise UsageError(problem, where=str(file), fix=f"name another {option}") from error


def outlive_reader(stream: IO[str]) -> IO[str]:
    """The same stream, for a reader that may go (`head`, a pager, a terminal that is closed): what is written then goes
    nowhere, so that a command ends with the exit code that it would have. Likewise whatever standard error can't take,
    since there is nowhere else to say it; of standard output that is an OSError which names it. Characters that its
    encoding lacks are escaped.

    A stream that is no file, as in a test, is returned as it is.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        number = stream.fileno()
    except OSError:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Unread(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
    )


class _Unread(io.FileIO):
    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # A closed terminal answers EIO, and is none any more to `isatty`; of a file that is the disk's trouble.
            closed = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            if error.errno != errno.EPIPE and not closed and self.fileno() != _STANDARD_ERROR:
                raise OSError(error.errno, error.strerror, STANDARD_OUTPUT) from error
            return memoryview(data).nbytes
