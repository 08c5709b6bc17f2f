"""The candidates of a target that missed a tolerance: each searched for nodes to keep in higher precision, within one budget."""

from __future__ import annotations

from collections.abc import Sequence

from compile_stage.core.context import Context
from compile_stage.core.records import Candidate, Policy, TargetPolicy
from compile_stage.pipeline.evaluate import Material
from compile_stage.pipeline.workshop import TargetWorkshop
from compile_stage.steps.search import Passing, find_mixed, open_budget, order_searches

_SHARE = 0.5
"""Of what is left, a search may use so much while others wait; the last may use all."""


def mix_missed(
    context: Context,
    policy: Policy,
    target_policy: TargetPolicy,
    candidates: Sequence[Candidate],
    material: Material,
) -> list[Candidate]:
    """The candidates, and behind each that was searched with success the mixed one that passes."""
    missed = order_searches(candidates, target_policy)
    if not missed:
        return list(candidates)
    left_s = policy.budget.minutes * 60 - context.events.elapsed_s
    budget = open_budget(target_policy.fallback, left_s)
    workshop = TargetWorkshop(context, policy, target_policy, material)
    counts = target_policy.prefer in ("latency", "throughput")

    def to_beat(found: Sequence[Candidate], before: Passing | None = None) -> Passing | None:
        """The fastest that passes; None when speed is not what selection looks at."""
        return workshop.fastest(found, budget.seconds, before) if counts else None

    passing = to_beat([c for c in candidates if c.verdict is not None and c.verdict.passed])
    found: dict[str, list[Candidate]] = {}
    for position, candidate in enumerate(missed):
        with context.events.step("search", candidate.job.id):
            noted, mixed = find_mixed(
                context,
                candidate,
                budget,
                workshop,
                passing=passing,
                share=1.0 if position == len(missed) - 1 else _SHARE,
            )
        found[candidate.job.id] = [noted] if mixed is None else [noted, mixed]
        if mixed is not None:
            passing = to_beat([mixed], passing)
    return [one for candidate in candidates for one in found.get(candidate.job.id, [candidate])]
