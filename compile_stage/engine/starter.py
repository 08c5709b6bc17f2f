"""Starts further processes for a worker, each confined as the worker is.

What a worker starts by itself is below the worker's own rules, and Landlock's rule for `/proc/self/task` names the
worker alone: a child can't name its threads, so that NVIDIA's drivers from 570 on find no GPU in it
(`engine.confinement`). So the worker's guard, which is not confined, starts them: it forks, confines the child with the
arguments that the worker was confined with, and executes what the worker asks for. Whoever takes the worker over gets
no more from the guard than a process as confined as the worker.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from compile_stage.core.errors import InternalError
from compile_stage.engine import landlock
from compile_stage.engine.confinement import confine

FIRST_TO_GO = "800"  # for /proc/self/oom_score_adj: if memory runs out, such a process goes, not the stage
_LOOK_EVERY_S = 0.02  # whether a process has ended
_MAX_BYTES = 1 << 20
_starter: socket.socket | None = None
_one_at_a_time = threading.Lock()  # a request and its reply


class Process(Protocol):
    """What `start` returns: the part of `subprocess.Popen` that is used."""

    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def connection() -> tuple[socket.socket, socket.socket] | None:
    """The worker's end and the guard's; None without Landlock, where a worker starts its processes itself."""
    if not sys.platform.startswith("linux") or landlock.abi() == 0:
        return None
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    return ends


def connect(starter: socket.socket) -> None:
    """In the worker: its end of the connection with its guard."""
    global _starter
    _starter = starter


def hand_over_confinement(arguments: Mapping[str, Any]) -> None:
    """In the worker, before anything of a stranger's is loaded: what each process will be confined with. Only the first
    time counts."""
    if _starter is not None:
        _ask(_starter, {"confine": arguments})


def start(command: Sequence[str], *, cwd: str, environment: Mapping[str, str], stderr: IO[bytes]) -> Process:
    """A process with pipes of text as its standard input and output.

    Raises:
        OSError: It can't be started.
    """
    if _starter is None:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and script
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8",
            cwd=cwd, env=dict(environment),
        )  # fmt: skip
    its_input, stdin = os.pipe()
    stdout, its_output = os.pipe()
    try:
        asked = {"command": list(command), "cwd": cwd, "environment": dict(environment)}
        pid = _ask(_starter, asked, (its_input, its_output, stderr.fileno()))
    except BaseException:
        os.close(stdin)
        os.close(stdout)
        raise
    finally:
        os.close(its_input)
        os.close(its_output)
    return _Started(_starter, pid, stdin, stdout)


class _Started:
    """A process that the starter has forked."""

    def __init__(self, starter: socket.socket, pid: int, stdin: int, stdout: int) -> None:
        self._starter, self._pid = starter, pid
        self._ended: int | None = None
        self.stdin: IO[str] | None = open(stdin, "w", encoding="utf-8")  # noqa: SIM115 - closed by whoever asked for it
        self.stdout: IO[str] | None = open(stdout, encoding="utf-8", errors="replace")  # noqa: SIM115

    def poll(self) -> int | None:
        if self._ended is None:
            self._ended = _ask(self._starter, {"poll": self._pid})
        return self._ended

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self._pid}", timeout or 0)
            time.sleep(_LOOK_EVERY_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            _ask(self._starter, {"kill": self._pid})


def _ask(starter: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
    handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    with _one_at_a_time:
        starter.sendmsg([json.dumps(request).encode()], handed)
        reply = starter.recv(_MAX_BYTES)
    if not reply:
        raise InternalError("the process that starts a worker's processes has ended")
    answer = json.loads(reply)
    if "error" in answer:
        raise OSError(answer["error"])
    return answer["result"]


# ----------------------------------------------------------------------------------------------------------- the guard


class Starter:
    """In the guard: what answers the worker's requests."""

    def __init__(self, worker: socket.socket) -> None:
        """
        Args:
            worker: The guard's end of a connection that keeps messages apart.
        """
        self._worker = worker
        self._arguments: Mapping[str, Any] | None = None
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}

    def fileno(self) -> int:
        return self._worker.fileno()

    def note_end(self, pid: int, status: int) -> None:
        """A child of the guard's has ended, and was waited for."""
        if pid in self._running:
            self._running.discard(pid)
            self._ended[pid] = os.waitstatus_to_exitcode(status)

    def answer_one(self) -> bool:
        """Answer one request; False when the worker has closed its end. Never waits for the worker: the guard has the
        stage to watch."""
        reply: dict[str, Any]
        try:
            text, descriptors, _, _ = socket.recv_fds(self._worker, _MAX_BYTES, 3)
        except OSError:
            return False
        if not text:
            return False
        try:
            reply = {"result": self._answer(json.loads(text), descriptors)}
        except Exception as error:  # noqa: BLE001 - it is reported, and the next request is answered
            reply = {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            self._worker.send(json.dumps(reply).encode(), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _answer(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int | None:
        if "confine" in request:
            if self._arguments is None:
                self._arguments = request["confine"]
            return None
        if "command" in request:
            if self._arguments is None:
                raise PermissionError("the worker is not confined yet")
            pid = _fork(request, descriptors, self._arguments)
            self._running.add(pid)
            return pid
        pid = request.get("poll", request.get("kill"))
        if pid in self._running:
            if "kill" in request:
                os.kill(pid, signal.SIGKILL)
            return None
        if pid in self._ended:
            return self._ended[pid]
        raise ProcessLookupError(f"no process {pid} was started here")


def _fork(request: Mapping[str, Any], descriptors: Sequence[int], arguments: Mapping[str, Any]) -> int:
    """Returns the process id once the command is executed. Raises OSError where it can't be."""
    said, saying = os.pipe()  # closed by the execution; before that, the error is written to it
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO, encoding="utf-8")
            confine(**arguments)
            os.chdir(request["cwd"])
            for standard, descriptor in enumerate(descriptors):
                os.dup2(descriptor, standard)
            os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606 - no shell
        except BaseException as error:  # noqa: BLE001 - nothing may return from here
            os.write(saying, f"{error}"[:1000].encode())
        finally:
            os._exit(127)
    os.close(saying)
    with open(said, "rb") as reading:
        problem = reading.read()
    if problem:
        os.waitpid(pid, 0)
        raise OSError(problem.decode(errors="replace"))
    return pid
