"""Whether the machine was ours is told by what others used of it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from compile_stage.measure.disturbance import (
    QUIET_WINDOW_S,
    Load,
    Usage,
    disturbed,
    foreign_cores,
    usage,
    wait_until_quiet,
)


def reading(machine: float, own: float, at: float) -> Usage:
    return Usage(machine_s=machine, own_s=own, at_s=at)


@pytest.mark.parametrize(
    ("machine", "own", "threads", "cores", "expected"),
    [
        (2.0, 2.0, 2, 2, False),  # all of it was ours
        (2.0, 1.2, 2, 2, True),  # somebody had 0.8 cores of the two that we need
        (2.0, 1.2, 2, 8, False),  # six cores are idle anyway
        (8.0, 1.2, 2, 8, True),
        (1.1, 1.0, 2, 2, False),  # as little as the counters can't tell
    ],
)
def test_what_others_use_beyond_the_idle_cores_disturbs(
    machine: float, own: float, threads: int, cores: int, expected: bool
) -> None:
    """Broken: a neighbour's build would be measured as our model's latency, or a big machine would never be quiet."""
    assert disturbed(reading(10, 5, 100), reading(10 + machine, 5 + own, 101), threads, cores) is expected


def test_readings_at_the_same_moment_say_nothing() -> None:
    """Broken: a division by zero would end the measurement."""
    assert foreign_cores(reading(1, 1, 5), reading(1, 1, 5)) == 0.0


def test_work_of_our_own_children_is_ours() -> None:
    """Broken: the workers' own load would count as a disturbance, and no round would ever be clean."""
    before = usage()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            while psutil.Process(busy.pid).cpu_times().user < 0.3:  # however busy the machine is, it gets there
                time.sleep(0.05)
            after = usage()
        finally:
            busy.kill()
    used = after.own_s - before.own_s
    assert used >= 0.28
    assert after.machine_s - before.machine_s >= used - 0.1


class Machine:
    """Counters of a machine with two cores on which others use so many, one figure for each look."""

    def __init__(self, foreign: list[float], stolen: float = 0.0) -> None:
        self._foreign, self._stolen, self._now = iter(foreign), stolen, reading(0.0, 0.0, 0.0)
        self.slept = 0.0

    def read(self) -> Usage:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        used = self._now.machine_s + next(self._foreign) * seconds
        stolen = self._now.stolen_s + self._stolen * seconds
        self._now = Usage(machine_s=used, own_s=0.0, at_s=self._now.at_s + seconds, stolen_s=stolen)


@pytest.mark.parametrize(
    ("foreign", "max_seconds", "waited", "asked"),
    [
        ([0.0], 5.0, QUIET_WINDOW_S, []),  # quiet: one look
        ([1.3, 1.3, 0.1], 5.0, 3 * QUIET_WINDOW_S, [1.3]),  # a neighbour's build ends
        ([1.3] * 9, 1.0, 1.0, [1.3]),  # it does not end: the time is bounded
        ([], 0.0, 0.0, []),
    ],
)
def test_a_busy_machine_is_waited_for_and_not_for_ever(
    foreign: list[float], max_seconds: float, waited: float, asked: list[float]
) -> None:
    """Broken: a build that ends in a second would spoil the measurement, or one that never ends would stop it."""
    machine, messages = Machine(foreign), []
    found = wait_until_quiet(2, max_seconds, on_wait=messages.append, read=machine.read, sleep=machine.sleep, cores=2)
    assert found == pytest.approx(waited) == machine.slept
    assert messages == pytest.approx(asked)


def test_a_busy_machine_is_told_in_the_reports_and_a_quiet_one_is_not() -> None:
    """Broken: a reader could not know that the figures were taken beside somebody else's build."""
    for foreign, stolen, words in (
        (1.3, 0.0, "other processes used 1.3 of 2 cores;"),
        (1.3, 0.4, "other processes used 1.3 of 2 cores, 0.4 of them taken by the hypervisor;"),
        (0.1, 0.0, ""),
    ):
        machine, load = Machine([foreign] * 3, stolen), Load()
        for _ in range(3):
            before = machine.read()
            machine.sleep(1.0)
            load.add(before, machine.read())
        assert words in load.note(2, cores=2)
        assert bool(words) == bool(load.note(2, cores=2))
    assert Load().note(2, cores=2) == ""


def test_a_cpu_limit_that_stopped_the_models_is_told() -> None:
    """Broken: in a container that may use half a core, a median latency stood in the report without a word, though half
    of the time nothing ran."""
    machine, load = Machine([0.0]), Load()
    before = machine.read()
    machine.sleep(1.0)
    load.add(before, replace(machine.read(), held_back_s=0.4))
    assert "stopped processes for 0.4 s in 1 s of measuring" in load.limit_note()
    assert Load(seconds=1.0, held_back_s=0.001).limit_note() == ""
