"""How many samples prove something of their own: a copy of another proves nothing new, also where it was moved by less
than rounding moves it.

Samples are laid side by side by eight random projections of each, so that all pairs of a large set cost one pass over
it: of two samples the mean square of the projections' differences is about the square of their distance (Johnson and
Lindenstrauss, 1984). What is near is found by sorting. So no grid decides, of which noise falls to both sides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import BLOCK, F64, release
from compile_stage.measure.samples import plain_bytes

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array
    from compile_stage.measure.samples import Samples

SAME_INPUT = 1e-5
"""Samples that are no further apart than this share of their size are one: 84 times the precision of float32. In an
image of 224 by 224, one pixel that differs by one step of 8 bits is three times as far off."""

SAME_ANSWER = 1e-3
"""And whose answers differ by no more than this share of an output's largest value. Beside a column of seconds since
1970 all else is small, and the answers tell what matters."""

_PROJECTIONS = 8


def count_distinct(samples: Samples, outputs: Mapping[str, Array]) -> int:
    """How many samples differ from all others beyond rounding and have a finite answer: where the baseline has no
    number there is nothing to compare with.

    Whole numbers, truth values and text differ by any other value.

    Args:
        outputs: What the baseline answers, axis 0 being the sample. Of each floating output one finite value is enough:
            a masked class is infinite in honest models too.
    """
    answers = {name: a for name, a in outputs.items() if a.ndim and len(a) == samples.count}
    answered = np.ones(samples.count, dtype=bool)
    for array in answers.values():
        if array.dtype.kind == "f":
            for row in range(samples.count):
                answered[row] &= bool(np.isfinite(array[row]).any())
    inputs = [array for _, array in sorted(samples.inputs.items())]
    floats = [array for array in inputs if array.dtype.kind == "f" and array.size]
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for row in np.flatnonzero(answered).tolist():
        by_key[_exact(inputs, row)].append(row)
    if not floats:
        return len(by_key)
    places, sizes = _projected(floats, samples.count)
    tops = {name: _top(array) for name, array in answers.items() if array.dtype.kind == "f"}
    return sum(_distinct(np.array(rows), places, sizes, answers, tops) for rows in by_key.values())


def _exact(inputs: list[Array], row: int) -> bytes:
    """Equal for samples whose whole numbers and texts are equal, and whose floats are NaN or infinite in the same
    places."""
    digest = sha256()
    for array in inputs:
        one = np.asarray(array[row])
        if one.dtype.kind == "f":
            strange = ~np.isfinite(one)
            digest.update(np.where(strange, one, 0).tobytes() if strange.any() else b"-")
        else:
            digest.update(plain_bytes(one))
    return digest.digest()


def _projected(inputs: list[Array], count: int) -> tuple[F64, F64]:
    """`[count, projections]` of all floating inputs together, each in its own usual size; and the size of each
    sample."""
    places, squares = np.zeros((count, _PROJECTIONS)), np.zeros(count)
    for number, array in enumerate(inputs):
        rows = array.reshape(count, -1)
        top = _top(rows)
        if top == 0:
            continue
        own, own_squares = np.zeros((count, _PROJECTIONS)), np.zeros(count)
        for left in range(0, rows.shape[1], BLOCK):
            columns = slice(left, min(left + BLOCK, rows.shape[1]))
            random = np.random.default_rng([number, left])
            directions = random.standard_normal((columns.stop - left, _PROJECTIONS))
            step = max(1, BLOCK // (columns.stop - left))
            for start in range(0, count, step):
                part = rows[start : start + step, columns].astype(np.float64) / top
                part = np.where(np.isfinite(part), part, 0)
                own[start : start + step] += part @ directions
                own_squares[start : start + step] += (part * part).sum(axis=1)
                release(array)
        usual = float(own_squares.mean())
        places += own / np.sqrt(usual)
        squares += own_squares / usual
    return places, np.sqrt(squares)


def _distinct(
    rows: NDArray[np.int64], places: F64, sizes: F64, answers: Mapping[str, Array], tops: Mapping[str, float]
) -> int:
    """Of the samples `rows`, how many are no copy of one before, in the order of their first projection."""
    kept: list[int] = []
    firsts: list[float] = []
    for row in rows[np.argsort(places[rows, 0], kind="stable")]:
        # Where the mean square is within its limit, no projection differs by more.
        allowed = SAME_INPUT * sizes[row]
        near = kept[bisect_left(firsts, places[row, 0] - np.sqrt(_PROJECTIONS) * allowed) :]
        apart = np.sqrt(((places[near] - places[row]) ** 2).mean(axis=1)) if near else np.zeros(0)
        candidates = [(near[place], apart[place]) for place in np.flatnonzero(apart <= allowed)]
        if not any(off == 0 or _same_answers(answers, tops, int(row), other) for other, off in candidates):
            kept.append(int(row))
            firsts.append(float(places[row, 0]))
    return len(kept)


def _same_answers(answers: Mapping[str, Array], tops: Mapping[str, float], row: int, other: int) -> bool:
    for name, array in answers.items():
        one, two = np.asarray(array[row]), np.asarray(array[other])
        if name not in tops:
            if not np.array_equal(one, two):
                return False
            continue
        both = np.isfinite(one) & np.isfinite(two)
        apart = np.abs(np.where(both, one, 0).astype(np.float64) - np.where(both, two, 0))
        if apart.max(initial=0) > SAME_ANSWER * tops[name]:
            return False
    return True


def _top(array: Array) -> float:
    """The largest finite magnitude; 0 where there is none."""
    top, rows = 0.0, array.reshape(len(array), -1)
    step = max(1, BLOCK // max(rows.shape[1], 1))
    for start in range(0, len(rows), step):
        part = np.abs(rows[start : start + step].astype(np.float64))
        top = max(top, float(part[np.isfinite(part)].max(initial=0)))
        release(array)
    return top
