"""What a worker holds of its machine, and how a dead one died.

An address-space limit (RLIMIT_AS) would misfire: runtimes reserve tens of gigabytes that they never touch. So the stage
looks at what the worker and everything that it started really hold, several times a second while a call runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from compile_stage.core import control_groups
from compile_stage.core.errors import FailureKind
from compile_stage.core.storage import NO_SPACE_BYTES
from compile_stage.engine.protocol import says_out_of_memory
from compile_stage.engine.usage import descendants_of, own_memory, resident_memory

_FIND_CHILDREN_EVERY_S = 0.5  # where /proc does not name children, it is read whole
_LOOK_AT_DISK_EVERY_S = 2.0
_LOOK_AT_DISK_SHARE = 0.02  # of the time, where there are very many files
_NEAR = 0.8  # of the limit or of the machine's memory: a kill from outside that late is memory's doing


class MemoryWatch:
    """The memory of one worker's process tree.

    Attributes:
        held_bytes: What the tree held when it was last looked at.
    """

    def __init__(self, pid: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._pid = pid
        self._tree: list[psutil.Process] = []
        self._find_again = 0.0

    def excess(self) -> int | None:
        """None while the tree is within its limit, or the bytes that it holds."""
        if time.monotonic() >= self._find_again:
            self.find()
        self.held_bytes = sum(map(resident_memory, self._tree))
        if self.held_bytes <= self.limit_bytes:
            return None
        # Resident pages are counted in each process that shares them, and mapped files are the kernel's to drop. Only
        # now is the exact figure worth its price.
        self.held_bytes = sum(map(own_memory, self._tree))
        return self.held_bytes if self.held_bytes > self.limit_bytes else None

    @property
    def processes(self) -> int:
        """How many the tree consisted of when it was last looked for."""
        return len(self._tree)

    def find(self) -> None:
        """See which processes the tree consists of. Only while its root was not waited for: its id may be another's
        later."""
        self._tree = _tree(self._pid)
        self._find_again = time.monotonic() + _FIND_CHILDREN_EVERY_S

    def kill(self) -> None:
        """End what is left of the tree as last found: for a worker whose guard did not do it."""
        for process in self._tree:
            with contextlib.suppress(psutil.Error):  # psutil knows a reused process id from the one it saw
                process.kill()


class DiskWatch:
    """What lies in a worker's own folders, and so all that it wrote where it can write nowhere else.

    Attributes:
        full: One of them, whose disk had no space left when it was looked at during the call; empty where none was.
    """

    def __init__(self, folders: Sequence[str], limit_bytes: int) -> None:
        self._folders = folders
        self._limit_bytes = limit_bytes
        self._look_again = time.monotonic() + _LOOK_AT_DISK_EVERY_S
        self.full = ""

    def begin(self) -> None:
        """A call begins."""
        self.full = ""

    def look_for_space(self) -> None:
        """See whether there is space left. Takes microseconds."""
        for folder in self._folders:
            with contextlib.suppress(OSError):  # its guard removed it
                if shutil.disk_usage(folder).free < NO_SPACE_BYTES:
                    self.full = folder

    def excess(self) -> int | None:
        """None while the files are within the limit, or their bytes. Looks every few seconds."""
        began = time.monotonic()
        if began < self._look_again:
            return None
        size = sum(map(_bytes_below, self._folders))
        took = time.monotonic() - began
        self._look_again = began + max(_LOOK_AT_DISK_EVERY_S, took / _LOOK_AT_DISK_SHARE)
        return size if size > self._limit_bytes else None


def _bytes_below(folder: str) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it was removed meanwhile
                seen = (Path(place) / name).lstat()
                size += seen.st_blocks * 512 if seen.st_nlink == 1 else 0  # a link's bytes are the stage's own
    return size


def free_memory_bytes() -> int:
    """What new processes can have without pushing others out: of the machine's memory, and of the container's limit
    where there is one."""
    free, left = psutil.virtual_memory().available, control_groups.memory_left_bytes()
    return max(0, free if left is None else min(free, left))


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: in this container, or, where no control group
    counts them, on the machine; 0 where neither is known."""
    if (here := control_groups.oom_kills()) is not None:
        return here
    try:
        for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def name_death(
    returncode: int, *, held_bytes: int, limit_bytes: int, oom_kills: int, log: str
) -> tuple[FailureKind, str]:
    """Kind and words for a worker that ended by itself, or was ended by somebody else than us.

    Args:
        returncode: As `subprocess` gives it: negative is a signal.
        held_bytes: What it held when last looked at.
        limit_bytes: What it might hold.
        oom_kills: How many more out-of-memory kills the kernel counts than when it last answered.
        log: What the worker printed during the call.
    """
    if returncode >= 0:
        return "crash", f"ended the process with exit code {returncode}"
    number = -returncode
    try:
        named = f"killed by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        named = f"killed by signal {number}"
    if number == signal.SIGKILL:
        near = held_bytes >= _NEAR * min(limit_bytes, psutil.virtual_memory().total)
        if oom_kills > 0 or near:
            return "out_of_memory", f"was {named}: the system ran out of memory (it held {gigabytes(held_bytes)})"
    if number == signal.SIGABRT and says_out_of_memory(log):  # an uncaught std::bad_alloc ends in abort()
        return "out_of_memory", f"ran out of memory and aborted: {named}"
    if number == signal.SIGBUS:
        return "crash", f"was {named}, which is what a full disk does to a process that writes into a mapped file"
    return "crash", f"was {named}"


def gigabytes(size: int) -> str:
    """`12.3 GB`, or `300 MB` below one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; found from it, since psutil looks through every process of the machine."""
    found = []
    for each in (pid, *descendants_of(pid)):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            found.append(psutil.Process(each))
    return found
