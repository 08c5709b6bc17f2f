"""Intervals of how much a task metric loses against the baseline on the same samples.

Accuracy is a share, and its interval is that of a paired difference of shares (`measure.proportions`). The other
metrics are bootstrapped. A bootstrap can't tell a few changed answers from none, so where there are fewer than 10 its
interval is widened by what the changes that so many samples can't rule out could do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.records import Gate, Outcome
from compile_stage.core.sample_sizes import samples_for_drop, samples_for_gate, too_few_samples
from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.proportions import (
    FEW_CHANGES,
    drop_interval,
    effective_share,
    relative_drop_interval,
    samples_needed_for,
    share_interval,
)
from compile_stage.measure.stats import Interval, Statistic, bootstrap

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

Compared: TypeAlias = Callable[[F64, F64], F64]
"""(candidate's values, baseline's values) → what the gate compares with its limit."""


@dataclass(frozen=True)
class TaskResult:
    """A task metric of both models.

    Attributes:
        value: What the gate compares with its limit: the drop, the relative drop, or the candidate's own score.
        interval: Of that value, when the gate asks for confidence and it can be had.
        badness: `[samples]`: how much more the candidate loses than the baseline; None for metrics of pairs of samples.
        note: What a reader should know beside the numbers.
        needed: Samples (or groups) with which so few changed answers could show the limit; None where it is not known,
            or where enough answers changed for a bootstrap to tell.
    """

    candidate: float
    baseline: float
    value: float
    interval: Interval | None
    badness: F64 | None
    note: str = ""
    needed: int | None = None


@dataclass(frozen=True)
class Score:
    """A metric of one model.

    Attributes:
        of: The same as a function of sample weights.
        losses: `[n]`: each sample's part; None for metrics of pairs of samples.
        answers: `[n]` or `[n, k]`: what the metric reads of the model's output.
        influence: How much one changed answer can worsen the metric at most.
    """

    value: float
    of: Statistic
    losses: F64 | None
    answers: Array
    influence: float


@dataclass(frozen=True)
class Wanted:
    """What interval a gate asks for.

    Attributes:
        gate: With a confidence.
        seed: Of the bootstrap.
        groups: `[n]`, numbered from 0: samples that belong together; None where they are independent.
    """

    gate: Gate
    seed: int
    groups: NDArray[np.int64] | None = None

    @property
    def confidence(self) -> float:
        """The gate's."""
        return 0.95 if self.gate.confidence is None else self.gate.confidence


@dataclass(frozen=True)
class Amount:
    """How many samples there are, and in how many groups; None: each is independent."""

    samples: int
    groups: int | None = None

    @property
    def independent(self) -> int:
        """What counts for intervals and `min_samples`."""
        return self.samples if self.groups is None else self.groups

    @property
    def unit(self) -> str:
        """What is counted."""
        return "samples" if self.groups is None else "groups of samples"

    @property
    def real(self) -> str:
        """In words, of real samples."""
        if self.groups is None:
            return f"{self.samples} real samples"
        return f"{self.groups} groups of {self.samples} real samples"

    def __str__(self) -> str:
        return f"{self.samples} samples" if self.groups is None else f"{self.samples} samples in {self.groups} groups"


def interval_of_drop(wanted: Wanted, own: Score, base: Score, compared: Compared) -> Interval:
    """Of what the gate compares with its limit. Raises NotMeasurableError for too few samples."""
    if wanted.gate.metric == "accuracy":
        return _accuracy_interval(own, base, wanted)
    count = len(own.answers)
    interval = bootstrap(
        lambda weights: compared(own.of(weights), base.of(weights)),
        count,
        seed=wanted.seed,
        confidence=wanted.confidence,
        groups=wanted.groups,
    )
    if interval is None:
        raise NotMeasurableError(f"{count} samples are too few to put an interval around {wanted.gate.metric}")
    unseen = _unseen_changes(own, base, wanted) * base.influence
    ends = [float(compared(np.array(own.value + off), np.array(base.value))) for off in (-unseen, unseen)]
    return replace(interval, low=min(interval.low, *ends), high=max(interval.high, *ends))


def mean_interval(
    parts: F64, confidence: float, *, seed: int, groups: NDArray[np.int64] | None = None
) -> Interval | None:
    """Of the mean of `[n]` samples' values; None for too few of them, or where all are equal and have no bounds.

    A share of samples has the binomial's interval. So has the mean of other values between 0 and 1 where fewer than 10
    of them differ from the rest: it is too wide, where a bootstrap would be too narrow.
    """
    if len(parts) < 2:
        return None
    inside = bool(np.all((parts >= 0) & (parts <= 1)))
    few = int(np.count_nonzero(parts != np.median(parts))) < FEW_CHANGES
    if inside and (few or bool(np.all((parts == 0) | (parts == 1)))):
        share = effective_share(parts, groups, confidence)
        return share_interval(share * float(parts.sum()), share * len(parts), confidence)
    interval = bootstrap(
        lambda weights: weights @ parts / weights.sum(axis=1),
        len(parts),
        seed=seed,
        confidence=confidence,
        groups=groups,
    )
    return None if interval is None or interval.low == interval.high else interval


def of_too_few(gate: Gate, result: TaskResult, worse: float, amount: Amount) -> tuple[Outcome, str]:
    """The outcome of a limit that the value holds and the worse end of its interval does not, and the reason's last
    part. With too few samples to show it whatever they say, nothing is known."""
    least = samples_for_gate(gate, result.baseline)
    if least is None or amount.independent < least:
        return Outcome.NOT_RUN, f", and {too_few_samples(gate, least, amount.independent, amount.unit)}"
    if result.needed is not None and amount.independent < result.needed:
        return Outcome.NOT_RUN, f", and {too_few_samples(gate, result.needed, amount.independent, amount.unit)}"
    enough = samples_to_show(gate, result, amount.samples) if amount.groups is None else None
    if enough is None and gate.metric != "accuracy":
        enough = _by_the_square_root(gate, result, worse, amount)
    more = f"; {enough:,} that change alike would show it" if enough is not None else ""
    return Outcome.FAIL, f", and so few {amount.unit} can't rule out {worse:.4g}{more}"


def samples_to_show(gate: Gate, result: TaskResult, count: int) -> int | None:
    """How many samples would show the gate's limit, if as large a share of them changed; None where that is not
    known."""
    if gate.metric != "accuracy" or gate.confidence is None or result.badness is None:
        return None
    limit = gate.limit * (result.baseline if gate.options.get("drop") == "max_relative_drop" else 1.0)
    lost, gained = (float(np.count_nonzero(sign * result.badness > 0)) / count for sign in (1, -1))
    return samples_needed_for(limit, gate.confidence, lost=lost, gained=gained) if lost - gained < limit else None


def _by_the_square_root(gate: Gate, result: TaskResult, worse: float, amount: Amount) -> int | None:
    """About how many samples would show the limit, where many answers changed: an interval's width falls with the root
    of their number."""
    if result.needed is not None or result.value >= gate.limit:
        return None
    return math.ceil(amount.independent * ((worse - result.value) / (gate.limit - result.value)) ** 2)


def needed_samples(gate: Gate, own: Score, base: Score, groups: NDArray[np.int64] | None) -> int | None:
    """`TaskResult.needed`: the least number that could show the limit if no answer changed at all."""
    drop = gate.options.get("drop")
    if gate.confidence is None or drop is None or gate.metric == "accuracy" or base.influence <= 0:
        return None
    if _changed_units(own, base, groups)[0] >= FEW_CHANGES:
        return None
    limit = gate.limit * (abs(base.value) if drop == "max_relative_drop" else 1.0)
    return samples_for_drop(limit / (base.influence * len(base.answers)), gate.confidence)


def _accuracy_interval(own: Score, base: Score, wanted: Wanted) -> Interval:
    drop, confidence, groups = wanted.gate.options.get("drop"), wanted.confidence, wanted.groups
    wrong, wrong_before = _losses(own), _losses(base)
    count, share = len(wrong), effective_share(wrong, groups, confidence)
    if drop is None:
        return share_interval(share * float(np.sum(1 - wrong)), share * count, confidence)
    share = effective_share(wrong - wrong_before, groups, confidence)
    lost, gained = (share * float(np.count_nonzero(off > 0)) for off in (wrong - wrong_before, wrong_before - wrong))
    absolute = drop_interval(lost, gained, share * count, confidence)
    if drop == "max_drop":
        return absolute
    share = effective_share(wrong_before, groups, confidence)
    right = share_interval(share * float(np.sum(1 - wrong_before)), share * count, confidence)
    return relative_drop_interval(absolute, right)


def _losses(score: Score) -> F64:
    if score.losses is None:
        raise NotMeasurableError("it has no value for a single sample")
    return score.losses


def _unseen_changes(own: Score, base: Score, wanted: Wanted) -> float:
    """How many more answers may have changed than did on these samples, where fewer than 10 did; else 0: then a
    bootstrap shows it."""
    seen, units = _changed_units(own, base, wanted.groups)
    if seen >= FEW_CHANGES:
        return 0.0
    return (share_interval(seen, units, wanted.confidence).high * units - seen) * len(own.answers) / units


def _changed_units(own: Score, base: Score, groups: NDArray[np.int64] | None) -> tuple[int, int]:
    """How many samples have another answer, or groups in which one has, and of how many."""
    differs = own.answers != base.answers
    changed = differs.reshape(len(differs), -1).any(axis=1)
    if groups is None:
        return int(changed.sum()), len(changed)
    return len(np.unique(groups[changed])), int(groups.max()) + 1
