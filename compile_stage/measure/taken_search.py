"""The search for the whole numbers and categories that an open original takes: by halves, from its samples on."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.ports import Session
from compile_stage.core.tensors import CACHE_INPUTS
from compile_stage.measure.missing import refusal_of

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch
    from compile_stage.measure.samples import Samples

_STEPS = (1, 2**8, 2**16, 2**24, 2**31 - 1)
"""What is asked for on the way out from the samples' own numbers. What takes the last has no limit."""

_INT32 = np.iinfo(np.int32)

_WIDE = {"int64": 2**33 + 12_345, "uint64": 2**33 + 12_345, "uint32": 2**31 + 2**30}
"""Type → a number of it that takes more than 32 bits, signed. Some runtimes compute such types in int32: they then hold
another number, whether they cut it off or take the nearest."""

_MOST_COLUMNS = 64
"""Of a matrix whose columns are asked for one by one where they have not all the same limits."""

_SHORT = 32  # elements of an axis that are each looked at to see that, in two calls

_PLACES = 4  # of a longer one

_OTHER_ROWS = 2
"""Samples in which a limit must hold too. One that does not is a relation, such as a start before an end."""

_BEYOND = (1, 2, 4, 16)
"""How far beyond a limit is asked for. Where the original takes one of these, it takes some numbers, and no range."""

_MOST_VALUES = 10_000
"""Categories of one column that the manifest lists."""

_ANY_OTHER = "the original refuses any other"

_TOO_SLOW = 10.0
"""Times the usual call, and a second at least."""


def find_taken(
    session: Session, samples: Samples, batch_size: int, categories: Mapping[str, Mapping[int, Sequence[Any]]]
) -> dict[str, Any]:
    """Call the open model with values that it may refuse.

    Args:
        categories: What its encoders know (`core.ports.Exporter.categories`).

    Returns:
        `rules`, as the manifest lists them; `wide`, inputs (or columns) in which it takes numbers of more than 32 bits
        that the samples don't have, each as the rule of those that do with 32 and the `asked` numbers; and `notes`.
    """
    original = _Original(session, samples, batch_size)
    rules, notes = [], []
    for name, columns in categories.items():
        for column, values in columns.items():
            place = (name, column if samples.inputs[name].shape[1:] != (1,) else None)
            found = _known(original, samples.inputs[name], place, values)
            notes += [found] if isinstance(found, str) else []
            rules += [found] if isinstance(found, dict) else []
    rules += _limits(original, samples)
    wide = _wide(original, samples, rules)
    if original.is_slow:
        notes.append("a number far from the samples' takes the original much longer: not all limits were looked for")
    return {"rules": rules, "wide": wide, "notes": notes}


class _Original:
    """The open original, asked with one value in place of the samples' own.

    Attributes:
        is_slow: A call took much longer than the usual one: what is asked for next may take all memory.
    """

    def __init__(self, session: Session, samples: Samples, batch_size: int) -> None:
        self.session = session
        self._batch = _rows(samples, 0, batch_size)
        began = time.perf_counter()
        session.run(self._batch)
        self._usual_s = time.perf_counter() - began
        self.is_slow = False
        starts = {int(start) for start in np.linspace(0, samples.count - 1, _OTHER_ROWS + 1)} - {0}
        self._others = [_rows(samples, start, batch_size) for start in sorted(starts)]
        self.dynamic = {
            spec.name: [axis for axis, size in enumerate(spec.shape) if axis > 0 and isinstance(size, str)]
            for spec in session.signature.inputs
        }

    @cached_property
    def _lengths(self) -> set[int]:
        """Sizes of dimensions that may differ from request to request."""
        return {
            self._batch[name].shape[axis] for name, axes in self.dynamic.items() if name in self._batch for axis in axes
        }

    @cached_property
    def _other_length(self) -> Batch | None:
        """The batch with these of half the size, or of twice the size; None where it takes neither."""
        for factor in (0.5, 2.0):
            batch = dict(self._batch)
            for name, axes in self.dynamic.items():
                for axis in axes if name in batch else ():
                    size = batch[name].shape[axis]
                    batch[name] = np.take(batch[name], np.arange(max(1, int(factor * size))) % size, axis=axis)
            resized = any(batch[name].shape != array.shape for name, array in self._batch.items())
            if resized and not refusal_of(self.session, batch):
                return batch
        return None

    def is_limit(self, place: tuple[str, int | None], limit: int, sign: int) -> bool:
        """Whether that is the last number that it takes in that direction in other requests too."""
        own = self._batch[place[0]]
        beyond = [value for step in _BEYOND if (value := _held(limit + sign * step, own)) != limit]
        if not all(self.refusal(place, value) for value in beyond[1:]):
            return False
        others = list(self._others)
        if self._lengths and sign > 0:
            if self._other_length is not None:
                others.append(self._other_length)
            elif {limit, limit + 1} & self._lengths:  # such as the number of valid tokens in a row
                return False
        name, element = place
        return all(
            not refusal_of(self.session, {**batch, name: with_value(batch[name], element, limit)})
            and refusal_of(self.session, {**batch, name: with_value(batch[name], element, limit + sign)})
            for batch in others
        )

    def refusal(self, place: tuple[str, int | list[int] | None], value: Any) -> str:
        """Why it refuses this value there; empty where it takes it.

        Args:
            place: Name of an input with the column, or the number of an element or of several; None for one in the
                middle.
        """
        name, element = place
        return self._refusal({name: with_value(self._batch[name], element, value)})

    def refuses_any(self, values: Mapping[str, int]) -> bool:
        """Whether it refuses one of these values, each in all of an input; or takes long over them."""
        changed = {name: np.full_like(self._batch[name], value) for name, value in values.items()}
        return bool(self._refusal(changed)) or self.is_slow

    def takes(self, place: tuple[str, list[int]], value: int) -> bool:
        """Whether it takes that value in all of these elements of an input, in no more than the usual time."""
        return not self.is_slow and not self.refusal(place, value) and not self.is_slow

    def _refusal(self, changed: Batch) -> str:
        found, is_slow = self._timed(changed)
        if is_slow and not self.is_slow:  # once may be the machine's fault
            found, self.is_slow = self._timed(changed)
        return found

    def _timed(self, changed: Batch) -> tuple[str, bool]:
        """Why it refuses, and whether it took much longer than the usual call."""
        began = time.perf_counter()
        found = refusal_of(self.session, {**self._batch, **changed})
        return found, time.perf_counter() - began > max(1.0, _TOO_SLOW * self._usual_s)

    def taken_of(self, place: tuple[str, int | None], values: Sequence[Any]) -> list[Any]:
        """Those of the values that it takes, by halves: mostly it takes all of them."""
        rows = np.arange(len(values)) % len(next(iter(self._batch.values())))
        given = {name: np.ascontiguousarray(array[rows]) for name, array in self._batch.items()}
        given[place[0]] = with_value(given[place[0]], place[1], values)
        if not refusal_of(self.session, given):
            return list(values)
        if len(values) == 1:
            return []
        half = len(values) // 2
        return [*self.taken_of(place, values[:half]), *self.taken_of(place, values[half:])]


def _rows(samples: Samples, start: int, count: int) -> Batch:
    rows = (start + np.arange(count)) % samples.count
    return {name: np.ascontiguousarray(array[rows]) for name, array in samples.inputs.items()}


def with_value(array: Array, element: int | list[int] | None, value: Any) -> Array:
    """A copy with that value (or one for each row) in that element of each row, by default the middle one. Of several
    elements each gets the value."""
    changed = array.astype(object) if array.dtype.kind in "US" else array.copy()
    flat = changed.reshape(len(changed), -1)
    flat[:, flat.shape[1] // 2 if element is None else element] = value
    return changed


def _known(
    original: _Original, own: Array, place: tuple[str, int | None], values: Sequence[Any]
) -> dict[str, Any] | str | None:
    """The rule of one column of categories; None where the original takes any, and a note where it does not and which
    it takes is not known."""
    texts = own.dtype.kind not in "biuf"
    values = [value for value in values if isinstance(value, str if texts else int | float) and value == value]
    new = "a category that nobody knows" if texts else 2 * max([0, *values]) + 1
    if not (refusal := original.refusal(place, new if texts else own.dtype.type(new))):
        return None
    kind = re.search(r"\((\w+): ", refusal)  # not its sentence, which names the value that was asked for
    reason = _ANY_OTHER + (f" ({kind[1]})" if kind else "")
    where = repr(place[0]) + (f", column {place[1]}" if place[1] is not None else "")
    if len(values) > _MOST_VALUES:
        return f"{where} has {len(values)} categories, and any other value is answered too, which the original refuses"
    stored = [value if texts else own.dtype.type(value).item() for value in values]
    column = {value for value in own.reshape(len(own), -1)[:, place[1] or 0].tolist() if value == value}
    taken = original.taken_of(place, stored) if column <= set(stored) else []
    if not column <= set(taken):
        return f"the original refuses some values of {where}, and which is not known: they are answered"
    columns = None if place[1] is None else [place[1]]
    return {"input": place[0], "columns": columns, "values": taken, "reason": reason}


def _whole_numbers(original: _Original, samples: Samples) -> list[str]:
    """Inputs of whole numbers."""
    return [
        spec.name
        for spec in original.session.signature.inputs
        if spec.name in samples.inputs
        and samples.inputs[spec.name].dtype.kind in "iu"
        and samples.inputs[spec.name].size
        and not spec.name.startswith(CACHE_INPUTS)
    ]


def _limits(original: _Original, samples: Samples) -> list[dict[str, Any]]:
    """The rules of inputs of whole numbers."""
    if not (inputs := _whole_numbers(original, samples)):
        return []
    far = [sign * step for step in _STEPS for sign in (1, -1)]
    if not any(original.refuses_any({name: _held(value, samples.inputs[name]) for name in inputs}) for value in far):
        return []
    rules = []
    for name in inputs:
        rules += _limits_of(original, name, samples.inputs[name])
    return rules


def _wide(original: _Original, samples: Samples, rules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What takes numbers of more than 32 bits, as `find_taken` lists it."""
    found = []
    for name in _whole_numbers(original, samples):
        own = samples.inputs[name]
        limited = [rule["columns"] for rule in rules if rule["input"] == name and rule.get("most", 0) is not None]
        if own.dtype.name not in _WIDE or None in limited or not _is_narrow(own):
            continue
        values = [value for value in (_WIDE[own.dtype.name], -_WIDE[own.dtype.name]) if value == _held(value, own)]
        width = own[0].size
        columns = sorted(set(range(width)).difference(*limited))
        asked = [value for value in values if columns and original.takes((name, columns), value)]
        if asked:
            least = int(_INT32.min) if own.dtype.kind == "i" else 0
            where = None if len(columns) == width else columns
            found.append({"input": name, "columns": where, "least": least, "most": int(_INT32.max), "asked": asked})
    return found


def _is_narrow(array: Array) -> bool:
    return int(array.min()) >= _INT32.min and int(array.max()) <= _INT32.max


def _held(value: int, array: Array) -> int:
    """The number, or the one next to it that the array's type holds."""
    limits = np.iinfo(array.dtype.name)
    return min(max(value, int(limits.min)), int(limits.max))


def _limits_of(original: _Original, name: str, own: Array) -> list[dict[str, Any]]:
    """The rules of one input: of its columns, or of all of it."""
    flat = own.reshape(len(own), -1)
    width = flat.shape[1]
    found = _range(original, (name, None), flat)
    if found is not None and _same_at_all(original, name, _places(original, name, own), found):
        return [_rule(name, None, found)]
    if own.ndim != 2 or not 1 < width <= _MOST_COLUMNS or original.dynamic[name]:
        return []
    ranges: list[tuple[int | None, int | None, str] | None] = []
    for column in range(width):
        place, before = (name, column), ranges[-1] if ranges else None
        known = before is not None and _same(original, place, before)
        ranges.append(before if known else _range(original, place, flat[:, column]))
    alike: dict[tuple[int | None, int | None, str], list[int]] = {}
    for column, found in enumerate(ranges):
        if found is not None:
            alike.setdefault(found, []).append(column)
    return [_rule(name, None if len(columns) == width else columns, limits) for limits, columns in alike.items()]


def _places(original: _Original, name: str, own: Array) -> list[int]:
    """Elements of a row that are looked at for all: some of a long axis, or of one of any size, and each of a short
    one, which may be columns with a table each."""
    shape, places = own.shape[1:], set()
    for axis, size in enumerate(shape):
        short = size <= _SHORT and axis + 1 not in original.dynamic[name]
        at = [dimension // 2 for dimension in shape]
        for index in range(size) if short else np.linspace(0, size - 1, _PLACES).astype(int):
            at[axis] = int(index)
            places.add(int(np.ravel_multi_index(at, shape)))
    return sorted(places) if len(places) > 1 else []


def _rule(name: str, columns: list[int] | None, limits: tuple[int | None, int | None, str]) -> dict[str, Any]:
    reason = limits[2].replace("the original refuses it", _ANY_OTHER)
    return {"input": name, "columns": columns, "least": limits[0], "most": limits[1], "reason": reason}


def _range(original: _Original, place: tuple[str, int | None], own: Array) -> tuple[int | None, int | None, str] | None:
    """From where to where it takes whole numbers, and why no others; None where there is no limit, or it refuses there
    what the samples hold elsewhere."""
    low, high = int(own.min()), int(own.max())
    if original.refusal(place, low) or original.refusal(place, high):
        return None
    least, why_less = _last(original, place, low, -1, own)
    most, why_more = _last(original, place, high, 1, own)
    least = None if least is not None and not original.is_limit(place, least, -1) else least
    most = None if most is not None and not original.is_limit(place, most, 1) else most
    return None if least is None and most is None else (least, most, why_more or why_less)


def _last(
    original: _Original, place: tuple[str, int | None], start: int, sign: int, own: Array
) -> tuple[int | None, str]:
    """The last number that it takes, from `start` on in that direction, and why it refuses the next; None where it
    takes all."""
    taken, refused, reason = start, None, ""
    for step in _STEPS:
        value = _held(sign * step, own)
        if (value - taken) * sign <= 0:
            continue
        reason = original.refusal(place, value)
        if original.is_slow:
            return None, ""
        if reason:
            refused = value
            break
        taken = value
    if refused is None:
        return None, ""
    while abs(refused - taken) > 1:
        middle = (taken + refused) // 2
        if said := original.refusal(place, middle):
            refused, reason = middle, said
        else:
            taken = middle
    return taken, reason


def _same_at_all(original: _Original, name: str, places: list[int], limits: tuple[int | None, int | None, str]) -> bool:
    """`_same` at each of these places. That it takes the limits is asked for at all of them at once: mostly it does."""
    for limit, sign in ((limits[0], -1), (limits[1], 1)):
        if limit is None or not places:
            continue
        if original.refusal((name, places), limit) and any(original.refusal((name, at), limit) for at in places):
            return False
        if not all(original.refusal((name, at), limit + sign) for at in places):
            return False
    return True


def _same(original: _Original, place: tuple[str, int | None], limits: tuple[int | None, int | None, str]) -> bool:
    """Whether it has the same limits at another place."""
    for limit, sign in ((limits[0], -1), (limits[1], 1)):
        if limit is not None and (original.refusal(place, limit) or not original.refusal(place, limit + sign)):
            return False
    return True
