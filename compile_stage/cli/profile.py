"""`compile-stage profile`: where a model spends its time."""

from __future__ import annotations

from pathlib import Path

import click

from compile_stage.cli.options import (
    NamedPath,
    allow_code_option,
    display,
    example,
    json_option,
    quiet_option,
    refuse_without_effect,
    roots_option,
    sets_option,
    targets_option,
    trusted_keys_option,
    verbose_option,
)
from compile_stage.cli.output import print_json


@click.command(
    short_help="Show where a model spends its time.",
    epilog=example(
        "compile-stage profile models:/fraud/7 -p policy.yaml --backend onnxruntime",
        "compile-stage profile models:/fraud/7 -p policy.yaml --precision fp32 --precision int8 --out profiles",
        "compile-stage profile models:/fraud-compiled@cpu-server-prod",
    ),
)
@click.argument("uri")
@click.option(
    "-p", "--policy", "policy_path", type=NamedPath(path_type=Path), metavar="FILE",
    help="Policy file, or shipped:NAME, for a source model.  [default: URI is a published version]",
)  # fmt: skip
@roots_option
@targets_option
@sets_option
@click.option(
    "--backend", "backends", multiple=True, metavar="NAME", help="Only candidates of this backend. Repeatable."
)
@click.option(
    "--precision", "precisions", multiple=True, default=("fp32",), show_default=True, metavar="NAME",
    help="Only candidates of this precision. Repeatable.",
)  # fmt: skip
@click.option(
    "--out", type=NamedPath(file_okay=False, path_type=Path), help="Folder for the traces.  [default: none are kept]"
)
@click.option("--allow-pickle", is_flag=True, help="Let a published version's source be a pickle, which runs code.")
@allow_code_option
@trusted_keys_option
@json_option
@quiet_option
@verbose_option
def profile(
    uri: str,
    policy_path: Path | None,
    policy_roots: tuple[Path, ...],
    targets: tuple[str, ...],
    sets: tuple[str, ...],
    backends: tuple[str, ...],
    precisions: tuple[str, ...],
    out: Path | None,
    allow_pickle: bool,
    allow_code: bool,
    trusted_keys: tuple[Path, ...],
    as_json: bool,
    quiet: int,
    verbose: int,
) -> None:
    """Show the kernels with the most time of the original and of its candidates, and which nodes were fused, by the
    profilers of their runtimes.

    Candidates are compiled, and neither validated nor measured. Without a policy, URI is a published version or a
    bundle's folder.
    """
    from compile_stage import api

    if policy_path is None:
        refuse_without_effect("without a policy (-p)", "policy_roots", "precisions")
    else:
        refuse_without_effect("with a policy (-p), which says it: compliance.allow_pickle", "allow_pickle")
    with display(as_json, quiet, verbose) as shown:
        found = api.profile(
            uri,
            policy_path,
            targets=targets,
            sets=sets,
            policy_roots=policy_roots,
            backends=backends,
            precisions=precisions,
            out=out,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
            trusted_keys=trusted_keys,
            reporter=shown,
        )
        shown.close()
        if as_json:
            from compile_stage.report.profiles import profiles_json

            print_json(profiles_json(found.uri, {one.target: one.profiles for one in found.targets}, kept=bool(out)))
        else:
            shown.show_profiles({one.target: one.profiles for one in found.targets}, out)
