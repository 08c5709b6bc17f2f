"""A folder that somebody else filled: nothing in it may lead out of it, or never end."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import IntegrityError
from compile_stage.core.records import PortableModel

_MAX_FILES = 100_000  # the largest known, a sharded language model with its tokenizer, has some hundreds
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def written_below(model: PortableModel, into: Path) -> PortableModel:
    """A model that a plug-in wrote into a folder, its path relative to that. What the plug-in says of its digest is not
    believed: by it, results of one graph would be taken for another's.

    Raises:
        IntegrityError: It names no file of that folder, or the folder holds what leads out of it.
    """
    if (reason := refuse_tree(into)) is not None:
        raise IntegrityError(f"what was written for it can't be used: {reason}")
    path = Path(model.path)
    if not path.is_relative_to(into) or ".." in path.parts or not path.is_file():
        raise IntegrityError(f"it is said to be in {model.path}, which is no file that was written for it")
    return replace(model, path=path.relative_to(into).as_posix(), digest=digest_tree(into))


def read_below(made: PortableModel, folder: str, *, of: PortableModel) -> PortableModel:
    """What `written_below` put into the cache, as a model of the folder where it lies now. Its limits on sizes are
    those of the model that it was made of: the trace of another original, which goes another way at other sizes, may
    have given the same graph."""
    return replace(
        made,
        path=str(Path(folder) / made.path),
        smallest=of.smallest,
        largest=of.largest,
        conditions=of.conditions,
    )


def refuse_tree(folder: str | os.PathLike[str]) -> str | None:
    """None when a folder holds only files, folders, and links to files of its own; or the reason, which names the first
    of what else it holds.

    Whatever copies a folder follows its links: one to `/etc/passwd` would be published, and one to a folder above it
    never end.
    """
    root = Path(folder).resolve()
    waiting, seen = [root], 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            return f"its folder {error.filename} can't be read: {error.strerror}"
        for entry in inside:
            seen += 1
            if seen > _MAX_FILES:
                return f"it holds more than {_MAX_FILES:,} files"
            if (reason := _refuse_entry(entry, root)) is not None:
                return f"its {Path(entry.path).relative_to(root).as_posix()} is {reason}"
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
    return None


def _refuse_entry(entry: os.DirEntry[str], root: Path) -> str | None:
    if not entry.is_symlink():
        return _KINDS.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode))
    try:
        target = Path(entry.path).resolve(strict=True)
    except (OSError, RuntimeError):
        return "a link that leads nowhere"
    if not target.is_relative_to(root):
        return f"a link that leads out of the folder, to {Path(entry.path).readlink()}"
    return None if target.is_file() else "a link to what is no file"
