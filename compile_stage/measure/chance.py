"""Does the original do better than chance against the labels? If not, the labels are those of other samples, or are
coded otherwise, and there is nothing that a candidate could lose.

Of classes it is a permutation test: do the answers fit their own labels better than the same labels in another order?
What fits is a sum of one number for each sample, of which mean and variance over all orders have a closed form
(Hoeffding, Annals of Mathematical Statistics 22:558, 1951). So the number of samples, the classes' shares, and how
often the model answers each of them are all accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.proportions import effective_share, share_interval

_CONFIDENCE = 0.99
"""At which the original must be shown to be better than chance: one set of foreign labels in a hundred fits by luck."""

_SIGMAS = 2.326  # the normal's end of 99 %, on one side

_ADVICE = (
    "correct data.validation.labels (column i of scores is label i, from 0); where they are right, validate on more "
    "samples, or say {metric}: null"
)

Classes = NDArray[np.int64]
Lists = Sequence[tuple[F64, F64]]


def demand_fit(
    metric: str, codes: Classes, predicted: Classes, scores: F64 | None = None, groups: NDArray[np.int64] | None = None
) -> str:
    """Raise NotMeasurableError where the original's answers fit the labels no better than chance, and it is not shown
    to be right more often than a class drawn blindly either; where it is, answer a note on it, else an empty one.

    A model of a rare event answers the frequent class nearly always, and is as good as chance by its labels without
    being wrong: hence the second condition.

    Args:
        codes, predicted: `[n]`: class numbers of the labels and of the original's answers.
        scores: `[n, classes]`: log-probabilities, where the metric reads these in place of the answers.
        groups: `[n]`, numbered from 0: samples that belong together; None where they are independent.
    """
    count, number = len(codes), max(2, int(max(codes.max(), predicted.max())) + 1)
    labels = np.bincount(codes, minlength=number).astype(np.float64)
    answers = np.bincount(predicted, minlength=number).astype(np.float64)
    right = (codes == predicted).astype(np.float64)
    share = effective_share(right, groups, _CONFIDENCE)
    if scores is None:
        beyond = _sigmas(np.eye(number), answers, labels, float(right.sum()))
    else:
        labels = np.bincount(codes, minlength=scores.shape[1]).astype(np.float64)
        beyond = _sigmas(scores, np.ones(count), labels, float(scores[np.arange(count), codes].sum()))
    if beyond * math.sqrt(share) > _SIGMAS:
        return ""
    by_chance = float(answers @ np.bincount(codes, minlength=number)) / count**2
    # Of classes that neither labels nor answers name nothing is drawn.
    blindly = 1 / max(2, len(np.union1d(codes, predicted)))
    if share_interval(share * float(right.sum()), share * count, _CONFIDENCE).low > blindly:
        return (
            f"the original is right in {right.mean():.4g} of its answers, and {by_chance:.4g} would be by chance: it "
            "hardly tells the classes apart on these samples, so these labels show little"
        )
    if beyond > _SIGMAS:
        raise NotMeasurableError(
            f"the original is right in {right.mean():.4g} of its answers, and {by_chance:.4g} would be by chance, "
            "which these groups of samples (data.groups) can't tell apart: they show as much as "
            f"{share * count:.3g} independent samples; validate on more groups, none of them much larger than "
            f"the others, or say {metric}: null"
        )
    raise NotMeasurableError(
        f"the original is right in {right.mean():.4g} of its answers, and {by_chance:.4g} would be by chance, so "
        "there is nothing to lose: the labels are those of other samples, or are coded otherwise; "
        f"{_ADVICE.format(metric=metric)}"
    )


def demand_ranks(value: float, codes: Classes, scores: F64, groups: NDArray[np.int64] | None = None) -> None:
    """Raise NotMeasurableError where a roc_auc is not shown to be above that of chance, 0.5.

    Args:
        codes: `[n]`: the labels' class numbers, each class at least once.
        scores: `[n, classes]`.
    """
    from scipy.stats import rankdata

    count, classes = scores.shape
    labels = np.bincount(codes, minlength=classes).astype(np.float64)
    ranks = np.column_stack([rankdata(column) for column in scores.T]) / (labels * (count - labels))
    beyond = _sigmas(ranks, np.ones(count), labels, float(ranks[np.arange(count), codes].sum()))
    if groups is not None:
        beyond *= math.sqrt(int(groups.max() + 1) / count)
    if beyond <= _SIGMAS:
        raise NotMeasurableError(
            f"the original's own roc_auc is {value:.4g}, which so many samples can't tell from chance (0.5), so "
            "there is nothing to lose: the labels are those of other samples, or are coded otherwise; "
            f"{_ADVICE.format(metric='roc_auc')}"
        )


def demand_order(metric: str, value: float, lists: Lists, groups: NDArray[np.int64] | None = None) -> None:
    """Raise NotMeasurableError where a ranking is not shown to be better than the same labels in another order.

    What ranks well is a sum over the items, of which mean and variance over all orders within each list are known.

    Args:
        value: The metric, which is that sum over the number of lists.
        lists: Of each list that is ranked, `[items]`: what the labels bring, and by how much each place counts.
        groups: `[n]`, numbered from 0: samples that belong together; None where they are independent.
    """
    by_chance, variance = 0.0, 0.0
    for gains, counts in lists:
        by_chance += len(gains) * float(gains.mean() * counts.mean())
        variance += float(((gains - gains.mean()) ** 2).sum() * ((counts - counts.mean()) ** 2).sum()) / (
            len(gains) - 1
        )
    beyond = (value * len(lists) - by_chance) / math.sqrt(variance) if variance > 0 else 0.0
    if groups is not None:
        independent = len(lists) if len(lists) > 1 else len(lists[0][0])
        beyond *= math.sqrt(min(1.0, int(groups.max() + 1) / independent))
    if beyond <= _SIGMAS:
        raise NotMeasurableError(
            f"the original's own {metric} is {value:.4g}, which so many samples can't tell from chance "
            f"({by_chance / len(lists):.4g}), so there is nothing to lose: the labels are those of other samples, or "
            "the smaller is the better in them or in the scores; correct data.validation.labels; where they are right, "
            f"validate on more samples, or say {metric}: null"
        )


def demand_less_than_constant(metric: str, value: float, truth: F64) -> None:
    """Raise NotMeasurableError where one constant answer would do as well as the original.

    Args:
        metric: `mae`, `rmse` or `r2`.
        truth: `[n, k]`.
    """
    constant = _CONSTANT[metric](truth)
    if (value > 0) if metric == "r2" else value < constant:
        return
    if not bool(np.ptp(truth, axis=0).any()):
        raise NotMeasurableError(
            "the labels are all the same, which one constant answer would have too, so there is nothing to lose: "
            f"validate on samples whose labels differ, or say {metric}: null"
        )
    of_means = "; a model of means shows less in mae where most labels are alike, such as zeros: limit rmse or r2 there"
    raise NotMeasurableError(
        f"the original's own {metric} is {value:.4g}, and one constant answer would have {constant:.4g}, so there "
        f"is nothing to lose: the labels are those of other samples, or in another unit{of_means * (metric == 'mae')}; "
        f"correct data.validation.labels, or say {metric}: null"
    )


_CONSTANT: dict[str, Callable[[F64], float]] = {
    "mae": lambda truth: float(np.abs(truth - np.median(truth, axis=0)).mean()),
    "rmse": lambda truth: float(truth.std(axis=0).mean()),
    "r2": lambda truth: 0.0,
}


def _sigmas(fits: F64, answers: F64, labels: F64, observed: float) -> float:
    """By how many standard deviations the sum over the samples is above its mean over all orders of the labels; 0 where
    every order has the same.

    Args:
        fits: `[answers, classes]`: how well each answer fits each class.
        answers: How many samples have each answer.
        labels: How many have each label.
    """
    count = float(labels.sum())
    if count < 2:
        return 0.0
    of_answers, of_labels = fits @ labels / count, answers @ fits / count
    mean = float(of_labels @ labels) / count
    off = fits - of_answers[:, None] - of_labels + mean
    variance = float(answers @ (off * off) @ labels) / (count - 1)
    scale = float(answers @ (fits * fits) @ labels) / count
    if variance <= 1e-18 * scale:  # rounding
        return 0.0
    return (observed - count * mean) / math.sqrt(variance)
