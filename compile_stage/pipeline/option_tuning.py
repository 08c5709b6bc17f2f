"""The ladder of a target: the fastest that passes, and on top of it its backend's settings, one by one, as long as the run's budget lasts.

Each rung is compiled, validated in full, and measured in turns with what is below it. Those that are kept join the candidates: they are
measured with all others and selected like any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from compile_stage.core.context import Context
from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import (
    Artifact,
    Budget,
    Candidate,
    OptimizationStep,
    Policy,
    SampleSet,
    TargetPolicy,
    TuningOption,
)
from compile_stage.pipeline.evaluate import Material
from compile_stage.pipeline.workshop import TargetWorkshop
from compile_stage.steps.benchmark import BASELINE, benchmark
from compile_stage.steps.ladder import Climb, climbed_job, refuse_rung, rungs_of, weigh
from compile_stage.steps.select import select

_RACE_S = 8.0
"""At most so long are a rung and what is below it measured in turns; on a quiet machine their ratio is known to 2 % after a second or two. It
decides what is kept; what is claimed is measured with all others."""


def climb(
    context: Context,
    policy: Policy,
    target_policy: TargetPolicy,
    candidates: Sequence[Candidate],
    material: Material,
) -> tuple[list[Candidate], Climb | None]:
    """The candidates, behind the one that the ladder stands on the rungs that were kept, and what was tried; None when the policy wants
    no ladder."""
    if not target_policy.ladder:
        return list(candidates), None
    # What all of them are measured in at the end is not the ladder's to spend.
    left_s = policy.budget.minutes * 60 - policy.budget.measure_seconds - context.events.elapsed_s
    workshop = TargetWorkshop(context, policy, target_policy, material)
    ladder = _Ladder(
        context, policy, target_policy, material.samples["validation"], workshop, time.monotonic() + left_s
    )
    stand, why = ladder.lowest(candidates)
    if stand is None:
        return list(candidates), Climb(reason="no candidate passed every tolerance")
    kept, steps, top = [stand], [], stand
    offered = rungs_of(stand.job.backend, stand.job.target, stand.job.scheme)
    for rung in offered:
        step, candidate = ladder.step(rung, top)
        steps.append(step)
        if candidate is not None:
            kept.append(candidate)
            top = candidate
    missing = "" if offered else f"{stand.job.backend} offers no settings for memory or tuning here"
    with_kept = [one for candidate in candidates for one in (kept if candidate is stand else [candidate])]
    return with_kept, Climb(stand=stand.job.id, why=why, steps=tuple(steps), reason=missing)


class _Ladder:
    """Tries rungs for one target until `ends`, on `time.monotonic`'s clock."""

    def __init__(
        self,
        context: Context,
        policy: Policy,
        target_policy: TargetPolicy,
        samples: SampleSet,
        workshop: TargetWorkshop,
        ends: float,
    ) -> None:
        self._context, self._policy, self._target_policy = context, policy, target_policy
        self._samples, self._workshop, self._ends = samples, workshop, ends

    def lowest(self, candidates: Sequence[Candidate]) -> tuple[Candidate | None, str]:
        """What the rungs are tried on, and why: of those that pass the fastest by a quick look, or of the smallest the fastest."""
        passing, of = (
            [c for c in candidates if c.verdict and c.verdict.passed and c.artifact is not None],
            "that passes",
        )
        if self._target_policy.prefer == "size":
            least = min((_size(c) for c in passing), default=0)
            passing, of = [c for c in passing if _size(c) == least], "of the smallest that pass"
        if len(passing) < 2:
            return (passing[0], f"the only one {of}") if passing else (None, "")
        fastest = self._workshop.fastest(passing, self._seconds)
        if fastest is None:
            return passing[0], f"the first {of}: none could be timed"
        return next(c for c in passing if c.job.id == fastest.job.id), f"the fastest {of}, by a quick look"

    def step(self, rung: TuningOption, below: Candidate) -> tuple[OptimizationStep, Candidate | None]:
        """One rung on top of what was kept; the candidate when it is kept too."""
        step = OptimizationStep(kind=rung.kind, name=rung.name, accepted=False, options=rung.options)
        if (reason := refuse_rung(rung, below.job)) is not None:
            return replace(step, reason=reason), None
        if self._seconds <= 0:
            late = f"nothing is left of the budget of {self._policy.budget.minutes:g} minutes beside the measurement of all"
            return replace(step, reason=f"not tried: {late}"), None
        job, source = climbed_job(below.job, rung), below.portable
        step = replace(step, job_id=job.id)
        with self._context.events.step("ladder", job.id):
            make = (lambda _: source) if source is not None else None
            candidate = self._workshop.attempt(job, make, self._seconds)
            if candidate.verdict is None or not candidate.verdict.passed or candidate.artifact is None:
                reason = select((candidate,), self._target_policy).reasons[job.id]
                return replace(step, reason=f"dropped: {reason}"), None
            kept, reason = self._race(candidate.artifact, below.artifact)
        return replace(step, accepted=kept, reason=reason), candidate if kept else None

    def _race(self, own: Artifact, below: Artifact | None) -> tuple[bool, str]:
        """Measured in turns with what is below it: is it better, and a sentence."""
        target, name = self._target_policy.target, own.job_id
        if below is None or self._seconds <= 0:
            return False, "dropped: no time was left to measure it"
        try:
            found = benchmark(
                self._context,
                name,
                below,
                {name: own},
                self._samples,
                replace(target, batch_sizes=target.batch_sizes[:1]),
                self._race_budget(),
                seed=self._policy.data.seed,
            )
        except CompileStageError as error:
            return False, f"dropped: what is below it could not be measured again ({error.problem})"
        if name in found.failures:
            return False, f"dropped: it died while it was measured: {found.failures[name].problem}"
        return weigh(found.measurements[name], found.measurements[BASELINE], self._target_policy)

    def _race_budget(self) -> Budget:
        budget, left_s = self._policy.budget, self._seconds
        return replace(
            budget,
            measure_seconds=min(budget.measure_seconds, _RACE_S, left_s),
            job_minutes=min(budget.job_minutes, left_s / 60),
        )

    @property
    def _seconds(self) -> float:
        return self._ends - time.monotonic()


def _size(candidate: Candidate) -> int:
    return candidate.artifact.size_bytes if candidate.artifact is not None else 0
