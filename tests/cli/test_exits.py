"""Each exit code has one meaning, and the help, the documentation and the classes agree on it."""

from __future__ import annotations

from pathlib import Path

import compile_stage.core.errors as errors
from compile_stage.cli import exits
from compile_stage.cli.commands import cli
from compile_stage.cli.toolchain import toolchain

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_codes_are_unique() -> None:
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert len(codes) == len(set(codes))
    assert set(exits.MEANINGS) == set(codes) == {0, 2, 3, 4, 5, 6, 7, 70, 130}


def test_every_error_that_ends_the_program_has_a_documented_code() -> None:
    for cls in exits.error_classes():
        assert cls.exit_code in exits.MEANINGS, cls


def test_no_two_kinds_of_error_share_a_code() -> None:
    """Only what the user can mend by writing or setting something else shares 2: the list of codes is closed."""
    owners: dict[int, set[str]] = {}
    for cls in exits.error_classes():
        owners.setdefault(cls.exit_code, set()).add(cls.__name__)
    shared = {code: names for code, names in owners.items() if len(names) > 1}
    usage = {"PolicyError", "UsageError", "MissingDependencyError", "StorageError", "RemovedError", "KilledError"}
    usage |= {"DeviceError"}
    assert shared == {
        errors.EXIT_USAGE: usage,
        errors.EXIT_REGISTRY: {"RegistryError", "AliasMovedError", "FilesGoneError"},
    }


def test_the_documentation_holds_the_generated_table() -> None:
    assert exits.markdown_table() in DOCS.read_text(encoding="utf-8"), "paste exits.markdown_table() into docs/cli.md"


def test_every_command_has_a_row_in_the_table() -> None:
    """Broken: `toolchain` was in no table of commands; and a row of a command that is gone sends people into an
    error."""
    rows = [line.split(" | ")[0] for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    head = rows[: next(at for at, row in enumerate(rows) if "--target" in row)]
    named = {quoted.split()[0] for row in head for quoted in row.split("`")[1::2] if quoted[0] != "-"}
    commands = {*cli.commands, *toolchain.commands}
    assert set(cli.commands) <= named
    assert named <= commands
