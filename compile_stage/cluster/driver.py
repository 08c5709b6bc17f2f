"""The driver of a run on a cluster: which targets go to which hardware, who compiles what, and one result of all.

1. The source is resolved here, and targets are grouped by the hardware that they ask for.
2. A node of a group's hardware plans it, and exports.
3. Each job is compiled on any node where a compiler sees the same (`tasks.SAME_CHIP`); the results are in the cache.
4. A node of the group's hardware has all of itself for the run: proof, measurement, publication, promotion.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compile_stage.cluster import files, tasks
from compile_stage.cluster.merging import merged_outcome, merged_plan, rebased
from compile_stage.cluster.nodes import Bounds, Needs, Node
from compile_stage.cluster.pool import Pool, patience_s
from compile_stage.core.context import Context
from compile_stage.core.digest import plain, revive, tree_size
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import CompileStageError, UsageError, WorkerError
from compile_stage.core.records import Budget, Event, Failure, Plan, Policy, RunResult, SourceModel, TargetPolicy
from compile_stage.engine.protocol import describe_error, revive_error
from compile_stage.pipeline.outcome import RunState
from compile_stage.pipeline.run import plan_for
from compile_stage.steps.resolve import resolve

_TASKS = "compile_stage.cluster.tasks"
_JOB_BYTES, _JOB_COPIES = 1_000_000_000, 8
"""What a job holds at most, as a rule: a compiler's packages, and the model so many times."""
_WAIT_AT_LEAST_S, _PACKAGE_S = 60.0, 900.0
"""What a used-up budget leaves to a run's last task: to get a node that is just being freed; to load, package and
publish."""


@dataclass
class _Group:
    """The targets of one hardware.

    Attributes:
        given: A `tasks.Given` as plain JSON.
        plan: As the node made it; None before.
        places: Job id → where it may be compiled.
    """

    hardware: Hardware
    policy: Policy
    given: Any = None
    plan: Plan | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> Needs:
        return Needs(hardware={"fingerprint": self.hardware.fingerprint}, device=self.device)

    @property
    def names(self) -> str:
        return ", ".join(one.target.name for one in self.policy.targets)

    @property
    def device(self) -> str:
        """`cpu` where all its targets are of the CPU."""
        return next((one.target.device for one in self.policy.targets if one.target.device != "cpu"), "cpu")


class Driver:
    """One run. What it finds is in `progress`, which writes the reports.

    Args:
        shared: Address of the shared cache; empty for none.
    """

    def __init__(self, pool: Pool, progress: RunState, context: Context, shared: str) -> None:
        self._pool, self._progress, self._context, self._shared = pool, progress, context, shared

    def run(self, uri: str, place: Callable[[SourceModel], Path]) -> None:
        """From the source to the reports.

        Raises:
            UsageError: The cluster has not what is needed, or its nodes share no cache.
            CompileStageError: What ended a node's run.
        """
        progress, context, policy = self._progress, self._context, self._policy
        nodes = self._pool.nodes()
        self._demand_shared(nodes)
        source = resolve(context, uri)
        plan_for(context, policy, source)  # raises where the policy is for other models
        groups = self._grouped(source, nodes)
        carried = self._carried(source)
        for group in groups:
            order = tasks.Given(
                source=source,
                policy=group.policy,
                files=carried,
                started=time.time() - context.events.elapsed_s,
                hardware=group.hardware,
                toolchains=_toolchains(),
                shared=self._shared,
                remeasure=context.remeasure,
            )
            group.given = plain(order)
        self._plan(groups)
        plan = merged_plan([group.plan for group in groups if group.plan], policy)
        context.events.planned(plan)
        folder = progress.options.out or place(source).absolute()
        progress.begin(plan, folder)
        failures = self._compile(source, groups)
        self._finish(groups, self._run(uri, groups, failures), folder)

    @property
    def _policy(self) -> Policy:
        assert self._progress.policy is not None
        return self._progress.policy

    def _grouped(self, source: SourceModel, nodes: Sequence[Node]) -> list[_Group]:
        """The targets by the hardware of the nodes that they go to."""
        chosen: dict[str, tuple[Hardware, list[TargetPolicy]]] = {}
        for one in self._policy.targets:
            where = self._hardware_for(source, one, nodes)
            chosen.setdefault(where.fingerprint, (where, []))[1].append(one)
        return [
            _Group(hardware=where, policy=replace(self._policy, targets=tuple(targets)))
            for where, targets in chosen.values()
        ]

    def _hardware_for(self, source: SourceModel, one: TargetPolicy, nodes: Sequence[Node]) -> Hardware:
        """What the target asks for, or else what this machine is; of several, what this machine is, or most nodes."""
        here = self._context.hardware
        wanted = dict(one.target.hardware) or {"fingerprint": here.fingerprint}
        fitting = [node for node in nodes if node.cpus and node.hardware.refuse(wanted) is None]
        if not fitting and one.target.hardware:
            alone = plan_for(self._context, replace(self._policy, targets=(one,)), source)
            if alone.jobs:  # of backends that compile for hardware that is not there
                fitting = [node for node in nodes if node.cpus]
        if not fitting:
            fitting = list(self._pool.find(Needs(hardware=wanted)))
        counted = Counter(node.hardware.fingerprint for node in fitting)
        best = min(fitting, key=lambda node: (node.hardware != here, -counted[node.hardware.fingerprint], node.name))
        return best.hardware

    def _carried(self, source: SourceModel) -> dict[str, str]:
        """The files that the nodes need, sent."""
        data = self._policy.data
        named = [spec.source.partition(":") for spec in (data.validation, data.calibration)]
        paths = dict.fromkeys([source.path, *(path for kind, _, path in named if kind == "file")])
        for path in paths:
            if not Path(path).exists():
                raise UsageError("the policy's samples can't be read", fix="correct data.*.source", where=path)
        with self._context.events.step("send"):
            return {path: files.send(Path(path), self._shared) for path in paths}

    def _demand_shared(self, nodes: Sequence[Node]) -> None:
        """Raise UsageError where the nodes could not find what one of them made."""
        if self._shared:
            return
        working = [node for node in nodes if node.cpus]
        with files.token() as token:
            asked = {
                node.name: self._pool.ask(node, "compile_stage.cluster.tasks:sees", {"token": token.name})
                for node in working
            }
        apart = [f"{node.name} {node.cache}" for node in working if not asked[node.name]]
        if apart:
            raise UsageError(
                f"nodes have step caches of their own, which the driver's is not: {', '.join(apart)}",
                fix="name a shared one with --shared-cache (s3://, gs://, az://, or file:// on a disk that all mount), "
                "or set COMPILE_STAGE_CACHE on the driver and on all nodes to one folder of such a disk",
            )

    def _bounds(self, jobs: int = 0) -> Bounds:
        return bounds_of(self._policy.budget, self._context.events.elapsed_s, jobs, patience_s())

    def _plan(self, groups: Sequence[_Group]) -> None:
        asked = [
            self._pool.submit(f"{_TASKS}:plan", {"given": group.given}, group.needs, group.names, self._bounds())
            for group in groups
        ]
        for group, future in zip(groups, asked, strict=True):
            answer = future.result()
            self._context.events.add(revive(tuple[Event, ...], answer["events"]))
            group.plan, group.places = revive(Plan, answer["plan"]), answer["places"]

    def _compile(self, source: SourceModel, groups: Sequence[_Group]) -> dict[str, Failure]:
        """Have every job compiled that need not wait for the node that measures; what failed for good."""
        memory = _JOB_BYTES + _JOB_COPIES * tree_size(Path(source.path))
        asked: dict[str, Future[Any]] = {}
        bounds = Bounds(ends=self._policy.budget.minutes * 60 - self._context.events.elapsed_s)
        for group in groups:
            for job in group.plan.jobs if group.plan else ():
                chip = None if group.places[job.id] == tasks.ANYWHERE else group.hardware
                needs = Needs(chip=chip, device=job.target.device, cpus=job.target.threads, memory_bytes=memory)
                if group.places[job.id] == tasks.MEASURED or len(self._pool.find(needs)) == 1:
                    continue
                arguments = {"given": group.given, "plan": plain(group.plan), "job_id": job.id}
                asked[job.id] = self._pool.submit(f"{_TASKS}:compile_job", arguments, needs, job.id, bounds)
        failures = {}
        for job_id, future in asked.items():
            try:
                answer = future.result()
            except WorkerError:  # no node lived long enough, or the time is up: the run itself comes next
                continue
            self._context.events.add(revive(tuple[Event, ...], answer["events"]))
            if answer["failure"]:
                failures[job_id] = revive(Failure, answer["failure"])
        return failures

    def _run(self, uri: str, groups: Sequence[_Group], failures: Mapping[str, Failure]) -> list[dict[str, Any]]:
        """What each group's task answered; where its node or its time was lost, the `error` alone.

        An alias moves only where all targets passed. With several groups a second task, whose steps are all in the
        cache, promotes what the first published.
        """
        options = self._progress.options
        asked = tasks.Asked(
            uri=uri,
            publish=options.publish,
            promote=options.promote and len(groups) == 1,
            signs=options.signer is not None,
            trusts=options.trust is not None,
            failures=failures,
        )
        answers = self._runs(groups, asked)
        passed = all(not answer["error"] and not answer["result"]["exit_code"] for answer in answers)
        moves = any(one.promote.alias is not None for one in self._policy.targets)
        if len(groups) == 1 or not (options.publish and options.promote and moves and passed):
            return answers
        for group in groups:
            group.given = {**group.given, "remeasure": False}
        again = self._runs(groups, replace(asked, promote=True))
        return [{**before, **after} for before, after in zip(answers, again, strict=True)]

    def _runs(self, groups: Sequence[_Group], asked: tasks.Asked) -> list[dict[str, Any]]:
        futures = [
            self._pool.submit(
                f"{_TASKS}:run",
                {"given": group.given, "plan": plain(group.plan), "asked": plain(asked)},
                replace(group.needs, exclusive=True),
                group.names,
                self._bounds(len(group.plan.jobs) if group.plan else 0),
            )
            for group in groups
        ]
        return [_answer(future) for future in futures]

    def _finish(self, groups: Sequence[_Group], answers: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """One result of all: its reports are written here, also where an error ended one of the runs."""
        progress, context = self._progress, self._context
        errors: list[CompileStageError] = [revive_error(answer["error"]) for answer in answers if answer["error"]]
        ended = [answer for answer in answers if "result" in answer]
        if not ended:
            raise errors[0]
        results: list[RunResult] = [revive(RunResult, answer["result"]) for answer in ended]
        moved = [self._fetch(result, answer["bundles"], folder) for result, answer in zip(results, ended, strict=True)]
        by_name = {target.policy.target.name: target for result in moved for target in result.targets}
        names = [one.target.name for one in self._policy.targets]
        progress.targets = tuple(by_name[name] for name in names if name in by_name)
        progress.framework = next((result.baseline_framework for result in results if result.baseline_framework), "")
        progress.notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
        nodes = [
            {"targets": [one.target.name for one in group.policy.targets], "hardware": plain(group.hardware)}
            for group in groups
        ]
        progress.environment = {**results[0].environment, "cluster": nodes}
        progress.outcome = merged_outcome(results)
        for result in results:
            context.events.add(result.events)
        if errors:
            progress.notes += tuple(str(other) for other in errors[1:])
            raise errors[0]
        progress.write_reports()

    def _fetch(self, result: RunResult, bundles: Mapping[str, str], folder: Path) -> RunResult:
        """The result with its bundles in the run's own folder."""
        places = {}
        for path, digest in bundles.items():
            into = folder / "bundles" / Path(path).name
            shutil.rmtree(into, ignore_errors=True)
            shutil.copytree(files.fetch(digest, path, self._shared), into)
            places[path] = str(into)
        return rebased(result, places)


def bounds_of(budget: Budget, elapsed_s: float, jobs: int, patience_s: float) -> Bounds:
    """How long a task around a whole run may wait and take. The budget itself stops what begins too late; behind it
    are the last compilation, the measurements, and packaging.

    Args:
        jobs: That it measures.
        patience_s: How long a run waits for a node in any case.
    """
    begins = max(budget.minutes * 60 - elapsed_s, patience_s, _WAIT_AT_LEAST_S)
    measured = jobs * (budget.measure_seconds + budget.soak_seconds + budget.predict_seconds)
    return Bounds(begins=begins, ends=begins + budget.job_minutes * 60 + measured + _PACKAGE_S)


def _answer(future: Future[Any]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = future.result()
    except CompileStageError as error:
        return {"error": describe_error(error)}
    return answer


def _toolchains() -> tuple[str, ...]:
    from compile_stage.engine.toolchains import states

    return tuple(state.name for state in states() if state.toolchain is not None and not state.here)
