"""Where candidates of one target are made and timed beyond the policy's own jobs: by the search for mixed precision, and on the ladder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import Candidate, Job, Policy, Sensitivity, TargetPolicy
from compile_stage.pipeline.evaluate import Material, attempt
from compile_stage.steps.search import Lower, Passing, quick_latency, rank
from compile_stage.steps.select import waive


class TargetWorkshop:
    """Makes and measures candidates of one target (`steps.search.Workshop`); every worker ends with the time that it is given."""

    def __init__(
        self,
        context: Context,
        policy: Policy,
        target_policy: TargetPolicy,
        material: Material,
    ) -> None:
        self._context, self._policy, self._target_policy = context, policy, target_policy
        self._material, self._samples = material, material.samples
        self.portable = material.portable

    def attempt(self, job: Job, make: Lower | None, seconds: float) -> Candidate:
        found = attempt(
            self._context,
            self._policy,
            job,
            self._material,
            make=make,
            total_s=seconds,
            then=self._quick,
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
        needs = replace(self._needs(job, seconds), interpreter=plugins.interpreter_of(job.backend))
        with self._context.worker(f"{job.id}--quick", needs) as worker:
            return self._quick(worker, candidate)

    def fastest(self, candidates: Sequence[Candidate], seconds: float, before: Passing | None = None) -> Passing | None:
        """The fastest of them and `before`, by quick latencies; None when none could be had.

        Args:
            seconds: A hard limit of all of it.
        """
        ends = time.monotonic() + seconds
        for candidate in candidates:
            latency_s = self.latency(candidate, ends - time.monotonic())
            if latency_s is not None and (before is None or latency_s < before.latency_s):
                before = Passing(candidate.job, latency_s)
        return before

    def _quick(self, worker: Worker, candidate: Candidate) -> float | None:
        """Its quick latency, from the cache where it was taken before: of what is made here, by the worker that made it, which spares another's start."""
        if candidate.artifact is None:
            return None
        samples = self._samples["validation"]
        try:
            return quick_latency(self._context, worker, candidate.job, candidate.artifact, samples)
        except CompileStageError:
            return None

    def _needs(self, job: Job, seconds: float) -> Needs:
        return replace(Needs.within(self._policy.budget, job.target.threads), total_s=seconds)
