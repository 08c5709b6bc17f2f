"""The digest of a plug-in's whole distribution: what a third party's plug-in is, for the keys of what it makes.

A plug-in of several modules answers otherwise when any of them is edited, also where version and entry point stay. So
all its modules count: those that the installed distribution lists, or, of one that is installed for development, those
below its project's folder.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from urllib.parse import unquote, urlparse

from compile_stage.core.digest import digest_file, digest_of

_LARGE_BYTES = 4 * 2**20
"""Of a larger file, which is a library and no module, the installer's digest is taken where it wrote one: hashing
gigabytes would take longer than what the key is for."""

_CODE = (".py", ".so", ".pyd", ".dll", ".dylib", ".json", ".toml", ".txt", ".yaml")
_NOT_CODE = frozenset({"tests", "test", "docs", "build", "dist", "node_modules", "venv", "site-packages"})


def distribution_digest(entry: EntryPoint) -> str:
    """`sha256:...` over all files of the distribution that provides an entry point; empty where there are none to be
    found, as of a plug-in that was never installed."""
    files = dict(_installed(entry.dist)) if entry.dist is not None else {}
    if not any(name.endswith(".py") for name in files):
        project = _project(entry.dist) if entry.dist is not None else None
        files |= _below(project) if project is not None else _beside(entry)
    return digest_of(files) if files else ""


def source_files(entry: EntryPoint) -> tuple[Path, ...]:
    """The Python files of the distribution that provides an entry point, or, of one that was never installed, of the
    entry point's package."""
    listed = (entry.dist.files or ()) if entry.dist is not None else ()
    paths = [Path(str(file.locate())) for file in listed if file.suffix == ".py"]
    if not paths and entry.dist is not None and (project := _project(entry.dist)) is not None:
        paths = [project / name for name in _below(project) if name.endswith(".py")]
    if not paths and (folder := _folder_of(entry)) is not None:
        paths = [folder / name for name in _beside(entry) if name.endswith(".py")]
    return tuple(path for path in paths if path.is_file())


def _installed(distribution: Distribution) -> Iterator[tuple[str, str]]:
    """Name → digest of what the installer listed, without its own notes and what Python compiled."""
    for file in distribution.files or ():
        folder = file.parts[0] if file.parts else ""
        if folder.endswith((".dist-info", ".egg-info")) or "__pycache__" in file.parts or file.suffix == ".pth":
            continue
        path = Path(str(distribution.locate_file(file)))
        if not path.is_file():
            continue
        listed = f"{file.hash.mode}:{file.hash.value}" if file.hash is not None else ""
        large = path.stat().st_size > _LARGE_BYTES
        yield file.as_posix(), listed if large and listed else digest_file(path)


def _project(distribution: Distribution) -> Path | None:
    """The folder of a project that is installed for development (`pip install -e`)."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        editable = bool(origin.get("dir_info", {}).get("editable"))
        folder = Path(unquote(urlparse(origin.get("url", "")).path))
    except (ValueError, AttributeError):
        return None
    return folder if editable and folder.is_dir() else None


def _below(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part == "__pycache__" or part in _NOT_CODE for part in parts)
        if not hidden and path.suffix in _CODE and path.is_file() and path.stat().st_size <= _LARGE_BYTES:
            found["/".join(parts)] = digest_file(path)
    return found


def _beside(entry: EntryPoint) -> dict[str, str]:
    """The entry point's package, or the modules in the folder of its module."""
    folder, spec = _folder_of(entry), importlib.util.find_spec(entry.module.partition(".")[0])
    if folder is None or spec is None:
        return {}
    if spec.submodule_search_locations:
        return _below(folder)
    return {path.name: digest_file(path) for path in sorted(folder.glob("*.py"))}


def _folder_of(entry: EntryPoint) -> Path | None:
    spec = importlib.util.find_spec(entry.module.partition(".")[0])
    return Path(spec.origin).parent if spec is not None and spec.origin is not None and spec.has_location else None
