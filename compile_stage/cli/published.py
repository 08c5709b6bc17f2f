"""The commands on what was published: verify, validate, promote, rollback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    signing_key_option,
    trusted_keys_option,
    verbose_option,
)
from compile_stage.cli.output import print_json
from compile_stage.core import errors


@click.command(
    short_help="Check a published version or a bundle.",
    epilog=example(
        "compile-stage verify models:/fraud-compiled@cpu-server-prod",
        "compile-stage verify models:/fraud-compiled/4 -p policy.yaml --trusted-key ci.pub",
        "compile-stage verify models:/fraud-compiled/4 --rebuild --no-revalidate",
        "compile-stage verify compile-stage-out/fraud-7/cpu-server/bundles/cpu-server --no-revalidate",
    ),
)
@click.argument("uri")
@click.option(
    "-p", "--policy", "policy_path", type=NamedPath(path_type=Path), metavar="FILE",
    help="Judge by this policy, not by the gates in the manifest.",
)  # fmt: skip
@roots_option
@sets_option
@click.option("--revalidate/--no-revalidate", default=True, show_default=True, help="Run the validation again.")
@click.option("--rebuild", is_flag=True, help="Make it again from its source, and compare the bytes.")
@click.option("--allow-pickle", is_flag=True, help="Let the source be a pickle, which runs code of its own.")
@allow_code_option
@trusted_keys_option
@json_option
@verbose_option
def verify(
    uri: str,
    policy_path: Path | None,
    policy_roots: tuple[Path, ...],
    sets: tuple[str, ...],
    revalidate: bool,
    rebuild: bool,
    allow_pickle: bool,
    allow_code: bool,
    trusted_keys: tuple[Path, ...],
    as_json: bool,
    verbose: int,
) -> int:
    """Check what was published (a URI or a bundle's folder): digests, signature, manifest, and the validation once
    more.

    What was measured is judged again, by the gates in the manifest or by those of a policy of yours (-p).
    """
    from compile_stage import api

    if policy_path is None:
        refuse_without_effect("without a policy (-p)", "policy_roots", "sets")
    with display(as_json, 0, verbose) as shown:
        verification = api.verify(
            uri,
            policy_path=policy_path,
            policy_roots=policy_roots if policy_path is not None else (),
            sets=sets,
            revalidate=revalidate,
            rebuild=rebuild,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
            trusted_keys=trusted_keys,
        )
        if as_json:
            print_json(verification)
        else:
            shown.show_verification(verification)
    return errors.EXIT_OK if verification.passed else errors.EXIT_INTEGRITY


@click.command(
    short_help="Validate a published version on this machine.",
    epilog=example(
        "compile-stage validate models:/fraud-compiled/4",
        "compile-stage validate models:/fraud-compiled/4 --host board",
    ),
)
@click.argument("uri")
@click.option("--host", metavar="HOST", help="On this device, not here: a name in the hosts file, or what ssh takes.")
@click.option(
    "--hosts", type=NamedPath(path_type=Path), metavar="FILE", envvar="COMPILE_STAGE_HOSTS",
    help="Where devices are named.  [env: COMPILE_STAGE_HOSTS; default: hosts.yaml, where there is one]",
)  # fmt: skip
@click.option("--allow-pickle", is_flag=True, help="Let the source be a pickle, which runs code of its own.")
@allow_code_option
@signing_key_option
@trusted_keys_option
@json_option
@quiet_option
@verbose_option
def validate(
    uri: str,
    host: str | None,
    hosts: Path | None,
    allow_pickle: bool,
    allow_code: bool,
    signing_key: str | None,
    trusted_keys: tuple[Path, ...],
    as_json: bool,
    quiet: int,
    verbose: int,
) -> int:
    """Validate and measure a published version on this machine, and attach the result to it.

    A version that was compiled for hardware that was not there can be promoted once it passed where such hardware is.
    With --host its artifact runs on a device that is reached over ssh or adb; all is judged here.
    """
    from compile_stage import api

    if not host:
        refuse_without_effect("without --host", "hosts")
    with display(as_json, quiet, verbose) as shown:
        given: dict[str, Any] = {
            "allow_pickle": allow_pickle,
            "allow_code": allow_code,
            "trusted_keys": trusted_keys,
            "signing_key": signing_key,
            "reporter": shown,
        }
        verification = api.validate_on(uri, host, hosts=hosts, **given) if host else api.validate(uri, **given)
        shown.close()
        if as_json:
            print_json(verification)
        else:
            shown.show_verification(verification, f"validated on {host}" if host else "validated here")
    return errors.EXIT_OK if verification.passed else errors.EXIT_GATE


@click.command(
    short_help="Move an alias to a published version.",
    epilog=example("compile-stage promote models:/fraud-compiled/3 --alias cpu-server-prod"),
)
@click.argument("uri")
@click.option("--alias", required=True, help="The alias to move.")
@click.option("--skip-serve-check", is_flag=True, help="Promote it though nobody knows whether serving loads it.")
@allow_code_option
@trusted_keys_option
@json_option
def promote(
    uri: str, alias: str, skip_serve_check: bool, allow_code: bool, trusted_keys: tuple[Path, ...], as_json: bool
) -> None:
    """Move an alias to a published version whose verdict passed, and that MLflow loads in a new process."""
    from compile_stage import api

    receipt = api.promote(
        uri, alias, trusted_keys=trusted_keys, allow_code=allow_code, serve_check=not skip_serve_check
    )
    if as_json:
        print_json(receipt)
        return
    before = f" (before: version {receipt.previous})" if receipt.previous else ""
    click.echo(f"{receipt.name}@{alias} is now version {receipt.version}{before}")
    if receipt.note:
        click.echo(f"note: {receipt.note}")


@click.command(
    short_help="Move an alias back.",
    epilog=example(
        "compile-stage rollback models:/fraud-compiled@cpu-server-prod",
        "compile-stage rollback models:/fraud-compiled --alias cpu-server-prod",
    ),
)
@click.argument("uri")
@click.option("--alias", help="The alias to move back, where the URI names none.")
@json_option
def rollback(uri: str, alias: str | None, as_json: bool) -> None:
    """Move an alias back to the version that it pointed to before.

    URI is models:/NAME@ALIAS, or models:/NAME or folder:/PATH with --alias; a bare NAME is taken as models:/NAME.
    """
    from compile_stage import api

    receipt = api.rollback(uri, alias)
    if as_json:
        print_json(receipt)
        return
    click.echo(f"{receipt.name}@{receipt.promoted_to} is back at version {receipt.version}")
    if receipt.note:
        click.echo(f"note: {receipt.note}")
