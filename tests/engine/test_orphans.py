"""Whatever dies, and however, no process is left behind: not even those that hid in a session of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from compile_stage.core.errors import WorkerError
from compile_stage.core.ports import Needs
from compile_stage.engine.local import LocalEngine

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt the orphans below it")

STAGE = """
import sys, threading
from pathlib import Path
from compile_stage.core.ports import Needs
from compile_stage.engine.local import LocalEngine
engine = LocalEngine(calls="deeds")
with engine.worker("one", Needs()) as one, engine.worker("two", Needs()) as two:
    one.call("spawn", pids=sys.argv[1], then="nothing")
    two.call("echo")
    print("ready", flush=True)
    {then}
"""
THEN = {
    "call": "one.call('spin_native')",
    "idle": "threading.Event().wait()",
    "exit": "import os; os._exit(0)",
}


def pids_of(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


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


def stage(pids: Path, then: str, temporary: Path) -> subprocess.Popen[str]:
    """A stage of its own that has two workers, one of which has started three processes."""
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-c", STAGE.format(then=THEN[then]), str(pids)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


@linux
@pytest.mark.parametrize("then", ["call", "idle"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stage_is_killed(tmp_path: Path, then: str, number: int) -> None:
    """kill -9 gives nobody a chance to clean up, a CI system's SIGTERM neither; Ctrl-C comes while a worker is in native code."""
    pids = tmp_path / "pids"
    with stage(pids, then, tmp_path / "tmp") as process:
        workers = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids_of(pids)) == 5
        process.send_signal(number)
        process.communicate(timeout=60)
        assert gone([*workers, *pids_of(pids)])
    until = time.monotonic() + 60
    while (left := list((tmp_path / "tmp").iterdir())) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left  # the private folders, too


@linux
def test_stage_leaves_without_a_word(tmp_path: Path) -> None:
    """os._exit skips every `finally`."""
    pids = tmp_path / "pids"
    with stage(pids, "exit", tmp_path / "tmp") as process:
        process.communicate(timeout=60)
        assert gone(pids_of(pids))


@linux
def test_leaving_the_context(engine: LocalEngine, tmp_path: Path) -> None:
    """Compilers leave servers and daemons behind; a job that is done has none."""
    pids = tmp_path / "pids"
    with engine.worker("test", Needs()) as worker:
        worker.call("spawn", pids=str(pids), then="nothing")
        assert not gone(pids_of(pids), within_s=0.0)
    assert gone(pids_of(pids), within_s=0.0)  # not soon: by now


@linux
@pytest.mark.parametrize(("then", "kind"), [("segfault", "crash"), ("spin", "timeout")])
def test_worker_dies(engine: LocalEngine, tmp_path: Path, then: str, kind: str) -> None:
    """What a crashed worker started does not go on computing."""
    pids = tmp_path / "pids"
    with engine.worker("test", Needs(timeout_s=5.0)) as worker:
        with pytest.raises(WorkerError) as caught:
            worker.call("spawn", pids=str(pids), then=then)
        assert caught.value.kind == kind
        assert gone(pids_of(pids), within_s=0.0)


@linux
def test_guard_is_killed(engine: LocalEngine) -> None:
    """The guard itself shot: the kernel ends the worker, and the stage says what it saw."""
    with engine.worker("test", Needs()) as worker:
        pid = worker.call("process")["pid"]
        with pytest.raises(WorkerError) as caught:
            worker.call("kill_guard")
        assert caught.value.kind == "crash"
        assert gone([pid])


def test_workers_do_not_hear_ctrl_c(engine: LocalEngine) -> None:
    """The terminal sends Ctrl-C to the stage's group; a worker in it would die before the stage can say why."""
    with engine.worker("test", Needs()) as worker:
        pid = worker.call("process")["pid"]
        assert os.getsid(pid) not in (os.getsid(0), os.getsid(worker.pid))
        assert os.getpgid(pid) == pid


INTERRUPTED = """
import os
from compile_stage.core.errors import WorkerError
from compile_stage.core.ports import Needs
from compile_stage.engine.local import LocalEngine
engine = LocalEngine(calls="deeds")
with engine.worker("test", Needs()) as worker:
    try:
        worker.call("interrupt", pid=os.getpid())
    except KeyboardInterrupt:
        print("interrupted")
    try:
        worker.call("echo")
    except WorkerError as error:
        print(error.problem)
"""


def test_ctrl_c_during_a_call() -> None:
    """The exception goes through, the worker is ended, and it does not answer the next question with the last one's answer.

    In a process of its own: a native library that an earlier test loaded may have put the signal stack of this one elsewhere.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "interrupted",
        "worker 'test' takes no more calls: its last call was interrupted",
    ], done.stderr
