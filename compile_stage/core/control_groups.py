"""What the kernel's control groups allow this process: a container's limits, and those of a service or a batch job.

A process's group, and each group around it, may have a limit of its own. In a container `/sys/fs/cgroup` often is the
own group, and the path that the kernel names lies outside of it; so that folder is always looked at too.
Without control groups, as on other systems, nothing is limited.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from compile_stage.core.environment import available_cores

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_left_bytes() -> int | None:
    """What may still be taken before a limit is reached; None without one. Files that were read count as used, but the
    kernel lets them go."""
    left = []
    for group in _groups("memory"):
        for limit, used, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no limit
                allowed, taken = (int(_read(group / name)) for name in (limit, used))
                left.append(allowed - taken + int(_words(group / "memory.stat")[idle]))
    return min(left, default=None)


def oom_kills() -> int | None:
    """How many processes of the group the kernel has killed for want of memory, the group's or the machine's; None
    where it does not say."""
    for group in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                return int(_words(group / name)["oom_kill"])
    return None


def cpu_limit() -> float:
    """How many cores' time may be used on average, such as 0.5; infinite without a limit."""
    limits = [math.inf]
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, _read(group / "cpu.max").split())  # "max" is no limit
            limits.append(quota / period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int(_read(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
            limits += [quota / period] if quota > 0 else []
    return min(limits)


def cores_to_fill() -> int:
    """How many threads or processes can compute at once without being stopped for it: the cores that this process may
    run on, or as many as its limit is worth; at least 1."""
    return max(1, int(min(available_cores(), cpu_limit())))


def held_back_s() -> float:
    """Seconds for which processes of the group were stopped since they had used up their limit, so far; 0 without one.
    Each core counts for itself."""
    seconds = [0.0]
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            stat = _words(group / "cpu.stat")
            seconds.append(int(stat.get("throttled_usec", 0)) / 1e6 + int(stat.get("throttled_time", 0)) / 1e9)
    return max(seconds)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it, where this controller's files are."""
    for line in _lines(_OWN):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root in [_ROOT / controllers, _ROOT / controller] if controllers else [_ROOT, _ROOT / "unified"]:
            own = root / path.lstrip("/")
            if root.is_dir() and ".." not in own.parts:  # the group of a process from outside of the namespace
                yield from (group for group in (own, *own.parents) if group == root or root in group.parents)
                break


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [line for line in _read(file).splitlines() if line.count(":") >= 2]
    return []


def _words(file: Path) -> dict[str, str]:
    return dict(line.split() for line in _read(file).splitlines())


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")
