"""Bootstrap intervals that hold the truth as often as they say, and percentiles that are not made up."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compile_stage.core.records import Timing
from compile_stage.measure.quantiles import percentile
from compile_stage.measure.stats import Statistic, bootstrap, median, resampled, resamples_of, samples_needed


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


@settings(max_examples=30)
@given(
    st.lists(st.integers(-100, 100).map(float), min_size=3, max_size=30),  # of whole numbers equal means are equal
    st.sampled_from([0.8, 0.95, 0.99]),
)
@example([float(np.exp(0.2 * number)) for number in range(30)], 0.95)
def test_the_interval_is_scipys_bca_of_the_same_resamples(values: list[float], confidence: float) -> None:
    """Broken: an interval without its corrections for bias and skew ends too low, and a drop that is real counts as
    within it."""
    from scipy.stats import bootstrap as scipys

    array = np.array(values)
    found = resampled(mean_of(array), len(array), seed=0, resamples=300)
    assert found is not None
    if not len(found.left_out):
        return
    drawn = SimpleNamespace(bootstrap_distribution=found.draws)
    # No resamples of its own, so that both are of the same ones.
    theirs = scipys((array,), np.mean, n_resamples=0, bootstrap_result=drawn, confidence_level=confidence, method="BCa")
    own = found.interval(confidence)
    assert (own.low, own.high) == pytest.approx(tuple(theirs.confidence_interval), abs=1e-9, nan_ok=True)


def test_of_many_observations_at_most_400_parts_are_left_out() -> None:
    """Broken: the correction for skew would be of other parts than it says, or of a million observations take a
    million evaluations."""
    values = np.arange(801.0) ** 2
    found = resampled(mean_of(values), 801, seed=0, resamples=50)
    assert found is not None
    parts = np.array_split(values, [math.ceil(part * 801 / 400) for part in range(1, 400)])
    np.testing.assert_allclose(found.left_out, [(values.sum() - part.sum()) / (801 - len(part)) for part in parts])


def test_resamples_are_drawn_in_blocks_of_bounded_memory() -> None:
    """Broken: 2,000 resamples of 100,000 samples would take 1.6 GB at once."""
    seen: list[int] = []

    def statistic(weights: np.ndarray) -> np.ndarray:
        seen.append(weights.size)
        return weights[:, 0] / weights.sum(axis=1)

    assert resampled(statistic, 30_000, seed=0, resamples=80) is not None
    assert max(seen) <= 2**21
    blocks = [len(block) for block in resamples_of(np.arange(10), 10, 100, 0, width=2**20)]
    assert blocks == [2] * 50


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
