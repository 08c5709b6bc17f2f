"""What the labels of a task metric must look like: said by `plan` before anything is run, and by the metric itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

RANKINGS = ("spearman", "ndcg")

NUMBERS = ("mae", "rmse", "r2")
"""Metrics of numbers, which a constant answer has too."""

_NEEDS_ALL = ("accuracy", "f1", "class_recall", "roc_auc", "log_loss", "ece", *NUMBERS, *RANKINGS)

CLASSES_ONLY = "classes_only"
"""Option of a task gate that nobody asked for by name: it holds where there are classes, and is left out, with a word,
for a regression."""


def labels_problem(metric: str, labels: Array, options: JsonMap, *, queries: bool) -> str | None:
    """None where labels of this shape and kind can be read for the metric, or what is wrong with them.

    Args:
        labels: `[n, ...]`.
        queries: Whether the samples come in queries (`data.queries`), or groups.
    """
    if metric in _NEEDS_ALL and not options.get(CLASSES_ONLY) and (missing := missing_labels(labels)):
        return missing
    kind, shape = labels.dtype.kind, f"{labels.dtype}{['n', *labels.shape[1:]]}".replace("'", "")
    if metric == "coco_map" and (labels.ndim != 3 or labels.shape[2] != 5 or kind not in "iuf"):
        return f"coco_map needs labels [n, objects, 5] (class, box; class -1 fills up), and these are {shape}"
    if metric == "wer" and (labels.ndim != 1 or kind != "U"):
        return f"wer needs one text for each sample as labels, and these are {shape}"
    if (metric in RANKINGS and kind not in "biuf") or (metric in NUMBERS and kind not in "iuf"):
        return f"{metric} compares numbers, and the labels are {shape}"
    if metric in RANKINGS and labels.ndim > 2:
        return f"labels of a ranking have one or two axes, and these are {shape}"
    if labels.ndim == 1 and not queries and (metric == "ndcg" or (metric == "spearman" and options.get("per_query"))):
        return (
            f"{metric} ranks the samples of a query, and nothing says which samples are one query's: name the column "
            "as data.queries"
        )
    return None


def missing_labels(labels: Array) -> str:
    """What is wrong where some labels are NaN, which is no label; else empty."""
    if labels.dtype.kind != "f" or labels.ndim > 2:
        return ""
    missing = np.isnan(labels).reshape(len(labels), -1).any(axis=1)
    if not missing.any():
        return ""
    return (
        f"{int(missing.sum())} of {len(labels)} samples have NaN for a label (the first is sample "
        f"{int(missing.argmax())}): leave them out of the validation data"
    )
