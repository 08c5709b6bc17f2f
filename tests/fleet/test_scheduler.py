"""What runs next, whatever fails and in whichever order: no job is lost, none ends twice, equal ones never run at
once."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compile_stage.fleet.journal import Journal
from compile_stage.fleet.scheduler import HELD, RUNNING, TRIES, Job, Lease, Scheduler
from compile_stage.fleet.simulation import Plan, simulate


class Fleet(RuleBasedStateMachine):
    """A scheduler, and what its caller writes down; a restart makes another scheduler of that."""

    @initialize(contents=st.lists(st.integers(0, 5), min_size=1, max_size=14), owners=st.integers(1, 3))
    def begin(self, contents: list[int], owners: int) -> None:
        self.jobs = {
            number: Job(number, f"o{number % owners}", float(number % 4), f"c{content}")
            for number, content in enumerate(contents)
        }
        self.attempts = dict.fromkeys(self.jobs, 0)
        self.losses = dict.fromkeys(self.jobs, 0)
        self.ends: dict[int, int] = dict.fromkeys(self.jobs, 0)
        self.settled: dict[int, tuple[bool, bool]] = {}
        self.running: dict[int, Lease] = {}
        self.stale: list[Lease] = []
        self.now = 0.0
        self.start()

    def start(self) -> None:
        self.scheduler = Scheduler()
        for job, (passed, conclusive) in self.settled.items():
            self.scheduler.remember(self.jobs[job].content, job, passed=passed, conclusive=conclusive)
        for job, lease in self.running.items():
            self.scheduler.resume(self.jobs[job], lease, self.now, losses=self.losses[job])
        for number, job in self.jobs.items():
            if not self.ends[number] and number not in self.running:
                self.scheduler.add(job, attempt=self.attempts[number], losses=self.losses[number])

    @rule()
    def take(self) -> None:
        lease = self.scheduler.take("node", self.now)
        if lease is None:
            return
        assert not self.ends[lease.job]
        assert lease.job not in self.running
        what = self.scheduler.looked(lease, self.jobs[lease.job].content)
        if what == RUNNING:
            self.attempts[lease.job] = lease.attempt
            self.running[lease.job] = lease
        elif what != HELD:
            assert isinstance(what, int)
            self.copy(lease.job, what)

    def copy(self, job: int, first: int) -> None:
        assert self.settled[first] == (False, True)
        assert self.jobs[job].content == self.jobs[first].content
        self.ends[job] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), passed=st.booleans(), conclusive=st.booleans())
    def end(self, data: st.DataObject, passed: bool, conclusive: bool) -> None:
        lease = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        conclusive = conclusive and not passed
        copies = self.scheduler.ended(lease, 5.0, passed=passed, conclusive=conclusive)
        assert copies is not None
        self.ends[lease.job] += 1
        self.settled[lease.job] = (passed, conclusive)
        for job in copies:
            self.copy(job, lease.job)
        self.stale.append(lease)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lease = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.losses[lease.job] += 1
        again = self.scheduler.lost(lease)
        assert again is (self.losses[lease.job] < TRIES)
        if not again:
            self.ends[lease.job] += 1
            self.settled[lease.job] = (False, False)
        self.stale.append(lease)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def end_late(self, data: st.DataObject) -> None:
        """A node that was given up says that it has ended a job."""
        lease = data.draw(st.sampled_from(self.stale))
        assert self.scheduler.ended(lease, 1.0, passed=True, conclusive=False) is None
        assert self.scheduler.lost(lease) is None

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        lease = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.scheduler.release(lease)
        self.stale.append(lease)

    @rule()
    def restart(self) -> None:
        """The process is killed; a new one reads what was written down."""
        self.start()

    @invariant()
    def none_ends_twice(self) -> None:
        assert all(count <= 1 for count in getattr(self, "ends", {}).values())

    @invariant()
    def equal_jobs_run_alone_until_one_passed(self) -> None:
        passed = {self.jobs[job].content for job, (ok, _) in getattr(self, "settled", {}).items() if ok}
        running = [self.jobs[job].content for job in getattr(self, "running", {})]
        assert all(running.count(content) == 1 for content in running if content not in passed)

    def teardown(self) -> None:
        """Whatever happened before: from here on all jobs end."""
        for _ in range(10 * len(getattr(self, "jobs", {}))):
            self.take()
            for lease in list(self.running.values()):
                del self.running[lease.job]
                copies = self.scheduler.ended(lease, 1.0, passed=True, conclusive=False)
                assert copies == []
                self.ends[lease.job] += 1
                self.settled[lease.job] = (True, False)
        if hasattr(self, "ends"):
            assert all(count == 1 for count in self.ends.values()), "a job was lost"
            assert self.scheduler.left == 0


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleet = Fleet.TestCase
TestFleet.__doc__ = "Broken: some order of failures and restarts loses a job, or ends or runs one twice."


def test_shares_are_fair_and_the_worst_comes_first() -> None:
    """Broken: the owner of a thousand models would keep the owner of one waiting, or requalification would begin
    anywhere."""
    scheduler = Scheduler()
    for number in range(50):
        scheduler.add(Job(number, "many", priority=-float(number), content=f"a{number}"))
    scheduler.add(Job(90, "one", content="b"))
    order = []
    for _ in range(4):
        lease = scheduler.take("node", 0.0)
        assert lease is not None
        assert scheduler.looked(lease, f"content of {lease.job}") == RUNNING
        scheduler.ended(lease, 10.0, passed=True, conclusive=False)
        order.append(lease.job)
    assert order == [49, 90, 48, 47]


def test_the_budget_ends_what_begins() -> None:
    """Broken: a fleet would go on for days beyond its budget, or cut off what runs."""
    scheduler = Scheduler(budget_s=25.0)
    scheduler.spent_s = 10.0
    for number in range(3):
        scheduler.add(Job(number, content=str(number)))
    for _ in range(2):
        lease = scheduler.take("node", 0.0)
        assert lease is not None
        scheduler.looked(lease, str(lease.job))
        scheduler.ended(lease, 10.0, passed=True, conclusive=False)
    assert scheduler.exhausted
    assert scheduler.take("node", 0.0) is None
    assert scheduler.left == 1


def test_a_simulated_fleet_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Broken: the loop, the scheduler and the journal together, on nodes that fail and come back, would lose jobs."""
    found = simulate(Plan(jobs=600, nodes=12, seed=3, failure_hours=3.0), tmp_path)
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["node_failures"] > 5
    assert found["late_ends"] > 0
    journal = Journal(tmp_path)
    states = dict(journal.select("SELECT state, count(*) FROM jobs GROUP BY state"))
    assert states == {"done": 600}
    assert next(journal.select("SELECT count(*) FROM jobs WHERE same_as IS NOT NULL"))[0] > 0
    journal.close()
