"""What predict() answers, as plain JSON, and whether two of its answers agree.

Vendored into every published model: the process that loads it before promotion writes its answers so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def refuse_prediction(here: Mapping[str, Any], there: Mapping[str, Any], tolerance: float) -> str | None:
    """What differs between two plain answers of predict(): their form, a text, or a number by more than the tolerance
    (of 1, or of the largest where that is larger)."""
    import numpy as np

    if here["form"] != there["form"]:
        return f"it has the form {here['form']}, not {there['form']}"
    if here["texts"] != there["texts"]:
        return f"it says {str(here['texts'])[:80]}, not {str(there['texts'])[:80]}"
    if len(here["numbers"]) != len(there["numbers"]):
        return f"it has {len(here['numbers'])} numbers, not {len(there['numbers'])}"
    one, other = np.asarray(here["numbers"]), np.asarray(there["numbers"])
    worst = float(np.max(np.abs(one - other), initial=0.0))
    scale = max(1.0, float(np.max(np.abs(other), initial=0.0)))
    return f"a number is off by {worst:.3g}" if not worst <= tolerance * scale else None


def plain_prediction(answer: Any) -> dict[str, Any]:
    """An answer as JSON: its form, its texts in order, its numbers in order."""
    texts: list[str] = []
    numbers: list[float] = []
    if hasattr(answer, "columns"):
        cells = [answer[column].tolist() for column in answer.columns]
        form = f"data frame [{', '.join(map(str, answer.columns))}] of {len(answer)} rows"
    elif hasattr(answer, "dtype"):
        cells, form = answer.tolist(), f"{answer.dtype} array {list(answer.shape)}"
    else:
        cells, form = answer, f"{type(answer).__name__} of {len(answer)}"
    _collect(cells, texts, numbers)
    return {"form": form, "texts": texts, "numbers": numbers}


def _collect(value: Any, texts: list[str], numbers: list[float]) -> None:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, texts, numbers)
    elif value is None or not math.isfinite(value):
        texts.append(str(value))  # JSON has no such numbers
    else:
        numbers.append(float(value))
