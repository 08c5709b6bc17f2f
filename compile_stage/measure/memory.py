"""Resident memory of processes, in bytes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

SAME_MEMORY = 1.01
"""Two runs of one process differ by about a hundredth in resident memory: closer than that, nothing is claimed."""


def held_now_bytes(pid: int) -> int:
    """What a process holds of its own, without files that are mapped; 0 of one that has ended, and without `/proc`."""
    return sum(_status_bytes(pid, "RssAnon:", "RssShmem:"))


def peak_rss_bytes(pid: int | None = None) -> int:
    """The highest resident size that a process ever had; of one that has ended, 0.

    Args:
        pid: None for this process. Where there is no `/proc`, another process's size now.
    """
    if highest := _status_bytes(pid or "self", "VmHWM:"):
        return highest[0]
    if pid is not None:
        import psutil

        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
        return 0
    import resource  # not on Windows, where the stage does not run

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def _status_bytes(pid: int | str, *fields: str) -> list[int]:
    """Sizes that the kernel tells of a process; none of one that has ended, and without `/proc`."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return [int(line.split()[1]) * 1024 for line in lines if line.startswith(fields)]
    return []
