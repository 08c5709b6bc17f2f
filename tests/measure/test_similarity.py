"""Vectors are judged by which samples are near each other."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.neighbors import NearestNeighbors

from compile_stage.core.records import Gate, Outcome
from compile_stage.measure.elementwise import NotMeasurableError
from compile_stage.measure.metrics import ComparedSamples, check_outputs
from compile_stage.measure.similarity import MOST, measure_similarity

RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.standard_normal((60, 8)).astype(np.float32)


def test_the_rank_correlation_is_scipys_over_all_pairs() -> None:
    """Broken: a model whose similarities are in another order passes."""
    other = VECTORS + RANDOM.standard_normal(VECTORS.shape) * 0.5
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (other, VECTORS)]
    upper = np.triu_indices(len(VECTORS), k=1)
    wanted = spearmanr(*((x @ x.T)[upper] for x in unit)).statistic
    assert measure_similarity("similarity_spearman", other, VECTORS, {}).value == pytest.approx(wanted)
    assert measure_similarity("similarity_spearman", VECTORS * 3, VECTORS, {}).value == pytest.approx(1)
    assert measure_similarity("similarity_spearman", np.ones_like(VECTORS), VECTORS, {}).value == 0


def test_the_nearest_are_scikit_learns() -> None:
    """Broken: a search finds other samples in the compiled model than in the original, and it passes."""
    other = VECTORS + RANDOM.standard_normal(VECTORS.shape) * 0.5
    near = [
        NearestNeighbors(n_neighbors=6, metric="cosine").fit(x).kneighbors(x, return_distance=False)[:, 1:]
        for x in (other, VECTORS)
    ]
    wanted = np.mean([len(np.intersect1d(x, y)) / 5 for x, y in zip(*near, strict=True)])
    measured = measure_similarity("nearest_kept", other, VECTORS, {"k": 5})
    assert measured.value == pytest.approx(wanted)
    assert measured.parts is not None
    assert measure_similarity("nearest_kept", VECTORS, VECTORS, {}).value == 1
    few = measure_similarity("nearest_kept", VECTORS[::-1][:6], VECTORS[:6], {"k": 10})
    assert few.value < 1, "of six samples not all are among the nearest"


def test_what_says_nothing_is_not_measured() -> None:
    """Broken: three samples, single numbers or one answer for all count as a ranking that was kept."""
    for a in (VECTORS[:3], VECTORS[:, :1], np.ones((9, 4), np.float32), np.full((9, 4), np.nan, np.float32)):
        with pytest.raises(NotMeasurableError):
            measure_similarity("similarity_spearman", a, a, {})


def test_large_sets_are_thinned_out() -> None:
    """Broken: a hundred thousand samples need eighty gigabytes."""
    many = RANDOM.standard_normal((MOST * 3, 4)).astype(np.float32)
    assert measure_similarity("nearest_kept", many, many, {}).value == 1


def test_a_gate_on_rankings_fails_a_model_that_loses_them() -> None:
    """Broken: `similarity_spearman` in a policy, or from a source, is passed over."""
    gates = [
        Gate(metric="similarity_spearman", limit=0.98, direction="at_least"),
        Gate(metric="nearest_kept", limit=0.85, direction="at_least", confidence=0.95),
    ]
    for scale, outcome in ((1e-4, Outcome.PASS), (1.0, Outcome.FAIL)):
        other = (VECTORS + RANDOM.standard_normal(VECTORS.shape) * scale).astype(np.float32)
        samples = ComparedSamples(min_samples=16, real=True)
        checks = check_outputs(gates, {"v": other}, {"v": VECTORS}, samples, batch_size=1, seed=0)
        found = {check.gate.metric: check.outcome for check in checks}
        assert found["similarity_spearman"] == found["nearest_kept"] == outcome
