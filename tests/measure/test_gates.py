"""Which gates hold for an output."""

from __future__ import annotations

from dataclasses import replace

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.gates import in_force, that_held

GENERAL = Gate(metric="max_rel", limit=1e-6, direction="at_most")
OF_Y = replace(GENERAL, limit=0.01, output="y")
COSINE = Gate(metric="cosine", limit=0.99, direction="at_least")


def check(gate: Gate, output: str, outcome: Outcome) -> Check:
    return Check(gate=gate, outcome=outcome, measured=0.1, reason="", output=output, batch_size=1)


def test_an_outputs_own_limit_stands_in_the_place_of_the_general_one() -> None:
    """Broken: who loosens a limit for one output would have it judged by both, and who tightens it by either."""
    gates = [GENERAL, OF_Y, COSINE]
    assert in_force(gates, "y") == [OF_Y, COSINE]
    assert in_force(gates, "z") == [GENERAL, COSINE]
    assert in_force(gates, None) == [GENERAL, COSINE]


def test_a_waived_limit_of_an_output_does_not_bring_the_general_one_back() -> None:
    """Broken: an artifact whose limit on one output is waived would fail in the soak by the general limit, which nobody
    asked of that output."""
    checks = [check(OF_Y, "y", Outcome.FAIL), check(GENERAL, "z", Outcome.PASS), check(COSINE, "y", Outcome.PASS)]
    held = that_held([GENERAL, OF_Y, COSINE], checks)
    assert in_force(held, "y") == [COSINE]
    assert in_force(held, "z") == [replace(GENERAL, output="z"), COSINE]
    assert that_held([GENERAL, COSINE], [check(COSINE, "y", Outcome.FAIL)]) == (GENERAL,)
