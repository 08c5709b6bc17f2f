"""When the latencies of a participant are believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.ports import WorkerUsage
from compile_stage.measure.participant import Turn, first_threads_cpu, threads_that_ran, waited_between
from compile_stage.measure.turn_rules import refuse_disturber, refuse_turns


def turns(
    count: int = 8, *, calls: int = 20, latency_s: float = 0.002, clock: float = 1.0, cores: float = 1.0
) -> list[Turn]:
    """Turns of a model whose clock runs at `clock` of the true speed."""
    wall_s = calls * latency_s + 0.001
    return [
        Turn(
            latency_s=(latency_s * clock,) * calls, wall_s=wall_s, cpu_s=cores * wall_s, threads=round(cores),
            idle_s=0.1, idle_cpu_s=0.001,
        )
        for _ in range(count)
    ]  # fmt: skip


def test_honest_turns_are_believed() -> None:
    """Broken: no candidate could pass."""
    assert refuse_turns(turns(), turns(), 1) == ""
    assert refuse_turns(turns(calls=1, latency_s=0.5, cores=1.9), turns(), 2) == ""
    assert refuse_turns(turns(calls=20_000, latency_s=2e-6), turns(), 1) == ""
    assert refuse_turns([], turns(), 1) == ""


def test_a_slow_clock_is_refused_with_both_times() -> None:
    """Broken: a worker whose clock runs slow would be as many times faster."""
    reason = refuse_turns(turns(calls=200, clock=0.05), turns(), 1)
    assert reason == (
        "its clock is wrong: a turn took 401 ms by the stage's clock, and its latencies explain 20 ms of that"
    )
    assert "its clock is wrong" in refuse_turns(turns(clock=0.4), turns(), 1)
    assert "its clock is wrong" in refuse_turns(turns(clock=0.75), turns(), 1)
    starved = [replace(turn, wall_s=turn.wall_s * 8, waited_s=turn.wall_s * 7) for turn in turns(calls=200, clock=0.4)]
    assert "its clock is wrong" in refuse_turns(starved, turns(), 8)


def test_a_slow_clock_is_refused_in_short_turns_and_in_those_of_many_calls() -> None:
    """Broken: turns are shortened to 10 ms where there is little time, and a clock that was slow by 2.3 won, since 15
    ms of each might go unexplained; and of calls of 10 us as much as they take."""
    short = turns(calls=12, clock=0.43)
    assert "its clock is wrong" in refuse_turns(short, turns(calls=5), 1)
    many = turns(calls=9000, latency_s=10e-6, clock=0.43)
    assert "its clock is wrong" in refuse_turns(many, turns(calls=4000, latency_s=10e-6), 1)


def test_of_few_turns_a_longer_delay_is_allowed() -> None:
    """Broken: two turns of an honest candidate, both of which a busy machine delayed, would be a lie."""
    late = [replace(turn, wall_s=turn.wall_s + 0.009) for turn in turns(2)]
    assert refuse_turns(late, turns(2), 1) == ""
    assert "its clock is wrong" in refuse_turns(late * 6, turns(12), 1)


def test_waits_of_a_wake_up_are_not_laid_at_the_clock() -> None:
    """Broken: two busy loops keep the worker waiting for a core before its calls, as long as they keep the stage
    waiting, and an honest candidate whose calls take 1 ms a turn is refused: "a turn took 129 ms, and its latencies
    explain 9.8 ms"."""
    wait_s = 0.12
    busy = [
        replace(turn, wall_s=turn.claimed_s + wait_s + 0.001, held_up_s=wait_s, foreign_cores=0.6)
        for turn in turns(6, calls=5)
    ]
    original = [replace(turn, stage_waited_s=0.13) for turn in turns(6)]
    late = [replace(turn, foreign_cores=1.6) for turn in busy]
    assert "its clock is wrong" in refuse_turns(busy, original, 1), "others used too little to hold it up for so long"
    assert refuse_turns(late, original, 1) == ""
    assert "its clock is wrong" in refuse_turns(late, turns(6), 1), "the stage, on the same cores, waited for nothing"


def test_the_kernels_count_of_what_the_first_thread_computed_shows_a_slow_clock_on_a_busy_machine() -> None:
    """Broken: where the stage and the worker wait for a core in turns, their waits hide as much of the calls, and a
    clock at half its speed is believed."""
    wall = [replace(turn, stage_waited_s=turn.wall_s, foreign_cores=2.0) for turn in turns(6)]
    honest = [replace(turn, first_cpu_s=0.0405) for turn in wall]
    slow = [replace(turn, latency_s=tuple(0.5 * one for one in turn.latency_s)) for turn in honest]
    assert refuse_turns(honest, wall, 1) == ""
    assert refuse_turns(slow, wall, 1) == (
        "its clock is wrong: its first thread computed for 40.5 ms a turn by the kernel's count, and its latencies "
        "explain 20 ms of that"
    )


def test_the_cpu_time_of_first_threads_is_told_from_that_of_others() -> None:
    """Broken: threads of a pool that look for work after a call would make the clock of an honest runtime slow."""
    first = WorkerUsage(at_s=10.0, cpu_s=1.0, threads={"70:70": 1.0, "70:71": 1.0}, waits={})
    second = WorkerUsage(at_s=10.04, cpu_s=1.0, threads={"70:70": 1.01, "70:71": 1.03, "80:80": 0.004}, waits={})
    assert first_threads_cpu(first, second) == pytest.approx(0.01)
    assert first_threads_cpu(first, replace(second, threads={})) == 0.0


def test_only_what_others_keep_a_worker_waiting_for_excuses_its_clock() -> None:
    """Broken: with two threads of its own that share a core, one of which always waits, a worker's clock could be as
    slow as it liked."""
    waiting = [replace(turn, waited_s=turn.wall_s, foreign_cores=1.5) for turn in turns(calls=200, clock=0.2)]
    assert "its clock is wrong" in refuse_turns(waiting, turns(), 2)
    itself = [replace(turn, held_up_s=turn.wall_s, foreign_cores=0.1) for turn in waiting]
    assert "its clock is wrong" in refuse_turns(itself, turns(), 2)
    busy = [replace(turn, wall_s=turn.wall_s + 0.03, held_up_s=0.03, foreign_cores=1.5) for turn in turns()]
    original = [replace(turn, wall_s=turn.wall_s + 0.02, held_up_s=0.02, foreign_cores=1.5) for turn in turns()]
    assert refuse_turns(busy, original, 2) == "", "delays meet the original too"


def test_the_first_thread_of_a_process_is_told_from_its_others() -> None:
    """Broken: what a worker's helpers wait for each other would count as what its caller waited."""
    first = WorkerUsage(at_s=10.0, cpu_s=1.0, threads={}, waits={"70:70": 1.0, "70:71": 1.0})
    second = WorkerUsage(at_s=10.04, cpu_s=1.0, threads={}, waits={"70:70": 1.01, "70:71": 1.03})
    assert waited_between(first, second) == pytest.approx(0.04)
    assert waited_between(first, second, first_only=True) == pytest.approx(0.01)


def test_latencies_that_add_up_to_more_than_the_turn_are_refused() -> None:
    """Broken: a participant could slow the others down in the figures by a clock that runs fast."""
    assert "its clock is wrong" in refuse_turns(turns(clock=1.5), turns(), 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 0.5), min_size=6, max_size=12), st.floats(0.2, 5))
def test_no_delay_of_the_machine_refuses_an_honest_turn(delays: list[float], slowed: float) -> None:
    """Broken: on a busy machine, honest candidates would be called liars. Delays meet whoever has its turn then, the
    original too."""
    honest = turns(len(delays), latency_s=0.002 * slowed)
    late = [replace(turn, wall_s=turn.wall_s + delay) for turn, delay in zip(honest, delays, strict=True)]
    original = [
        replace(turn, wall_s=turn.wall_s + delay) for turn, delay in zip(turns(len(delays)), delays, strict=True)
    ]
    assert refuse_turns(late, original, 1) == ""


def test_more_threads_than_granted_are_refused_however_few_cores_are_left_to_them() -> None:
    """Broken: a runtime that takes all cores of the machine would win against those that keep to the policy."""
    assert refuse_turns(turns(cores=4.0), turns(), 1) == (
        "it took more threads than the policy grants: 4 were at work at a time, and the target has threads: 1"
    )
    waiting = [replace(turn, cpu_s=turn.wall_s / 4, waited_s=turn.wall_s * 1.5) for turn in turns()]
    assert "1.75 were at work" in refuse_turns(waiting, turns(), 1)
    assert refuse_turns(turns(cores=4.0), turns(), 4) == ""


def test_who_goes_on_computing_while_others_are_measured_is_refused() -> None:
    """Broken: a busy loop after the answer would slow the original down."""
    spinning = [replace(turn, idle_cpu_s=0.09) for turn in turns()]
    assert refuse_turns(spinning, turns(), 1) == (
        "it goes on computing after its answer: it kept 0.9 threads busy while it was others' turn"
    )


def test_who_computes_only_while_one_other_is_timed_is_refused() -> None:
    """Broken: a thread that runs in all turns of the original and rests in all others' is half a thread on average, and
    what an honest look for work takes: the original looked slower, and all candidates faster."""
    baseline = [replace(turn, beside_s={"spins": 0.9 * turn.wall_s, "honest": 0.002}) for turn in turns()]
    found = {"the original": baseline, "spins": turns(), "honest": turns()}
    assert refuse_disturber("spins", found) == (
        "it goes on computing after its answer: it kept 0.9 threads busy while the original was timed"
    )
    assert refuse_disturber("honest", found) == ""
    spinning = [replace(turn, idle_cpu_s=0.06) for turn in turns()]
    assert refuse_turns(spinning, turns(), 1) == "", "by the rule on its own turns it is at rest"


def test_a_look_for_work_between_turns_that_follow_at_once_is_no_computing() -> None:
    """Broken: on a busy machine an honest ONNX Runtime "kept 0.58 threads busy" in the 50 ms between its two turns."""
    two = [replace(turn, idle_s=0.05 * number, idle_cpu_s=0.04 * number) for number, turn in enumerate(turns(2))]
    assert refuse_turns(two, turns(2), 1) == ""


def test_what_the_stage_itself_waits_for_a_core_is_not_laid_at_the_turn() -> None:
    """Broken: short turns of an honest candidate on a busy machine, whose answers the stage takes 40 ms late, have "a
    clock that is wrong"."""
    late = [replace(turn, wall_s=turn.wall_s + 0.04, stage_waited_s=0.04) for turn in turns(calls=2)]
    assert refuse_turns(late, turns(), 1) == ""
    assert "its clock is wrong" in refuse_turns([replace(t, stage_waited_s=0.0) for t in late], turns(), 1)


@pytest.mark.parametrize(
    ("before", "after", "ran"),
    [
        ({}, {}, 1),
        ({"a": 1.0}, {"a": 1.0}, 1),
        ({"a": 1.0}, {"a": 2.0, "b": 0.9, "c": 0.01}, 2),
        ({"a": 1.0, "b": 9.0}, {"a": 2.0, "b": 9.0}, 1),
    ],
)
def test_threads_that_ran(before: dict[str, float], after: dict[str, float], ran: int) -> None:
    """Broken: threads that only wait would be counted, or those that were started meanwhile would not."""
    assert threads_that_ran(before, after) == ran


@pytest.mark.parametrize(
    ("before", "waits", "ran", "waited_s"),
    [
        ({"a": 1.0}, {"a": 1.3}, 0.0, 0.04),  # most of it was before the turn
        ({"a": 1.0}, {"a": 1.3}, 0.03, 0.01),  # it ran for most of the turn
        ({"a": 1.0}, {"a": 1.02}, 0.0, 0.02),
        ({}, {"b": 0.5}, 0.0, 0.04),  # a thread that was started meanwhile
        ({"a": 1.0, "c": 9.0}, {"a": 1.01}, 0.0, 0.01),  # c has ended
    ],
)
def test_a_thread_waits_no_longer_than_the_turn_took(
    before: dict[str, float], waits: dict[str, float], ran: float, waited_s: float
) -> None:
    """Broken: a machine that holds a process back between two turns made five threads out of one, and an honest
    candidate failed for "5.58 threads at work"."""
    first = WorkerUsage(at_s=10.0, cpu_s=1.0, threads=dict.fromkeys(before, 1.0), waits=before)
    threads = {thread: first.threads.get(thread, 0.0) + ran for thread in waits}
    second = WorkerUsage(at_s=10.04, cpu_s=1.0 + ran, threads=threads, waits=waits)
    assert waited_between(first, second) == pytest.approx(waited_s)


def test_a_few_ticks_of_the_kernels_clock_are_no_threads() -> None:
    """Broken: one turn of 3 ms, in which the counter moves on by a tick of 10 ms, would be three threads."""
    (turn,) = turns(1, calls=1, latency_s=0.002)
    assert refuse_turns([replace(turn, cpu_s=0.01, idle_s=0.01, idle_cpu_s=0.02)], [turn], 1) == ""


def test_calls_that_the_original_makes_too_leave_no_time_unexplained() -> None:
    """Broken: a clock that runs at half its speed hides in the loop around the calls, which is allowed for calls alone
    that the original's turns do not have."""
    original = turns(calls=2000, latency_s=10e-6)
    assert "its clock is wrong" in refuse_turns(turns(calls=2000, latency_s=10e-6, clock=0.5), original, 1)


def test_few_calls_of_the_original_do_not_say_what_one_takes() -> None:
    """Broken: the loop around 2,000 short calls is unexplained, since an original with two long ones shows nothing of
    it; or it is believed although the original shows that it takes less."""
    looped = [replace(turn, wall_s=turn.wall_s + 0.015) for turn in turns(calls=2000, latency_s=10e-6)]
    assert refuse_turns(looped, turns(calls=2, latency_s=0.01), 1) == ""
    many = turns(calls=1900, latency_s=10e-6)
    assert "its clock is wrong" in refuse_turns(looped, many, 1)


def test_calls_of_an_original_of_which_all_is_explained_cost_time_still() -> None:
    """Broken: an original without a moment unexplained shows that a call costs nothing around it, and a candidate of a
    thousand short calls is refused for the 8 microseconds around each of its own."""
    calls = 1000
    own = [replace(turn, wall_s=turn.claimed_s + calls * 8e-6) for turn in turns(calls=calls, latency_s=10e-6)]
    explained = [replace(turn, wall_s=turn.claimed_s) for turn in turns(calls=10)]
    assert refuse_turns(own, explained, 1) == ""


def test_a_clock_is_checked_where_the_original_had_no_turn() -> None:
    """Broken: turns without turns of the original beside them would be believed, or end the measurement."""
    assert refuse_turns(turns(), [], 1) == ""
    assert "its clock is wrong" in refuse_turns(turns(clock=0.4), [], 1)


@given(st.floats(0.01, 2))
def test_latencies_exceed_their_turn_by_no_more_than_the_clocks_ticks(wall_s: float) -> None:
    """Broken: one process slows itself down in the figures by a clock that is 5 % fast."""
    exact, fast = (Turn(latency_s=(share * wall_s,), wall_s=wall_s) for share in (1.005, 1.05 + 0.003 / wall_s))
    assert refuse_turns([exact], [exact], 1) == ""
    assert "its clock is wrong" in refuse_turns([fast], [exact], 1)


def test_one_tick_of_the_kernels_clock_disturbs_nobody() -> None:
    """Broken: a participant at rest whose CPU counter moves on by 10 ms beside a turn of 20 ms is called a disturber;
    or one that computes for 30 ms of it is not."""
    beside = [Turn(latency_s=(0.02,), wall_s=0.02, beside_s={"rests": 0.01, "computes": 0.03, "timed": 0.02})]
    assert refuse_disturber("rests", {"timed": beside}) == ""
    assert "1.5 threads busy while timed was" in refuse_disturber("computes", {"timed": beside})
    assert refuse_disturber("timed", {"timed": beside}) == "", "its own CPU time is not beside it"


def test_work_between_turns_is_allowed_up_to_a_look_for_work_and_the_kernels_ticks() -> None:
    """Broken: honest runtimes that look for work for 0.25 s are refused; or twice that is no computing."""

    def after(cpu_s: float) -> list[Turn]:
        return [replace(turn, idle_s=0.0, idle_cpu_s=cpu_s / 8) for turn in turns()]

    assert refuse_turns([replace(turn, idle_s=0.01) for turn in after(0.29)], turns(), 1) == ""
    assert "goes on computing" in refuse_turns([replace(turn, idle_s=0.01) for turn in after(0.5)], turns(), 1)
