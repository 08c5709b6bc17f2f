"""The commands: each parses, calls the API, shows the answer, and returns its exit code.

Heavy imports stay inside the commands: `--help` and `lint` answer at once.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compile_stage import __version__
from compile_stage.cli.cache import cache
from compile_stage.cli.compare import compare
from compile_stage.cli.debug import debug
from compile_stage.cli.doctor import doctor
from compile_stage.cli.export import export
from compile_stage.cli.fleet import fleet
from compile_stage.cli.lint import init, lint, rule
from compile_stage.cli.load_test import load_test
from compile_stage.cli.options import (
    NamedPath,
    display,
    example,
    json_log,
    json_option,
    log_format_option,
    policy_option,
    quiet_option,
    refuse_without_effect,
    roots_option,
    sets_option,
    shared_cache_option,
    signing_key_option,
    targets_option,
    verbose_option,
)
from compile_stage.cli.output import print_json, print_text
from compile_stage.cli.profile import profile
from compile_stage.cli.published import promote, rollback, validate, verify
from compile_stage.cli.toolchain import toolchain
from compile_stage.cli.watch import watch
from compile_stage.core import address_space, errors, plugins
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import UsageError
from compile_stage.core.spelling import did_you_mean

if TYPE_CHECKING:
    from compile_stage.core.records import RunResult


class Commands(click.Group):
    """A group that lists its commands in the order of a user's work, and knows what a mistyped one meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if ctx.resilient_parsing:  # a shell completes a word that isn't finished
            return super().resolve_command(ctx, args)
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            near = did_you_mean(args[0], list(self.commands))
            hint = f"did you mean {near!r}?" if near else f"one of: {', '.join(self.commands)}"
            raise UsageError(f"unknown command {args[0]!r}", fix=hint, code=Code.UNKNOWN_COMMAND)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=example(
        "compile-stage demo",
        "compile-stage run models:/fraud/7 -p shipped:cpu-server",
    ),
)
@click.version_option(__version__, message="compile-stage %(version)s")
def cli() -> None:
    """Pull a model from the registry, compile it, validate it, measure it, and publish it back."""


@cli.command(
    short_help="Compile, validate, measure and publish a model.",
    epilog=example(
        "compile-stage run models:/fraud@candidate -p shipped:cpu-server",
        "compile-stage run models:/fraud/7 -p policy.yaml -t 'edge-*' --no-publish --out report",
        "compile-stage run models:/fraud/7 -p policy.yaml --set performance.min_speedup=2 --json > result.json",
    ),
)
@click.argument("model_uri")
@policy_option
@roots_option
@targets_option
@sets_option
@click.option(
    "--out",
    type=NamedPath(file_okay=False, path_type=Path),
    help="Folder for result.json, report.html, report.md, junit.xml and the bundles.  [default: "
    "compile-stage-out/NAME-VERSION/POLICY]",
)
@click.option("--publish/--no-publish", default=True, show_default=True, help="Push the winners to the registry.")
@click.option("--promote/--no-promote", default=True, show_default=True, help="Move the policy's alias.")
@click.option("--engine", default="local", show_default=True, metavar="NAME", help="Where workers run.")
@click.option("--remeasure", is_flag=True, help="Measure again what the cache holds measurements of.")
@shared_cache_option
@signing_key_option
@json_option
@log_format_option
@quiet_option
@verbose_option
def run(
    model_uri: str,
    policy_path: Path,
    policy_roots: tuple[Path, ...],
    targets: tuple[str, ...],
    sets: tuple[str, ...],
    out: Path | None,
    publish: bool,
    promote: bool,
    engine: str,
    remeasure: bool,
    shared_cache: str | None,
    signing_key: str | None,
    as_json: bool,
    log_format: str,
    quiet: int,
    verbose: int,
) -> int:
    """Compile MODEL_URI as the policy says, validate and measure it, publish what earned it.

    MODEL_URI is models:/NAME/VERSION, models:/NAME@ALIAS, models:/m-ID, runs:/RUN_ID/NAME or folder:/PATH.
    What is finished is kept: running again after an interruption goes on from there.
    """
    from compile_stage import api
    from compile_stage.cli.next_step import Asked
    from compile_stage.report.result import result_text

    if promote and not publish:
        refuse_without_effect("with --no-publish: only what is published has an alias", "promote")
    if warning := address_space.warning():
        click.echo(f"warning: {warning}", err=True)
    results: list[RunResult] = []
    log = json_log(verbose) if log_format == "json" else display(as_json, quiet, verbose)
    with log as shown:
        try:
            result = api.run(
                model_uri,
                policy_path,
                policy_roots=policy_roots,
                targets=targets,
                sets=sets,
                out=out,
                publish=publish,
                promote=promote,
                engine=engine,
                remeasure=remeasure,
                shared_cache=shared_cache,
                signing_key=signing_key,
                reporter=shown,
                on_result=results.append,
            )
        finally:
            shown.close()
            if as_json and results:
                print_text(result_text(results[-1]))
        asked = Asked(policy_path, policy_roots, sets, publish)
        shown.show_result(result, out or api.default_out(result.source, result.policy), asked)
    return result.exit_code


@cli.command(
    short_help="Show what would run, what is refused and why, and what is cached.",
    epilog=example("compile-stage plan models:/fraud/7 -p shipped:cpu-server -t cpu-server"),
)
@click.argument("model_uri")
@policy_option
@roots_option
@targets_option
@sets_option
@shared_cache_option
@json_option
@verbose_option
def plan(
    model_uri: str,
    policy_path: Path,
    policy_roots: tuple[Path, ...],
    targets: tuple[str, ...],
    sets: tuple[str, ...],
    shared_cache: str | None,
    as_json: bool,
    verbose: int,
) -> int:
    """Show what would run, what is refused and why, and what the cache already holds. Compiles nothing.

    The model is opened and its samples are read. What a run would refuse for that is refused here, with the same exit
    code.
    """
    from compile_stage import api

    with display(as_json, 0, verbose) as shown:
        the_plan = api.plan(
            model_uri, policy_path, targets=targets, sets=sets, policy_roots=policy_roots, shared_cache=shared_cache
        )
        if as_json:
            print_json(the_plan)
        else:
            shown.show_plan(the_plan)
    return the_plan.exit_code


for command in (init, lint, rule):
    cli.add_command(command)


@cli.command(
    short_help="Show where each value of a policy comes from.",
    epilog=example("compile-stage explain policies/cpu-server.yaml -t cpu-server"),
)
@click.argument("policy", type=NamedPath(path_type=Path))
@roots_option
@click.option("-t", "--target", metavar="NAME", help="Show the values as this target sees them.")
@sets_option
@json_option
def explain(
    policy: Path, policy_roots: tuple[Path, ...], target: str | None, sets: tuple[str, ...], as_json: bool
) -> None:
    """Show each resolved value of POLICY and the file:line that it came from."""
    from compile_stage.core.shipped import policy_file
    from compile_stage.policy.explain import explain as explain_policy

    rows = explain_policy(policy_file(policy), sets, target, roots=policy_roots)
    if as_json:
        print_json(rows)
        return
    with display(False, 0, 0) as shown:
        shown.show_values(rows)


@cli.command(
    "policy",
    short_help="Print a shipped policy, to start your own from.",
    epilog=example("compile-stage policy", "compile-stage policy --from cpu-server > policy.yaml"),
)
@click.option("--from", "name", metavar="NAME", help="The shipped policy to print.  [default: list them]")
def print_policy(name: str | None) -> None:
    """Print a policy that comes with compile-stage, to start your own from; without --from, list them all.

    Without a copy it is used as -p shipped:NAME.
    """
    from compile_stage.core import shipped

    if name is not None:
        print_text(shipped.policy_text(name))
        return
    for known in shipped.policy_names():
        click.echo(f"{known:<16} {shipped.policy_summary(known)}")


@cli.command(
    short_help="Print the JSON Schema of a policy or a result.",
    epilog=example("compile-stage schema > policy.schema.json", "compile-stage schema result"),
)
@click.argument("document", type=click.Choice(["policy", "result"]), default="policy")
def schema(document: str) -> None:
    """Print the JSON Schema of a policy (for editors) or of result.json."""
    if document == "policy":
        from compile_stage.policy.json_schema import json_schema

        print_json(json_schema())
    else:
        from compile_stage.report.result import result_json_schema

        print_json(result_json_schema())


@cli.command(
    short_help="Make the reports of a run again from its result.json.",
    epilog=example(
        "compile-stage report compile-stage-out/fraud-7/cpu-server",
        "compile-stage report result.json --format md --out -",
    ),
)
@click.argument("result", type=NamedPath(path_type=Path))
@click.option(
    "--format", "kind", type=click.Choice(["html", "md", "junit"]), default="html", show_default=True,
    help="The page, Markdown, or JUnit's XML.",
)  # fmt: skip
@click.option("--out", type=NamedPath(), help="The file; - for standard output.  [default: beside result.json]")
def report(result: Path, kind: str, out: str | None) -> None:
    """Make a report again from RESULT, a result.json or the folder that holds it. Nothing is run."""
    from compile_stage import api

    if out == "-":
        print_text(api.report_text(result, kind))
    else:
        click.echo(str(api.write_report(result, kind, out)))


for command in (
    compare, doctor, verify, validate, debug, profile, export, load_test, toolchain, cache, promote, rollback, watch,
    fleet,
):  # fmt: skip
    cli.add_command(command)


@cli.command(short_help="Take small real models through the whole stage.", epilog=example("compile-stage demo"))
@click.option(
    "--out",
    type=NamedPath(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the registry and the reports.",
)
@quiet_option
@verbose_option
def demo(out: Path, quiet: int, verbose: int) -> int:
    """Train small real models on real data, register them in an embedded MLflow, and run the whole stage."""
    from compile_stage.demo import demo as run_demo

    with display(False, quiet, verbose) as shown:
        results = run_demo(out, shown)
        shown.close()
        for result in results:
            shown.show_result(result, out / result.source.name)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        # mlflow-skinny, which is enough for all else, has the command `mlflow ui` and lacks what it serves with.
        first = "" if importlib.util.find_spec("flask") else "pip install mlflow && "
        click.echo(f"registry: {first}mlflow ui --backend-store-uri sqlite:///{out.absolute()}/mlflow.db")
    return max((result.exit_code for result in results), default=errors.EXIT_OK)


@cli.command(short_help="Print the version.", epilog=example("compile-stage version"))
@verbose_option
def version(verbose: int) -> None:
    """Print the version; with -v also those of the packages it stands on."""
    click.echo(f"compile-stage {__version__}")
    if verbose:
        for name, release in plugins.package_versions(
            "mlflow", "mlflow-skinny", "onnx", "onnxruntime", "numpy"
        ).items():
            click.echo(f"{name} {release}")
