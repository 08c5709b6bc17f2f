"""The command `doctor`: this machine, or the machines of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compile_stage.cli.options import NamedPath, display, example, json_option, refuse_without_effect
from compile_stage.cli.output import print_json, print_text
from compile_stage.core.errors import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from compile_stage.cluster.survey import Survey


@click.command(
    short_help="Show this machine, and what is missing on it.",
    epilog=example("compile-stage doctor", "compile-stage doctor --engine ray -p policy.yaml"),
)
@click.option("--engine", default="local", show_default=True, metavar="NAME", help="ray: the nodes of the cluster.")
@click.option(
    "-p",
    "--policy",
    "policy_path",
    type=NamedPath(path_type=Path),
    metavar="FILE",
    help="With --engine ray: show which nodes each target of this policy would be measured on.",
)
@json_option
def doctor(engine: str, policy_path: Path | None, as_json: bool) -> int:
    """Show this machine, the installed backends and sources, the registry, and how to get what is missing.

    With --engine ray: each node of the cluster with its hardware, its backends and its toolchains.
    """
    from compile_stage import api

    if engine != "local":
        found = api.survey(engine, policy_path)
        if as_json:
            print_json(found)
        else:
            print_text("\n".join(_lines(found)) + "\n")
        return EXIT_USAGE if found.problem or found.absent else EXIT_OK
    refuse_without_effect("without --engine ray", "policy_path")
    report = api.doctor()
    if as_json:
        print_json(report)
        return EXIT_OK
    with display(False, 0, 0) as shown:
        shown.show_doctor(report)
    return EXIT_OK


def _lines(found: Survey) -> Iterator[str]:
    for node in found.nodes:
        yield f"{node.name}  {node.hardware.fingerprint}"
        yield f"  cpu          {node.hardware.cpu}, {node.hardware.cores} cores"
        if node.hardware.accelerators:
            yield f"  accelerators {', '.join(node.hardware.accelerators)}"
        yield f"  given out    {node.cpus} CPUs, {node.gpus} GPUs, {node.memory_bytes / 1e9:.1f} GB"
        yield f"  software     compile-stage {node.version}, Python {node.python}"
        yield f"  backends     {', '.join(node.backends) or 'none'}"
        yield f"  toolchains   {', '.join(node.toolchains) or 'none'}"
        yield f"  cache        {node.cache}, shared: {node.shared or 'as the driver names it'}"
    for target, names in found.targets.items():
        yield f"target {target}: {', '.join(names) or f'no node has {found.absent[target]}'}"
    if found.problem:
        yield f"no run can start: {found.problem}"
