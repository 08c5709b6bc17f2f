"""Targets → what serving their winners costs, and the gates on it; whoever misses one is out, and the next best is
called for a while (`soaked_selection`) and served."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from compile_stage.core.context import Context
from compile_stage.core.performance_keys import policy_key
from compile_stage.core.records import Candidate, Origin, Outcome, Plan, ServingCost, TargetResult, Verdict
from compile_stage.measure.metrics import apply_waivers
from compile_stage.measure.served_load import asked_per_s, judge_served
from compile_stage.pipeline.soaked_selection import select_soaked
from compile_stage.steps.package import package
from compile_stage.steps.promote import alias_of, published_now
from compile_stage.steps.serving_cost import PRODUCTION, WINNER, ServedModel, ServingRequest, measure_serving


def measure_served(
    context: Context, plan: Plan, target: TargetResult, origin: Origin, *, beside_production: bool
) -> TargetResult:
    """A target with what serving its winner costs, where its policy asks; its winner holds the gates on that.

    Args:
        beside_production: What the alias points to now is measured too, where there is such a version.
    """
    if not target.policy.serving.asked:
        return target
    while (winner := target.winner) is not None and winner.artifact is not None:
        cost = _measured(context, plan, target, origin, beside_production=beside_production)
        judged = _judged(context, plan, target, winner, cost)
        candidates = tuple(judged if c.job.id == winner.job.id else c for c in target.candidates)
        if judged.state != "failed":
            return replace(target, candidates=candidates, serving=cost)
        candidates, selection = select_soaked(context, candidates, target.policy, target.original, plan.policy.budget)
        target = replace(target, candidates=candidates, selection=selection, serving=cost)
    return target


def _measured(
    context: Context, plan: Plan, target: TargetResult, origin: Origin, *, beside_production: bool
) -> ServingCost:
    """Of the winner as it would be packaged, in a folder of the run's own: the manifest that is published has the
    verdict on it."""
    winner, policy = target.winner, plan.policy
    assert winner is not None
    assert winner.artifact is not None
    # It is not signed yet, so it can't ask for a signature.
    unsigned = replace(plan, policy=replace(policy, compliance=replace(policy.compliance, require_signature=False)))
    with tempfile.TemporaryDirectory(dir=context.scratch) as folder:
        packaged = package(context, unsigned, target, origin, Path(folder))
        bundle = packaged.bundle
        assert bundle is not None
        models = {WINNER: ServedModel(path=bundle.path, artifact=winner.artifact)}
        note, alias = "", alias_of(target)
        if beside_production and alias is not None:
            before, note = published_now(context, plan.source, bundle.name, alias, winner.artifact)
            if before is not None:
                models[PRODUCTION] = ServedModel(path=before.path, artifact=before.artifact)
        request = ServingRequest(
            models=models,
            target=target.policy.target,
            serving=target.policy.serving,
            samples=target.samples["validation"],
            budget=policy.budget,
            seed=policy.data.seed,
            predictions=target.predictions,
            asked_per_s=asked_per_s(target.policy),
        )
        cost = measure_serving(context, request)
    return replace(cost, notes=(*cost.notes, note)) if note else cost


def _judged(context: Context, plan: Plan, target: TargetResult, winner: Candidate, cost: ServingCost) -> Candidate:
    """The winner with the gates on what is served in its verdict."""
    checks = judge_served(target.policy.performance, cost)
    if not checks or winner.verdict is None:
        return winner
    waived = apply_waivers(checks, plan.policy.waivers, target.policy.target.name, context.today)
    judged = replace(winner, verdict=Verdict(checks=(*winner.verdict.checks, *waived)))
    bad = [check for check in waived if check.outcome is not Outcome.PASS and check.waived is None]
    return judged.in_state("failed", f"{policy_key(bad[0].gate.metric)}: {bad[0].reason}") if bad else judged
