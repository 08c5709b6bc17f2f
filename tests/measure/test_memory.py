"""Resident memory of real processes."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from compile_stage.core.ports import WorkerMemory
from compile_stage.measure.memory import held_now_bytes, peak_rss_bytes
from compile_stage.measure.participant import Participant

if TYPE_CHECKING:
    from compile_stage.core.ports import Worker


def test_the_peak_remembers_what_was_freed() -> None:
    size = peak_rss_bytes() + 30_000_000
    block = np.ones(size, dtype=np.uint8)
    del block
    assert peak_rss_bytes() >= size


def test_what_is_held_now_forgets_what_was_freed() -> None:
    """Broken: memory that a runtime gives back would count as a leak, or a leak would not be seen."""
    # Not by the allocator, which may keep what is freed: that depends on what ran in this process before.
    with mmap.mmap(-1, 100_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * len(block))
        held = held_now_bytes(os.getpid())
    assert 0 < held_now_bytes(os.getpid()) <= held - 90_000_000


class _Worker:
    """Holds what it is told to."""

    def __init__(self, now: WorkerMemory) -> None:
        self._now = now

    def memory(self) -> WorkerMemory:
        return self._now


@pytest.mark.parametrize(
    ("peak", "held", "counted"),
    [
        (500, 480, 300),  # it leaks
        (500, 100, 260),  # it takes as much in each later call, and gives it back: files may be a part
        (170, 150, 0),  # what measuring takes
        (230, 100, 0),  # samples that were read
    ],
)
def test_what_a_process_takes_in_later_calls_counts(peak: int, held: int, counted: int) -> None:
    """Broken: an artifact that leaks would pass a limit on memory by what it holds after its first calls."""
    million = 1_000_000
    first = WorkerMemory(peak_bytes=120 * million, held_bytes=80 * million)
    now = WorkerMemory(peak_bytes=peak * million, held_bytes=held * million)
    runner = Participant(cast("Worker", _Worker(now)), 0.1, first)
    for _ in range(2):
        runner.look_at_memory(lambda: (100 * million, 20 * million))
    assert runner.peak_memory_bytes == (120 + counted) * million
