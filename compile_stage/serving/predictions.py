"""What predict() answers, as plain JSON, and whether two of its answers agree.

Vendored into every published model: the process that loads it before promotion writes its answers so.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ARRAY = "npy:"
"""What the text of an array begins with; the base64 of NumPy's file follows."""


def answer_items(predict: Callable[[Any], Any], texts: Sequence[str], column: str = "", each: bool = False) -> Any:
    """What predict() answers to texts, or to arrays that were written as texts, as plain JSON.

    Args:
        column: Of the data frame that they are given in; empty for a list.
        each: Every one is given by itself. The answer to it ranks labels, one in a row.
    """
    items = [_array(text) if text.startswith(ARRAY) else text for text in texts]
    if each:
        answers = [plain_prediction(predict(item), ranks_labels=True) for item in items]
        joined: dict[str, Any] = {
            key: " | ".join(dict.fromkeys(answer[key] for answer in answers)) for key in ("form", "layout")
        }
        return joined | {key: [x for answer in answers for x in answer[key]] for key in ("texts", "numbers", "ranks")}
    if not column:
        return plain_prediction(predict(items))
    import pandas as pd

    return plain_prediction(predict(pd.DataFrame({column: items})))


def refuse_prediction(here: Mapping[str, Any], there: Mapping[str, Any], tolerance: float) -> str | None:
    """What differs between two plain answers of predict(): their form, a name or a length inside it, a text, or a
    number by more than the tolerance (of 1, or of the largest where that is larger)."""
    import numpy as np

    if here["form"] != there["form"]:
        return f"it has the form {here['form']}, not {there['form']}"
    # Answers that an earlier version wrote down have no layout.
    if (layout := here.get("layout")) != (expected := there.get("layout")) and None not in (layout, expected):
        return f"it is made of {str(layout)[:80]}, not {str(expected)[:80]}"
    if here["texts"] != there["texts"]:
        return f"it says {str(here['texts'])[:80]}, not {str(there['texts'])[:80]}"
    if len(here["numbers"]) != len(there["numbers"]):
        return f"it has {len(here['numbers'])} numbers, not {len(there['numbers'])}"
    ours, theirs = here.get("ranks", []), there.get("ranks", [])
    if len(ours) != len(theirs):
        return f"it ranks the labels {len(ours)} times, not {len(theirs)} times"
    for number, (mine, original) in enumerate(zip(ours, theirs, strict=True)):
        if (reason := _refuse_ranks(mine, original, tolerance)) is not None:
            return f"of answer {number} {reason}"
    one, other = np.asarray(here["numbers"]), np.asarray(there["numbers"])
    worst = float(np.max(np.abs(one - other), initial=0.0))
    scale = max(1.0, float(np.max(np.abs(other), initial=0.0)))
    return f"a number is off by {worst:.3g}" if not worst <= tolerance * scale else None


def _refuse_ranks(here: Sequence[Any], there: Sequence[Any], tolerance: float) -> str | None:
    """What differs between two rankings of labels. Labels whose scores are within the tolerance may change places, and
    one of them may be the last that is named."""
    if len(here) != len(there):
        return f"{len(here)} labels are ranked, not {len(there)}"
    scores = dict(there)
    allowed = tolerance * max(1.0, *(abs(score) for _, score in there)) if there else 0.0
    for (label, score), (_, original) in zip(here, there, strict=True):
        if not abs(score - original) <= allowed:
            return f"a score is off by {abs(score - original):.3g}"
        if not abs(score - scores.get(label, there[-1][1])) <= allowed:
            return f"{label!r} has another rank"
    return None


def plain_prediction(answer: Any, *, ranks_labels: bool = False) -> dict[str, Any]:
    """An answer as JSON: its form, the names and lengths inside it (`layout`), its texts and its numbers in order.
    Labels with their scores are among none of these, but in `ranks`: a list of [label, score] for each row of a data
    frame of dicts.

    Args:
        ranks_labels: A data frame of `label` and `score` is one ranking, and not an answer in each row.
    """
    texts: list[str] = []
    numbers: list[float] = []
    ranks: list[Any] = []
    cells: Any = answer
    if hasattr(answer, "columns"):
        cells = [answer[column].tolist() for column in answer.columns]
        form = f"data frame [{', '.join(map(str, answer.columns))}] of {len(answer)} rows"
        rows = [list(row) for row in zip(*cells, strict=True)]
        if ranks_labels and {"label", "score"} == set(answer.columns):
            rows = [answer.to_dict(orient="records")]
        if all(_is_ranked(cell) for row in rows for cell in row):
            cells, ranks = [], [[[str(cell["label"]), float(cell["score"])] for cell in row] for row in rows]
    elif hasattr(answer, "dtype"):
        cells, form = answer.tolist(), f"{answer.dtype} array {list(answer.shape)}"
    else:
        form = f"{type(answer).__name__} of {len(answer)}"
    _collect(cells, texts, numbers)
    return {"form": form, "layout": _layout(cells), "texts": texts, "numbers": numbers, "ranks": ranks}


def _layout(value: Any) -> str:
    """The names and lengths of nested dicts and lists, such as `[2 x {word, start}]`."""
    if isinstance(value, Mapping):
        inside = [f"{name}: {layout}" if (layout := _layout(one)) else str(name) for name, one in value.items()]
        return f"{{{', '.join(inside)}}}"
    if not isinstance(value, list | tuple):
        return ""
    layouts = [_layout(one) for one in value]
    if len(set(layouts)) == 1:
        return f"[{len(layouts)} x {layouts[0]}]" if layouts[0] else f"[{len(layouts)}]"
    return f"[{', '.join(layout or 'value' for layout in layouts)}]"


def _is_ranked(cell: Any) -> bool:
    return isinstance(cell, Mapping) and set(cell) == {"label", "score"} and math.isfinite(cell["score"])


def _array(text: str) -> Any:
    import numpy as np

    return np.load(io.BytesIO(base64.b64decode(text.removeprefix(ARRAY))), allow_pickle=False)


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
