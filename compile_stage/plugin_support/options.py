"""What a backend's options in a policy may be, and the sentence that refuses another value.

A backend lists its options once, as `{"freezing": FLAG, "weights": OneOf("constants", "file")}`, and asks
`refuse_options` in `refuse_target`, so that every backend says the same of the same mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from compile_stage.core.errors import UsageError
from compile_stage.core.records import Target, record


class Option(Protocol):
    """What one option may be."""

    def refusal(self, value: Any) -> str | None:
        """None when the option may be `value`, or the rest of the sentence that begins with the option's name."""
        ...


class OneOf:
    """One of some words; the first is what holds when a policy says nothing."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def refusal(self, value: Any) -> str | None:
        return None if value in self.words else f"can't be {value!r}; it can be {', '.join(self.words)}"


@record
class Number:
    """A number from `low` to `high`, both included, and a whole one unless `whole` is False."""

    low: float
    high: float | None = None
    whole: bool = True

    def refusal(self, value: Any) -> str | None:
        is_number = type(value) is int or (type(value) is float and not self.whole)
        if is_number and self.low <= value and (self.high is None or value <= self.high):
            return None
        what = "a whole number" if self.whole else "a number"
        span = f"of at least {self.low:g}" if self.high is None else f"from {self.low:g} to {self.high:g}"
        return f"must be {what} {span}, not {value!r}"


@record
class PowerOfTwo:
    """A power of two from `low` to `high`, both included."""

    low: int
    high: int

    def refusal(self, value: Any) -> str | None:
        if type(value) is int and self.low <= value <= self.high and value & (value - 1) == 0:
            return None
        return f"must be a power of two from {self.low} to {self.high}, not {value!r}"


@record
class Like:
    """A text of a pattern; `example` shows it."""

    pattern: re.Pattern[str]
    example: str

    def refusal(self, value: Any) -> str | None:
        if isinstance(value, str) and self.pattern.fullmatch(value):
            return None
        return f"can't be {value!r}; it must look like {self.example}"


@record
class OfType:
    """A value of a type; `words` say which."""

    type: type
    words: str

    def refusal(self, value: Any) -> str | None:
        return None if isinstance(value, self.type) else f"must be {self.words}, not {value!r}"


FLAG = OfType(type=bool, words="true or false")
TEXT = OfType(type=str, words="a text")
MAPPING = OfType(type=Mapping, words="a mapping")
CHECKED_ELSEWHERE = OfType(type=object, words="anything")
"""For an option whose values depend on others': the backend checks it itself."""


def refuse_options(backend: str, allowed: Mapping[str, Option], target: Target) -> str | None:
    """The reason when `target` gives `backend` an option that it doesn't have, or a value that the option can't be.

    Args:
        allowed: What each option of the backend may be.
    """
    for key, value in target.options.get(backend, {}).items():
        if key not in allowed:
            return f"{backend} has no option {key!r}; it has {', '.join(allowed) or 'none'}"
        if (reason := allowed[key].refusal(value)) is not None:
            return f"{backend}'s option {key} {reason}"
    return None


def valid_options(backend: str, allowed: Mapping[str, Option], target: Target) -> Mapping[str, Any]:
    """The options that `target` gives `backend`.

    Raises:
        UsageError: One of them is refused.
    """
    if (reason := refuse_options(backend, allowed, target)) is not None:
        raise UsageError(reason)
    return target.options.get(backend, {})
