"""How many samples a limit with `confidence` needs before anything is run.

For shares of right or equal answers, whose intervals are known without having seen an answer. The metrics that a
bootstrap serves there is at most one for artifacts that ruin no answer, and for f1, log_loss, mae and rmse none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import NormalDist

from compile_stage.core.records import Gate, Job

_NORMAL = NormalDist()


def samples_for_drop(limit: float, confidence: float) -> int | None:
    """The least number of samples that shows a drop of at most `limit`, when no answer changes at all.

    With fewer, more than the limit can't be ruled out at that confidence: 299 samples for 0.01 at 0.95. Both forms of
    the bound must hold: the binomial's 1 - (1 - confidence)^(1 / n) and the score interval's z^2 / (n + z^2) (see
    `measure.proportions`). None when no number does, for a limit of 0.
    """
    if limit <= 0:
        return None
    if limit >= 1:
        return 1
    z = _NORMAL.inv_cdf(confidence)
    score, exact = z**2 * (1 - limit) / limit, math.log1p(-confidence) / math.log1p(-limit)
    return math.ceil(max(score, exact) - 1e-9)


def samples_for_gate(gate: Gate, baseline: float = 1.0) -> int | None:
    """The least number of samples that can show a gate's limit; 1 where no number is known, None where none can.

    Args:
        baseline: The original model's own score, of which `max_relative_drop` is a share.
    """
    if gate.confidence is None or gate.metric != "accuracy" or "drop" not in gate.options:
        return 1
    limit = gate.limit * baseline if gate.options["drop"] == "max_relative_drop" else gate.limit
    return samples_for_drop(limit, gate.confidence)


_OF_WINNER = 1000 / 299
"""So many times the samples that show a limit for one candidate: 1,000 for 0.01 at 0.95, where 299 show it
(docs/proof.md, Many candidates). Of twice the limit half as many answers tell as much."""


def samples_for_winner(needed: int) -> int:
    """About how many samples `select.confidence_of: winner` takes: with fewer, candidates that hold the limit are often
    refused, since others miss it.

    Args:
        needed: The least number that shows the limit for one candidate (`samples_for_drop`).

    Returns:
        The number, rounded up to two digits.
    """
    exact = needed * _OF_WINNER
    step: int = 10 ** max(math.floor(math.log10(exact)) - 1, 0)
    return math.ceil(exact / step - 1e-9) * step


def confidence_over(confidence: float | None, tries: int) -> float | None:
    """What is left of a confidence for one of so many tries, so that all hold it together (Bonferroni)."""
    return None if confidence is None else 1 - (1 - confidence) / tries


def confidence_notes(
    jobs: Iterable[Job], count: int | None, unit: str = "samples", *, of_winner: bool = False
) -> tuple[str, ...]:
    """One sentence for each limit whose confidence needs a number of samples, with the precisions that it is for.

    Args:
        count: How many there are; None where that is not known yet.
        unit: What is counted: samples, or groups of them.
        of_winner: The confidence is that of the winner, which takes more samples where other candidates miss.
    """
    jobs = tuple(jobs)
    tries = sum(any(gate.confidence is not None for gate in job.gates) for job in jobs) if of_winner else 1
    limits: dict[tuple[str, float, float | None, int | None, int | None], list[str]] = {}
    for job in jobs:
        for gate in _in_force(job.gates):
            if (needed := samples_for_gate(gate)) != 1:
                most = samples_for_gate(replace(gate, confidence=confidence_over(gate.confidence, tries)))
                limit = gate.metric, gate.limit, gate.confidence, needed, most
                limits.setdefault(limit, []).append(job.scheme.precision)
    notes = [
        f"{', '.join(dict.fromkeys(precisions))}: {_sentence(metric, limit, confidence, needed, count, unit)}"
        + (f"; a winner beside {tries - 1} that miss it takes up to {most:,}" if tries > 1 and most else "")
        for (metric, limit, confidence, needed, most), precisions in limits.items()
    ]
    return tuple(dict.fromkeys([*notes, *_few_changes(jobs, count, unit)]))


def _in_force(gates: Iterable[Gate]) -> list[Gate]:
    """Without general limits of a metric that an output is named for: labels are those of one output, so the general
    one gives way (`measure.metrics`)."""
    gates = list(gates)
    named = {gate.metric for gate in gates if gate.output is not None}
    return [gate for gate in gates if gate.output is not None or gate.metric not in named]


_PARTS = {
    "ndcg": 1.0,
    "coco_map": 1.0,
    "wer": 1.0,
    "ece": 2.0,
    "spearman": 1.0,
    "r2": 2.0,
    "roc_auc": 2.0,
    "token_accuracy": 1.0,
    "token_top1_agreement": 1.0,
}
"""Metric → how much of it one sample of n may carry, times n (docs/proof.md). For nDCG a sample is a query, for tokens
a prompt; for words it is the average one, and for roc_auc one of classes of equal size."""


def _few_changes(jobs: Iterable[Job], count: int | None, unit: str) -> Iterator[str]:
    """What a bootstrap can't tell: where next to no answer changes, so many samples are needed as nothing changed."""
    for gate in (gate for job in jobs for gate in _in_force(job.gates) if gate.metric in _PARTS):
        lost = 1 - gate.limit if gate.direction == "at_least" else gate.limit if "drop" in gate.options else None
        if gate.confidence is None or lost is None:
            continue
        part = 1.0 if gate.options.get("per_query") else _PARTS[gate.metric]
        needed = samples_for_drop(lost / part, gate.confidence)
        if needed is None:
            yield too_few_samples(gate, None, count or 0, unit)
        elif count is None or count < needed:
            there_are = "" if count is None else f"; there are {count:,}"
            yield (
                f"{gate.metric}: a limit of {gate.limit:g} at a confidence of {gate.confidence:g} needs about "
                f"{needed:,} {unit} where fewer than 10 answers change{there_are}"
            )


def _sentence(
    metric: str, limit: float, confidence: float | None, needed: int | None, count: int | None, unit: str
) -> str:
    gate = Gate(metric=metric, limit=limit, direction="at_most", confidence=confidence)
    if needed is None or (count is not None and count < needed):
        return too_few_samples(gate, needed, count or 0, unit)
    there_are = "" if count is None else f": enough are there ({count:,})"
    return (
        f"{metric}: a limit of {limit:g} at a confidence of {confidence:g} needs at least {needed:,} {unit}{there_are}"
    )


def too_few_samples(gate: Gate, needed: int | None, count: int, what: str = "samples") -> str:
    """One sentence: what the gate's confidence needs, and what to do."""
    asked = f"{gate.metric}: a limit of {gate.limit:g} at a confidence of {gate.confidence:g}"
    if needed is None:
        possible = "below 1" if gate.direction == "at_least" else "above 0"
        return f"{asked} can't be shown by any number of {what}: give a limit {possible}, or say confidence: null"
    return (
        f"{asked} needs at least {needed:,} {what}, and there are {count:,}: "
        "validate on more, or say confidence: null to look at the mean alone"
    )
