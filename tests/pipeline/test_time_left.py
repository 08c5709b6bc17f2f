"""A tight budget of minutes: what is begun, what is cut, what is measured, and what is said of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import job, passed

from compile_stage.core.events import EventLog
from compile_stage.core.records import Budget, Failure, Job
from compile_stage.core.records.candidate import NOT_STARTED
from compile_stage.measure.rounds import OVERTIME
from compile_stage.pipeline.time_left import TimeLeft, in_order_of_promise, late_note

FP32, BF16, INT8 = job("fp32"), job("bf16"), job("int8")


def of_backend(backend: str, precision: str) -> Job:
    made = job(precision)
    return replace(made, id=f"{made.id}-{backend}", backend=backend)


def left(minutes: float, elapsed_s: float = 0.0, **fields: Any) -> TimeLeft:
    budget = Budget(minutes=minutes, **{"soak_seconds": 2.0, **fields})
    return TimeLeft(EventLog(elapsed_s=elapsed_s), budget)


def test_a_job_begins_only_while_what_is_proven_can_still_be_measured() -> None:
    """Broken: a run of three minutes compiles for three minutes, and has no verdict."""
    early, late = left(3.0, 20.0), left(3.0, 110.0)
    for clock in (early, late):
        assert clock.refuse(INT8) is None  # nothing has passed yet, so there is nothing to keep time for
        clock.ended(FP32, 20.0, passed=True)
    assert early.refuse(INT8) is None
    refused = late.refuse(INT8)
    assert refused is not None
    assert refused.step == NOT_STARTED
    assert "not tried: no time left of the 3 minutes (budget.minutes)" in refused.problem
    assert "it would have needed about 20 s" in refused.problem


def test_a_job_takes_what_those_of_its_backend_took() -> None:
    """Broken: one slow compiler ends the jobs of all others."""
    clock = left(3.0, 100.0)
    clock.ended(of_backend("slow", "fp32"), 60.0, passed=True)
    clock.ended(of_backend("quick", "fp32"), 1.0, passed=True)
    assert clock.refuse(of_backend("slow", "int8")) is not None
    assert clock.refuse(of_backend("quick", "int8")) is None
    assert clock.usual_s(of_backend("unknown", "int8")) == pytest.approx(30.5)


def test_a_job_is_cut_where_the_time_for_the_others_begins() -> None:
    """Broken: one compiler that does not end takes the whole budget, and what others proved is lost."""
    clock = left(3.0)
    assert clock.bound_s() == pytest.approx(180.0, abs=1)
    clock.ended(FP32, 5.0, passed=True)
    bound_s = clock.bound_s()
    assert bound_s is not None
    assert 90 < bound_s < 130
    timeout = Failure(kind="timeout", step="compile", problem="took longer than 100 s")
    assert "(budget.minutes)" in clock.cut(timeout, bound_s, bound_s + 1).problem
    assert clock.cut(timeout, bound_s, bound_s - 1) is timeout
    assert clock.cut(timeout, None, 900.0) is timeout


def test_a_long_budget_changes_nothing() -> None:
    """Broken: runs with the default budget measure less, or cut what the limit of a call allows."""
    clock = left(60.0, 120.0)
    clock.ended(INT8, 300.0, passed=True)
    assert clock.refuse(FP32) is None
    assert clock.bound_s() is None
    measuring = clock.for_measuring([passed(FP32), passed(INT8)])
    assert (measuring.seconds, measuring.overtime, measuring.late) == (60.0, OVERTIME, ())
    assert clock.lacks(20.0) == ""


def test_the_likeliest_two_are_measured_however_late_it_is() -> None:
    """Broken: the budget is kept, and there is no verdict."""
    candidates = [passed(FP32), passed(BF16), passed(INT8)]
    measuring = left(1.0, 70.0).for_measuring(candidates)
    (late,) = measuring.late
    assert late.job == BF16
    assert late.state == "failed"
    assert "not measured: no time left of the 1 minutes (budget.minutes); it would have needed about" in late.reason
    assert 0 < measuring.seconds <= 6.0
    assert measuring.overtime == 1.0
    (note,) = late_note([late, passed(FP32)], 1.0)
    assert note.startswith("1 of 2 candidates were not tried or not measured, since budget.minutes is 1: onnxruntime ")


def test_a_shorter_measurement_is_what_time_is_left_for() -> None:
    """Broken: the measurement takes its 60 s, and nothing is published within the budget."""
    measuring = left(1.0, 20.0).for_measuring([passed(FP32), passed(INT8)])
    assert 10 < measuring.seconds < 35
    assert measuring.late == ()


def test_nothing_is_measured_where_nothing_passed() -> None:
    """Broken: a run without a candidate ends with a traceback."""
    assert left(0.0).for_measuring([]).late == ()


def test_a_later_target_keeps_its_part() -> None:
    """Broken: the first of three targets uses up the budget of all."""
    budget = Budget(minutes=3.0)
    alone, first = (TimeLeft(EventLog(), budget, later_targets=later) for later in (0, 2))
    assert first.seconds == pytest.approx(60, abs=1)
    assert alone.seconds == pytest.approx(180, abs=1)
    long = Budget(minutes=60.0)
    assert TimeLeft(EventLog(), long, later_targets=2).seconds > 3000


def test_a_sure_one_comes_first_and_then_the_likeliest_winners() -> None:
    """Broken: of a budget that has time for two, both go to candidates that can't win, or that may not pass."""
    other = of_backend("openvino", "fp32")
    order = in_order_of_promise([BF16, other, FP32, INT8])
    assert order == [other, INT8, BF16, FP32]
    assert in_order_of_promise([BF16, INT8]) == [INT8, BF16]


def test_searches_leave_the_time_that_one_candidate_needs() -> None:
    """Broken: the search for a candidate that passes ends with one that nobody can measure any more."""
    clock = left(2.0, 30.0)
    assert clock.for_searches_s < clock.seconds - clock.after_s
    assert left(60.0).for_searches_s > 3000


def test_what_no_verdict_needs_is_left_out_with_the_reason() -> None:
    """Broken: a profile takes the seconds after the budget's end."""
    assert (
        left(1.0, 58.0).lacks(5.0) == "no time left of the 1 minutes (budget.minutes); it would have needed about 5 s"
    )
