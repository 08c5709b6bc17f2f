"""An engine: where workers run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from compile_stage.core.ports.plugin import Plugin
from compile_stage.core.records import Budget, record


@record
class Needs:
    """What a worker may use.

    Attributes:
        timeout_s: Per call.
        total_s: No call goes on longer than this after the worker's start; None for no such limit.
        exclusive: Nothing else may run on the machine meanwhile.
        interpreter: Python executable that runs the worker; empty means this one.
    """

    cpus: int = 1
    memory_bytes: int = 12_000_000_000
    timeout_s: float = 900.0
    exclusive: bool = False
    interpreter: str = ""
    total_s: float | None = None

    @classmethod
    def within(cls, budget: Budget, cpus: int = 2, interpreter: str = "") -> Needs:
        """What a policy grants to one worker."""
        return cls(
            cpus=cpus,
            memory_bytes=int(budget.job_memory_mb * 1e6),
            timeout_s=budget.job_minutes * 60,
            interpreter=interpreter,
        )


class Worker(Protocol):
    """One process of one interpreter, which lives as long as its job so that start-up is paid once."""

    def call(self, function: str, /, **arguments: Any) -> Any:
        """Run a function of `compile_stage.engine.calls` there; arguments and result are plain JSON (records are converted).

        Raises:
            WorkerError: it crashed, ran out of memory, took too long, or raised.
            CompileStageError: of the same class as was raised there, when it was one of ours for people.
        """


class Engine(Plugin, Protocol):
    """Where workers run (`compile_stage.engines`)."""

    def worker(self, name: str, needs: Needs) -> AbstractContextManager[Worker]:
        """Start a worker; leaving the context ends it and all that it started. `name` is for logs."""

    def room(self, memory_bytes: int) -> int:
        """How many workers that hold so much memory each can compile at once; at least 1."""

    def alone(self) -> AbstractContextManager[None]:
        """Have the machine alone over several calls, all made by this thread; calls of other threads and stages wait meanwhile."""

    def close(self) -> None:
        """End everything that is still running."""
