"""Names, dtypes and shapes of a model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.generic]
    Batch: TypeAlias = Mapping[str, Array]  # tensor name → array; axis 0 is the batch

Dim: TypeAlias = int | str

CACHE_INPUTS = "past_key_values."
"""What the names of a cache's inputs begin with (`core.generation`); a cache may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor.

    Attributes:
        name: As the source model calls it; kept through every step.
        dtype: A NumPy dtype name: `float32`, `int64`, `bool`, ...; `str` for strings.
        shape: A fixed size is an int, a symbolic dimension is a string (`batch`, `sequence`).
            Axis 0 is the batch.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    @property
    def batch(self) -> Dim:
        """The batch dimension: a symbol when any batch size is taken, an int when the export fixed it."""
        return self.shape[0] if self.shape else 1

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Inputs and outputs, in the model's own order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input(self, name: str) -> TensorSpec:
        """The input of that name. Raises KeyError if there is none."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise KeyError(name)

    @property
    def fixed_batch(self) -> int | None:
        """The one batch size the model takes, or None when the batch is symbolic."""
        sizes = {spec.batch for spec in self.inputs if isinstance(spec.batch, int)}
        return min(sizes) if sizes else None

    def refuse_batch_sizes(self, wanted: Sequence[int]) -> str | None:
        """None when the model takes batches of all these sizes, or the first that it does not take."""
        fixed = self.fixed_batch
        wrong = [size for size in wanted if fixed is not None and size != fixed]
        return f"the model takes batches of {fixed} only, and the target asks for {wrong[0]}" if wrong else None

    def refuse(self, batch: Batch) -> str | None:
        """None when the arrays fit the inputs by name, dtype and shape, or the first reason why they don't."""
        last = _LAST.get(id(self))
        if last is not None and last[0] is self and has_form(batch, last[1]):
            return None
        try:
            form = form_of(batch)
            fitted = _FITTING.get((id(self), form)) is self
        except (AttributeError, TypeError):  # not arrays, which is what the reason says
            return self._refuse(batch)
        if not fitted:
            if (reason := self._refuse(batch)) is not None:
                return reason
            if len(_FITTING) >= _MOST_FITTING:
                _FITTING.clear()
                _LAST.clear()
            _FITTING[id(self), form] = self
        _LAST[id(self)] = self, form
        return None

    def _refuse(self, batch: Batch) -> str | None:
        wanted = [spec.name for spec in self.inputs]
        if missing := [name for name in wanted if name not in batch]:
            return f"input {missing[0]!r} is missing; the model takes {', '.join(wanted)}"
        if unknown := [name for name in batch if name not in wanted]:
            return f"the model has no input {unknown[0]!r}; it takes {', '.join(wanted)}"
        sizes: dict[str, int] = {}
        for spec in self.inputs:
            array = batch[spec.name]
            if not hasattr(array, "dtype") or not hasattr(array, "__len__"):
                return f"input {spec.name!r} must be an array, not {type(array).__name__}"
            given = _dtype_name(array.dtype)
            if given != spec.dtype:
                return f"input {spec.name!r} must be {spec.dtype}, not {given}"
            fits = len(array.shape) == len(spec.shape) and all(
                size == (dim if isinstance(dim, int) else sizes.setdefault(dim, size))
                for size, dim in zip(array.shape, spec.shape, strict=True)
            )
            if not fits:
                return f"an array of shape {list(array.shape)} does not fit {spec}{_disagreement(array, spec, sizes)}"
            if 0 in array.shape and not spec.name.startswith(CACHE_INPUTS):
                return f"input {spec.name!r} is empty: its shape is {list(array.shape)}"
        return None


def _disagreement(array: Array, spec: TensorSpec, sizes: Mapping[str, int]) -> str:
    """`, since batch is 3 before it`, where it would fit alone."""
    if len(array.shape) != len(spec.shape):
        return ""
    pairs = list(zip(array.shape, spec.shape, strict=True))
    if any(isinstance(dim, int) and size != dim for size, dim in pairs):
        return ""
    other = next(dim for size, dim in pairs if isinstance(dim, str) and sizes.get(dim, size) != size)
    return f", since {other} is {sizes[other]} before it"


Form: TypeAlias = "tuple[tuple[str, Any, tuple[int, ...]], ...]"  # name, dtype and shape of each array

_MOST_FITTING = 256
_FITTING: dict[tuple[int, Form], Signature] = {}
"""Forms of calls that fitted, by the signature's id; the signature is kept, so that its id stays its own. To look at
each dimension again takes 2 µs of a call, which may take 60."""

_LAST: dict[int, tuple[Signature, Form]] = {}
"""The form of the last call that fitted, by the signature's id: mostly the next has the same, and comparing costs less
than making it."""


def form_of(batch: Batch) -> Form:
    """Raises AttributeError or TypeError for a batch that does not hold arrays."""
    return tuple([(name, array.dtype, array.shape) for name, array in batch.items()])


def has_form(batch: Batch, form: Form | None) -> bool:
    """Whether what was found of a batch by its form holds of this one too; for None, False. Also False where it is not
    seen at once: dtypes are mostly the same object."""
    if form is None or len(batch) != len(form):
        return False
    try:
        for name, dtype, shape in form:
            array = batch[name]
            if array.dtype is not dtype or array.shape != shape:
                return False
    except (KeyError, AttributeError, TypeError):
        return False
    return True


@lru_cache(maxsize=64)
def _dtype_name(dtype: Any) -> str:
    """Kept, since NumPy makes the name anew each time, which takes as long as all other checks of a call."""
    return "str" if dtype.kind in "OUST" else str(dtype.name)
