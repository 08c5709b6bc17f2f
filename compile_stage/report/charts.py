"""Inline SVG: speedups with their intervals, latency distributions, the run's timeline, and the error along a graph.

Drawn with CSS classes, so the page's light and dark colours apply; colour is never the only sign. Text is escaped here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from markupsafe import Markup

from compile_stage.core.records import Event, is_ratio_known, record
from compile_stage.graph_debug.trace import Trace
from compile_stage.report import numbers
from compile_stage.report.pareto import MEMORY, SIZE, Axis, Point
from compile_stage.report.rounds import Rounds

WIDTH = 760
_LEFT = 246  # room for labels of 36 characters, such as `onnxruntime int8-u8s8+half-threads`
_RIGHT = 70
_ROW = 30
TOP = 14
AXIS = 30
_BINS = 72
TALL = 300
MARGIN = 64  # room for the numbers of a vertical axis
_MOST_DB = 120.0


@record
class Bar:
    """One line of the speedup chart; `state` is a CSS class."""

    label: str
    state: str
    speedup: float
    interval: tuple[float, float] | None
    stable: bool = True


@record
class Distribution:
    """One line of the latency chart."""

    label: str
    state: str
    latency_s: tuple[float, ...]


def speedup_chart(bars: Sequence[Bar]) -> Markup:
    """A dot and its 95 % interval for each candidate; the dashed line is the baseline's own speed. Empty without
    bars."""
    if not bars:
        return Markup()
    # An interval that tells nothing must not squeeze the others into a corner: it goes from edge to edge.
    ends = [end for bar in bars if is_ratio_known(bar.interval) for end in bar.interval or () if math.isfinite(end)]
    top = max([1.2, *(bar.speedup for bar in bars), *ends]) * 1.06
    marks = ticks(top)
    height = TOP + _ROW * len(bars) + AXIS

    def x(value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * max(0.0, min(value, top)) / top

    parts = [_vertical(x(tick), height, numbers.quantity(tick) + "×") for tick in marks]
    parts.append(svg('<line class="one" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x(1), TOP - 6, height - AXIS + 4))
    for index, bar in enumerate(bars):
        y = TOP + _ROW * (index + 0.5)
        parts.append(_label(bar.label, y))
        if bar.interval is not None:
            low, high = (x(end) if math.isfinite(end) else x(bar.speedup) for end in bar.interval)
            parts.append(
                svg('<line class="whisker s-{0}" x1="{1}" x2="{2}" y1="{3}" y2="{3}"/>', bar.state, low, high, y)
            )
            cap = '<line class="whisker s-{0}" x1="{1}" x2="{1}" y1="{2}" y2="{3}"/>'
            parts += [svg(cap, bar.state, end, y - 5, y + 5) for end in (low, high)]
        hollow = "" if bar.stable else " hollow"
        figure = numbers.ratio(bar.speedup) if bar.stable else "unstable"
        title = f"{bar.label}: {figure} {numbers.ratio_span(bar.interval)}"
        parts.append(
            svg('<circle class="s-{0}{1}" cx="{2}" cy="{3}" r="5"><title>{4}</title></circle>', bar.state, hollow,
                 x(bar.speedup), y, title)
        )  # fmt: skip
        parts.append(
            svg(
                '<text class="value" x="{0}" y="{1}">{2}</text>',
                WIDTH - _RIGHT + 12,
                y + 4,
                figure,
            )
        )
    return frame(height, "Speedup over the baseline with 95 % intervals", parts)


def latency_chart(distributions: Sequence[Distribution]) -> Markup:
    """Every call's latency as a histogram on one logarithmic axis; the mark is the median. Empty without samples.

    The axis ends where the slowest candidate's slowest 1 % begins, or one hiccup would squeeze all else into a corner;
    what lies beyond is gathered at the right edge.
    """
    taken = [d for d in distributions if d.latency_s and min(d.latency_s) > 0]
    if not taken:
        return Markup()
    low = math.log10(min(min(d.latency_s) for d in taken) * 0.9)
    high = math.log10(max(float(np.quantile(d.latency_s, 0.99)) for d in taken) * 1.1)
    row, height = _ROW + 8, TOP + (_ROW + 8) * len(taken) + AXIS
    plot = WIDTH - _LEFT - _RIGHT

    def x(seconds: float) -> float:
        return _LEFT + plot * (math.log10(seconds) - low) / (high - low)

    parts = [_vertical(x(tick), height, numbers.duration(tick)) for tick in log_ticks(low, high)]
    for index, series in enumerate(taken):
        floor = TOP + row * (index + 1) - 6
        clipped = np.clip(np.log10(series.latency_s), low, high)
        counts = np.histogram(clipped, bins=_BINS, range=(low, high))[0].tolist()
        tallest, width = max(counts), plot / _BINS
        path = [f"M{_LEFT} {floor:.1f}"]
        for position, amount in enumerate(counts):
            y = floor - (row - 10) * amount / tallest
            path.append(f"L{_LEFT + position * width:.1f} {y:.1f}L{_LEFT + (position + 1) * width:.1f} {y:.1f}")
        path.append(f"L{_LEFT + plot} {floor:.1f}Z")
        median = statistics.median(series.latency_s)
        parts.append(_label(series.label, floor - row / 2 + 8))
        parts.append(
            svg('<path class="ridge s-{0}" d="{1}"><title>{2}</title></path>', series.state, " ".join(path),
                 f"{series.label}: median {numbers.duration(median)} of {len(series.latency_s)} calls")
        )  # fmt: skip
        parts.append(
            svg('<line class="median" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x(median), floor - row + 10, floor + 4)
        )
        parts.append(
            svg(
                '<text class="value" x="{0}" y="{1}">{2}</text>',
                WIDTH - _RIGHT + 8,
                floor - row / 2 + 12,
                numbers.duration(median),
            )
        )
    return frame(height, "Latency of every call, by candidate, on a logarithmic axis", parts)


def timeline_chart(events: Sequence[Event], labels: dict[str, str]) -> Markup:
    """What ran when: one lane for the run and one a job. A hatched bar came from the cache. Empty without events."""
    if not events:
        return Markup()
    end = max(max(event.ended_s for event in events), 1e-9)
    lanes = list(dict.fromkeys(["", *(event.job_id for event in events)]))
    lanes = [lane for lane in lanes if any(event.job_id == lane for event in events)]
    steps = list(dict.fromkeys(event.step for event in events))
    row = 24
    height = TOP + row * len(lanes) + AXIS

    def x(seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - 20) * seconds / end

    parts = [_vertical(x(tick), height, numbers.duration(tick) if tick else "0") for tick in ticks(end)]
    parts += [
        _label(labels.get(lane, lane) or "the run", TOP + row * (index + 0.5)) for index, lane in enumerate(lanes)
    ]
    for event in events:
        y = TOP + row * lanes.index(event.job_id) + 4
        took = (
            f"{event.step}{' (from the cache)' if event.cached else ''}: "
            f"{numbers.duration(event.ended_s - event.started_s)}"
        )
        shape = '<rect class="step t-{0}{1}" x="{2}" y="{3}" width="{4}" height="{5}" rx="2"><title>{6}</title></rect>'
        parts.append(
            svg(shape, steps.index(event.step) % 8, " cached" if event.cached else "", x(event.started_s), y,
                 max(1.5, x(event.ended_s) - x(event.started_s)), row - 8, took)
        )  # fmt: skip
    legend = Markup("").join(
        Markup('<span class="key"><i class="t-{0}"></i>{1}</span>').format(index % 8, step)
        for index, step in enumerate(steps)
    )
    return frame(height, "When each step ran", parts) + Markup('<p class="legend">{0}</p>').format(legend)


def pareto_chart(points: Sequence[Point], axis: Axis) -> Markup:
    """Latency of each candidate against what lies on an axis, both logarithmic, with intervals as bars; those that no
    other beats are joined by a line, and named. Empty without points."""
    shown = [point for point in points if axis.key in point.values]
    if not shown:
        return Markup()
    positive = [point.values[axis.key] for point in shown if point.values[axis.key] > 0]
    floor = min(positive, default=1e-6) / 3
    ends = [end for point in shown for end in (point.p50_s, *(point.interval_s or ()))]
    left, right = bounds([max(point.values[axis.key], floor) for point in shown])
    low, high = bounds(ends)

    def x(value: float) -> float:
        return MARGIN + (WIDTH - MARGIN - 30) * (math.log10(max(value, floor)) - left) / (right - left)

    def y(seconds: float) -> float:
        return TOP + (TALL - TOP - AXIS - 16) * (high - math.log10(seconds)) / (high - low)

    parts = []
    for tick in log_ticks(low, high):
        parts.append(svg('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>', MARGIN, WIDTH - 30, y(tick)))
        parts.append(svg('<text class="value" x="4" y="{0}">{1}</text>', y(tick) + 4, numbers.duration(tick)))
    for tick in log_ticks(left, right):
        shape = '<text class="tick" x="{0}" y="{1}">{2}</text>'
        parts.append(svg(shape, x(tick), TALL - AXIS, _axis_text(axis, tick)))
    parts.append(svg('<text class="tick" x="{0}" y="{1}">{2}</text>', WIDTH / 2, TALL - 8, axis.title))
    by_id = {point.job_id: point for point in shown}
    edge = " ".join(f"{x(by_id[job].values[axis.key]):.1f},{y(by_id[job].p50_s):.1f}" for job in axis.frontier)
    parts.append(svg('<polyline class="frontier" points="{0}"/>', edge))
    for point in shown:
        at, height = x(point.values[axis.key]), y(point.p50_s)
        if point.interval_s is not None:
            bar = '<line class="whisker s-{0}" x1="{1}" x2="{1}" y1="{2}" y2="{3}"/>'
            parts.append(svg(bar, point.state, at, *map(y, point.interval_s)))
        hollow = "" if point.stable else " hollow"
        title = f"{point.label}: {numbers.duration(point.p50_s)}"
        dot = '<circle class="s-{0}{1}" cx="{2}" cy="{3}" r="5"><title>{4}</title></circle>'
        parts.append(svg(dot, point.state, hollow, at, height, title))
        if point.job_id in axis.frontier or point.state == "baseline":
            anchor = "end" if at > WIDTH * 0.7 else "start"
            place = at + (-9 if anchor == "end" else 9)
            label = '<text class="value" text-anchor="{0}" x="{1}" y="{2}">{3}</text>'
            parts.append(svg(label, anchor, place, height - 7, point.label[:40]))
    return frame(TALL, f"Median latency against {axis.title}", parts)


def _axis_text(axis: Axis, value: float) -> str:
    return numbers.size(round(value)) if axis.key in (SIZE, MEMORY) else f"{value:.3g}"


def rounds_chart(rounds: Sequence[Rounds]) -> Markup:
    """The median of each round, in order, on a logarithmic axis, a line for each participant; a gap is a new start of
    the process. Empty without rounds."""
    shown = [one for one in rounds if len(one.medians_s) > 1]
    if not shown:
        return Markup()
    low, high = bounds([median for one in shown for median in one.medians_s])
    most = max(len(one.medians_s) for one in shown) - 1

    def x(index: int) -> float:
        return MARGIN + (WIDTH - MARGIN - 150) * index / most

    def y(seconds: float) -> float:
        return TOP + (TALL - TOP - AXIS) * (high - math.log10(seconds)) / (high - low)

    parts = []
    for tick in log_ticks(low, high):
        parts.append(svg('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>', MARGIN, x(most), y(tick)))
        parts.append(svg('<text class="value" x="4" y="{0}">{1}</text>', y(tick) + 4, numbers.duration(tick)))
    for one in shown:
        for process in dict.fromkeys(one.processes):
            line = " ".join(
                f"{x(index):.1f},{y(median):.1f}"
                for index, median in enumerate(one.medians_s)
                if one.processes[index] == process
            )
            parts.append(svg('<polyline class="rounds s-{0}" points="{1}"/>', one.state, line))
        name = '<text class="value" x="{0}" y="{1}">{2}</text>'
        parts.append(svg(name, x(len(one.medians_s) - 1) + 6, y(one.medians_s[-1]) + 4, one.label[:26]))
    parts.append(svg('<text class="tick" x="{0}" y="{1}">{2}</text>', WIDTH / 2, TALL - 8, "rounds, in order"))
    return frame(TALL, "Median latency of each round", parts)


def bounds(values: Iterable[float]) -> tuple[float, float]:
    """Decimal logarithms of the ends of an axis that holds all values, with some room."""
    logs = [math.log10(value) for value in values]
    room = max(0.08, (max(logs) - min(logs)) * 0.08)
    return min(logs) - room, max(logs) + room


def error_chart(trace: Trace, kept: Collection[str] = ()) -> Markup:
    """SNR in dB of each node's output, in the order in which they run; higher is better. Empty without nodes.

    The first node that departs is marked with a line and its name, those that are to be kept in FP32 with a ring. What
    is exact lies on the upper edge, what is not finite on the lower one.
    """
    finite = [error.snr_db for error in trace.nodes if math.isfinite(error.snr_db)]
    if not trace.nodes:
        return Markup()
    high = min(_MOST_DB, max([20.0, *finite]) + 5)
    low = max(-20.0, min([0.0, *finite]) - 5)

    def x(index: int) -> float:
        return MARGIN + (WIDTH - MARGIN - 20) * (index / max(1, len(trace.nodes) - 1))

    def y(snr_db: float) -> float:
        return TOP + (TALL - TOP - AXIS) * (high - max(low, min(high, snr_db))) / (high - low)

    parts = []
    for tick in ticks(high):
        parts.append(svg('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>', MARGIN, WIDTH - 20, y(tick)))
        parts.append(svg('<text class="value" x="8" y="{0}">{1} dB</text>', y(tick) + 4, int(tick)))
    points = " ".join(f"{x(i):.1f},{y(error.snr_db):.1f}" for i, error in enumerate(trace.nodes))
    parts.append(svg('<polyline class="error" points="{0}"/>', points))
    for index, error in enumerate(trace.nodes):
        state = "failed" if error.node == trace.first else "won" if error.drop_db < trace.drop_db else "lost"
        title = f"{error.node} ({error.op}): {error.snr_db:.1f} dB, drop {error.drop_db:.1f} dB"
        radius = 6 if error.node == trace.first else 3
        if error.node in kept:
            parts.append(svg('<circle class="ring" cx="{0}" cy="{1}" r="9"/>', x(index), y(error.snr_db)))
        parts.append(
            svg('<circle class="s-{0}" cx="{1}" cy="{2}" r="{3}"><title>{4}</title></circle>', state, x(index),
                y(error.snr_db), radius, title)
        )  # fmt: skip
        if error.node == trace.first:
            parts.append(svg('<line class="median" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x(index), TOP, TALL - AXIS))
            anchor = "end" if index > len(trace.nodes) / 2 else "start"
            place = x(index) + (-8 if anchor == "end" else 8)
            shown = error.node if len(error.node) <= 60 else "…" + error.node[-59:]
            parts.append(
                svg('<text class="blame" text-anchor="{0}" x="{1}" y="{2}">{3}</text>', anchor, place, TOP + 8, shown)
            )
    parts.append(
        svg(
            '<text class="tick" x="{0}" y="{1}">{2}</text>',
            WIDTH / 2,
            TALL - 8,
            "nodes, in the order in which they run",
        )
    )
    return frame(TALL, "Signal to noise ratio of every node along the graph", parts)


def frame(height: float, title: str, parts: Iterable[Markup]) -> Markup:
    """The whole picture."""
    return Markup('<svg viewBox="0 0 {0} {1}" role="img" aria-label="{2}">{3}</svg>').format(
        WIDTH, round(height), title, Markup("").join(parts)
    )


def svg(shape: str, *values: object) -> Markup:
    """A shape with its values, escaped; floats with one decimal."""
    return Markup(shape).format(*(f"{v:.1f}" if isinstance(v, float) else v for v in values))  # noqa: S704 - shapes are ours, values get escaped


def _label(text: str, y: float) -> Markup:
    shown = text if len(text) <= 36 else text[:35] + "…"
    return svg('<text class="name" x="{0}" y="{1}">{2}<title>{3}</title></text>', _LEFT - 12, y + 4, shown, text)


def _vertical(x: float, height: float, text: str) -> Markup:
    line = svg('<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x, TOP - 6, height - AXIS + 4)
    return line + svg('<text class="tick" x="{0}" y="{1}">{2}</text>', x, height - 8, text)


def ticks(top: float) -> list[float]:
    """Round values from 0 to `top`, four to eight of them."""
    rough = top / 6
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough)
    return [step * index for index in range(int(top / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two logarithms; only the powers when those are many."""
    wanted = (1, 2, 5) if high - low < 2.5 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [m * 10.0**p for p in powers for m in wanted if low <= math.log10(m * 10.0**p) <= high]
