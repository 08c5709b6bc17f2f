"""Task metrics: how well each model does against the true labels, and how much the candidate loses.

Values come from a library's own functions: scikit-learn's, SciPy's, pycocotools' and jiwer's (`measure.task_scores`).

Accuracy is a share, and its interval is that of a paired difference of shares. The others are bootstrapped; where only
a few answers changed, which a bootstrap can't tell from none, the interval is widened by what more changes could do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.records import Gate
from compile_stage.measure.chance import demand_fit, demand_less_than_constant, demand_order, demand_ranks
from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.label_needs import NUMBERS, RANKINGS, labels_problem, missing_labels
from compile_stage.measure.ranking import ranked_lists
from compile_stage.measure.task_intervals import TaskResult, Wanted, interval_of_drop, needed_samples
from compile_stage.measure.task_scores import (
    CLASS_TASKS,
    OF_LABELS,
    OF_SCORES,
    class_scores,
    predicted_classes,
    ranked_by,
    score_of,
)

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

HIGHER_IS_BETTER = {
    "accuracy": True,
    "f1": True,
    "class_recall": True,
    "roc_auc": True,
    "log_loss": False,
    "mae": False,
    "rmse": False,
    "r2": True,
    "spearman": True,
    "ndcg": True,
    "coco_map": True,
    "wer": False,
    "ece": False,
}
"""The task metrics, and which way is better."""


def measure_task(
    gate: Gate, a: Array, b: Array, labels: Array, *, seed: int, groups: NDArray[np.int64] | None = None
) -> TaskResult:
    """A gate's task metric, of candidate output `a` and baseline output `b` (both `[n, ...]`) against `labels` (`[n]`
    or `[n, k]`).

    Args:
        groups: `[n]`, numbered from 0: samples that belong together; None where they are independent.

    Raises NotMeasurableError, with the reason, when output and labels don't make sense together.
    """
    if len(labels) != len(b):
        raise NotMeasurableError(f"there are {len(labels)} labels for {len(b)} samples")
    truth = np.asarray(labels)
    problem = labels_problem(gate.metric, truth, gate.options, queries=groups is not None) or missing_labels(truth)
    if problem:
        raise NotMeasurableError(problem)
    _demand_answers(gate.metric, np.asarray(b))
    own = score_of(gate.metric, truth, np.asarray(a), np.asarray(b), gate.options, groups)
    base = score_of(gate.metric, truth, np.asarray(b), np.asarray(b), gate.options, groups)
    sign = 1.0 if HIGHER_IS_BETTER[gate.metric] else -1.0
    kind = gate.options.get("drop")
    # Of a candidate at chance an absolute limit says so itself.
    note = _beside_chance(gate, base.value, truth, np.asarray(b), groups) if kind is not None else ""
    if of_no_use(gate.metric, base.value):
        raise NotMeasurableError(f"the original's own {gate.metric} is {base.value:.4g}: {_NO_USE[gate.metric]}")

    if kind == "max_drop" and gate.metric in _AT_LEAST_0 and gate.limit >= base.value:
        raise NotMeasurableError(
            f"the original's own {gate.metric} is {base.value:.4g}, so the limit of {gate.limit:g} lets one pass that "
            "gets nothing right: give a smaller one, or max_relative_drop"
        )

    def compared(cand: F64, ref: F64) -> F64:
        if kind is None:
            return cand
        drop = sign * (ref - cand)
        if kind == "max_drop":
            return drop
        with np.errstate(divide="ignore", invalid="ignore"):
            share = drop / np.abs(ref)
        return np.where(ref == 0, np.where(drop == 0, 0.0, np.nan), share)

    value = float(compared(np.array(own.value), np.array(base.value)))
    if np.isnan(value):
        raise NotMeasurableError(
            f"the {gate.metric} of the baseline is {base.value:.6g}, of which there is no share: limit it by max_drop"
        )
    interval = None
    if gate.confidence is not None:
        wanted = Wanted(gate=gate, seed=seed, groups=groups)
        interval = interval_of_drop(wanted, own, base, compared)
    badness = own.losses - base.losses if own.losses is not None and base.losses is not None else None
    needed = needed_samples(gate, own, base, groups)
    return TaskResult(own.value, base.value, value, interval, badness, note, needed)


def _beside_chance(gate: Gate, value: float, truth: Array, output: Array, groups: NDArray[np.int64] | None) -> str:
    """A note on an original that hardly does better than chance, else empty. Raises NotMeasurableError where the labels
    are not those of its answers."""
    metric = gate.metric
    if metric in OF_LABELS:
        codes, predicted, _ = predicted_classes(truth, output, output, gate.options)
        return demand_fit(metric, codes, predicted, groups=groups)
    if metric in OF_SCORES:
        flat = output[:, 0] if output.ndim == 2 and output.shape[1] == 1 else output
        scores = class_scores(truth, flat, flat, gate.options)
        if metric == "roc_auc":
            demand_ranks(value, scores.codes, ranked_by(scores), groups)
            return ""
        return demand_fit(metric, scores.codes, scores.logs.argmax(axis=1), scores.logs, groups)
    if metric in NUMBERS:
        demand_less_than_constant(metric, value, truth.reshape(len(truth), -1).astype(np.float64))
    if metric in RANKINGS:
        flat = output[:, 0] if output.ndim == 2 and output.shape[1] == 1 else output
        demand_order(metric, value, ranked_lists(metric, truth, flat, gate.options, groups), groups)
    return ""


def _demand_answers(metric: str, output: Array) -> None:
    """Raise NotMeasurableError where some of the original's answers are no numbers that the metric can be taken of."""
    if output.dtype.kind != "f" or metric not in (*OF_SCORES, *NUMBERS):
        return
    # An infinite score is a class that is masked, or certain.
    wrong = (np.isnan(output) if metric in OF_SCORES else ~np.isfinite(output)).reshape(len(output), -1).any(axis=1)
    if wrong.any():
        raise NotMeasurableError(
            f"the original's answers to {int(wrong.sum())} of {len(output)} samples are NaN or infinite (the first is "
            f"that to sample {int(wrong.argmax())}): leave these samples out of the validation data"
        )


_AT_LEAST_0 = ("accuracy", "f1", "roc_auc", "ndcg", "coco_map")
"""What nothing can lose more of than the original has."""

_NO_USE = {
    "f1": "no sample of its class is found, so that none could be lost",
    "spearman": "its scores do not rise with the labels, so that keeping their order shows nothing",
    "coco_map": "no object is found, so the boxes' format or the classes are not those of the labels",
    "wer": "no more words are right than wrong, so the vocabulary or the spelling is not that of the labels",
}


def of_no_use(metric: str, baseline: float) -> bool:
    """Whether the original itself does not do what the metric looks at: then no drop means that nothing was there."""
    return (metric in ("spearman", "coco_map", "f1") and baseline <= 0) or (metric == "wer" and baseline >= 1)


def classifies(outputs: Mapping[str, Array], labels: Array) -> bool:
    """Whether the labels look like classes that some output tells apart; if not, this is a regression, or something
    else.

    Whole numbers alone say little (a house's price is one): there must be an output of predicted labels, one of scores
    `[n, classes]`, or a single score and no more than two labels. Labels that are NaN are missing, and say nothing.
    """
    if labels.dtype.kind == "f":
        labels = labels[~np.isnan(labels)]
    if labels.ndim != 1 or (labels.dtype.kind == "f" and bool(np.any(labels != np.floor(labels)))):
        return False
    flat = [o for o in outputs.values() if o.ndim == 1 or (o.ndim == 2 and o.shape[1] == 1)]
    if any(o.dtype.kind != "f" for o in flat):
        return True
    if any(o.dtype.kind == "f" and o.ndim == 2 and o.shape[1] >= 2 for o in outputs.values()):
        return True
    return bool(flat) and len(np.unique(labels)) <= 2


def scored_output(metric: str, outputs: Mapping[str, Array], labels: Array) -> str:
    """Which output a task metric reads when the gate names none. Raises NotMeasurableError when that is not clear.

    Predicted labels, when there is one such output, else scores `[n, classes]`, else one score for each sample.
    """
    flat = [n for n, o in outputs.items() if o.ndim == 1 or (o.ndim == 2 and o.shape[1] == 1)]
    numbers = {n: o for n, o in outputs.items() if o.dtype.kind == "f"}
    single, tables = [n for n in numbers if n in flat], [n for n, o in numbers.items() if o.ndim == 2]
    choices: list[list[str]]
    if metric in CLASS_TASKS:
        classes, predicted = [n for n in tables if outputs[n].shape[1] > 1], [n for n in flat if n not in numbers]
        choices = [predicted, classes, single] if metric in OF_LABELS else [classes, single]
    elif metric == "wer":
        texts = [n for n in flat if outputs[n].dtype.kind == "U"]
        choices = [texts, [n for n, o in numbers.items() if o.ndim == 3]]
    elif metric in RANKINGS and labels.ndim == 1:
        choices = [single, tables]
    else:
        width = 1 if labels.ndim == 1 else int(np.prod(labels.shape[1:]))
        choices = [[n for n, o in numbers.items() if int(np.prod(o.shape[1:])) == width]]
    for names in choices:
        if len(names) == 1:
            return names[0]
        if len(names) > 1:
            raise NotMeasurableError(
                f"outputs {' and '.join(map(repr, names))} could each be read for {metric}; limit it on the one that "
                f"the labels are for, under the precision's tolerances: outputs: {{{names[0]}: {{{metric}: ...}}}}"
            )
    held = ", ".join(f"{n!r} {o.dtype}{list(o.shape[1:])}" for n, o in outputs.items())
    raise NotMeasurableError(f"no output can be read for {metric}: the model has {held}")
