"""Workers as processes of this machine."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from compile_stage.core.cache_folder import cache_root
from compile_stage.core.capabilities import Capabilities
from compile_stage.core.control_groups import cores_to_fill
from compile_stage.core.digest import plain, revive
from compile_stage.core.errors import (
    CompileStageError,
    FailureKind,
    InternalError,
    StorageError,
    UsageError,
    WorkerError,
)
from compile_stage.core.ports import Confinement, MeteredCall, WorkerLimits, WorkerMemory, WorkerUsage
from compile_stage.core.storage import no_space_below
from compile_stage.engine import confinement
from compile_stage.engine.machine_lock import MachineLock
from compile_stage.engine.pipe import Pipe, open_message
from compile_stage.engine.protocol import PROTOCOL, encode, revive_error
from compile_stage.engine.surroundings import Surroundings
from compile_stage.engine.usage import memory_of, usage_of, waited_by_this_thread
from compile_stage.engine.watch import (
    DiskWatch,
    MemoryWatch,
    free_memory_bytes,
    gigabytes,
    kernel_oom_kills,
    name_death,
)

_START_TIMEOUT_S = 60.0
_NOT_OF_THE_DISK = ("timeout", "out_of_memory")
_TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # of this machine's or user's limits
_LOOK_EVERY_S = 0.05
_LOOK_EVERY_ALONE_S = 0.25  # looking costs a fraction of a millisecond, which a measurement should not meet more often
_END_TIMEOUT_S = 8.0  # longer than the guard's own patience
_DEATH_TIMEOUT_S = 3.0  # from the closing of its pipe to the end of its guard
_LOG_LIMIT_BYTES = 64_000_000
_LOG_TAIL_BYTES = 4_000


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
        self._machine_lock = MachineLock(cache_root() / "locks")
        self._lock = threading.Lock()
        self._workers: set[LocalWorker] = set()
        self._confined = _Confined()
        self._closed = False

    @contextmanager
    def worker(self, name: str, limits: WorkerLimits) -> Iterator[LocalWorker]:
        """Start a worker; leaving the context ends it and all that it started.

        Raises:
            WorkerError: Its interpreter can't be run.
        """
        with self._lock:  # so that `close` never misses one that is just starting
            if self._closed:
                raise InternalError(f"worker {name!r} was asked of an engine that is closed")
            worker = LocalWorker(name, limits, self._machine_lock, self._confined, calls=self._calls, logs=self._logs)
            self._workers.add(worker)
        try:
            yield worker
        finally:
            worker.end()
            with self._lock:
                self._workers.discard(worker)

    def max_parallel(self, memory_bytes: int) -> int:
        """As many as there are cores, or a container's limit allows, since lowerings and most compilers use one at a
        time; and as there is memory for now."""
        return max(1, min(cores_to_fill(), free_memory_bytes() // memory_bytes))

    def free_memory_bytes(self) -> int:
        """What new workers can have without pushing others out, now."""
        return free_memory_bytes()

    def exclusive(self) -> AbstractContextManager[None]:
        """Have the machine alone over several calls of this thread, and of those that run in a copy of its context;
        calls of other threads and other stages wait meanwhile."""
        return self._machine_lock.hold(exclusive=True)

    def confinement(self) -> Confinement:
        """As the last worker was confined; where none was started yet, one is. May be called from several threads."""
        if self._confined.last is None:
            with self._confined.asked:
                if self._confined.last is None:
                    with self.worker("confinement", WorkerLimits(light=True)) as worker:
                        worker.greet()
        return self._confined.last or Confinement()

    def close(self) -> None:
        """End everything that is still running; calls under way raise WorkerError. May be called twice, and from any
        thread."""
        with self._lock:
            self._closed = True
            workers = tuple(self._workers)
        self._machine_lock.shut()
        for worker in workers:
            worker.end()


class _Confined:
    """What an engine knows of confinement here.

    Attributes:
        last: As the last worker was confined; None before the first.
        namespaces: Whether they work, which is tried once; None before that.
        asked: Held by who starts a worker only to see this.
    """

    def __init__(self) -> None:
        self.last: Confinement | None = None
        self.namespaces: bool | None = None
        self.asked = threading.Lock()


class LocalWorker:
    """One process, driven over its pipes. Made by `LocalEngine.worker`."""

    def __init__(
        self,
        name: str,
        limits: WorkerLimits,
        machine_lock: MachineLock,
        confined: _Confined,
        *,
        calls: str,
        logs: Path | None,
    ) -> None:
        self.name = name
        self.limits = limits
        self._machine_lock = machine_lock
        self._confined = confined
        self._ends = time.monotonic() + (math.inf if limits.total_s is None else limits.total_s)
        self._calls_lock = threading.Lock()
        self._confinement: Confinement | None = None
        self._number = 0
        self._tail_from = 0  # size of the log when the call began
        self._over = ""  # why no further call can be made; empty while it can
        self._oom_kills = kernel_oom_kills()  # when it was last known to live: it may be killed between two calls
        self._surroundings = Surroundings(limits)
        try:
            self._log = _open_log(self._surroundings.folder, name, logs)
            self._process = self._start(calls)
        except BaseException:
            self._surroundings.remove()
            raise
        self._pipe = Pipe(self._process)
        self._watch = MemoryWatch(self._process.pid, limits.memory_bytes)
        self._disk = DiskWatch(self._surroundings.writes, limits.disk_bytes)

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
            StorageError: It crashed or raised, and a disk that it writes to was full meanwhile.
            CompileStageError: Of the class that was raised there, when it was one of ours for people.
            TypeError: An argument is not a record or plain JSON.
        """
        turn = nullcontext() if self.limits.light else self._machine_lock.hold(exclusive=self.limits.exclusive)
        with turn, self._calls_lock:
            self._demand_alive()
            self._number += 1
            self._disk.begin()
            given = plain(arguments)
            try:
                self._greet()
                given = self._surroundings.hand_over(function, given)
                self._pipe.send(encode({"id": self._number, "function": function, "arguments": given}))
                timeout_s = min(self.limits.timeout_s, max(0.0, self._ends - time.monotonic()))
                message = self._await(repr(function), self._number, timeout_s)
                message = self._surroundings.hand_back(message)
            except BaseException as broken:  # Ctrl-C too: an answer that nobody took would be the next call's
                self._over = self._over or getattr(broken, "problem", "its last call was interrupted")
                self._stop()
                if isinstance(broken, CompileStageError) and (full := self._full_disk(broken)) is not None:
                    raise full from broken
                raise
        if "error" in message:
            error = self._surroundings.believed(revive_error(message["error"]))
            self._disk.look_for_space()
            error = self._full_disk(error) or error
            if isinstance(error, WorkerError) and (printed := self._tail()):
                error.detail = f"{error.detail}\n--- printed by the worker ---\n{printed}".lstrip()
            raise error
        return message["result"]

    def metered(self, function: str, /, **arguments: Any) -> MeteredCall:
        """As `call`, with the stage's own clock and the kernel's counters read before and after."""
        before = usage_of(self.pid)
        waited_s, began = waited_by_this_thread(), time.perf_counter()
        value = self.call(function, **arguments)
        wall_s, waited_s = time.perf_counter() - began, waited_by_this_thread() - waited_s
        after = usage_of(self.pid)
        return MeteredCall(value=value, wall_s=wall_s, before=before, after=after, stage_waited_s=waited_s)

    def usage(self) -> WorkerUsage:
        """What the worker and all that it started have used so far, as the kernel counts it."""
        return usage_of(self.pid)

    def memory(self) -> WorkerMemory:
        """What the worker and all that it started hold, as the kernel says."""
        if self._over:
            raise WorkerError("crash", f"worker {self.name!r} holds nothing any more: {self._over}")
        return memory_of(self.pid)

    def end(self) -> None:
        """End the worker and everything that it started, now. A call under way in another thread raises WorkerError."""
        self._over = self._over or "it was ended"
        self._stop()
        with self._calls_lock:  # a call under way has seen the end before the pipes are closed
            self._pipe.close()
            self._log.close()
        self._surroundings.remove()

    def greet(self) -> Confinement:
        """Wait, once, until the worker is up and confined. Starting is waited for here so that many can start at
        once."""
        with self._calls_lock:
            self._demand_alive()
            return self._greet()

    def _full_disk(self, error: CompileStageError) -> StorageError | None:
        """What to say of a call that failed while a disk was full. Compilers and runtimes have words of their own for
        that, or none: no candidate is to blame, nor the model. What the worker said of the disk itself stands where it
        names a place."""
        if isinstance(error, StorageError) and error.where:
            return None
        if isinstance(error, WorkerError) and error.kind in _NOT_OF_THE_DISK:
            return None
        return no_space_below(self._disk.full) if self._disk.full else None

    def _demand_alive(self) -> None:
        if self._over:
            raise WorkerError("crash", f"worker {self.name!r} takes no more calls: {self._over}")

    def _greet(self) -> Confinement:
        if self._confinement is None:
            hello = self._await("starting the worker", 0, _START_TIMEOUT_S).get("result")
            theirs = hello.get("protocol") if isinstance(hello, dict) else None
            if theirs != PROTOCOL:
                fix = "install the same version of compile-stage for that interpreter"
                raise WorkerError("crash", f"the worker speaks protocol {theirs}, the stage {PROTOCOL}", fix=fix)
            self._confinement = self._confine()
        return self._confinement

    def _confine(self) -> Confinement:
        arguments = {
            "reads": self._surroundings.reads,
            "writes": self._surroundings.writes,
            "home": str(Path.home()),
            "shared_memory_bytes": self._surroundings.shared_memory_bytes,
            "file_bytes": self.limits.disk_bytes,
            "names_threads": confinement.has_nvidia(),
            "namespaces": self._confined.namespaces,
        }
        self._pipe.send(encode({"id": 0, "function": "confine", "arguments": arguments}))
        message = self._await("confining the worker", 0, _START_TIMEOUT_S)
        if "error" in message:
            raise revive_error(message["error"])
        confined: Confinement = revive(Confinement, message["result"])
        before = self._confined.last
        if before is not None and before.complete and not confined.complete:
            raise WorkerError("crash", f"the worker could not be confined as those before it: {confined.text}")
        self._confined.namespaces = bool(message["result"]["namespaces"])
        self._confined.last = confined
        return confined

    def _start(self, calls: str) -> subprocess.Popen[bytes]:
        around = self._surroundings
        # -P: the folder that compilers drop files into is no place to import from.
        command = [around.interpreter, "-P", "-m", "compile_stage.engine.worker", "--calls", calls]
        command += [f"--folder={folder}" for folder in around.folders]
        # What can be imported here can be imported there; another interpreter has its own packages, and finds ours by
        # links.
        if around.interpreter == sys.executable:
            command += [f"--path={Path(entry).absolute()}" for entry in sys.path]
        try:
            return subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                cwd=around.own,
                env=around.environment,
                start_new_session=True,  # the terminal's Ctrl-C is the stage's, and the stage ends its workers
            )
        except OSError as error:
            self._log.close()
            if error.errno in _TOO_MANY:
                raise UsageError(
                    f"this machine starts no further process: {error.strerror}",
                    fix="allow more (ulimit -n: open files, ulimit -u: processes), or end other programs",
                ) from error
            raise UsageError(
                f"{around.interpreter}, the Python interpreter of a worker, can't be run: {error.strerror}",
                fix="give this user the rights to read and run it, and the folders above it; a toolchain is made anew "
                "by compile-stage toolchain remove NAME, and then install NAME",
            ) from error

    def _await(self, what: str, number: int, timeout_s: float) -> dict[str, Any]:
        """The answer to a request, with an eye on the clock and on the worker's memory."""
        self._tail_from = _size(self._log)
        look_every_s = _LOOK_EVERY_ALONE_S if self.limits.exclusive else _LOOK_EVERY_S
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            self._disk.look_for_space()
            ended = self._process.poll() is not None  # asked first: what it wrote is then in the pipe
            try:
                line = self._pipe.turn(0 if ended else min(look_every_s, max(remaining, 0.0)))
                if line is not None:
                    self._oom_kills = kernel_oom_kills()
                    return open_message(line, number)
            except EOFError:
                raise self._death(what) from None
            except ValueError as error:
                problem = f"the worker answered with something that is not a message ({error})"
                raise self._failure("crash", what, problem) from None
            if ended:
                raise self._death(what)
            if remaining <= 0:
                raise self._failure("timeout", what, f"took longer than {timeout_s:g} s")
            self._demand_limits(what)
            if _size(self._log) > _LOG_LIMIT_BYTES:  # an endless loop that prints must not fill the disk
                self._log.truncate(0)

    def _demand_limits(self, what: str) -> None:
        """Raise WorkerError when the worker, with all that it started, holds more than it may."""
        if (held := self._watch.excess()) is not None:
            allowed = gigabytes(self.limits.memory_bytes)
            raise self._failure("out_of_memory", what, f"held {gigabytes(held)} of memory, {allowed} are allowed")
        if self._watch.processes > self.limits.processes:
            problem = f"ran {self._watch.processes} processes at once, {self.limits.processes} are allowed"
            raise self._failure("crash", what, problem)
        if (written := self._disk.excess()) is not None:
            allowed = gigabytes(self.limits.disk_bytes)
            raise self._failure("crash", what, f"wrote {gigabytes(written)} of files, {allowed} are allowed")

    def _death(self, what: str) -> WorkerError:
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
            limit_bytes=self.limits.memory_bytes,
            oom_kills=kernel_oom_kills() - self._oom_kills,
            log=self._tail(),
        )
        failure = self._failure(kind, what, words)
        failure.killed = kind == "crash" and returncode == -signal.SIGKILL
        failure.starved = kind == "out_of_memory" and returncode == -signal.SIGKILL
        return failure

    def _failure(self, kind: FailureKind, what: str, words: str) -> WorkerError:
        self._disk.look_for_space()  # before what the worker wrote is removed
        self._stop()  # first, so that the log is complete
        sentence = words if words.startswith("the worker") else f"{what} {words}"
        return WorkerError(kind, sentence, detail=self._tail())

    def _stop(self) -> None:
        """Have the guard kill everything and wait until it has; do it ourselves if there is no guard any more."""
        with contextlib.suppress(OSError):  # before the guard removes the folder
            self._surroundings.take_records()
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


def _open_log(folder: Path, name: str, logs: Path | None) -> BinaryIO:
    if logs is None:
        return open(folder / "worker.log", "a+b", buffering=0)
    logs.mkdir(parents=True, exist_ok=True)
    file_name = re.sub(r"[^\w.-]+", "_", name)
    return open(logs / f"{file_name}.log", "a+b", buffering=0)


def _size(log: BinaryIO) -> int:
    return os.fstat(log.fileno()).st_size
