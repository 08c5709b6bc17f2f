"""The numbers of a proof: identities, scale laws, and the corner cases in which a naive formula says 'equal'."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compile_stage.measure import classes, elementwise
from compile_stage.measure.classes import measure_classes
from compile_stage.measure.elementwise import (
    DISTANCE_METRICS,
    NotMeasurableError,
    agreement,
    allclose,
    distances,
)

PERFECT = {
    "max_abs": 0,
    "mean_abs": 0,
    "max_rel": 0,
    "cosine": 1,
    "mean_cosine": 1,
    "snr_db": np.inf,
    "mean_snr_db": np.inf,
    "psnr_db": np.inf,
    "mean_psnr_db": np.inf,
}
ERRORS = ("max_abs", "mean_abs", "max_rel")

# Any magnitude that a float32 model can answer with, zero and denormals included.
values = st.floats(-1e30, 1e30, allow_nan=False)
arrays = hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=values)
# A magnitude range in which differences are exact enough to test laws by equality.
mild = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(1, 8)),
    elements=st.integers(-1000, 1000).map(lambda i: i / 8),
)


def measure(metric: str, a: np.ndarray, b: np.ndarray) -> float:
    return DISTANCE_METRICS[metric](distances(a, b)).value


def pair(draw_from: st.SearchStrategy[np.ndarray]) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    return draw_from.flatmap(
        lambda b: st.tuples(
            hnp.arrays(np.float64, b.shape, elements=st.integers(-1000, 1000).map(lambda i: i / 8)), st.just(b)
        )
    )


@given(arrays)
def test_a_thing_is_equal_to_itself(b: np.ndarray) -> None:
    for metric, perfect in PERFECT.items():
        found = DISTANCE_METRICS[metric](distances(b.copy(), b))
        assert found.value == perfect, metric
        assert found.worst() == (), metric
    assert allclose(b, b, {"rtol": 0, "atol": 0}).value == 0
    assert agreement(b, b).value == 1


@given(pair(mild))
def test_a_difference_is_never_perfect(both: tuple[np.ndarray, np.ndarray]) -> None:
    """Were a difference lost in squaring or scaling, a wrong output would pass."""
    a, b = both
    if np.array_equal(a, b):
        return
    for metric in ERRORS:
        assert measure(metric, a, b) > 0
    for metric in ("snr_db", "mean_snr_db", "psnr_db", "mean_psnr_db"):
        assert measure(metric, a, b) < np.inf
    assert allclose(a, b, {"rtol": 0, "atol": 0}).value == np.inf
    assert agreement(a, b).value < 1


@given(pair(mild))
def test_distances_are_symmetric(both: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = both
    for metric in ("max_abs", "mean_abs", "cosine", "mean_cosine"):
        assert measure(metric, a, b) == pytest.approx(measure(metric, b, a), rel=1e-12)


@given(pair(mild), st.integers(-300, 300))
def test_scale_laws_hold_at_every_magnitude(both: tuple[np.ndarray, np.ndarray], exponent: int) -> None:
    """Absolute errors scale with the unit, the others don't know it: at 1e-90 as at 1e+90, where squares under- and
    overflow."""
    a, b = both
    unit = 2.0**exponent
    for metric in DISTANCE_METRICS:
        before, after = measure(metric, a, b), measure(metric, a * unit, b * unit)
        factor = unit if metric in ("max_abs", "mean_abs") else 1
        assert after == pytest.approx(before * factor, rel=1e-9, abs=0), metric


@given(pair(mild), st.randoms())
def test_the_order_of_samples_does_not_matter(both: tuple[np.ndarray, np.ndarray], random: object) -> None:
    a, b = both
    order = np.random.default_rng(len(b)).permutation(len(b))
    for metric in DISTANCE_METRICS:
        assert measure(metric, a[order], b[order]) == pytest.approx(measure(metric, a, b), rel=1e-9), metric


@given(st.integers(0, 1000))
def test_more_noise_is_never_better(seed: int) -> None:
    generator = np.random.default_rng(seed)
    b, noise = generator.normal(size=(8, 16)), generator.normal(size=(8, 16))
    steps = [b + noise * level for level in (0.001, 0.01, 0.1)]
    for metric in DISTANCE_METRICS:
        found = [measure(metric, a, b) for a in steps]
        assert found == sorted(found, reverse=metric not in ERRORS), metric


@settings(max_examples=30)
@given(pair(mild), st.integers(1, 5))
def test_pieces_give_what_the_whole_gives(both: tuple[np.ndarray, np.ndarray], block: int) -> None:
    """Blocks of rows and of columns are only a way to save memory."""
    a, b = both
    whole = {metric: measure(metric, a, b) for metric in DISTANCE_METRICS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "BLOCK", block)
        for metric, value in whole.items():
            assert measure(metric, a, b) == pytest.approx(value, rel=1e-12), metric
        patch.undo()
    assert allclose(a, b, {}).value >= 0


def test_the_textbook_values() -> None:
    b = np.array([[3.0, 4.0], [0.0, 1.0]])
    a = np.array([[3.0, 4.5], [0.1, 1.0]])
    assert measure("max_abs", a, b) == 0.5
    assert measure("mean_abs", a, b) == pytest.approx(0.6 / 4)
    assert measure("max_rel", a, b) == pytest.approx(0.5 / 4)
    assert measure("cosine", a, b) == pytest.approx(1 / np.hypot(0.1, 1))
    assert measure("snr_db", a, b) == pytest.approx(10 * np.log10(1 / 0.01))  # the worst sample's: the second
    assert measure("mean_snr_db", a, b) == pytest.approx(10 * np.log10(26 / 0.26))
    assert measure("psnr_db", a, b) == pytest.approx(10 * np.log10(16 / (0.25 / 2)))
    assert measure("mean_psnr_db", a, b) == pytest.approx(10 * np.log10(16 / (0.26 / 4)))
    assert allclose(a, b, {"rtol": 0.1, "atol": 0.1}).value == pytest.approx(1.0)
    assert DISTANCE_METRICS["max_abs"](distances(a, b)).worst() == (0, 1)


@given(pair(mild), st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from([0.0, 0.125, 100.0]))
def test_allclose_says_what_numpys_does(both: tuple[np.ndarray, np.ndarray], rtol: float, atol: float) -> None:
    """Broken: one sample within its tolerance would hide another that is not."""
    a, b = both
    found = allclose(a, b, {"rtol": rtol, "atol": atol}).value
    if found == pytest.approx(1, rel=1e-9):
        return  # NumPy rounds otherwise at the limit itself
    assert (found < 1) == np.allclose(a, b, rtol=rtol, atol=atol)


@given(st.integers(1, 6).flatmap(lambda n: pair(hnp.arrays(np.float64, (n, 1), elements=st.integers(-99, 99)))))
def test_of_one_value_for_each_sample_the_cosine_is_that_of_the_column(both: tuple[np.ndarray, np.ndarray]) -> None:
    """Broken: a regressor's answers, each of its own magnitude, would be weighed otherwise than in the cosine that the
    documents name."""
    a, b = (array[:, 0] for array in both)
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    expected = 1.0 if np.array_equal(a, b) else float(a @ b / norms) if norms else 0.0
    for metric in ("cosine", "mean_cosine"):
        assert measure(metric, *both) == pytest.approx(expected, abs=1e-9)


def test_a_single_value_that_is_not_zero_has_a_direction() -> None:
    """Broken: a one-hot answer that the artifact halves would have the cosine 0, as if it pointed elsewhere."""
    assert measure("cosine", np.array([[0.5, 0.0]]), np.array([[1.0, 0.0]])) == 1


def test_zero_baselines_are_well_defined() -> None:
    zero, one = np.zeros((2, 3)), np.ones((2, 3))
    assert measure("max_rel", zero, zero) == 0
    assert measure("max_rel", one, zero) == np.inf
    assert measure("cosine", zero, zero) == 1
    assert measure("cosine", one, zero) == 0  # not NaN, and not 1
    assert measure("cosine", zero, one) == 0  # a dead candidate is not similar to anything
    assert measure("snr_db", one, zero) == -np.inf
    assert measure("psnr_db", one, zero) == -np.inf


def test_one_exact_sample_does_not_make_the_mean_infinite() -> None:
    """A mean of decibels would be: 'inf >= 20 dB, passed'."""
    b = np.ones((4, 3))
    a = b.copy()
    a[1:] = -1
    assert measure("mean_snr_db", a, b) < 0
    assert measure("mean_psnr_db", a, b) < 0


def test_shared_nan_and_infinity_are_left_out_and_others_counted() -> None:
    b = np.array([[1.0, np.nan, np.inf, -np.inf], [1, 2, 3, 4]])
    a = np.array([[1.5, np.nan, np.inf, np.inf], [1, 2, np.nan, 4]])
    found = distances(a, b)
    assert found.shared.tolist() == [2, 0]
    assert found.strange.tolist() == [1, 1]
    assert DISTANCE_METRICS["max_abs"](found).value == 0.5
    assert DISTANCE_METRICS["mean_abs"](found).value == pytest.approx(0.5 / 4)


def test_agreement_counts_text_numbers_and_truth_values() -> None:
    assert agreement(np.array(["cat", "dog"]), np.array(["cat", "doge"])).value == 0.5
    assert agreement(np.array([1, 2, 3]), np.array([1, 2, 4])).worst() == (2,)
    assert agreement(np.array([[True, False]]), np.array([[True, True]])).value == 0.5


# -------------------------------------------------------------------------------------------------------------- classes


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(2, 7)), elements=st.floats(-50, 50)))
def test_a_model_agrees_with_itself_on_classes(b: np.ndarray) -> None:
    assert measure_classes("top1_agreement", b, b, {}).value == 1
    assert measure_classes("kl", b, b, {}).value == 0
    if b.shape[1] > 2:
        assert measure_classes("topk_agreement", b, b, {"k": 2}).value == 1


@given(st.integers(0, 100))
def test_kl_is_never_negative_and_grows_with_noise(seed: int) -> None:
    generator = np.random.default_rng(seed)
    b, noise = generator.normal(size=(6, 5)), generator.normal(size=(6, 5))
    found = [measure_classes("mean_kl", b + noise * level, b, {}).value for level in (0, 0.05, 0.5)]
    assert 0 <= found[0] <= found[1] <= found[2]


def test_kl_of_probabilities_and_of_logits_is_the_same() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 4, 3))
    soft_a, soft_b = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (a, b))
    logits, soft = measure_classes("kl", a, b, {}), measure_classes("kl", soft_a, soft_b, {})
    assert logits.value == pytest.approx(soft.value)
    assert soft.value == pytest.approx(np.sum(soft_b * np.log(soft_b / soft_a), axis=1).max())
    assert "softmax" in logits.note
    assert not soft.note


def test_classes_on_another_axis_and_top_k() -> None:
    b = np.zeros((1, 3, 2, 2))
    b[0, 1] = 1
    a = b.copy()
    a[0, 2, 0, 0] = 5  # one pixel of four changes its class
    assert measure_classes("top1_agreement", a, b, {"axis": 1}).value == 0.75
    ranks = np.array([[4.0, 3, 2, 1]])
    assert measure_classes("topk_agreement", ranks[:, [1, 0, 2, 3]], ranks, {"k": 2}).value == 1
    assert measure_classes("topk_agreement", ranks[:, [0, 2, 1, 3]], ranks, {"k": 2}).value == 0.5


@pytest.mark.parametrize(
    ("metric", "b", "options", "says"),
    [
        ("top1_agreement", np.zeros((4, 1)), {}, "two classes"),  # argmax over one class agrees always
        ("kl", np.zeros((4,)), {}, "two classes"),
        ("topk_agreement", np.zeros((4, 5)), {"k": 5}, "always the same"),  # as does the top 5 of 5
        ("top1_agreement", np.full((4, 3), np.nan), {}, "NaN"),
    ],
)
def test_what_would_always_agree_is_not_measured(metric: str, b: np.ndarray, options: dict, says: str) -> None:
    with pytest.raises(NotMeasurableError, match=says):
        measure_classes(metric, b, b, options)


def test_probabilities_against_logits_are_not_made_alike() -> None:
    b = np.array([[0.5, 0.5]])
    with pytest.raises(NotMeasurableError, match="probabilities"):
        measure_classes("kl", np.array([[3.0, 4.0]]), b, {})
    assert classes.is_distribution(b)
