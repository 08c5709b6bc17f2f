"""A call is refused unless it fits the signature, whatever was called before: forms that fitted are remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compile_stage.core.tensors import Signature, TensorSpec, form_of, has_form

X = np.zeros((2, 3), np.float32)
MASK = np.zeros((2, 4), np.int64)
GOOD = {"x": X, "mask": MASK}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": X}, "'mask' is missing"),
    ({**GOOD, "y": X}, "no input 'y'"),
    ({"x": X, "y": MASK}, "'mask' is missing"),
    ({**GOOD, "x": X.astype(np.float64)}, "must be float32"),
    ({**GOOD, "x": X[:, :2]}, "does not fit"),
    ({**GOOD, "x": X[:1]}, "does not fit"),
    ({**GOOD, "x": X[:0], "mask": MASK[:0]}, "empty"),
    ({**GOOD, "x": X.tolist()}, "must be an array"),
    ({**GOOD, "x": None}, "must be an array"),
]


def signature() -> Signature:
    inputs = (
        TensorSpec(name="x", dtype="float32", shape=("batch", 3)),
        TensorSpec(name="mask", dtype="int64", shape=("batch", "sequence")),
    )
    return Signature(inputs=inputs, outputs=())


@pytest.mark.parametrize(("batch", "reason"), WRONG)
def test_what_does_not_fit_is_refused_after_calls_that_did(batch: dict[str, Any], reason: str) -> None:
    """Broken: a wrong array would reach a runtime, which may read beyond its end."""
    one = signature()
    for _ in range(2):
        assert one.refuse(GOOD) is None
        assert reason in str(one.refuse(batch))


def test_forms_may_take_turns() -> None:
    one, longer = signature(), {"x": X, "mask": np.zeros((2, 9), np.int64)}
    for batch in (GOOD, longer, GOOD, dict(reversed(GOOD.items())), {"x": X.copy(), "mask": MASK.copy()}, longer):
        assert one.refuse(batch) is None


def test_another_signature_remembers_nothing_of_it() -> None:
    """Broken: ids of objects that are gone are given again."""
    for size in range(600):
        one = Signature(inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", size)),), outputs=())
        assert (one.refuse({"x": X}) is None) == (size == 3)


@pytest.mark.parametrize("batch", [{}, *(batch for batch, _ in WRONG)])
def test_another_form_is_checked_anew(batch: dict[str, Any]) -> None:
    """Broken: what is refused by its type or size would be answered after a call that was not."""
    assert has_form(dict(reversed(GOOD.items())), form_of(GOOD))
    assert not has_form(batch, form_of(GOOD))
    assert not has_form({}, None)
