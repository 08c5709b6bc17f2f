"""Workers that one evaluation uses after another: kept where that is of use, replaced when one died."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import factories
import pytest

from compile_stage.core import plugins
from compile_stage.core.errors import UsageError, WorkerError
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import Budget
from compile_stage.pipeline.job_workers import JobWorkers, TrialWorkers

INT8, FP32 = factories.job("int8", native=False), factories.job("fp32")
ELSEWHERE = factories.job("fp32", backend="openvino")
UNLIKE = factories.job("fp32", backend="torchscript")
"""Its files are not said to be the same after another job."""
ROOM = 4_000_000_000

ENDINGS = [
    (WorkerError("crash", "it ended"), False),
    (WorkerError("timeout", "too long"), False),
    (WorkerError("exception", "the backend raised"), True),
    (UsageError("refused"), True),
]


class Engine:
    """Says which workers live, and what they were granted."""

    def __init__(self) -> None:
        self.alive: list[str] = []
        self.granted: list[WorkerLimits] = []
        self.free_bytes: int | None = ROOM

    @contextmanager
    def worker(self, name: str, limits: WorkerLimits) -> Iterator[object]:
        self.granted.append(limits)
        one = f"{name} {len(self.granted)}"
        self.alive.append(one)
        try:
            yield one
        finally:
            self.alive.remove(one)

    def free_memory_bytes(self) -> int | None:
        return self.free_bytes


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def target(engine: Engine) -> Any:
    return SimpleNamespace(context=engine, run_policy=SimpleNamespace(budget=Budget()))


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is a third party's."""
    monkeypatch.setattr(plugins, "third_party", lambda kind, name: kind == "backends" and name == "onnxruntime")


@pytest.fixture
def trials(target: Any) -> TrialWorkers:
    return TrialWorkers(target, time.monotonic() + 60)


@pytest.fixture
def jobs(target: Any) -> JobWorkers:
    return JobWorkers(target, [INT8, ELSEWHERE, FP32], ROOM, beside_others=True)


def test_trials_share_a_worker_that_ends_with_the_search(engine: Engine, trials: TrialWorkers) -> None:
    """Broken: each trial would start a process and import its backend, or the last one's would stay behind."""
    with trials.opened(INT8) as pair:
        assert pair.lowers is pair.runs
        assert not pair.used
    with trials.opened(INT8) as again:
        assert again.lowers is pair.lowers
        assert again.used, "a crash here may be the first trial's doing"
    assert engine.alive == [pair.lowers]
    (granted,) = engine.granted
    assert granted.total_s == pytest.approx(60, abs=5)
    trials.close()
    assert engine.alive == []


@pytest.mark.parametrize(("error", "kept"), ENDINGS)
def test_after_a_crash_the_next_trial_has_new_ones(
    engine: Engine, trials: TrialWorkers, error: Exception, *, kept: bool
) -> None:
    """Broken: one trial that crashes would fail all that follow it; or each refusal would cost a process."""
    with pytest.raises(type(error)), trials.opened(INT8) as first:
        raise error
    assert (engine.alive == [first.runs]) == kept
    with trials.opened(INT8) as second:
        assert (second.runs is first.runs) == kept
    trials.close()
    assert engine.alive == []


@pytest.mark.usefixtures("foreign")
def test_trials_of_a_third_partys_backend_share_nothing(engine: Engine, trials: TrialWorkers) -> None:
    """Broken: its code would be in the process that makes the next trial's graph, which other backends take from the
    cache."""
    with trials.opened(INT8) as first:
        pass
    with trials.opened(INT8) as second:
        assert second.runs is not first.runs
        assert engine.alive == [second.runs]
    trials.close()


def test_trials_whose_files_would_depend_on_the_trials_before_share_nothing(
    engine: Engine, trials: TrialWorkers
) -> None:
    """Broken: `verify` could not make the published version again, whose names were numbered by how many trials came
    before it."""
    with trials.opened(UNLIKE) as first:
        pass
    with trials.opened(UNLIKE) as second:
        assert second.runs is not first.runs
        assert not second.used
        assert engine.alive == [second.runs]
    trials.close()


def test_a_jobs_worker_is_kept_for_the_next_of_its_backend_alone(engine: Engine, jobs: JobWorkers) -> None:
    """Broken: each job would start a process and import its backend; another backend's code would be in it; or it would
    stay behind when no job is to come."""
    with jobs.opened(INT8) as first:
        assert not first.used
    with jobs.opened(ELSEWHERE) as other:
        assert other.runs is not first.runs
    assert engine.alive == [first.runs], "no job of the other backend is to come"
    with jobs.opened(FP32) as second:
        assert second.runs is first.runs
        assert second.used
    assert engine.alive == []
    assert all(limits.shares_cores for limits in engine.granted)


def test_jobs_at_the_same_time_have_a_worker_each(engine: Engine, jobs: JobWorkers) -> None:
    with jobs.opened(INT8) as first, jobs.opened(FP32) as second:
        assert first.runs is not second.runs
    jobs.close()
    assert engine.alive == []


@pytest.mark.parametrize(("error", "kept"), ENDINGS)
def test_after_a_crash_the_next_job_has_a_new_one(
    engine: Engine, jobs: JobWorkers, error: Exception, *, kept: bool
) -> None:
    """Broken: a job that crashes would fail the next of its backend."""
    with pytest.raises(type(error)), jobs.opened(INT8) as first:
        raise error
    assert (engine.alive == [first.runs]) == kept
    jobs.close()
    assert engine.alive == []


@pytest.mark.parametrize("free_bytes", [ROOM - 1, None])
def test_nothing_is_kept_where_memory_is_short_or_not_known(
    engine: Engine, jobs: JobWorkers, free_bytes: int | None
) -> None:
    """Broken: what waits would take the memory of what runs, or hold a node of a cluster."""
    engine.free_bytes = free_bytes
    with jobs.opened(INT8):
        pass
    assert engine.alive == []


@pytest.mark.usefixtures("foreign")
def test_jobs_of_a_third_partys_backend_share_nothing(engine: Engine, jobs: JobWorkers) -> None:
    """Broken: what its code changed for one job would be there when the next is proven."""
    with jobs.opened(INT8):
        pass
    assert engine.alive == []
