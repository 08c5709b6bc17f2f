"""Workers as processes of this machine."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from compile_stage.core import plugins
from compile_stage.core.cache import cache_root
from compile_stage.core.capabilities import Capabilities
from compile_stage.core.environment import available_cores
from compile_stage.core.errors import FailureKind, InternalError, WorkerError
from compile_stage.core.ports import Needs
from compile_stage.engine.gate import MachineGate
from compile_stage.engine.protocol import MAX_MESSAGE_BYTES, PROTOCOL, decode, encode, revive_error
from compile_stage.engine.watch import MemoryWatch, free_memory_bytes, gigabytes, kernel_oom_kills, name_death

_START_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.05
_LOOK_EVERY_ALONE_S = 0.25  # looking costs a fraction of a millisecond, which a measurement should not meet more often
_END_TIMEOUT_S = 8.0  # longer than the guard's own patience
_DEATH_TIMEOUT_S = 3.0  # from the closing of its pipe to the end of its guard
_LOG_LIMIT_BYTES = 64_000_000
_LOG_TAIL_BYTES = 4_000

# Each runtime has a name of its own for the size of its default thread pool.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS", "TVM_NUM_THREADS", "TF_NUM_INTRAOP_THREADS",
)  # fmt: skip


class LocalEngine:
    """Starts workers here. Safe for threads that drive a worker each.

    Args:
        calls: Module with the table `CALLS` of what a worker can run.
        logs: Folder that keeps what workers print, a file for each name; without it a log goes with its worker.
    """

    name: ClassVar[str] = "local"
    requires: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, *, calls: str = "compile_stage.engine.calls", logs: Path | None = None) -> None:
        self._calls = calls
        self._logs = logs
        self._gate = MachineGate(cache_root() / "locks")
        self._lock = threading.Lock()
        self._workers: set[LocalWorker] = set()
        self._closed = False

    @contextmanager
    def worker(self, name: str, needs: Needs) -> Iterator[LocalWorker]:
        """Start a worker; leaving the context ends it and all that it started.

        Raises:
            WorkerError: Its interpreter can't be run.
        """
        with self._lock:  # so that `close` never misses one that is just starting
            if self._closed:
                raise InternalError(f"worker {name!r} was asked of an engine that is closed")
            worker = LocalWorker(name, needs, self._gate, calls=self._calls, logs=self._logs)
            self._workers.add(worker)
        try:
            yield worker
        finally:
            worker.end()
            with self._lock:
                self._workers.discard(worker)

    def room(self, memory_bytes: int) -> int:
        """As many as there are cores, since lowerings and most compilers use one at a time, and as there is memory for
        now."""
        return max(1, min(available_cores(), free_memory_bytes() // memory_bytes))

    def alone(self) -> AbstractContextManager[None]:
        """Have the machine alone over several calls of this thread; calls of other threads and other stages wait
        meanwhile."""
        return self._gate.hold(alone=True)

    def close(self) -> None:
        """End everything that is still running; calls under way raise WorkerError. May be called twice, and from any
        thread."""
        with self._lock:
            self._closed = True
            workers = tuple(self._workers)
        self._gate.shut()
        for worker in workers:
            worker.end()


class LocalWorker:
    """One process, driven over its pipes. Made by `LocalEngine.worker`."""

    def __init__(self, name: str, needs: Needs, gate: MachineGate, *, calls: str, logs: Path | None) -> None:
        self.name = name
        self.needs = needs
        self._gate = gate
        self._ends = time.monotonic() + (math.inf if needs.total_s is None else needs.total_s)
        self._calls_lock = threading.Lock()
        self._greeted = False
        self._number = 0
        self._tail_from = 0  # size of the log when the call began
        self._over = ""  # why no further call can be made; empty while it can
        self._folder = Path(tempfile.mkdtemp(prefix="compile-stage-"))
        try:
            self._log = _open_log(self._folder, name, logs)
            self._process = self._start(calls)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._pipe = _Pipe(self._process)
        self._watch = MemoryWatch(self._process.pid, needs.memory_bytes)

    @property
    def pid(self) -> int:
        """Process id of the worker's guard, which is the root of all that the worker starts."""
        return self._process.pid

    def call(self, function: str, /, **arguments: Any) -> Any:
        """Run a function of the engine's `CALLS` there. Arguments are made plain JSON, and plain JSON comes back.

        The time limit runs from when the machine is free for the call.

        Raises:
            WorkerError: It crashed, ran out of memory, took too long, or raised. After the first three the worker is
                gone.
            CompileStageError: Of the class that was raised there, when it was one of ours for people.
            TypeError: An argument is not a record or plain JSON.
        """
        with self._gate.hold(alone=self.needs.exclusive), self._calls_lock:
            if self._over:
                raise WorkerError("crash", f"worker {self.name!r} takes no more calls: {self._over}")
            self._number += 1
            request = encode({"id": self._number, "function": function, "arguments": arguments})
            try:
                self._greet()
                self._pipe.send(request)
                timeout_s = min(self.needs.timeout_s, max(0.0, self._ends - time.monotonic()))
                message = self._await(repr(function), self._number, timeout_s)
            except BaseException as broken:  # Ctrl-C too: an answer that nobody took would be the next call's
                self._over = self._over or getattr(broken, "problem", "its last call was interrupted")
                self._stop()
                raise
        if "error" in message:
            error = revive_error(message["error"])
            if isinstance(error, WorkerError) and (printed := self._tail()):
                error.detail = f"{error.detail}\n--- printed by the worker ---\n{printed}".lstrip()
            raise error
        return message["result"]

    def end(self) -> None:
        """End the worker and everything that it started, now. A call under way in another thread raises WorkerError."""
        self._over = self._over or "it was ended"
        self._stop()
        with self._calls_lock:  # a call under way has seen the end before the pipes are closed
            self._pipe.close()
            self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, calls: str) -> subprocess.Popen[bytes]:
        interpreter = self.needs.interpreter or sys.executable
        # -P: the folder that compilers drop files into is no place to import from.
        command = [interpreter, "-P", "-m", "compile_stage.engine.worker", "--calls", calls, f"--folder={self._folder}"]
        # What can be imported here can be imported there; another interpreter has its own packages, and finds ours by
        # links.
        if interpreter == sys.executable:
            command += [f"--path={Path(entry).absolute()}" for entry in sys.path]
        temporary = self._folder / "tmp"
        temporary.mkdir()
        environment = dict.fromkeys(_THREAD_VARIABLES, str(max(1, self.needs.cpus)))
        environment |= {"PYTHONHASHSEED": "0", "TMPDIR": str(temporary)}
        if interpreter != sys.executable:
            environment["PYTHONPATH"] = str(plugins.link_packages(self._folder / "linked"))
        try:
            return subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                cwd=self._folder,
                env={**os.environ, **environment},
                start_new_session=True,  # the terminal's Ctrl-C is the stage's, and the stage ends its workers
            )
        except OSError as error:
            self._log.close()
            raise WorkerError("crash", f"{interpreter} can't be run: {error.strerror}") from error

    def _greet(self) -> None:
        """Wait, once, until the worker says that it is up. Starting is waited for here so that many can start at
        once."""
        if not self._greeted:
            hello = self._await("starting the worker", 0, _START_TIMEOUT_S).get("result")
            theirs = hello.get("protocol") if isinstance(hello, dict) else None
            if theirs != PROTOCOL:
                fix = "install the same version of compile-stage for that interpreter"
                raise WorkerError("crash", f"the worker speaks protocol {theirs}, the stage {PROTOCOL}", fix=fix)
            self._greeted = True

    def _await(self, what: str, number: int, timeout_s: float) -> dict[str, Any]:
        """The answer to a request, with an eye on the clock and on the worker's memory."""
        self._tail_from = _size(self._log)
        oom_kills = kernel_oom_kills()
        look_every_s = _LOOK_EVERY_ALONE_S if self.needs.exclusive else _LOOK_EVERY_S
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            ended = self._process.poll() is not None  # asked first: what it wrote is then in the pipe
            try:
                line = self._pipe.turn(0 if ended else min(look_every_s, max(remaining, 0.0)))
                if line is not None:
                    return _open_message(line, number)
            except EOFError:
                raise self._death(what, oom_kills) from None
            except ValueError as error:
                problem = f"the worker answered with something that is not a message ({error})"
                raise self._failure("crash", what, problem) from None
            if ended:
                raise self._death(what, oom_kills)
            if remaining <= 0:
                raise self._failure("timeout", what, f"took longer than {timeout_s:g} s")
            if (held := self._watch.excess()) is not None:
                allowed = gigabytes(self.needs.memory_bytes)
                raise self._failure("out_of_memory", what, f"held {gigabytes(held)} of memory, {allowed} are allowed")
            if _size(self._log) > _LOG_LIMIT_BYTES:  # an endless loop that prints must not fill the disk
                self._log.truncate(0)

    def _death(self, what: str, oom_kills: int) -> WorkerError:
        """What to say of a worker whose pipe closed without an answer."""
        if self._over:
            return self._failure("crash", what, "was stopped, since the stage ended the worker")
        try:
            returncode = self._process.wait(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self._failure("crash", what, "closed the worker's answer pipe without an answer")
        kind, words = name_death(
            returncode,
            held_bytes=self._watch.held_bytes,
            limit_bytes=self.needs.memory_bytes,
            oom_kills=kernel_oom_kills() - oom_kills,
            log=self._tail(),
        )
        return self._failure(kind, what, words)

    def _failure(self, kind: FailureKind, what: str, words: str) -> WorkerError:
        self._stop()  # first, so that the log is complete
        sentence = words if words.startswith("the worker") else f"{what} {words}"
        return WorkerError(kind, sentence, detail=self._tail())

    def _stop(self) -> None:
        """Have the guard kill everything and wait until it has; do it ourselves if there is no guard any more."""
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._watch.find()
            self._watch.kill()
            self._process.wait()
        else:
            if self._process.returncode != 0:  # perhaps it was the guard that was killed
                self._watch.kill()

    def _tail(self) -> str:
        """The end of what the worker printed since the call began."""
        size = _size(self._log)
        begin = min(self._tail_from, size)  # it may have been cut since
        self._log.seek(max(begin, size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()


class _Pipe:
    """Lines to and from a worker, never blocking longer than asked to."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._requests = cast("BinaryIO", process.stdin)
        self._answers = cast("BinaryIO", process.stdout)
        self._poll = select.poll()
        for stream in (self._requests, self._answers):
            os.set_blocking(stream.fileno(), False)
        self._poll.register(self._answers, select.POLLIN)
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def send(self, line: bytes) -> None:
        """Begin to send; `turn` goes on with it."""
        self._unsent = memoryview(line)
        self._poll.register(self._requests, select.POLLOUT)

    def turn(self, seconds: float) -> bytes | None:
        """Send and receive what can be within that time; a line when one is complete.

        Raises:
            EOFError: The other end is closed.
            ValueError: What came is longer than any message.
        """
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._requests.fileno():
                self._write()
            elif (line := self._read()) is not None:
                return line
        return None

    def close(self) -> None:
        """Close both ends."""
        for stream in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                stream.close()

    def _write(self) -> None:
        try:
            sent = os.write(self._requests.fileno(), self._unsent)
        except BlockingIOError:
            return
        except BrokenPipeError:  # it is dead; why is found at the other pipe
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._poll.unregister(self._requests)

    def _read(self) -> bytes | None:
        try:
            chunk = os.read(self._answers.fileno(), 1 << 20)
        except BlockingIOError:
            return None
        if not chunk:
            raise EOFError
        seen = len(self._received)
        self._received += chunk
        if (end := self._received.find(b"\n", seen)) < 0:
            if len(self._received) > MAX_MESSAGE_BYTES:
                raise ValueError(f"more than {MAX_MESSAGE_BYTES} bytes without an end")
            return None
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line


def _open_message(line: bytes, number: int) -> dict[str, Any]:
    message = decode(line)
    if message["id"] != number or ("result" in message) == isinstance(message.get("error"), dict):
        raise ValueError("not an answer to the request")
    return message


def _open_log(folder: Path, name: str, logs: Path | None) -> BinaryIO:
    if logs is None:
        return open(folder / "worker.log", "a+b", buffering=0)
    logs.mkdir(parents=True, exist_ok=True)
    file_name = re.sub(r"[^\w.-]+", "_", name)
    return open(logs / f"{file_name}.log", "a+b", buffering=0)


def _size(log: BinaryIO) -> int:
    return os.fstat(log.fileno()).st_size
