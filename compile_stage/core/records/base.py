"""What every record is made with: frozen, slotted, keyword-only dataclasses of plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, TypeAlias, TypeVar, dataclass_transform

T = TypeVar("T")
JsonMap: TypeAlias = Mapping[str, Any]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Frozen, slotted, keyword-only: the only kind of dataclass that crosses a step.

    All share what compares and shows them. `dataclass` compiles functions of its own for each class, which took a
    third of the time that these classes take to import, in the program and in each of its workers.
    """
    make: Callable[[type[T]], type[T]] = dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
    made: Any = make(cls)
    compared = [one.name for one in fields(made) if one.compare]
    made._compared = staticmethod(attrgetter(*compared) if compared else _nothing)
    made.__eq__, made.__hash__, made.__repr__ = _is_equal, _hash, _repr
    return made  # type: ignore[no-any-return]


def _nothing(_: object) -> None:
    """What is compared of a record without fields."""


def _is_equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._compared(self) == self._compared(other)


def _hash(self: Any) -> int:
    return hash(self._compared(self))


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{self.__class__.__qualname__}({shown})"
