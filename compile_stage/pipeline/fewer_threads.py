"""A small model on fewer threads: tried without being asked for, since it is mostly as fast, or faster.

Where a call takes less than two milliseconds, waking the threads and waiting for the last of them costs a good part of
it, and differs from process to process. The fastest candidates are opened with the settings that their backend offers
for short calls, validated in full, and measured beside them in all starts but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compile_stage.core.records import Candidate
from compile_stage.pipeline.evaluate import EvaluationOptions, evaluate
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.tuning_options import options_of, refuse_option, tuned_job


def for_short_calls(target: TargetRun, candidates: Sequence[Candidate]) -> Callable[[str], Sequence[Candidate]] | None:
    """Makes, of the candidate of a job, those with settings for short calls that pass. None where the policy takes
    size or memory at any latency."""
    if target.policy.prefer not in ("latency", "throughput"):
        return None
    by_job = {candidate.job.id: candidate for candidate in candidates}

    def make(job_id: str) -> list[Candidate]:
        plain = by_job[job_id]
        job, lowered = plain.job, plain.portable
        offered = [one for one in options_of(job.backend, job.target, job.scheme) if one.for_short_calls]
        tried = [tuned_job(job, one) for one in offered if refuse_option(one, job) is None]
        options = EvaluationOptions(lower=(lambda _: lowered) if lowered is not None else None)
        made = [evaluate(target, tuned, options).candidate for tuned in tried if tuned.id not in by_job]
        return [one for one in made if one.has_passed and one.artifact is not None]

    return make
