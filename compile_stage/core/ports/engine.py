"""An engine: where workers run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from compile_stage.core.ports.plugin import Plugin
from compile_stage.core.records import Budget, record


@record
class WorkerLimits:
    """What a worker may use.

    Attributes:
        timeout_s: Per call.
        total_s: No call goes on longer than this after the worker's start; None for no such limit.
        exclusive: Nothing else may run on the machine meanwhile.
        interpreter: Python executable that runs the worker; empty means this one.
        light: Its calls cost next to nothing and name no files: they neither wait for a measurement nor hold one up.
        reads: Files and folders that it may read in place, beside what its calls name.
        disk_bytes: What its own folder may hold, and the largest file that it may write.
        processes: How many it may be at once, with all that it started.
        shares_cores: Other workers run beside it, so its threads give their core up while they wait for each other.
    """

    cpus: int = 1
    memory_bytes: int = 12_000_000_000
    timeout_s: float = 900.0
    exclusive: bool = False
    interpreter: str = ""
    total_s: float | None = None
    light: bool = False
    reads: tuple[str, ...] = ()
    disk_bytes: int = 100_000_000_000
    processes: int = 1000
    shares_cores: bool = False

    @classmethod
    def within(cls, budget: Budget, cpus: int = 2, interpreter: str = "") -> WorkerLimits:
        """What a policy grants to one worker."""
        return cls(
            cpus=cpus,
            memory_bytes=int(budget.job_memory_mb * 1e6),
            timeout_s=budget.job_minutes * 60,
            interpreter=interpreter,
        )


@record
class WorkerUsage:
    """What a worker, and all that it started, have used so far, as the kernel counts it.

    Attributes:
        at_s: When it was read (`time.monotonic`).
        cpu_s: CPU time, user and system, that of threads and processes which have ended too.
        threads: Of each thread that lives, by a name of its own: CPU time in seconds.
        waits: Of each of them: seconds that it has waited for a core that others had, where the kernel tells. The
            kernel adds a wait when it is over.
    """

    at_s: float
    cpu_s: float
    threads: Mapping[str, float]
    waits: Mapping[str, float]


@record
class MeteredCall:
    """A call, and what the stage itself saw of it: nothing here is the worker's own word but `value`.

    Attributes:
        value: What the function returned.
        wall_s: From the request to the answer.
        before, after: What was used until then.
        stage_waited_s: The part of `wall_s` in which the stage itself was ready to go on and waited for a core.
    """

    value: Any
    wall_s: float
    before: WorkerUsage
    after: WorkerUsage
    stage_waited_s: float = 0.0


@record
class WorkerMemory:
    """Resident memory of a worker's processes, in bytes, without its guard.

    Attributes:
        peak_bytes: The highest that the largest process ever held.
        others_bytes: What the other processes held at most, each by itself, pages that they share divided among them.
        others: How many these are.
        held_bytes: What the largest process holds now of its own, without files that are mapped; 0 where that is not
            known.
    """

    peak_bytes: int
    others_bytes: int = 0
    others: int = 0
    held_bytes: int = 0


@record
class Confinement:
    """What keeps a worker from the rest of its machine: each by what is in force, empty where nothing is.

    Attributes:
        files: Reads and writes of files that were not handed over.
        network: Reaching other machines.
        system_calls: Tracing other processes, mounting, loading kernel code.
        shared_memory: Filling the machine's /dev/shm.
        limits: What is bounded, beside memory, time, disk and processes, which the stage watches.
        complete: No file and no other machine can be reached. What `compliance.sandbox: required` asks for.
    """

    files: str = ""
    network: str = ""
    system_calls: str = ""
    shared_memory: str = ""
    limits: str = ""
    complete: bool = False

    @property
    def text(self) -> str:
        """For people, in one line."""
        closed = {"files": self.files, "network": self.network, "system calls": self.system_calls}
        parts = [f"{name} ({by})" for name, by in closed.items() if by]
        lacking = [name for name, by in closed.items() if not by]
        said = f"closed: {', '.join(parts)}" if parts else "nothing is closed"
        return f"{said}; open: {', '.join(lacking)}" if lacking else said


class Worker(Protocol):
    """One process of one interpreter, which lives as long as its job so that start-up is paid once."""

    def call(self, function: str, /, **arguments: Any) -> Any:
        """Run a function of `compile_stage.engine.calls` there; arguments and result are plain JSON (records are
        converted).

        Raises:
            WorkerError: it crashed, ran out of memory, took too long, or raised.
            CompileStageError: of the same class as was raised there, when it was one of ours for people.
        """

    def metered(self, function: str, /, **arguments: Any) -> MeteredCall:
        """As `call`, with what the stage's own clock and the kernel's counters say of it."""

    def memory(self) -> WorkerMemory:
        """What it holds. Raises WorkerError when it is gone."""


class Engine(Plugin, Protocol):
    """Where workers run (`compile_stage.engines`)."""

    def worker(self, name: str, limits: WorkerLimits) -> AbstractContextManager[Worker]:
        """Start a worker; leaving the context ends it and all that it started. `name` is for logs."""

    def max_parallel(self, memory_bytes: int) -> int:
        """How many workers that hold so much memory each can compile at once; at least 1."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Have the machine alone over several calls, all made by this thread or in a copy of its context; calls of
        other threads and stages wait meanwhile."""

    def confinement(self) -> Confinement:
        """What keeps this engine's workers from the rest of their machine."""

    def close(self) -> None:
        """End everything that is still running."""
