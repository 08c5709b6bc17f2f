"""Intervals of how much a task metric loses against the baseline on the same samples.

Accuracy is a share, and its interval is that of a paired difference of shares (`measure.proportions`). The other
metrics are bootstrapped, those that a few samples can decide as functions of means (`measure.skewed_means`). A
bootstrap can't tell a few ruined answers from none, so where there are fewer than 10 its interval is widened by what
the ruined answers that so many samples can't rule out could do. Rounding moves every answer a little and ruins none,
so an answer of floats counts where it is as far off as those of other samples are.
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
from compile_stage.measure.skewed_means import Means, compared_means, mean_of, means_interval
from compile_stage.measure.stats import Interval, Statistic, bootstrap

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

Compared: TypeAlias = Callable[[F64, F64], F64]
"""(candidate's values, baseline's values) → what the gate compares with its limit."""

FAR = 0.2
"""An answer that is off by more than this share of what answers differ by has lost its sample; rounding, and 8 bits,
move it less."""


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
        influence: How much one ruined answer worsens the metric, or `[n]`: that of each sample. Samples of which it is
            the same, those of a class, are counted by themselves.
        apart: An answer that is further from the original's is a ruined one; 0 where any other answer is.
        costs: `[n]`: each sample's part of the metric, the more the worse, to which a ruined answer adds `influence` on
            average; None where `influence` is the most that one can cost.
        means: The same as a function of means, where a sample may cost any amount; None where no sample can decide the
            metric by itself.
    """

    value: float
    of: Statistic
    losses: F64 | None
    answers: Array
    influence: float | F64
    apart: float = 0.0
    costs: F64 | None = None
    means: Means | None = None


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
    if own.means is not None and base.means is not None:
        metric = compared_means(own.means, base.means, compared)
        interval = means_interval(metric, seed=wanted.seed, confidence=wanted.confidence, groups=wanted.groups)
    else:
        interval = bootstrap(
            lambda weights: compared(own.of(weights), base.of(weights)),
            count,
            seed=wanted.seed,
            confidence=wanted.confidence,
            groups=wanted.groups,
        )
    if interval is None:
        raise NotMeasurableError(f"{count} samples are too few to put an interval around {wanted.gate.metric}")
    parts = _parts(own, base, wanted.groups)
    unseen = max((part.unseen(wanted.confidence) * part.influence for part in parts), default=0.0)
    ends = [float(compared(np.array(own.value + off), np.array(base.value))) for off in (-unseen, unseen)]
    return replace(interval, low=min(interval.low, *ends), high=max(interval.high, *ends))


def mean_interval(
    parts: F64, confidence: float, *, seed: int, groups: NDArray[np.int64] | None = None, shares: bool = False
) -> Interval | None:
    """Of the mean of `[n]` samples' values; None for too few of them, or where all are equal and have no bounds.

    A share of samples has the binomial's interval. So has the mean of other values between 0 and 1 where fewer than 10
    of them differ from the rest: it is too wide, where a bootstrap would be too narrow.

    Args:
        shares: Values lie between 0 and 1 by what they are. Then so many of them may lie at either end as the samples
            can't rule out, where fewer than 10 are far from the rest.
    """
    if len(parts) < 2:
        return None
    inside, off = bool(np.all((parts >= 0) & (parts <= 1))), np.abs(parts - np.median(parts))
    few = int(np.count_nonzero(off)) < FEW_CHANGES
    if inside and (few or bool(np.all((parts == 0) | (parts == 1)))):
        share = effective_share(parts, groups, confidence)
        return share_interval(share * float(parts.sum()), share * len(parts), confidence)
    if inside:
        interval = bootstrap(
            lambda weights: weights @ parts / weights.sum(axis=1),
            len(parts),
            seed=seed,
            confidence=confidence,
            groups=groups,
        )
    else:  # one sample may be any amount off
        interval = means_interval(mean_of(parts), seed=seed, confidence=confidence, groups=groups)
    if interval is None or interval.low == interval.high:
        return None
    units = np.arange(len(parts)) if groups is None else groups
    far, number = len(np.unique(units[off > FAR])), int(units.max()) + 1
    if not shares or far >= FEW_CHANGES:
        return interval
    more = share_interval(far, number, confidence).high - far / number
    low, high = interval.value * (1 - more), interval.value + more * (1 - interval.value)
    return replace(interval, low=min(interval.low, low), high=max(interval.high, high))


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
    """`TaskResult.needed`: the least number that could show the limit if no answer were ruined at all."""
    drop = gate.options.get("drop")
    if gate.confidence is None or drop is None or gate.metric == "accuracy":
        return None
    limit, needed = gate.limit * (abs(base.value) if drop == "max_relative_drop" else 1.0), []
    for part in _parts(own, base, groups):
        if part.ruined < FEW_CHANGES and part.influence > 0:
            least = samples_for_drop(limit / (part.influence * part.samples), gate.confidence)
            if least is None:
                return None
            needed.append(math.ceil(least * part.of_all))
    return max(needed, default=None)


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


@dataclass(frozen=True)
class _Part:
    """Samples whose ruined answers cost the same: all, or those of a class.

    Attributes:
        influence: What one ruined answer costs.
        samples: How many there are.
        units: Groups among them, or samples.
        ruined: Units with a ruined answer.
        harm: What these cost, one ruined answer being 1.
        of_all: All units of the validation set, over those among these samples.
    """

    influence: float
    samples: int
    units: int
    ruined: int
    harm: float
    of_all: float

    def unseen(self, confidence: float) -> float:
        """How many more answers may be ruined than are on these samples, where fewer than 10 are; else 0: then a
        bootstrap shows it.

        Those that are cost what a ruined answer costs at least, since a few that happen to cost little don't make the
        others cheap.
        """
        if self.ruined >= FEW_CHANGES:
            return 0.0
        size = self.samples / self.units
        each = max(1.0, self.harm / (self.ruined * size)) if self.ruined else 1.0
        return share_interval(self.ruined, self.units, confidence).high * self.samples * each - self.harm


def _parts(own: Score, base: Score, groups: NDArray[np.int64] | None) -> list[_Part]:
    ruined, influences = _ruined(own, base), np.broadcast_to(base.influence, len(base.answers))
    groups = np.arange(len(ruined)) if groups is None else groups
    number = int(groups.max()) + 1
    parts = []
    for influence in np.unique(influences):
        here = influences == influence
        units, hit = len(np.unique(groups[here])), here & ruined
        count = len(np.unique(groups[hit]))
        samples = int(np.count_nonzero(here))
        harm = count * samples / units
        if own.costs is not None and base.costs is not None and influence > 0:
            harm = float((own.costs - base.costs)[hit].sum() / influence)
        parts.append(_Part(float(influence), samples, units, count, harm, number / units))
    return parts


def _ruined(own: Score, base: Score) -> NDArray[np.bool_]:
    """`[n]`: which answers are further from the original's than `Score.apart`."""
    if base.apart == 0:
        differs = own.answers != base.answers
        return np.asarray(differs.reshape(len(differs), -1).any(axis=1))
    off = (own.answers.astype(np.float64) - base.answers.astype(np.float64)).reshape(len(own.answers), -1)
    return np.asarray(np.sqrt((off**2).sum(axis=1)) > base.apart)


def far_apart(answers: F64) -> float:
    """`Score.apart` of `[n]` or `[n, k]` numbers: a fifth of how far two samples' answers are apart (root mean
    square). Above what rounding and 8 bits do, and below what an answer that has lost its sample is off by."""
    return FAR * math.sqrt(2 * float(np.var(answers.reshape(len(answers), -1), axis=0).sum()))
