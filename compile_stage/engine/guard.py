"""The guard of a worker: a small parent process of its own that lets nothing outlive the stage.

A worker runs foreign native code. It may die, hang with the interpreter's lock held, or start compilers that detach
themselves, so it can't be trusted to clean up after itself, and the stage can't when it is the stage that was killed.
So before it loads anything the worker forks: the child does the work, and the parent, the guard, starts further
processes when the worker asks for them (`engine.starter`), and otherwise waits for one of three things:

- the worker dies: everything that it left behind is killed, and the guard dies in the same way, so that the stage sees
  how;
- the stage says so (SIGTERM), or is gone (its end of the request pipe closed, or the parent id changed): everything is
  killed.

On Linux the guard adopts every process whose parent died below it (PR_SET_CHILD_SUBREAPER), so "kill my children until
there are none" reaches even those that made a session of their own. If the guard itself is killed, the kernel kills the
worker (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compile_stage.engine import starter

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_ASK_EVERY_MS = 1000  # how often the parent id is looked at; every other event wakes the guard at once
_PATIENCE_S = 5.0  # a process in uninterruptible sleep dies only when its device answers


def stand_guard(requests: int, answers: int, folders: Sequence[str]) -> None:
    """Fork. Returns in the child, which is the worker; the parent stays as its guard until it exits, and never returns.

    Args:
        requests: Descriptor of the request pipe. The guard never reads it, it only sees it close.
        answers: Descriptor of the answer pipe, which the guard lets go of.
        folders: The worker's private folders, removed at the end.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the number arrives through `woken`
    guard, stage = os.getpid(), os.getppid()
    ends = starter.connection()
    worker = os.fork()
    if worker == 0:
        if ends is not None:
            starter.connect(ends[0])
            ends[1].close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(woken)
        os.close(waker)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the line above
            os._exit(1)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(starter.FIRST_TO_GO, encoding="utf-8")
        return
    os.close(answers)
    if ends is not None:
        ends[0].close()
    status: int | None = None
    try:
        status = _wait(worker, stage, requests, woken, starter.Starter(ends[1]) if ends is not None else None)
    finally:
        _kill_children(worker)
        # After a crash the stage wants to hear of it first, and removes the folders itself, if it is still there.
        if status is None or os.getppid() != stage or _closed(requests):
            for folder in folders:
                _remove(folder)
        _die_like(status)


def _wait(worker: int, stage: int, requests: int, woken: int, starts: starter.Starter | None) -> int | None:
    """The worker's exit status, or None when it is the stage that wants an end or is gone."""
    events = select.poll()
    events.register(requests, 0)  # a hang-up is always reported
    events.register(woken, select.POLLIN)
    if starts is not None:
        events.register(starts, select.POLLIN)
    while True:
        ready = dict(events.poll(_ASK_EVERY_MS))
        signals = os.read(woken, 4096) if woken in ready else b""
        while (ended := _reap()) is not None:
            if ended[0] == worker:
                return ended[1]
            if starts is not None:
                starts.note_end(*ended)
        if starts is not None and starts.fileno() in ready and not starts.answer_one():
            events.unregister(starts)
            starts = None
        if requests in ready or signal.SIGTERM in signals or os.getppid() != stage:
            return None


def _reap() -> tuple[int, int] | None:
    """Process id and status of a child that ended; None when none has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _kill_children(worker: int) -> None:
    """Kill children until there are none; those of a killed one become ours, and are next."""
    if sys.platform != "linux":  # no adoption there: the worker's own group is the best handle
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    give_up = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return


def _children() -> list[int]:
    me = os.getpid()
    try:
        return [int(word) for word in Path(f"/proc/self/task/{me}/children").read_text(encoding="utf-8").split()]
    except OSError:  # another system, or a kernel without that file
        import psutil

        return [child.pid for child in psutil.Process(me).children(recursive=True)]


def _closed(requests: int) -> bool:
    events = select.poll()
    events.register(requests, 0)
    return bool(events.poll(0))


def _remove(folder: str) -> None:
    from compile_stage.core.leftovers import remove_owned

    remove_owned(Path(folder))


def _die_like(status: int | None) -> None:
    if status is None:
        os._exit(0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1.0)  # the signal is on its way
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
