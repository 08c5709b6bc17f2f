"""The loop of a fleet through kills and interruptions, and what runs its jobs on another machine."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories
import pytest

from compile_stage.cluster.nodes import Needs, describe_here
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.fleet import on_ray
from compile_stage.fleet.driving import Drive
from compile_stage.fleet.fleets import Settings, _common_hardware, _executor, _Runs
from compile_stage.fleet.journal import Journal
from compile_stage.fleet.local import ended_in
from compile_stage.fleet.on_ray import RayExecutor, _bring, attempt
from compile_stage.fleet.scheduler import Lease, Scheduler
from compile_stage.fleet.simulation import Plan, SimulatedNodes, SimulatedWork, simulated_jobs
from compile_stage.policy.folder import PolicyFile

PATIENCE_S = 180  # of whatever a process does; the machine is shared


class KilledError(BaseException):
    """The process ends here, as by kill -9: nothing more is written down."""


def test_a_fleet_that_is_killed_and_interrupted_again_and_again_ends_each_job_once(tmp_path: Path) -> None:
    """Broken: a job that had ended before a kill would run again, or one that was running then would be forgotten."""
    plan, ends = Plan(jobs=150, nodes=6, seed=5, failure_hours=5.0), Counter[int]()
    journal = Journal(tmp_path)
    fleet = journal.begin("run", "s", {})
    journal.plan(fleet, simulated_jobs(plan))
    journal.close()
    for process in range(40):
        journal = Journal(tmp_path)
        drive = Drive(journal, fleet, Scheduler(), SimulatedNodes(plan), SimulatedWork())
        heard = 0

        def hear(progress: Any, process: int = process, drive: Drive = drive) -> None:
            nonlocal heard
            ends[progress.row.id] += 1
            heard += 1
            if heard == 9 and process % 2:
                drive.stop.set()
            elif heard == 9:
                raise KilledError

        drive.say = hear
        try:
            drive.run()
        except KilledError:
            pass
        finally:
            journal.close()
        if len(ends) == plan.jobs:
            break
    assert set(ends.values()) == {1}
    assert len(ends) == plan.jobs
    journal = Journal(tmp_path)
    assert journal.count(fleet, "done") == plan.jobs
    assert dict(journal.select("SELECT sum(losses) >= 0, max(losses) < 3 FROM jobs")) == {1: 1}
    journal.close()


def test_what_a_node_left_is_brought_home(tmp_path: Path) -> None:
    """Broken: a job on a machine without a common disk would seem lost, and run again for ever."""
    there, here = tmp_path / "there" / "1", tmp_path / "here"
    result = there / "result" / "result.json"
    code = f"import pathlib; p = pathlib.Path({str(result)!r}); p.parent.mkdir(); p.write_text('{{}}'); print('hello')"
    left = attempt(None, str(there), ["-c", code])  # type: ignore[arg-type]
    assert json.loads(left["files"]["exit.json"])["exit_code"] == 0
    here.mkdir()
    _bring(left, here)
    assert (here / "result" / "result.json").read_text() == "{}"
    assert "hello" in (here / "log.txt").read_text()
    ended = ended_in(here, Lease(1, 1, "ray"), time.monotonic(), left["node"])
    assert (ended.exit_code, ended.node) == (0, left["node"])
    assert attempt(None, str(there), ["-c", "raise SystemExit(9)"]) == left  # type: ignore[arg-type]


def test_what_a_killed_process_had_begun_on_a_node_is_interrupted(tmp_path: Path) -> None:
    """Broken: Ray ends its own process only, and the job would go on beside the one that is begun instead."""
    folder = tmp_path / "job" / "1"
    folder.mkdir(parents=True)
    begun = tmp_path / "begun"
    job = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    parent = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-m', 'compile_stage.fleet.followed', "
        f"str(os.getpid()), {str(folder)!r}, sys.executable, '-c', {job!r}], start_new_session=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + PATIENCE_S
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait(PATIENCE_S)
    while not (folder / "exit.json").exists():
        if time.monotonic() > deadline:
            pytest.fail("the job goes on")
        time.sleep(0.05)
    assert json.loads((folder / "exit.json").read_text())["exit_code"] != 0


@pytest.mark.parametrize(("cpu", "wanted"), [("Xeon", {"cpu": "Xeon"}), ("EPYC", {})])
def test_a_job_goes_to_a_node_with_the_hardware_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, wanted: dict[str, str]
) -> None:
    """Broken: on a cluster that has the target's hardware, a job runs on another node, and its version is published as
    compiled and not validated."""
    asked, node = list[Needs](), SimpleNamespace(name="n", cpus=4, hardware=replace(hardware(), cpu=f"Intel {cpu} 1"))

    class Cluster:
        def find(self, needs: Needs) -> tuple[Any, ...]:
            return (node,)

        def nodes(self) -> tuple[Any, ...]:
            return (node,)

        def submit(self, function: str, arguments: Any, needs: Needs, *, name: str) -> Future[Any]:
            asked.append(needs)
            return Future()

    monkeypatch.setattr(on_ray.Pool, "connect", Cluster)
    monkeypatch.setattr(SimulatedWork, "hardware", lambda *_: {"cpu": "Xeon"})
    executor = RayExecutor(None, lambda _: tmp_path, SimulatedWork())
    executor.start(Lease(1, 1, "ray"), SimpleNamespace(id=1))  # type: ignore[arg-type]
    assert [needs.hardware for needs in asked] == [wanted]


@pytest.mark.parametrize(
    ("named", "agreed"),
    [
        ([{}, {"cpu": "Xeon"}], {"cpu": "Xeon"}),
        ([{"cpu": "Xeon"}, {"cpu": "EPYC"}], {}),
        ([{"cpu": "Xeon"}, {"machine": "x86_64"}], {"cpu": "Xeon", "machine": "x86_64"}),
        ([{}, {}], {}),
    ],
)
def test_the_hardware_of_a_job_is_what_its_targets_agree_on(
    named: list[dict[str, str]], agreed: dict[str, str]
) -> None:
    """Broken: a job is sent to the hardware of one target, and the others are never validated."""
    targets = [SimpleNamespace(target=SimpleNamespace(hardware=one)) for one in named]
    policy: Any = SimpleNamespace(targets=targets)
    assert _common_hardware(policy) == agreed


@pytest.mark.parametrize(
    ("named", "has"),
    [
        ([{"cpu": "Xeon"}, {"cpu": "EPYC"}], "{cpu: Xeon}"),
        ([{"cpu": "Xeon"}, {"cores": "4096"}], "{cpu: Xeon}"),
        ([{"cpu": "Xeon"}, {"system": platform.system()}], ""),
        ([{"cpu": "EPYC"}, {"cpu": "Cortex"}], ""),
        ([{"cpu": "Xeon"}, {}], ""),
    ],
)
def test_targets_that_no_one_node_can_prove_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[dict[str, str]], has: str
) -> None:
    """Broken: any node gets the job, and what the cluster could prove on another is published as compiled and not
    validated."""
    node = SimpleNamespace(name="n", cpus=4, hardware=replace(hardware(), cpu="Intel Xeon 1"))
    cluster = SimpleNamespace(find=lambda _: (node,), nodes=lambda: (node,), close=lambda: None)
    monkeypatch.setattr(on_ray.Pool, "connect", lambda: cluster)
    targets = tuple(
        factories.target_policy(factories.target(name=f"t{number}", hardware=kind)) for number, kind in enumerate(named)
    )
    policy = factories.policy(*targets)
    settings = Settings(engine="ray", state=tmp_path)
    work = _Runs(settings, [PolicyFile(tmp_path / "p.yaml", policy=policy)])
    with ExitStack() as stack:
        if not has:
            _executor(settings, work, stack, [policy.digest])
            return
        with pytest.raises(UsageError) as refused:
            _executor(settings, work, stack, [policy.digest])
    assert f"the cluster has {has}; a job of a fleet runs on one node" in refused.value.problem


def test_what_is_proven_anew_on_a_cluster_is_proven_where_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a requalification passes by what another machine found, or another runtime, and this machine goes on
    refusing what it was run for."""
    asked, closed = list[tuple[str, Any]](), list[bool]()
    node: dict[str, Any] = {"name": "n", "cpus": 4, "backends": describe_here()["backends"]}

    class Cluster:
        def find(self, needs: Needs) -> tuple[Any, ...]:
            asked.append(("find", needs))
            return (SimpleNamespace(**node),)

        def submit(self, function: str, arguments: Any, needs: Needs, *, name: str) -> Future[Any]:
            asked.append(("submit", needs))
            return Future()

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(on_ray.Pool, "connect", Cluster)
    row: Any = SimpleNamespace(id=1)
    for like_here, wanted in ((False, {}), (True, {"fingerprint": hardware().fingerprint})):
        asked.clear()
        executor = RayExecutor(None, lambda _: tmp_path, SimulatedWork(), like_here=like_here)
        executor.start(Lease(1, 1, "ray"), row)
        assert [(what, needs.hardware) for what, needs in asked] == [("find", wanted), ("submit", wanted)]
    assert not closed
    node["backends"] = {**node["backends"], "onnxruntime": "onnxruntime 1.2.3"}
    RayExecutor(None, lambda _: tmp_path, SimulatedWork())
    with pytest.raises(UsageError, match=r"node n has .* other packages: onnxruntime onnxruntime 1.2.3 there"):
        RayExecutor(None, lambda _: tmp_path, SimulatedWork(), like_here=True)
    assert closed, "the cluster is left"
