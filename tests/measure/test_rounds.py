"""How long turns are and when rounds end, on machines whose calls take as long as one likes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from compile_stage.measure.participant import Turn
from compile_stage.measure.rounds import MIN_ROUNDS, OVERTIME, PAIR, Pace
from compile_stage.measure.timing import calls_of_a_turn, roughly_known


def a_turn(calls: int, latency_s: float, longest_s: float, around_s: float) -> Turn:
    """So many calls, or those that began before the turn's end; beside the one that is not timed."""
    made = min(calls, max(1, math.ceil(longest_s / latency_s)))
    return Turn(latency_s=(latency_s,) * made, took_s=around_s + latency_s * (made + 1))


def play(
    undisturbed_s: Mapping[str, float], slowed: float, seconds: float, *, around_s: float = 0.02, min_calls: int = 0
) -> tuple[list[dict[str, Turn]], float]:
    """The rounds that count and the seconds that all took, of participants whose calls take `slowed` times as long as
    in the warm-up."""
    calls = {name: calls_of_a_turn(latency_s) for name, latency_s in undisturbed_s.items()}
    pace, now_s, rounds = Pace(seconds, 0.0, min_calls), 0.0, list[dict[str, Turn]]()
    while True:
        longest_s = pace.longest_turn_s(len(rounds))
        played = {n: a_turn(calls[n], undisturbed_s[n] * slowed, longest_s, around_s) for n in undisturbed_s}
        now_s += sum(turn.took_s for turn in played.values())
        if shorter := pace.shorter_turns(calls, played, len(rounds) + 1, now_s):
            calls, rounds = calls | shorter, []
            continue
        rounds.append(played)
        if pace.is_over(len(rounds), now_s, lambda: True):
            return rounds, now_s


NINE = {"baseline": 0.001, **{f"candidate {number}": 0.0002 for number in range(8)}}


def test_enough_rounds_fit_on_a_machine_that_is_ten_to_a_hundred_times_as_slow() -> None:
    """Broken: `make demo` beside four busy processes: one round fitted, and all eight candidates were 0 to infinity
    times as fast."""
    for slowed in (10.0, 30.0, 100.0):
        rounds, took_s = play(NINE, slowed, seconds=4.8)
        assert len(rounds) >= MIN_ROUNDS
        assert took_s <= OVERTIME * 4.8


def test_a_slow_original_gets_its_rounds_within_the_bound() -> None:
    """Broken: an original of 160 ms a call fills the first rounds, and of one round nothing is known of the next."""
    rounds, took_s = play({**NINE, "baseline": 0.16}, 1.0, seconds=4.8)
    assert len(rounds) >= MIN_ROUNDS
    assert took_s <= OVERTIME * 4.8
    rounds, took_s = play({"baseline": 4.0, "candidate": 2.0}, 1.0, seconds=5.0)
    assert len(rounds) == PAIR
    assert took_s == pytest.approx(2 * (4 + 2) * 2 + 4 * 0.02)


def test_with_time_enough_turns_stay_as_they_are() -> None:
    """Broken: every measurement on a quiet machine would throw its first round away."""
    rounds, took_s = play(NINE, 1.0, seconds=60.0)
    assert {len(turn.latency_s) for turn in rounds[0].values()} == {40, 200}
    assert 60 < took_s < 61


def test_all_turns_that_count_have_as_many_calls() -> None:
    """Broken: a round with more calls would weigh more in the median, so that it leans to the state of the machine
    then."""
    for slowed in (1.0, 10.0, 100.0):
        rounds, _ = play(NINE, slowed, seconds=4.8)
        for name in NINE:
            assert len({len(played[name].latency_s) for played in rounds}) == 1


def test_a_percentile_keeps_the_calls_that_it_needs() -> None:
    """Broken: short turns leave too few calls for the gate on the p95, which is NOT_RUN then."""
    rounds, _ = play(NINE, 10.0, seconds=4.8, min_calls=234)
    twelve = sum(len(played["candidate 0"].latency_s) for played in rounds[:12])
    assert twelve * 12 / min(12, len(rounds)) >= 234


def test_rounds_that_tell_nothing_go_on_to_the_bound_and_no_further() -> None:
    """Broken: six rounds of a busy machine end it though a speedup is between 0.1 and 2,000, or a machine that never
    comes to rest holds the run for ever."""
    pace = Pace(10.0, 100.0)
    assert not pace.is_over(MIN_ROUNDS, 109.0, lambda: True)
    assert pace.is_over(MIN_ROUNDS, 111.0, lambda: True)
    assert not pace.is_over(MIN_ROUNDS, 111.0, lambda: False)
    assert pace.is_over(MIN_ROUNDS, 131.0, lambda: False)
    assert not pace.is_over(MIN_ROUNDS - 1, 129.0, lambda: True)
    assert pace.is_over(PAIR, 131.0, lambda: True)
    assert not pace.is_over(1, 1e6, lambda: True)
    assert pace.overtime_s(131.0) == 21.0
    assert Pace(math.inf, 0.0).overtime_s(1e9) == 0.0


def test_a_speedup_is_roughly_known_to_a_factor_of_two() -> None:
    """Broken: what says nothing ends the measurement, or what is clear is measured on."""
    base = [[2.0], [2.1], [1.9], [2.0], [2.05], [1.95]]
    assert roughly_known({"baseline": base, "a": [[1.0]] * 6}, "baseline", seed=0)
    wild = [[0.001], [1.0], [0.002], [0.9], [0.001], [1.1]]
    assert not roughly_known({"baseline": base, "a": [[1.0]] * 6, "b": wild}, "baseline", seed=0)
