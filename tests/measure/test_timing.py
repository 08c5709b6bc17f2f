"""A stopwatch that a drifting machine can't fool."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.errors import SourceError
from compile_stage.measure import timing
from compile_stage.measure.quantiles import GATED, effective_calls
from compile_stage.measure.speedups import is_within, ratio_interval
from compile_stage.measure.stats import Interval
from compile_stage.measure.timing import (
    FAR_SLOWER,
    MIN_ROUNDS,
    MOST_CALLS,
    SETTLE_S,
    TURN_S,
    UNTIMED_S,
    calls_of_a_turn,
    enough,
    far_slower,
    schedule,
    settle,
    spread,
    steady,
    turn,
    warm_up,
)

names = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=6, unique=True)


@given(names, st.integers(0, 50), st.integers(0, 9))
def test_everybody_has_one_turn_a_round(who: list[str], number: int, seed: int) -> None:
    assert sorted(schedule(who, number, seed)) == sorted(who)
    assert schedule(who, number, seed) == schedule(list(reversed(who)), number, seed)


@given(names, st.integers(0, 50), st.integers(0, 9))
def test_rounds_come_in_mirrored_pairs(who: list[str], pair: int, seed: int) -> None:
    assert schedule(who, 2 * pair, seed) == tuple(reversed(schedule(who, 2 * pair + 1, seed)))


def race(count: int, drift: float, seed: int, *, interleaved: bool) -> Interval:
    """Two models of exactly the same speed, on a machine that slows down by `drift` of its speed a turn."""
    generator = np.random.default_rng(seed)
    who = ["baseline", "a", "b", "c"]
    if interleaved:
        order = [name for number in range(count) for name in schedule(who, number, seed)]
    else:
        order = [name for name in who for _ in range(count)]
    rounds: dict[str, list[list[float]]] = {name: [] for name in who}
    for position, name in enumerate(order):
        rounds[name].append([(1 + drift * position) * float(np.exp(generator.normal(0, 0.01)))])
    return ratio_interval(rounds["baseline"], rounds["c"], seed=seed)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.0005, 0.005), st.integers(0, 1000))
def test_interleaving_is_unbiased_under_drift_where_one_after_the_other_is_not(drift: float, seed: int) -> None:
    """A machine that heats up would make whoever is measured first look faster."""
    count = 24
    fair, naive = (race(count, drift, seed, interleaved=way) for way in (True, False))
    assert fair.value == pytest.approx(1, abs=0.03)  # in the middle rounds one may stand three turns before the other
    # one after the other, the last of four starts when three quarters of the drift are done
    bias = (1 + drift * count / 2) / (1 + drift * count * 3.5)
    assert naive.value == pytest.approx(bias, abs=0.03)


def test_interleaved_intervals_cover_the_truth_under_drift() -> None:
    found = [race(24, 0.003, seed, interleaved=True) for seed in range(100)]
    assert np.mean([i.low <= 1 <= i.high for i in found]) >= 0.92
    assert np.mean([race(24, 0.003, s, interleaved=False).high < 1 for s in range(50)]) == 1.0


def steady_rounds(count: int, spread: float) -> dict[str, list[list[float]]]:
    generator = np.random.default_rng(0)
    return {
        name: [[speed * float(np.exp(generator.normal(0, spread)))] for _ in range(count)]
        for name, speed in (("baseline", 2.0), ("a", 1.0), ("b", 3.0))
    }


def test_a_quiet_machine_is_soon_enough_and_a_noisy_one_needs_more() -> None:
    assert enough(steady_rounds(MIN_ROUNDS, 0.001), "baseline", seed=0)
    assert not enough(steady_rounds(MIN_ROUNDS - 1, 0.001), "baseline", seed=0)  # agreement of few may be luck
    assert not enough(steady_rounds(MIN_ROUNDS, 0.2), "baseline", seed=0)
    assert enough(steady_rounds(400, 0.1), "baseline", seed=0)
    assert not enough({}, "baseline", seed=0)


def test_of_several_starts_each_may_be_known_less_narrowly() -> None:
    """Broken: each start goes on until it is known to 2 % by itself, though processes differ by more than that; or a
    measurement of one process ends sooner than it said."""
    rounds = steady_rounds(24, 0.06)
    assert enough(rounds, "baseline", seed=0, starts=5)
    assert not enough(rounds, "baseline", seed=0, starts=2)
    assert not enough(steady_rounds(24, 0.2), "baseline", seed=0, starts=5)


def test_a_start_is_not_known_more_narrowly_than_starts_differ() -> None:
    """Broken: of a small model, whose speedup is 12 in one process and 16 in the next, each start goes on until it is
    known to 4.5 %, which takes most of a minute and narrows nothing."""
    noisy = steady_rounds(24, 0.2)
    assert enough(noisy, "baseline", seed=0, starts=5, differ={"a": 0.15, "b": 0.15})
    assert not enough(noisy, "baseline", seed=0, starts=5, differ={"a": 0.15})
    # One start in which others' work slowed it down a hundred times makes no measurement of six wild rounds enough.
    assert not enough(steady_rounds(MIN_ROUNDS, 0.9), "baseline", seed=0, starts=5, differ={"a": 3.0, "b": 3.0})


def test_a_percentile_that_a_gate_looks_at_gets_its_calls() -> None:
    """Else a slow model would stop after six calls, and its p95 gate could not run."""
    quiet = steady_rounds(20, 0.001)
    independent = min(effective_calls(turns, GATED) for turns in quiet.values())
    assert enough(quiet, "baseline", seed=0, min_calls=int(independent))
    assert not enough(quiet, "baseline", seed=0, min_calls=int(independent) + 1)


def test_a_start_that_others_follow_need_not_be_known_beyond_what_it_shows() -> None:
    """Broken: on a noisy machine the first process is measured for as long as three starts take, and the interval comes
    from too few of them; or one that is known to nothing counts as a start."""
    noisy, noise = steady_rounds(16, 0.06), steady_rounds(16, 0.9)
    assert not enough(noisy, "baseline", seed=0, starts=5)
    assert enough(noisy, "baseline", seed=0, starts=5, rough=True)
    assert not enough(noise, "baseline", seed=0, starts=5, rough=True)
    assert not enough(steady_rounds(MIN_ROUNDS - 1, 0.001), "baseline", seed=0, starts=5, rough=True)
    assert not enough(noisy, "baseline", seed=0, starts=5, min_calls=10**6, rough=True)


def test_half_a_mirrored_pair_is_not_enough() -> None:
    assert not enough(steady_rounds(MIN_ROUNDS + 1, 0.0001), "baseline", seed=0)


@given(st.floats(0.1, 100), st.floats(0.001, 0.1))
def test_the_rule_looks_at_the_width_only(value: float, half: float) -> None:
    found = Interval(value=value, low=value * (1 - half), high=value * (1 + half), confidence=0.95)
    assert is_within(found, 0.02) == (half <= 0.02) or half == pytest.approx(0.02)


class Clock:
    """A clock on which a runtime's thread keeps a core busy until `rest`; it moves on by what a test sleeps. The real
    one on a busy machine says how busy that is, and a core that is kept busy needs one of its own to be seen, which a
    test can't ask for: `docs/decisions/0018` tells what was measured."""

    def __init__(self, rest: float = 0.0) -> None:
        self.rest, self.now = rest, 0.0
        self.at: dict[float, Callable[[], object]] = {}  # what happens then, while somebody sleeps

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(due)()

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def process_time(self) -> float:
        return min(self.now, self.rest)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    monkeypatch.setattr(timing, "_TASKS", tmp_path / "task")  # none: this process's own threads do as they like
    return made


def test_warm_up_goes_on_while_a_model_gets_faster(clock: Clock) -> None:
    """Broken: a fixed number of warm-up calls would time the compiler, not the model."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clock.sleep(max(0.0, 0.01 - calls * 0.0005))  # twenty calls until it is warm
        clock.sleep(0.002)

    found = warm_up(call, max_seconds=5)
    assert found["steady"]
    assert found["calls"] == calls > 20


def test_warm_up_ends_at_its_limit_and_says_so(clock: Clock) -> None:
    """Broken: a model that never becomes steady would be warmed up for ever."""
    growing = iter(range(10_000))
    found = warm_up(lambda: clock.sleep(0.0005 * next(growing)), max_seconds=0.3)
    assert not found["steady"]
    assert found["seconds"] < 1
    assert warm_up(lambda: None, max_seconds=0.0)["calls"] == 1


def test_steady_needs_three_windows_that_agree() -> None:
    assert not steady([1.0, 1.0])
    assert steady([5.0, 1.0, 1.01, 1.02])
    assert not steady([1.0, 1.0, 1.2])


def right(seen: list[int]) -> Callable[[Any], Any]:
    """A model that notes what it is called with."""

    def run(batch: Any) -> Any:
        seen.append(batch)
        return {"y": np.zeros(1)}

    return run


def test_a_turn_is_bounded_and_leaves_the_collector_as_it_was(clock: Clock) -> None:
    """Broken: a turn would be as long as its inputs last, or time the garbage collector too."""
    collecting: list[bool] = []

    def run(batch: Any) -> Any:
        clock.sleep(0.001)
        collecting.append(gc.isenabled())
        return {}

    assert len(turn(run, count(), seconds=0.02)) == len(collecting) > 1
    assert not any(collecting)
    assert gc.isenabled()

    def slow(batch: Any) -> Any:
        clock.sleep(0.01)
        return {}

    (latency,) = turn(slow, count(), seconds=0.0)
    assert latency >= 0.01
    seen: list[int] = []
    assert len(turn(right(seen), range(7), seconds=60.0)) == 7
    assert seen == list(range(7))


def test_what_was_answered_is_given_on_by_its_place() -> None:
    """Broken: an answer would be laid beside the original's to another input."""
    kept: list[tuple[int, int]] = []
    turn(
        lambda n: {"y": np.array(n)},
        [5, 6, 7],
        seconds=60.0,
        keep=lambda place, answer: kept.append((place, int(answer["y"]))),
    )
    assert kept == [(0, 5), (1, 6), (2, 7)]


class Late(np.ndarray):
    """An array that could compute when it is looked at."""


@pytest.mark.parametrize("answer", [[1.0], {"y": [1.0]}, {"y": memoryview(b"abcd")}, {"y": np.zeros(2).view(Late)}])
def test_what_is_not_an_array_is_refused_not_converted(answer: Any) -> None:
    """Broken: the conversion, which is when a lazy answer is computed, would come after the clock stopped."""
    with pytest.raises(SourceError, match="wanted"):
        turn(lambda _: answer, [0], seconds=1.0)


def test_every_turn_has_as_many_calls_however_slow_the_machine_is() -> None:
    """Broken: a round in which a model is slow would hold few of its calls, and one in which it is fast many, so that
    its median would be that of the fast rounds. Here the machine is three times as slow in two rounds of three; the
    baseline's turns hold one call either way, so its median is a slow one. The true ratio is 15."""
    slowdown = [3.0, 3.0, 1.0] * 8
    baseline = [[0.06 * slow] for slow in slowdown]
    equally_long = [[0.004 * slow] * max(1, round(TURN_S / (0.004 * slow))) for slow in slowdown]
    as_many_calls = [[0.004 * slow] * calls_of_a_turn(0.004) for slow in slowdown]
    assert ratio_interval(baseline, equally_long, seed=0).value > 30
    assert ratio_interval(baseline, as_many_calls, seed=0).value == pytest.approx(15)
    assert calls_of_a_turn(35e-6) == round(TURN_S / 35e-6)
    assert calls_of_a_turn(2.0) == calls_of_a_turn(0.0) == 1
    assert calls_of_a_turn(1e-9) == MOST_CALLS


@pytest.mark.parametrize(("rest", "ends"), [(0.0, 0.002), (0.055, 0.057), (9.0, SETTLE_S)])
def test_a_turn_ends_when_the_runtime_is_at_rest(clock: Clock, rest: float, ends: float) -> None:
    """Broken: threads that wait for the next call in a busy loop would take a core from whoever comes next, and
    candidates would be called slower by their place in the order; or one that never rests would hold up the measurement
    for ever."""
    clock.rest = rest
    settle()
    assert ends <= clock.now <= ends + 0.003


@pytest.mark.parametrize(("state", "ends"), [("R", 0.1), ("S", 0.002)], ids=["waits-for-a-core", "sleeps"])
def test_a_thread_that_waits_for_a_core_is_not_at_rest(clock: Clock, tmp_path: Path, state: str, ends: float) -> None:
    """Broken: on a busy machine a turn would end while a runtime's thread, which looks for the next call, has no core
    at that moment. It would go on in another's turn, and an honest candidate fail for that."""
    for thread, its_state in ((str(threading.get_native_id()), "R"), ("1", state)):
        (tmp_path / "task" / thread).mkdir(parents=True)
        (tmp_path / "task" / thread / "stat").write_text(f"{thread} (a (name)) {its_state} 1 1 1")
    clock.at[0.1] = lambda: (tmp_path / "task" / "1" / "stat").write_text("1 (a (name)) S 1 1 1")
    settle()
    assert ends <= clock.now <= ends + 0.003


@pytest.mark.parametrize(
    ("waits", "calls"),
    [(0.0, 3), (0.02, 15), (9.0, 21)],
    ids=["apart-at-once", "after-a-while", "never"],
)
def test_untimed_calls_end_when_no_thread_waits(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, waits: float, calls: int
) -> None:
    """Broken: a turn would be timed while the kernel has two threads share a core, as it does at the start of every
    second turn of a small model; or on a busy machine, where they always wait, it would never begin."""
    made = []

    def call() -> None:
        made.append(clock.now)
        clock.sleep(0.002)

    monkeypatch.setattr(timing, "_waited_s", lambda: min(clock.now, waits))
    spread(call)
    assert len(made) == calls
    assert clock.now <= UNTIMED_S + 0.005 + 0.002  # a window of 5 ms, and the call that it ends with
    begun = clock.now
    spread(call, UNTIMED_S / 10)  # of a turn that had to become shorter
    assert clock.now - begun <= UNTIMED_S / 10 + 0.003
    slow = []
    spread(lambda: (slow.append(0), clock.sleep(1.0)))
    assert len(slow) == 1


def test_latencies_are_in_order(clock: Clock) -> None:
    """Broken: what is told of the first calls of a turn would be those of the last."""
    durations = [0.002, 0.006, 0.012]

    def run(seconds: Any) -> Any:
        clock.sleep(seconds)
        return {}

    assert turn(run, durations, seconds=1.0) == pytest.approx(durations, abs=1e-4)


latencies = st.floats(1e-6, 1.0)


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(latencies, latencies), min_size=1), st.data())
def test_whoever_is_dropped_is_far_behind_a_leader_in_each_round(
    drawn: dict[str, tuple[float, float]], data: st.DataObject
) -> None:
    """Broken: a candidate that might have won would be dropped after a short look, or all of them would."""
    rounds = {name: [[first], [second]] for name, (first, second) in drawn.items()}
    leaders = data.draw(st.lists(st.sampled_from(sorted(drawn)), unique=True))
    dropped = far_slower(rounds, leaders)
    assert not leaders or set(leaders) - set(dropped)
    for name, (leader, times) in dropped.items():
        assert leader in leaders
        assert times >= FAR_SLOWER
        for own, ahead in zip(drawn[name], drawn[leader], strict=True):
            assert own / ahead >= times * (1 - 1e-12)
