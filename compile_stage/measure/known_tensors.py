"""What is known of a tensor while a graph is followed row by row (`measure.graph_rows`): its shape, its values where
they are constant, and which rows of the batch each element may depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from compile_stage.plugin_support import onnx_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import TensorProto, TypeProto

    from compile_stage.core.tensors import Array

    Shape: TypeAlias = tuple[int, ...]
    Rows: TypeAlias = NDArray[np.uint8]
    """Of a tensor: for each element the rows that it may depend on, bit i being row i. As many axes as the tensor; of
    size 1 along one on which it does not depend."""

FEW = 1 << 16  # elements of a constant whose values are looked at
NO_ROWS = np.zeros((), np.uint8)


class NotFollowedError(Exception):
    """Nothing is shown of the graph; the text says why, and goes on from a sentence about the graph."""


@dataclass(frozen=True)
class Known:
    """What is known of a tensor.

    Attributes:
        kind: TensorProto.DataType.
        rows: See `Rows`.
        partly: Values of which those hold whose elements depend on no row: numbers of rows beside places within them.
        why: The node where elements first depended on several rows; empty where none does.
        filler: Of words: what texts with fewer words than the batch's longest are filled up with. See `word_rows`.
    """

    shape: Shape
    kind: int
    rows: Rows
    value: Array | None = None
    held: TensorProto | None = None
    why: str = ""
    partly: Array | None = None
    filler: bytes | None = None

    @classmethod
    def of(cls, value: Array, kind: int | None = None) -> Known:
        """A constant."""
        from onnx import helper

        kind = helper.np_dtype_to_tensor_dtype(value.dtype) if kind is None else kind
        return cls(value.shape, kind, NO_ROWS.reshape([1] * value.ndim), value)

    @classmethod
    def weight(cls, tensor: TensorProto) -> Known:
        """A constant that is read when its values are asked for."""
        shape = tuple(tensor.dims)
        return cls(shape, tensor.data_type, NO_ROWS.reshape([1] * len(shape)), held=tensor)

    @classmethod
    def stacked(cls, parts: Sequence[Known], axis: int) -> Known:
        """All parts, of one shape, along a new axis."""
        if len({part.shape for part in parts}) > 1:
            raise NotFollowedError("a loop in it makes parts of several sizes")
        first = parts[0]
        axis %= len(first.shape) + 1
        shape = (*first.shape[:axis], len(parts), *first.shape[axis:])
        rows = np.stack([np.broadcast_to(part.rows, part.shape) for part in parts], axis)
        return cls(shape, first.kind, compact(rows), why=next((part.why for part in parts if part.why), ""))

    @property
    def is_small(self) -> bool:
        """Its values may be a shape, axes or places."""
        return not self.rows.any() and prod(self.shape) <= FEW

    def values(self) -> Array | None:
        """Of a small constant; None where they are not known."""
        if self.value is None and self.held is not None and prod(self.shape) <= FEW:
            read: Array = onnx_weights.values(self.held)
            return read
        return self.value

    def tensor(self) -> TensorProto | None:
        """The same as ONNX has it."""
        from onnx import numpy_helper

        values = self.values()
        return None if values is None or values.dtype.kind not in "iufb" else numpy_helper.from_array(np.array(values))

    def declared(self) -> TypeProto:
        """Its type and shape."""
        from onnx import helper

        return helper.make_tensor_type_proto(self.kind, self.shape)

    def full(self) -> Rows:
        """The rows of every element."""
        return np.broadcast_to(self.rows, self.shape)

    def full_along(self, axis: int) -> Rows:
        """The rows, with all elements of one axis."""
        shape = list(self.rows.shape)
        shape[axis] = self.shape[axis]
        return np.broadcast_to(self.rows, shape)

    def at(self, axis: int, place: int) -> Known:
        """One slice of an axis, without that axis."""
        axis %= len(self.shape)
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        values = self.values()
        part = values.take([place], axis).reshape(shape) if values is not None else None
        rows = self.full_along(axis).take([place], axis)
        return Known(shape, self.kind, rows.reshape(rows.shape[:axis] + rows.shape[axis + 1 :]), part, why=self.why)

    def flipped(self, axis: int) -> Known:
        """Backwards along an axis."""
        return Known(self.shape, self.kind, np.flip(self.rows, axis), why=self.why)


def compact(rows: Rows) -> Rows:
    """Of size 1 along axes on which nothing depends."""
    for axis in range(rows.ndim):
        if rows.shape[axis] > 1 and bool(np.all(rows == (first := rows.take([0], axis)))):
            rows = first
    return rows


def reduced(rows: Rows, axes: Iterable[int]) -> Rows:
    """All elements along the axes together, in an axis of size 1."""
    together: Rows = np.bitwise_or.reduce(rows, axis=tuple(axes), keepdims=True, dtype=np.uint8)
    return together
