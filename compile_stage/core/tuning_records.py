"""What backends measured while they tuned: files that runs, models and machines share.

A backend keeps them below the cache under a key of its own, which names everything that they are true for: the tool and
its version, the hardware (`core.environment.Hardware.fingerprint`), and what else decides, such as the number of
threads:

    <cache>/tuning/<key>/<what>-<digest>.<suffix>
           tuning/tvm-0.27.0/x86_64-1a2b3c4d5e6f7081-2-threads/81...-9f...json

A file is written whole, never changed, and named by its content. So the records of two places are put together by
copying files, nothing is ever overwritten by something else, and a file that was damaged on its way doesn't fit its
name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

from compile_stage.core.cache_folder import cache_root
from compile_stage.core.errors import InternalError

MAX_BYTES = 64_000_000
"""More than any file of records has: what is larger is none."""

_KEY = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,99}(?:/[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,99}){1,3}")
_NAME = re.compile(r"[A-Za-z0-9_+-]{1,100}-([0-9a-f]{24})\.[a-z0-9]{1,12}")
_STALE_S = 3600.0  # a part of a file that is so old is of a process that was killed


def folder_of(key: str) -> Path:
    """Where this machine keeps the records of a key; made by the first that is written."""
    return cache_root() / "tuning" / checked_key(key)


def checked_key(key: str) -> str:
    """The key, which is safe as a path below a folder. Raises InternalError for a backend's key that is not."""
    if not _KEY.fullmatch(key):
        raise InternalError(
            f"{key!r} is no key of tuning records: it is two to four parts of letters, digits and . _ + -, with / "
            "between"
        )
    return key


def names_in(folder: Path) -> list[str]:
    """The names of the records in a folder, sorted; none where there is no folder."""
    return sorted(path.name for path in folder.glob("*") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def intact_in(folder: Path) -> dict[str, Path]:
    """The records in a folder that have the content that they are named after."""
    return {name: folder / name for name in names_in(folder) if refuse(name, (folder / name).read_bytes()) is None}


def name_of(what: str, suffix: str, content: bytes) -> str:
    """The name of a record with that content."""
    return f"{what}-{_digest(content)}.{suffix}"


def refuse(name: str, content: bytes) -> str | None:
    """The reason when that can't be the content that a record was named after."""
    named = _NAME.fullmatch(name)
    if named is None:
        return "its name is not that of a record"
    if len(content) > MAX_BYTES:
        return f"it is larger than {MAX_BYTES} bytes"
    return None if _digest(content) == named[1] else "its content is not what it was named after"


def write(folder: Path, name: str, content: bytes) -> Path:
    """Keep a record: all of it or nothing, also after a power cut. One of that name has that content, and is replaced
    by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    descriptor, part = tempfile.mkstemp(prefix=".part-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(part).chmod(0o644)  # mkstemp makes it private
        Path(part).replace(folder / name)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return folder / name


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _clear(folder: Path) -> None:
    for part in folder.glob(".part-*"):
        with contextlib.suppress(OSError):  # another process was quicker
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink()
