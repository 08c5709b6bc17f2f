"""With what a run ends: the exit code is what a pipeline goes by."""

from __future__ import annotations

import pytest
from factories import artifact, job, passed, target, target_policy

from compile_stage.core.errors import EXIT_GATE, EXIT_NOTHING_COMPILED
from compile_stage.core.records import Candidate, Failure, Refusal, RunOutcome, TargetResult
from compile_stage.core.records.candidate import NOT_STARTED
from compile_stage.pipeline.outcome import outcome_of
from compile_stage.steps.select import select

LATE = Failure(kind="timeout", step=NOT_STARTED, problem="the budget ended")
CRASH = Failure(kind="crash", step="compile", problem="SIGSEGV")


def of_target(name: str, ends: str, *, required: bool) -> TargetResult:
    """One target with one candidate that ends so."""
    of = job(where=target(name, required=required))
    made = Candidate(job=of, artifact=artifact(of))
    candidate = {
        "wins": passed(of),
        "misses its gates": made.in_state("failed", "cosine: 0.5 < 0.9"),
        "does not compile": Candidate(job=of).failed(CRASH),
        "came too late": Candidate(job=of).failed(LATE),
        "compiles too slowly": Candidate(job=of).failed(Failure(kind="timeout", step="compile", problem="300 s")),
        "waits for hardware": Candidate(job=of, artifact=artifact(of, not_runnable_here="no GPU")),
    }[ends]
    policy = target_policy(of.target)
    return TargetResult(policy=policy, candidates=(candidate,), selection=select([candidate], policy))


@pytest.mark.parametrize(
    ("required", "optional", "exit_code"),
    [
        ("wins", "wins", 0),
        ("wins", "misses its gates", 0),
        ("wins", "does not compile", 0),
        ("misses its gates", "wins", EXIT_GATE),
        ("does not compile", "wins", EXIT_GATE),
        ("waits for hardware", "wins", EXIT_GATE),
        ("does not compile", "misses its gates", EXIT_GATE),
        ("does not compile", "does not compile", EXIT_NOTHING_COMPILED),
    ],
)
def test_a_required_target_without_a_winner_fails_the_run(required: str, optional: str, exit_code: int) -> None:
    """Broken: a pipeline goes on green though the target that it deploys to got nothing, or stops for an optional
    one."""
    targets = (of_target("small", optional, required=False), of_target("big", required, required=True))
    for ordered in (targets, targets[::-1]):
        found = outcome_of(ordered)
        assert found.exit_code == exit_code
        assert found.status == ("failed" if exit_code else RunOutcome().status)
        if exit_code == EXIT_GATE:
            assert "required target 'big' has no winner" in found.problem
            assert "small" not in found.problem


@pytest.mark.parametrize(
    ("first", "second", "exit_code"),
    [
        ("wins", "misses its gates", 0),
        ("misses its gates", "misses its gates", EXIT_GATE),
        ("misses its gates", "waits for hardware", 0),
        ("waits for hardware", "waits for hardware", 0),
    ],
)
def test_a_run_of_optional_targets_alone_needs_a_winner_or_something_to_validate_elsewhere(
    first: str, second: str, exit_code: int
) -> None:
    """Broken: a run that made nothing is green, or what was compiled for other hardware can't be published."""
    found = outcome_of([of_target("one", first, required=False), of_target("two", second, required=False)])
    assert found.exit_code == exit_code


def test_a_budget_that_ended_before_anything_was_tried_is_named() -> None:
    """Broken: the advice would be to raise the budget where a compiler crashed or was too slow, or it would be left out
    where nothing else helps."""
    late = of_target("one", "came too late", required=True)
    assert "raise budget.minutes" in outcome_of([late]).problem
    for other in ("does not compile", "compiles too slowly"):
        mixed = outcome_of([late, of_target("two", other, required=True)])
        assert mixed.exit_code == EXIT_NOTHING_COMPILED
        assert mixed.problem.startswith("nothing could be compiled\n")


def test_jobs_that_were_not_compiled_since_they_could_not_have_passed_missed_a_gate() -> None:
    """Broken: "nothing could be compiled" would blame the compilers for a limit that the lowered graph missed."""
    policy = target_policy(target("one", required=True))
    refusal = Refusal(job_id="a", target="one", backend="onnxruntime", precision="int8", reason="cosine: 0.5 < 0.9")
    refused = TargetResult(policy=policy, candidates=(), selection=select([], policy), refused=(refusal,))
    assert outcome_of([refused]).exit_code == EXIT_GATE
