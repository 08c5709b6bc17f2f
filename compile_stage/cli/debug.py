"""`compile-stage debug`: one command for the three ways in which something goes wrong."""

from __future__ import annotations

from pathlib import Path

import click

from compile_stage.cli.options import (
    NamedPath,
    display,
    example,
    json_option,
    quiet_option,
    refuse_without_effect,
    roots_option,
    sets_option,
    targets_option,
    verbose_option,
)
from compile_stage.cli.output import print_json
from compile_stage.core.digest import plain


@click.command(
    short_help="Find the node at which a candidate goes wrong.",
    epilog=example(
        "compile-stage debug models:/fraud@candidate -p policies/cpu-server.yaml --job '*int8*'",
        "compile-stage debug compile-stage-out/fraud-7/cpu-server/result.json",
        "compile-stage debug model.onnx quantised.onnx --data samples.npz",
        "compile-stage debug model.onnx --backend openvino",
    ),
)
@click.argument("subject")
@click.argument("candidate", required=False)
@click.option(
    "-p",
    "--policy",
    "policy_path",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="Policy file, for a model's URI.",
)
@click.option(
    "--job", default="*", show_default=True, metavar="GLOB", help="The first matching job that fails, or the only one."
)
@roots_option
@targets_option
@sets_option
@click.option("--backend", metavar="NAME", help="For one .onnx file: the backend that does not take it.")
@click.option(
    "--data", type=NamedPath(dir_okay=False), help="For two files: samples (.npz, .parquet, .csv).  [default: random]"
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="How many samples are traced; of a job, those that its validation found worst.",
)
@click.option(
    "--out",
    type=NamedPath(file_okay=False, path_type=Path),
    help="Folder for debug.html, debug.json and the bundle.  [default: compile-stage-debug/NAME]",
)
@json_option
@quiet_option
@verbose_option
def debug(
    subject: str,
    candidate: str | None,
    policy_path: Path | None,
    policy_roots: tuple[Path, ...],
    job: str,
    targets: tuple[str, ...],
    sets: tuple[str, ...],
    backend: str | None,
    data: str | None,
    samples: int,
    out: Path | None,
    as_json: bool,
    quiet: int,
    verbose: int,
) -> None:
    """Find the node at which a candidate's answers depart, and what to keep in fp32; or the few nodes that can't be
    compiled.

    SUBJECT is a model's URI (with -p), a result.json of a run or its folder, or an .onnx file: the one that CANDIDATE
    (.onnx, or OpenVINO's .xml) should answer like, or the one that --backend can't compile.
    """
    from compile_stage import api

    if candidate is not None or backend is not None:
        of_files = "where files are looked into" if candidate is not None else "with --backend"
        refuse_without_effect(of_files, "policy_path", "policy_roots", "job", "targets", "sets")
    if candidate is not None:
        refuse_without_effect("with a second file, which is compiled already", "backend")
    else:
        refuse_without_effect("without a second file", "data")
    with display(as_json, quiet, verbose) as shown:
        diagnosis = api.debug(
            subject,
            candidate,
            policy_path=policy_path,
            policy_roots=policy_roots,
            job=job,
            targets=targets,
            sets=sets,
            backend=backend,
            data=data,
            samples=samples,
            out=out,
            reporter=shown,
        )
        shown.close()
        if as_json:
            print_json({"headline": diagnosis.headline, **plain(diagnosis)})
        shown.show_diagnosis(diagnosis)
