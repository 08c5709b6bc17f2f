"""A weight matrix by blocks: in 4 bits by rounding to nearest or half-quadratic quantisation, in 8 bits by rounding.

A block is `size` neighbours along the summed axis, with a scale and (asymmetric) a zero point of its own: w ≈ scale ·
(q - zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

METHODS = ("hqq", "rtn")

# Half-quadratic quantisation (Badri and Shaji, 2023): its norm, its penalty and how the penalty grows. Errors are
# counted in steps of the block, so that the numbers mean the same for weights of any magnitude.
_NORM, _PENALTY, _GROWTH, _ROUNDS = 0.7, 10.0, 1.01, 8  # of 20 rounds the distributions of a decoder are no nearer

_CHUNK = 100_000  # weights at a time, so that their few copies stay in the processor's cache


@dataclass(frozen=True)
class Blocks:
    """A quantised matrix [K, N].

    Attributes:
        values: uint8 [K, N], 0 to 15; or int8, when symmetric: -8 to 7, or -127 to 127 in 8 bits.
        scale: float32 [K / size, N], positive.
        zero: As `values`, [K / size, N]; None when symmetric.
        bits: 4 or 8.
    """

    values: Array
    scale: Array
    zero: Array | None
    bits: int = 4

    def dequantize(self) -> Array:
        """What a runtime computes with: float32 [K, N]."""
        size = len(self.values) // len(self.scale)
        zero = 0 if self.zero is None else np.repeat(self.zero.astype(np.float32), size, axis=0)
        return (self.values.astype(np.float32) - zero) * np.repeat(self.scale, size, axis=0)


def quantize(weight: Array, size: int, symmetric: bool, method: str) -> Blocks:
    """Quantise to 4 bits a finite float32 matrix [K, N], K a multiple of `size`, summed along axis 0. Deterministic."""
    rows, columns = weight.shape
    step = max(1, _CHUNK // rows)
    parts = [
        _quantize(weight[:, start : start + step].reshape(rows // size, size, -1), symmetric, method)
        for start in range(0, columns, step)
    ]
    values, scale, zero = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    kind = np.int8 if symmetric else np.uint8
    return Blocks(
        values=values.reshape(rows, columns).astype(kind),
        scale=scale[:, 0].astype(np.float32),
        zero=None if symmetric else zero[:, 0].astype(kind),
    )


def round_to_bytes(weight: Any, size: int, levels: int) -> Blocks:
    """Round to 8 bits a finite float32 matrix [K, N], K a multiple of `size`, summed along axis 0: symmetric, `levels`
    steps to a block's largest magnitude, at most 127."""
    rows, columns = weight.shape
    values, scale = np.empty((rows, columns), np.int8), np.empty((rows // size, columns), np.float32)
    step = max(1, _CHUNK // rows)
    for start in range(0, columns, step):
        part = weight[:, start : start + step].reshape(rows // size, size, -1)
        steps = _positive(np.abs(part).max(axis=1, keepdims=True) / np.float32(levels))
        values[:, start : start + step] = np.rint(part / steps).reshape(rows, -1)
        scale[:, start : start + step] = steps[:, 0]
    return Blocks(values=values, scale=scale, zero=None, bits=8)


def pack(values: Array) -> bytes:
    """Two to a byte, the first in the low half, as ONNX stores 4-bit types."""
    halves = values.ravel().astype(np.uint8) & 15
    if halves.size % 2:
        halves = np.append(halves, np.uint8(0))
    return bytes((halves[0::2] | (halves[1::2] << 4)).tobytes())


def _quantize(weight: Array, symmetric: bool, method: str) -> tuple[Array, Array, Array]:
    """Blocks [B, size, n] → values, scales [B, 1, n] and zero points [B, 1, n]."""
    weight = weight.astype(np.float32)
    scale, zero = _symmetric_range(weight) if symmetric else _full_range(weight)
    if method == "hqq":
        scale, zero = _fit(weight, scale, zero, symmetric)
    return _round(weight, scale, zero, symmetric), scale, zero


def _full_range(weight: Array) -> tuple[Array, Array]:
    """The block's range, widened to hold zero, in 15 steps."""
    low = np.minimum(weight.min(axis=1, keepdims=True), 0)
    high = np.maximum(weight.max(axis=1, keepdims=True), 0)
    scale = _positive((high - low) / np.float32(15))
    return scale, np.clip(np.rint(-low / scale), 0, 15).astype(np.float32)


def _symmetric_range(weight: Array) -> tuple[Array, Array]:
    """7 steps to the largest magnitude."""
    scale = _positive(np.abs(weight).max(axis=1, keepdims=True) / np.float32(7))
    return scale, np.zeros_like(scale)


def _fit(weight: Any, scale: Any, zero: Any, symmetric: bool) -> tuple[Array, Array]:
    """Scale and zero point of the smallest error in the norm, by block; at worst those that were given.

    Half-quadratic splitting: take out what a soft threshold calls an outlier of the error, fit the rest by least
    squares, raise the penalty. Unlike in the paper, zero points stay whole, since ONNX stores them as the values' own
    type, and the scale is fitted too.
    """
    best: Any = np.full_like(scale, np.inf)
    best_scale, best_zero = scale, zero
    penalty = np.float32(_PENALTY)
    for _ in range(_ROUNDS + 1):
        values: Any = _round(weight, scale, zero, symmetric)
        error: Any = weight / scale - (values - zero)
        magnitude: Any = np.maximum(np.abs(error), np.float32(1e-8))
        slope: Any = magnitude ** np.float32(_NORM - 1)
        errors: Any = np.sum(magnitude * slope, axis=1, keepdims=True) * scale ** np.float32(_NORM)
        better: Any = errors < best
        best = np.where(better, errors, best)
        best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, zero, best_zero)
        # The norm's proximal operator, approximately: of an error, what is small becomes zero, what is large stays.
        outlier: Any = np.sign(error) * np.maximum(magnitude - slope / penalty, 0)
        kept: Any = weight - scale * outlier
        if not symmetric:
            zero = np.clip(np.rint(np.mean(values - kept / scale, axis=1, keepdims=True)), 0, 15).astype(np.float32)
        offset: Any = values - zero
        energy: Any = np.sum(offset * offset, axis=1, keepdims=True)
        overlap: Any = np.sum(kept * offset, axis=1, keepdims=True)
        fitted: Any = np.divide(overlap, np.maximum(energy, 1))
        scale = np.where(fitted > 0, fitted, scale).astype(np.float32)
        penalty = penalty * np.float32(_GROWTH)
    return best_scale, best_zero


def _round(weight: Any, scale: Any, zero: Any, symmetric: bool) -> Array:
    low, high = (-8, 7) if symmetric else (0, 15)
    values: Array = np.clip(np.rint(weight / scale + zero), low, high)
    return values


def _positive(scale: Array) -> Array:
    """A block of zeros has any scale; one of denormals the smallest that does not divide by zero."""
    positive: Array = np.where(scale > np.float32(1e-30), scale, np.float32(1))
    return positive
