"""Gates that an artifact fails on because of what the original does: the reason of each says so, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compile_stage.core.records import Check, Outcome
from compile_stage.measure.structure import STRUCTURE

_CAUSE = "; the cause is the original: "


def blame_original(checks: Sequence[Check], cause: str, but_at: int = 0) -> tuple[Check, ...]:
    """With the cause behind the reason of each gate that failed. What does not depend on numbers, such as the names of
    outputs, has another cause.

    Args:
        cause: What the original does, and what to do; empty where it does nothing.
        but_at: A batch size at which that explains nothing; 0 for none.
    """
    return tuple(
        replace(check, reason=f"{check.reason}{_CAUSE}{cause}")
        if cause
        and check.outcome is Outcome.FAIL
        and check.gate.metric not in STRUCTURE
        and (not but_at or check.batch_size != but_at)
        else check
        for check in checks
    )


def cause_of(check: Check) -> str:
    """What `blame_original` put behind the check's reason; empty where it put nothing."""
    _, found, cause = check.reason.partition(_CAUSE)
    return found + cause
