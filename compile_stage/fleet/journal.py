"""What a fleet is, and how far it got, in a database that survives kill -9.

Every step is one transaction, written before what it allows is done: an attempt before its process is started, an end
before the next job is taken. So a process that is started after a kill finds each job queued, begun or ended, and never
between. SQLite with a write-ahead log: a kill of the process loses nothing; of a power failure the last steps may be
lost, and then the job runs again and publishes what is there already.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_stage.core.errors import StorageError
from compile_stage.fleet.outcomes import JobOutcome

FILE = "fleet.db"
_BATCH = 500  # planned jobs of a transaction
_SCHEMA = """
CREATE TABLE IF NOT EXISTS fleets (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL, given TEXT NOT NULL,
    began_at REAL NOT NULL, planned_at REAL, ended_at REAL, skipped INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY, fleet INTEGER NOT NULL, uri TEXT NOT NULL, name TEXT NOT NULL, version TEXT NOT NULL,
    policy TEXT NOT NULL, policy_path TEXT NOT NULL, policy_digest TEXT NOT NULL, targets TEXT NOT NULL,
    owner TEXT NOT NULL, location TEXT NOT NULL, priority REAL NOT NULL, why TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued', attempt INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0,
    content TEXT NOT NULL DEFAULT '', same_as INTEGER, passed INTEGER, conclusive INTEGER, exit_code INTEGER,
    problem TEXT NOT NULL DEFAULT '', seconds REAL NOT NULL DEFAULT 0, ended_at REAL,
    UNIQUE (fleet, uri, policy)
);
CREATE INDEX IF NOT EXISTS jobs_by_name ON jobs (name, policy);
CREATE TABLE IF NOT EXISTS attempts (
    job INTEGER NOT NULL, attempt INTEGER NOT NULL, node TEXT NOT NULL, began_at REAL NOT NULL, ended_at REAL,
    exit_code INTEGER, PRIMARY KEY (job, attempt)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outcomes (
    job INTEGER NOT NULL, target TEXT NOT NULL, required INTEGER NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    winner TEXT NOT NULL, speedup REAL, published TEXT NOT NULL, note TEXT NOT NULL, regressed TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (job, target)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
    job INTEGER NOT NULL, step TEXT NOT NULL, seconds REAL NOT NULL, ran INTEGER NOT NULL, cached INTEGER NOT NULL,
    PRIMARY KEY (job, step)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One version under one policy.

    Attributes:
        targets: (name, required) of the policy's targets.
        location: Where the version's files are; two jobs with one location have the same files.
        priority: The least comes first.
        why: What is to be said of it beforehand, such as what changed since it was validated.
    """

    uri: str
    name: str
    version: str
    policy: str
    policy_path: str
    policy_digest: str
    targets: tuple[tuple[str, bool], ...]
    owner: str
    location: str = ""
    priority: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as it was written down; the fields of `PlannedJob` are in `planned`."""

    id: int
    planned: PlannedJob
    state: str
    attempt: int
    losses: int
    content: str


class Journal:
    """The fleets of a state folder. One process writes it; its methods are called from one thread.

    Raises:
        StorageError: The database can't be opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(folder / FILE, isolation_level=None, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"the fleet's state can't be opened: {error}", where=str(folder), fix="name another folder with --state"
            ) from error

    def close(self) -> None:
        """Give the file up."""
        self._db.close()

    # --------------------------------------------------------------------------------------------------------- fleets

    def unfinished(self, kind: str, spec: str) -> int | None:
        """The fleet of that kind and specification that has not ended."""
        row = self._one("SELECT id FROM fleets WHERE kind=? AND spec=? AND ended_at IS NULL", kind, spec)
        return None if row is None else int(row[0])

    def begin(self, kind: str, spec: str, given: Mapping[str, Any]) -> int:
        """A new fleet."""
        row = (kind, spec, json.dumps(given), time.time())
        cursor = self._db.execute("INSERT INTO fleets (kind, spec, given, began_at) VALUES (?,?,?,?)", row)
        return int(cursor.lastrowid or 0)

    def abandon(self, fleet: int) -> None:
        """Another takes its place; what it found is kept."""
        self._db.execute("UPDATE fleets SET ended_at=? WHERE id=?", (time.time(), fleet))

    finish = abandon

    def fleet(self, fleet: int) -> dict[str, Any]:
        """The row of a fleet; `given` is what it was started with."""
        cursor = self._db.execute("SELECT * FROM fleets WHERE id=?", (fleet,))
        names = [column[0] for column in cursor.description]
        row = dict(zip(names, cursor.fetchone(), strict=True))
        return {**row, "given": json.loads(row["given"])}

    def note_skipped(self, fleet: int, count: int) -> None:
        """How many versions it leaves out."""
        self._db.execute("UPDATE fleets SET skipped=? WHERE id=?", (count, fleet))

    def is_planned(self, fleet: int) -> bool:
        """All its jobs are known."""
        row = self._one("SELECT planned_at FROM fleets WHERE id=?", fleet)
        return row is not None and row[0] is not None

    def plan(self, fleet: int, jobs: Iterable[PlannedJob]) -> int:
        """Write the jobs down as they come, some hundreds at a time; one that is there already stays as it is.

        Returns:
            How many the fleet has now.
        """
        batch: list[PlannedJob] = []
        for job in jobs:
            batch.append(job)
            if len(batch) == _BATCH:
                self._insert(fleet, batch)
                batch.clear()
        self._insert(fleet, batch)
        self._db.execute("UPDATE fleets SET planned_at=? WHERE id=?", (time.time(), fleet))
        return self.count(fleet)

    def plan_again(self, fleet: int, jobs: Iterable[PlannedJob], *, passed_too: bool = False) -> list[int]:
        """The jobs as they are planned now. What waits and is planned no more is taken out.

        Args:
            passed_too: What passed and is planned all the same waits again.

        Returns:
            The jobs that were taken out, whose numbers others may get.
        """
        planned = {(job.uri, job.policy): job for job in jobs}
        rows = [(row.id, planned.get((row.planned.uri, row.planned.policy))) for row in self.jobs(fleet, "queued")]
        gone = [job for job, now in rows if now is None]
        with self._transaction() as db:
            for job in gone:
                db.execute("DELETE FROM attempts WHERE job=?", (job,))
                db.execute("DELETE FROM jobs WHERE id=?", (job,))
            db.executemany(
                "UPDATE jobs SET priority=?, why=?, policy_path=? WHERE id=?",
                [(now.priority, now.why, now.policy_path, job) for job, now in rows if now is not None],
            )
            if passed_too:
                db.executemany(
                    "UPDATE jobs SET state='queued', priority=?, why=? WHERE fleet=? AND uri=? AND policy=? AND "
                    "state='done' AND passed",
                    [(now.priority, now.why, fleet, *key) for key, now in planned.items()],
                )
        self.plan(fleet, planned.values())
        return gone

    def count(self, fleet: int, state: str = "") -> int:
        """Jobs, or those in a state."""
        if state:
            row = self._one("SELECT count(*) FROM jobs WHERE fleet=? AND state=?", fleet, state)
        else:
            row = self._one("SELECT count(*) FROM jobs WHERE fleet=?", fleet)
        return int(row[0]) if row is not None else 0

    # ----------------------------------------------------------------------------------------------------------- jobs

    def jobs(self, fleet: int, *states: str) -> Iterator[JobRow]:
        """Its jobs in those states, in the order in which they were planned."""
        marks = ",".join("?" * len(states))
        query = f"SELECT id FROM jobs WHERE fleet=? AND state IN ({marks}) ORDER BY id"  # noqa: S608 - of marks alone
        for (job,) in self._db.execute(query, (fleet, *states)).fetchall():
            yield self.job(job)

    def job(self, job: int) -> JobRow:
        """One job."""
        row = self._one(
            "SELECT uri, name, version, policy, policy_path, policy_digest, targets, owner, location, priority, why, "
            "state, attempt, losses, content FROM jobs WHERE id=?",
            job,
        )
        assert row is not None
        targets = tuple((name, bool(required)) for name, required in json.loads(row[6]))
        planned = PlannedJob(
            uri=row[0], name=row[1], version=row[2], policy=row[3], policy_path=row[4], policy_digest=row[5],
            targets=targets, owner=row[7], location=row[8], priority=row[9], why=row[10],
        )  # fmt: skip
        return JobRow(job, planned, state=row[11], attempt=row[12], losses=row[13], content=row[14])

    def settled(self, fleet: int) -> Iterator[tuple[int, str, bool, bool, float]]:
        """Of the jobs that ended by a run of their own: id, content, passed, conclusive, seconds."""
        query = (
            "SELECT id, content, passed, conclusive, seconds FROM jobs WHERE fleet=? AND state='done' AND "
            "same_as IS NULL AND passed IS NOT NULL"
        )
        for job, content, passed, conclusive, seconds in self._db.execute(query, (fleet,)):
            yield job, content, bool(passed), bool(conclusive), seconds

    def found(self, job: int, content: str) -> None:
        """What a job is about is known."""
        self._db.execute("UPDATE jobs SET content=? WHERE id=?", (content, job))

    def begun(self, job: int, attempt: int, node: str, at: float) -> None:
        """An attempt is about to be started."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET state='running', attempt=? WHERE id=?", (attempt, job))
            db.execute(
                "INSERT OR IGNORE INTO attempts (job, attempt, node, began_at) VALUES (?,?,?,?)",
                (job, attempt, node, at),
            )

    def ran_on(self, job: int, attempt: int, node: str) -> None:
        """Where an attempt ran, which a cluster says when it has ended."""
        self._db.execute("UPDATE attempts SET node=? WHERE job=? AND attempt=?", (node, job, attempt))

    def queued(self, job: int, *, lost: bool, at: float) -> None:
        """An attempt is over without an end of the job."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET state='queued', losses=losses+? WHERE id=?", (int(lost), job))
            db.execute(
                "UPDATE attempts SET ended_at=? WHERE job=? AND ended_at IS NULL",
                (at, job),
            )

    def ended(self, job: int, outcome: JobOutcome, at: float) -> None:
        """A job has ended by itself, or has been lost too often."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET state='done', passed=?, conclusive=?, exit_code=?, problem=?, seconds=?, ended_at=? "
                "WHERE id=? AND state!='done'",
                (
                    outcome.passed, outcome.conclusive, outcome.exit_code, outcome.problem[:4000], outcome.seconds, at,
                    job,
                ),
            )  # fmt: skip
            db.execute(
                "UPDATE attempts SET ended_at=?, exit_code=? WHERE job=? AND ended_at IS NULL",
                (at, outcome.exit_code, job),
            )
            db.executemany(
                "INSERT OR REPLACE INTO outcomes (job, target, required, outcome, reason, winner, speedup, published, "
                "note) VALUES (?,?,?,?,?,?,?,?,?)",
                [
                    (job, t.target, t.required, t.outcome, t.reason[:2000], t.winner, t.speedup, t.published, t.note)
                    for t in outcome.targets
                ],
            )
            db.executemany(
                "INSERT OR REPLACE INTO steps VALUES (?,?,?,?,?)",
                [(job, step, *spent) for step, spent in outcome.steps.items()],
            )

    def copied(self, job: int, first: int, at: float) -> None:
        """A job ends as the one with the same content did."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET state='done', same_as=?, (passed, conclusive, exit_code, problem) = "
                "(SELECT passed, conclusive, exit_code, problem FROM jobs WHERE id=?), ended_at=? WHERE id=?",
                (first, first, at, job),
            )
            db.execute(
                "INSERT OR REPLACE INTO outcomes (job, target, required, outcome, reason, winner, speedup, published, "
                "note) SELECT ?, target, required, outcome, reason, winner, speedup, '', note FROM outcomes "
                "WHERE job=?",
                (job, first),
            )

    # -------------------------------------------------------------------------------------------------- regressions

    def failures(self, fleet: int) -> Iterator[tuple[int, str, str, str]]:
        """Of each target that failed: job, the model's name, policy, target."""
        yield from self._db.execute(
            "SELECT j.id, j.name, j.policy, o.target FROM jobs j JOIN outcomes o ON o.job=j.id "
            "WHERE j.fleet=? AND o.outcome IN ('failed', 'refused') ORDER BY j.id, o.target",
            (fleet,),
        ).fetchall()

    def before(self, fleet: int, name: str, policy: str, target: str) -> tuple[str, str] | None:
        """What an earlier fleet of the same kind last found of that target of the model: the version's URI, and the
        outcome. A run that could not say, or had no time to begin, found nothing."""
        row = self._one(
            "SELECT j.uri, o.outcome FROM jobs j JOIN outcomes o ON o.job=j.id WHERE j.fleet<? AND j.name=? AND "
            "j.policy=? AND o.target=? AND o.outcome NOT IN ('unknown', 'not begun') AND "
            "(SELECT kind FROM fleets WHERE id=j.fleet)=(SELECT kind FROM fleets WHERE id=?) "
            "ORDER BY j.fleet DESC, j.ended_at DESC LIMIT 1",
            fleet, name, policy, target, fleet,
        )  # fmt: skip
        return None if row is None else (str(row[0]), str(row[1]))

    def regressed(self, job: int, target: str, why: str) -> None:
        """Note that it passed before."""
        self._db.execute("UPDATE outcomes SET regressed=? WHERE job=? AND target=?", (why, job, target))

    # --------------------------------------------------------------------------------------------------------- reading

    def select(self, query: str, *arguments: Any) -> Iterator[tuple[Any, ...]]:
        """Rows of a query of our own, as they come."""
        yield from self._db.execute(query, arguments)

    def _one(self, query: str, *arguments: Any) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._db.execute(query, arguments).fetchone()
        return row

    def _insert(self, fleet: int, jobs: Iterable[PlannedJob]) -> None:
        rows = [
            (fleet, j.uri, j.name, j.version, j.policy, j.policy_path, j.policy_digest, json.dumps(j.targets), j.owner,
             j.location, j.priority, j.why)
            for j in jobs
        ]  # fmt: skip
        with self._transaction() as db:
            db.executemany(
                "INSERT OR IGNORE INTO jobs (fleet, uri, name, version, policy, policy_path, policy_digest, targets, "
                "owner, location, priority, why) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                rows,
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
