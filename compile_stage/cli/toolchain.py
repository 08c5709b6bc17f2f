"""`compile-stage toolchain`: isolated environments of backends and sources whose packages can't be in this one."""

from __future__ import annotations

from pathlib import Path

import click

from compile_stage.cli.options import NamedPath, example, json_option
from compile_stage.cli.output import print_json
from compile_stage.core.digest import plain


@click.group(
    short_help="Isolated environments of backends and sources: list, install, lock, remove.",
    epilog=example("compile-stage toolchain list", "compile-stage toolchain install litert"),
)
def toolchain() -> None:
    """Compilers and frameworks pin packages that exclude each other. A backend or source whose packages are not in this
    environment runs in one of its own, which is made from the lock file that comes with it."""


@toolchain.command("list", short_help="Which there are, and where.", epilog=example("compile-stage toolchain list"))
@json_option
def list_all(as_json: bool) -> None:
    """Every toolchain: whether it is made, where, and how large it is."""
    from compile_stage import api

    states = api.toolchains()
    if as_json:
        print_json(plain(states))
        return
    for state in states:
        if state.here:
            text = "not needed: its packages are in this environment"
            if state.toolchain is not None:
                text += f"; {state.toolchain.folder} ({state.size_bytes / 1e6:.0f} MB) is not looked at"
        elif state.toolchain is not None:
            text = f"{state.toolchain.folder} ({state.size_bytes / 1e6:.0f} MB)"
        else:
            text = f"not made: compile-stage toolchain install {state.name}"
        click.echo(f"{state.name:<20} {text}")
    if not states:
        click.echo("no backend or source that is installed has a toolchain of its own")


@toolchain.command(short_help="Make one.", epilog=example("compile-stage toolchain install litert"))
@click.argument("name")
def install(name: str) -> None:
    """Make the environment NAME, of a backend or a source, from its lock file. One that is there is left as it is."""
    from compile_stage import api

    api.install_toolchain(name, lambda text: click.echo(text, err=True))


@toolchain.command(short_help="Pin newer versions for one.", epilog=example("compile-stage toolchain lock litert"))
@click.argument("name")
@click.option(
    "--out",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="Where to write it.  [default: among your own locks, which come before the shipped ones]",
)
def lock(name: str, out: Path | None) -> None:
    """Resolve the requirements of the environment NAME anew, and write the versions as a lock file."""
    from compile_stage import api

    click.echo(api.lock_toolchain(name, out, lambda text: click.echo(text, err=True)))


@toolchain.command(short_help="Delete one.", epilog=example("compile-stage toolchain remove litert"))
@click.argument("name")
def remove(name: str) -> None:
    """Delete the environments called NAME, those of former locks too."""
    from compile_stage import api

    gone = api.remove_toolchain(name)
    for folder in gone:
        click.echo(f"removed {folder}")
    if not gone:
        click.echo(f"there was none of {name}")
