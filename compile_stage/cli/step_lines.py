"""The lines of a log: which job a step was of, in few characters, and how many steps the cache held."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from compile_stage.core.records import Job, Plan
from compile_stage.report import numbers


def group_reasons(entries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(what, why) → one entry for each reason: what it is of, joined by commas, in the order of the first."""
    groups: dict[str, list[str]] = {}
    for what, why in entries:
        groups.setdefault(why, []).append(what)
    return [(", ".join(names), why) for why, names in groups.items()]


def work_of(job: Job, cached: Sequence[str]) -> tuple[list[str], str]:
    """The steps of a job that the cache doesn't hold, and all there is to say of its work."""
    steps = [] if job.scheme.native else ["lower"]
    checks = [] if job.not_runnable_here else ["validate", "benchmark"]
    todo = [step for step in (*steps, "compile", *checks) if step not in cached]
    words = ", ".join(todo) + (f" (cached: {', '.join(cached)})" if cached else "")
    words = words if todo else "nothing: all of it is in the cache"
    words += f"; not validated here: {job.not_runnable_here}" if job.not_runnable_here else ""
    return todo, words


class StepNames:
    """Job ids in the words of a log: `openvino int8-sym`, with the target before it where there are several."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._targets: tuple[str, ...] = ()

    def planned(self, plan: Plan) -> None:
        """These are the jobs from now on."""
        self._targets = tuple(policy.target.name for policy in plan.policy.targets)
        self._jobs = {job.id: job for job in plan.jobs}

    def label(self, job_id: str) -> str:
        """Of a job that came about during the run, such as one of option tuning, its end is kept; what is unknown is
        shown as it is."""
        job = self._job(job_id)
        if job is None:
            return job_id or "(run)"
        target = f"{job.target.name} " if len(self._targets) > 1 else ""
        return f"{target}{job.label}{job_id.removeprefix(job.id)}"

    def target(self, job_id: str) -> str:
        """The target of a job, or of a step that names the target itself; empty where it is not known."""
        job = self._job(job_id)
        return job.target.name if job is not None else job_id if job_id in self._targets else ""

    def _job(self, job_id: str) -> Job | None:
        known = [job for name, job in self._jobs.items() if job_id == name or job_id.startswith(f"{name}--")]
        return max(known, key=lambda job: len(job.id), default=None)


class CachedSteps:
    """Counts steps that came from the cache, until the run goes on to another target. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target, self._count = "", 0

    def enter(self, target: str) -> tuple[str, str] | None:
        """A step of this target ended. (target, `12 steps from the cache`) of the one before it; None where nothing is
        to be said. A step of no target belongs to the one that runs."""
        with self._lock:
            if not target or target == self._target:
                return None
            said, self._target = self._line(), target
            return said

    def add(self) -> None:
        """It came from the cache."""
        with self._lock:
            self._count += 1

    def end(self) -> tuple[str, str] | None:
        """What is left to be said."""
        with self._lock:
            return self._line()

    def _line(self) -> tuple[str, str] | None:
        count, self._count = self._count, 0
        return (self._target or "(run)", f"{numbers.count(count, 'step')} from the cache") if count else None
