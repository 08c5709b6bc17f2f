"""What a session does with the arrays that it is given."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from compile_stage.plugin_support.sessions import in_place_or_copied

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("given", [ROWS, ROWS[:1], ROWS[1], ROWS.reshape(1, 3, 4), np.zeros((), np.float32)])
def test_what_lies_row_by_row_is_not_copied(given: NDArray[np.float32]) -> None:
    """Broken: every call copies its input."""
    assert in_place_or_copied(given) is given


@pytest.mark.parametrize(
    "given",
    [
        ROWS[::-1],
        ROWS[:1][::-1],
        ROWS.T,
        ROWS[:, ::2],
        np.lib.stride_tricks.as_strided(ROWS, (1, 4), (7, 4)),
        np.broadcast_to(ROWS, ROWS.shape),
    ],
    ids=["reversed", "one row reversed", "transposed", "every other", "a stride between numbers", "read-only"],
)
def test_what_a_tensor_can_not_lie_in_is_copied(given: NDArray[np.float32]) -> None:
    """NumPy calls one reversed row contiguous, and PyTorch refuses it. Broken: a published model refuses a picture that
    was flipped along an axis of one element, or one reversed row."""
    taken = in_place_or_copied(given)
    np.testing.assert_array_equal(taken, given)
    assert taken.flags.c_contiguous
    assert taken.flags.writeable
    assert all(stride > 0 and stride % 4 == 0 for stride in taken.strides)
