"""The workers in which candidates are lowered, compiled and validated, and who may use one after another.

Starting a process and importing a backend takes longer than a small network's job: 0.3 s for ONNX Runtime, 5 s for
PyTorch with ExecuTorch. So the trials of a search share workers, and those of a job are kept for the next of its
backend. What is measured, and what serves, always starts anew.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from compile_stage.core import plugins
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Job
from compile_stage.pipeline.inputs import TargetRun


@dataclass
class Pair:
    """The worker that lowers, and the one that compiles and runs: the same, unless the backend has a toolchain of its
    own, which holds only the backend's packages, or the lowering is a third party's, whose code could change what the
    backend answers in its process.

    Attributes:
        used: By another job before.
    """

    lowers: Worker
    runs: Worker
    used: bool = False


class Workers(Protocol):
    """Whoever hands out workers."""

    def opened(self, job: Job) -> AbstractContextManager[Pair]:
        """Those of one evaluation."""
        ...


@dataclass(frozen=True)
class NewWorkers:
    """Workers of their own for each evaluation.

    Attributes:
        seconds: No call goes on longer; None for the limits of each call alone.
        beside_others: Other jobs run at the same time.
    """

    target: TargetRun
    seconds: float | None = None
    beside_others: bool = False

    @contextmanager
    def opened(self, job: Job) -> Iterator[Pair]:
        """They end with the context."""
        context = self.target.context
        within = WorkerLimits.within(self.target.run_policy.budget, job.target.threads)
        times_kernels = plugins.load("backends", job.backend).capabilities_for(job.target).times_kernels
        limits = replace(within, total_s=self.seconds, shares_cores=self.beside_others and not times_kernels)
        interpreter = plugins.interpreter_of(job.backend)
        with ExitStack() as stack:
            here = worker = stack.enter_context(context.worker(job.id, limits))
            if interpreter or _lowers_with_foreign_code(job):
                worker = stack.enter_context(context.worker(job.id, replace(limits, interpreter=interpreter)))
            yield Pair(here, worker)


class TrialWorkers:
    """The workers of one search, which all its trials use. After a crash, a time-out or too little memory the next
    trial has new ones, and each trial has where jobs may not follow each other (`_may_follow`).

    Args:
        ends: No call of theirs goes on longer, on `time.monotonic`'s clock.
    """

    def __init__(self, target: TargetRun, ends: float) -> None:
        self._target, self._ends = target, ends
        self._stack = ExitStack()
        self._pair: Pair | None = None

    @contextmanager
    def opened(self, job: Job) -> Iterator[Pair]:
        """For one trial; all trials are of one backend."""
        if self._pair is None or not _may_follow(job):
            self.close()
            new = NewWorkers(self._target, seconds=max(0.0, self._ends - time.monotonic()))
            self._pair = self._stack.enter_context(new.opened(job))
        try:
            yield self._pair
        except WorkerError as error:
            if error.worker_is_gone:
                self.close()
            raise
        finally:
            if not _may_follow(job):
                self.close()
            elif self._pair is not None:
                self._pair = replace(self._pair, used=True)

    def close(self) -> None:
        """End them."""
        self._pair = None
        self._stack.close()


class JobWorkers:
    """The workers of a target's jobs, kept for the jobs of the same backend that are still to begin, as long as there
    is memory for those of other backends too, and where jobs may follow each other (`_may_follow`). Nothing is kept
    after a crash, a time-out or too little memory, or of an engine that does not say what memory is free.

    Args:
        jobs: That will be opened.
        room_bytes: As much memory stays free for workers to come.
    """

    def __init__(self, target: TargetRun, jobs: Iterable[Job], room_bytes: int, *, beside_others: bool) -> None:
        self._context = target.context
        self._new = NewWorkers(target, beside_others=beside_others)
        self._room_bytes = room_bytes
        self._to_come = Counter(job.backend for job in jobs)
        self._idle: dict[str, list[tuple[Pair, ExitStack]]] = defaultdict(list)
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, job: Job) -> Iterator[Pair]:
        """For one job. May be called from several threads."""
        pair, stack = self._take(job)
        sound = False
        try:
            yield pair
            sound = True
        except CompileStageError as error:
            sound = not (isinstance(error, WorkerError) and error.worker_is_gone)
            raise
        finally:
            if sound and self._is_kept(job):
                with self._lock:
                    self._idle[job.backend].append((replace(pair, used=True), stack.pop_all()))
            stack.close()  # of what is kept it is empty

    def _take(self, job: Job) -> tuple[Pair, ExitStack]:
        with self._lock:
            self._to_come[job.backend] -= 1
            if self._idle[job.backend] and _may_follow(job):
                return self._idle[job.backend].pop()
        stack = ExitStack()
        return stack.enter_context(self._new.opened(job)), stack

    def _is_kept(self, job: Job) -> bool:
        if not self._to_come[job.backend] or not _may_follow(job):
            return False
        free = self._context.free_memory_bytes()
        return free is not None and free >= self._room_bytes

    def close(self) -> None:
        """End those that nobody took."""
        for kept in self._idle.values():
            for _, stack in kept:
                stack.close()
        self._idle.clear()


def _may_follow(job: Job) -> bool:
    """Whether it may be done in a process where another of its backend was, and another after it: what is compiled must
    not depend on what was compiled before, and a third party's code could change what the next is made of."""
    if plugins.third_party("backends", job.backend) or _lowers_with_foreign_code(job):
        return False
    return bool(plugins.load("backends", job.backend).capabilities_for(job.target).follows_others)


def _lowers_with_foreign_code(job: Job) -> bool:
    return not job.scheme.native and bool(plugins.third_party("lowerings", job.scheme.precision))
