"""The cache's size is bounded: what was longest unused goes first."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from compile_stage.core.digest import tree_size
from compile_stage.core.errors import UsageError
from compile_stage.core.leftovers import PART_PREFIX

VARIABLE = "COMPILE_STAGE_CACHE_MAX_GB"
DEFAULT_GB = 50.0
"""Some hundred models of 100 MB with their candidates. A chosen bound, as that of ccache or of a browser is."""

_KEPT_S = 24 * 3600.0  # a run uses what it read by path until it ends, so what was used within a day stays
_LOOKED_S = 600.0  # between two looks at the whole cache
_STAMP = "evicted"
_SOURCES = "sources"


def limit_bytes() -> float:
    """The bound that `$COMPILE_STAGE_CACHE_MAX_GB` gives, in bytes; infinite where it is 0.

    Raises:
        UsageError: It is no number from 0.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        gigabytes = float(text) if text else DEFAULT_GB
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise UsageError(f"{VARIABLE} is {text!r}", fix="give a number of gigabytes, or 0 to keep everything")
    return gigabytes * 1e9 if gigabytes else float("inf")


def touch(entry: Path) -> None:
    """Note that an entry was used now."""
    with suppress(OSError):
        os.utime(entry)


def evict(root: Path, limit: float, *, now: float | None = None) -> int:
    """Delete entries of the cache, the longest unused first, until it is within `limit` bytes; entries used within a
    day stay. Returns how many were deleted.

    Safe beside runs: an entry is deleted under its lock, and not when it was used meanwhile.
    """
    now = time.time() if now is None else now
    if limit == float("inf") or not root.is_dir() or _looked_lately(root, now):
        return 0
    entries = sorted((_used(entry), entry) for entry in _entries(root))
    sizes = {entry: _size(entry) for _, entry in entries}
    total, deleted = sum(sizes.values()), 0
    for used, entry in entries:
        if total <= limit:
            break
        if _is_kept(used, now):
            continue
        if _delete(entry, now):
            total -= sizes[entry]
            deleted += 1
    return deleted


def entries_of(root: Path) -> Iterator[tuple[Path, int, float]]:
    """Each folder of a step's result and of a source model: where, how many bytes, when it was last used (seconds since
    1970)."""
    if root.is_dir():
        for entry in sorted(_entries(root)):
            yield entry, _size(entry), _used(entry)


def collect(root: Path, oldest: float, limit: float, *, dry_run: bool = False) -> list[tuple[Path, int]]:
    """Delete what was last used before `oldest` (seconds since 1970), and then the longest unused until `limit` bytes
    are left. What was used within a day stays. Returns what was, or would be, deleted, with its bytes."""
    now, gone = time.time(), []
    known = sorted((used, entry, size) for entry, size, used in entries_of(root))
    total = sum(size for _, _, size in known)
    for used, entry, size in known:
        if used >= oldest and total <= limit:
            break
        if _is_kept(used, now):
            continue
        if dry_run or _delete(entry, now):
            total -= size
            gone.append((entry, size))
    return gone


def _is_kept(used: float, now: float) -> bool:
    """Used within a day, or deleted meanwhile. A time that lies further ahead is that of a clock that was wrong."""
    return abs(now - used) < _KEPT_S or used == float("inf")


def _looked_lately(root: Path, now: float) -> bool:
    stamp = root / _STAMP
    with suppress(OSError):
        if abs(now - stamp.stat().st_mtime) < _LOOKED_S:
            return True
    with suppress(OSError):
        stamp.touch()
        os.utime(stamp, (now, now))
    return False


def _entries(root: Path) -> Iterator[Path]:
    """The folders of steps' results and of source models, and of those that were killed while they were made."""
    for step in root.iterdir():
        if step.is_dir() and step.name != _SOURCES:
            yield from (entry for entry in step.glob("??/*") if entry.is_dir())
    for source in (root / _SOURCES).glob("*"):
        if source.is_dir() and not source.name.startswith(PART_PREFIX):
            yield source


def _used(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # deleted meanwhile
        return float("inf")


def _size(entry: Path) -> int:
    try:
        return tree_size(entry)
    except OSError:
        return 0


def _delete(entry: Path, now: float) -> bool:
    from filelock import FileLock, Timeout  # what loads a published model may have none

    try:
        with FileLock(f"{entry}.lock", timeout=0):
            if _is_kept(_used(entry), now):
                return False
            gone = entry.with_name(f"{entry.name[:16]}.part-evicted")  # the name of what is no entry any more
            entry.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            return True
    except (OSError, Timeout):
        return False
