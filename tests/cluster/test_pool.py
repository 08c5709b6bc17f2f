"""Functions on nodes of a real cluster: where they run, what is tried again, and what is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from compile_stage.cluster.driver import bounds_of
from compile_stage.cluster.nodes import Bounds, Needs
from compile_stage.cluster.pool import WAIT_VARIABLE, Pool, patience_s
from compile_stage.core.environment import hardware
from compile_stage.core.errors import GateError, UsageError, WorkerError
from compile_stage.core.events import Silent
from compile_stage.core.records import Budget

_PATIENCE_S = 120.0


class Heard(Silent):
    """Keeps how steps ended."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def began(self, step: str, job_id: str) -> None:
        self.outcomes.append(f"{step} began")

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        self.outcomes.append(outcome)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def pool(at_the_cluster: Any, heard: Heard) -> Iterator[Pool]:
    with Pool.connect(heard) as pool:
        yield pool


def until(true: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.1)


@pytest.mark.slow
def test_a_lost_node_is_replaced_and_an_error_is_not_tried_again(
    pool: Pool, heard: Heard, at_the_cluster: Any, tmp_path: Path
) -> None:
    """Broken: the fingerprint does not choose the node, a lost node loses the work, or what fails is done thrice."""
    fingerprint = hardware().fingerprint
    small = {node.hardware.fingerprint for node in pool.nodes()} - {fingerprint}
    assert [node.name for node in pool.find(Needs(hardware={"fingerprint": fingerprint}))] == ["head"]
    assert len(small) == 1
    with pytest.raises(UsageError, match=f"no node .* fingerprint=none; there are: .*{fingerprint}"):
        pool.find(Needs(hardware={"fingerprint": "none"}))

    began, released = tmp_path / "began", tmp_path / "released"
    began.mkdir()
    given = {"began": str(began), "until": str(released)}
    elsewhere = Needs(hardware={"fingerprint": small.pop()})
    done = pool.submit("node_functions:wait_for", given, elsewhere)
    until(lambda: heard.outcomes and list(began.iterdir()), "it never began")
    first = next(began.iterdir()).read_text()
    at_the_cluster.kill(first)
    until(lambda: len(list(began.iterdir())) == 2, "it was not done again")
    released.touch()
    assert done.result(_PATIENCE_S) == {"node": ({"small-1", "small-2"} - {first}).pop(), "cores": 1}
    assert heard.outcomes == ["compile began", "its node was lost", "compile began", "done"]

    marks = tmp_path / "marks"
    marks.mkdir()
    with pytest.raises(GateError, match="not fast enough"):
        pool.submit("node_functions:fail", {"began": str(marks)}, Needs()).result(_PATIENCE_S)
    assert len(list(marks.iterdir())) == 1


@pytest.mark.slow
def test_closing_ends_what_runs(pool: Pool, tmp_path: Path) -> None:
    """Broken: Ctrl-C leaves processes on the nodes."""
    done = pool.submit("node_functions:wait_for", {"began": str(tmp_path), "until": str(tmp_path / "never")}, Needs())
    until(lambda: list(tmp_path.iterdir()), "it never began")
    (process,) = (psutil.Process(int(mark.name)) for mark in tmp_path.iterdir())
    pool.close()
    with pytest.raises(WorkerError, match="was ended"):
        done.result(_PATIENCE_S)
    process.wait(_PATIENCE_S)


@pytest.mark.slow
def test_no_task_waits_or_works_for_ever(pool: Pool, tmp_path: Path) -> None:
    """Broken: a run whose node another job holds waits until Ctrl-C, or one that hangs on its node never ends."""
    import ray

    here = Needs(hardware={"fingerprint": hardware().fingerprint}, exclusive=True)
    (node,) = pool.find(here)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    held = ray.remote(num_cpus=1)(lambda: time.sleep(600)).options(scheduling_strategy=strategy).remote()
    given = {"began": str(tmp_path), "until": str(tmp_path / "never")}
    with pytest.raises(UsageError, match="no node that fits was free in time for cpu"):
        pool.submit("node_functions:wait_for", given, here, "cpu", Bounds(begins=0.5)).result(_PATIENCE_S)
    ray.cancel(held, force=True)

    # It begins within its time, and may then go on behind it, until its end.
    work = pool.submit("node_functions:wait_for", given, here, "cpu", Bounds(begins=_PATIENCE_S, ends=_PATIENCE_S))
    until(lambda: list(tmp_path.iterdir()), "it never began")
    (process,) = (psutil.Process(int(mark.name)) for mark in tmp_path.iterdir())
    ended = pool.submit("node_functions:wait_for", given, here, "other", Bounds(ends=0.5))
    with pytest.raises(WorkerError, match="the time for it was used up: other"):
        ended.result(_PATIENCE_S)
    assert not work.done()
    assert process.is_running()


def test_a_wait_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a typing mistake in the variable ends a run as a bug of ours, or as one that waits for ever."""
    for text, seconds in (("", 0.0), ("600", 600.0), ("0.5", 0.5)):
        monkeypatch.setenv(WAIT_VARIABLE, text)
        assert patience_s() == seconds
    for text in ("10m", "-1", "nan", "inf"):
        monkeypatch.setenv(WAIT_VARIABLE, text)
        with pytest.raises(UsageError, match=f"COMPILE_STAGE_RAY_WAIT is '{text}'"):
            patience_s()


def test_a_run_on_a_cluster_ends_some_minutes_behind_its_budget() -> None:
    """Broken: the last compilation or the measurements are cut off, or a used-up budget leaves no time to report."""
    budget = Budget(minutes=60, job_minutes=10, measure_seconds=60, soak_seconds=2, predict_seconds=1)
    whole = bounds_of(budget, elapsed_s=600, jobs=4, patience_s=0)
    assert whole == Bounds(begins=3000, ends=3000 + 600 + 4 * 63 + 900)
    assert bounds_of(budget, elapsed_s=600, jobs=4, patience_s=7200).begins == 7200
    late = bounds_of(budget, elapsed_s=4000, jobs=4, patience_s=0)
    assert late == Bounds(begins=60, ends=60 + 600 + 4 * 63 + 900)
