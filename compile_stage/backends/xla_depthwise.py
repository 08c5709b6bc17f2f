"""Depthwise convolutions for XLA on a CPU, which has no kernel for them: it runs one as a general convolution, five to
fourteen times slower than a sum of shifted products (jaxlib 0.10.2, AVX-512, one thread). Needed to compile, not to
open."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

_LARGEST_WINDOW = 25  # products that are summed: 5 by 5; the program grows with it


def depthwise(name: str, args: Sequence[Any]) -> Callable[[], Any] | None:
    """What computes an operator that is a depthwise convolution, as a sum of shifted products that XLA makes one loop
    of; None for any other.

    Args:
        name: Of the operator, as PyTorch has it.
        args: JAX's arrays and plain values, as `aten.convolution` takes them: input [batch, channels, ...], weight
            [channels, 1, ...], bias [channels] or None, stride, padding, dilation, transposed, output padding, groups.
    """
    if name != "convolution" or len(args) != 9:
        return None
    image, weight, bias, stride, padding, dilation, transposed, _, groups = args
    window = weight.shape[2:]
    fits = groups == image.shape[1] == weight.shape[0] and groups > 1 and weight.shape[1] == 1
    if transposed or not fits or image.ndim != weight.ndim or math.prod(window) > _LARGEST_WINDOW:
        return None
    axes = len(window)
    steps = [_each(values, axes) for values in (stride, padding, dilation)]
    return lambda: _sum(image, weight, bias, *steps)


def _sum(
    image: Any, weight: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Any:
    from jax import lax, numpy

    window, channels = weight.shape[2:], image.shape[1]
    padded = numpy.pad(image, [(0, 0), (0, 0), *((size, size) for size in padding)])
    spans = [
        (size - reach * (width - 1) - 1) // step * step + 1
        for size, width, step, reach in zip(padded.shape[2:], window, stride, dilation, strict=True)
    ]
    column = (1, channels, *[1] * len(window))
    total = 0 if bias is None else bias.reshape(column)
    for place in product(*map(range, window)):
        first = [at * reach for at, reach in zip(place, dilation, strict=True)]
        last = [begin + span for begin, span in zip(first, spans, strict=True)]
        part = lax.slice(padded, (0, 0, *first), (*padded.shape[:2], *last), (1, 1, *stride))
        total = total + part * weight[(slice(None), 0, *place)].reshape(column)
    return total


def _each(values: Sequence[int], axes: int) -> list[int]:
    """One value for each axis; PyTorch gives a single one for all."""
    return list(values) * axes if len(values) == 1 else list(values)
