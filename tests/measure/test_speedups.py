"""Speedups: the interval holds the truth as often as it says, and what it can not tell apart is a tie."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.records import Timing
from compile_stage.measure import speedups
from compile_stage.measure.speedups import FEW_ROUNDS, UNSTABLE, is_within, ratio_interval, tied
from compile_stage.measure.stats import Interval, median


def rounds_of(medians: np.ndarray) -> list[list[float]]:
    return [[float(m)] for m in medians]


def test_the_resamples_of_rounds_are_scipys() -> None:
    """Broken: the interval would not be that of `scipy.stats.bootstrap`, as the documents say."""
    from scipy.stats import bootstrap as scipys

    rounds = [np.random.default_rng(number).lognormal(size=(12, 5)).tolist() for number in (1, 2)]

    def log_ratio(drawn: np.ndarray) -> float:
        ours, others = (speedups._PooledMedian([side[round_] for round_ in drawn]).value for side in rounds)
        return math.log(ours / others)

    theirs = scipys((np.arange(12),), log_ratio, vectorized=False, n_resamples=1000, method="percentile", rng=7)
    base, own = map(speedups._PooledMedian, rounds)
    np.testing.assert_allclose(speedups._resampled_log_ratios(base, own, 12, 7), theirs.bootstrap_distribution)


@pytest.mark.parametrize("count", [4, FEW_ROUNDS, 12, 30])
def test_ratio_interval_covers_the_truth(count: int) -> None:
    """At any number of rounds, although all of a round is slowed alike and one round in ten is disturbed. Broken: a
    candidate that is slower than the policy allows would pass more often than 1 time in 20."""
    generator = np.random.default_rng(count)
    trials, hits = 200, 0
    for trial in range(trials):
        slowed = np.exp(generator.normal(0, 0.2, count))
        disturbed = np.where(generator.random((2, count)) < 0.05, np.exp(generator.normal(0, 0.1, (2, count))), 1)
        noise = np.exp(generator.normal(0, 0.02, (2, count))) * disturbed
        ratio = ratio_interval(rounds_of(3.0 * slowed * noise[0]), rounds_of(slowed * noise[1]), seed=trial)
        hits += ratio.low <= 3.0 <= ratio.high
    assert hits / trials >= 0.92


def test_the_speedup_is_the_quotient_of_the_medians_beside_it() -> None:
    """Broken: "827x" would stand over "35.1 us, baseline 1.09 ms". Such a run: a small model whose two threads wait for
    each other on a busy machine. In most rounds a call of the baseline took 29 ms, so a turn held one or two; in the
    others 1.09 ms, and a turn held many. The mean over rounds is that of the slow ones, the median of all calls is a
    fast one."""
    slow, fast, own = [[0.029] * 2] * 20, [[0.00109] * 37] * 2, [[35.1e-6] * 100] * 22
    ratio = ratio_interval(slow + fast, own, seed=0)
    assert ratio.value == pytest.approx(1.09e-3 / 35.1e-6)
    assert ratio.high > 800  # what the rounds do not agree on is in the interval
    assert not is_within(ratio, UNSTABLE)


@settings(max_examples=20)
@given(st.integers(2, 30), st.integers(1, 30), st.integers(0, 99))
def test_the_value_is_that_quotient_whatever_the_rounds_hold(count: int, calls: int, seed: int) -> None:
    """Broken: the ratio that is shown would not be explained by the two latencies that are shown."""
    generator = np.random.default_rng([count, calls, seed])
    base = [generator.lognormal(0, 1, generator.integers(1, calls + 1)).tolist() for _ in range(count)]
    own = [generator.lognormal(0, 1, generator.integers(1, calls + 1)).tolist() for _ in range(count)]
    ratio = ratio_interval(base, own, seed=seed)
    assert ratio.value == pytest.approx(median([*chain(*base)]) / median([*chain(*own)]))
    assert ratio.low <= ratio.value <= ratio.high


def test_a_quiet_run_is_stable_and_a_wide_interval_is_not() -> None:
    """Broken: every run would be called unstable, as when 2 % was asked for, or none."""
    generator = np.random.default_rng(0)

    def rounds(latency: float, spread: float) -> list[list[float]]:
        return [
            (latency * np.exp(generator.normal(0, spread) + generator.normal(0, 0.05, 20))).tolist() for _ in range(20)
        ]

    assert is_within(ratio_interval(rounds(2.0, 0.01), rounds(1.0, 0.01), seed=0), UNSTABLE)
    assert is_within(ratio_interval(rounds(2.0, 0.08), rounds(1.0, 0.08), seed=0), UNSTABLE)  # moderately busy
    assert not is_within(ratio_interval(rounds(2.0, 0.8), rounds(1.0, 0.8), seed=0), UNSTABLE)


def test_a_latency_that_is_no_number_is_refused() -> None:
    """Broken: a clock that went wrong would come out as an infinite speedup."""
    for wrong in ([[math.nan]], [[0.0]], [[]]):
        with pytest.raises(ValueError, match="rounds with calls"):
            ratio_interval([[1.0]], wrong, seed=0)


@pytest.mark.parametrize(("prefer", "batch_size"), [("throughput", 8), ("latency", 1)])
def test_the_deciding_batch_size_is_the_first_or_the_one_with_the_least_time_for_a_sample(
    prefer: Any, batch_size: int
) -> None:
    """Broken: a policy that prefers throughput would be answered by what a batch of one takes."""
    where = factories.target(batch_sizes=(1, 8, 64))
    times = tuple(
        factories.timing(batch_size=size, latency_s=(call_s,) * 12)
        for size, call_s in ((1, 1e-3), (8, 2e-3), (64, 0.1))
    )
    measured = factories.measurement(timings=times)
    found = speedups.deciding_timing(measured, factories.target_policy(where, prefer=prefer))
    assert found is not None
    assert found.batch_size == batch_size


def test_the_interval_of_means_over_three_starts_is_students_t_of_their_quotients() -> None:
    """Broken: each start would be compared with the rounds of the others, or the interval come from rounds that know
    nothing of how processes differ."""
    from scipy.stats import t

    faster = np.array([2.0, 2.2, 2.5])
    processes = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    base = [[1.0, 3.0]] * 9
    own = [[2.0 / faster[start]] * 4 for start in processes]
    found = speedups.mean_ratio_interval(base, own, seed=0, processes=processes)
    logs = np.log(faster)
    expected = np.exp(t.interval(0.95, 2, loc=logs.mean(), scale=logs.std(ddof=1) / math.sqrt(3)))
    assert found == pytest.approx(tuple(expected))


def test_a_single_round_shows_nothing() -> None:
    found = ratio_interval([[2.0]], [[1.0]], seed=0)
    assert found.value == pytest.approx(2)
    assert (found.low, found.high) == (0, math.inf)
    with pytest.raises(ValueError, match="round"):
        ratio_interval([], [], seed=0)


@settings(max_examples=25)
@given(st.floats(0.1, 10), st.integers(1, 40))
def test_ratio_does_not_know_the_unit(unit: float, count: int) -> None:
    generator = np.random.default_rng(count)
    base, own = generator.lognormal(0, 0.1, (2, count))
    found = ratio_interval(rounds_of(base), rounds_of(own), seed=0)
    scaled = ratio_interval(rounds_of(base * unit), rounds_of(own * unit), seed=0)
    assert scaled.value == pytest.approx(found.value)
    assert found.low <= found.value <= found.high
    assert ratio_interval(rounds_of(own), rounds_of(base), seed=0).value == pytest.approx(1 / found.value)


def test_one_wild_round_does_not_move_the_ratio() -> None:
    base, own = np.full(20, 2.0), np.full(20, 1.0)
    own[3] = 50.0
    assert ratio_interval(rounds_of(base), rounds_of(own), seed=0).value == pytest.approx(2.0)


def timing(latency: float, noise: float, rounds: int = 20, seed: int = 0, mood: float = 0.0) -> Timing:
    """Ten calls a round; `mood` slows whole rounds, for everybody alike."""
    own, shared = np.random.default_rng([seed, int(latency * 1e3)]), np.random.default_rng(99)
    rounds_s = [
        latency * np.exp(mood * shared.standard_normal()) * np.exp(noise * own.standard_normal(10))
        for _ in range(rounds)
    ]
    return Timing(
        latency_s=tuple(np.concatenate(rounds_s).tolist()),
        batch_size=1,
        stable=True,
        environment="x",
        rounds=rounds,
        turns=(10,) * rounds,
    )


def test_ties_are_what_noise_can_not_tell_apart() -> None:
    """Broken: chance would decide between equals, or a real difference would be called noise."""
    assert tied(timing(2.0, 0.3), timing(2.05, 0.3))
    assert tied(timing(2.0, 0.001), timing(2.03, 0.001))  # told apart, but closer than a ratio is resolved
    assert not tied(timing(2.0, 0.01), timing(2.2, 0.01))


def test_what_slows_both_does_not_make_a_tie() -> None:
    """Broken: on a noisy machine everything would tie, although the rounds were interleaved for that very reason."""
    assert not tied(timing(2.0, 0.01, mood=0.5), timing(2.2, 0.01, mood=0.5))


def test_timings_of_different_runs_never_tie() -> None:
    """Broken: numbers that were not measured side by side would be compared."""
    assert not tied(timing(2.0, 0.1), timing(2.0, 0.1, rounds=19))
    bare = Timing(latency_s=(2.0,), batch_size=1, stable=True, environment="x")
    assert not tied(bare, bare)


@pytest.mark.parametrize(
    ("noise", "rounds", "at_least"),
    [("quiet", 12, 0.9), ("disturbed", 12, 0.9), ("waves", 30, 0.85), ("own drift", 12, 0.5)],
)
def test_coverage_under_ugly_noise_is_what_the_docs_say(
    noise: str, rounds: int, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: docs/measurement.md would promise more, or less, than the interval keeps. The last kind is where it does
    not keep 95 %, which the page says; when that gets better, the page and this test change."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    share, _ = importlib.import_module("coverage_of_intervals").coverage(noise, rounds, 60)
    assert at_least <= share
    assert noise != "own drift" or share < 0.85


@given(
    st.lists(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=4), min_size=6, max_size=10),
    st.sampled_from([0.5, 0.9, 0.97, 1.0, 1.03, 1.2]),
)
@settings(max_examples=25, deadline=None)
def test_a_tie_that_is_seen_without_resampling_is_what_resampling_says(
    rounds: list[list[float]], factor: float
) -> None:
    """Broken: the shortcut would call two candidates different, or equal, that the interval does not."""

    def timed(scale: float, turns: list[list[float]]) -> Timing:
        calls = tuple(scale * call for turn in turns for call in turn)
        sizes = tuple(len(turn) for turn in turns)
        return Timing(latency_s=calls, batch_size=1, stable=True, environment="x", rounds=len(turns), turns=sizes)

    a, b = timed(1.0, rounds), timed(factor, rounds[::-1])
    if len(a.turns) != len(b.turns):
        return
    ratio = speedups.ratio_interval(speedups.by_round(a), speedups.by_round(b), seed=0)
    resolution = math.log1p(speedups.RESOLUTION)
    expected = ratio.low <= 1 <= ratio.high or abs(math.log(ratio.value)) <= resolution
    assert speedups.tied(a, b) == expected


@pytest.mark.parametrize("starts", [1, 3])
def test_the_mean_shows_what_no_median_does(starts: int) -> None:
    """Broken: calls that pause now and then count as fast; or spikes that hit both alike make one slower."""
    generator = np.random.default_rng(0)
    processes = [number for number in range(starts) for _ in range(8)]

    def rounds(pause: float, share: float) -> list[list[float]]:
        calls = np.exp(0.05 * np.abs(generator.standard_normal((len(processes), 200))))
        return (calls + pause * (generator.random(calls.shape) < share)).tolist()

    found = speedups.mean_ratio_interval(rounds(0, 0), rounds(250, 0.02), seed=0, processes=processes)
    assert found is not None
    assert found[0] < 1 / 6 < found[1] < 0.5, "a call takes 6 times as long on average"
    refused = 0
    for _ in range(40):
        alike = speedups.mean_ratio_interval(rounds(20, 0.005), rounds(20, 0.005), seed=0, processes=processes)
        assert alike is not None
        refused += alike[1] < 0.98
    assert refused <= 4
    assert speedups.mean_ratio_interval(rounds(0, 0)[:5], rounds(0, 0)[:5], seed=0, processes=processes[:5]) is None


def starts_of(medians: np.ndarray) -> tuple[list[list[float]], list[int]]:
    """Rounds of one call each, and the start of each: `[starts, rounds]` seconds."""
    return rounds_of(medians.ravel()), [number for number, start in enumerate(medians) for _ in start]


@settings(max_examples=40)
@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.01, 0.1, 0.5]), st.sampled_from([0.0, 1.0]),
    st.integers(0, 999),
)  # fmt: skip
def test_the_interval_of_the_inverse_is_the_inverse(
    starts: int, rounds: int, spread: float, apart: float, seed: int
) -> None:
    """Broken: one end of an interval is nearer than the other, so that "slower than the original" is decided otherwise
    than "faster"."""
    generator = np.random.default_rng(seed)
    level = apart * generator.normal(size=(2, starts, 1))
    base, own = (starts_of(one) for one in np.exp(level + spread * generator.normal(size=(2, starts, rounds))))
    ratio = ratio_interval(base[0], own[0], seed=0, processes=base[1])
    inverse = ratio_interval(own[0], base[0], seed=0, processes=base[1])
    assert (1 / ratio.value) == pytest.approx(inverse.value)
    assert (1 / ratio.high, 1 / ratio.low if ratio.low else math.inf) == pytest.approx((inverse.low, inverse.high))
    means = [
        speedups.mean_ratio_interval(one, other, seed=0, processes=base[1])
        for one, other in ((base[0], own[0]), (own[0], base[0]))
    ]
    assert (means[0] is None) == (means[1] is None) == (starts * rounds < FEW_ROUNDS)
    if means[0] and means[1] and starts >= speedups.FEW_PROCESSES:
        assert (1 / means[0][1], 1 / means[0][0]) == pytest.approx(means[1])


@pytest.mark.parametrize("starts", [1, 2, 3, 6])
def test_rounds_that_one_of_both_did_not_end_count_for_neither(starts: int) -> None:
    """Broken: the last round of a run that was cut short counts for one of both, or moves the rounds of a start to the
    next one."""
    base, own = np.random.default_rng(starts).lognormal(0, 0.1, (2, starts, 6))
    (whole, owners), (cut, _) = starts_of(base), starts_of(own)
    cut, less = cut[:-2], owners[:-2]
    for of in (speedups.ratio_interval, speedups.mean_ratio_interval):
        assert of(whole, cut, seed=0, processes=owners) == of(whole[:-2], cut, seed=0, processes=less)
        assert of(cut, whole, seed=0, processes=owners) == of(cut, whole[:-2], seed=0, processes=less)


@pytest.mark.parametrize("other", [0.95, 1.05])
def test_where_the_starts_quotients_lie_elsewhere_the_interval_reaches_around_them_too(other: float) -> None:
    """Broken: where most calls are of one start, the interval is around its median alone, and the five other starts say
    nothing."""
    from scipy.stats import t

    quotients, calls = np.array([1.0, *[other] * 5]), (30, 1, 1, 1, 1, 1)
    base = [[3.0] * count for count in calls]
    own = [[1 / quotient] * count for quotient, count in zip(quotients, calls, strict=True)]
    found = ratio_interval(base, own, seed=0, processes=range(6))
    logs = np.log(quotients)
    half = t.ppf(0.975, 5) * logs.std(ddof=1) / math.sqrt(6)
    assert found.value == pytest.approx(3.0)
    expected = min(logs.mean(), 0.0) - half, max(logs.mean(), 0.0) + half
    assert np.log([found.low / 3, found.high / 3]) == pytest.approx(expected)


def test_starts_that_differ_by_far_show_what_they_differ_by() -> None:
    """Broken: an artifact that was 5, 8 and 100 times as fast is "0.6 to 104 times as fast"; or 5 to 8 times."""
    quotients, generator = np.array([5.0, 8.0, 100.0]), np.random.default_rng(0)
    own, owners = starts_of(np.exp(0.01 * generator.normal(size=(3, 8))) / quotients[:, None])
    found = ratio_interval([[1.0]] * 24, own, seed=0, processes=owners)
    assert 4 < found.low < 5 < 100 < found.high < 125
    once = ratio_interval([[1.0]] * 3, own[::8], seed=0, processes=[0, 1, 2])
    assert 0 < once.low < 5 < 100 < once.high < math.inf, "one round a start has no interval of its own"


def test_neighbouring_starts_that_are_alike_widen_the_interval() -> None:
    """Broken: a machine that slows down and recovers within minutes passes for three independent starts."""
    values = np.exp(0.02 * np.random.default_rng(1).normal(size=(3, 12)))
    ordered = np.sort(values, axis=1)
    shuffled = np.stack([row[[0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]] for row in ordered])
    base = [[1.0]] * 36
    alike, mixed = (
        ratio_interval(base, rows, seed=0, processes=owners) for rows, owners in map(starts_of, (ordered, shuffled))
    )
    assert alike.value == mixed.value
    assert math.log(alike.high / alike.low) > 1.1 * math.log(mixed.high / mixed.low)


def autocorrelated(r: float, shape: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    """So many series in which each value keeps the share r of the one before it."""
    noise = np.random.default_rng(seed).normal(size=shape)
    values = [noise[:, 0] / math.sqrt(1 - r * r)]
    for step in range(1, shape[1]):
        values.append(r * values[-1] + noise[:, step])
    return list(np.stack(values, axis=1))


@pytest.mark.parametrize("r", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("shape", [(1, 20_000), (1000, 20)])
def test_the_memory_of_rounds_is_that_of_their_autocorrelation(r: float, shape: tuple[int, int]) -> None:
    """Broken: noise in waves counts as independent, and an interval of 95 % holds the truth every other time. Short
    series show the autocorrelation too small: of 20 values 0.6 looks like 0.45."""
    assert speedups.longer_memory(*autocorrelated(r, shape)) == pytest.approx((1 + r) / (1 - r), rel=0.15)


def test_memory_has_bounds() -> None:
    """Broken: rounds that alternate, that are alike or too few to show anything, or starts at two levels, widen the
    interval; or a machine that only slows down has no end to its memory."""
    alone = (np.tile([1.0, 2.0], 10), np.ones(12), np.arange(3.0))
    assert [speedups.longer_memory(one) for one in alone] == [1.0] * 3
    levels = [level + one for level, one in zip((0.0, 50.0), autocorrelated(0.0, (2, 2000)), strict=True)]
    assert speedups.longer_memory(*levels) < 1.2
    assert speedups.longer_memory(np.arange(4.0), np.arange(3.0)) == 1.0, "fewer than four values each show nothing"
    for count in (8, 12, 100):
        assert speedups.longer_memory(np.arange(float(count))) == pytest.approx(count / 2, rel=0.02)


def test_one_round_without_calls_is_refused() -> None:
    """Broken: a round that was lost on one side goes unseen."""
    with pytest.raises(ValueError, match="rounds with calls"):
        ratio_interval([[1.0], [1.0]], [[1.0], []], seed=0)


@pytest.mark.parametrize("starts", [1, 2])
def test_few_starts_leave_room_for_what_processes_differ_by(starts: int) -> None:
    """Broken: without noise a speedup of one process is exact, though the next one differs by 4 %; or two starts know
    it no better than one."""
    rounds, owners = 12, [number % starts for number in range(12)]
    half = 1.96 * 0.04 * math.sqrt(2 / starts)  # of each model's processes, 4 %
    for of in (speedups.ratio_interval, speedups.mean_ratio_interval):
        found = of([[2.0]] * rounds, [[1.0]] * rounds, seed=0, processes=owners)
        assert found is not None
        low, high = (found.low, found.high) if isinstance(found, Interval) else found
        assert np.log([low / 2, high / 2]) == pytest.approx([-half, half], rel=1e-3)


@pytest.mark.parametrize(("rounds", "tail"), [(5, 0.0010), (10, 0.0086), (1000, 0.0248)])
def test_percentiles_of_few_rounds_are_those_of_hesterbergs_table(rounds: int, tail: float) -> None:
    """Broken: the interval is as much too short, or too long, as it was before it was expanded."""
    assert (1 - speedups._expanded(0.95, rounds)) / 2 == pytest.approx(tail, abs=1e-4)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_the_interval_of_fewer_than_six_rounds_is_about_students(count: int) -> None:
    """Broken: an interval that is several times too wide holds the truth as well, and nothing is ever known."""
    from scipy.stats import t

    widths = []
    for seed in range(40):
        own = np.exp(0.05 * np.random.default_rng(seed).normal(size=count))
        found = ratio_interval([[1.0]] * count, rounds_of(own), seed=seed)
        mean = t.ppf(0.975, count - 1) * np.log(own).std(ddof=1) / math.sqrt(count)
        widths.append(math.log(found.high / found.low) / (2 * mean))
    assert 0.9 < np.median(widths) < 1.8, "a median is known less well than a mean"


def test_more_measuring_tells_nothing_of_a_speedup_that_there_is_not() -> None:
    """Broken: a baseline, which has no speedup, is measured until the budget is spent."""
    alone = factories.timing(None)
    assert alone.speedup is None
    assert speedups.is_resolved(alone)
    assert speedups.is_resolved(replace(alone, speedup=2.0, speedup_interval=(1.97, 2.03)))
    assert not speedups.is_resolved(replace(alone, speedup=2.0, speedup_interval=(1.9, 2.1)))
