"""The workers of a search: kept from trial to trial, replaced when one died."""

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
from compile_stage.pipeline.evaluate import TrialWorkers


class Engine:
    """Says which workers live, and what they were granted."""

    def __init__(self) -> None:
        self.alive: list[str] = []
        self.granted: list[WorkerLimits] = []

    @contextmanager
    def worker(self, name: str, limits: WorkerLimits) -> Iterator[object]:
        self.granted.append(limits)
        one = f"{name} {len(self.granted)}"
        self.alive.append(one)
        try:
            yield one
        finally:
            self.alive.remove(one)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def workers(engine: Engine) -> TrialWorkers:
    target: Any = SimpleNamespace(context=engine, run_policy=SimpleNamespace(budget=Budget()))
    return TrialWorkers(target, factories.job("int8", native=False), time.monotonic() + 60)


def test_trials_share_a_worker_that_ends_with_the_search(engine: Engine, workers: TrialWorkers) -> None:
    """Broken: each trial would start a process and import its backend, or the last one's would stay behind."""
    with workers.opened() as (lowers, runs):
        assert lowers is runs
    with workers.opened() as (again, _):
        assert again is lowers
    assert engine.alive == [lowers]
    (granted,) = engine.granted
    assert granted.total_s == pytest.approx(60, abs=5)
    workers.close()
    assert engine.alive == []


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (WorkerError("crash", "it ended"), False),
        (WorkerError("timeout", "too long"), False),
        (WorkerError("exception", "the backend raised"), True),
        (UsageError("refused"), True),
    ],
)
def test_after_a_crash_the_next_trial_has_new_ones(
    engine: Engine, workers: TrialWorkers, error: Exception, *, kept: bool
) -> None:
    """Broken: one trial that crashes would fail all that follow it; or each refusal would cost a process."""
    with pytest.raises(type(error)), workers.opened() as (first, _):
        raise error
    assert (engine.alive == [first]) == kept
    with workers.opened() as (second, _):
        assert (second is first) == kept
    workers.close()
    assert engine.alive == []


def test_trials_of_a_third_partys_backend_share_nothing(
    engine: Engine, workers: TrialWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: its code would be in the process that makes the next trial's graph, which other backends take from the
    cache."""
    monkeypatch.setattr(plugins, "third_party", lambda kind, name: kind == "backends" and name == "onnxruntime")
    with workers.opened() as (first, _):
        pass
    with workers.opened() as (second, _):
        assert second is not first
        assert engine.alive == [second]
    workers.close()
