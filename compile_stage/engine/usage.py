"""What a worker and all that it started have used, read from the kernel: nothing that runs in the worker has a say in
it.

On Linux the counters of `/proc` are read, in about 0.1 ms for a worker of ten threads; elsewhere psutil gives the CPU
time of processes, and no threads. On a device (`compile_stage.devices`) there is no psutil: it is imported where it is
needed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.ports import WorkerMemory, WorkerUsage
from compile_stage.measure.memory import held_now_bytes, peak_rss_bytes

if TYPE_CHECKING:
    import psutil

_PROC = Path("/proc")
_PART_BYTES = 4096
if sys.platform == "win32":
    _TICK_S = 0.0  # there is no /proc either
else:
    _TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def usage_of(guard: int) -> WorkerUsage:
    """CPU time of all processes below a worker's guard, and of the guard, which uses next to none.

    A process counts what its ended threads have used, in hundredths of a second, and what its ended children have used
    once it has waited for them; the guard waits for whose parents are gone.
    """
    cpu_s = 0.0
    threads: dict[str, float] = {}
    waits: dict[str, float] = {}
    for pid in (guard, *descendants_of(guard)):
        own: dict[str, float] = {}
        for thread, ran_s, waited_s in _threads(pid):
            own[thread], waits[thread] = ran_s, waited_s
        threads |= own
        with contextlib.suppress(OSError, ValueError, IndexError):
            process_s, children_s = _process_times(pid)
            cpu_s += max(process_s, sum(own.values())) + children_s
    return WorkerUsage(at_s=time.monotonic(), cpu_s=cpu_s, threads=threads, waits=waits)


def waited_by_this_thread() -> float:
    """Seconds that the calling thread was ready to run and had no core; 0 where the kernel does not count them."""
    try:
        return int((_PROC / "thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def memory_of(guard: int) -> WorkerMemory:
    """What the processes below a worker's guard hold, and held at most; zeros when there are none any more."""
    peaks = {pid: peak_rss_bytes(pid) for pid in descendants_of(guard)}
    if not peaks:
        return WorkerMemory(peak_bytes=0)
    largest = max(peaks, key=lambda pid: peaks[pid])
    others = [pid for pid in peaks if pid != largest]
    held = sum(map(_most_own_memory, others))
    return WorkerMemory(
        peak_bytes=peaks[largest], others_bytes=held, others=len(others), held_bytes=held_now_bytes(largest)
    )


def _most_own_memory(pid: int) -> int:
    """What a process holds of its own, and what it freed since its peak: nobody looks while it computes."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return own_memory(process) + max(0, peak_rss_bytes(pid) - int(process.memory_info().rss))
    return 0


def own_memory(process: psutil.Process) -> int:
    """Memory that would be free without the process: anonymous and shared memory, divided among those that share it,
    and swap."""
    try:
        text = (_PROC / f"{process.pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return resident_memory(process)
    sizes = {words[0]: int(words[1]) * 1024 for line in text.splitlines()[1:] if len(words := line.split()) == 3}
    if "Pss_Anon:" not in sizes:  # Linux before 5.3
        return sizes.get("Pss:", 0)
    return sizes["Pss_Anon:"] + sizes["Pss_Shmem:"] + sizes.get("SwapPss:", 0)


def resident_memory(process: psutil.Process) -> int:
    """Bytes, pages that it shares with others among them; 0 where the process has ended."""
    import psutil

    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def descendants_of(pid: int) -> list[int]:
    """All descendants of a process."""
    if not (_PROC / "self/stat").exists():
        import psutil

        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            return []
    if not (_PROC / "self/task" / str(os.getpid()) / "children").exists():
        return _by_their_parents(pid)  # a kernel without that file
    below: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"{_PROC}/{parent}/task"):  # noqa: PTH208 - names are enough, and faster
                with contextlib.suppress(OSError):
                    waiting += map(int, _read(f"{_PROC}/{parent}/task/{task}/children").split())
        if parent != pid:
            below.append(parent)
    return below


def _read(path: str) -> bytes:
    """A file of /proc. These are read a thousand times a second while a worker is timed: `Path.read_text` takes three
    times as long."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = [os.read(descriptor, _PART_BYTES)]
        while parts[-1]:  # the kernel gives a page at a time
            parts.append(os.read(descriptor, _PART_BYTES))
    finally:
        os.close(descriptor)
    return b"".join(parts)


def _by_their_parents(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in _PROC.iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(process.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def _threads(pid: int) -> Iterator[tuple[str, float, float]]:
    """Each thread with the seconds that it has run, and that it has waited for a core, to the nanosecond."""
    try:
        tasks = os.listdir(f"{_PROC}/{pid}/task")  # noqa: PTH208 - as above
    except OSError:
        return
    for task in tasks:
        with contextlib.suppress(OSError, ValueError, IndexError):
            ran, waited, _ = map(int, _read(f"{_PROC}/{pid}/task/{task}/schedstat").split())
            yield f"{pid}:{task}", ran / 1e9, waited / 1e9


def _process_times(pid: int) -> tuple[float, float]:
    """CPU seconds of a process with all its threads, and of its children that ended."""
    stat = _PROC / f"{pid}/stat"
    if not (_PROC / "self/stat").exists():
        import psutil

        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error as error:
            raise OSError(f"process {pid} is gone") from error
        return times.user + times.system, times.children_user + times.children_system
    fields = _read(str(stat)).rpartition(b")")[2].split()  # the name before it may hold anything
    user, system, children_user, children_system = (int(fields[number]) for number in (11, 12, 13, 14))
    return (user + system) * _TICK_S, (children_user + children_system) * _TICK_S
