"""What a worker holds in memory, and how a dead one died.

An address-space limit (RLIMIT_AS) would misfire: runtimes reserve tens of gigabytes that they never touch. So the stage
looks at what the worker and everything that it started really hold, several times a second while a call runs.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import psutil

from compile_stage.core.errors import FailureKind
from compile_stage.engine.protocol import says_out_of_memory

_FIND_CHILDREN_EVERY_S = 0.5  # it reads all of /proc, the sizes of known processes cost microseconds
_CONTROL_GROUP = Path("/sys/fs/cgroup")
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
        self.held_bytes = sum(map(_resident, self._tree))
        if self.held_bytes <= self.limit_bytes:
            return None
        # Resident pages are counted in each process that shares them, and mapped files are the kernel's to drop. Only
        # now is the exact figure worth its price.
        self.held_bytes = sum(map(_own, self._tree))
        return self.held_bytes if self.held_bytes > self.limit_bytes else None

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


def free_memory_bytes() -> int:
    """What new processes can have without pushing others out: of the machine's memory, and of the container's limit
    where there is one."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no limit; the files are there in containers
        limit, used = (int((_CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(kept["inactive_file"]))  # files that were read count as used
    return max(0, free)


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, in any container; 0 where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
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
        oom_kills: How many more out-of-memory kills the kernel counts than before the call.
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
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _own(process: psutil.Process) -> int:
    """Memory that would be free without the process: anonymous and shared memory, divided among those that share it,
    and swap."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return _resident(process)
    sizes = {words[0]: int(words[1]) * 1024 for line in text.splitlines()[1:] if len(words := line.split()) == 3}
    if "Pss_Anon:" not in sizes:  # Linux before 5.3
        return sizes.get("Pss:", 0)
    return sizes["Pss_Anon:"] + sizes["Pss_Shmem:"] + sizes.get("SwapPss:", 0)
