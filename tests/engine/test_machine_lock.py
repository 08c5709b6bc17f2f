"""Measurements are alone on the machine, across threads and stages, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compile_stage.core.errors import UsageError, WorkerError
from compile_stage.core.ports import WorkerLimits
from compile_stage.engine.local import LocalEngine
from compile_stage.engine.machine_lock import MachineLock

SHARED, ALONE = WorkerLimits(), WorkerLimits(exclusive=True)


def test_measurement_overlaps_nothing(engine: LocalEngine) -> None:
    """Six jobs at once; the calls of measuring workers overlap no other call, those of compiling ones may."""

    def job(limits: WorkerLimits) -> list[list[float]]:
        with engine.worker("job", limits) as worker:
            return [worker.call("note_times", seconds=0.03) for _ in range(3)]

    with ThreadPoolExecutor(6) as pool:
        spans = list(pool.map(job, [SHARED] * 4 + [ALONE] * 2))
    shared, alone = ([span for of_job in jobs for span in of_job] for jobs in (spans[:4], spans[4:]))
    for begin, end in alone:
        others = [span for span in shared + alone if span != [begin, end]]
        assert all(other_end <= begin or end <= other_begin for other_begin, other_end in others)
    assert len(alone) == 6
    assert len(shared) == 12


def test_measurement_is_not_starved(isolated_home: Path) -> None:
    """Compilations that overlap one another for ever must let a waiting measurement in."""
    lock, stop = MachineLock(isolated_home / "locks"), threading.Event()

    def compile_for_ever() -> None:
        while not stop.is_set():
            with lock.hold(exclusive=False):
                time.sleep(0.02)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(compile_for_ever)
        try:
            began = time.monotonic()
            for _ in range(3):
                with lock.hold(exclusive=True):
                    pass
            assert time.monotonic() - began < 20
        finally:
            stop.set()


def test_turns_within_alone(engine: LocalEngine) -> None:
    """A measuring phase keeps the machine between the turns that it gives to its workers, of whatever kind these
    are."""
    order: list[str] = []
    inside = threading.Event()

    def other() -> None:
        with engine.worker("other", SHARED) as worker:
            inside.wait(30)
            worker.call("echo")
            order.append("other")

    with ThreadPoolExecutor(1) as pool, engine.worker("a", ALONE) as a, engine.worker("b", SHARED) as b:
        end = pool.submit(other)
        with engine.exclusive():
            inside.set()
            for worker in (a, b, a, b):
                worker.call("note_times", seconds=0.03)
                order.append("turn")
        end.result(30)
    assert order == ["turn"] * 4 + ["other"]


def test_two_stages(isolated_home: Path) -> None:
    """Another process that measures keeps ours waiting, and its death lets us in."""
    folder = isolated_home / "locks"
    code = (
        "import sys, time; from pathlib import Path; from compile_stage.engine.machine_lock import MachineLock\n"
        "with MachineLock(Path(sys.argv[1])).hold(exclusive=True):\n    print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as stage:
        assert stage.stdout is not None
        stage.stdout.readline()
        lock, entered = MachineLock(folder), threading.Event()

        def enter() -> None:
            with lock.hold(exclusive=False):
                entered.set()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(enter)
            assert not entered.wait(0.2)
            stage.kill()
            assert entered.wait(30)


def test_waiting_does_not_count_as_work(engine: LocalEngine) -> None:
    """Broken: a call that waits for a measurement to end would have less than its time limit left. A call by itself
    takes some of that on a busy machine, so it is seconds."""
    held = threading.Event()

    def measure() -> None:
        with engine.exclusive():
            held.set()
            time.sleep(5.5)

    with ThreadPoolExecutor(1) as pool, engine.worker("test", WorkerLimits(timeout_s=5.0)) as worker:
        end = pool.submit(measure)
        held.wait(30)
        assert worker.call("echo", n=1) == {"n": 1}
        end.result(30)


def test_close_wakes_those_who_wait(engine: LocalEngine) -> None:
    def wait() -> None:
        with engine.worker("test", SHARED) as worker:
            worker.call("echo")

    with ThreadPoolExecutor(1) as pool, engine.exclusive():
        end = pool.submit(wait)
        time.sleep(0.2)
        assert not end.done()
        engine.close()
        with pytest.raises(WorkerError, match="the engine was closed while the call waited for its turn"):
            end.result(30)


def test_folder_that_holds_no_locks(tmp_path: Path) -> None:
    """A cache folder that can't be written to is the user's to mend, in one sentence."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="COMPILE_STAGE_CACHE"),
        MachineLock(tmp_path / "file" / "locks").hold(exclusive=True),
    ):
        pass
