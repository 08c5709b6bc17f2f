"""What several commands share: options, the end of a help text, and the display."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compile_stage.cli import exits
from compile_stage.cli.output import is_written, print_json_error
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.redaction import redacted
from compile_stage.core.storage import explained

if TYPE_CHECKING:
    from compile_stage.cli.json_log import JsonLog
    from compile_stage.cli.render import Display


def example(*lines: str) -> str:
    """The end of a command's help: examples, then what the exit code can be."""
    shown = "\n".join(f"  {line}" for line in lines)
    return f"\b\nExample{'s' if len(lines) > 1 else ''}:\n{shown}\n\n{exits.help_text()}"


def _finite(
    number: float, of: Number | NumberRange, parameter: click.Parameter | None, context: click.Context | None
) -> float:
    # click's own types take `nan`, which no comparison refuses, and `inf`.
    return number if math.isfinite(number) else of.fail(f"{number} is not a finite number.", parameter, context)


class Number(click.types.FloatParamType):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails where it is none, `nan` or infinite."""
        return _finite(super().convert(value, param, ctx), self, param, ctx)


class NumberRange(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails where it is none, `nan`, infinite or out of the range."""
        return _finite(super().convert(value, param, ctx), self, param, ctx)


def is_typed(name: str) -> bool:
    """Whether the running command was given this parameter on the command line: not by a default, nor by a variable of
    the environment, which is there for other commands too."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse_without_effect(where: str, *names: str) -> None:
    """Raise UsageError for the first of these parameters that was typed, though it changes nothing there.

    Args:
        where: Such as `without --host`.
    """
    for parameter in click.get_current_context().command.params:
        if parameter.name in names and is_typed(parameter.name):
            raise UsageError(f"{parameter.opts[-1]} changes nothing {where}", fix="leave it out")


def _demand_text(
    value: Any, of: click.ParamType[Any], parameter: click.Parameter | None, context: click.Context | None
) -> None:
    if value == "":
        of.fail("it is empty: is a variable of the shell not set?", parameter, context)


class NamedPath(click.Path):
    """A path that is not empty. `--out "$OUT"` without that variable would mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Fails where it is empty."""
        _demand_text(value, self, param, ctx)
        return super().convert(value, param, ctx)


class Word(click.types.StringParamType):
    """A text that is not empty. `--signing-key "$KEY"` without that variable would sign nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text. Fails where it is empty."""
        _demand_text(value, self, param, ctx)
        return super().convert(value, param, ctx)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

policy_option: Decorator = click.option(
    "-p",
    "--policy",
    "policy_path",
    required=True,
    type=NamedPath(path_type=Path),
    metavar="FILE",
    help="Policy file, or shipped:NAME (see `compile-stage policy`).",
)
roots_option: Decorator = click.option(
    "--policy-root",
    "policy_roots",
    multiple=True,
    envvar="COMPILE_STAGE_POLICY_ROOT",
    type=NamedPath(path_type=Path),
    metavar="FOLDER",
    help="A further folder that `extends` may name files of. Repeatable.  [default: the policy's repository, or its "
    "folder]",
)
targets_option: Decorator = click.option(
    "-t", "--target", "targets", multiple=True, metavar="GLOB", help="Only targets whose name matches. Repeatable."
)
sets_option: Decorator = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one policy value, by its dotted path. Repeatable.",
)
allow_code_option: Decorator = click.option(
    "--allow-code",
    is_flag=True,
    help="Run what is executable in a bundle that was not packaged here and comes from no registry of this machine.",
)
trusted_keys_option: Decorator = click.option(
    "--trusted-key",
    "trusted_keys",
    multiple=True,
    type=NamedPath(path_type=Path),
    metavar="FILE",
    help="Demand a signature by these public keys, certificate authorities or trust file; besides COMPILE_STAGE_TRUST. "
    "Repeatable.",
)
shared_cache_option: Decorator = click.option(
    "--shared-cache",
    type=Word(),
    metavar="URL",
    help="A cache that machines share, behind this one's: s3://, gs://, az:// or file://.  [default: "
    "COMPILE_STAGE_SHARED_CACHE]",
)
signing_key_option: Decorator = click.option(
    "--signing-key",
    type=Word(),
    metavar="FILE",
    help="Private key to sign with: a PEM file, a pkcs11: URI, or `sigstore`.  [default: COMPILE_STAGE_SIGNING_KEY, "
    "else nothing is signed]",
)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`. An error that leaves standard output empty is a document there too: who reads it would find nothing."""

    @functools.wraps(command)
    def documented(*arguments: Any, as_json: bool, **given: Any) -> Any:
        try:
            return command(*arguments, as_json=as_json, **given)
        except Exception as error:
            ends = error.__cause__ if isinstance(error, click.exceptions.Exit) else error
            if as_json and isinstance(ends, Exception) and not is_written():
                print_json_error(explained(ends))
            raise

    return click.option(
        "--json", "as_json", is_flag=True, help="Put JSON on standard output; all else goes to standard error."
    )(documented)


quiet_option: Decorator = click.option("-q", "--quiet", count=True, help="Say only how it ended.")
verbose_option: Decorator = click.option("-v", "--verbose", count=True, help="Say more; -vv shows the libraries' logs.")

log_format_option: Decorator = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    envvar="COMPILE_STAGE_LOG_FORMAT",
    help="json: one object a line on standard error, nothing else.  [env: COMPILE_STAGE_LOG_FORMAT]",
)


class _StandardErrorHandler(logging.StreamHandler[Any]):
    """Writes to what standard error is at that moment: while a live table is shown, lines must go above it and not
    through it."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None: ...

    def format(self, record: logging.LogRecord) -> str:
        """The line, without the secrets of addresses that a library logs."""
        return redacted(super().format(record))


@contextmanager
def json_log(verbose: int) -> Iterator[JsonLog]:
    """The log of a run for programs; what ends it is the last line of that log too."""
    from compile_stage.cli.json_log import JsonHandler, JsonLog

    log = JsonLog()
    logging.basicConfig(
        level=(logging.WARNING, logging.INFO, logging.DEBUG)[min(2, verbose)], handlers=[JsonHandler(log)]
    )
    if not verbose:
        logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        yield log
    except CompileStageError as error:
        log.show_error(error)
        raise click.exceptions.Exit(error.exit_code) from error


@contextmanager
def display(as_json: bool, quiet: int, verbose: int) -> Iterator[Display]:
    """What people see, closed however the command ends, so that a live table never swallows an error message. With
    `as_json`, it is on standard error."""
    from compile_stage.cli.render import Display

    logging.basicConfig(
        level=(logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)[min(3, verbose + (0 if quiet else 1))],
        format="%(levelname)s %(name)s: %(message)s",
        handlers=[_StandardErrorHandler()],
    )
    if not verbose:  # it logs every attempt; what came of them all is in our own message
        logging.getLogger("urllib3").setLevel(logging.ERROR)
    shown = Display(sys.stderr if as_json else sys.stdout, quiet=bool(quiet), verbose=bool(verbose))
    try:
        yield shown
    finally:
        shown.close()
