"""The durable queue: deliveries → versions to look at → jobs, each once.

Every step is one transaction: what is taken out of one table is in the next, whenever the process is killed. A job is
known by its kind, version and subject (the policy's name), which the database holds unique, so a version that ten
deliveries and the poll report is compiled once.

Several machines may share the queue, and their clocks differ and jump. So no time that one wrote is held against the
clock of another: whether an owner is silent is measured by the reader's monotonic clock, from when its last sign was
first seen. And whatever an owner writes of a job, it writes only while the attempt is still its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compile_stage.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REGISTRY
from compile_stage.service.deliveries import Delivery, Refused
from compile_stage.service.store import Store, insert_once, table

LOST_S = 120.0
"""A job whose owner has not been heard of for so long is free again: another machine's service had it."""
_LONGEST_RETRY_S = 3600.0
_KEEP_DELIVERIES_S = 7 * 86400  # far longer than a signature is fresh
_KEEP_REFUSALS = 500  # rows
_ATTEMPTS = 6
_LOOK_PAUSE_S = (2.0, 300.0)  # first and longest, while the registry can't be reached
_QUEUED, _RUNNING, _DONE, _FAILED = "queued", "running", "done", "failed"


@dataclass(frozen=True)
class Look:
    """A version to look at."""

    id: int
    name: str
    version: str
    alias: str
    attempts: int


@dataclass(frozen=True)
class Job:
    """Work on one version.

    Attributes:
        kind: `run`, `promote` or `requalify`.
        subject: The policy's name; of a promotion the alias and the tag's value; else when it was due, and the
            fingerprint of the machines that it is for.
        attempt: Counted from 1; a new one is another start.
        tries: How many of them ended by themselves, since it was queued.
    """

    id: int
    kind: str
    name: str
    version: str
    subject: str
    attempt: int
    tries: int = 0

    @property
    def uri(self) -> str:
        """The version's."""
        return f"models:/{self.name}/{self.version}"


class Queue:
    """The queue in a database; its methods may be called from any thread. `changed` is set when there is news.

    Args:
        machine: This machine's fingerprint. A requalification that names another is left to machines that have it.
    """

    def __init__(self, store: Store, owner: str, retry_s: float = 30.0, machine: str = "") -> None:
        self._store, self._owner, self._retry_s, self._machine = store, owner, retry_s, machine
        self.changed = threading.Condition()
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}
        """Of attempts of others, by job and number: the last sign of life, and when it was first seen here."""
        self._seen_at = 0.0
        self._seen_lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------- deliveries

    def accept(self, delivery: Delivery) -> str:
        """Write a delivery down. Returns `accepted`, `duplicate`, or `own` for what the stage itself did."""
        now = time.time()
        with self._store.transaction() as connection:
            if not insert_once(connection, "deliveries", id=delivery.id, received_at=now):
                label = "duplicate"
            elif delivery.own:
                label = "own"
            else:
                label = "accepted"
                _add_look(connection, delivery.name, delivery.version, delivery.alias, delivery.event)
            deliveries = table("deliveries")
            connection.execute(deliveries.delete().where(deliveries.c.received_at < now - _KEEP_DELIVERIES_S))
            _count(connection, label)
        self._notify()
        return label

    def refuse(self, refused: Refused, peer: str) -> None:
        """Write down why one was not taken; the last few are kept."""
        with self._store.transaction() as connection:
            _count(connection, refused.reason)
            if refused.status == 200:
                return
            refusals, now = table("refusals"), time.time()
            row = {"at": now, "reason": refused.reason, "problem": refused.problem, "peer": peer[:64]}
            (newest,) = connection.execute(refusals.insert().values(**row)).inserted_primary_key or (0,)
            connection.execute(refusals.delete().where(refusals.c.id <= newest - _KEEP_REFUSALS))

    # ------------------------------------------------------------------------------------------ versions to look at

    def look_at(self, name: str, version: str, event: str) -> None:
        """Have a version looked at."""
        with self._store.transaction() as connection:
            _add_look(connection, name, version, "", event)
        self._notify()

    def is_awaited(self, name: str, version: str) -> bool:
        """True while a version is to be looked at, also where that was postponed."""
        looks = table("looks")
        same = looks.select().where((looks.c.name == name) & (looks.c.version == version))
        with self._store.transaction() as connection:
            return connection.execute(same).first() is not None

    def next_look(self) -> Look | None:
        """The oldest version that is due; it stays until `looked` or `postpone`."""
        looks = table("looks")
        due = _is_due(looks.c.not_before, _LOOK_PAUSE_S[1])
        first = looks.select().where(due).order_by(looks.c.id).limit(1)
        with self._store.transaction() as connection:
            row = connection.execute(first).one_or_none()
        return Look(row.id, row.name, row.version, row.alias, row.attempts) if row is not None else None

    def looked(self, look: Look, jobs: Iterable[tuple[str, str]]) -> int:
        """Add the jobs that a version needs, by kind and subject, unless they are known; returns how many are new."""
        with self._store.transaction() as connection:
            added = sum(_add_job(connection, kind, look.name, look.version, subject) for kind, subject in jobs)
            looks = table("looks")
            connection.execute(looks.delete().where(looks.c.id == look.id))
        self._notify()
        return added

    def postpone(self, look: Look, problem: str) -> None:
        """The registry could not be asked: again later, for as long as it takes."""
        first, longest = _LOOK_PAUSE_S
        pause_s = min(longest, first * 2 ** min(look.attempts, 16))
        looks = table("looks")
        values = {"attempts": look.attempts + 1, "not_before": time.time() + pause_s, "problem": problem[:1000]}
        with self._store.transaction() as connection:
            connection.execute(looks.update().where(looks.c.id == look.id).values(**values))

    # --------------------------------------------------------------------------------------------------------- jobs

    def add(self, kind: str, name: str, version: str, subject: str, *, again: bool = False) -> bool:
        """Add a job unless it is known; with `again` one that ended is queued once more. True if it is queued now."""
        jobs = table("jobs")
        with self._store.transaction() as connection:
            added = bool(_add_job(connection, kind, name, version, subject))
            if again and not added:
                same = (jobs.c.kind == kind) & (jobs.c.name == name) & (jobs.c.version == version)
                ended = same & (jobs.c.subject == subject) & jobs.c.state.in_((_DONE, _FAILED))
                values = {"state": _QUEUED, "not_before": 0, "exit_code": None, "problem": "", "tries": 0}
                added = connection.execute(jobs.update().where(ended).values(**values)).rowcount == 1
        self._notify()
        return added

    def has(self, kind: str, name: str, version: str, subject: str) -> bool:
        """True when the job is known, whatever became of it."""
        jobs = table("jobs")
        same = (jobs.c.kind == kind) & (jobs.c.name == name) & (jobs.c.version == version) & (jobs.c.subject == subject)
        with self._store.transaction() as connection:
            return connection.execute(jobs.select().where(same)).first() is not None

    def subjects(self, kind: str) -> tuple[str, ...]:
        """Of all jobs of a kind, whatever became of them: the policies' names, of runs."""
        jobs = table("jobs")
        with self._store.transaction() as connection:
            return tuple(sorted({row.subject for row in connection.execute(jobs.select().where(jobs.c.kind == kind))}))

    def claim(self, kinds: Iterable[str]) -> Job | None:
        """Take the oldest job that is due; its attempt is counted before anything is started."""
        from sqlalchemy import and_, false, or_

        jobs = table("jobs")
        others = jobs.select().where(jobs.c.state == _RUNNING, jobs.c.owner != self._owner)
        with self._store.transaction() as connection:
            # The sign of life is compared once more where the row is locked: its owner may have written another.
            silent = [
                and_(jobs.c.id == row.id, jobs.c.attempt == row.attempt, jobs.c.beat_at == row.beat_at)
                for row in self._silent(connection.execute(others).all())
            ]
            waiting = and_(jobs.c.state == _QUEUED, _is_due(jobs.c.not_before, self._longest_pause(jobs.c.tries)))
            lost = and_(jobs.c.state == _RUNNING, or_(false(), *silent))
            is_ours = or_(
                jobs.c.kind != "requalify",
                jobs.c.subject.endswith(f" {self._machine}", autoescape=True),
                ~jobs.c.subject.contains(" "),  # of a service before fingerprints were named
            )
            able = and_(jobs.c.kind.in_(list(kinds)), is_ours)
            first = jobs.select().where(able, or_(waiting, lost)).order_by(jobs.c.id).limit(1)
            row = connection.execute(first.with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                return None
            taken = {"state": _RUNNING, "owner": self._owner, "attempt": row.attempt + 1, "beat_at": time.time()}
            connection.execute(jobs.update().where(jobs.c.id == row.id).values(**taken))
        return Job(row.id, row.kind, row.name, row.version, row.subject, row.attempt + 1, row.tries)

    def _silent(self, running: Sequence[Any]) -> list[Any]:
        """Those jobs of others whose sign of life has not changed for `LOST_S`, while this service looked."""
        now = time.monotonic()
        with self._seen_lock:
            # After a pause, such as an outage of the database, the silence of others says nothing: they could not
            # write either.
            before = self._seen if now - self._seen_at < LOST_S / 2 else {}
            self._seen, self._seen_at = {}, now
            for row in running:
                sign, since = before.get((row.id, row.attempt), (row.beat_at, now))
                self._seen[row.id, row.attempt] = (row.beat_at, since if sign == row.beat_at else now)
            return [row for row in running if now - self._seen[row.id, row.attempt][1] > LOST_S]

    def unfinished(self) -> list[Job]:
        """What this service had begun when it was last killed."""
        jobs = table("jobs")
        mine = jobs.select().where(jobs.c.state == _RUNNING, jobs.c.owner == self._owner).order_by(jobs.c.id)
        with self._store.transaction() as connection:
            rows = connection.execute(mine).all()
        return [Job(row.id, row.kind, row.name, row.version, row.subject, row.attempt, row.tries) for row in rows]

    def beat(self, job: Job) -> bool:
        """Say that a job is still looked after. False where it is not this service's any more: it was silent for
        `LOST_S`, and another has begun the job again."""
        from sqlalchemy import select

        jobs = table("jobs")
        with self._store.transaction() as connection:
            # Never a value that was there before, whatever the clock does: that it changes is the sign.
            (last,) = connection.execute(select(jobs.c.beat_at).where(self._is_mine(job))).one_or_none() or (None,)
            if last is None:
                return False
            sign = {"beat_at": max(time.time(), last + 1.0)}
            return connection.execute(jobs.update().where(self._is_mine(job)).values(**sign)).rowcount == 1

    def _is_mine(self, job: Job) -> Any:
        """The condition that an attempt is under way and this service's."""
        jobs = table("jobs")
        mine = (jobs.c.id == job.id) & (jobs.c.owner == self._owner) & (jobs.c.attempt == job.attempt)
        return mine & (jobs.c.state == _RUNNING)

    def ended(
        self,
        job: Job,
        exit_code: int | None,
        seconds: float,
        problem: str,
        *,
        may_pass: bool = False,
        outage: bool = False,
    ) -> None:
        """Record how an attempt ended. Registry trouble, and other trouble that may pass, is tried again after a pause,
        and what was interrupted at once. Of a job that another has begun again meanwhile, only the attempt is recorded:
        the job is the other's.

        Args:
            exit_code: The stage's; None when the process was killed before it could say.
            may_pass: The trouble is none of the model or the policy: a full disk, say.
            outage: The service can't search the registry either, so registry trouble uses up no try: a token that
                expired at night would end all that waits before somebody renews it.
        """
        jobs, now = table("jobs"), time.time()
        fate = {"state": _DONE if exit_code == EXIT_OK else _FAILED, "ended_at": now}
        may_pass, tries = may_pass or exit_code == EXIT_REGISTRY, job.tries + 1
        if outage and exit_code == EXIT_REGISTRY:  # the pauses grow all the same, to the longest
            tries = min(tries, _ATTEMPTS - 1)
        if (may_pass or exit_code in (EXIT_INTERRUPTED, None)) and tries < _ATTEMPTS:
            pause_s = self._pause_s(tries) if may_pass else 0.0
            fate = {"state": _QUEUED, "not_before": now + pause_s}
        values = {**fate, "tries": tries, "exit_code": exit_code, "problem": problem[:2000]}
        attempt = {"job": job.id, "attempt": job.attempt, "kind": job.kind, "exit_code": exit_code, "seconds": seconds}
        with self._store.transaction() as connection:
            insert_once(connection, "attempts", **attempt, ended_at=now)
            connection.execute(jobs.update().where(self._is_mine(job)).values(**values))
        self._notify()

    def _pause_s(self, tries: int) -> float:
        """Seconds from the end of a job's try, its first being 1, to the next."""
        return min(self._retry_s * 4.0 ** (tries - 1), _LONGEST_RETRY_S)

    def _longest_pause(self, tries: Any) -> Any:
        """The seconds that a job waits at most after so many tries: a column. At least those for which another
        machine's clock may differ."""
        from sqlalchemy import case

        pauses = {n: max(self._pause_s(n), LOST_S) for n in range(1, _ATTEMPTS)}
        return case(pauses, value=tries, else_=_LONGEST_RETRY_S)

    def release(self, job: Job) -> None:
        """Put back what was interrupted since the service is stopped: that is no failed try. What another has begun
        again is left to it."""
        jobs = table("jobs")
        with self._store.transaction() as connection:
            connection.execute(jobs.update().where(self._is_mine(job)).values(state=_QUEUED, not_before=0))

    # ------------------------------------------------------------------------------------------------ the first start

    def remember_known(self, versions: Iterable[tuple[str, str]], idle: Iterable[tuple[str, str]] = ()) -> None:
        """Note the versions that were there before the service first searched, and those of them of which nobody had
        asked anything."""
        with self._store.transaction() as connection:
            for name, version in versions:
                insert_once(connection, "known", name=name, version=version)
            for name, version in idle:
                insert_once(connection, "idle", name=name, version=version)
            insert_once(connection, "counts", label="first search", value=1)

    def known(self) -> set[tuple[str, str]] | None:
        """Those; None before the first search."""
        counts, known = table("counts"), table("known")
        with self._store.transaction() as connection:
            looked = connection.execute(counts.select().where(counts.c.label == "first search")).first()
            return {(row.name, row.version) for row in connection.execute(known.select())} if looked else None

    def idle(self) -> set[tuple[str, str]]:
        """Those of the known versions of which nobody had asked anything then."""
        with self._store.transaction() as connection:
            return {(row.name, row.version) for row in connection.execute(table("idle").select())}

    # ------------------------------------------------------------------------------------------------------- reading

    def rows(self, name: str, limit: int) -> list[Mapping[str, Any]]:
        """The newest rows of a table, for the page."""
        where = table(name)
        with self._store.transaction() as connection:
            found = connection.execute(where.select().order_by(where.c.id.desc()).limit(limit))
            return [dict(row._mapping) for row in found]

    def job(self, job: int) -> Mapping[str, Any] | None:
        """One row of `jobs`."""
        jobs = table("jobs")
        with self._store.transaction() as connection:
            row = connection.execute(jobs.select().where(jobs.c.id == job)).one_or_none()
        return dict(row._mapping) if row is not None else None

    def figures(self, buckets: Iterable[float]) -> Figures:
        """What the metrics show."""
        from sqlalchemy import case, func, select

        counts, jobs, looks, attempts = (table(name) for name in ("counts", "jobs", "looks", "attempts"))
        sums = [func.sum(case((attempts.c.seconds <= bound, 1), else_=0)) for bound in buckets]
        states = (jobs.c.kind, jobs.c.state)
        ended = select(attempts.c.kind, func.count(), func.sum(attempts.c.seconds), *sums).group_by(attempts.c.kind)
        codes = (attempts.c.kind, attempts.c.exit_code)
        with self._store.transaction() as connection:
            return Figures(
                deliveries={row.label: row.value for row in connection.execute(counts.select())},
                looks=connection.execute(select(func.count()).select_from(looks)).scalar_one(),
                jobs=list(_rows(connection, select(*states, func.count()), *states)),
                exits=list(_rows(connection, select(*codes, func.count()), *codes)),
                durations=[tuple(row) for row in connection.execute(ended)],
            )

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


@dataclass(frozen=True)
class Figures:
    """Counts over all time, from the tables, so that a restart loses none.

    Attributes:
        deliveries: What became of them → how many.
        looks: Versions that wait to be looked at.
        jobs: (kind, state, how many).
        exits: (kind, exit code, how many attempts).
        durations: (kind, attempts, their seconds in all, how many of them took at most each of the buckets' seconds).
    """

    deliveries: Mapping[str, int]
    looks: int
    jobs: list[tuple[Any, ...]]
    exits: list[tuple[Any, ...]]
    durations: list[tuple[Any, ...]]


def _is_due(not_before: Any, longest_s: float) -> Any:
    """The condition that a pause is over. So is one that has twice its greatest length still before it: whoever wrote
    it had a clock that was far ahead, and what waits would wait for as long."""
    now = time.time()
    return (not_before <= now) | (not_before > now + 2 * longest_s)


def _rows(connection: Any, query: Any, *by: Any) -> Iterator[tuple[Any, ...]]:
    yield from map(tuple, connection.execute(query.group_by(*by).order_by(*by)))


def _add_look(connection: Any, name: str, version: str, alias: str, event: str) -> None:
    row = {"name": name, "version": version, "alias": alias, "event": event}
    connection.execute(table("looks").insert().values(**row, attempts=0, not_before=0, problem=""))


def _add_job(connection: Any, kind: str, name: str, version: str, subject: str) -> int:
    row = {
        "kind": kind,
        "name": name,
        "version": version,
        "subject": subject,
        "state": _QUEUED,
        "attempt": 0,
        "tries": 0,
    }
    return int(insert_once(connection, "jobs", **row, not_before=0, queued_at=time.time(), problem="", owner=""))


def _count(connection: Any, label: str) -> None:
    insert_once(connection, "counts", label=label, value=0)
    counts = table("counts")
    connection.execute(counts.update().where(counts.c.label == label).values(value=counts.c.value + 1))
