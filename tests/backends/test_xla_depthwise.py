"""Depthwise convolutions as sums of shifted products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compile_stage.backends.xla_depthwise import depthwise

SHAPES = [
    ((2, 4, 9, 8), (4, 1, 3, 3), [2, 1], [1, 1], [1, 1], True),
    ((2, 4, 9, 8), (4, 1, 3, 5), [1], [0], [1], False),
    ((2, 4, 10, 12), (4, 1, 3, 3), [3, 2], [2, 0], [2, 3], True),
    ((1, 3, 11), (3, 1, 3), [2], [2], [2], True),
]


@pytest.mark.parametrize("case", SHAPES, ids=["strides", "one value for all axes", "dilation", "one axis"])
def test_it_answers_as_pytorch_does(case: tuple[Any, ...]) -> None:
    """Broken: a stride, a dilation or the padding is taken for another axis, and every depthwise network is wrong."""
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed here")
    import torch

    size, window, stride, padding, dilation, has_bias = case
    torch.manual_seed(0)
    image, weight = torch.randn(size), torch.randn(window)
    bias = torch.randn(window[0]) if has_bias else None
    axes = len(window) - 2
    given = [values * axes if len(values) == 1 else values for values in (stride, padding, dilation)]
    wanted = torch.ops.aten.convolution.default(image, weight, bias, *given, False, [0] * axes, window[0])
    arrays = [None if one is None else jnp.asarray(one.numpy()) for one in (image, weight, bias)]
    run = depthwise("convolution", (*arrays, stride, padding, dilation, False, [0] * axes, window[0]))
    assert run is not None
    np.testing.assert_allclose(np.asarray(run()), wanted.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "transposed", "groups"),
    [((8, 1, 3, 3), False, 4), ((4, 4, 3, 3), False, 1), ((4, 1, 3, 3), True, 4), ((4, 1, 7, 7), False, 4)],
    ids=["two outputs a channel", "all channels", "transposed", "large window"],
)
def test_other_convolutions_are_left_to_xla(weight: tuple[int, ...], transposed: bool, groups: int) -> None:
    """Broken: channels are dropped, or a program grows by hundreds of products."""
    image = np.zeros((1, 4, 9, 9), np.float32)
    args = (image, np.zeros(weight, np.float32), None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    assert depthwise("convolution", args) is None
