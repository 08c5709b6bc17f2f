"""The candidates of a target that missed a tolerance: each searched for nodes to keep in higher precision, within one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compile_stage.attempt import attempt
from compile_stage.core.context import Context
from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Needs
from compile_stage.core.records import Candidate, Job, Policy, PortableModel, SampleSet, Sensitivity, TargetPolicy
from compile_stage.steps.search import (
    Lower,
    Passing,
    SearchBudget,
    find_mixed,
    open_budget,
    order_searches,
    quick_latency,
    rank,
)
from compile_stage.steps.select import waive
from compile_stage.steps.validate import Reference

_SHARE = 0.5
"""Of what is left, a search may use so much while others wait; the last may use all."""


def mix_missed(
    context: Context,
    policy: Policy,
    target_policy: TargetPolicy,
    candidates: Sequence[Candidate],
    portable: PortableModel,
    samples: Mapping[str, SampleSet],
    expected: Reference,
) -> list[Candidate]:
    """The candidates, and behind each that was searched with success the mixed one that passes."""
    missed = order_searches(candidates, target_policy)
    if not missed:
        return list(candidates)
    left_s = policy.budget.minutes * 60 - context.events.elapsed_s
    workshop = _Workshop(
        context, policy, target_policy, portable, samples, expected, open_budget(target_policy.fallback, left_s)
    )
    passing = workshop.fastest([c for c in candidates if c.verdict is not None and c.verdict.passed])
    found: dict[str, list[Candidate]] = {}
    for position, candidate in enumerate(missed):
        with context.events.step("search", candidate.job.id):
            noted, mixed = find_mixed(
                context,
                candidate,
                workshop.budget,
                workshop,
                passing=passing,
                share=1.0 if position == len(missed) - 1 else _SHARE,
            )
        found[candidate.job.id] = [noted] if mixed is None else [noted, mixed]
        if mixed is not None:
            passing = workshop.fastest([mixed], passing)
    return [one for candidate in candidates for one in found.get(candidate.job.id, [candidate])]


class _Workshop:
    """What a search has made and measured for it; every worker ends with the search's time."""

    def __init__(
        self,
        context: Context,
        policy: Policy,
        target_policy: TargetPolicy,
        portable: PortableModel,
        samples: Mapping[str, SampleSet],
        expected: Reference,
        budget: SearchBudget,
    ) -> None:
        self._context, self._policy, self._target_policy = context, policy, target_policy
        self._samples, self._expected = samples, expected
        self.portable, self.budget = portable, budget

    def attempt(self, job: Job, make: Lower, seconds: float) -> Candidate:
        found = attempt(
            self._context,
            self._policy,
            job,
            self.portable,
            self._samples,
            self._expected,
            make=make,
            total_s=seconds,
        )
        return waive(found, self._target_policy, self._policy.waivers, self._context.today)

    def rank(self, missed: Candidate, seconds: float) -> Sequence[Sensitivity]:
        samples = self._samples.get("calibration", self._samples["validation"])
        with self._context.worker(f"{missed.job.id}--rank", self._needs(missed.job, seconds)) as worker:
            return rank(self._context, worker, missed, self.portable, samples)

    def latency(self, candidate: Candidate, seconds: float) -> float | None:
        if candidate.artifact is None or seconds <= 0:
            return None
        job = candidate.job
        try:
            with self._context.worker(f"{job.id}--quick", self._needs(job, seconds)) as worker:
                return quick_latency(self._context, worker, job, candidate.artifact, self._samples["validation"])
        except CompileStageError:
            return None

    def fastest(self, candidates: Sequence[Candidate], before: Passing | None = None) -> Passing | None:
        """What a mixed candidate must beat to be of use: the fastest that passes; None when speed is not what selection looks at."""
        if self._target_policy.prefer not in ("latency", "throughput"):
            return None
        for candidate in candidates:
            latency_s = self.latency(candidate, self.budget.seconds)
            if latency_s is not None and (before is None or latency_s < before.latency_s):
                before = Passing(candidate.job, latency_s)
        return before

    def _needs(self, job: Job, seconds: float) -> Needs:
        return replace(Needs.within(self._policy.budget, job.target.threads), total_s=seconds)
