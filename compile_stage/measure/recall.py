"""The class that loses most: a rare one can be lost whole, and the accuracy hardly moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.sample_sizes import samples_for_drop
from compile_stage.measure.chance import demand_fit
from compile_stage.measure.elementwise import NotMeasurableError
from compile_stage.measure.label_needs import missing_labels
from compile_stage.measure.proportions import drop_interval, effective_share, share_interval
from compile_stage.measure.stats import Interval
from compile_stage.measure.task_intervals import TaskResult
from compile_stage.measure.task_scores import predicted_classes

if TYPE_CHECKING:
    from compile_stage.core.records import Gate
    from compile_stage.core.tensors import Array

_CONFIDENCE = 0.95
"""At which a loss must be shown where the gate names no confidence."""

_BY_LUCK = 2
"""So many lost answers must be allowed to a class that is judged by itself."""


def measure_recall(
    gate: Gate, a: Array, b: Array, labels: Array, *, seed: int, groups: NDArray[np.int64] | None = None
) -> TaskResult:
    """The largest share of a class's right answers that the candidate loses, of candidate output `a` and baseline
    output `b` (both `[n, ...]`) against `labels` (`[n]`).

    Of a class it is (lost - gained) / right, counted over its samples: lost are those that only the baseline gets
    right, gained those that only the candidate does. Its interval is that of the accuracy, on the class's samples
    (`proportions.drop_interval`), as a share of the baseline's right answers there. All must hold the limit, so the
    gate's confidence of each is enough (Berger, Technometrics 24:295, 1982).

    Classes with so few samples that two lost answers miss the limit are judged together, as one class: among a hundred
    of these, honest noise takes two answers of some. Any class of which more than the limit is shown to be lost fails.
    Without a confidence the value alone decides, of the classes whose loss is shown at 95 %.

    Args:
        groups: `[n]`, numbered from 0: samples that belong together; None where they are independent.

    Raises NotMeasurableError, with the reason, when output and labels don't make sense together, or where so few
    samples of a class can't show the limit whatever they say.
    """
    if len(labels) != len(b):
        raise NotMeasurableError(f"there are {len(labels)} labels for {len(b)} samples")
    truth = np.asarray(labels)
    if problem := missing_labels(truth):
        raise NotMeasurableError(problem)
    codes, own, classes = predicted_classes(truth, np.asarray(a), np.asarray(b), gate.options)
    base_codes, base, _ = predicted_classes(truth, np.asarray(b), np.asarray(b), gate.options)
    answers = _Answers(own == codes, base == base_codes, groups, gate.confidence or _CONFIDENCE)
    known = list(_by_class(answers, codes, classes))
    if not known:
        raise NotMeasurableError("the original gives no right answer, so no class has one to lose")
    note = demand_fit(gate.metric, base_codes, base, groups=groups)
    badness = answers.base_right.astype(np.float64) - answers.own_right
    if gate.confidence is None:
        return _noted(replace(_without_confidence(known), badness=badness), note)
    worst, too_few = _worst(gate, answers, known)
    if too_few and (worst is None or worst.value <= gate.limit):
        raise NotMeasurableError(too_few)
    assert worst is not None  # there is a class, and it was judged
    return _noted(replace(worst.result(), badness=badness), note)


def _noted(result: TaskResult, note: str) -> TaskResult:
    return replace(result, note="; ".join(filter(None, (result.note, note))))


@dataclass(frozen=True)
class _Answers:
    """Which samples both models get right, `[n]` each."""

    own_right: NDArray[np.bool_]
    base_right: NDArray[np.bool_]
    groups: NDArray[np.int64] | None
    confidence: float

    def of(self, here: NDArray[np.bool_], name: str) -> _ClassLoss:
        """Of the samples `here`, at least one of which the baseline gets right."""
        own, base = self.own_right[here], self.base_right[here]
        lost, gained = (int(np.count_nonzero(x & ~y)) for x, y in ((base, own), (own, base)))
        count, right = len(base), int(np.count_nonzero(base))
        groups = None if self.groups is None else np.unique(self.groups[here], return_inverse=True)[1]
        share = effective_share(base.astype(np.float64) - own, groups, self.confidence)
        drop = drop_interval(share * lost, share * gained, share * count, self.confidence)
        low, high = (end * count / right for end in (drop.low, drop.high))
        if gained == 0:  # what was right can only be lost, which is binomial
            low = max(low, share_interval(share * lost, share * right, self.confidence).low)
        return _ClassLoss(
            name=name,
            here=here,
            independent=share * count,
            recalls=(int(np.count_nonzero(own)) / count, right / count),
            is_shown=drop.low > 0,
            interval=Interval(value=(lost - gained) / right, low=low, high=high, confidence=self.confidence),
            note=f"of {name}, {count} samples: {lost} right answers lost, {gained} gained",
        )


@dataclass(frozen=True)
class _ClassLoss:
    """What one class, or several rare ones together, lose.

    Attributes:
        here: `[n]`: its samples.
        independent: How many independent samples tell as much.
        recalls: The candidate's and the baseline's.
        is_shown: Answers that changed sides show that there is a loss at all.
        interval: Of the share of right answers that are lost.
    """

    name: str
    here: NDArray[np.bool_]
    independent: float
    recalls: tuple[float, float]
    is_shown: bool
    interval: Interval
    note: str

    @property
    def value(self) -> float:
        """The share of right answers that is lost."""
        return self.interval.value

    def needed(self, gate: Gate) -> int | None:
        """The least number of samples that can show the gate's limit; None where none can."""
        return samples_for_drop(gate.limit * self.recalls[1], self.interval.confidence)

    def can_be_shown(self, gate: Gate) -> bool:
        """Whether so many samples can show the gate's limit at all."""
        needed = self.needed(gate)
        return needed is not None and self.independent >= needed

    def stands_alone(self, gate: Gate) -> bool:
        """Whether it holds the gate's limit with a few lost answers."""
        count = self.independent
        if count < _BY_LUCK:
            return False
        return drop_interval(_BY_LUCK, 0, count, self.interval.confidence).high <= gate.limit * self.recalls[1]

    def result(self) -> TaskResult:
        """For the check."""
        return TaskResult(*self.recalls, self.value, self.interval, None, self.note)


def _by_class(answers: _Answers, codes: NDArray[np.int64], classes: Array) -> Iterator[_ClassLoss]:
    """Every class of which the baseline gets a sample right."""
    names = classes.tolist()
    for code in np.unique(codes[answers.base_right]):
        yield answers.of(codes == code, f"class {names[code]!r}")


def _worst(gate: Gate, answers: _Answers, known: list[_ClassLoss]) -> tuple[_ClassLoss | None, str]:
    """The class that decides; and why nothing is known of some, where that is so, else empty."""
    judged = [loss for loss in known if loss.stands_alone(gate) or loss.interval.low > gate.limit]
    rare = [loss for loss in known if not loss.stands_alone(gate)]
    too_few, names = "", _names(rare)
    if rare:
        together = answers.of(np.any([loss.here for loss in rare], axis=0), names)
        if together.can_be_shown(gate):
            judged.append(together)
        else:
            too_few = _too_few(gate, together, len(rare))
    # One that misses the limit itself says more than one whose samples can't rule it out.
    worst = max(judged, key=lambda loss: (loss.value > gate.limit, loss.interval.high, loss.value), default=None)
    if worst is not None and worst.name != names and len(rare) > 1:
        worst = replace(worst, note=f"{worst.note}; {names} are rare, and are judged together")
    return worst, too_few


def _without_confidence(known: list[_ClassLoss]) -> TaskResult:
    shown = [loss for loss in known if loss.is_shown]
    if not shown:
        return TaskResult(1.0, 1.0, 0.0, None, None)
    return replace(max(shown, key=lambda loss: loss.value).result(), interval=None)


def _names(losses: list[_ClassLoss]) -> str:
    names = [loss.name.removeprefix("class ") for loss in losses]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'class' if len(names) == 1 else 'classes'} {', '.join(names[:3])}{more}"


def _too_few(gate: Gate, loss: _ClassLoss, classes: int) -> str:
    needed, asked = loss.needed(gate), f"a limit of {gate.limit:g} at a confidence of {gate.confidence:g}"
    if needed is None:
        return f"{asked} can't be shown by any number of samples: give a limit above 0, or say confidence: null"
    have, count = "has" if classes == 1 else "together have", int(np.count_nonzero(loss.here))
    as_many = f", which tell as much as {loss.independent:.0f} independent ones" if loss.independent < count else ""
    advice = "validate on more, or say class_recall: null"
    return f"{asked} needs at least {needed} samples of a class, and {loss.name} {have} {count}{as_many}: {advice}"
