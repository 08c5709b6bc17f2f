"""Which limits judge answers that have no labels, and how far an answer is beyond its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.tolerance import elementwise_gates, tolerance_used, worst

COSINE = Gate(metric="cosine", limit=0.99, direction="at_least", confidence=0.95)
TOP1 = Gate(metric="top1_agreement", limit=0.99, direction="at_least", confidence=0.95)
ACCURACY = Gate(metric="accuracy", limit=0.01, direction="at_most", options={"drop": "max_drop"})
COLUMN = Gate(metric="column_nrmse", limit=0.1, direction="at_most")
OWN = Gate(metric="python:own:metric", limit=0.1, direction="at_most", confidence=0.95)
ALL = (COSINE, TOP1, ACCURACY, COLUMN, OWN)
OWN_BY_VALUE = replace(OWN, confidence=None)


@pytest.mark.parametrize(
    ("has_labels", "few_rows", "judging"),
    [
        (False, False, (COSINE, TOP1, COLUMN, OWN_BY_VALUE)),
        (False, True, (COSINE, TOP1, OWN_BY_VALUE)),
        (True, False, (COSINE, TOP1, COLUMN)),
        (True, True, (COSINE, TOP1)),
    ],
)
def test_answers_without_labels_are_judged_by_each_limit_that_needs_none(
    has_labels: bool, few_rows: bool, judging: tuple[Gate, ...]
) -> None:
    """Broken: other calls, corners and disturbed samples would be judged by less than the policy asks for, or fail for
    labels that nobody has, or for a spread that few rows do not have."""
    assert elementwise_gates(ALL, has_labels=has_labels, few_rows=few_rows) == judging


def check(gate: Gate, measured: float | None, outcome: Outcome = Outcome.PASS, samples: int = 64) -> Check:
    return Check(gate=gate, outcome=outcome, measured=measured, reason="", samples=samples)


ERROR = Gate(metric="max_abs", limit=0.1, direction="at_most")
SHAPE = Gate(metric="shape", limit=0, direction="at_most")


@pytest.mark.parametrize(
    ("found", "used"),
    [
        (check(ERROR, 0.05), 0.5),
        (check(ERROR, 0.3), 3.0),
        (check(replace(ERROR, limit=0.0), 0.0), 0.0),
        (check(replace(ERROR, limit=0.0), 1e-9), float("inf")),
        (check(COSINE, 0.96), 2.0),
        (check(Gate(metric="snr_db", limit=20, direction="at_least", unit="dB"), 14), 10**0.3),
        (check(Gate(metric="token_kl", limit=0.01, direction="at_most"), 0.04), 2.0),
        (check(TOP1, 0.98, samples=1000), 2.0),
        (check(TOP1, 7 / 8, samples=8), 0.5),  # one of eight rows: two may change
        (check(SHAPE, 1.0, Outcome.FAIL), float("inf")),
        (check(ERROR, None, Outcome.NOT_RUN), 0.0),
    ],
)
def test_twice_the_error_is_twice_the_tolerance(found: Check, used: float) -> None:
    """Broken: what an artifact answers to samples beyond the validation set would pass or fail by the unit of the
    limit."""
    assert tolerance_used(found) == pytest.approx(used)


def test_the_worst_check_names_a_limit_of_the_policy_where_one_says_as_much() -> None:
    """Broken: the reason would be that shapes are equal, and not what was compared."""
    shape, exact, near = check(SHAPE, 0.0), check(ERROR, 0.0), check(COSINE, 0.995)
    not_run = check(OWN, None, Outcome.NOT_RUN)
    for checks in ([shape, not_run, exact], [exact, not_run, shape]):
        assert worst(checks) == (0.0, exact)
    assert worst([shape, exact, near])[1] == near
    broken = check(SHAPE, 1.0, Outcome.FAIL)
    assert worst([near, broken]) == (float("inf"), broken)
