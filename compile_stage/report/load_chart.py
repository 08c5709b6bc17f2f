"""Percentiles of the latency over the rate at which requests arrive, as inline SVG."""

from __future__ import annotations

import math

from markupsafe import Markup

from compile_stage.core.records import ServingCost
from compile_stage.report import charts, numbers

_SHAPES = {
    "p50": '<circle class="hollow" cx="{0}" cy="{1}" r="4"><title>{2}</title></circle>',
    "p95": '<circle cx="{0}" cy="{1}" r="3"><title>{2}</title></circle>',
    "p99": '<circle class="s-won" cx="{0}" cy="{1}" r="5"><title>{2}</title></circle>',
}


def load_chart(cost: ServingCost | None) -> Markup:
    """Of the winner's trials with arrivals: a dot for each of p50, p95 and p99, on a logarithmic axis; the dashed line
    is the limit. A trial whose percentile is not known, as of an overloaded server, has a cross at the upper edge.
    Empty without trials."""
    points = [p for p in (cost.winner.points if cost and cost.winner else ()) if p.kind == "open" and not p.invalid]
    known = [value for p in points for value in (p.p50_s, p.p95_s, p.p99_s) if value]
    if cost is None or not known:
        return Markup()
    low, high = charts.bounds([*known, *([cost.limit_s] if cost.limit_s else [])])
    most = max(point.rate or 0.0 for point in points) * 1.05

    def x(rate: float) -> float:
        return charts.MARGIN + (charts.WIDTH - charts.MARGIN - 60) * rate / most

    def y(seconds: float) -> float:
        return charts.TOP + (charts.TALL - charts.TOP - charts.AXIS) * (high - math.log10(seconds)) / (high - low)

    parts = []
    for tick in charts.log_ticks(low, high):
        line = '<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>'
        parts.append(charts.svg(line, charts.MARGIN, x(most), y(tick)))
        parts.append(charts.svg('<text class="value" x="4" y="{0}">{1}</text>', y(tick) + 4, numbers.duration(tick)))
    below = '<text class="tick" x="{0}" y="{1}">{2}</text>'
    parts += [charts.svg(below, x(tick), charts.TALL - 18, f"{tick:g}") for tick in charts.ticks(most)]
    if cost.limit_s:
        line = '<line class="one" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>'
        parts.append(charts.svg(line, charts.MARGIN, x(most), y(cost.limit_s)))
        parts.append(charts.svg('<text class="value" x="{0}" y="{1}">limit</text>', x(most) + 6, y(cost.limit_s) + 4))
    for point in points:
        rate = point.rate or 0.0
        for name, value in (("p50", point.p50_s), ("p95", point.p95_s), ("p99", point.p99_s)):
            if value:
                title = f"{name} {numbers.duration(value)} at {numbers.rate(rate)} requests/s"
                parts.append(charts.svg(_SHAPES[name], x(rate), y(value), title))
        if point.p99_s is None:
            title = f"p99 is not known at {numbers.rate(rate)} requests/s"
            cross = '<text class="blame" text-anchor="middle" x="{0}" y="{1}">×<title>{2}</title></text>'
            parts.append(charts.svg(cross, x(rate), charts.TOP + 4.0, title))
    end = '<text class="tick" x="{0}" y="{1}">requests/s that arrive</text>'
    parts.append(charts.svg(end, charts.WIDTH / 2, charts.TALL - 4))
    return charts.frame(charts.TALL, "Latency over the rate at which requests arrive", parts)
