"""What the kernel says of a worker, whatever the worker says of itself. Nothing here depends on how busy the machine
is."""

from __future__ import annotations

import pytest

from compile_stage.core.errors import WorkerError
from compile_stage.core.ports import WorkerLimits
from compile_stage.engine.local import LocalEngine
from compile_stage.measure.participant import threads_that_ran, waited_between

LIMITS = WorkerLimits(timeout_s=60.0)


def test_a_metered_call_has_the_time_that_all_threads_ran_or_waited(engine: LocalEngine) -> None:
    """Broken: a runtime that takes more threads than it may would look like one that keeps to the policy."""
    with engine.worker("test", LIMITS) as worker:
        worker.call("echo", n=0)  # the first call imports what it needs, which is no idling
        idle = worker.metered("echo", n=1)
        assert idle.value == {"n": 1}
        busy = worker.metered("compute", seconds=0.1, threads=4)
    ran = busy.after.cpu_s - busy.before.cpu_s
    wanted = ran + waited_between(busy.before, busy.after)
    assert busy.wall_s > 0.09
    assert 0.36 <= ran <= wanted  # of all four threads, less the kernel's ticks
    assert threads_that_ran(busy.before.threads, busy.after.threads) >= 4
    assert idle.after.cpu_s - idle.before.cpu_s < ran
    assert busy.before.at_s <= busy.after.at_s


def test_cpu_time_of_processes_that_ended_is_counted(engine: LocalEngine) -> None:
    """Broken: what computes in a child process would seem to compute nothing."""
    with engine.worker("test", LIMITS) as worker:
        call = worker.metered("compute_in_child", seconds=0.2)
    assert call.after.cpu_s - call.before.cpu_s >= 0.1


def test_memory_in_a_child_is_seen_apart(engine: LocalEngine) -> None:
    """Broken: an artifact could hold its weights in another process, and pass a limit on memory."""
    with engine.worker("test", LIMITS) as worker:
        worker.call("echo")
        alone = worker.memory()
        worker.call("hold_in_child", size=100_000_000)
        both = worker.memory()
    assert (alone.others, alone.others_bytes) == (0, 0)
    assert alone.peak_bytes > 5_000_000
    assert both.others == 1
    assert both.peak_bytes + both.others_bytes >= 100_000_000 + 5_000_000


def test_what_children_freed_before_anybody_looked_counts(engine: LocalEngine) -> None:
    """Broken: an artifact that computes in two processes of its own takes 200 MB in each call, and passes a limit of
    150."""
    with engine.worker("test", LIMITS) as worker:
        for _ in range(2):
            worker.call("hold_in_child", size=100_000_000, freed=True)
        memory = worker.memory()
    assert memory.others == 2
    assert 200_000_000 < memory.peak_bytes + memory.others_bytes < 300_000_000


def test_a_worker_that_is_gone_holds_nothing_and_says_so(engine: LocalEngine) -> None:
    """Broken: a crash while it was measured would be a peak of 0 bytes."""
    with engine.worker("test", LIMITS) as worker:
        with pytest.raises(WorkerError):
            worker.call("exit", status=3)
        with pytest.raises(WorkerError, match="holds nothing any more"):
            worker.memory()
