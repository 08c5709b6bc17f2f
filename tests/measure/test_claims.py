"""Answers that were in 16 bits once are found in whatever floating type they come."""

from __future__ import annotations

import numpy as np
import pytest

from compile_stage.core.records import Outcome
from compile_stage.measure.claims import check_claim

_BASELINE = np.linspace(0.1, 9.7, 40).astype(np.float32).reshape(4, 10)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_half_precision_is_found_in_every_float_type(kind: type[np.floating]) -> None:
    """Else a backend that ran in fp16 passes as fp32, because its answers come as float16, or as float64."""
    own = _BASELINE.astype(np.float16).astype(kind)

    check = check_claim({"y": own}, {"y": _BASELINE}, 1)

    assert check.outcome is Outcome.FAIL
    assert "'y' has 11 significant bits at most, as fp16 has" in check.reason


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_single_and_double_precision_pass(kind: type[np.floating]) -> None:
    """Else a right artifact is rejected for the type of its answers, also where float32 can't hold all of them."""
    own = _BASELINE.astype(kind)
    own[0, 0] = np.finfo(kind).max

    assert check_claim({"y": own}, {"y": _BASELINE}, 1).outcome is Outcome.PASS


def test_an_original_in_half_precision_asks_for_no_more() -> None:
    """Else no artifact of a model that answers in float16 could pass."""
    half = _BASELINE.astype(np.float16)

    assert check_claim({"y": half}, {"y": half}, 1).outcome is Outcome.PASS
