"""Runs on several kinds of hardware are one run: how it ends, and its plan."""

from __future__ import annotations

import pytest
from factories import artifact, job, passed, target, target_policy

from compile_stage.cluster.merging import merged_outcome
from compile_stage.core.errors import EXIT_GATE, EXIT_NOTHING_COMPILED, EXIT_REGISTRY
from compile_stage.core.records import Candidate, Failure, RunOutcome, RunResult, TargetResult
from compile_stage.pipeline.outcome import RunOptions, RunState, outcome_of
from compile_stage.steps.select import select


def of_node(name: str, *, wins: bool = True, compiled: bool = True, outcome: RunOutcome | None = None) -> RunResult:
    """What the run of one target on its node says."""
    policy, of = target_policy(target(name)), job(where=target(name))
    candidate = passed(of)
    if not wins:
        failure = Failure(kind="exception", step="validate", problem="its outputs are wrong")
        candidate = Candidate(job=of, artifact=artifact(of) if compiled else None).failed(failure)
    state = RunState("models:/m/1", "", RunOptions(out=None), lambda *_: {})
    state.targets = (TargetResult(policy=policy, candidates=(candidate,), selection=select([candidate], policy)),)
    state.outcome = outcome or outcome_of(state.targets)
    return state.result()


def test_the_exit_code_is_that_of_one_run_with_all_targets() -> None:
    """Broken: a target that fails on one machine is covered by those that pass on others, or a run with two machines
    ends with another exit code than one machine's."""
    good, other = of_node("big"), of_node("small")
    assert merged_outcome([good, other]) == RunOutcome()
    bad = of_node("small", wins=False)
    assert bad.exit_code == EXIT_GATE
    assert merged_outcome([good, bad]) == merged_outcome([bad, good])
    assert (merged_outcome([good, bad]).exit_code, merged_outcome([good, bad]).status) == (EXIT_GATE, "failed")
    assert "'small' has no winner" in merged_outcome([good, bad]).problem

    # Alone nothing was compiled there; together something was.
    nothing = of_node("small", wins=False, compiled=False)
    assert nothing.exit_code == EXIT_NOTHING_COMPILED
    assert merged_outcome([good, nothing]).exit_code == EXIT_GATE


@pytest.mark.parametrize("swapped", [False, True])
def test_what_else_ended_one_of_the_runs_is_not_lost(*, swapped: bool) -> None:
    """Broken: a registry that refused on one machine is forgotten since all targets have winners."""
    refused = RunOutcome(status="failed", exit_code=EXIT_REGISTRY, problem="the registry refuses")
    both = [of_node("big"), of_node("small", outcome=refused)]
    assert merged_outcome(both[::-1] if swapped else both) == refused
    with_failed = [of_node("big", wins=False), both[1]]
    merged = merged_outcome(with_failed)
    assert merged.exit_code == EXIT_REGISTRY
    assert merged.problem.splitlines()[0] == "the registry refuses"
    assert "'big' has no winner" in merged.problem
