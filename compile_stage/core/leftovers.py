"""Temporary folders that end with their owner, also when it is killed: the next run deletes them.

Beside a folder lies a file, `FOLDER.owner`, that its owner keeps locked. The lock ends with the process, however that
ends, and whatever other process gets its number; so a folder whose lock can be had has no owner any more. One without
such a file is nobody's to delete: it may be of a server that has loaded a published model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on Windows, where nothing is deleted then
    fcntl = None  # type: ignore[assignment]

PREFIX = "compile-stage-"
PART_PREFIX = ".part-"
"""Of what is being written beside its final place."""

_OWNER = ".owner"  # what follows the folder's name
_left_alone: list[threading.Thread] = []


def leave_alone(thread: threading.Thread) -> None:
    """Note a thread that nobody waits for any more, such as a download when the run is interrupted. It may write on in
    a folder that was deleted, and make it again: the file that says whose it is stays then, and the next run deletes
    both."""
    _left_alone.append(thread)


@contextmanager
def temporary_folder(kind: str = "", place: Path | None = None) -> Iterator[Path]:
    """A folder that ends with the context.

    Args:
        kind: A word for its name, for people who look there.
        place: The folder to make it in; TMPDIR when None.
    """
    with _owned(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-" if kind else PREFIX, dir=place))) as folder:
        yield folder


@contextmanager
def part_folder(place: Path) -> Iterator[Path]:
    """A folder below `place` in which something is made that is then renamed to its place."""
    with _owned(Path(tempfile.mkdtemp(prefix=PART_PREFIX, dir=place))) as folder:
        yield folder


def remove_leftovers(place: Path | None = None) -> int:
    """Delete the folders below `place` whose owners have ended.

    Args:
        place: What was `part_folder`'s or `temporary_folder`'s; TMPDIR when None.

    Returns:
        How many there were.
    """
    prefix, removed = PREFIX if place is None else "", 0
    for owner in (place or Path(tempfile.gettempdir())).glob(f"{prefix}*{_OWNER}"):
        if fcntl is None:
            break
        try:
            descriptor = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # another user's, or deleted meanwhile
            continue
        with _closing(descriptor):
            if os.fstat(descriptor).st_uid != os.getuid():
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it lives
                continue
            remove_owned(owner.with_name(owner.name.removesuffix(_OWNER)))
            removed += 1
    return removed


def remove_owned(folder: Path) -> None:
    """Delete a folder and the file that says who owns it, where they can be deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.with_name(folder.name + _OWNER).unlink(missing_ok=True)


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _unlink_unless_written_to(owner: Path) -> None:
    if not any(thread.is_alive() for thread in _left_alone):
        owner.unlink(missing_ok=True)


@contextmanager
def _owned(folder: Path) -> Iterator[Path]:
    owner = folder.with_name(folder.name + _OWNER)
    with ExitStack() as stack:
        if fcntl is not None:
            # Locked before it has the name that others look for, or one of them could have the lock first.
            descriptor, unnamed = tempfile.mkstemp(prefix=".owner-", dir=folder)
            stack.callback(os.close, descriptor)
            stack.callback(_unlink_unless_written_to, owner)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            Path(unnamed).rename(owner)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)  # called first
        yield folder
