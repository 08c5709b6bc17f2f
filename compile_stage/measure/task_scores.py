"""The score of one model on each task metric: its value, as a function of sample weights too, and each sample's part in
it.

The value comes from a library's own function. For the bootstrap each metric is written once more as a function of
sample weights, since thousands of resamples through a library would take minutes; the tests hold both to the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.calibration import ece
from compile_stage.measure.classes import SUM_SLACK, is_distribution, log_probabilities
from compile_stage.measure.detection import coco_map
from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.label_needs import RANKINGS
from compile_stage.measure.ranking import ranking
from compile_stage.measure.skewed_means import Means, mean_of
from compile_stage.measure.stats import Statistic
from compile_stage.measure.task_intervals import Score, far_apart
from compile_stage.measure.transcripts import wer

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

OF_LABELS = ("accuracy", "f1", "class_recall")
OF_SCORES = ("roc_auc", "log_loss", "ece")

CLASS_TASKS = (*OF_LABELS, *OF_SCORES)
"""Metrics of classes, whose labels must say which column of an output is which."""

_LEAST = float(np.finfo(np.float64).eps)
"""What a probability counts as at least in a log loss, as in scikit-learn's."""


def score_of(
    metric: str,
    truth: Array,
    output: Array,
    baseline: Array,
    options: JsonMap,
    groups: NDArray[np.int64] | None = None,
) -> Score:
    """How well `output` does against the true labels by one metric; how it is read (probabilities or logits, which
    classes) is decided by `baseline`. Shapes as in `tasks.measure_task`.

    Raises NotMeasurableError, with the reason, when output and labels don't make sense together.
    """
    if metric == "coco_map":
        return coco_map(truth, output, options)
    if metric == "wer":
        return wer(truth, output, options)
    if output.ndim == 2 and output.shape[1] == 1:
        output, baseline = output[:, 0], baseline[:, 0]
    if metric in OF_LABELS:
        return _of_labels(metric, *_codes(truth, _predicted(truth, output, baseline, options)), options)
    if metric in OF_SCORES:
        scores = class_scores(truth, output, baseline, options)
        if metric == "ece":
            return ece(scores.codes, scores.logs, options)
        return _log_loss(scores) if metric == "log_loss" else _roc_auc(scores.codes, ranked_by(scores))
    if metric in RANKINGS:
        return ranking(metric, truth, output, options, groups)
    return _regression(metric, truth, output, baseline)


def predicted_classes(
    truth: Array, output: Array, baseline: Array, options: JsonMap
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Class number of each label and of each prediction, both `[n]`, and the classes. Raises NotMeasurableError."""
    if output.ndim == 2 and output.shape[1] == 1:
        output, baseline = output[:, 0], baseline[:, 0]
    return _codes(truth, _predicted(truth, output, baseline, options))


def _predicted(truth: Array, output: Array, baseline: Array, options: JsonMap) -> Array:
    """Labels as they are, or those of the best scores. How scores are read is decided by the baseline's."""
    if output.dtype.kind != "f":
        if output.ndim != 1:
            raise NotMeasurableError(f"predicted labels have one axis, and the shape is {list(output.shape)}")
        return output
    if output.ndim == 2:
        best = np.argmax(output, axis=1)
        return np.asarray(label_values(truth, output.shape[1], options)[best])
    if output.ndim != 1:
        raise NotMeasurableError(f"scores are [n, classes], and the shape is {list(output.shape)}")
    probabilities = _within_one(baseline)
    threshold = float(options.get("threshold", 0.5 if probabilities else 0.0))
    return label_values(truth, 2, options)[(output.astype(np.float64) > threshold).astype(np.int64)]


def _within_one(scores: Array) -> bool:
    """Whether scores are probabilities: with the slack of `is_distribution`, since a mean of trees may round to
    1.0000001."""
    values = scores.astype(np.float64)
    return bool(np.all((values >= -SUM_SLACK) & (values <= 1 + SUM_SLACK)))


def label_values(truth: Array, count: int, options: JsonMap) -> Array:
    """Class number → label. Raises NotMeasurableError where the labels don't say which is which."""
    if "classes" in options:
        named: Array = np.asarray(options["classes"])
        if len(named) != count:
            raise NotMeasurableError(f"the gate names {len(named)} classes, and the output has {count}")
        return named
    seen = np.unique(_labels(truth))
    if seen.dtype.kind in "iu" and seen[0] >= 0 and seen[-1] < count:
        return np.arange(count)
    if len(seen) == count:
        return seen  # sorted, as scikit-learn orders its classes
    raise NotMeasurableError(
        f"the output has {count} classes and the labels have {len(seen)} values ({seen[0]} ... {seen[-1]}), so which "
        "is which is not known; give the labels as numbers (column i of the scores is label i, from 0), or validate on "
        "samples of every class"
    )


def _labels(values: Array) -> Array:
    """Labels that came as bytes, as text; as floats or truth values, as whole numbers. These are int64 where they fit,
    so that NumPy has no reason to compare them as floats."""
    if values.ndim != 1:
        raise NotMeasurableError(
            f"labels of classes have one axis, and these have the shape {list(values.shape)}: give one class for each "
            "sample (of one-hot rows, labels.argmax(axis=1))"
        )
    if values.dtype.kind == "S":
        try:
            return np.char.decode(values.astype(np.bytes_), "utf-8")
        except UnicodeDecodeError as error:
            raise NotMeasurableError(f"the labels are bytes, and no UTF-8 ({error}): save them as text") from error
    if values.dtype.kind == "f":
        least = 2 ** (int(np.finfo(values.dtype.name).nmant) + 1)
        if bool(np.any(np.abs(values) >= least)):
            raise NotMeasurableError(
                f"some labels are {least:,} or more, and {values.dtype} can't tell all whole numbers of that size "
                "apart: save them as int64"
            )
        whole = values.astype(np.int64)
        if not bool(np.all(whole == values)):
            raise NotMeasurableError("the labels are fractions, so they are no classes")
        return whole
    fits = values.dtype.kind == "u" and int(np.max(values, initial=0)) <= np.iinfo(np.int64).max
    return values.astype(np.int64) if values.dtype.kind == "b" or fits else values


def _codes(truth: Array, predicted: Array) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Both as class numbers, and the classes."""
    truth, predicted = _labels(truth), _labels(predicted)
    if (truth.dtype.kind == "U") != (predicted.dtype.kind == "U"):
        named = ["text" if values.dtype.kind == "U" else str(values.dtype) for values in (truth, predicted)]
        raise NotMeasurableError(
            f"the labels are {named[0]} and the predictions {named[1]}, which are never equal: write the labels as the "
            "model answers them"
        )
    if {truth.dtype.kind, predicted.dtype.kind} == {"i", "u"}:  # NumPy has no whole numbers for both: it takes floats
        truth, predicted = truth.astype(object), predicted.astype(object)
    classes, codes = np.unique(np.concatenate([truth, predicted]), return_inverse=True)
    return codes[: len(truth)], codes[len(truth) :], classes


def _of_labels(
    metric: str, truth: NDArray[np.int64], predicted: NDArray[np.int64], classes: Array, options: JsonMap
) -> Score:
    right = (truth == predicted).astype(np.float64)
    if metric == "accuracy":
        return Score(float(right.mean()), _mean(right), 1 - right, classes[predicted], 1 / len(truth))
    from sklearn.metrics import f1_score  # a second and more to import, of the seconds that a small model's run takes

    # By the labels alone: what either model answers must not make it another metric than the other's.
    binary = classes.dtype.kind in "iuO" and set(classes[np.unique(truth)].tolist()) <= {0, 1}
    average = str(options.get("average") or ("binary" if binary else "macro"))
    if average not in ("binary", "macro", "weighted"):
        raise NotMeasurableError(f"f1 is averaged as binary, macro or weighted, not as {average!r}")
    if average == "binary" and 1 not in classes:
        raise NotMeasurableError("f1 of two classes needs the class 1 among labels or predictions")
    positive = 1
    if average == "binary":
        positive = int(np.flatnonzero(classes == 1)[0])
        # An answer that is neither 0 nor 1 is one that is not 1.
        value = f1_score(truth == positive, predicted == positive, zero_division=0)
    else:
        # A class that only one of the two models names would count as one with an F1 of 0, in its average alone.
        value = f1_score(truth, predicted, labels=np.unique(truth), average=average, zero_division=0)
    hot_truth, hot_predicted = (np.eye(len(classes))[codes] for codes in (truth, predicted))

    def of(weights: F64) -> F64:
        hits = weights @ (hot_truth * hot_predicted)
        support, total = weights @ hot_truth, weights @ hot_truth + weights @ hot_predicted
        scores = np.divide(2 * hits, total, out=np.zeros_like(hits), where=total > 0)
        if average == "binary":
            return np.asarray(scores[:, positive])
        share = support if average == "weighted" else (support > 0).astype(np.float64)
        return np.asarray((scores * share).sum(axis=1) / share.sum(axis=1))

    influence = _influence_on_f1(hot_truth.sum(axis=0), hot_predicted.sum(axis=0), average, positive)
    return Score(float(value), of, 1 - right, classes[predicted], influence[truth])


def _influence_on_f1(support: F64, predicted: F64, average: str, positive: int) -> F64:
    """`[classes]`: what one right answer that turns wrong costs at most: its own class loses a hit, another gets a
    wrong one."""
    total = support + predicted
    with np.errstate(divide="ignore", invalid="ignore"):
        lost_hit = np.where(support > 0, 2 / total, 0.0)
        wrong_hit = np.where(total > 0, 1 / (total + 1), 0.0)
    if average == "binary":
        return np.asarray(np.where(np.arange(len(total)) == positive, lost_hit[positive], wrong_hit[positive]))
    share = support / support.sum() if average == "weighted" else (support > 0) / np.count_nonzero(support)
    return np.asarray(share * lost_hit + np.max(share * wrong_hit))


@dataclass(frozen=True)
class ClassScores:
    """Scores of classes beside the labels.

    Attributes:
        codes: Class number of each label, [n].
        given: The scores as they came, [n, classes].
        logits: Whether they are logits, else probabilities.
        logs: Their log-probabilities, [n, classes], of which none is below that of `SMALLEST`.
    """

    codes: NDArray[np.int64]
    given: F64
    logits: bool
    logs: F64


def class_scores(truth: Array, output: Array, baseline: Array, options: JsonMap) -> ClassScores:
    """Of an output [n] or [n, classes]. Whether they are logits is decided by the baseline's."""
    if output.ndim not in (1, 2) or output.dtype.kind != "f":
        raise NotMeasurableError(f"scores are floats [n, classes], and this is {output.dtype}{list(output.shape)}")
    given = output.astype(np.float64)
    if output.ndim == 1:
        logits = not _within_one(baseline)
        # A logit z is the pair (0, z), a probability p the pair (1 - p, p).
        given = np.stack([np.zeros_like(given) if logits else 1 - given, given], axis=1)
    else:
        logits = not is_distribution(baseline)
    if not logits and not is_distribution(given):
        raise NotMeasurableError("the baseline's scores are probabilities, and the candidate's are not")
    classes = label_values(truth, given.shape[1], options)
    known = _labels(truth)
    order = np.argsort(classes, kind="stable")
    places = np.clip(np.searchsorted(classes[order], known), 0, len(classes) - 1)
    codes = order[places]
    if not bool(np.all(classes[codes] == known)):
        raise NotMeasurableError("some labels are none of the classes")
    return ClassScores(codes, given, logits, log_probabilities(given, logits=logits))


def _log_loss(scores: ClassScores) -> Score:
    from sklearn.metrics import log_loss

    codes, count = scores.codes, len(scores.codes)
    probabilities = np.exp(scores.logs) if scores.logits else np.clip(scores.given, 0, None)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    value = log_loss(codes, probabilities, labels=range(probabilities.shape[1]))
    losses = _surprise(probabilities[np.arange(count), codes])
    # A ruined answer is that to another sample. To a rare class it is wrong nearly always, so each class counts.
    by_others = np.array([_surprise(of_class).mean() for of_class in probabilities.T])
    sizes = np.bincount(codes, minlength=len(by_others))
    more = by_others - np.bincount(codes, weights=losses, minlength=len(by_others)) / np.maximum(sizes, 1)
    influence = np.where(more > 0, more, by_others)[codes] / count
    apart = far_apart(probabilities)
    means = mean_of(losses)
    return Score(float(value), means.weighted, losses, probabilities, influence, apart, losses / count, means)


def _surprise(probabilities: F64) -> F64:
    return np.asarray(-np.log(np.clip(probabilities, _LEAST, 1 - _LEAST)))


def ranked_by(scores: ClassScores) -> F64:
    """`[n, classes]`: what roc_auc ranks each class by. Probabilities as they are: those that round to 0 in a logarithm
    with a floor have an order too. Of two logits their difference, of more the logarithms of their softmax."""
    given = scores.given
    if given.shape[1] > 2:
        return scores.logs if scores.logits else given
    second = given[:, 1] - given[:, 0] if scores.logits else given[:, 1]
    return np.stack([-second, second], axis=1)


def _roc_auc(codes: NDArray[np.int64], scores: F64) -> Score:
    """Of two classes that of the second one's score; of more the mean of each against the rest."""
    from scipy.stats import rankdata
    from sklearn.metrics import roc_auc_score

    # What it reads of an answer is its place among all.
    places = rankdata(scores, axis=0) / len(scores)
    count = scores.shape[1]
    missing = sorted(set(range(count)) - set(codes.tolist()))
    if missing:
        raise NotMeasurableError(f"no sample is of class number {missing[0]}, so roc_auc is not defined")
    # One sample at the wrong end of the ranking loses all pairs that it is part of.
    sizes = np.bincount(codes, minlength=count)
    beside = 1 / (len(codes) - sizes)
    influence, apart = ((beside.sum() - beside + 1 / sizes) / count)[codes], far_apart(places)
    if count == 2:
        second = scores[:, 1]
        return Score(float(roc_auc_score(codes, second)), _auc(codes == 1, second), None, places, influence, apart)
    value = float(np.mean([roc_auc_score(codes == c, scores[:, c]) for c in range(count)]))
    each = [_auc(codes == c, scores[:, c]) for c in range(count)]

    def of(weights: F64) -> F64:
        return np.asarray(np.mean([of_one(weights) for of_one in each], axis=0))

    return Score(value, of, None, places, influence, apart)


def _auc(positive: NDArray[np.bool_], scores: F64) -> Statistic:
    """Weighted share of (positive, negative) pairs in the right order; a tie counts half."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=-np.inf) > 0)
    starts = starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])
    hot = positive[order].astype(np.float64)

    def tied(ordered: F64) -> F64:
        return ordered if len(starts) == len(order) else np.add.reduceat(ordered, starts, axis=1)  # half of all time

    def of(weights: F64) -> F64:
        ordered = weights[:, order]
        ups, downs = tied(ordered * hot), tied(ordered * (1 - hot))
        below = np.cumsum(downs, axis=1) - downs
        pairs = ups.sum(axis=1) * downs.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray((ups * (below + downs / 2)).sum(axis=1) / np.where(pairs > 0, pairs, np.nan))

    return of


def _regression(metric: str, truth: Array, output: Array, baseline: Array) -> Score:
    from sklearn import metrics

    if truth.dtype.kind not in "iuf" or output.dtype.kind != "f":
        raise NotMeasurableError(f"{metric} compares numbers, and these are {truth.dtype} and {output.dtype}")
    y, p, before = (values.reshape(len(values), -1).astype(np.float64) for values in (truth, output, baseline))
    if y.shape != p.shape:
        raise NotMeasurableError(f"labels have {y.shape[1]} values for each sample, and the output has {p.shape[1]}")
    functions: dict[str, Callable[..., Any]] = {
        "mae": metrics.mean_absolute_error,
        "rmse": metrics.root_mean_squared_error,
        "r2": metrics.r2_score,
    }
    if metric == "r2" and (len(y) < 2 or bool(np.any(np.ptp(y, axis=0) == 0))):
        raise NotMeasurableError("r2 needs labels that differ")
    value = float(functions[metric](y, p))
    errors, centred = np.abs(y - p), y - y.mean(axis=0)
    losses = errors.mean(axis=1)
    costs = errors if metric == "mae" else errors**2
    # A ruined answer is that to another sample: by so much it is further off than its own.
    more = _more_by_others(y, before, squared=metric != "mae")
    squares = ((y - before) ** 2).mean(axis=0)
    influence = {
        "mae": float(more.mean()) / len(y),
        "rmse": float(np.mean(np.sqrt(squares + more / len(y)) - np.sqrt(squares))),
        "r2": float(np.mean(more / np.maximum((centred**2).sum(axis=0), np.finfo(float).tiny))),
    }[metric]
    costs = costs.mean(axis=1) * influence / more.mean()
    spans = np.where(np.ptp(before, axis=0) > 0, np.ptp(before, axis=0), 1.0)
    answers, apart = p / spans, far_apart(before / spans)
    if metric == "mae":
        means = mean_of(losses)
    else:
        means = _root_means(errors**2) if metric == "rmse" else _explained(errors**2, centred)
    return Score(value, means.weighted, losses, answers, influence, apart, costs, means)


def _root_means(squares: F64) -> Means:
    """rmse as a function of the means of `[n, k]` squared errors."""

    def slopes(means: F64) -> F64:
        return np.asarray(0.5 / np.sqrt(np.maximum(means, np.finfo(float).tiny)) / means.shape[1])

    return Means(squares, lambda means: np.asarray(np.sqrt(np.maximum(means, 0.0)).mean(axis=1)), slopes)


def _explained(squares: F64, centred: F64) -> Means:
    """r2 as a function of the means of `[n, k]` squared errors, labels less their mean, and the squares of these."""

    def parts(means: F64) -> tuple[F64, F64, F64]:
        error, label, square = np.split(means, 3, axis=1)
        variance = square - label**2
        return error, label, np.where(variance > 1e-12 * square, variance, np.nan)

    def of(means: F64) -> F64:
        error, _, variance = parts(means)
        return np.asarray((1 - error / variance).mean(axis=1))

    def slopes(means: F64) -> F64:
        error, label, variance = parts(means)
        by_variance = error / variance**2
        return np.asarray(np.hstack([-1 / variance, -2 * label * by_variance, by_variance]) / error.shape[1])

    return Means(np.hstack([squares, centred, centred**2]), of, slopes)


def _more_by_others(truth: F64, answers: F64, *, squared: bool) -> F64:
    """`[k]`: by how much the errors `|truth - answer|`, or their squares, of `[n, k]` are larger on average where each
    sample has the answer to another one; those of the labels' span where they are not."""
    count, errors = len(truth), np.abs(truth - answers)
    if squared:
        each = (truth**2).mean(axis=0) + (answers**2).mean(axis=0) - 2 * truth.mean(axis=0) * answers.mean(axis=0)
        errors = errors**2
    else:
        ordered = np.sort(answers, axis=0)
        below = np.stack([np.searchsorted(*pair) for pair in zip(ordered.T, truth.T, strict=True)], axis=1)
        sums = np.concatenate([np.zeros((1, truth.shape[1])), np.cumsum(ordered, axis=0)])
        under = np.take_along_axis(sums, below, axis=0)
        each = (truth * below - under + (sums[-1] - under) - truth * (count - below)).mean(axis=0) / count
    more = (each - errors.mean(axis=0)) * count / max(count - 1, 1)
    spans = np.ptp(truth, axis=0)
    return np.asarray(np.where(more > 0, more, np.maximum(spans**2 if squared else spans, np.finfo(float).tiny)))


def _mean(values: F64) -> Statistic:
    return lambda weights: np.asarray(weights @ values / weights.sum(axis=1))
