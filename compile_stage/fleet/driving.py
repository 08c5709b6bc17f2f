"""The loop of a fleet: free places are filled, what ends is written down, until nothing is left.

Whatever runs the jobs is an `Executor`, and what they are about is `Work`; the loop knows neither a process nor a
model, and takes its time from the executor. So `simulation` drives it with a hundred thousand jobs in a few minutes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compile_stage.core.errors import EXIT_GATE, EXIT_INTERRUPTED
from compile_stage.fleet.journal import JobRow, Journal
from compile_stage.fleet.outcomes import UNKNOWN, JobOutcome, TargetOutcome
from compile_stage.fleet.scheduler import LEASE_S, RUNNING, TRIES, Job, Lease, Scheduler

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
_BEAT_S = LEASE_S / 10


@dataclass(frozen=True, slots=True)
class Looked:
    """A job's content is known: see `Work.content`."""

    lease: Lease
    content: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's process has ended.

    Attributes:
        exit_code: None where it was killed, or its node is gone.
        node: Where it ran, as far as that was known late.
    """

    lease: Lease
    exit_code: int | None
    seconds: float
    problem: str = ""
    node: str = ""


class Executor(Protocol):
    """What runs jobs. Nothing of it raises for what happens to a job."""

    def now(self) -> float:
        """Seconds of its clock."""

    def free(self) -> Iterable[str]:
        """The nodes that have a place for a job, once for each place."""

    def look(self, lease: Lease, row: JobRow) -> None:
        """Find out, beside the loop, what a job is about; `Looked` says so. The place is taken from now on."""

    def start(self, lease: Lease, row: JobRow) -> None:
        """Start it, or what an earlier process began."""

    def drop(self, lease: Lease) -> None:
        """The place of a job that is not started is free again."""

    def wait(self, seconds: float) -> list[Looked | Ended]:
        """What happened, as soon as something has; nothing after so many seconds."""

    def alive(self) -> Iterable[Lease]:
        """What is known to be seen to."""

    def interrupt(self) -> None:
        """End what runs, and keep what is finished of it."""


class Work(Protocol):
    """What the jobs are about."""

    def content(self, row: JobRow) -> str:
        """What a job computes: two jobs of one content have the same results. Called beside the loop; raises
        nothing."""

    def hardware(self, row: JobRow) -> Mapping[str, str]:
        """What its targets are for, as a policy's `hardware`; empty for any."""

    def command(self, row: JobRow, out: Path) -> list[str]:
        """What runs a job, and leaves its results in the folder `out`."""

    def outcome(self, row: JobRow, ended: Ended) -> JobOutcome:
        """What a job that ended by itself left."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A job that ended, for who looks on. `same_as`: it did as that one, without a run."""

    row: JobRow
    outcome: JobOutcome | None
    ended: int
    jobs: int
    same_as: int | None = None


class Drive:
    """One process's work on a fleet that is planned.

    Attributes:
        say: Hears of every job that ends.
        stop: Set it to have the fleet interrupted.
    """

    def __init__(self, journal: Journal, fleet: int, scheduler: Scheduler, executor: Executor, work: Work) -> None:
        self._journal, self._fleet, self._scheduler = journal, fleet, scheduler
        self._executor, self._work = executor, work
        self._jobs, self._ended = journal.count(fleet), journal.count(fleet, "done")
        self.say: Callable[[Progress], object] = lambda _: None
        self.stop = threading.Event()
        self._interrupted = False
        self._rows: dict[int, JobRow] = {}  # of what has a place
        self._resumed: set[Lease] = set()  # what an earlier process had begun

    def run(self) -> None:
        """Until every job has ended, the budget is used up, or it is stopped. Written down: all of it, as it
        happens."""
        self._resume()
        beat = self._executor.now()
        while self._scheduler.left:
            if self.stop.is_set() and not self._interrupted:
                self._interrupted = True
                self._executor.interrupt()
            took = not self._interrupted and self._fill()
            if not self._scheduler.running:
                if took:
                    continue
                return  # nothing is left to begin: interrupted, or the budget is used up
            for event in self._executor.wait(_WAIT_S):
                if isinstance(event, Looked):
                    self._looked(event)
                else:
                    self._end(event)
            now = self._executor.now()
            if now - beat > _BEAT_S:
                beat = now
                self._look_after(now)

    # ------------------------------------------------------------------------------------------------------- its parts

    def _resume(self) -> None:
        """What an earlier process knew. What it had begun goes on as the same attempt, which finds its outcome where
        it has ended meanwhile."""
        for job, content, passed, conclusive, seconds in self._journal.settled(self._fleet):
            self._scheduler.spent_s += seconds
            self._scheduler.remember(content, job, passed=passed, conclusive=conclusive)
        now = self._executor.now()
        for row in self._journal.jobs(self._fleet, "running"):
            lease = Lease(row.id, row.attempt, "")
            self._scheduler.resume(_job(row), lease, now, losses=row.losses)
            self._rows[row.id] = row
            self._resumed.add(lease)
            self._executor.start(lease, row)
        for row in self._journal.jobs(self._fleet, "queued"):
            self._scheduler.add(_job(row), attempt=row.attempt, losses=row.losses)

    def _fill(self) -> bool:
        """True if a place was filled, if only for a moment."""
        took = False
        for node in self._executor.free():
            lease = self._scheduler.take(node, self._executor.now())
            if lease is None:
                break
            took = True
            row = self._rows[lease.job] = self._journal.job(lease.job)
            if row.content:
                self._looked(Looked(lease, row.content))
            else:
                self._executor.look(lease, row)
        return took

    def _looked(self, event: Looked) -> None:
        lease, row = event.lease, self._rows[event.lease.job]
        if self._interrupted:
            self._scheduler.release(lease)
            self._executor.drop(lease)
            return
        self._journal.found(lease.job, event.content)
        what = self._scheduler.looked(lease, event.content)
        if what == RUNNING:
            self._journal.begun(lease.job, lease.attempt, lease.node, self._executor.now())
            self._executor.start(lease, row)
            return
        self._executor.drop(lease)
        if isinstance(what, int):
            self._copy(lease.job, what)

    def _end(self, event: Ended) -> None:
        lease = event.lease
        cut = event.exit_code is None or event.exit_code < 0 or event.exit_code == EXIT_INTERRUPTED
        # What ended with the process that had begun it is no loss of a node.
        if cut and (self._interrupted or lease in self._resumed):
            self._scheduler.release(lease)
            self._journal.queued(lease.job, lost=False, at=self._executor.now())
            return
        if cut:
            self._lost(lease, event)
            return
        row = self._rows.get(lease.job)
        if row is None:
            return  # an attempt that was given up long ago
        outcome = self._work.outcome(row, event)
        copies = self._scheduler.ended(lease, outcome.seconds, passed=outcome.passed, conclusive=outcome.conclusive)
        if copies is None:
            _log.warning("job %d, attempt %d ended after it was given up", lease.job, lease.attempt)
            return
        if event.node:
            self._journal.ran_on(lease.job, lease.attempt, event.node)
        self._finish(row, outcome)
        for copy in copies:
            self._copy(copy, lease.job)

    def _lost(self, lease: Lease, event: Ended) -> None:
        again = self._scheduler.lost(lease)
        if again is None:
            return
        if again:
            _log.warning("job %d, attempt %d was lost: %s", lease.job, lease.attempt, event.problem or "begun again")
            self._journal.queued(lease.job, lost=True, at=self._executor.now())
            return
        row = self._rows[lease.job]
        problem = f"its process or node was lost {TRIES} times; the last: {event.problem or 'without a word'}"
        targets = tuple(
            TargetOutcome(target=name, required=required, outcome=UNKNOWN, reason=problem)
            for name, required in row.planned.targets
        )
        outcome = JobOutcome(
            passed=False, conclusive=False, exit_code=EXIT_GATE, problem=problem, seconds=event.seconds,
            targets=targets, steps={},
        )  # fmt: skip
        self._finish(row, outcome)

    def _look_after(self, now: float) -> None:
        for lease in self._executor.alive():
            self._scheduler.heard(lease, now)
        for lease in self._scheduler.overdue(now):
            self._executor.drop(lease)
            self._lost(lease, Ended(lease, None, 0.0, f"nothing was heard of {lease.node or 'it'} for {LEASE_S:.0f} s"))

    def _finish(self, row: JobRow, outcome: JobOutcome) -> None:
        self._journal.ended(row.id, outcome, self._executor.now())
        self._rows.pop(row.id, None)
        self._ended += 1
        self.say(Progress(row, outcome, self._ended, self._jobs))

    def _copy(self, job: int, first: int) -> None:
        self._journal.copied(job, first, self._executor.now())
        self._ended += 1
        self._rows.pop(job, None)
        self.say(Progress(self._journal.job(job), None, self._ended, self._jobs, same_as=first))


def _job(row: JobRow) -> Job:
    return Job(row.id, row.planned.owner, row.planned.priority, row.content)
