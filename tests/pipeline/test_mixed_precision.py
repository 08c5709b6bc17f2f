"""What is said of a search for mixed precision."""

from __future__ import annotations

from dataclasses import replace

from compile_stage.core.records import Check, Gate, Outcome, Sensitivity, Trial
from compile_stage.measure.search import Found
from compile_stage.pipeline.mixed_precision import _summary, _with_tied_nodes


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
