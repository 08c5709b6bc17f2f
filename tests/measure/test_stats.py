"""Bootstrap intervals that hold the truth as often as they say, and percentiles that are not made up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core.records import Timing
from compile_stage.measure.quantiles import percentile
from compile_stage.measure.stats import Statistic, bootstrap, median, samples_needed


def mean_of(values: np.ndarray) -> Statistic:
    return lambda weights: weights @ values / weights.sum(axis=1)


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
