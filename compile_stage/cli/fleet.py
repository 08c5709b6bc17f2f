"""`compile-stage fleet`: every registered model that the policies are meant for, as one piece of work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compile_stage.cli.options import (
    Decorator,
    NamedPath,
    NumberRange,
    example,
    json_option,
    quiet_option,
    refuse_without_effect,
    verbose_option,
)
from compile_stage.cli.output import print_json, print_text
from compile_stage.core.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from compile_stage.fleet.driving import Progress
    from compile_stage.fleet.fleets import Settings

_WIDTH = 80
_policies: Decorator = click.option(
    "-p", "--policies", required=True, type=NamedPath(path_type=Path), metavar="FOLDER",
    help="Folder of policies, or one policy; `applies_to` of each says which models it is for.",
)  # fmt: skip
_state: Decorator = click.option(
    "--state", type=NamedPath(file_okay=False, path_type=Path), default=Path("compile-stage-fleet"),
    show_default=True, metavar="FOLDER", help="Folder of the journal, the jobs' logs and results, and the reports.",
)  # fmt: skip
_engine: Decorator = click.option(
    "--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True,
    help="Where jobs run: on this machine, or on the nodes of a Ray cluster.",
)  # fmt: skip
_jobs: Decorator = click.option(
    "--jobs", type=click.IntRange(1, 4096), metavar="N",
    help="So many at once; those on one machine measure one after the other.  [default: 1; of a cluster one for every "
    "two cores]",
)  # fmt: skip
_address: Decorator = click.option(
    "--ray-address", "address", default="", metavar="ADDRESS", envvar="RAY_ADDRESS",
    help="Of the Ray cluster.  [env: RAY_ADDRESS; default: the one that runs here]",
)  # fmt: skip
_budget: Decorator = click.option(
    "--budget-minutes", type=NumberRange(0, min_open=True), metavar="MINUTES",
    help="Begin no job once all jobs together have taken so long; what runs then is finished.",
)  # fmt: skip
_fresh: Decorator = click.option(
    "--fresh", is_flag=True, help="Leave an unfinished fleet of the same kind behind, and begin anew."
)


@click.group(
    short_help="Take every model that the policies are meant for through the stage.",
    epilog=example(
        "compile-stage fleet plan 'vision-*@candidate' -p policies",
        "compile-stage fleet run 'vision-*@candidate' -p policies --engine ray",
        "compile-stage fleet requalify --alias '*-prod'",
    ),
)
def fleet() -> None:
    """Many registered models as one piece of work, with one report and one exit code."""


@fleet.command(
    short_help="Show what a fleet would run.",
    epilog=example("compile-stage fleet plan 'vision-*@candidate' -p policies"),
)
@click.argument("pattern", metavar="'NAME-GLOB[@ALIAS]'")
@_policies
@json_option
def plan(pattern: str, policies: Path, as_json: bool) -> None:
    """Search the registry for the models, and list them by policy and owner. No model is opened.

    Without an alias, the newest version of each model is meant.
    """
    from compile_stage import api

    found = api.fleet_plan(pattern, policies)
    if as_json:
        print_json(found)
        return
    print_text("".join(f"{line}\n" for line in _plan_lines(found)))


@fleet.command(
    short_help="Run a fleet, or go on with one.",
    epilog=example(
        "compile-stage fleet run 'vision-*@candidate' -p policies",
        "compile-stage fleet run '*@candidate' -p policies --engine ray --budget-minutes 600",
    ),
)
@click.argument("pattern", metavar="'NAME-GLOB[@ALIAS]'")
@_policies
@_state
@_engine
@_jobs
@_address
@_budget
@click.option("--no-publish", is_flag=True, help="Do not change the registry.")
@click.option("--no-promote", is_flag=True, help="Move no alias.")
@_fresh
@json_option
@quiet_option
@verbose_option
def run(pattern: str, policies: Path, as_json: bool, quiet: int, verbose: int, **given: Any) -> int:
    """Take every matching model through each policy that is meant for it.

    Interrupted or killed, the same command goes on where it was. The reports are in STATE/N.
    """
    from compile_stage import api

    _set_up_logging(verbose)
    settings = _settings(given, publish=not given.pop("no_publish"), promote=not given.pop("no_promote"))
    return _show(api.fleet_run(pattern, policies, settings, _teller(quiet, to_error=as_json)), settings, as_json)


@fleet.command(
    short_help="Prove anew what production aliases point to.",
    epilog=example("compile-stage fleet requalify --alias '*-prod'"),
)
@click.argument("pattern", metavar="'NAME-GLOB'", default="*")
@click.option(
    "--alias", "aliases", multiple=True, metavar="GLOB",
    help="Versions that such an alias points to. Repeatable.  [default: those that the policies promote to; without "
    "policies all]",
)  # fmt: skip
@click.option(
    "-p", "--policies", type=NamedPath(path_type=Path), metavar="FOLDER",
    help="Folder of policies, or one policy: the aliases that they promote to.",
)  # fmt: skip
@_state
@_engine
@_jobs
@_address
@_budget
@_fresh
@json_option
@quiet_option
@verbose_option
def requalify(
    pattern: str, aliases: tuple[str, ...], policies: Path | None, as_json: bool, quiet: int, verbose: int, **given: Any
) -> int:
    """Validate published versions once more where this machine's runtime, driver or hardware is another than they were
    validated with: those with the least room to their limits first. No alias is moved.
    """
    from compile_stage import api

    _set_up_logging(verbose)
    settings = _settings(given)
    say = _teller(quiet, to_error=as_json)
    found = api.fleet_requalify(pattern, aliases, settings, say, policies=policies)
    return _show(found, settings, as_json)


def _settings(given: dict[str, Any], **more: Any) -> Settings:
    from compile_stage.fleet.fleets import Settings

    if given["engine"] != "ray":
        refuse_without_effect("without --engine ray", "address")
    known = ("state", "engine", "jobs", "address", "budget_minutes", "fresh")
    return Settings(**{name: given[name] for name in known}, **more)


def _set_up_logging(verbose: int) -> None:
    import logging

    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(2, verbose)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("urllib3", "alembic", "mlflow"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def _teller(quiet: int, *, to_error: bool) -> Any:
    def say(progress: Progress) -> None:
        if not quiet:
            click.echo(_line(progress), err=to_error)

    return say


def _line(progress: Progress) -> str:
    """` 12/200 passed  vision-a/3 cpu-server  12.3 s`, in 80 columns: a longer name loses its middle."""
    from compile_stage.report.numbers import duration

    planned, outcome = progress.row.planned, progress.outcome
    word = "same" if outcome is None else "passed" if outcome.passed else "failed"
    place = f"{progress.ended:>{len(str(progress.jobs))}}/{progress.jobs}"
    end = f"as job {progress.same_as}" if outcome is None else duration(outcome.seconds)
    name = f"{planned.name}/{planned.version} {planned.policy}"
    room = max(12, _WIDTH - len(place) - 6 - len(end) - 4)
    if len(name) > room:
        name = f"{name[: room // 2 - 1]}...{name[-(room - room // 2 - 2) :]}"
    line = f"{place} {word:<6} {name}  {end}"
    problem = "" if outcome is None or outcome.passed else outcome.problem.strip()
    return f"{line}\n{_cause(problem)}" if problem else line


def _cause(problem: str) -> str:
    first = problem.splitlines()[0]
    return "    " + (first if len(first) <= _WIDTH - 4 else first[: _WIDTH - 7] + "...")


def _show(document: Mapping[str, Any], settings: Settings, as_json: bool) -> int:
    from compile_stage.report.fleet_page import headline
    from compile_stage.report.numbers import count

    if as_json:
        print_json(document)
    for job in document["jobs"]:
        for target in job["targets"]:
            if target["regressed"]:
                click.echo(f"regressed: {job['uri']} {target['target']}: {target['regressed']}", err=as_json)
    word = document["status"]
    click.echo(f"{word}: {headline(document)}" if document["counts"]["jobs"] else f"{word}: nothing to do", err=as_json)
    if document["kind"] == "requalify" and document["counts"]["skipped"]:
        click.echo(f"{count(document['counts']['skipped'], 'version')} need no new validation", err=as_json)
    click.echo(f"report: {settings.state / str(document['fleet']) / 'fleet.html'}", err=as_json)
    if document["exit_code"] == EXIT_INTERRUPTED:
        click.echo("interrupted: kept what is finished; run again to resume", err=True)
    return int(document["exit_code"])


def _plan_lines(found: Mapping[str, Any]) -> list[str]:
    from compile_stage.report.numbers import count

    counts = found["counts"]
    models, targets = count(counts["models"], "model"), count(counts["targets"], "target")
    lines = [f"{count(counts['jobs'], 'job')}: {models}, {targets} in all"]
    lines += [f"  policy {name}: {count(jobs, 'job')}" for name, jobs in found["policies"].items()]
    lines += [f"  owner {name or '(none)'}: {count(jobs, 'job')}" for name, jobs in found["owners"].items()]
    if counts["same_location"]:
        lines.append(f"{count(counts['same_location'], 'version')} with files that another has too")
    if counts["without_policy"]:
        lines.append(f"{count(counts['without_policy'], 'version')} that no policy is meant for")
    if counts["published_by_us"]:
        lines.append(f"{count(counts['published_by_us'], 'version')} that compile-stage published")
    return lines
