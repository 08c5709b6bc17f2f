"""What is left of a run's budget of minutes, and what must be kept of it.

Candidates that are proven are worth nothing until they are measured, packaged and published. So a job begins only while
the time for these is left beside it. How long anything takes is seen in this very run: a job by those of its backend
that have ended, a model's start by what starting the original took.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from compile_stage.core.events import EventLog
from compile_stage.core.records import Budget, Candidate, Failure, Job
from compile_stage.core.records.candidate import NOT_STARTED
from compile_stage.measure.rounds import OVERTIME
from compile_stage.measure.stats import median

START_S = 2.0
"""A process that opens an artifact takes so long at least: 1.3 to 2 s for small models on two cores."""

WARM_UP_S = 0.5
"""Of a participant, at a batch size: as a rule (at most `measure.participant.WARM_UP_S`)."""

MEASURE_SHARE = 0.25
"""Of the budget, kept for the rounds of a measurement; never more than `budget.measure_seconds`."""

LEAST_ROUNDS_S = 3.0
"""Rounds of a candidate and the original for less tell nothing: six rounds of two turns take about two seconds."""

_JOBS_S = 30.0  # of a later target, for two jobs

_SPEED = ("int8", "int4", "int8-dynamic", "fp16", "bf16", "fp32")
"""Precisions, the likeliest winner first, where none is known to be faster."""


@dataclass(frozen=True)
class Measuring:
    """What a measurement may take.

    Attributes:
        seconds: For its rounds.
        overtime: Times that, where it has too few rounds.
        late: Candidates that there is no time for, each with the reason.
    """

    seconds: float
    overtime: float = OVERTIME
    late: tuple[Candidate, ...] = ()


class TimeLeft:
    """Of one target's share of the run. Safe to use from several threads."""

    def __init__(self, events: EventLog, budget: Budget, batch_sizes: int = 1, later_targets: int = 0) -> None:
        """Args:
        batch_sizes: How many are measured.
        later_targets: Each of these keeps what a small one needs, and no more than an equal share of what is left.
        """
        self._events, self._budget, self._batch_sizes = events, budget, batch_sizes
        self._took_s: dict[str, list[float]] = {}
        self._passed = 0
        self._lock = threading.Lock()
        left_s = budget.minutes * 60 - events.elapsed_s
        later_s = min(left_s / (1 + later_targets), _JOBS_S + self.kept_s(2)) if later_targets else 0.0
        self._ends_s = budget.minutes * 60 - later_targets * later_s

    @property
    def seconds(self) -> float:
        """Negative when it is used up."""
        return self._ends_s - self._events.elapsed_s

    @property
    def room_s(self) -> float:
        """For a job beside the measurement and what follows it; while no candidate has passed, there is nothing to
        measure, so that it may have all."""
        with self._lock:
            passed = self._passed
        return self.seconds if not passed else self.seconds - self.kept_s(passed)

    @property
    def for_searches_s(self) -> float:
        """For what is tried beyond the policy's jobs: never what is needed to measure one candidate at least."""
        with self._lock:
            passed = self._passed
        return self.seconds - self.kept_s(max(1, passed))

    def kept_s(self, passed: int) -> float:
        """For measuring so many candidates, and for what follows."""
        rounds_s = min(self._budget.measure_seconds, MEASURE_SHARE * self._budget.minutes * 60)
        return self._opening_s(passed) + rounds_s + self.after_s

    @property
    def after_s(self) -> float:
        """From the measurement to the publication: the soak, the load as serving loads it, and the registry."""
        return self._budget.soak_seconds + START_S + self.source_s + 2 * self._of("resolve", 0.5)

    @property
    def source_s(self) -> float:
        """What it takes to start the original."""
        return self._of("inspect", START_S)

    def _of(self, step: str, default: float) -> float:
        found = [event.ended_s - event.started_s for event in self._events.events if event.step == step]
        return max([default, *found])

    def _opening_s(self, candidates: int) -> float:
        """Until everybody is open and warm, one after the other."""
        warm_s = self._batch_sizes * WARM_UP_S * (candidates + 1)
        return self.source_s + candidates * START_S + warm_s

    # ------------------------------------------------------------------------------------------------------------ jobs

    def ended(self, job: Job, seconds: float, *, passed: bool) -> None:
        """A job was evaluated, in so many seconds."""
        with self._lock:
            self._took_s.setdefault(job.backend, []).append(seconds)
            self._passed += passed

    def usual_s(self, job: Job) -> float | None:
        """What the job will take: the median of its backend's, else of all; None while nothing is known."""
        with self._lock:
            known = self._took_s.get(job.backend) or [one for took in self._took_s.values() for one in took]
        return median(known) if known else None

    def refuse(self, job: Job) -> Failure | None:
        """Why the job is not begun; None where there is time for it."""
        usual_s, minutes = self.usual_s(job), f"{self._budget.minutes:g} minutes (budget.minutes)"
        needed = f"; it would have needed about {max(1.0, usual_s):.0f} s" if usual_s is not None else ""
        if self.seconds < 0:
            late = f"not started: the budget of {minutes} was used up{needed}"
        elif self.room_s < (usual_s or 0.0):
            late = (
                f"not tried: no time left of the {minutes} beside the measurement and publication of what is "
                f"proven{needed}"
            )
        else:
            return None
        return Failure(kind="timeout", step=NOT_STARTED, problem=late)

    def bound_s(self) -> float | None:
        """All of a job must end after so long; None where the limit of a call is the nearer one."""
        room_s = self.room_s
        return max(room_s, 0.0) if room_s < self._budget.job_minutes * 60 else None

    def cut(self, failure: Failure, bound_s: float | None, took_s: float) -> Failure:
        """The failure in the budget's words, where the job was ended by `bound_s`."""
        if failure.kind != "timeout" or bound_s is None or took_s < bound_s:
            return failure
        problem = (
            f"it was ended after {took_s:.0f} s, since no time was left of the {self._budget.minutes:g} minutes "
            "(budget.minutes) beside the measurement and publication of what is proven"
        )
        return replace(failure, problem=problem)

    # ------------------------------------------------------------------------------------------------------- measuring

    def for_measuring(self, passed: Sequence[Candidate]) -> Measuring:
        """How long candidates may be measured, and which can't be. The two likeliest always are, however late it is:
        without a measurement there is no verdict."""
        wanted_s, spare_s = self._budget.measure_seconds, self.seconds - self.after_s
        order = in_order_of_promise([candidate.job for candidate in passed])
        count = len(order)
        if not count:
            return Measuring(seconds=wanted_s)
        while count > 2 and spare_s - self._opening_s(count) < min(wanted_s, LEAST_ROUNDS_S * count):
            count -= 1
        rounds_s = spare_s - self._opening_s(count)
        seconds = max(min(wanted_s, rounds_s), min(wanted_s, LEAST_ROUNDS_S * count))
        overtime = min(OVERTIME, max(1.0, rounds_s / seconds)) if seconds else OVERTIME
        measured = {job.id for job in order[:count]}
        late = tuple(self._late(candidate) for candidate in passed if candidate.job.id not in measured)
        return Measuring(seconds=seconds, overtime=overtime, late=late)

    def _late(self, candidate: Candidate) -> Candidate:
        needed = START_S + self._batch_sizes * WARM_UP_S + LEAST_ROUNDS_S
        problem = (
            f"it holds every tolerance and was not measured: no time left of the {self._budget.minutes:g} minutes "
            f"(budget.minutes); it would have needed about {needed:.0f} s"
        )
        return candidate.failed(Failure(kind="timeout", step=NOT_STARTED, problem=problem))

    def lacks(self, seconds: float) -> str:
        """Why something that no verdict needs is left out; empty where there is time for it."""
        if self.seconds >= seconds:
            return ""
        return (
            f"no time left of the {self._budget.minutes:g} minutes (budget.minutes); it would have needed about "
            f"{seconds:.0f} s"
        )


def in_order_of_promise(jobs: Sequence[Job]) -> list[Job]:
    """The jobs in the order in which they should be tried, in case that time is left for some only.

    First one that passes almost for certain, so that there is a verdict: the first backend without a loss of
    precision. Then the likeliest winners: the lower precisions, and of a precision in the order of the policy's
    backends.
    """
    surest = next((job for job in jobs if job.scheme.precision == "fp32"), None)

    def key(job: Job) -> tuple[bool, int]:
        precision = job.scheme.precision
        return job is not surest, _SPEED.index(precision) if precision in _SPEED else len(_SPEED)

    return sorted(jobs, key=key)


def late_note(candidates: Iterable[Candidate], minutes: float) -> tuple[str, ...]:
    """One sentence on what the budget had no time for."""
    every = list(candidates)
    late = [c.job for c in every if c.failure is not None and c.failure.is_late]
    if not late:
        return ()
    names = ", ".join(job.label for job in late)
    others = " and finds the others in the cache" if len(late) < len(every) else ""
    return (
        f"{len(late)} of {len(every)} candidates were not tried or not measured, since budget.minutes is {minutes:g}: "
        f"{names}; with more minutes, the next run tries them{others}",
    )
