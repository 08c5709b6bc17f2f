"""What is said of a search for mixed precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import COSINE, SIGNATURE, artifact, job, target_policy

from compile_stage.core.records import (
    Candidate,
    Check,
    Fallback,
    Gate,
    Outcome,
    PortableModel,
    Sensitivity,
    Trial,
    Verdict,
    Waiver,
)
from compile_stage.measure.search import Found
from compile_stage.pipeline.mixed_precision import _decisive, _summary, _with_tied_nodes, order_searches, searchable


def test_why_a_float_type_was_given_up_is_said() -> None:
    """Broken: the report says that no set passes, though fp32 was only too slow; or it counts fewer nodes than were
    kept."""
    slow = Trial(kept=("a",), float_type="fp32", passed=False, latency_s=0.011)
    best = Trial(kept=("a", "b"), float_type="bf16", passed=True, latency_s=0.009)
    ranking = [
        Sensitivity(node="a", op="Conv", effect=1.0, cost=1.0, together=("c",)),
        Sensitivity(node="b", op="Conv", effect=1.0, cost=1.0),
    ]
    given_up = "fp32 was given up, since with 2 kept a call takes 11 ms, longer than that of a candidate that passes"
    none = Found(best=None, trials=(slow,), exhausted=False, too_slow=(slow,))
    assert f"passed in 1 trial; {given_up}; the closest" in _summary(_with_tied_nodes(none, ranking), 3)
    found = Found(best=best, trials=(slow, best), exhausted=False, too_slow=(slow,))
    said = _summary(_with_tied_nodes(found, ranking), 3)
    assert said == f"keeping 3 of 3 quantised nodes in bf16 passes (found in 2 trials; {given_up})"
    plain = Found(best=None, trials=(slow,), exhausted=False)
    assert "given up" not in _summary(plain, 3)


def test_a_search_that_a_miss_by_luck_ended_says_what_decides_it() -> None:
    """Broken: the report says nothing of why the search went no further, or counts fewer nodes than were kept."""
    gate = Gate(metric="accuracy", limit=0.01, direction="at_most", confidence=0.95)
    check = Check(gate=gate, outcome=Outcome.FAIL, measured=0.005, reason="", interval=(0.0, 0.02))
    missed = Trial(kept=("a",), float_type="fp32", passed=False, decisive=check)
    best = Trial(kept=("a", "b"), float_type="fp32", passed=True)
    ranking = [Sensitivity(node="a", op="Conv", effect=1.0, cost=1.0, together=("c",))]
    ranking.append(Sensitivity(node="b", op="Conv", effect=1.0, cost=1.0))
    found = Found(best=best, trials=(best, missed), exhausted=False, undecided=missed)
    said = _summary(_with_tied_nodes(found, ranking), 3)
    assert "ended with 2 kept, which misses accuracy for its interval alone: more samples may decide it" in said
    assert "ended" not in _summary(replace(found, undecided=None), 3)


LOWERED = PortableModel(
    path="", digest="", form="onnx", opset=17, precision="int8", kept={}, signature=SIGNATURE, made_from=""
)
SHAPE = Gate(metric="shape", limit=0, direction="at_most")


def validated(*checks: tuple[Gate, float, Outcome], native: bool = False) -> Candidate:
    of = job("int8", native=native)
    found = [Check(gate=gate, outcome=outcome, measured=value, reason="") for gate, value, outcome in checks]
    return Candidate(job=of, portable=LOWERED, artifact=artifact(of), verdict=Verdict(checks=tuple(found)))


MISSED = validated((SHAPE, 0.0, Outcome.PASS), (COSINE, 0.9, Outcome.FAIL))


@pytest.mark.parametrize(
    ("candidate", "is_searched"),
    [
        (MISSED, True),
        (validated((COSINE, 0.999, Outcome.PASS)), False),
        (validated((COSINE, 0.9, Outcome.FAIL), native=True), False),  # nothing was lowered that nodes could be kept in
        (validated((SHAPE, 1.0, Outcome.FAIL), (COSINE, 0.9, Outcome.FAIL)), False),
        (validated((COSINE, 0.9, Outcome.FAIL), (COSINE, 0.0, Outcome.NOT_RUN)), False),
        (replace(MISSED, artifact=None), False),
        (replace(MISSED, portable=None), False),
        (replace(MISSED, verdict=None), False),
    ],
)
def test_what_missed_a_tolerance_by_its_numbers_is_searched(candidate: Candidate, is_searched: bool) -> None:
    """Broken: minutes of trials are spent on what no kept node mends, or int8 is given up where keeping one node in
    fp32 would hold the tolerance."""
    assert searchable(candidate) is is_searched


def test_who_missed_by_least_is_searched_first_and_nobody_without_leave() -> None:
    """Broken: the budget is spent on the hopeless, or a policy that forbids mixed precision gets it."""
    near, far = validated((COSINE, 0.985, Outcome.FAIL)), validated((COSINE, 0.5, Outcome.FAIL))
    policy = target_policy(fallback=Fallback(mixed_precision=True))
    assert order_searches([far, validated((COSINE, 0.999, Outcome.PASS)), near], policy) == [near, far]
    assert order_searches([far, near], replace(policy, fallback=Fallback(mixed_precision=False))) == []


def test_the_check_that_decides_is_the_worst_that_nobody_waived() -> None:
    """Broken: a search ends by a check that passed, or is led by one that is waived; or the report names a gate that
    had room."""
    waiver = Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2999-01-01")

    def of(*found: tuple[str, float, Outcome], waived: str = "") -> str:
        checks = tuple(
            Check(
                gate=replace(COSINE, metric=metric), outcome=outcome, measured=measured, reason="",
                waived=waiver if metric == waived else None,
            )
            for metric, measured, outcome in found
        )  # fmt: skip
        gates = (COSINE, replace(COSINE, metric="agreement"))
        candidate = replace(MISSED, job=replace(MISSED.job, gates=gates), verdict=Verdict(checks=checks))
        decisive = _decisive(candidate)
        return decisive.gate.metric if decisive is not None else ""

    missed, passed = Outcome.FAIL, Outcome.PASS
    worst = (("cosine", 0.5, missed), ("agreement", 0.9, missed), ("shape", 1.0, passed))
    assert of(*worst) == "cosine"
    assert of(*worst, waived="cosine") == "agreement"
    assert of(("cosine", 0.999, passed), ("agreement", 0.9901, passed), ("shape", 0.99, passed)) == "agreement"
    assert of(("shape", 1.0, passed)) == "shape"
    assert _decisive(replace(MISSED, verdict=None)) is None
