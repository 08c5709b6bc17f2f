"""Intervals that hold the truth as often as they say, and percentiles that are not made up."""

from __future__ import annotations

import importlib
import math
from itertools import chain
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.records import Timing
from compile_stage.measure import stats
from compile_stage.measure.quantiles import percentile
from compile_stage.measure.stats import (
    FEW_ROUNDS,
    UNSTABLE,
    Statistic,
    bootstrap,
    is_within,
    median,
    ratio_interval,
    samples_needed,
    tied,
)


def mean_of(values: np.ndarray) -> Statistic:
    return lambda weights: weights @ values / weights.sum(axis=1)


def rounds_of(medians: np.ndarray) -> list[list[float]]:
    return [[float(m)] for m in medians]


def test_the_resamples_of_rounds_are_scipys() -> None:
    """Broken: the interval would not be that of `scipy.stats.bootstrap`, as the documents say."""
    from scipy.stats import bootstrap as scipys

    rounds = [np.random.default_rng(number).lognormal(size=(12, 5)).tolist() for number in (1, 2)]

    def log_ratio(drawn: np.ndarray) -> float:
        ours, others = (stats._PooledMedian([side[round_] for round_ in drawn]).value for side in rounds)
        return math.log(ours / others)

    theirs = scipys((np.arange(12),), log_ratio, vectorized=False, n_resamples=1000, method="percentile", rng=7)
    base, own = map(stats._PooledMedian, rounds)
    np.testing.assert_allclose(stats._resampled_log_ratios(base, own, 12, 7), theirs.bootstrap_distribution)


def test_bootstrap_of_a_difference_covers_the_truth() -> None:
    """Were the interval too short, a drop that the policy forbids would be let through more often than 1 in 20."""
    generator = np.random.default_rng(1)
    trials, hits = 600, 0
    for trial in range(trials):
        base = generator.random(300) < 0.9
        flips = (
            generator.random(300) < 0.04
        )  # the candidate changes its mind on 4 % of samples, for the better or the worse
        drop = base.astype(float) - np.where(flips, ~base, base)
        found = bootstrap(mean_of(drop), 300, seed=trial, resamples=400)
        assert found is not None
        hits += found.low <= 0.04 * 0.8 <= found.high
    assert 0.93 <= hits / trials <= 0.975


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


def test_same_seed_same_interval() -> None:
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap(mean_of(values), 50, seed=7) == bootstrap(mean_of(values), 50, seed=7)
    assert bootstrap(mean_of(values), 50, seed=7) != bootstrap(mean_of(values), 50, seed=8)


def test_bootstrap_of_what_does_not_vary_has_no_width() -> None:
    found = bootstrap(mean_of(np.zeros(40)), 40, seed=0)
    assert found is not None
    assert (found.low, found.value, found.high) == (0, 0, 0)


def test_bootstrap_of_what_is_mostly_undefined_is_none() -> None:
    """An interval from the few resamples that happen to work would be narrow and meaningless."""
    values = np.array([1.0] + [np.nan] * 3)

    def statistic(weights: np.ndarray) -> np.ndarray:
        return np.where(weights[:, 0] > 0, 1.0, np.nan) * (1 + 0 * values[0])

    assert bootstrap(statistic, 4, seed=0) is None
    assert bootstrap(statistic, 0, seed=0) is None


def test_bca_follows_skew() -> None:
    """The plain percentile interval of a skewed mean is centred too low; BCa leans to the long tail."""
    values = np.random.default_rng(0).lognormal(0, 1.2, 60)
    found = bootstrap(mean_of(values), 60, seed=0)
    assert found is not None
    assert found.high - found.value > found.value - found.low


@pytest.mark.parametrize("seed", [1, 2])
def test_the_interval_of_a_skewed_mean_is_scipys_bca(seed: int) -> None:
    """Broken: an interval without its correction for skew ends too low, and a drop that is real counts as within it."""
    from scipy.stats import bootstrap as scipys

    values = np.random.default_rng(seed).lognormal(0, 1, 40)
    own = bootstrap(mean_of(values), 40, seed=0, resamples=20_000)
    theirs = scipys((values,), np.mean, vectorized=True, n_resamples=20_000, method="BCa", rng=1).confidence_interval
    plain = scipys((values,), np.mean, vectorized=True, n_resamples=20_000, method="percentile", rng=1)
    assert own is not None
    width = theirs.high - theirs.low
    assert abs(own.low - theirs.low) < 0.02 * width
    assert abs(own.high - theirs.high) < 0.04 * width
    assert theirs.high - plain.confidence_interval.high > 0.1 * width, "the correction is what is tested"


def test_two_observations_have_an_interval_and_two_groups_no_narrower_one_than_their_sums() -> None:
    """Broken: samples of one user would count as independent, and the interval would be far too narrow."""
    values, groups = np.array([0.0, 1.0]), np.repeat([0, 1], 50)
    two = bootstrap(mean_of(values), 2, seed=0)
    assert two is not None
    assert (two.low, two.high) == (0.0, 1.0)
    assert bootstrap(mean_of(values[groups]), 100, seed=0, groups=groups) == two


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
    found = stats.deciding_timing(measured, factories.target_policy(where, prefer=prefer))
    assert found is not None
    assert found.batch_size == batch_size


def test_the_interval_of_means_over_three_starts_is_students_t_of_their_quotients() -> None:
    """Broken: each start would be compared with the rounds of the others, or the interval come from rounds that know
    nothing of how processes differ."""
    from scipy.stats import t

    speedups = np.array([2.0, 2.2, 2.5])
    processes = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    base = [[1.0, 3.0]] * 9
    own = [[2.0 / speedups[start]] * 4 for start in processes]
    found = stats.mean_ratio_interval(base, own, seed=0, processes=processes)
    logs = np.log(speedups)
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


def test_percentiles_need_their_samples() -> None:
    """p99 of 20 calls is the slowest call under another name."""
    assert [samples_needed(q) for q in (0.5, 0.9, 0.95, 0.99, 0.999)] == [5, 29, 59, 299, 2995]
    calls = np.random.default_rng(0).permutation(59) + 1.0

    def of(count: int, q: float) -> float | None:
        return percentile(
            Timing(batch_size=1, latency_s=tuple(calls[:count]), turns=(count,), rounds=1, stable=True, environment=""),
            q,
        )

    assert of(59, 0.95) == pytest.approx(np.quantile(calls, 0.95))
    assert of(58, 0.95) is None
    assert of(59, 0.99) is None
    assert of(4, 0.5) is None
    with pytest.raises(ValueError, match="between 0 and 1"):
        samples_needed(95)


@given(st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_rule_is_wilks(q: float) -> None:
    needed = samples_needed(q)
    assert 1 - q**needed >= 0.95 > 1 - q ** (needed - 1)


def test_median_of_nothing_is_an_error() -> None:
    assert median([3.0, 1.0, 2.0]) == 2
    with pytest.raises(ValueError):
        median([])


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
    ratio = stats.ratio_interval(stats.by_round(a), stats.by_round(b), seed=0)
    resolution = math.log1p(stats.RESOLUTION)
    expected = ratio.low <= 1 <= ratio.high or abs(math.log(ratio.value)) <= resolution
    assert stats.tied(a, b) == expected


@pytest.mark.parametrize("starts", [1, 3])
def test_the_mean_shows_what_no_median_does(starts: int) -> None:
    """Broken: calls that pause now and then count as fast; or spikes that hit both alike make one slower."""
    generator = np.random.default_rng(0)
    processes = [number for number in range(starts) for _ in range(8)]

    def rounds(pause: float, share: float) -> list[list[float]]:
        calls = np.exp(0.05 * np.abs(generator.standard_normal((len(processes), 200))))
        return (calls + pause * (generator.random(calls.shape) < share)).tolist()

    found = stats.mean_ratio_interval(rounds(0, 0), rounds(250, 0.02), seed=0, processes=processes)
    assert found is not None
    assert found[0] < 1 / 6 < found[1] < 0.5, "a call takes 6 times as long on average"
    refused = 0
    for _ in range(40):
        alike = stats.mean_ratio_interval(rounds(20, 0.005), rounds(20, 0.005), seed=0, processes=processes)
        assert alike is not None
        refused += alike[1] < 0.98
    assert refused <= 4
    assert stats.mean_ratio_interval(rounds(0, 0)[:5], rounds(0, 0)[:5], seed=0, processes=processes[:5]) is None
