"""`compare`: two runs, two published versions, or two policies side by side."""

from __future__ import annotations

from pathlib import Path

import click

from compile_stage.cli.options import NamedPath, example, json_option, refuse_without_effect, roots_option
from compile_stage.cli.output import print_json, print_text, write_file
from compile_stage.core import errors


@click.command(
    short_help="What changed between two runs, versions or policies.",
    epilog=example(
        "compile-stage compare before/ after/ --fail-on-regression",
        "compile-stage compare models:/fraud-compiled@cpu-server-prod models:/fraud-compiled/4",
        "compile-stage compare --policy main/fraud.yaml fraud.yaml",
    ),
)
@click.argument("before")
@click.argument("after")
@click.option("--policy", "of_policies", is_flag=True, help="Both are policy files: values and jobs; nothing is run.")
@click.option("--markdown", type=NamedPath(dir_okay=False, path_type=Path), help="Write the comparison to this file.")
@click.option("--html", type=NamedPath(dir_okay=False, path_type=Path), help="Write it as a page to this file.")
@click.option("--fail-on-regression", is_flag=True, help="Exit with 3 where something is worse beyond the noise.")
@roots_option
@json_option
def compare(
    before: str,
    after: str,
    of_policies: bool,
    markdown: Path | None,
    html: Path | None,
    fail_on_regression: bool,
    policy_roots: tuple[Path, ...],
    as_json: bool,
) -> int:
    """What changed from BEFORE to AFTER: policy, packages, hardware, verdicts, and figures beyond their noise.

    Each is a result.json, a folder with one, or a published version (models:/NAME/VERSION, models:/NAME@ALIAS).
    """
    from compile_stage import api
    from compile_stage.report import compare as comparison
    from compile_stage.report import comparison_text as text

    if of_policies:
        if markdown or html or fail_on_regression:
            raise errors.UsageError("--policy has neither --markdown, --html nor --fail-on-regression")
        changed = api.compare_policies(before, after, policy_roots=policy_roots)
        if as_json:
            print_json({"schema": comparison.SCHEMA, "inputs": changed})
        else:
            print_text(text.render_policy_text(changed))
        return errors.EXIT_OK
    refuse_without_effect("without --policy", "policy_roots")
    found = api.compare(before, after)
    for option, file, render in (("--markdown", markdown, text.render_markdown), ("--html", html, text.render_html)):
        if file is not None:
            write_file(file, render(found), option)
    if as_json:
        print_json(comparison.comparison_document(found))
    else:
        print_text(text.render_text(found))
    if fail_on_regression and found.regressed:
        click.echo(f"regression, exit code {errors.EXIT_GATE}: {text.regression_text(found)}", err=True)
        return errors.EXIT_GATE
    return errors.EXIT_OK
