"""The program: one way in, and every way out is an exit code of `core.errors`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from compile_stage.cli.commands import cli
from compile_stage.cli.output import outlive_reader, print_error, print_json_error
from compile_stage.core import errors
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.ending import ending_signals
from compile_stage.core.error_codes import Code
from compile_stage.core.redaction import redacted
from compile_stage.core.storage import explained

# Garbage collection takes a quarter of the time of MLflow's import, which makes some hundred thousand objects that
# stay. It is switched on after 5 s, with high thresholds.
_GC_BEGINS_S, _GC_THRESHOLDS = 5.0, (10_000, 10, 10)
COMPLETION_VARIABLE = "_COMPILE_STAGE_COMPLETE"
"""Set by the shell that asks which words may come next."""


def program() -> NoReturn:
    """What a shell starts. A process that does one thing and ends saves a third of a cached run: it collects no garbage
    in the beginning, and does not take the interpreter apart in the end."""
    gc.disable()
    gc.set_threshold(*_GC_THRESHOLDS)
    collects = threading.Timer(_GC_BEGINS_S, gc.enable)
    collects.daemon = True
    collects.start()
    try:
        main()
    except SystemExit as leaving:
        _end_at_once(leaving.code if isinstance(leaving.code, int) else errors.EXIT_INTERNAL)
    raise AssertionError("unreachable")


def _end_at_once(code: int) -> NoReturn:
    """Do what must be done at the end, and leave the taking apart of half a million objects to the kernel: the
    interpreter takes 0.5 s for MLflow's modules."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The program. Every way out is an exit code of `core.errors`; only a bug of ours shows where a traceback is."""
    for number in set(ending_signals()) - {signal.SIGINT}:
        signal.signal(number, _terminate)
    _fill_closed_streams()
    sys.stdout, sys.stderr = outlive_reader(sys.stdout), outlive_reader(sys.stderr)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if (asked := os.environ.get(COMPLETION_VARIABLE)) is not None:
            sys.exit(complete(asked))
        _demand_readable_names(words)
        # Not `cli.main`: it ends with 1, which is none of our codes, when the reader of `--help` has gone.
        with cli.make_context("compile-stage", words) as context:
            code = cli.invoke(context) or errors.EXIT_OK
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.ClickException as error:
        _print_usage(error, words)
        code = errors.EXIT_USAGE
    except KeyboardInterrupt:
        click.echo("\ninterrupted: kept what is finished; run again to resume", err=True)
        code = errors.EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - what is none of our errors is the machine's doing, or our bug
        trouble = explained(error)
        print_error(trouble)
        code = trouble.exit_code
        if code == errors.EXIT_INTERNAL:
            _save_traceback(error)
    sys.exit(code)


def _demand_readable_names(words: Sequence[str]) -> None:
    """Raise UsageError where Python reads names of files by another encoding than UTF-8, and a path has letters beyond
    ASCII. Runtimes take paths as UTF-8, would not find the file, and the model would be blamed."""
    encoding = sys.getfilesystemencoding()
    if encoding.casefold().replace("-", "") == "utf8":
        return
    places = (
        *words,
        str(Path.cwd()),
        *(os.environ.get(name, "") for name in ("COMPILE_STAGE_CACHE", "HOME", "TMPDIR")),
    )
    if (named := next((place for place in places if not place.isascii()), None)) is not None:
        shown = os.fsencode(named).decode("utf-8", "replace")
        raise errors.UsageError(
            f"the locale says that names of files are {encoding}, so {shown!a} can't be handed on",
            fix="set LC_ALL=C.UTF-8, and leave PYTHONUTF8 unset or set it to 1",
        )


def complete(instruction: str) -> int:
    """Answer a shell: `bash_source` prints what its start-up file runs, `bash_complete` the words that may come next;
    zsh and fish likewise.

    Returns:
        The exit code: 0, or 2 for an instruction that is unknown.
    """
    from click.shell_completion import shell_complete

    if shell_complete(cli, {}, "compile-stage", COMPLETION_VARIABLE, instruction) == 0:
        sys.stdout.flush()
        return errors.EXIT_OK
    click.echo(f"error: {COMPLETION_VARIABLE}={instruction} names no shell [{Code.USAGE}]", err=True)
    click.echo("fix: use bash_source, zsh_source or fish_source", err=True)
    return errors.EXIT_USAGE


def _print_usage(error: click.ClickException, words: Sequence[str]) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "compile-stage"
    fix = f"{command} --help"
    if isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "policy_path":
        fix = "name one, such as -p shipped:cpu-server, or write a first one: compile-stage init MODEL_URI"
    usage = errors.UsageError(error.format_message(), fix=fix)
    print_error(usage)
    # The option is not parsed yet where another one is wrong.
    if "--json" in words and context and any(one.name == "as_json" for one in context.command.params):
        print_json_error(usage)


def _save_traceback(error: BaseException) -> None:
    text = redacted("".join(traceback.format_exception(error)))
    try:
        folder = cache_root() / "crashes"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"crash-{os.getpid()}.txt"
        path.write_text(f"{' '.join(sys.argv)}\n\n{text}", encoding="utf-8", errors="backslashreplace")
    except OSError:
        click.echo(text, err=True)
        click.echo("this is a bug of ours; please report it with the lines above", err=True)
        return
    click.echo(f"this is a bug of ours; please report it with the traceback in {path}", err=True)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A scheduler's SIGTERM, and a terminal that is closed, end a run as Ctrl-C does."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)  # a second one must not cut the clean-up short
    raise KeyboardInterrupt


def _fill_closed_streams() -> None:
    """`>&-`: what is written goes nowhere. Left closed, its number would go to the next file that is opened, and
    whatever a library prints into that."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
