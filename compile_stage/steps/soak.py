"""The winner, called for some seconds → whether its answers stay those of the original."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import SourceError, UsageError, WorkerError
from compile_stage.core.killed_workers import once_more_after_a_kill
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import Answers, Budget, Candidate, Check, Failure, Outcome, Verdict


def soak(context: Context, candidate: Candidate, original: Answers, budget: Budget) -> Candidate:
    """The candidate with the check `soak` in its verdict; in the state `failed` where it did not hold. One without an
    artifact, and one with the check already, stays as it is, and so does each where the policy grants no seconds."""
    artifact, verdict, job = candidate.artifact, candidate.verdict, candidate.job
    if artifact is None or verdict is None or budget.soak_seconds <= 0:
        return candidate
    from compile_stage.measure.drafts import Drafts
    from compile_stage.measure.gates import that_held
    from compile_stage.measure.predict import open_outputs
    from compile_stage.measure.soak import judge_soak
    from compile_stage.measure.structure import SOAK
    from compile_stage.measure.tolerance import elementwise_gates

    if any(check.gate.metric == SOAK for check in verdict.checks):
        return candidate
    # A limit that a waiver lifted says nothing of these answers either.
    held = that_held(job.gates, verdict.checks)
    gates = elementwise_gates(held, has_labels=original.samples.has_labels, few_rows=True)
    batch_size = original.mixed_batch or job.target.batch_sizes[0]
    key = {
        "artifact": [artifact.digest, artifact.options, artifact.toolchain],
        "backend": job.backend,
        "made_by": plugins.cache_identity("backends", job.backend),
        "samples": original.samples.digest,
        "reference": original.digest,
        "gates": [replace(gate, origin="") for gate in gates],
        "batch_size": batch_size,
        "in_order": original.mixed_batch is not None,
        "threads": job.target.threads,
        "seconds": budget.soak_seconds,
        "seed": original.seed,
        "hardware": context.hardware,
    }

    def make(_: Path) -> Check:
        limits = WorkerLimits.within(budget, job.target.threads, plugins.interpreter_of(job.backend))
        with (
            ExitStack() as stack,
            context.worker(f"{job.id}--soak", limits) as worker,
            tempfile.TemporaryDirectory(dir=context.scratch) as folder,
        ):
            worker.call("open_served", model=Drafts(context.scratch, stack).of(artifact, job.target))
            recorded = worker.call(
                "soak",
                samples=original.samples,
                batch_size=batch_size,
                seconds=budget.soak_seconds,
                seed=original.seed,
                into=folder,
                in_order=original.mixed_batch is not None,
            )
            return judge_soak(gates, recorded, open_outputs(original.outputs), original.seed, budget.soak_seconds)

    def soaked_check() -> Check:
        check: Check = revive(Check, context.cached("soak/4", job.id, key, make).value)
        return check

    try:
        check = once_more_after_a_kill(lambda _: soaked_check())
    except WorkerError as error:
        return candidate.failed(Failure(kind=error.kind, step="soak", problem=error.problem, detail=error.detail))
    except (SourceError, UsageError) as error:
        return candidate.failed(Failure(kind="exception", step="soak", problem=error.problem))
    soaked = replace(candidate, verdict=Verdict(checks=(*verdict.checks, check)))
    return soaked if check.outcome is Outcome.PASS else soaked.in_state("failed", f"soak: {check.reason}")
