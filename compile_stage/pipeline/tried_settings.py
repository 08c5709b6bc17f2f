"""Settings that are tried without being asked for, since they mostly gain: fewer threads where calls are short, a batch
that is shared among the threads where several rows come at a time.

The fastest candidates are opened with what their backend marks as worth a try there (`TuningOption.worth_a_try`),
validated in full, and measured beside the others in all starts but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compile_stage.core.records import Candidate
from compile_stage.pipeline.evaluate import EvaluationOptions, evaluate
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.tuning_options import options_of, refuse_option, tuned_job
from compile_stage.steps.benchmark import TrySettings


def tried_settings(target: TargetRun, candidates: Sequence[Candidate]) -> TrySettings | None:
    """Makes, of the candidate of a job, those with wanted settings that pass. None where the policy takes size or
    memory at any latency."""
    if target.policy.prefer not in ("latency", "throughput"):
        return None
    by_job = {candidate.job.id: candidate for candidate in candidates}

    def make(job_id: str, wanted: Callable[[str, str], bool]) -> list[Candidate]:
        plain = by_job[job_id]
        job, lowered = plain.job, plain.portable
        offered = (one for one in options_of(job.backend, job.target, job.scheme) if one.worth_a_try)
        tried = [(one.worth_a_try, tuned_job(job, one)) for one in offered if refuse_option(one, job) is None]
        jobs = [tuned for purpose, tuned in tried if tuned.id not in by_job and wanted(purpose, tuned.id)]
        options = EvaluationOptions(lower=(lambda _: lowered) if lowered is not None else None)
        made = [evaluate(target, tuned, options).candidate for tuned in jobs]
        return [one for one in made if one.has_passed and one.artifact is not None]

    return make
