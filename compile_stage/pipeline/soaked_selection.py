"""Candidates → the selection whose winner holds the soak."""

from __future__ import annotations

from collections.abc import Sequence

from compile_stage.core.context import Context
from compile_stage.core.records import Answers, Budget, Candidate, Selection, TargetPolicy
from compile_stage.measure import own_metric
from compile_stage.steps.select import select
from compile_stage.steps.soak import soak


def select_soaked(
    context: Context, candidates: Sequence[Candidate], policy: TargetPolicy, original: Answers | None, budget: Budget
) -> tuple[tuple[Candidate, ...], Selection]:
    """The candidates, and the selection whose winner was called for as long as the policy says; whoever does not hold
    that is out, and the next best is called.

    Args:
        original: None where nothing was measured, and so there is no winner to call.
    """
    while True:
        selection = select(candidates, policy)
        if selection.winner is None or original is None:
            return tuple(candidates), selection
        won = next(candidate for candidate in candidates if candidate.job.id == selection.winner)
        with own_metric.allowed(budget.job_minutes * 60):
            called = soak(context, won, original, budget)
        candidates = tuple(called if candidate is won else candidate for candidate in candidates)
        if called.has_passed:
            return candidates, selection
