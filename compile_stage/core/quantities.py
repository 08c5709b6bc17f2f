"""Measured values in words, the same in a check's reason and in every table."""

from __future__ import annotations

import math


def quantity(value: float) -> str:
    """`0.9987`, `1 − 4e-14`, `1.2e-06`, `51352`, `NaN`. Never rounded to a perfect 1, no power of ten from
    ten thousand to a million."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 0.99 < value < 1:  # a cosine or an accuracy: what matters is how far it is from 1
        away = 1 - value
        if away < 1e-6:
            return f"1 − {away:.1g}"
        return f"{value:.{max(4, -math.floor(math.log10(away)))}f}".rstrip("0")
    if 9999.5 <= abs(value) < 999_999.5:
        return f"{value:.0f}"
    return f"{value:.4g}"


def percent(share: float, decimals: int = 0) -> str:
    """`95 %` of a share from 0 to 1, with so many decimals."""
    return f"{100 * share:.{decimals}f} %"


def told_apart(value: float, limit: float) -> tuple[str, str]:
    """A value and its limit in words, with as many digits as it takes to see which is the larger."""
    texts = quantity(value), quantity(limit) if quantity(limit).startswith("1 −") else f"{limit:g}"
    digits = 5
    while not in_order(texts, value, limit) and digits <= 17:
        texts = f"{value:.{digits}g}", f"{limit:.{digits}g}"
        digits += 1
    return texts


def in_order(texts: tuple[str, str], value: float, limit: float) -> bool:
    """Whether two texts say of a value and its limit which is the larger, as rounding may not."""
    if math.isnan(value) or value == limit:
        return True
    try:
        shown = float(texts[0]), float(texts[1])
    except ValueError:  # `1 − 4e-14`, `∞`
        return texts[0] != texts[1]
    return (shown[0] > shown[1]) if value > limit else (shown[0] < shown[1])
