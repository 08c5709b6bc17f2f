"""What is said of the original where an artifact fails for what it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.original_cause import blame_original, cause_of

FAILED = Check(
    gate=Gate(metric="cosine", limit=0.99, direction="at_least"),
    outcome=Outcome.FAIL,
    measured=0.9,
    reason="0.9 < 0.99",
    batch_size=8,
)


@pytest.mark.parametrize(
    ("check", "is_blamed"),
    [
        (FAILED, False),
        (replace(FAILED, batch_size=1), True),
        (replace(FAILED, batch_size=None), True),
        (replace(FAILED, batch_size=1, outcome=Outcome.PASS), False),
    ],
    ids=["the same batches", "smaller batches", "no size", "passed"],
)
def test_batches_that_both_had_are_no_cause(check: Check, is_blamed: bool) -> None:
    """Broken: int8 is off in the very batches that the original answered, and people are sent to mend the original."""
    (found,) = blame_original([check], "its answer depends on the rest of the batch", but_at=8)
    assert bool(cause_of(found)) == is_blamed
    (always,) = blame_original([check], "it does not repeat its answers")
    assert bool(cause_of(always)) == (check.outcome is Outcome.FAIL)
