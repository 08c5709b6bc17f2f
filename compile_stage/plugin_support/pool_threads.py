"""A core of its own for each thread of a runtime's pool, and for the thread that calls.

The threads of some pools sleep soon after a call. The kernel may wake such a thread on the core of the thread that
calls, though another is idle (in virtual machines it often takes an idle core for one that is not there), and they then
share it for as long as calls follow each other: a small network on two threads takes twice as long, on average, as on
two cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compile_stage.core.environment import usable_cores

_TASKS = Path("/proc/self/task")


class PoolCores:
    """The cores that a pool's threads were pinned to; none at first."""

    def __init__(self) -> None:
        self._cores: frozenset[int] = frozenset()
        self._here = _core_here() if sys.platform == "linux" else None

    def leave(self) -> None:
        """Have the calling thread go on beside the pool's cores, if it runs on one of them. It may return later."""
        if not self._cores or self._here is None or self._here() not in self._cores:
            return  # the usual case, which takes 0.2 us
        with contextlib.suppress(OSError):
            allowed = os.sched_getaffinity(0)
            if others := allowed - self._cores:
                os.sched_setaffinity(0, others)
                os.sched_setaffinity(0, allowed)

    @contextmanager
    def pinned(self, threads: int, *, wanted: bool = True) -> Iterator[None]:
        """Pin the threads of a pool that is made within this context to a core each.

        Nothing is pinned where the process may use more cores than the pool has threads, since two processes would pin
        theirs to the same few; or fewer; or where the system can't say or do it. Nor where another number of threads
        was started meanwhile than a pool has: they may be somebody else's.

        Args:
            threads: Of the pool, with the one that calls.
            wanted: False to leave all as it is.
        """
        cores = usable_cores()
        if not wanted or threads < 2 or len(cores) != threads:
            yield
            return
        before = _tasks()
        yield
        made = sorted(_tasks() - before)
        if len(made) != threads - 1:
            return
        with contextlib.suppress(OSError):
            for task, core in zip(made, cores[1:], strict=True):
                os.sched_setaffinity(task, {core})
                self._cores |= {core}


def _tasks() -> set[int]:
    try:
        return {int(task.name) for task in _TASKS.iterdir()}
    except OSError:
        return set()


def _core_here() -> Callable[[], int] | None:
    """The C library's `sched_getcpu`: Python's own comes with 3.13 at the earliest."""
    try:
        found = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (), ctypes.c_int
    return found
