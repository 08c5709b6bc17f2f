"""Bar charts as SVG files: no script, no font, readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP = 720, 190, 130, 15, 10
_COLOURS = ("#3b82c4", "#d9822b", "#2f9e6e", "#9a6dd7", "#8a8f98")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.axis{stroke:#8a8f98}.range{stroke:#24292f;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#d8dee4}.range{stroke:#d8dee4}}"
)


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        group: Bars of one group stand together, under its name.
        series: Decides the colour; named in the legend.
        value: Its length.
        text: What stands behind it.
        interval: Drawn as a line over its end.
    """

    group: str
    series: str
    value: float
    text: str
    interval: tuple[float, float] | None = None


def bar_chart(title: str, bars: Sequence[Bar], mark: float | None = None) -> str:
    """Horizontal bars from 0, grouped; `mark` draws a dashed vertical line, for instance at 1 for "as fast"."""
    series = list(dict.fromkeys(bar.series for bar in bars))
    top = max([mark or 0.0, *(max(bar.value, *(bar.interval or (0.0,))) for bar in bars)])
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    lines, y = [_text(8, 18, title, weight="600")], 30
    place = 8
    for index, name in enumerate(series):
        lines.append(f'<rect x="{place}" y="{y - 2}" width="11" height="11" fill="{_COLOURS[index % 5]}"/>')
        lines.append(_text(place + 16, y + 8, name))
        place += 40 + 7 * len(name)
    y += 24
    first = y
    for group in dict.fromkeys(bar.group for bar in bars):
        members = [bar for bar in bars if bar.group == group]
        lines.append(_text(_LEFT - 8, y + len(members) * _BAR / 2 + 4, group, anchor="end"))
        for bar in members:
            lines.extend(_bar(bar, y, scale, _COLOURS[series.index(bar.series) % 5]))
            y += _BAR
        y += _GAP
    if mark is not None:
        x = _LEFT + mark * scale
        lines.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{first}" y2="{y - _GAP}" stroke-dasharray="3"/>'
        )
    lines.append(f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="{first}" y2="{y - _GAP}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}"'
    return "\n".join(
        [f'{head} role="img">', f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", *lines, "</svg>", ""]
    )


def _bar(bar: Bar, y: float, scale: float, colour: str) -> list[str]:
    length, middle = bar.value * scale, y + _BAR / 2 - 1
    lines = [f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 3}" fill="{colour}"/>']
    end = length
    if bar.interval is not None:
        low, high = (_LEFT + value * scale for value in bar.interval)
        end = max(end, high - _LEFT)
        lines.append(f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>')
    lines.append(_text(_LEFT + end + 6, y + _BAR - 4, bar.text))
    return lines


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "400") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
