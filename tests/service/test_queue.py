"""The durable queue: nothing twice, nothing lost, in SQLite and in PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from compile_stage.cli.commands import cli
from compile_stage.core.errors import StorageError
from compile_stage.service import queue as queue_module
from compile_stage.service.deliveries import Delivery, Refused
from compile_stage.service.metrics import BUCKETS_S, exposition
from compile_stage.service.queue import Figures, Job, Queue
from compile_stage.service.settings import DATABASE_VARIABLE
from compile_stage.service.store import Store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database; of PostgreSQL a schema of the test's own."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'queue.db'}"
    server = request.getfixturevalue("postgres")
    import psycopg2

    schema = f"watch_{time.time_ns()}"
    connection = psycopg2.connect(server)
    with connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {schema}")
    connection.close()
    return f"{server.replace('postgresql:', 'postgresql+psycopg2:')}?options=-csearch_path%3D{schema}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


def delivery(number: int, of: int = 1) -> Delivery:
    return Delivery(id=f"d-{number}", event="model_version.created", name="m", version=str(of))


def set_clocks(monkeypatch: pytest.MonkeyPatch, *, wall: float, monotonic: float) -> None:
    """Have the queue's clocks stand still; nobody else's."""
    clocks = SimpleNamespace(time=lambda: wall, monotonic=lambda: monotonic)
    monkeypatch.setattr(queue_module, "time", clocks)


def later(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Set the wall clock so far from the true time."""
    set_clocks(monkeypatch, wall=queue_module.time.time() + by_s, monotonic=queue_module.time.monotonic())


def watched_for(queue: Queue, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Job | None:
    """What a service that looks every 30 s for so long takes. Time passes, and the wall clock stands still."""
    taken = queue.claim(["run"])
    for _ in range(int(seconds // 30)):
        clocks = queue_module.time
        set_clocks(monkeypatch, wall=clocks.time(), monotonic=clocks.monotonic() + 30)
        taken = taken or queue.claim(["run"])
    return taken


def test_ten_deliveries_of_one_version_are_one_job(store: Store) -> None:
    """Broken: a version that several events report would be compiled several times, or a repeated delivery counted."""
    queue = Queue(store, "here")
    answers = [queue.accept(delivery(number % 5)) for number in range(10)]
    assert answers == ["accepted"] * 5 + ["duplicate"] * 5
    added = []
    while (look := queue.next_look()) is not None:
        added.append(queue.looked(look, [("run", "cpu"), ("run", "gpu")]))
    assert added == [2, 0, 0, 0, 0]
    assert [row["subject"] for row in queue.rows("jobs", 9)] == ["gpu", "cpu"]


def test_many_at_once_claim_each_job_once(store: Store) -> None:
    """Broken: two workers would run one job beside each other."""
    queues = [Queue(store, f"machine-{number}") for number in range(4)]
    for version in range(12):
        queues[0].add("run", "m", str(version), "cpu")

    def claim_all(queue: Queue) -> list[int]:
        claimed = []
        for _ in range(20):
            if (job := queue.claim(["run"])) is not None:
                claimed.append(job.id)
        return claimed

    with ThreadPoolExecutor(4) as pool:
        claimed = sorted(job for jobs in pool.map(claim_all, queues) for job in jobs)
    assert claimed == sorted(row["id"] for row in queues[0].rows("jobs", 99))


def test_only_registry_trouble_is_tried_again_and_then_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a missed gate would be compiled again and again, or an outage of the registry would lose the run."""
    queue = Queue(store, "here", retry_s=60)
    queue.add("run", "m", "1", "cpu")
    job = queue.claim(["run"])
    assert job is not None
    queue.ended(job, 4, 1.0, "the registry can't be reached")
    (row,) = queue.rows("jobs", 1)
    assert row["state"] == "queued"
    assert 50 < row["not_before"] - time.time() <= 60
    assert queue.claim(["run"]) is None
    for tries in range(1, 6):
        later(monkeypatch, 3600)
        job = queue.claim(["run"])
        assert job is not None
        assert (job.attempt, job.tries) == (tries + 1, tries)
        queue.ended(job, 4, 1.0, "the registry can't be reached")
    monkeypatch.undo()
    assert queue.rows("jobs", 1)[0]["state"] == "failed"

    queue.add("run", "m", "2", "cpu")
    job = queue.claim(["run"])
    assert job is not None
    queue.ended(job, 3, 1.0, "no winner", outage=True)
    assert (queue.rows("jobs", 1)[0]["state"], queue.claim(["run"])) == ("failed", None)
    assert not queue.add("run", "m", "2", "cpu")
    assert queue.add("run", "m", "2", "cpu", again=True)
    assert not queue.add("run", "m", "2", "cpu", again=True)
    again = queue.claim(["run"])
    assert again is not None
    assert (again.id, again.attempt, again.tries) == (job.id, 2, 0)


def test_what_a_dead_service_began_is_taken_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a run whose service was killed would stay `running` for ever; or be taken from one that lives."""
    here, there = Queue(store, "here"), Queue(store, "there")
    here.add("run", "m", "1", "cpu")
    job = here.claim(["run"])
    assert job is not None
    assert (here.unfinished(), there.unfinished(), there.claim(["run"])) == ([job], [], None)
    assert watched_for(there, monkeypatch, queue_module.LOST_S - 30) is None
    assert here.beat(job)
    assert watched_for(there, monkeypatch, queue_module.LOST_S) is None
    taken = watched_for(there, monkeypatch, 60)
    assert taken is not None
    assert (taken.id, taken.attempt, here.unfinished()) == (job.id, 2, [])


@pytest.mark.parametrize("by_s", [-86400, -300, 300, 86400])
def test_clocks_that_differ_or_jump_take_no_job_from_its_owner(
    store: Store, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """Broken: a machine whose clock is five minutes ahead would begin what another runs, or one whose clock is behind
    would never take up what a dead one left."""
    here, there = Queue(store, "here"), Queue(store, "there")
    here.add("run", "m", "1", "cpu")
    job = here.claim(["run"])
    assert job is not None
    later(monkeypatch, by_s)
    assert there.claim(["run"]) is None
    for _ in range(4):  # alive, by a clock that stands still
        assert watched_for(there, monkeypatch, 90) is None
        assert here.beat(job)
    assert watched_for(there, monkeypatch, queue_module.LOST_S + 60) is not None


def test_an_outage_of_the_database_takes_no_job_from_its_owner(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after it, whoever reaches the database first would begin what the other still runs."""
    here, there = Queue(store, "here"), Queue(store, "there")
    here.add("run", "m", "1", "cpu")
    assert (here.claim(["run"]) is not None, there.claim(["run"])) == (True, None)
    set_clocks(monkeypatch, wall=time.time(), monotonic=time.monotonic() + 10 * queue_module.LOST_S)
    assert there.claim(["run"]) is None


@pytest.mark.parametrize("exit_code", [0, 3, 4, 130, None])
def test_who_lost_a_job_changes_nothing_of_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, exit_code: int | None
) -> None:
    """Broken: the late end of the first attempt would put the job back into the queue, for a third to begin, or end it
    while the second runs."""
    here, there, third = Queue(store, "here"), Queue(store, "there"), Queue(store, "third")
    here.add("run", "m", "1", "cpu")
    first = here.claim(["run"])
    second = watched_for(there, monkeypatch, queue_module.LOST_S + 60)
    assert first is not None
    assert second is not None
    assert not here.beat(first)
    here.release(first)
    here.ended(first, exit_code, 1.0, "late")
    assert third.claim(["run"]) is None
    assert there.beat(second)
    there.ended(second, 0, 1.0, "")
    assert [(row["state"], row["problem"]) for row in here.rows("jobs", 9)] == [("done", "")]


@pytest.mark.parametrize("ahead_s", [3600, 365 * 86400])
def test_a_clock_that_was_ahead_makes_nothing_wait_for_long(
    store: Store, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Broken: what was postponed while the clock showed next year would wait until then; or a run that is to be tried
    again after 30 s waits for another hour, since the clock went back by one."""
    queue = Queue(store, "here")
    with monkeypatch.context() as patch:
        later(patch, ahead_s)
        queue.add("run", "m", "1", "cpu")
        job = queue.claim(["run"])
        assert job is not None
        queue.ended(job, 4, 1.0, "the registry can't be reached")
        queue.accept(delivery(1))
        look = queue.next_look()
        assert look is not None
        queue.postpone(look, "the registry can't be reached")
        assert (queue.claim(["run"]), queue.next_look()) == (None, None)
    assert queue.claim(["run"]) is not None
    assert queue.next_look() is not None


def test_each_kind_of_machine_has_its_own_requalification(store: Store) -> None:
    """Broken: of machines that share a queue only one looks at what is published, and finds that the others' is for
    other hardware, so nobody validates it anew."""
    one, other = Queue(store, "one", machine="x86_64-1a"), Queue(store, "other", machine="aarch64-2b")
    for queue, machine in ((one, "x86_64-1a"), (other, "aarch64-2b"), (one, "x86_64-1a")):
        queue.add("requalify", "", "", f"2026-01-01T00:00Z {machine}")
    taken = [(queue, queue.claim(["requalify"])) for queue in (other, one, other, one)]
    assert [job.subject.partition(" ")[2] if job else "" for _, job in taken] == ["aarch64-2b", "x86_64-1a", "", ""]


def test_an_outage_of_the_registry_uses_up_no_try(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a token expires at night, and all that waits has ended as failed before somebody renews it; or it is
    asked for each half a minute all night."""
    queue = Queue(store, "here", retry_s=60)
    queue.add("run", "m", "1", "cpu")
    for _ in range(12):
        job = queue.claim(["run"])
        assert job is not None
        queue.ended(job, 4, 1.0, "the registry refuses", outage=True)
        assert queue.claim(["run"]) is None
        later(monkeypatch, 3600)
    job = queue.claim(["run"])
    assert job is not None
    assert (job.attempt, job.tries) == (13, 5)
    queue.ended(job, 4, 1.0, "the registry refuses")
    assert queue.rows("jobs", 1)[0]["state"] == "failed", "the service searches the registry again, and this run fails"


def test_a_version_waits_until_the_registry_can_be_asked(store: Store) -> None:
    """Broken: what was delivered while the registry was down would be forgotten."""
    queue = Queue(store, "here")
    queue.accept(delivery(1))
    look = queue.next_look()
    assert look is not None
    queue.postpone(look, "the registry can't be reached")
    assert queue.next_look() is None
    (row,) = queue.rows("looks", 9)
    assert (row["attempts"], row["problem"]) == (1, "the registry can't be reached")


def test_refusals_are_counted_and_the_last_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: whoever sends forged deliveries could fill the disk; or nobody would see that somebody does."""
    monkeypatch.setattr(queue_module, "_KEEP_REFUSALS", 3)
    queue = Queue(store, "here")
    for number in range(5):
        queue.refuse(Refused(401, "signature", f"number {number}"), "203.0.113.7")
    assert [row["problem"] for row in queue.rows("refusals", 9)] == ["number 4", "number 3", "number 2"]
    queue.add("run", "m", "1", 'a "name"')
    job = queue.claim(["run"])
    assert job is not None
    queue.ended(job, 3, 20.0, "")
    text = exposition(queue.figures(BUCKETS_S), {"ok": 1, "broken": 0}, 0.0, poll_failed=False)
    lines = [line.removeprefix("compile_stage_watch_") for line in text.splitlines()]
    assert 'deliveries_total{result="signature"} 5' in lines
    assert 'attempts_total{kind="run",exit_code="3"} 1' in lines
    assert 'attempt_seconds_bucket{kind="run",le="15"} 0' in lines
    assert 'attempt_seconds_bucket{kind="run",le="60"} 1' in lines
    assert 'jobs{kind="run",state="failed"} 1' in lines


def test_a_database_that_can_not_be_opened_is_named_without_its_password() -> None:
    """Broken: the service would end with a traceback, and show the password in it."""
    with pytest.raises(StorageError, match="the queue's database can't be opened") as error:
        Store("postgresql+psycopg2://user:hunter2@127.0.0.1:1/none")
    assert "hunter2" not in str(error.value)


def test_a_long_sum_of_seconds_keeps_its_last_digits() -> None:
    """Broken: after two weeks of runs the sum of their seconds grows in steps of 10 s, and a rate of it is wrong."""
    durations = [("run", 9, 1234567.25, *(0 for _ in BUCKETS_S))]
    figures = Figures(deliveries={}, looks=0, jobs=[], exits=[], durations=durations)
    text = exposition(figures, {}, 0.0, poll_failed=False)
    assert 'attempt_seconds_sum{kind="run"} 1234567.25' in text


def test_again_says_where_no_run_was_under_a_policy_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a misspelt policy was said to be queued and nothing more, and waited for a file that never comes."""
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)
    store = Store(f"sqlite:///{tmp_path / 'queue.db'}")
    Queue(store, "here").add("run", "m", "1", "cpu-server")
    store.close()
    again = ["watch", "again", "models:/m/2", "--state", str(tmp_path), "--policy"]
    assert CliRunner().invoke(cli, [*again, "cpu-server"]).stderr == ""
    said = CliRunner().invoke(cli, [*again, "cpu-sever"])
    assert said.stdout == "models:/m/2 under cpu-sever: queued\n"
    assert "had no run under 'cpu-sever' before, but under cpu-server; it waits" in said.stderr
