"""`init`, `lint` and `rule`: a first policy, what is wrong with policy files, and what a code means."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compile_stage.cli.options import NamedPath, example, quiet_option, refuse_without_effect, roots_option, sets_option
from compile_stage.cli.output import print_text, write_file
from compile_stage.core import errors
from compile_stage.core.errors import UsageError
from compile_stage.core.spelling import did_you_mean

if TYPE_CHECKING:
    from compile_stage.core.findings import Finding
    from compile_stage.core.records import Policy

FORMATS = ("text", "json", "github", "gitlab", "sarif")


@click.command(
    short_help="Write a first policy for a model.",
    epilog=example(
        "compile-stage init models:/fraud/7",
        "compile-stage init models:/fraud/7 --data validation.npz --labels y -o policies/fraud.yaml",
    ),
)
@click.argument("model_uri")
@click.option(
    "-o",
    "--output",
    type=NamedPath(dir_okay=False, path_type=Path, allow_dash=True),
    default=Path("policy.yaml"),
    show_default=True,
    help="File to write; - for standard output.",
)
@click.option("--name", default="cpu", show_default=True, help="Of the policy and of its one target.")
@click.option(
    "--data",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="File of samples: .npz, .parquet or .csv.  [default: the data sets of the model's run]",
)
@click.option("--labels", help="The array or column of --data that holds labels.  [default: the one that is no input]")
@click.option("--allow-pickle", is_flag=True, help="Open a pickled model, which runs code; the policy says so.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(
    model_uri: str, output: Path, name: str, data: Path | None, labels: str | None, allow_pickle: bool, force: bool
) -> int:
    """Write a first policy for MODEL_URI: its inputs, the samples that were found, the backends that take it here.

    The model is opened; nothing is compiled. Each value has a comment that says where it is from. What is written is
    planned, and what a run would fail for is said.
    """
    from compile_stage import api
    from compile_stage.policy.load import findings

    if data is None:
        refuse_without_effect("without --data", "labels")
    to_file = str(output) != "-"
    if to_file and output.exists() and not force:
        raise UsageError(f"{output} is there already", fix="name another file with -o, or replace it with --force")
    text = api.init(model_uri, name=name, data=data, labels=labels, folder=output.parent, allow_pickle=allow_pickle)
    if not to_file:
        print_text(text)
        return errors.EXIT_OK
    write_file(output, text, "-o")
    click.echo(f"wrote {output}")
    for finding in findings(output):
        click.echo(_line(finding), err=True)
    if refused := _refused(model_uri, output):
        click.echo(f"warning: a run would fail: {refused}", err=True)
        again = shlex.join(["compile-stage", "plan", model_uri, "-p", str(output)])
        click.echo(f"next: change {output} until this ends with 0: {again}")
    else:
        click.echo(f"next: {shlex.join(['compile-stage', 'run', model_uri, '-p', str(output)])}")
    return errors.EXIT_OK


def _refused(model_uri: str, policy: Path) -> str:
    """Why a run of this policy would fail, as `plan` knows it; empty where it would not."""
    from compile_stage import api

    try:
        return api.plan(model_uri, policy).problem
    except errors.CompileStageError as error:
        return error.problem


@click.command(
    short_help="Check policy files.",
    epilog=example(
        "compile-stage lint policies/*.yaml", "compile-stage lint policies/*.yaml --format sarif > lint.sarif"
    ),
)
@click.argument("policies", nargs=-1, required=True, type=NamedPath(path_type=Path))
@roots_option
@sets_option
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="text for people; github: annotations; gitlab: code quality; sarif: code scanning.",
)
@quiet_option
def lint(
    policies: tuple[Path, ...], policy_roots: tuple[Path, ...], sets: tuple[str, ...], form: str, quiet: int
) -> int:
    """Check policy files; every mistake is listed with file:line:column and a code.

    All formats but text go to standard output. The exit code is the same for all: 2 if there is a mistake.
    """
    from compile_stage.core.shipped import policy_file
    from compile_stage.policy.load import findings, load_policy
    from compile_stage.report.findings import render

    found: dict[Finding, None] = {}  # a base that several policies extend is reported only once
    wrong = 0
    for path in policies:
        file = policy_file(path)
        own = findings(file, sets, policy_roots)
        if form == "text":
            for finding in own:
                if finding not in found:
                    click.echo(_line(finding), err=True)
        found |= dict.fromkeys(own)
        if any(finding.level == "error" for finding in own):
            wrong += 1
        elif form == "text" and not quiet:
            policy = load_policy(file, sets, base=True, roots=policy_roots)
            click.echo(f"{path}: ok ({policy.name}, {_targets_named(policy)})")
    if form != "text":
        print_text(render(list(found), form))
    elif wrong:
        click.echo(f"{wrong} of {len(policies)} policies are invalid", err=True)
    return errors.EXIT_USAGE if wrong else errors.EXIT_OK


@click.command(short_help="Explain the code of an error or a warning.", epilog=example("compile-stage rule CS0103"))
@click.argument("code", required=False)
def rule(code: str | None) -> None:
    """Explain what the CODE at the end of an error means and what to do; without one, list them all."""
    from compile_stage.core import error_pages

    if code is None:
        for known, page in error_pages.PAGES.items():
            click.echo(f"{known}  {page.title}")
        return
    found = error_pages.PAGES.get(code.upper())
    if found is None:
        near = did_you_mean(code.upper(), list(error_pages.PAGES))
        raise UsageError(
            f"unknown code {code!r}", fix=f"did you mean {near}?" if near else "list them: compile-stage rule"
        )
    click.echo(error_pages.text(code.upper()), nl=False)


def _line(finding: Finding) -> str:
    place = f"{finding.file}:{finding.line}:{finding.column}" if finding.line else finding.file
    return f"{finding.level}: {os.fspath(place)}: {finding.message} [{finding.code}]"


def _targets_named(policy: Policy) -> str:
    """`2 targets`; a file that names none is fine as a base, and can't be run."""
    count = len(policy.targets)
    return f"{count} target{'s' if count != 1 else ''}" if count else "a base for others: it names no target"
