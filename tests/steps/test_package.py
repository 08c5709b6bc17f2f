"""What a published version is known by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import job, passed, policy, source, target_policy

from compile_stage.core.records import Candidate, Plan, TargetResult
from compile_stage.steps.package import publication_key
from compile_stage.steps.select import select

PLAN = Plan(source=source(), policy=policy(), jobs=(), refused=())


def key(winner: Candidate) -> str:
    rules = target_policy()
    target = TargetResult(policy=rules, candidates=(winner,), selection=select((winner,), rules))
    return publication_key(PLAN, target, winner, "x86_64-0")


@pytest.mark.parametrize("changed", [{"options": {"intra_op_threads": 1}}, {"digest": "sha256:" + "1" * 64}])
def test_the_same_file_opened_otherwise_is_another_version(changed: dict[str, Any]) -> None:
    """Broken: where a run finds that the artifact is faster on half the threads, the registry would go on with the
    version that it has, and the report would tell of another."""
    plain = passed(job("int8", native=False))
    assert plain.artifact is not None
    assert key(plain) == key(replace(plain))
    assert key(replace(plain, artifact=replace(plain.artifact, **changed))) != key(plain)
