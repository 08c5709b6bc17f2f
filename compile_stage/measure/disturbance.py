"""Was the machine ours while we measured?

A latency that was taken while somebody else used the cores says nothing of the model: two threads that wait for each
other in a barrier, one of them preempted, take twenty times as long. Rounds are kept or dropped by what others used of
the machine, never by the latencies themselves, so that dropping favours no answer.
"""

from __future__ import annotations

import contextlib
import time

import psutil

from compile_stage.core.environment import available_cores
from compile_stage.core.records import record

SLACK_CORES = 0.25
"""What others may use beyond the cores that we leave idle. The kernel counts in hundredths of a second for each
process, so over half a second less than this can't be told from nothing."""


@record
class Usage:
    """CPU seconds used so far: by the whole machine (time that a hypervisor took away included), and by this process
    with its descendants."""

    machine_s: float
    own_s: float
    at_s: float


def usage() -> Usage:
    """Read the counters; about a millisecond for ten processes."""
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # they are part of user and nice
    own, process = 0.0, psutil.Process()
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            own += times.user + times.system
    return Usage(machine_s=sum(machine) - idle - guests, own_s=own, at_s=time.monotonic())


def foreign_cores(before: Usage, after: Usage) -> float:
    """How many cores others used between the two readings."""
    seconds = after.at_s - before.at_s
    foreign = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return max(0.0, foreign / seconds) if seconds > 0 else 0.0


def disturbed(before: Usage, after: Usage, threads: int, cores: int | None = None) -> bool:
    """True when others used more than the cores that a model of so many threads leaves idle."""
    idle = (available_cores() if cores is None else cores) - threads
    return foreign_cores(before, after) > max(0, idle) + SLACK_CORES
