"""What the page's charts are drawn from, as JSON within the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from compile_stage.core.records import JsonMap
from compile_stage.report import numbers
from compile_stage.report.pareto import MEMORY, SIZE, Axis, Point
from compile_stage.report.rounds import Rounds
from compile_stage.report.summary import Row

_MOST_ROUNDS = 400
_CURVE = 64  # points of a curve of errors


def embedded(data: Any) -> Markup:
    """JSON that can stand in a `<script type="application/json">`: names of others can neither end the element nor
    open a comment in it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(escaped)  # noqa: S704 - every character that HTML reads is escaped


def pareto_data(points: Sequence[Point], axes: Sequence[Axis]) -> JsonMap:
    """Points with their latencies in milliseconds, and the choices of the horizontal axis."""
    return {
        "axes": [{"key": axis.key, "title": axis.title, "frontier": list(axis.frontier)} for axis in axes],
        "points": [_point(point) for point in points],
    }


def _point(point: Point) -> dict[str, Any]:
    low, high = point.interval_s or (point.p50_s, point.p50_s)
    megabytes = {key: value / 1e6 for key, value in point.values.items() if key in (SIZE, MEMORY)}
    return {
        "id": point.job_id,
        "label": point.label,
        "state": point.state,
        "p50": point.p50_s * 1e3,
        "low": low * 1e3,
        "high": min(high, point.p50_s * 100) * 1e3,
        "shown": numbers.duration(point.p50_s),
        "range": f"{numbers.duration(low)} to {numbers.duration(high)}" if point.interval_s else "",
        "stable": point.stable,
        "values": {**point.values, **megabytes},
        "why": point.reason,
    }


def rounds_data(rounds: Sequence[Rounds]) -> list[dict[str, Any]]:
    """A row for each round of each participant; of more than 400 rounds every other, or third, ... is left out."""
    return [
        {
            "label": one.label,
            "state": one.state,
            "round": index + 1,
            "ms": median * 1e3,
            "process": f"{one.label} {one.processes[index]}",
        }
        for one in rounds
        for step in [-(-len(one.medians_s) // _MOST_ROUNDS)]
        for index, median in enumerate(one.medians_s)
        if index % step == 0
    ]


def error_curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each candidate the error below which a share of the samples lies, at 64 shares; the output with the largest
    error stands for a candidate that has several."""
    found: list[dict[str, Any]] = []
    for row in rows:
        errors = _errors(row)
        for index in range(_CURVE if errors else 0):
            share = index / (_CURVE - 1)
            value = errors[round(share * (len(errors) - 1))]
            if math.isfinite(value) and value > 0:
                found.append({"label": row.label, "state": row.state, "share": share, "error": value})
    return found


def _errors(row: Row) -> list[float]:
    outputs = row.candidate.errors if row.candidate is not None else ()
    return sorted(max((output.errors for output in outputs), key=max, default=()))


def data_of(sections: Sequence[Mapping[str, Any]]) -> Markup:
    """All sections' data."""
    return embedded([section["data"] for section in sections])
