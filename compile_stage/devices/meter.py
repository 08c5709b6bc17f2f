"""What an agent reads of its device: what processes used, how busy it is, and a lock that ends with its owner. Each
answers None, or nothing, where the system does not tell."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from compile_stage.core.environment import available_cores
from compile_stage.core.ports import WorkerMemory, WorkerUsage
from compile_stage.engine import usage
from compile_stage.measure.memory import peak_rss_bytes

_STAT = Path("/proc/stat")
_COUNTS = Path("/proc/self/stat").exists() and _STAT.exists()


def usage_of(pid: int) -> WorkerUsage | None:
    """What a process and its descendants used, by the kernel's counters."""
    return usage.usage_of(pid) if _COUNTS else None


def children_of(pid: int) -> list[int]:
    """All descendants of a process."""
    return usage.descendants_of(pid) if _COUNTS else []


def memory_of(pid: int) -> WorkerMemory | None:
    """The peak of a process, and of those that it started: pages that they share are counted in each."""
    if not _COUNTS:
        return None
    others = [peak_rss_bytes(child) for child in usage.descendants_of(pid)]
    return WorkerMemory(peak_bytes=peak_rss_bytes(pid), others_bytes=sum(others), others=len(others))


def machine_usage() -> dict[str, float]:
    """As `measure.disturbance.Usage`: CPU seconds of the CPUs that this process may use, by everybody, and by this
    process with its descendants. Where nothing can be read both are 0, so that nobody seems to disturb."""
    if not _COUNTS or sys.platform == "win32":
        return {"machine_s": 0.0, "own_s": 0.0, "at_s": time.monotonic(), "stolen_s": 0.0}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    machine = stolen = 0
    for fields in _our_cpus():
        user, nice, system, _, _, *more = [*fields, *(0,) * (10 - len(fields))]
        irq, softirq, steal, guest, guest_nice = more[:5]
        del guest, guest_nice  # they are part of user and nice
        machine += user + nice + system + irq + softirq + steal
        stolen += steal
    own = usage.usage_of(os.getpid())
    return {"machine_s": machine * tick_s, "own_s": own.cpu_s, "at_s": time.monotonic(), "stolen_s": stolen * tick_s}


def lock_of(path: Path) -> IO[bytes] | None:
    """The open file, where its lock could be had; None while another process has it. Where the system has no such locks
    it is had by everybody."""
    file = path.open("a+b")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return file
    except OSError:
        file.close()
        return None
    return file


def own_usage() -> dict[str, Any]:
    """A worker's own word, for systems where the agent can't look."""
    return {"cpu_s": time.process_time(), "peak_bytes": peak_rss_bytes()} if not _COUNTS else {}


def _our_cpus() -> list[list[int]]:
    lines = [line.split() for line in _STAT.read_text(encoding="utf-8").splitlines() if line.startswith("cpu")]
    each = {words[0][3:]: [int(word) for word in words[1:]] for words in lines}
    ours = set(range(available_cores()))
    if sys.platform == "linux":
        ours = os.sched_getaffinity(0)
    if len(ours) < len(each) - 1 and all(str(number) in each for number in ours):
        return [each[str(number)] for number in sorted(ours)]
    return [each[""]]
