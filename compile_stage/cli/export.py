"""`compile-stage export`: a published version in the form of a server."""

from __future__ import annotations

import shlex
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
    trusted_keys_option,
    verbose_option,
)
from compile_stage.cli.output import print_json


@click.command(
    short_help="Write a published version in the form of a server.",
    epilog=example(
        "compile-stage export models:/fraud-compiled@cpu-server-prod --to triton",
        "compile-stage export models:/fraud-compiled/4 --to kserve --storage-uri s3://models/fraud/4",
        "compile-stage export models:/fraud-compiled/4 --to oci --push registry.example/models/fraud:4",
    ),
)
@click.argument("uri")
@click.option(
    "--to", required=True, metavar="FORM",
    help="triton: a model repository. kserve: an InferenceService. oci: an OCI artifact. bentoml: a service.",
)  # fmt: skip
@click.option(
    "--out", type=NamedPath(file_okay=False, path_type=Path),
    help="Folder for the export.  [default: compile-stage-export/NAME-VERSION/FORM]",
)  # fmt: skip
@click.option(
    "--check/--no-check", default=None,
    help="Ask the export what the version was validated with; with --check it is an error where that can't be done "
    "here.  [default: where it can]",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an export that is there.")
@click.option("--storage-uri", default="", metavar="URI", help="kserve: where the bundle will lie for the cluster.")
@click.option(
    "--runtime", default="kserve-mlserver", show_default=True, metavar="NAME", help="kserve: the serving runtime."
)
@click.option("--image", default="", metavar="IMAGE", help="kserve: the serving image.  [default: the runtime's own]")
@click.option("--push", default="", metavar="REFERENCE", help="oci: push it to HOST[:PORT]/NAME[:TAG].")
@click.option("--plain-http", is_flag=True, help="oci: the registry speaks HTTP without TLS.")
@allow_code_option
@trusted_keys_option
@json_option
@quiet_option
@verbose_option
def export(
    uri: str,
    to: str,
    out: Path | None,
    check: bool | None,
    force: bool,
    storage_uri: str,
    runtime: str,
    image: str,
    push: str,
    plain_http: bool,
    allow_code: bool,
    trusted_keys: tuple[Path, ...],
    as_json: bool,
    quiet: int,
    verbose: int,
) -> None:
    """Write what was published (a URI or a bundle's folder) in the form of a server: the artifact that was proven, byte
    for byte, with its manifest, lineage and signature.

    A version that fails verification is not exported.
    """
    from compile_stage import api

    if to != "kserve":
        refuse_without_effect("without --to kserve", "runtime")
    options = api.ExportOptions(storage_uri=storage_uri, runtime=runtime, image=image, push=push, plain_http=plain_http)
    with display(as_json, quiet, verbose) as shown:
        exported = api.export_version(
            uri,
            to,
            out,
            options=options,
            check=check,
            force=force,
            allow_code=allow_code,
            trusted_keys=trusted_keys,
            reporter=shown,
        )
        shown.close()
    if as_json:
        print_json(exported)
        return
    click.echo(f"{exported.form}: {exported.uri} is in {exported.folder}")
    click.echo(f"artifact {exported.artifact_digest}")
    click.echo(exported.said)
    for line in exported.differs if not quiet else ():
        click.echo(f"note: {line}")
    if exported.reference:
        click.echo(f"pushed, pulled and compared: {exported.reference}")
        click.echo(f"next: compile-stage verify {shlex.quote(exported.reference)}")
    elif not quiet:
        click.echo(f"next: {exported.folder}/README.md says how to start it")
