"""What every record is made with: frozen, slotted, keyword-only dataclasses of plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, dataclass_transform

T = TypeVar("T")
JsonMap: TypeAlias = Mapping[str, Any]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Frozen, slotted, keyword-only: the only kind of dataclass that crosses a step."""
    make: Callable[[type[T]], type[T]] = dataclass(frozen=True, slots=True, kw_only=True)
    return make(cls)
