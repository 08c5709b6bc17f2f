"""Whatever dies, and however, no process is left behind: not even those that hid in a session of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from compile_stage.core.errors import WorkerError
from compile_stage.core.ports import WorkerLimits
from compile_stage.engine.local import LocalEngine

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt the orphans below it")

STAGE = """
import sys, threading
from pathlib import Path
from compile_stage.core.ports import WorkerLimits
from compile_stage.engine.local import LocalEngine
engine = LocalEngine(calls="deeds")
with engine.worker("one", WorkerLimits()) as one, engine.worker("two", WorkerLimits()) as two:
    pids = one.call("spawn", then="nothing")
    two.call("echo")
    print("ready", *pids, flush=True)
    {then}
"""
THEN = {
    "call": "one.call('spin_native')",
    "idle": "threading.Event().wait()",
    "exit": "import os; os._exit(0)",
}


def pids_of(line: str) -> list[int]:
    """The process ids of a line that a word begins."""
    return [int(number) for number in line.split()[1:]]


def gone(pids: list[int], within_s: float = 60.0) -> bool:
    """True when all have ended within that time. A zombie that init has not fetched yet has ended."""
    until = time.monotonic() + within_s
    while any(map(_alive, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stage(then: str, temporary: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A stage of its own that has two workers, one of which has started three processes; and what there is of these."""
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-c", STAGE.format(then=THEN[then])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), process.communicate()[1]
    return process, pids_of(line)


@linux
@pytest.mark.parametrize("then", ["call", "idle"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stage_is_killed(tmp_path: Path, then: str, number: int) -> None:
    """kill -9 gives nobody a chance to clean up, a CI system's SIGTERM neither; Ctrl-C comes while a worker is in
    native code."""
    process, pids = stage(then, tmp_path / "tmp")
    with process:
        workers = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids) == 5
        process.send_signal(number)
        process.communicate(timeout=300)
        assert gone([*workers, *pids])
    until = time.monotonic() + 60
    while (left := list((tmp_path / "tmp").iterdir())) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left  # the private folders, too


@linux
def test_stage_leaves_without_a_word(tmp_path: Path) -> None:
    """os._exit skips every `finally`."""
    process, pids = stage("exit", tmp_path / "tmp")
    with process:
        process.communicate(timeout=300)
        assert gone(pids)


@linux
def test_leaving_the_context(engine: LocalEngine) -> None:
    """Compilers leave servers and daemons behind; a job that is done has none."""
    with engine.worker("test", WorkerLimits()) as worker:
        pids = worker.call("spawn", then="nothing")
        assert not gone(pids, within_s=0.0)
    assert gone(pids, within_s=0.0)  # not soon: by now


@linux
@pytest.mark.parametrize(("then", "kind"), [("segfault", "crash"), ("spin", "timeout")])
def test_worker_dies(engine: LocalEngine, then: str, kind: str) -> None:
    """What a crashed worker started does not go on computing."""
    with engine.worker("test", WorkerLimits(timeout_s=5.0)) as worker:
        with pytest.raises(WorkerError) as caught:
            worker.call("spawn", then=then)
        assert caught.value.kind == kind
        (line,) = (line for line in caught.value.detail.splitlines() if line.startswith("processes "))
        assert gone(pids_of(line), within_s=0.0)


@linux
def test_guard_is_killed(engine: LocalEngine) -> None:
    """The guard itself shot: the kernel ends the worker, and the stage says what it saw."""
    with engine.worker("test", WorkerLimits()) as worker:
        pid = worker.call("process")["pid"]
        shot = threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL))
        shot.start()
        with pytest.raises(WorkerError) as caught:
            worker.call("spin")
        shot.join()
        assert caught.value.kind == "crash"
        assert gone([pid])


def test_workers_do_not_hear_ctrl_c(engine: LocalEngine) -> None:
    """The terminal sends Ctrl-C to the stage's group; a worker in it would die before the stage can say why."""
    with engine.worker("test", WorkerLimits()) as worker:
        pid = worker.call("process")["pid"]
        assert os.getsid(pid) not in (os.getsid(0), os.getsid(worker.pid))
        assert os.getpgid(pid) == pid


INTERRUPTED = """
import os, signal, threading
from compile_stage.core.errors import WorkerError
from compile_stage.core.ports import WorkerLimits
from compile_stage.engine.local import LocalEngine
engine = LocalEngine(calls="deeds")
with engine.worker("test", WorkerLimits()) as worker:
    try:
        worker.call("echo")
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        worker.call("spin")
    except KeyboardInterrupt:
        print("interrupted")
    try:
        worker.call("echo")
    except WorkerError as error:
        print(error.problem)
"""


def test_ctrl_c_during_a_call() -> None:
    """The exception goes through, the worker is ended, and it does not answer the next question with the last one's
    answer.

    In a process of its own: a native library that an earlier test loaded may have put the signal stack of this one
    elsewhere.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == [
        "interrupted",
        "worker 'test' takes no more calls: its last call was interrupted",
    ], done.stderr
