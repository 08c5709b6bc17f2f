"""Does an array of samples fit an input of the model: its dtype, without loss, and its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.errors import PolicyError
from compile_stage.core.records import DataSpec, ShapeRange
from compile_stage.core.tensors import TensorSpec

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


def convert(spec: DataSpec, tensor: TensorSpec, array: Array, notes: list[str]) -> Array:
    """To the input's dtype, without loss. Rounding to a narrower float is the one exception, since files rarely hold
    anything but float64, and it is noted. Raises PolicyError where a value would be another."""
    if array.ndim == 1 and len(tensor.shape) == 2 and tensor.shape[1] in (1, *_symbols(tensor)):
        array = array[:, None]
    if tensor.dtype == "str":
        if array.dtype.kind not in "US":
            raise _misfit(spec, tensor, f"is {array.dtype}, and text is wanted")
        return array.astype(str)
    wanted = _dtype(spec, tensor)
    if array.dtype == wanted:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "biuf":
        raise _misfit(spec, tensor, f"is {array.dtype}, which is no number")
    with np.errstate(all="ignore"):  # what is lost is found by the comparison below
        converted = array.astype(wanted)
        if array.dtype.kind == "f" and wanted.kind == "f":
            kept = np.isfinite(converted) == np.isfinite(array)
            if bool(np.any(kept & (converted.astype(array.dtype) != array) & np.isfinite(array))):
                notes.append(f"input {tensor.name!r} was rounded from {array.dtype} to {wanted}")
        else:
            # Through the wider of both there and back: a value that changed on the way was not representable.
            back = converted.astype(array.dtype)
            kept = (back == array) & (np.less(converted, 0) == np.less(array, 0))
            if wanted.kind == "f":  # infinity, or 2^63, comes back as a whole number that it is not
                kept &= _in_range(converted, array.dtype)
    if not bool(np.all(kept)):
        first = array[~kept].flat[0]
        raise _misfit(spec, tensor, f"is {array.dtype} and holds {first}, which {wanted} can't")
    return np.ascontiguousarray(converted)


def _in_range(floats: Array, whole: np.dtype[Any]) -> NDArray[np.bool_]:
    """Which floats lie between the least and the largest value of a type of whole numbers."""
    least, largest = (0, 1) if whole.kind == "b" else (int(np.iinfo(whole).min), int(np.iinfo(whole).max))
    top = float(largest) if int(float(largest)) == largest else float(np.nextafter(float(largest), 0))
    values = floats.astype(np.float64)
    return np.asarray((values >= least) & (values <= top))


def _dtype(spec: DataSpec, tensor: TensorSpec) -> np.dtype[Any]:
    try:
        return np.dtype(tensor.dtype)
    except TypeError as error:
        raise _misfit(spec, tensor, f"is wanted as {tensor.dtype}, which samples can't have") from error


def _symbols(tensor: TensorSpec) -> tuple[str, ...]:
    return tuple(dim for dim in tensor.shape if isinstance(dim, str))


def check_shape(
    spec: DataSpec,
    tensor: TensorSpec,
    shape: tuple[int, ...],
    allowed: ShapeRange | None,
    symbols: dict[str, tuple[str, int]],
) -> None:
    """Is it the input's shape, within what the policy promises?

    Args:
        symbols: Symbolic dimension → the input that bound it first and its size; what this input binds is added.

    Raises:
        PolicyError: It is not.
    """

    def text(sizes: Sequence[object]) -> str:
        return f"[{', '.join(['batch', *map(str, sizes)])}]"

    wanted = tensor.shape[1:]
    fixed_fit = len(shape) == len(tensor.shape) and all(
        isinstance(want, str) or want == size for want, size in zip(wanted, shape[1:], strict=True)
    )
    if not fixed_fit:
        raise _misfit(spec, tensor, f"has the shape {text(shape[1:])}, and {text(wanted)} is wanted")
    for want, size in zip(wanted, shape[1:], strict=True):
        if isinstance(want, str):
            other, bound = symbols.setdefault(want, (tensor.name, size))
            if bound != size:
                raise _misfit(spec, tensor, f"has {size} for {want!r}, and input {other!r} has {bound}")
    if allowed is not None:
        for low, size, high in zip(allowed.min[1:], shape[1:], allowed.max[1:], strict=False):
            if not low <= size <= high:
                raise _misfit(
                    spec,
                    tensor,
                    f"has the shape {text(shape[1:])}, outside the policy's {text(allowed.min[1:])} to "
                    f"{text(allowed.max[1:])}",
                    fix="correct the target's shapes, or give samples within them",
                )


def _misfit(spec: DataSpec, tensor: TensorSpec, what: str, fix: str = "") -> PolicyError:
    return PolicyError(
        f"the samples for input {tensor.name!r} don't fit the model: the array {what}",
        fix=fix or f"give an array that fits `{tensor}`",
        where=spec.source,
    )
