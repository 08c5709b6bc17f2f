"""The files that a policy names: a name is relative to the file that gives it, so equal names can mean two files."""

from __future__ import annotations

from pathlib import Path as FilePath

from compile_stage.policy.nodes import Node, Path

_SOURCES = (("data", "validation", "source"), ("data", "calibration", "source"))
_TRUSTED_KEYS = ("compliance", "trusted_keys")


def data_file(node: Node) -> str | None:
    """The absolute path that a `file:` source means: relative to the file that names it; None for another source."""
    kind, _, name = str(node.value).partition(":")
    return _located(node, name) if kind == "file" else None


def located(node: Node) -> str:
    """The absolute path that a file name means: relative to the file that gives it."""
    return _located(node, str(node.value))


def files_at(path: Path, node: Node | None) -> list[str] | None:
    """The absolute paths of the files that the value at a path of the policy names; None where it names none."""
    if node is None:
        return None
    if path in _SOURCES:
        file = data_file(node)
        return None if file is None else [file]
    if path == _TRUSTED_KEYS and all(
        isinstance(name.value, str) and "\0" not in name.value for name in node.elements()
    ):
        return [located(name) for name in node.elements()]
    return None


def _located(node: Node, name: str) -> str:
    folder = FilePath(node.place.file).parent if node.place.line else FilePath()
    return str((folder / name).resolve())
