"""Resident memory of processes, in bytes."""

from __future__ import annotations

import sys
from pathlib import Path

SAME_MEMORY = 1.01
"""Two runs of one process differ by about a hundredth in resident memory: closer than that, nothing is claimed."""


def peak_rss_bytes() -> int:
    """The highest resident size that this process ever had."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows, where the stage does not run

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
