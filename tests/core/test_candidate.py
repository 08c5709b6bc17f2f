"""How a candidate stands, in the words of `result.json`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import artifact, job, passed, verdict

from compile_stage.core.records import Candidate, Failure
from compile_stage.core.records.candidate import NOT_STARTED

PLANNED = Candidate(job=job())


@pytest.mark.parametrize(
    ("candidate", "state", "won_its_gates"),
    [
        (PLANNED, "compiled_not_validated", False),
        (PLANNED.in_state("pruned", "far slower"), "compiled_not_validated", False),
        (replace(PLANNED, verdict=verdict()).in_state("pruned", "far slower"), "lost", False),
        (passed(), "lost", True),
        (passed().in_state("won", "best latency"), "won", True),
        (passed().in_state("lost", "slower"), "lost", True),
        (PLANNED.in_state("failed", "cosine"), "failed", False),
        (PLANNED.in_state("refused", "no bf16"), "refused", False),
    ],
)
def test_each_state_is_told_as_what_it_proves(candidate: Candidate, state: str, won_its_gates: bool) -> None:
    """Broken: what was never validated would be told as one that lost, or could win; or what was validated, as one that
    was not."""
    assert candidate.result_state == state
    assert candidate.has_passed is won_its_gates


@pytest.mark.parametrize(
    ("kind", "step", "late", "reason"),
    [
        ("timeout", NOT_STARTED, True, "no time"),
        ("timeout", "compile", False, "compile: timed out: no time"),
        ("crash", NOT_STARTED, False, "no time"),
        ("out_of_memory", "validate", False, "validate: out of memory: no time"),
        ("exception", "lower", False, "lower: no time"),
    ],
)
def test_only_what_was_never_started_is_late(kind: Any, step: str, late: bool, reason: str) -> None:
    """Broken: a compiler that hangs would be told as a budget that was too short, or the other way round."""
    failure = Failure(kind=kind, step=step, problem="no time")
    assert failure.is_late is late
    failed = replace(PLANNED, note="a search ended").failed(failure)
    assert (failed.state, failed.full_reason) == ("failed", f"{reason}; a search ended")


def test_either_its_job_or_its_artifact_says_that_it_can_not_run_here() -> None:
    """Broken: what was compiled for other hardware would be published as validated, or the other way round."""
    elsewhere = artifact(job(), not_runnable_here="needs a GPU")
    assert PLANNED.not_runnable_here == ""
    assert replace(PLANNED, artifact=artifact(job())).not_runnable_here == ""
    assert replace(PLANNED, artifact=elsewhere).not_runnable_here == "needs a GPU"
    assert Candidate(job=job(not_runnable_here="needs a Mac"), artifact=elsewhere).not_runnable_here == "needs a Mac"
