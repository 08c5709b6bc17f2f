"""A folder that somebody else filled: nothing in it may lead out of it, or never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MAX_FILES = 100_000  # the largest known, a sharded language model with its tokenizer, has some hundreds
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
