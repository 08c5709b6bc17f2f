"""Inline SVG: speedups with their intervals, latency distributions, the run's timeline, and the error along a graph.

Drawn with CSS classes, so the page's light and dark colours apply; colour is never the only sign. Text is escaped here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from markupsafe import Markup

from compile_stage.core.records import Event, record
from compile_stage.graph_debug.trace import Trace
from compile_stage.report import numbers

_WIDTH = 760
_LEFT = 210  # room for labels
_RIGHT = 70
_ROW = 30
_TOP = 14
_AXIS = 30
_BINS = 72
_TALL = 300
_MARGIN = 64  # room for the numbers of a vertical axis
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
    ends = [end for bar in bars for end in (bar.interval or ()) if math.isfinite(end)]
    top = max([1.2, *(bar.speedup for bar in bars), *ends]) * 1.06
    ticks = _ticks(top)
    height = _TOP + _ROW * len(bars) + _AXIS

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * max(0.0, min(value, top)) / top

    parts = [_vertical(x(tick), height, numbers.quantity(tick) + "×") for tick in ticks]
    parts.append(_svg('<line class="one" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x(1), _TOP - 6, height - _AXIS + 4))
    for index, bar in enumerate(bars):
        y = _TOP + _ROW * (index + 0.5)
        parts.append(_label(bar.label, y))
        if bar.interval is not None:
            low, high = (x(end) if math.isfinite(end) else x(bar.speedup) for end in bar.interval)
            parts.append(
                _svg('<line class="whisker s-{0}" x1="{1}" x2="{2}" y1="{3}" y2="{3}"/>', bar.state, low, high, y)
            )
            cap = '<line class="whisker s-{0}" x1="{1}" x2="{1}" y1="{2}" y2="{3}"/>'
            parts += [_svg(cap, bar.state, end, y - 5, y + 5) for end in (low, high)]
        hollow = "" if bar.stable else " hollow"
        figure = numbers.ratio(bar.speedup) if bar.stable else "unstable"
        title = f"{bar.label}: {figure} {numbers.span(bar.interval)}"
        parts.append(
            _svg('<circle class="s-{0}{1}" cx="{2}" cy="{3}" r="5"><title>{4}</title></circle>', bar.state, hollow,
                 x(bar.speedup), y, title)
        )  # fmt: skip
        parts.append(
            _svg(
                '<text class="value" x="{0}" y="{1}">{2}</text>',
                _WIDTH - _RIGHT + 12,
                y + 4,
                figure,
            )
        )
    return _frame(height, "Speedup over the baseline with 95 % intervals", parts)


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
    row, height = _ROW + 8, _TOP + (_ROW + 8) * len(taken) + _AXIS
    plot = _WIDTH - _LEFT - _RIGHT

    def x(seconds: float) -> float:
        return _LEFT + plot * (math.log10(seconds) - low) / (high - low)

    parts = [_vertical(x(tick), height, numbers.duration(tick)) for tick in _log_ticks(low, high)]
    for index, series in enumerate(taken):
        floor = _TOP + row * (index + 1) - 6
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
            _svg('<path class="ridge s-{0}" d="{1}"><title>{2}</title></path>', series.state, " ".join(path),
                 f"{series.label}: median {numbers.duration(median)} of {len(series.latency_s)} calls")
        )  # fmt: skip
        parts.append(
            _svg('<line class="median" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x(median), floor - row + 10, floor + 4)
        )
        parts.append(
            _svg(
                '<text class="value" x="{0}" y="{1}">{2}</text>',
                _WIDTH - _RIGHT + 8,
                floor - row / 2 + 12,
                numbers.duration(median),
            )
        )
    return _frame(height, "Latency of every call, by candidate, on a logarithmic axis", parts)


def timeline_chart(events: Sequence[Event], labels: dict[str, str]) -> Markup:
    """What ran when: one lane for the run and one a job. A hatched bar came from the cache. Empty without events."""
    if not events:
        return Markup()
    end = max(max(event.ended_s for event in events), 1e-9)
    lanes = list(dict.fromkeys(["", *(event.job_id for event in events)]))
    lanes = [lane for lane in lanes if any(event.job_id == lane for event in events)]
    steps = list(dict.fromkeys(event.step for event in events))
    row = 24
    height = _TOP + row * len(lanes) + _AXIS

    def x(seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 20) * seconds / end

    parts = [_vertical(x(tick), height, numbers.duration(tick) if tick else "0") for tick in _ticks(end)]
    parts += [
        _label(labels.get(lane, lane) or "the run", _TOP + row * (index + 0.5)) for index, lane in enumerate(lanes)
    ]
    for event in events:
        y = _TOP + row * lanes.index(event.job_id) + 4
        took = (
            f"{event.step}{' (from the cache)' if event.cached else ''}: "
            f"{numbers.duration(event.ended_s - event.started_s)}"
        )
        shape = '<rect class="step t-{0}{1}" x="{2}" y="{3}" width="{4}" height="{5}" rx="2"><title>{6}</title></rect>'
        parts.append(
            _svg(shape, steps.index(event.step) % 8, " cached" if event.cached else "", x(event.started_s), y,
                 max(1.5, x(event.ended_s) - x(event.started_s)), row - 8, took)
        )  # fmt: skip
    legend = Markup("").join(
        Markup('<span class="key"><i class="t-{0}"></i>{1}</span>').format(index % 8, step)
        for index, step in enumerate(steps)
    )
    return _frame(height, "When each step ran", parts) + Markup('<p class="legend">{0}</p>').format(legend)


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
        return _MARGIN + (_WIDTH - _MARGIN - 20) * (index / max(1, len(trace.nodes) - 1))

    def y(snr_db: float) -> float:
        return _TOP + (_TALL - _TOP - _AXIS) * (high - max(low, min(high, snr_db))) / (high - low)

    parts = []
    for tick in _ticks(high):
        parts.append(_svg('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>', _MARGIN, _WIDTH - 20, y(tick)))
        parts.append(_svg('<text class="value" x="8" y="{0}">{1} dB</text>', y(tick) + 4, int(tick)))
    points = " ".join(f"{x(i):.1f},{y(error.snr_db):.1f}" for i, error in enumerate(trace.nodes))
    parts.append(_svg('<polyline class="error" points="{0}"/>', points))
    for index, error in enumerate(trace.nodes):
        state = "failed" if error.node == trace.first else "won" if error.drop_db < trace.drop_db else "lost"
        title = f"{error.node} ({error.op}): {error.snr_db:.1f} dB, drop {error.drop_db:.1f} dB"
        radius = 6 if error.node == trace.first else 3
        if error.node in kept:
            parts.append(_svg('<circle class="ring" cx="{0}" cy="{1}" r="9"/>', x(index), y(error.snr_db)))
        parts.append(
            _svg('<circle class="s-{0}" cx="{1}" cy="{2}" r="{3}"><title>{4}</title></circle>', state, x(index),
                y(error.snr_db), radius, title)
        )  # fmt: skip
        if error.node == trace.first:
            parts.append(
                _svg('<line class="median" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x(index), _TOP, _TALL - _AXIS)
            )
            anchor = "end" if index > len(trace.nodes) / 2 else "start"
            place = x(index) + (-8 if anchor == "end" else 8)
            shown = error.node if len(error.node) <= 60 else "…" + error.node[-59:]
            parts.append(
                _svg('<text class="blame" text-anchor="{0}" x="{1}" y="{2}">{3}</text>', anchor, place, _TOP + 8, shown)
            )
    parts.append(
        _svg(
            '<text class="tick" x="{0}" y="{1}">{2}</text>',
            _WIDTH / 2,
            _TALL - 8,
            "nodes, in the order in which they run",
        )
    )
    return _frame(_TALL, "Signal to noise ratio of every node along the graph", parts)


def _frame(height: float, title: str, parts: Iterable[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {0} {1}" role="img" aria-label="{2}">{3}</svg>').format(
        _WIDTH, round(height), title, Markup("").join(parts)
    )


def _svg(shape: str, *values: object) -> Markup:
    return Markup(shape).format(*(f"{v:.1f}" if isinstance(v, float) else v for v in values))  # noqa: S704 - shapes are ours, values get escaped


def _label(text: str, y: float) -> Markup:
    shown = text if len(text) <= 30 else text[:29] + "…"
    return _svg('<text class="name" x="{0}" y="{1}">{2}<title>{3}</title></text>', _LEFT - 12, y + 4, shown, text)


def _vertical(x: float, height: float, text: str) -> Markup:
    line = _svg('<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', x, _TOP - 6, height - _AXIS + 4)
    return line + _svg('<text class="tick" x="{0}" y="{1}">{2}</text>', x, height - 8, text)


def _ticks(top: float) -> list[float]:
    """Round values from 0 to `top`, four to eight of them."""
    rough = top / 6
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough)
    return [step * index for index in range(int(top / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two logarithms; only the powers when those are many."""
    wanted = (1, 2, 5) if high - low < 2.5 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [m * 10.0**p for p in powers for m in wanted if low <= math.log10(m * 10.0**p) <= high]
