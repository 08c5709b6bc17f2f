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
from compile_stage.core.ports import Needs
from compile_stage.engine.gate import MachineGate
from compile_stage.engine.local import LocalEngine

SHARED, ALONE = Needs(), Needs(exclusive=True)


def spans(path: Path) -> list[tuple[float, float]]:
    found = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
    return [(begin, end) for begin, end in found]


def test_measurement_overlaps_nothing(engine: LocalEngine, tmp_path: Path) -> None:
    """Six jobs at once; the calls of measuring workers overlap no other call, those of compiling ones may."""
    shared, alone = tmp_path / "shared", tmp_path / "alone"

    def job(needs: Needs, path: Path) -> None:
        with engine.worker("job", needs) as worker:
            for _ in range(3):
                worker.call("note_times", path=str(path), seconds=0.03)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(job, [SHARED] * 4 + [ALONE] * 2, [shared] * 4 + [alone] * 2))
    for begin, end in spans(alone):
        others = [span for span in spans(shared) + spans(alone) if span != (begin, end)]
        assert all(other_end <= begin or end <= other_begin for other_begin, other_end in others)
    assert len(spans(alone)) == 6
    assert len(spans(shared)) == 12


def test_measurement_is_not_starved(isolated_home: Path) -> None:
    """Compilations that overlap one another for ever must let a waiting measurement in."""
    gate, stop = MachineGate(isolated_home / "locks"), threading.Event()

    def compile_for_ever() -> None:
        while not stop.is_set():
            with gate.hold(alone=False):
                time.sleep(0.02)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(compile_for_ever)
        try:
            began = time.monotonic()
            for _ in range(3):
                with gate.hold(alone=True):
                    pass
            assert time.monotonic() - began < 20
        finally:
            stop.set()


def test_turns_within_alone(engine: LocalEngine, tmp_path: Path) -> None:
    """A measuring phase keeps the machine between the turns that it gives to its workers, of whatever kind these are."""
    order: list[str] = []
    inside = threading.Event()

    def other() -> None:
        with engine.worker("other", SHARED) as worker:
            inside.wait(30)
            worker.call("echo")
            order.append("other")

    with ThreadPoolExecutor(1) as pool, engine.worker("a", ALONE) as a, engine.worker("b", SHARED) as b:
        end = pool.submit(other)
        with engine.alone():
            inside.set()
            for worker in (a, b, a, b):
                worker.call("note_times", path=str(tmp_path / "t"), seconds=0.03)
                order.append("turn")
        end.result(30)
    assert order == ["turn"] * 4 + ["other"]


def test_two_stages(isolated_home: Path) -> None:
    """Another process that measures keeps ours waiting, and its death lets us in."""
    folder = isolated_home / "locks"
    code = (
        "import sys, time; from pathlib import Path; from compile_stage.engine.gate import MachineGate\n"
        "with MachineGate(Path(sys.argv[1])).hold(alone=True):\n    print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as stage:
        assert stage.stdout is not None
        stage.stdout.readline()
        gate, entered = MachineGate(folder), threading.Event()

        def enter() -> None:
            with gate.hold(alone=False):
                entered.set()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(enter)
            assert not entered.wait(0.2)
            stage.kill()
            assert entered.wait(30)


def test_waiting_does_not_count_as_work(engine: LocalEngine) -> None:
    """A call that waits for a measurement to end has its whole time limit left."""
    held = threading.Event()

    def measure() -> None:
        with engine.alone():
            held.set()
            time.sleep(1.2)

    with ThreadPoolExecutor(1) as pool, engine.worker("test", Needs(timeout_s=1.0)) as worker:
        end = pool.submit(measure)
        held.wait(30)
        assert worker.call("echo", n=1) == {"n": 1}
        end.result(30)


def test_close_wakes_those_who_wait(engine: LocalEngine) -> None:
    def wait() -> None:
        with engine.worker("test", SHARED) as worker:
            worker.call("echo")

    with ThreadPoolExecutor(1) as pool, engine.alone():
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
        MachineGate(tmp_path / "file" / "locks").hold(alone=True),
    ):
        pass
