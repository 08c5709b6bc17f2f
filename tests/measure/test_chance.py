"""Labels that are not those of the original's answers prove nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Check, Gate, JsonMap, Outcome
from compile_stage.measure.metrics import ComparedSamples, check_outputs
from compile_stage.measure.ranking import ranked_lists, ranking

Array = np.ndarray[Any, Any]
N = 500
RANDOM = np.random.default_rng(0)
TRUTH = RANDOM.integers(0, 10, N)
SCORES = np.eye(10)[TRUTH] * 4 + RANDOM.normal(size=(N, 10))
FRAUD = (np.arange(N) % 25 == 0).astype(np.int64)  # 4 %
TARGET = RANDOM.normal(50, 5, N)
GUESS = TARGET + RANDOM.normal(0, 2, N)
OF_CLASSES = ("accuracy", "f1", "class_recall", "roc_auc", "log_loss", "ece")


def check(
    metric: str, answers: Array, labels: Array, groups: Array | None = None, options: JsonMap | None = None
) -> Check:
    """Of a candidate that answers as the original does."""
    gate = Gate(metric=metric, limit=0.3, direction="at_most", options={"drop": "max_drop", **(options or {})})
    samples = ComparedSamples(min_samples=1, real=True, labels=labels, groups=groups)
    checks = check_outputs((gate,), {"y": answers}, {"y": answers}, samples, batch_size=1, seed=0)
    return next(found for found in checks if found.gate is gate)


@pytest.mark.parametrize("metric", OF_CLASSES)
@pytest.mark.parametrize(
    "labels", [(TRUTH + 1) % 10, np.roll(TRUTH, 1)], ids=["coded otherwise", "of the sample before"]
)
def test_labels_that_are_not_those_of_the_answers_prove_nothing(metric: str, labels: Array) -> None:
    """Broken: with a column of labels that is shifted by one row, or coded from 1, every candidate would hold its limit
    on what the labels say."""
    found = check(metric, SCORES, labels)
    assert found.outcome is Outcome.NOT_RUN, found.reason
    says = "the original's own roc_auc is 0." if metric == "roc_auc" else "the original is right in "
    assert says in found.reason or "the original gives no right answer" in found.reason
    assert check(metric, SCORES, TRUTH).outcome is Outcome.PASS


@pytest.mark.parametrize("metric", ["mae", "rmse", "r2"])
def test_an_original_that_is_no_better_than_one_constant_answer_has_nothing_to_lose(metric: str) -> None:
    """Broken: a regression whose labels are another column, or in another unit, would hold its limit."""
    assert check(metric, GUESS, TARGET).outcome is Outcome.PASS
    for labels in (np.roll(TARGET, 1), TARGET * 1.8 + 32):
        found = check(metric, GUESS, labels)
        assert found.outcome is Outcome.NOT_RUN, found.reason
        assert "one constant answer would have" in found.reason
        assert found.reason.endswith(f"correct data.validation.labels, or say {metric}: null")


QUERIES = np.arange(N) // 10
RANKINGS: tuple[tuple[str, Array, Array, JsonMap, Array | None], ...] = (
    ("spearman", GUESS, TARGET, {}, None),
    ("spearman", GUESS, TARGET, {"per_query": True}, QUERIES),
    ("ndcg", np.round(GUESS / 8), np.digitize(TARGET, [48, 55]), {"k": 3}, QUERIES),
    ("ndcg", GUESS.reshape(-1, 10), np.digitize(TARGET, [40, 48, 55]).reshape(-1, 10) - 1, {}, None),
)


@pytest.mark.parametrize(("metric", "scores", "labels", "options", "groups"), RANKINGS)
def test_labels_of_other_samples_rank_nothing(
    metric: str, scores: Array, labels: Array, options: JsonMap, groups: Array | None
) -> None:
    """Broken: half of all labels in another order correlate a little above 0 with the scores, or give random lists an
    nDCG of 0.6; then an artifact with scores of its own passes."""
    assert check(metric, scores, labels, groups, options).outcome is Outcome.PASS
    generator, passed = np.random.default_rng(3), 0
    for _ in range(20):
        other = generator.permutation(labels.ravel()).reshape(labels.shape)
        found = check(metric, scores, other, groups, options)
        passed += found.outcome is Outcome.PASS
    assert passed <= 1
    assert "so many samples can't tell from chance" in found.reason


def test_scores_of_the_embeddings_of_pairs_have_each_pair_once() -> None:
    """Broken: 250 pairs of texts count as 250 items of one group, or as 500 samples."""
    pairs, angles = np.arange(N) // 2, RANDOM.uniform(0.2, 1.4, N // 2)
    texts = np.zeros((N, 2))
    texts[::2, 0], texts[1::2] = 1, np.stack([np.cos(angles), np.sin(angles)], axis=1)
    labels = np.repeat(np.cos(angles) + RANDOM.normal(0, 0.3, N // 2), 2)
    assert check("spearman", texts, labels, pairs).outcome is Outcome.PASS
    found = check("spearman", texts, np.roll(labels, 2), pairs)
    assert found.outcome is Outcome.NOT_RUN, found.reason


@pytest.mark.parametrize(("metric", "scores", "labels", "options", "groups"), RANKINGS)
def test_a_ranking_as_a_sum_over_items_is_the_librarys_number(
    metric: str, scores: Array, labels: Array, options: JsonMap, groups: Array | None
) -> None:
    """Broken: chance would be that of another number than the one in the report."""
    lists = ranked_lists(metric, labels, scores, options, groups)
    expected = ranking(metric, labels, scores, options, groups).value
    assert np.mean([gains @ counts for gains, counts in lists]) == pytest.approx(expected, abs=1e-12)


def test_a_limit_as_large_as_the_originals_own_score_proves_nothing() -> None:
    """Broken: of a detector or classifier that is right in 1 % (boxes or classes in another order), one without a right
    answer holds a limit of 0.01."""
    labels = np.arange(N) % 100
    own = np.where(np.arange(N) < 20, labels, (labels + 1) % 100)
    gate = Gate(metric="accuracy", limit=0.05, direction="at_most", options={"drop": "max_drop"})
    samples = ComparedSamples(min_samples=1, real=True, labels=labels)
    for limit, outcome in ((0.05, Outcome.NOT_RUN), (0.03, Outcome.FAIL)):
        gate = replace(gate, limit=limit)
        checks = check_outputs((gate,), {"y": (labels + 1) % 100}, {"y": own}, samples, batch_size=1, seed=0)
        found = next(one for one in checks if one.gate is gate)
        assert found.outcome is outcome, found.reason
        assert outcome is Outcome.FAIL or found.reason.endswith("give a smaller one, or max_relative_drop")


@pytest.mark.parametrize(("metric", "answers", "labels"), [("mae", GUESS, TARGET), ("roc_auc", SCORES, TRUTH)])
def test_answers_that_are_nan_are_named(metric: str, answers: Array, labels: Array) -> None:
    """Broken: "Input contains NaN", and nobody knows which input, or what to do."""
    answers = answers.copy()
    answers[7] = np.nan
    found = check(metric, answers, labels)
    assert found.outcome is Outcome.NOT_RUN
    assert "answers to 1 of 500 samples are NaN or infinite (the first is that to sample 7): leave" in found.reason


@pytest.mark.parametrize("metric", ["accuracy", "f1", "class_recall"])
@pytest.mark.parametrize("kinds", [("u8", "i8"), ("i8", "u8"), ("u8", "u8")], ids=str)
@pytest.mark.parametrize("beyond_int64", [False, True])
def test_labels_that_differ_by_one_are_two_labels_however_large(
    metric: str, kinds: tuple[str, str], beyond_int64: bool
) -> None:
    """Broken: ids of 64 bits as labels, signed in the file and unsigned in the model, are compared as floats, and a
    candidate that answers the neighbouring id has lost nothing."""
    labels, answers = ((TRUTH * 1000 + 2**60).astype(kind) for kind in kinds)
    if beyond_int64:
        for values in (labels, answers):
            if values.dtype.kind == "u":
                values[0] = 2**63 + 1
    wrong = np.where(np.arange(N) % 2 == 0, answers + np.array(1, kinds[1]), answers)
    gate = Gate(metric=metric, limit=0.1, direction="at_most", options={"drop": "max_drop"})
    samples = ComparedSamples(min_samples=1, real=True, labels=labels)
    for own, outcome in ((answers, Outcome.PASS), (wrong, Outcome.FAIL)):
        checks = check_outputs((gate,), {"y": own}, {"y": answers}, samples, batch_size=1, seed=0)
        found = next(one for one in checks if one.gate is gate)
        assert found.outcome is outcome, found.reason


@pytest.mark.parametrize(("kind", "least"), [("f8", 2**53), ("f4", 2**24)])
def test_labels_that_are_floats_beyond_their_whole_numbers_prove_nothing(kind: str, least: int) -> None:
    """Broken: labels that were rounded when they became floats count as wrong, or two of them as one."""
    found = check("accuracy", TRUTH + least, (TRUTH + least).astype(kind))
    assert found.outcome is Outcome.NOT_RUN
    assert found.reason.endswith("can't tell all whole numbers of that size apart: save them as int64"), found.reason


@pytest.mark.parametrize("metric", ["accuracy", "f1", "class_recall"])
def test_labels_of_bytes_are_texts(metric: str) -> None:
    """Broken: labels that were saved as bytes are never a model's texts, or are a model's numbers by their digits."""
    names = np.array([f"Klasse {number} ü" for number in range(10)])
    encoded = np.char.encode(names, "utf-8")
    assert check(metric, names[TRUTH], encoded[TRUTH]).outcome is Outcome.PASS
    found = check(metric, names[TRUTH], np.char.encode(names, "latin-1")[TRUTH])
    assert found.outcome is Outcome.NOT_RUN
    assert "the labels are bytes, and no UTF-8" in found.reason
    digits = check(metric, TRUTH, TRUTH.astype("S"))
    assert digits.outcome is Outcome.NOT_RUN
    assert "the labels are text and the predictions int64, which are never equal: write the labels" in digits.reason


@pytest.mark.parametrize("metric", ["mae", "rmse"])
def test_labels_that_are_all_the_same_show_nothing_of_an_original(metric: str) -> None:
    """Broken: a column that is empty or filled with zeros, named as labels, proves that a regression loses nothing."""
    for labels, answers in ((np.zeros(N), GUESS), (np.full(N, 50.0), GUESS), (np.full(N, 50.0), np.full(N, 50.0))):
        found = check(metric, answers, labels)
        assert found.outcome is Outcome.NOT_RUN, found.reason
        assert "the labels are all the same" in found.reason
        assert found.reason.endswith(f"validate on samples whose labels differ, or say {metric}: null")


def test_shifted_labels_seldom_pass_by_luck() -> None:
    """Broken: of data sets with shifted labels, half would be a hair above chance, and prove what they like."""
    generator, passed = np.random.default_rng(1), 0
    for _ in range(200):
        truth = generator.integers(0, 10, 300)
        passed += check("accuracy", truth, np.roll(truth, 1)).outcome is Outcome.PASS
    assert passed / 200 <= 0.01 + 3 * (0.01 * 0.99 / 200) ** 0.5


@pytest.mark.parametrize("metric", ["accuracy", "class_recall", "log_loss", "ece"])
def test_a_model_of_a_rare_event_that_answers_no_nearly_always_is_noted(metric: str) -> None:
    """Broken: an honest model of fraud, which names none of 4 %, could not be compiled with labels; or nobody would be
    told that they show little."""
    found = check(metric, np.tile([[0.99, 0.01]], (N, 1)), FRAUD)
    assert found.outcome is Outcome.PASS, found.reason
    assert "the original is right in 0.96 of its answers, and 0.96 would be by chance" in found.reason


def test_a_model_that_names_some_of_a_rare_event_is_better_than_chance() -> None:
    """Broken: precision and recall of a half, at 4 %, would be chance, since the accuracy is that of `never`."""
    own = FRAUD.copy()
    own[np.flatnonzero(FRAUD)[::2]] = 0
    own[np.flatnonzero(FRAUD)[::2] + 1] = 1
    for metric in ("accuracy", "f1", "class_recall"):
        found = check(metric, own, FRAUD)
        assert found.outcome is Outcome.PASS
        assert "by chance" not in found.reason


def test_the_inverse_of_a_rare_event_and_none_found_prove_nothing() -> None:
    """Broken: labels whose 0 and 1 are swapped, and an f1 of 0, hold any limit."""
    never = np.zeros(N, np.int64)
    assert check("accuracy", never, 1 - FRAUD).outcome is Outcome.NOT_RUN
    found = check("f1", never, FRAUD)
    assert found.outcome is Outcome.NOT_RUN
    assert "no sample of its class is found" in found.reason


@pytest.mark.parametrize("groups", [None, np.arange(N) // 2])
def test_a_weak_original_is_one_all_the_same(groups: Array | None) -> None:
    """Broken: a hard problem, of which the original gets 60 % of two classes right, could not be validated."""
    generator = np.random.default_rng(2)
    labels = generator.integers(0, 2, N)
    own = np.where(generator.random(N) < 0.6, labels, 1 - labels)
    for metric in ("accuracy", "f1", "class_recall"):
        found = check(metric, own, labels, groups)
        assert found.outcome is Outcome.PASS, found.reason
        assert "by chance" not in found.reason


def test_samples_of_one_group_do_not_make_chance_look_like_knowledge() -> None:
    """Broken: of ten videos of fifty frames each, one label that fits by luck counts fifty times."""
    groups = np.repeat(np.arange(10), 50)
    labels, own = np.repeat(np.arange(10) % 3, 50), np.repeat(np.arange(10) % 4 % 3, 50)
    assert check("accuracy", own, labels).outcome is Outcome.PASS
    assert check("accuracy", own, labels, groups).outcome is Outcome.NOT_RUN


def test_of_groups_that_are_too_few_it_is_not_said_that_the_labels_are_wrong() -> None:
    """Broken: an original that is always right, of samples nine tenths of which are one customer's, "has the labels of
    other samples", and its owner looks for a mistake in them."""
    groups = np.maximum(np.arange(N) - 450, 0)
    found = check("accuracy", TRUTH % 2, TRUTH % 2, groups)
    assert found.outcome is Outcome.NOT_RUN, found.reason
    assert "can't tell apart: they show as much as 1.23 independent samples; validate on more groups" in found.reason


def test_what_a_candidate_reaches_by_itself_needs_no_original() -> None:
    """Broken: `accuracy: {min: 0.9}` of a candidate that reaches it would not be judged where the original does not."""
    gate = Gate(metric="accuracy", limit=0.9, direction="at_least")
    samples = ComparedSamples(min_samples=1, real=True, labels=TRUTH)
    checks = check_outputs((gate,), {"y": TRUTH}, {"y": (TRUTH + 1) % 10}, samples, batch_size=1, seed=0)
    assert next(found for found in checks if found.gate is gate).outcome is Outcome.PASS
