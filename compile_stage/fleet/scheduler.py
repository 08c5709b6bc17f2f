"""Which job of a fleet runs next, and what follows when one ends.

Pure: no clock, no disk, no threads. Times come in as seconds of whatever clock the caller has, so a simulation drives
the code that a real fleet runs. What must survive is written down by the caller (`journal`), from what these methods
answer.

A job is queued, then its content is looked at (which files and which policy it is about), then it runs. Jobs with the
same content never run at once: the later ones are held until the first has ended. If that one passed, its results are
in the cache, and the others run, to publish under their own names. If it ended in a way that its content alone decides,
the others end as it did, without a run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass

TRIES = 3
"""So often a job is started whose node was lost; what kills three nodes would kill the fourth."""
LEASE_S = 600.0
"""A job of which nothing was heard for so long is lost: its node is gone, or can't be reached."""
QUEUED, LOOKING, RUNNING, HELD, DONE = "queued", "looking", "running", "held", "done"
_FIRST_GUESS_S = 60.0  # of how long a job takes, before any has ended


@dataclass(frozen=True, slots=True)
class Job:
    """What the scheduler needs to know of a job.

    Attributes:
        owner: Whose share it is taken from.
        priority: The least comes first, among the jobs of one owner.
        content: What it computes; jobs with the same content give the same results. Empty: not known yet.
    """

    id: int
    owner: str = ""
    priority: float = 0.0
    content: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """One start of a job. A later attempt takes the job away from an earlier one."""

    job: int
    attempt: int
    node: str


@dataclass(slots=True)
class _Entry:
    job: Job
    state: str = QUEUED
    attempt: int = 0
    losses: int = 0
    content: str = ""
    lease: Lease | None = None
    heard: float = 0.0


class Scheduler:
    """The jobs of a fleet that have not ended, and who runs them.

    Args:
        budget_s: No job begins once so many seconds of jobs have been used; None: no limit.

    Attributes:
        spent_s: Seconds of all jobs that ended, in earlier processes too.
    """

    def __init__(self, *, budget_s: float | None = None) -> None:
        self._budget_s, self.spent_s = budget_s, 0.0
        self._entries: dict[int, _Entry] = {}
        self._queues: dict[str, list[tuple[float, int]]] = {}  # owner → heap of (priority, job)
        self._charged: dict[str, float] = defaultdict(float)  # owner → seconds of jobs that ended
        self._active: dict[str, int] = defaultdict(int)  # owner → jobs that have a place
        self._leased: dict[int, _Entry] = {}
        self._busy: dict[str, int] = {}  # content → the job that runs it first
        self._held: dict[str, deque[int]] = defaultdict(deque)
        self._cached: set[str] = set()  # contents that a job passed with
        self._concluded: dict[str, int] = {}  # content → the job whose end is everybody's
        self._ended = 0

    # -------------------------------------------------------------------------------------------------- what comes in

    def add(self, job: Job, *, attempt: int = 0, losses: int = 0) -> None:
        """Queue a job. `attempt` and `losses` are what an earlier process counted."""
        entry = _Entry(job, attempt=attempt, losses=losses, content=job.content)
        self._entries[job.id] = entry
        self._queue(entry)

    def resume(self, job: Job, lease: Lease, now: float, *, losses: int = 0) -> None:
        """A job that an earlier process had begun goes on, as the same attempt."""
        entry = _Entry(job, attempt=lease.attempt, losses=losses, content=job.content)
        self._entries[job.id] = entry
        self._give(entry, lease, now)
        entry.state = RUNNING
        if entry.content and entry.content not in self._cached:
            self._busy.setdefault(entry.content, job.id)

    def remember(self, content: str, job: int, *, passed: bool, conclusive: bool) -> None:
        """A job with that content ended in an earlier process."""
        if passed:
            self._cached.add(content)
        elif conclusive:
            self._concluded.setdefault(content, job)

    # -------------------------------------------------------------------------------------------------- what goes out

    def take(self, node: str, now: float) -> Lease | None:
        """The next job for a free place, which is to be looked at; None where there is none.

        Of the owners with jobs, the one that was given least comes first: seconds of its jobs that ended, and for each
        that runs the mean of all that ended. Owners that were given alike follow their names.
        """
        if self.exhausted:
            return None
        mean = self.spent_s / self._ended if self._ended else _FIRST_GUESS_S
        best = min(
            self._queues, key=lambda owner: (self._charged[owner] + mean * self._active[owner], owner), default=None
        )
        if best is None:
            return None
        _, job = heapq.heappop(self._queues[best])
        if not self._queues[best]:
            del self._queues[best]
        entry = self._entries[job]
        entry.attempt += 1
        lease = Lease(job, entry.attempt, node)
        self._give(entry, lease, now)
        entry.state = LOOKING
        return lease

    def looked(self, lease: Lease, content: str) -> str | int:
        """What is to be done with a job whose content is known now: `RUNNING`: start it; `HELD`: nothing, another is
        computing the same; a job's id: it has ended as that one did."""
        entry = self._entries[lease.job]
        if entry.lease != lease:
            return HELD
        entry.content = content
        if (first := self._concluded.get(content)) is not None:
            self._let_go(entry)
            self._forget(entry)
            return first
        if content not in self._cached and self._busy.setdefault(content, lease.job) != lease.job:
            self._let_go(entry)
            entry.attempt -= 1  # which was not begun
            entry.state = HELD
            self._held[content].append(lease.job)
            return HELD
        entry.state = RUNNING
        return RUNNING

    def heard(self, lease: Lease, now: float) -> None:
        """Somebody still sees to it."""
        if (entry := self._leased.get(lease.job)) is not None and entry.lease == lease:
            entry.heard = now

    def overdue(self, now: float) -> list[Lease]:
        """What nobody was heard of for `LEASE_S`."""
        return [e.lease for e in self._leased.values() if e.lease is not None and now - e.heard > LEASE_S]

    # -------------------------------------------------------------------------------------------------- how jobs end

    def ended(self, lease: Lease, seconds: float, *, passed: bool, conclusive: bool) -> list[int] | None:
        """A job has ended by itself.

        Args:
            conclusive: It failed, and its content alone decided that.

        Returns:
            The jobs that end as it did; None where the attempt is no longer the job's, and nothing of it counts.
        """
        entry = self._current(lease)
        if entry is None:
            return None
        self._let_go(entry)
        self._forget(entry)
        self.spent_s += seconds
        self._ended += 1
        self._charged[entry.job.owner] += seconds
        return self._release_held(entry, passed=passed, conclusive=conclusive)

    def lost(self, lease: Lease) -> bool | None:
        """A job's process or node is gone. True: it is queued again; False: it was lost too often, and has ended; None:
        the attempt is no longer the job's."""
        entry = self._current(lease)
        if entry is None:
            return None
        self._let_go(entry)
        entry.losses += 1
        again = entry.losses < TRIES
        if again:
            self._queue(entry)
        else:
            self._forget(entry)
        self._release_held(entry, passed=False, conclusive=False)
        return again

    def release(self, lease: Lease) -> None:
        """Queue again what was interrupted since the fleet is stopped: that is no loss."""
        entry = self._current(lease)
        if entry is not None:
            self._let_go(entry)
            self._queue(entry)
            self._release_held(entry, passed=False, conclusive=False)

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def exhausted(self) -> bool:
        """The budget is used up."""
        return self._budget_s is not None and self.spent_s >= self._budget_s

    @property
    def running(self) -> int:
        """Jobs that have a place."""
        return len(self._leased)

    @property
    def left(self) -> int:
        """Jobs that have not ended."""
        return len(self._entries)

    # ------------------------------------------------------------------------------------------------------- its parts

    def _queue(self, entry: _Entry) -> None:
        entry.state = QUEUED
        heapq.heappush(self._queues.setdefault(entry.job.owner, []), (entry.job.priority, entry.job.id))

    def _give(self, entry: _Entry, lease: Lease, now: float) -> None:
        entry.lease, entry.heard = lease, now
        self._leased[entry.job.id] = entry
        self._active[entry.job.owner] += 1

    def _let_go(self, entry: _Entry) -> None:
        entry.lease = None
        del self._leased[entry.job.id]
        self._active[entry.job.owner] -= 1

    def _forget(self, entry: _Entry) -> None:
        entry.state = DONE
        del self._entries[entry.job.id]

    def _current(self, lease: Lease) -> _Entry | None:
        entry = self._leased.get(lease.job)
        return entry if entry is not None and entry.lease == lease else None

    def _release_held(self, entry: _Entry, *, passed: bool, conclusive: bool) -> list[int]:
        """What waited for a content: all of it, once that is in the cache; else the next, which computes it."""
        content = entry.content
        if passed and content:
            self._cached.add(content)
        elif conclusive and content and content not in self._cached:
            self._concluded[content] = entry.job.id
        if self._busy.get(content) == entry.job.id:
            del self._busy[content]
        held = self._held.get(content)
        if not held or (content in self._busy and content not in self._cached):
            return []
        if content in self._concluded:
            copies = list(self._held.pop(content))
            for job in copies:
                self._forget(self._entries[job])
            return copies
        for _ in range(len(held) if content in self._cached else 1):
            self._queue(self._entries[held.popleft()])
        if not held:
            del self._held[content]
        return []
