"""Does anything else use the machine while we measure?

A latency that was taken while other processes used the cores says little of the model: two threads that wait for each
other at a barrier, one of them preempted, take twenty times as long. Rounds are kept or dropped by what others used of
the machine, never by the latencies themselves, so that dropping favours no candidate.

What counts is CPU time, not the load average: that is a mean over the last minute, and holds our own threads too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from compile_stage.core.control_groups import cpu_limit, held_back_s
from compile_stage.core.environment import available_cores
from compile_stage.core.records import record

SLACK_CORES = 0.25
"""What others may use beyond the cores that we leave idle. The kernel counts in hundredths of a second for each
process, so over half a second less than this can't be told apart from nothing."""

QUIET_WINDOW_S = 0.25
"""So long is looked at to say that the machine is quiet."""

_HELD_BACK_SHARE = 0.01
"""Of the time for measuring: less is said to nobody."""

WAIT_SHARE, WAIT_S = 0.2, 10.0
"""A wait for other processes takes at most this share of the time for measuring, and at most so many seconds."""


@record
class Usage:
    """CPU seconds used so far, on the CPUs that this process may use.

    Attributes:
        machine_s: By everybody, time that a hypervisor took away included.
        own_s: By this process with its descendants.
        at_s: When it was read (`time.monotonic`).
        stolen_s: The part of `machine_s` that a hypervisor gave to other virtual machines.
        held_back_s: For which the kernel stopped processes of this container, since it had used up its CPU limit.
    """

    machine_s: float
    own_s: float
    at_s: float
    stolen_s: float = 0.0
    held_back_s: float = 0.0


def usage() -> Usage:
    """Read the counters; about a millisecond for ten processes."""
    machine_s = stolen_s = own_s = 0.0
    for cpu in _our_cpus():
        idle = cpu.idle + getattr(cpu, "iowait", 0.0)
        guests = getattr(cpu, "guest", 0.0) + getattr(cpu, "guest_nice", 0.0)  # they are part of user and nice
        machine_s += sum(cpu) - idle - guests
        stolen_s += getattr(cpu, "steal", 0.0)
    process = psutil.Process()
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            own_s += times.user + times.system
    return Usage(machine_s=machine_s, own_s=own_s, at_s=time.monotonic(), stolen_s=stolen_s, held_back_s=held_back_s())


def foreign_cores(before: Usage, after: Usage) -> float:
    """How many cores others used between the two readings."""
    seconds = after.at_s - before.at_s
    foreign = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return max(0.0, foreign / seconds) if seconds > 0 else 0.0


def is_too_much(foreign: float, threads: int, cores: int | None = None) -> bool:
    """True when that many cores are more than a model of so many threads leaves idle."""
    idle = (available_cores() if cores is None else cores) - threads
    return foreign > max(0, idle) + SLACK_CORES


def disturbed(before: Usage, after: Usage, threads: int, cores: int | None = None) -> bool:
    """True when others used more than the cores that a model of so many threads leaves idle."""
    return is_too_much(foreign_cores(before, after), threads, cores)


def wait_until_quiet(
    threads: int,
    max_seconds: float,
    *,
    on_wait: Callable[[float], object] = lambda foreign: None,
    read: Callable[[], Usage] | None = None,
    sleep: Callable[[float], object] = time.sleep,
    cores: int | None = None,
) -> float:
    """Wait until others leave the cores that so many threads need, or the time is up; returns the seconds waited.

    Args:
        on_wait: Called once with the cores that others use, when they use too much.
        read, sleep: For tests.
    """
    read = read or usage
    began = before = read()
    is_first = True
    while (left := max_seconds - (before.at_s - began.at_s)) > 0:
        sleep(min(QUIET_WINDOW_S, left))
        after = read()
        if not disturbed(before, after, threads, cores):
            return after.at_s - began.at_s
        if is_first:
            on_wait(foreign_cores(before, after))
        is_first, before = False, after
    return before.at_s - began.at_s


@dataclass
class Load:
    """What others used over all rounds of a measurement, in core seconds, and for how long a limit held us back."""

    seconds: float = 0.0
    foreign_s: float = 0.0
    stolen_s: float = 0.0
    held_back_s: float = 0.0

    def add(self, before: Usage, after: Usage) -> None:
        """Count one round."""
        seconds = after.at_s - before.at_s
        self.seconds += seconds
        self.foreign_s += foreign_cores(before, after) * seconds
        self.stolen_s += max(0.0, after.stolen_s - before.stolen_s)
        self.held_back_s += max(0.0, after.held_back_s - before.held_back_s)

    def note(self, threads: int, cores: int | None = None) -> str:
        """One sentence for the reports when the machine was busy; empty when it was not."""
        cores = available_cores() if cores is None else cores
        if self.seconds <= 0 or not is_too_much(self.foreign_s / self.seconds, threads, cores):
            return ""
        by_others, stolen = self.foreign_s / self.seconds, self.stolen_s / self.seconds
        taken = f", {stolen:.1f} of them taken by the hypervisor" if stolen >= 0.1 else ""
        return (
            f"The machine was busy while measuring: other processes used {by_others:.1f} of {cores} "
            f"core{'s' if cores > 1 else ''}{taken}; latencies are higher and ratios less certain than on a quiet "
            "machine"
        )

    def limit_note(self) -> str:
        """One sentence for the reports where a container's CPU limit stopped what was measured; empty where it did
        not."""
        if self.held_back_s <= _HELD_BACK_SHARE * self.seconds:
            return ""
        return (
            f"The container's CPU limit, {cpu_limit():.3g} cores, stopped processes for {self.held_back_s:.2g} s in "
            f"{self.seconds:.2g} s of measuring: a median hides such stops, and throughput is lower than it says. "
            "Allow more, or name fewer threads in the target"
        )


def _our_cpus() -> list[Any]:
    """The counters of the CPUs that this process may use: what runs on the others does not disturb."""
    if hasattr(os, "sched_getaffinity"):
        ours, every = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
        if len(ours) < len(every) and max(ours) < len(every):
            return [every[number] for number in sorted(ours)]
    return [psutil.cpu_times()]
