"""What commands write without a table: JSON, errors, and nothing more once the reader has gone."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from compile_stage.core.errors import CompileStageError, PolicyError


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


def print_text(text: str) -> None:
    """To standard output; that nobody reads it any more changes nothing of how a command ends."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        forget_reader()


def forget_reader() -> None:
    """The reader (`head`, a pager) has gone: what is still buffered goes nowhere, instead of failing once more at
    exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
