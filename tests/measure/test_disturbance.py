"""Whether the machine was ours is told by what others used of it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from compile_stage.measure.disturbance import Usage, disturbed, foreign_cores, usage


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
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.0)
        after = usage()
        busy.kill()
    used = after.own_s - before.own_s
    assert used > 0.2 * (time.monotonic() - began)  # however busy the machine is, it got some of a core
    assert after.machine_s - before.machine_s >= used - 0.1
