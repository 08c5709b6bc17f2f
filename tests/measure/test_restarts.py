"""Several processes for each model: what one process shows is not what the next will."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core.records import Measurement, Timing
from compile_stage.measure import restarts, speedups, stats
from compile_stage.measure.restarts import Schedule, contenders, merge

ROUNDS = 6


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("simulations")


def measurement(*latencies: float, batch_sizes: tuple[int, ...] = (1,), load_s: float = 1.0) -> Measurement:
    """One process, whose rounds of two calls take so long each."""
    timings = tuple(
        Timing(
            latency_s=tuple(call for latency in latencies for call in (latency, latency)),
            batch_size=batch_size,
            stable=True,
            environment="x",
            rounds=len(latencies),
            turns=(2,) * len(latencies),
            cpu_s=(0.1,) * len(latencies),
            threads=1,
        )
        for batch_size in batch_sizes
    )
    return Measurement(timings=timings, load_s=load_s, peak_memory_bytes=int(1e6 * load_s))


def steady(latency: float, seed: int, noise: float = 0.001) -> Measurement:
    generator = np.random.default_rng(seed)
    return measurement(*(latency * np.exp(noise * generator.standard_normal(ROUNDS))).tolist())


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.04])
def test_the_interval_holds_the_truth_though_rounds_and_processes_differ(
    simulations: ModuleType, memory: float, spread: float
) -> None:
    """Broken: as with one process, whose interval held the true ratio in 36 % of cases for an autocorrelation of 0.9
    and in 17 % for processes that differ by 4 %, and up to 29 % of 3 %-slower artifacts passed min_speedup: 1.0."""
    cell = simulations.speedup_cell(memory, spread, 120)
    assert cell["held"] >= 0.88  # 95 % less three standard errors of 120 trials
    assert cell["slower_passes"] <= 0.1


def test_five_starts_hold_the_truth_in_half_the_width(simulations: ModuleType) -> None:
    """Broken: a generous budget buys nothing, or an interval that is too short."""
    measure = partial(simulations.ratio_now, starts=restarts.MORE_PROCESSES)
    cell = simulations.speedup_cell(0.5, 0.04, 120, measure)
    assert cell["held"] >= 0.88
    assert cell["half_width"] < 0.6 * simulations.speedup_cell(0.5, 0.04, 120)["half_width"]


def test_beside_a_neighbour_that_works_half_of_the_time_the_interval_holds_the_truth(simulations: ModuleType) -> None:
    """Broken: where calls have two speeds, the median of all jumps between them: the interval around it held the truth
    in 57 of 100 cases, and 15 % of what is 10 % slower passed min_speedup: 1.0."""
    cell = simulations.speeds_cell(0.1, 0.5, 2.0, 60, centred=False)
    assert cell["held"] >= 0.86
    assert cell["slower_passes"] <= 0.05


@pytest.mark.parametrize("starts", [3, 5])
def test_where_the_original_waits_for_cores_in_some_starts_its_artifact_is_not_called_faster(
    simulations: ModuleType, starts: int
) -> None:
    """Broken: on a machine that others use, Student's t over five starts calls an artifact faster in one case of ten
    that is as fast as the original, and one that is ten times as fast passes in three of four."""
    cell = simulations.stalls_cell(0.3, 300.0, starts, 60, student=False)
    assert cell["slower_passes"] <= 0.07
    assert cell["tenfold_passes"] >= (0.6 if starts < 5 else 0.98)


def test_beyond_the_goal_the_interval_is_too_short_as_the_docs_say(simulations: ModuleType) -> None:
    """Broken: docs/measurement.md would warn of what does not happen any more."""
    assert simulations.speedup_cell(0.98, 0.0, 120)["held"] < 0.9


def test_the_speedup_is_the_quotient_of_the_medians_of_all_starts() -> None:
    """Broken: the figure beside two medians would not be their quotient (decision 0029)."""
    starts = [{"baseline": steady(2.0, n, noise=0.0), "a": steady(1.0 + 0.01 * n, 10 + n, noise=0.0)} for n in range(3)]
    merged = merge(starts, "baseline", seed=0)
    own, base = merged["a"].timings[0], merged["baseline"].timings[0]
    assert own.speedup == pytest.approx(stats.median(base.latency_s) / stats.median(own.latency_s))
    assert own.processes == (0,) * ROUNDS + (1,) * ROUNDS + (2,) * ROUNDS
    assert own.mean_speedup_interval is not None
    assert own.mean_speedup_interval[0] < 1.98 < own.mean_speedup_interval[1], "and that of the means beside it"
    assert len(own.latency_s) == sum(own.turns) == 3 * ROUNDS * 2
    assert len(own.cpu_s) == 3 * ROUNDS
    quotients = [2.0 / (1.0 + 0.01 * n) for n in range(3)]
    half = 4.303 * np.log(quotients).std(ddof=1) / math.sqrt(3)
    assert own.speedup_interval is not None
    assert math.log(own.speedup_interval[1] / own.speedup) == pytest.approx(half, rel=1e-3)
    assert base.speedup is None


def test_one_process_alone_is_not_believed_to_a_per_cent() -> None:
    """Broken: a heavy model, for which there is no time to start it again, is said to be 3 % faster, and its next
    process is slower than the original."""
    one = merge([{"baseline": steady(1.03, 0), "a": steady(1.0, 1)}], "baseline", seed=0)["a"].timings[0]
    assert one.speedup_interval is not None
    assert one.speedup_interval[0] < 0.93
    assert not one.stable
    clear = merge([{"baseline": steady(1.4, 0), "a": steady(1.0, 1)}], "baseline", seed=0)["a"].timings[0]
    assert clear.speedup_interval is not None
    assert clear.speedup_interval[0] > 1.2  # what is shown beyond what processes may differ by still counts


def test_who_was_started_once_has_the_spread_of_those_who_were_started_again() -> None:
    """Broken: every loser would be called unstable, or believed as if processes were all alike."""
    starts = [{"baseline": steady(2.0, n), "a": steady(1.0, 10 + n)} for n in range(3)]
    starts[0]["slow"] = steady(1.6, 20)
    quiet = merge(starts, "baseline", seed=0)["slow"].timings[0]
    assert quiet.stable
    assert quiet.speedup == pytest.approx(1.25, rel=0.01)
    starts[1]["a"], starts[2]["a"] = steady(1.08, 11), steady(0.92, 12)
    assert not merge(starts, "baseline", seed=0)["slow"].timings[0].stable


def test_who_was_started_once_is_not_believed_where_starts_differ_by_far() -> None:
    """Broken: on a machine whose cores others use the original takes 100 times as long in two starts of five. Who was
    measured in one of those alone won with "3060 to 7412 times as fast" and passed any min_speedup, while those with
    five starts were too uncertain."""
    latencies = 900, 9, 9, 880, 9
    starts = [{"baseline": steady(latency, n), "a": steady(1.0, 10 + n)} for n, latency in enumerate(latencies)]
    starts[0]["slow"] = steady(1.6, 20)
    slow = merge(starts, "baseline", seed=0)["slow"].timings[0]
    assert slow.speedup == pytest.approx(900 / 1.6, rel=0.01)
    assert slow.speedup_interval is not None
    assert slow.speedup_interval[0] < 9 / 1.6


@pytest.mark.parametrize("differ", [0.04, 0.1, 0.5])
def test_the_interval_of_one_start_holds_the_truth_though_processes_differ_by_more_than_is_assumed(
    differ: float,
) -> None:
    """Broken: what processes differ by was taken for 4 % at most, and where it is 10 % the interval of who was started
    once held the truth in 57 of 100 cases."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(60):
        base, own, slow = np.exp(differ * generator.standard_normal((3, 5)))
        starts = [{"baseline": steady(9 * base[n], n), "a": steady(own[n], 10 + n)} for n in range(5)]
        starts[0]["slow"] = steady(1.5 * slow[0], 20)
        interval = merge(starts, "baseline", seed=0)["slow"].timings[0].speedup_interval
        assert interval is not None
        held += interval[0] < 6 < interval[1]
    assert held >= 51  # 95 % of 60, less three standard errors


def test_one_disturbed_start_does_not_hide_what_all_three_show() -> None:
    """Broken: an honest artifact that is 8 times as fast fails min_speedup: 1.0, since the original stalled in one of
    three starts."""
    starts = [{"baseline": steady(latency, n), "a": steady(1.0, 10 + n)} for n, latency in enumerate((7.9, 100.0, 8.1))]
    own = merge(starts, "baseline", seed=0)["a"].timings[0]
    assert own.speedup_interval is not None
    assert own.speedup_interval[0] > 6.5
    assert own.speedup_interval[1] > 50
    assert not own.stable


def test_memory_is_that_of_all_starts_and_the_load_time_that_of_the_first() -> None:
    """Broken: the peak of one lucky start would be the figure that a limit on memory looks at; or a load time would be
    that of a process that was loaded beside another."""
    starts = [
        {"baseline": measurement(2.0, 2.0), "a": measurement(1.0, 1.0, load_s=load_s)} for load_s in (3.0, 1.0, 2.0)
    ]
    merged = merge(starts, "baseline", seed=0)["a"]
    assert merged.load_s == 3.0
    assert merged.peak_memory_bytes == 3_000_000


def test_only_who_may_win_is_started_again() -> None:
    """Broken: ten candidates would be loaded three times each, for nothing; or the best at batch 8 is left out where
    the policy prefers throughput."""
    measured = {
        "baseline": measurement(5.0, 5.0, batch_sizes=(1, 8)),
        "fast": measurement(1.0, 1.0, batch_sizes=(1, 8)),
        "near": measurement(1.2, 1.2, batch_sizes=(1, 8)),
        "far": measurement(1.5, 1.5, batch_sizes=(1, 8)),
        "dropped": replace(measurement(1.0), stopped_early="far slower"),
    }
    assert contenders(measured, "baseline") == ["fast", "near"]
    batch_8 = replace(measured["far"].timings[1], latency_s=(0.5,) * 4)
    measured["far"] = replace(measured["far"], timings=(measured["far"].timings[0], batch_8))
    assert "far" in contenders(measured, "baseline")


def test_noisy_calls_of_the_original_make_no_contender_of_who_left_early() -> None:
    """Broken: the original took 74 ms in half of the first rounds and 0.7 ms later, so that those who left behind the
    fastest were started again, and the fastest was not."""
    noisy = [0.074, 0.0006, 0.0004, 0.081, 0.071, 0.008, *[0.0007] * 14]
    measured = {
        "baseline": measurement(*noisy),
        "fast": measurement(*[28e-6] * 20),
        "left": measurement(*[102e-6] * 6),
    }
    assert contenders(measured, "baseline") == ["fast"]


def test_by_what_starts_differ_is_of_those_with_two_of_them() -> None:
    """Broken: a participant's later starts end by what another's differ by."""
    starts = [
        {"baseline": steady(4.0, 1), "a": steady(1.0, 2), "b": steady(2.0, 3)},
        {"baseline": steady(4.0, 4), "a": steady(1.2, 5), "joined": steady(1.0, 6)},
    ]
    seen = restarts.differences(starts, "baseline", 1)
    assert seen == {"a": pytest.approx(math.log(1.2) / math.sqrt(2), rel=0.02)}
    assert restarts.differences(starts[:1], "baseline", 1) == {}


def test_whoever_may_still_win_must_agree_before_no_more_starts_are_made() -> None:
    """Broken: a slow candidate whose speedup is known to 2 % has everybody started twice more; or the winner is taken
    from starts that differ."""
    starts = [
        {"baseline": steady(4.0, n), "fast": steady(1.0, 10 + n), "behind": steady(1.2 + 0.01 * n, 20 + n)}
        for n in range(3)
    ]
    names = ["baseline", "fast", "behind"]
    assert restarts.agree(merge(starts, "baseline", seed=0), names, "baseline", 0.02)
    near = [{**start, "behind": steady(1.0 + 0.01 * n, 30 + n)} for n, start in enumerate(starts)]
    assert not restarts.agree(merge(near, "baseline", seed=0), names, "baseline", 0.02)


@pytest.mark.parametrize(("other", "enough"), [(1.005, True), (1.03, False), (1.2, True)])
def test_starts_that_are_known_to_four_per_cent_are_enough_where_the_winner_is_decided(
    other: float, enough: bool
) -> None:
    """Broken: a quiet machine that could say ±4 % after three starts makes five; or it takes the slower of two that lie
    3 % apart for a tie."""
    apart = (0.991, 1.0, 1.009)
    starts = [
        {"baseline": steady(4.0, n), "fast": steady(born, 10 + n), "other": steady(other * born, 20 + n)}
        for n, born in enumerate(apart)
    ]
    measured = merge(starts, "baseline", seed=0)
    names = ["baseline", "fast", "other"]
    assert not restarts.agree(measured, names, "baseline", 0.02)
    assert restarts.agree(measured, names, "baseline", 0.04) == enough


def test_who_left_behind_one_that_was_refused_is_started_again() -> None:
    """Broken: a liar that claims to be the fastest has all others leave the rounds, is refused, and the honest winner
    is known by one start, or by rounds of another start than the original's."""
    starts = [
        {"baseline": measurement(*[2.0] * 8), "left": measurement(*[1.0] * 6), "far": measurement(*[1.5] * 8)},
        {"baseline": measurement(*[6.0] * 8), "left": measurement(*[3.0] * 8)},
        {"baseline": measurement(*[4.0] * 8), "left": measurement(*[2.0] * 8)},
    ]
    assert contenders(starts[0], "baseline") == ["left"]
    own = merge(starts, "baseline", seed=0)["left"].timings[0]
    assert own.speedup_interval is not None
    assert own.speedup_interval[0] > 1.8  # each start's quotient is 2: rounds of different starts would give 0.7 to 6
    assert own.speedup_interval[1] < 2.2


def test_who_joined_after_the_first_start_is_compared_in_the_starts_that_both_ran() -> None:
    """Broken: a model on fewer threads, which is tried from the second start on, is compared with calls of a start in
    which the machine was twice as slow; or it never ties, and wins by what chance does."""
    starts = [{"baseline": steady(4.0, 0), "a": steady(2.0, 10)}]
    starts += [
        {"baseline": steady(2.0, n), "a": steady(1.0, 10 + n), "b": steady(0.7, 20 + n), "c": steady(c, 30 + n)}
        for n, c in enumerate((0.97, 1.05, 0.96), start=1)
    ]
    merged = {name: m.timings[0] for name, m in merge(starts, "baseline", seed=0).items()}
    assert merged["b"].processes == (1,) * ROUNDS + (2,) * ROUNDS + (3,) * ROUNDS
    assert merged["b"].speedup == pytest.approx(2 / 0.7, rel=0.01)
    assert merged["a"].speedup == pytest.approx(2, rel=0.01)
    assert not speedups.tied(merged["a"], merged["b"])
    assert speedups.tied(merged["a"], merged["c"])
    assert speedups.tied(merged["c"], merged["a"])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_shared_rounds_are_of_the_same_start(rounds: list[tuple[int, int]]) -> None:
    """Broken: a round is compared with one of another start, or is said to belong to another: the interval of every
    ratio between two candidates then says nothing."""

    def timing(side: int) -> Timing:
        owners = tuple(start for start, counts in enumerate(rounds) for _ in range(counts[side]))
        (own,) = measurement(*(1.0 + start for start in owners)).timings
        return replace(own, processes=owners)

    base, own = timing(0), timing(1)
    shared = restarts.shared_rounds(base, own)
    if not base.processes or not own.processes:  # of one that made no round
        assert not shared.own
        return
    assert shared.base == shared.own == [(1.0 + start,) * 2 for start in shared.processes]
    assert list(shared.processes) == [start for start, counts in enumerate(rounds) for _ in range(min(counts))]


def test_what_settings_are_worth_a_try() -> None:
    """Broken: fewer threads are tried on a network of 50 ms, or the slowest candidate is tried first, or batches are
    shared where there are none; or an LSTM that wins on its batch's shared rows alone is not given them."""

    def of(**latencies: tuple[float, ...]) -> dict[str, Measurement]:
        found = {"baseline": (9e-3, 9e-3), **latencies}
        return {name: both(*latency[: len(latencies["a"])]) for name, latency in found.items()}

    def both(*latencies: float) -> Measurement:
        one = measurement(*[1.0] * 6, batch_sizes=(1, 8)[: len(latencies)])
        timings = (replace(t, latency_s=(x,) * 6) for t, x in zip(one.timings, latencies, strict=True))
        return replace(one, timings=tuple(timings))

    one_row = of(a=(6e-4,), b=(5e-4,), c=(9e-4,))
    short = restarts.worth_a_try(one_row, "baseline", 2)
    assert list(short["short-calls"].items()) == [("b", 1.0), ("a", pytest.approx(1.2))]
    assert short["batches"] == {}
    long = of(a=(3e-3,))
    assert restarts.worth_a_try(long, "baseline", 2) == {"short-calls": {}, "batches": {}, "layout": {"a": 1.0}}
    rows = of(a=(5e-4, 4e-3), b=(1e-3, 7.9e-3), c=(1e-3, 5.4e-3), d=(1e-3, 8.1e-3))
    several = restarts.worth_a_try(rows, "baseline", 2)
    assert list(several["short-calls"]) == ["a"]
    assert list(several["batches"].items()) == [("a", 1.0), ("c", pytest.approx(1.35)), ("b", pytest.approx(1.975))]
    assert restarts.worth_a_try(rows, "baseline", 1)["batches"] == {}


@pytest.mark.parametrize(
    ("restart_s", "starts"), [(0.0, 5), (7.5, 5), (7.6, 4), (10.1, 3), (15.0, 3), (16.0, 2), (31.0, 1)]
)
def test_loading_takes_at_most_half_of_the_time(restart_s: float, starts: int) -> None:
    """Broken: a network that loads for a minute would be loaded three times in a measurement of a minute; or one that
    loads at once is known to ±12 % where twice as well costs nothing."""
    schedule = Schedule(60.0)
    schedule.begin(restart_s, 3)
    assert schedule.starts == starts
    left_s = 60.0 - (starts - 1) * restart_s
    assert schedule.seconds_of(0) == pytest.approx(left_s / starts, abs=0.1)
    assert bool(schedule.note(restart_s, others=False)) == (starts < 3)
    assert schedule.rough_s == (max(restart_s / 2, 3.0) if starts >= 3 else math.inf)  # of fewer, rounds tell all


def test_the_note_tells_who_was_started_once() -> None:
    """If it failed, a report would say "from 2 processes of each model" of one that was started once, and contradict
    its own first line."""
    schedule = Schedule(60.0, starts=2)
    assert "from 2 processes of each model; " in schedule.note(25.0, others=False)
    expected = "from 2 processes of each model within 25 % of the fastest, and from one of each other model; "
    assert expected in schedule.note(25.0, others=True)
    assert "from one process of each model; " in Schedule(60.0, starts=1).note(60.0, others=True)
    assert "(60 s here): starting the models again takes 60 s" in Schedule(60.0, starts=1).note(60.4, others=True)
    short = Schedule(0.5, starts=1).note(1.2, others=False)
    assert "(0.5 s here): starting the models again takes 1.2 s" in short  # not "0 s"


def test_candidates_that_processes_of_chance_tell_apart_tie() -> None:
    """Broken: of two equal candidates, the one whose process was luckier wins over the simpler one."""
    starts = [
        {"baseline": steady(2.0, n), "a": steady(latency, 10 + n), "b": steady(1.0, 20 + n)}
        for n, latency in enumerate((1.06, 0.97, 1.05))
    ]
    merged = merge(starts, "baseline", seed=0)
    a, b = merged["a"].timings[0], merged["b"].timings[0]
    assert speedups.tied(a, b)
    plain = [replace(timing, processes=()) for timing in (a, b)]
    assert not speedups.tied(plain[0], replace(plain[1], latency_s=tuple(0.9 * call for call in plain[1].latency_s)))


@pytest.mark.parametrize(
    ("restart_s", "left_s", "starts"), [(0.5, 24.0, 9), (3.0, 24.0, 7), (8.0, 24.0, 5), (3.0, 0.0, 5)]
)
def test_an_open_gate_has_as_many_more_starts_as_the_time_has_room_for(
    monkeypatch: pytest.MonkeyPatch, restart_s: float, left_s: float, starts: int
) -> None:
    """Broken: starts that are all loading and no rounds, or fewer than were planned."""
    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: 100.0))
    schedule = Schedule(60.0, restart_s=restart_s, _ends=100.0 + left_s)
    schedule.more(3)
    assert schedule.starts == starts
