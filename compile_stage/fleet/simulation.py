"""A fleet without models: the scheduler, the journal and the loop of a real one, with tasks that only take time.

Nodes fail, silently, in the middle of a job; some come back and report the end of what was taken from them long ago;
tasks are killed. Time is simulated, so that a hundred thousand jobs over five hundred nodes take minutes. What is
counted is what the fleet's own code costs for each job, and whether a job was lost, or ended twice.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_stage.core.errors import EXIT_INTERRUPTED
from compile_stage.fleet.driving import Drive, Ended, Executor, Looked
from compile_stage.fleet.journal import JobRow, Journal, PlannedJob
from compile_stage.fleet.outcomes import JobOutcome, TargetOutcome
from compile_stage.fleet.scheduler import Lease, Scheduler

_PLACES = 2  # of a node
_KILLED = 0.002  # share of tasks that are killed alone
_TASK_S = (60.0, 900.0)
_AWAY_S = (300.0, 7200.0)  # a node that failed is back after this
_SAME = 0.05  # share of jobs whose content another has too
_OWNERS = 20


@dataclass(frozen=True)
class Plan:
    """What is simulated.

    Attributes:
        failure_hours: Mean time until a node fails.
        failing: Share of jobs that fail by their content.
    """

    jobs: int
    nodes: int
    seed: int = 0
    failure_hours: float = 50.0
    failing: float = 0.02


class SimulatedNodes(Executor):
    """Nodes whose tasks take simulated seconds."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._random, self._now = plan, random.Random(plan.seed), 0.0  # noqa: S311 - no secret
        self._free = Counter({f"node-{number:04d}": _PLACES for number in range(plan.nodes)})
        self._open = set(self._free)
        self._events: list[tuple[float, int, str, Any]] = []
        self._count = 0
        self._ready: list[Looked | Ended] = []
        self._tasks: dict[Lease, str] = {}  # what runs, or ran on a node that failed
        self._away: set[str] = set()
        self.failures = self.late = 0
        self.begun: Counter[int] = Counter()
        for node in self._free:
            self._fail_later(node)

    def now(self) -> float:
        return self._now

    def free(self) -> Iterable[str]:
        return [node for node in sorted(self._open) for _ in range(self._free[node])]

    def look(self, lease: Lease, row: JobRow) -> None:
        self._take(lease)
        self._ready.append(Looked(lease, row.planned.location))

    def start(self, lease: Lease, row: JobRow) -> None:
        if lease not in self._tasks:
            self._take(lease)
        self.begun[row.id] += 1
        seconds = self._random.uniform(*_TASK_S)
        killed = self._random.random() < _KILLED
        code = None if killed else 3 if _fails(row.planned.location, self._plan) else 0
        self._later(seconds, "ends", (lease, code, seconds))

    def drop(self, lease: Lease) -> None:
        self._give_back(lease)

    def wait(self, seconds: float) -> list[Looked | Ended]:
        if not self._ready and self._events:
            self._now = max(self._now, self._events[0][0])
        until = self._now + seconds if not self._ready else self._now
        while self._events and self._events[0][0] <= until and not self._ready:
            self._now, _, what, about = heapq.heappop(self._events)
            getattr(self, f"_{what}")(about)
        ready, self._ready = self._ready, []
        return ready

    def alive(self) -> Iterable[Lease]:
        return [lease for lease, node in self._tasks.items() if node not in self._away]

    def interrupt(self) -> None:
        self._events.clear()
        self._ready += [Ended(lease, EXIT_INTERRUPTED, 1.0) for lease in self._tasks]
        self._tasks.clear()

    # -------------------------------------------------------------------------------------------------- what happens

    def _ends(self, about: tuple[Lease, int | None, float]) -> None:
        lease, code, seconds = about
        node = self._tasks.get(lease)
        if lease.node in self._away:  # it goes on there, unheard, and says so when the node is back
            self._later(self._random.uniform(*_AWAY_S), "ends", about)
            return
        self.late += node is None
        self._give_back(lease)
        self._ready.append(Ended(lease, code, seconds))

    def _fails(self, node: str) -> None:
        self.failures += 1
        self._away.add(node)
        self._open.discard(node)
        self._later(self._random.uniform(*_AWAY_S), "returns", node)

    def _returns(self, node: str) -> None:
        self._away.discard(node)
        if self._free[node]:
            self._open.add(node)
        self._fail_later(node)

    def _fail_later(self, node: str) -> None:
        self._later(self._random.expovariate(1 / (self._plan.failure_hours * 3600)), "fails", node)

    def _later(self, seconds: float, what: str, about: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now + seconds, self._count, what, about))

    def _take(self, lease: Lease) -> None:
        self._tasks[lease] = lease.node
        self._free[lease.node] -= 1
        if not self._free[lease.node]:
            self._open.discard(lease.node)

    def _give_back(self, lease: Lease) -> None:
        node = self._tasks.pop(lease, None)
        if node is not None:
            self._free[node] += 1
            if node not in self._away:
                self._open.add(node)


class SimulatedWork:
    """Work that only takes time."""

    def content(self, row: JobRow) -> str:
        return row.planned.location

    def hardware(self, row: JobRow) -> Mapping[str, str]:
        return {}

    def command(self, row: JobRow, out: Path) -> list[str]:
        return []

    def outcome(self, row: JobRow, ended: Ended) -> JobOutcome:
        passed = ended.exit_code == 0
        target = TargetOutcome(target="t", required=True, outcome="passed" if passed else "failed")
        return JobOutcome(
            passed=passed, conclusive=not passed, exit_code=ended.exit_code or 0, seconds=ended.seconds,
            targets=(target,), steps={"compile": (ended.seconds, 1, 0)},
        )  # fmt: skip


def simulate(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run the simulation on a journal in the folder.

    Returns:
        `overhead_ms`: wall time of all of it, for each job, without planning; `lost` and `doubled` jobs; how many nodes
        failed, tasks were begun, and ends came too late to count; simulated hours; the largest and smallest share of an
        owner's seconds over the mean, when half of the jobs had ended.
    """
    journal, nodes = Journal(folder), SimulatedNodes(plan)
    fleet = journal.begin("run", "simulated", {})
    began = time.perf_counter()
    journal.plan(fleet, simulated_jobs(plan))
    planned = time.perf_counter()
    drive = Drive(journal, fleet, Scheduler(), nodes, SimulatedWork())
    ends: Counter[int] = Counter()
    half: dict[str, float] = {}

    def hear(progress: Any) -> None:
        ends[progress.row.id] += 1
        if progress.ended == plan.jobs // 2:
            half.update(dict(journal.select("SELECT owner, sum(seconds) FROM jobs GROUP BY owner")))

    drive.say = hear
    drive.run()
    done = time.perf_counter()
    unfinished = plan.jobs - journal.count(fleet, "done")
    journal.close()
    mean = sum(half.values()) / len(half) if half else 1.0
    return {
        "overhead_ms": round((done - planned) * 1e3 / plan.jobs, 3),
        "planning_ms": round((planned - began) * 1e3 / plan.jobs, 3),
        "lost": unfinished + sum(job not in ends for job in range(1, plan.jobs + 1)),
        "doubled": sum(count > 1 for count in ends.values()),
        "node_failures": nodes.failures,
        "begun": sum(nodes.begun.values()),
        "late_ends": nodes.late,
        "simulated_hours": round(nodes.now() / 3600, 1),
        "share_low": round(min(half.values(), default=mean) / mean, 3),
        "share_high": round(max(half.values(), default=mean) / mean, 3),
    }


def simulated_jobs(plan: Plan) -> Iterator[PlannedJob]:
    """Jobs of several owners, of which some have the content of another."""
    chance = random.Random(plan.seed + 1)  # noqa: S311 - no secret
    for number in range(plan.jobs):
        content = chance.randrange(number) if number and chance.random() < _SAME else number
        yield PlannedJob(
            uri=f"models:/m{number}/1", name=f"m{number}", version="1", policy="p", policy_path="", policy_digest="",
            # The first owner has half of all jobs, so that shares mean something.
            targets=(("t", True),), owner=f"owner-{number % _OWNERS if number % 2 else 0:02d}", location=f"c{content}",
        )  # fmt: skip


def _fails(content: str, plan: Plan) -> bool:
    return random.Random(f"{plan.seed} {content}").random() < plan.failing  # noqa: S311 - no secret
