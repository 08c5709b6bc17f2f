"""Mean average precision of object detectors, as COCO counts it.

Matching boxes and the value are pycocotools'. The precision-recall curve is written once more as a function of weights
of the images, on pycocotools' own matches, since a resample through it would take seconds.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.task_intervals import Score

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

MOST = 100
"""Detections of an image that count: the best ones, as COCO has it."""

_BLOCK = 1 << 21  # values held at once (16 MB)
_EPSILON = np.spacing(1)  # pycocotools', against a precision of 0 / 0


def read_detections(outputs: Mapping[str, Array], options: JsonMap) -> tuple[tuple[str, ...], Array]:
    """The names of the outputs that hold boxes, scores and classes, and `[n, boxes, 6]`: class, score, and the box as
    x, y, width, height. A box without a class (the background's) has class -1. Raises NotMeasurableError."""
    boxes = _named(outputs, options, "boxes", lambda o: o.ndim == 3 and o.shape[2] == 4 and o.dtype.kind == "f")
    shape = outputs[boxes].shape[:2]
    scores = _named(
        {n: o for n, o in outputs.items() if n != boxes},
        options,
        "scores",
        lambda o: o.shape[:2] == shape and o.dtype.kind == "f" and o.ndim in (2, 3),
    )
    names: tuple[str, ...] = (boxes, scores)
    corners = _as_xywh(np.asarray(outputs[boxes], dtype=np.float64), str(options.get("format") or "xyxy"))
    best, names = np.asarray(outputs[scores], dtype=np.float64), (boxes, scores)
    if best.ndim == 3:
        number, best = _best_class(best, options)
    else:
        left = {n: o for n, o in outputs.items() if n not in (boxes, scores)}
        classes = _named(left, options, "classes", lambda o: o.shape == shape)
        number, names = np.asarray(outputs[classes], dtype=np.float64), (boxes, scores, classes)
    if not all(bool(np.isfinite(part).all()) for part in (corners, best, number)):
        raise NotMeasurableError("some boxes, scores or classes are NaN or infinite")
    return names, np.concatenate([number[..., None], best[..., None], corners], axis=2)


def _named(outputs: Mapping[str, Array], options: JsonMap, what: str, suits: Any) -> str:
    named = options.get(what)
    fitting = [name for name, output in outputs.items() if suits(output)]
    if named is not None and named not in fitting:
        raise NotMeasurableError(f"output {named!r} does not hold {what}: {_held(outputs)}")
    if named is None and len(fitting) != 1:
        many = "no output holds" if not fitting else f"outputs {' and '.join(map(repr, fitting))} could each hold"
        raise NotMeasurableError(f"{many} the {what}; name it: coco_map: {{{what}: NAME}}. There are {_held(outputs)}")
    return str(named) if named is not None else fitting[0]


def _held(outputs: Mapping[str, Array]) -> str:
    return ", ".join(f"{n!r} {o.dtype}{list(o.shape[1:])}" for n, o in outputs.items()) or "none left"


def _best_class(scores: F64, options: JsonMap) -> tuple[F64, F64]:
    """Of `[n, boxes, classes]`: the best class of each box and its score. Where that is the background it is -1."""
    activation = options.get("activation") or "none"
    if activation == "sigmoid":
        scores = 1 / (1 + np.exp(-np.clip(scores, -60, 60)))
    elif activation == "softmax":
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        scores /= scores.sum(axis=2, keepdims=True)
    background = options.get("background")
    if background is not None:
        scores = scores.copy()
        scores[:, :, int(background)] = -1.0
    return scores.argmax(axis=2).astype(np.float64), scores.max(axis=2)


def _as_xywh(boxes: F64, form: str) -> F64:
    first, last = boxes[..., :2], boxes[..., 2:]
    if form == "xyxy":
        return np.concatenate([first, last - first], axis=-1)
    return boxes if form == "xywh" else np.concatenate([first - last / 2, last], axis=-1)


# ----------------------------------------------------------------------------------------------------------------- mAP


@dataclass(frozen=True)
class _Class:
    """pycocotools' matches of one class, best score first.

    Attributes:
        image: `[detections]`.
        hits: `[IoU limits, detections]`: whether it is an object that no better one has.
        objects: `[images]`: how many there are.
    """

    image: NDArray[np.int64]
    hits: NDArray[np.bool_]
    objects: F64


def coco_map(truth: Array, detections: Array, options: JsonMap) -> Score:
    """Mean over the classes, and over the IoU limits 0.5, 0.55 ... 0.95, of the average precision.

    Args:
        truth: `[n, objects, 5]`: class, and the box in the form of the model's; class -1 fills up.
        detections: As `read_detections` gives them.

    Raises NotMeasurableError.
    """
    objects = truth.astype(np.float64)
    objects = np.concatenate([objects[..., :1], _as_xywh(objects[..., 1:], str(options.get("format") or "xyxy"))], 2)
    classes = sorted({int(number) for number in np.unique(objects[..., 0]) if number >= 0})
    if not classes:
        raise NotMeasurableError("no label is an object")
    value, by_class = _evaluated(objects, np.asarray(detections, dtype=np.float64), classes)

    def of(weights: F64) -> F64:
        return np.concatenate([_mean_precision(by_class, rows) for rows in _pieces(weights, by_class)])

    found = sum(_hits_of_images(one, len(truth)) for one in by_class)
    # An image whose objects are all lost; a class with few objects weighs as much as one with many.
    share = np.mean([one.objects / one.objects.sum() for one in by_class], axis=0)
    return Score(value, of, None, np.asarray(found), float(share.max()))


def _evaluated(objects: F64, detections: F64, classes: list[int]) -> tuple[float, list[_Class]]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    kept = [(image, *row) for image, rows in enumerate(detections) for row in rows if row[0] >= 0 and row[1] >= 0]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        known = COCO()
        known.dataset = {
            "images": [{"id": image} for image in range(len(objects))],
            "categories": [{"id": number} for number in classes],
            "annotations": [
                {"id": 1 + place, "image_id": int(image), "category_id": int(row[0]), "bbox": row[1:].tolist(),
                 "area": float(row[3] * row[4]), "iscrowd": 0}
                for place, (image, row) in enumerate(
                    (image, row) for image, rows in enumerate(objects) for row in rows if row[0] >= 0
                )
            ],
        }  # fmt: skip
        known.createIndex()
        if not kept:
            return 0.0, [_no_detection(objects, number) for number in classes]
        table = np.array([(image, *row[2:], row[1], row[0]) for image, *row in kept])
        run = COCOeval(known, known.loadRes(table), "bbox")
        run.params.maxDets, run.params.areaRng, run.params.areaRngLbl = [MOST], [[0, 1e10]], ["all"]
        run.evaluate()
        run.accumulate()
    precision = run.eval["precision"]
    by_class = [
        _of_class([run.evalImgs[place * len(objects) + image] for image in range(len(objects))])
        for place in range(len(classes))
    ]
    return float(precision[precision > -1].mean()), by_class


def _of_class(images: list[Any]) -> _Class:
    """From pycocotools' record of each image; None for one with neither an object nor a detection of the class."""
    scores = [np.array(one["dtScores"]) if one else np.zeros(0) for one in images]
    hits = [np.array(one["dtMatches"]) > 0 if one else np.zeros((10, 0), dtype=bool) for one in images]
    objects = np.array([float(len(one["gtIds"])) if one else 0.0 for one in images])
    image = np.repeat(np.arange(len(images)), [len(part) for part in scores])
    order = np.argsort(-np.concatenate(scores), kind="mergesort")
    return _Class(image[order], np.concatenate(hits, axis=1)[:, order], objects)


def _no_detection(objects: F64, number: int) -> _Class:
    count = (objects[..., 0] == number).sum(axis=1).astype(np.float64)
    return _Class(np.zeros(0, dtype=np.int64), np.zeros((10, 0), dtype=bool), count)


def _hits_of_images(one: _Class, images: int) -> F64:
    """`[images, IoU limits]`: how many objects were found."""
    return np.stack([np.bincount(one.image[hit], minlength=images) for hit in one.hits], axis=1).astype(np.float64)


def _pieces(weights: F64, by_class: list[_Class]) -> list[F64]:
    rows = max(1, _BLOCK // max(1, *(len(one.image) for one in by_class)))
    return [weights[start : start + rows] for start in range(0, len(weights), rows)]


def _mean_precision(by_class: list[_Class], weights: F64) -> F64:
    """`[resamples]`. A class without an object in a resample takes no part, as COCO has it."""
    values = np.full((len(by_class), len(weights)), np.nan)
    for place, one in enumerate(by_class):
        objects = weights @ one.objects
        drawn = weights[:, one.image]
        taken = np.cumsum(drawn, axis=1)
        of_limits = [
            _average_precision(np.cumsum(drawn[:, hit], axis=1), taken[:, hit], objects)
            for hit in (np.flatnonzero(hits) for hits in one.hits)
        ]
        values[place] = np.mean(of_limits, axis=0)
    with np.errstate(invalid="ignore"):
        count = np.count_nonzero(~np.isnan(values), axis=0)
        return np.asarray(np.nansum(values, axis=0) / np.where(count > 0, count, np.nan))


def _average_precision(found: F64, taken: F64, objects: F64) -> F64:
    """`[resamples]`, over the 101 recalls 0, 0.01 ... 1; NaN without objects.

    Only at detections that found an object is the precision looked at: between two of them it falls, and a recall is
    first reached at one.

    Args:
        found, taken: `[resamples, hits]`: objects found, and detections taken, up to each hit.
    """
    recalls = np.linspace(0.0, 1.0, 101)
    recall = found / np.where(objects > 0, objects, np.nan)[:, None]
    precision = found / (taken + _EPSILON)
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    precision = np.concatenate([precision, np.zeros((len(found), 1))], axis=1)
    # One search for all rows: how many of the 101 are reached, each row's numbers lifted above those of the row before.
    lift = 102 * np.arange(len(found))[:, None]
    reached = np.searchsorted(recalls, np.nan_to_num(recall), side="right")
    place = np.searchsorted((reached + lift).ravel(), (1 + np.arange(101) + lift).ravel())
    place = place.reshape(len(found), 101) - np.arange(len(found))[:, None] * found.shape[1]
    means = np.take_along_axis(precision, np.minimum(place, found.shape[1]), axis=1).mean(axis=1)
    return np.where(objects > 0, means, np.nan)
