"""Bounds of metrics that a few samples may decide."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import r2_score, root_mean_squared_error

from compile_stage.measure.skewed_means import FURTHEST, Means, compared_means, mean_of, means_interval
from compile_stage.measure.stats import bootstrap
from compile_stage.measure.task_scores import score_of

METRICS = {"rmse": root_mean_squared_error, "r2": r2_score}


def drop(own: np.ndarray, base: np.ndarray) -> np.ndarray:
    return base - own


def relative(own: np.ndarray, base: np.ndarray) -> np.ndarray:
    return (base - own) / np.abs(base)


@pytest.mark.parametrize("metric", sorted(METRICS))
@pytest.mark.parametrize("compared", [drop, relative])
def test_a_metric_of_means_is_the_librarys_and_its_slopes_are_its_own(metric: str, compared: object) -> None:
    """Broken: the interval would be that of another number, or of a wrong width."""
    random = np.random.default_rng(0)
    truth = random.normal(size=(40, 2))
    answers = [truth + by * random.normal(size=(40, 2)) for by in (0.6, 0.5)]
    scores = [score_of(metric, truth, answer, answers[1], {}) for answer in answers]
    drawn = random.integers(0, 40, 40)
    weights = np.bincount(drawn, minlength=40)[None, :].astype(float)
    for answer, score in zip(answers, scores, strict=True):
        assert score.of(weights)[0] == pytest.approx(METRICS[metric](truth[drawn], answer[drawn]))
        assert score.value == pytest.approx(METRICS[metric](truth, answer))
    own, base = (score.means for score in scores)
    assert own is not None
    assert base is not None
    both = compared_means(own, base, compared)  # type: ignore[arg-type]
    means = weights @ both.columns / 40
    moved = np.repeat(means, means.shape[1], axis=0) + 1e-6 * np.eye(means.shape[1])
    assert both.slopes(means)[0] == pytest.approx((both.of(moved) - both.of(means)) / 1e-6, abs=1e-4)


def test_the_bound_of_a_skewed_mean_is_rarely_below_it() -> None:
    """Broken: of artifacts that lose more than their limit by squared errors with a long tail a third passed, as by the
    bootstrap's end."""
    random, too_low, by_bootstrap = np.random.default_rng(1), 0, 0
    truth = 0.1 * np.exp(2.0)  # of one sample in ten a lognormal cost
    for trial in range(120):
        costs = np.where(random.random(300) < 0.1, np.exp(2 * random.standard_normal(300)), 0.0)
        interval = means_interval(mean_of(costs), seed=trial, resamples=500)
        simple = bootstrap(lambda w, c=costs: w @ c / w.sum(axis=1), 300, seed=trial, resamples=500)  # type: ignore[misc]
        assert interval is not None
        assert simple is not None
        too_low += interval.high < truth
        by_bootstrap += simple.high < truth
    assert too_low <= 0.1 * 120
    assert by_bootstrap >= 0.2 * 120


def test_of_light_tails_the_interval_is_hardly_wider_than_the_bootstraps() -> None:
    """Broken: honest artifacts would be asked for many times more samples: for 64 normal values the end was 1.6 times
    as far away as the bootstrap's."""
    for count, wider in ((64, 1.25), (1000, 1.15)):
        parts = np.random.default_rng(2).normal(size=count)
        interval = means_interval(mean_of(parts), seed=0)
        simple = bootstrap(lambda w, p=parts: w @ p / w.sum(axis=1), count, seed=0)  # type: ignore[misc]
        assert interval is not None
        assert simple is not None
        assert interval.high - interval.value < wider * (simple.high - simple.value)


def test_samples_of_a_group_count_as_one() -> None:
    """Broken: each sample given three times would look like three times as many."""
    parts = np.random.default_rng(3).lognormal(size=60)
    single = means_interval(mean_of(parts), seed=0)
    tripled = means_interval(mean_of(np.tile(parts, 3)), seed=0, groups=np.tile(np.arange(60), 3))
    assert single is not None
    assert tripled is not None
    assert (tripled.low, tripled.high) == pytest.approx((single.low, single.high))


def test_one_sample_that_makes_up_the_loss_leaves_a_finite_bound() -> None:
    """Broken: resamples without it have no error to compare with, and the bound would be infinite or NaN."""
    parts = np.zeros(50)
    parts[7] = 1.0
    interval = means_interval(mean_of(parts), seed=0)
    assert interval is not None
    error = 1 / 50
    assert interval.value + 5 * error < interval.high < interval.value + 2 * FURTHEST * error


def test_what_is_undefined_or_alone_has_no_interval() -> None:
    """Broken: a bound would be put around nothing."""
    undefined = Means(np.ones((9, 1)), lambda means: np.full(len(means), np.nan), np.ones_like)
    assert means_interval(undefined, seed=0) is None
    assert means_interval(mean_of(np.ones(1)), seed=0) is None
    same = means_interval(mean_of(np.ones(9)), seed=0)
    assert same is not None
    assert same.low == same.high == 1
