"""Numbers as people read them: units chosen by size, four significant digits at most, a dash where there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from compile_stage.core import quantities
from compile_stage.core.records import is_ratio_known, surely_faster

DASH = "—"


def quantity(value: float | None) -> str:
    """`0.9987`, `1 − 4e-14`, `1.2e-06`, `NaN`; a dash for None. Never rounded to a perfect 1."""
    if value is None:
        return DASH
    return quantities.quantity(value)


def duration(seconds: float | None) -> str:
    """`0.41 ms`, `12.3 ms`, `2.1 s`, `3 min 05 s`; a dash for None."""
    if seconds is None:
        return DASH
    if seconds < 0.9995:
        return f"{_three(seconds * 1e3)} ms" if seconds >= 1e-4 else f"{_three(seconds * 1e6)} µs"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def seconds_column(values: Iterable[float | None]) -> Column:
    """Latencies in one unit: that in which the smallest has a digit before the point."""
    known = [value for value in values if value]
    smallest = min(known, default=1e-3)
    unit, factor = ("µs", 1e6) if smallest < 1e-4 else ("ms", 1e3) if smallest < 1 else ("s", 1.0)
    return Column(unit, factor)


def bytes_column(values: Iterable[int | None]) -> Column:
    """Sizes in one unit, by the largest."""
    largest = max((value for value in values if value), default=1_000_000)
    return Column("MB", 1e-6) if largest >= 1e6 else Column("kB", 1e-3)


class Column:
    """The unit of a table's column, which stands in its heading, and how values are written in it."""

    def __init__(self, unit: str, factor: float) -> None:
        self.unit, self._factor = unit, factor

    def text(self, value: float | None) -> str:
        """`20.1`, `14,400`, `0.075`; a dash for None."""
        if value is None:
            return DASH
        shown = value * self._factor
        return f"{shown:,.0f}" if shown >= 999.5 else f"{shown:.3g}" if shown < 0.995 else _three(shown)


def rate(per_second: float | None) -> str:
    """`38,870`, `493.1`; a dash for None."""
    if per_second is None or per_second < 1000:
        return quantity(per_second)
    return f"{per_second:,.0f}"


def size(size_bytes: int | None) -> str:
    """`512 B`, `14.2 kB`, `97.8 MB`, in powers of ten; a dash for None."""
    if size_bytes is None:
        return DASH
    if size_bytes < 1000:
        return f"{size_bytes} B"
    units, value = ["kB", "MB", "GB", "TB"], size_bytes / 1000
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{_three(value)} {units[0]}"


def ratio(value: float | None) -> str:
    """`6.52×`; a dash for None."""
    return DASH if value is None else f"{value:.2f}×"


def percent(share: float) -> str:
    """`12.3 %` of a share from 0 to 1."""
    return quantities.percent(share, 1)


def span(interval: tuple[float, float] | None) -> str:
    """`6.40 to 6.61`, with as many digits as tell the ends apart, and `831 to 22,070`; empty for None."""
    if interval is None:
        return ""
    low, high = interval
    if 0.1 <= abs(high) < 1000 and f"{low:.2f}" != f"{high:.2f}":
        return f"{low:.2f} to {high:.2f}"
    if 1000 <= abs(high) < math.inf:  # no powers of ten, and no decimals beside thousands
        return f"{_three_digits(low)} to {high:,.0f}"
    return f"{quantity(low)} to {quantity(high)}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def under_waivers(gates: Sequence[str]) -> str:
    """`under a waiver of accuracy`, `under waivers of accuracy, speedup`."""
    return f"under {'a waiver' if len(gates) == 1 else 'waivers'} of {', '.join(gates)}"


def ratio_span(interval: tuple[float, float] | None) -> str:
    """As `span`, of a quotient of speeds; `at least 12.5` or `not known` where the interval tells no more; empty for
    None."""
    if (least := surely_faster(interval)) is not None:
        return f"at least {_three_digits(least)}"
    return span(interval) if interval is None or is_ratio_known(interval) else "not known"


def short(digest: str) -> str:
    """The first 12 hex digits of a `sha256:` digest, enough for the eye; the whole digest is in result.json."""
    return digest.removeprefix("sha256:")[:12]


def count(number: int, noun: str) -> str:
    """`1 job`, `3 jobs`, `2 batches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
