"""A hosts file → `core.hosts.Host`: which devices there are, and how each is reached."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args

from compile_stage.core.errors import UsageError
from compile_stage.core.hosts import BaselineKind, Host
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.nodes import Node
from compile_stage.policy.parse import parse_bytes

HOSTS_VARIABLE = "COMPILE_STAGE_HOSTS"
HOSTS_FILE = "hosts.yaml"

# No first dash: `ssh` would take it for an option, such as one that runs a program here.
_ADDRESS = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:@%\[\]-]*\Z")
# They stand in a command line that the device's shell reads, whichever it is.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./~\\:+ -]*\Z")
_KEYS = {"ssh": str, "adb": str, "port": int, "config": str, "python": str, "folder": str, "baseline": str}


def load_host(name: str, file: str | os.PathLike[str] | None = None) -> Host:
    """A host by its name in a hosts file; what no file names is taken as what `ssh` takes.

    Args:
        file: By default `$COMPILE_STAGE_HOSTS`, else `hosts.yaml` in the current folder, where there is one.

    Raises:
        UsageError: The file can't be read, or says something that it can't say; or it does not name the host, which is
            no address either.
    """
    named = file or os.environ.get(HOSTS_VARIABLE)
    path = Path(named or HOSTS_FILE)
    known = read_hosts(path) if named or path.is_file() else {}
    if name in known:
        return known[name]
    if named and not re.search(r"[@.]", name):
        near = did_you_mean(name, tuple(known))
        raise UsageError(
            f"{path} names no host {name!r}" + (f"; did you mean {near!r}?" if near else ""),
            fix=f"it names: {', '.join(known) or 'none'}",
        )
    if not _ADDRESS.match(name):
        raise UsageError(f"{name!r} is no address that ssh takes", fix="name a host: board, pi@board.lan")
    return Host(name=name, transport="ssh", address=name)


def read_hosts(path: Path) -> dict[str, Host]:
    """Every host of a file. Raises UsageError, with the place, for what is wrong in it."""
    try:
        tree, problems = parse_bytes(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"the hosts file can't be read: {error.strerror}", where=str(path)) from error
    if problems or tree is None:
        codes = tuple(problem.code for problem in problems)
        raise UsageError("the hosts file is wrong", where=str(path), problems=tuple(map(str, problems)), codes=codes)
    if not tree.is_map or set(tree.value) != {"hosts"} or not tree.value["hosts"].is_map:
        raise UsageError(
            "a hosts file holds the key `hosts` and nothing else", fix="hosts: {board: {ssh: pi@board.lan}}",
            where=str(tree.place),
        )  # fmt: skip
    return {str(name): _host(str(name), node, path.absolute().parent) for name, node in tree.items("hosts")}


def _host(name: str, node: Node, beside: Path) -> Host:
    def wrong(problem: str, key: str | None = None, fix: str = "") -> UsageError:
        place = node.place_of((key,)) if key is not None else node.place
        return UsageError(f"hosts.{name}: {problem}", fix=fix, where=str(place))

    if not node.is_map:
        raise wrong("it is no map", fix="board: {ssh: pi@board.lan}")
    said: dict[str, Any] = node.plain()
    for key, value in said.items():
        if key not in _KEYS:
            near = did_you_mean(key, tuple(_KEYS))
            raise wrong(f"there is no key {key!r}" + (f"; did you mean {near!r}?" if near else ""), key)
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise wrong(f"{key} must be {'a number' if _KEYS[key] is int else 'a text'}", key)
    if len({"ssh", "adb"} & set(said)) != 1:
        raise wrong("it must have either ssh or adb", fix="ssh: pi@board.lan, or adb: SERIAL")
    transport: Literal["ssh", "adb"] = "ssh" if "ssh" in said else "adb"
    if not _ADDRESS.match(said[transport]):
        raise wrong(f"{said[transport]!r} is no address", transport)
    if transport == "adb" and ({"port", "config"} & set(said)):
        raise wrong("port and config are for ssh")
    if not 0 <= said.get("port", 0) < 65536:
        raise wrong("port lies between 1 and 65535", "port")
    for key in ("python", "folder"):
        if not _PLAIN_PATH.match(said.get(key, "")):
            raise wrong(f"{key} holds a character that a shell would read otherwise", key)
    if said.get("baseline", "original") not in get_args(BaselineKind):
        raise wrong(f"baseline must be one of: {', '.join(get_args(BaselineKind))}", "baseline")
    given = {key: said[key] for key in ("port", "python", "folder", "baseline") if key in said}
    config = str(beside / Path(said["config"]).expanduser()) if said.get("config") else ""
    return Host(name=name, transport=transport, address=said[transport], config=config, **given)
