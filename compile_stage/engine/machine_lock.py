"""Compilations run side by side, measurements alone on the machine: a lock with two ways to hold it.

The lock is two files, held with flock(2), so it spans threads, stages and crashes: the kernel lets go of what a dead
process held. A call holds `machine`, shared or alone, for as long as it runs. It first passes `turn`, where one that
wants to be alone keeps newcomers out while it waits; otherwise compilations that overlap one another could keep a
measurement waiting for ever. Everybody takes `turn` before `machine` and lets go of it then, so nobody waits for
somebody who waits for them.
"""

from __future__ import annotations

import fcntl
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from compile_stage.core.errors import UsageError, WorkerError

_alone: ContextVar[MachineLock | None] = ContextVar("alone", default=None)
"""The lock by which this context has the machine alone."""

_PAUSE_S = (0.001, 0.05)  # first and longest between two attempts


class MachineLock:
    """Admission to this machine, per thread; a thread that is given the context of one that has the machine alone
    (`contextvars.copy_context`) has it too. Files are below `folder`, one pair per host, since a cache may be on a
    shared disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shut = threading.Event()

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[None]:
        """Wait until the machine may be used, alone or together with others, and hold it so.

        Within a hold that is alone, further holds of the same context pass at once.

        Raises:
            WorkerError: The lock was shut while we waited.
            UsageError: The folder can't hold locks.
        """
        if _alone.get() is self:
            yield
            return
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        turn = self._lock("turn", kind)
        try:
            machine = self._lock("machine", kind)
        finally:
            os.close(turn)
        before = _alone.get()
        _alone.set(self if exclusive else before)
        try:
            yield
        finally:
            _alone.set(before)
            os.close(machine)

    def shut(self) -> None:
        """Send away everybody who waits, and everybody who comes."""
        self._shut.set()

    def _lock(self, name: str, kind: int) -> int:
        path = self._folder / f"{platform.node() or 'host'}-{name}.lock"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _no_locks(path, error) from error
        try:
            pause = _PAUSE_S[0]
            while not self._shut.is_set():
                try:
                    # Not a blocking flock: a thread in one can be woken neither by Ctrl-C nor by `shut`.
                    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._shut.wait(pause)
                    pause = min(2 * pause, _PAUSE_S[1])
                else:
                    return descriptor
            raise WorkerError("crash", "the engine was closed while the call waited for its turn on this machine")
        except OSError as error:
            os.close(descriptor)
            raise _no_locks(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise


def _no_locks(path: Path, error: OSError) -> UsageError:
    fix = "set COMPILE_STAGE_CACHE to a folder on a local disk that you may write to"
    return UsageError(f"no lock can be held in the cache folder: {error.strerror}", fix=fix, where=str(path))
