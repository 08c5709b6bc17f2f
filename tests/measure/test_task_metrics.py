"""Metrics of rankings, detectors, speech and confidence: the libraries' own numbers, on resamples too, and gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import ndcg_score

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.detection import coco_map, read_detections
from compile_stage.measure.elementwise import NotMeasurableError
from compile_stage.measure.metrics import ComparedSamples, check_outputs
from compile_stage.measure.task_scores import score_of
from compile_stage.measure.tasks import measure_task
from compile_stage.measure.transcripts import transcripts

WITHOUT = 'pip install "compile-stage[metrics]"'


def gate(metric: str, limit: float = 0.01, confidence: float | None = 0.95, **options: Any) -> Gate:
    options.setdefault("drop", "max_drop")
    return Gate(metric=metric, limit=limit, direction="at_most", confidence=confidence, options=options)


def judged(asked: Gate, candidate: Any, baseline: Any, labels: Any, groups: Any = None) -> Check:
    own, base = (x if isinstance(x, dict) else {"out": x} for x in (candidate, baseline))
    samples = ComparedSamples(min_samples=2, real=True, labels=labels, groups=groups)
    checks = check_outputs([asked], own, base, samples, batch_size=1, seed=0)
    return next(check for check in checks if check.gate.metric == asked.metric)


def resampled(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one resample, and how often each was drawn."""
    drawn = np.sort(np.random.default_rng(seed).integers(0, count, count))
    return drawn, np.bincount(drawn, minlength=count)[None, :].astype(float)


# ------------------------------------------------------------------------------------------------------------ rankings


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ties=st.booleans(), count=st.integers(5, 60))
def test_spearman_is_scipys_on_every_resample(seed: int, ties: bool, count: int) -> None:
    """Broken: the interval of a rank correlation would be that of another number."""
    random = np.random.default_rng(seed)
    truth, scores = random.normal(size=count), random.normal(size=count)
    if ties:
        truth, scores = np.round(truth), np.round(scores)
    if np.ptp(truth) == 0 or np.ptp(scores) == 0:
        return
    score = score_of("spearman", truth, scores, scores, {})
    assert score.value == pytest.approx(spearmanr(truth, scores).statistic)
    assert score.of(np.ones((1, count)))[0] == pytest.approx(score.value, abs=1e-9)
    drawn, weights = resampled(count, seed)
    if np.ptp(truth[drawn]) > 0 and np.ptp(scores[drawn]) > 0:
        assert score.of(weights)[0] == pytest.approx(spearmanr(truth[drawn], scores[drawn]).statistic, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 12))
def test_ndcg_is_scikit_learns_by_list_and_by_query(seed: int, k: int) -> None:
    """Broken: a ranker would be judged by another gain, discount or treatment of ties than its owner reports."""
    random = np.random.default_rng(seed)
    truth = random.integers(0, 4, (9, 7)).astype(float)
    truth[:, 0] = 3
    truth[:, 1] = 0
    scores = np.round(random.normal(size=(9, 7)), 1)
    expected = ndcg_score(truth, scores, k=k)
    lists = score_of("ndcg", truth, scores, scores, {"k": k})
    assert lists.value == pytest.approx(expected)
    queries = np.repeat(np.arange(9), 7)
    shuffled = random.permutation(63)
    rows = score_of("ndcg", truth.ravel()[shuffled], scores.ravel()[shuffled], scores, {"k": k}, queries[shuffled])
    assert rows.value == pytest.approx(expected)
    drawn, weights = resampled(9, seed)
    again = ndcg_score(truth[drawn], scores[drawn], k=k)
    assert lists.of(weights)[0] == pytest.approx(again)
    assert rows.of(weights[:, queries[shuffled]])[0] == pytest.approx(again)


def test_spearman_of_lists_is_the_mean_of_the_lists() -> None:
    """Broken: each sample's list is right in itself and on a level of its own, and all items are ranked at once."""
    random = np.random.default_rng(3)
    truth = random.normal(size=(9, 7))
    scores = truth + random.normal(size=(9, 7)) + 100 * np.arange(9)[:, None]
    expected = np.mean([spearmanr(*pair).statistic for pair in zip(truth, scores, strict=True)])
    assert score_of("spearman", truth, scores, scores, {}).value == pytest.approx(expected)


def test_lists_may_be_padded_and_queries_without_an_order_are_left_out_of_both() -> None:
    """Broken: a query without relevant items, or padding, would count as a perfect or a lost one."""
    truth = np.array([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, -1.0], [0.0, 3.0, -1.0, -1.0]])
    scores = np.array([[0.1, 0.9, 0.2, 9.0], [0.1, 0.2, 0.3, 0.4], [0.9, 0.1, 0.0, 0.0]])
    by_hand = np.mean([ndcg_score(truth[:1, :3], scores[:1, :3]), ndcg_score(truth[2:, :2], scores[2:, :2])])
    assert score_of("ndcg", truth, scores, scores, {}).value == pytest.approx(by_hand)


def test_embeddings_rank_by_the_cosine_with_their_querys_first_sample() -> None:
    """Broken: a retrieval model that answers with vectors could not be gated on its ranking."""
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [0, 1], [1, 0], [0.1, 1]], dtype=np.float32)
    queries, truth = np.array([0, 0, 0, 1, 1, 1]), np.array([0.0, 1, 0, 0, 0, 1])
    assert score_of("ndcg", truth, vectors, vectors, {}, queries).value == 1.0
    worse = vectors[[0, 2, 1, 3, 4, 5]]
    assert score_of("ndcg", truth, worse, vectors, {}, queries).value < 1.0
    assert score_of("spearman", truth, vectors, vectors, {}, queries).value == pytest.approx(
        spearmanr([1, 0, 0, 1], [1 / np.hypot(1, 0.1), 0, 0, 1 / np.hypot(1, 0.1)]).statistic
    )


def test_ndcg_looks_at_the_ten_best_where_no_other_number_is_said() -> None:
    """Broken: the gate judges another figure than docs/policy.md and the benchmarks of retrieval name."""
    random = np.random.default_rng(4)
    truth, scores = random.integers(0, 4, (9, 15)).astype(float), random.normal(size=(9, 15))
    assert score_of("ndcg", truth, scores, scores, {}).value == pytest.approx(ndcg_score(truth, scores, k=10))


def test_a_vector_of_zeros_is_near_nothing() -> None:
    """Broken: a candidate that answers one text with zeros ends the check with an error, or ranks that text first."""
    vectors = np.array([[1, 0], [0, 0], [1, 1], [0, 1], [1, 0], [0, 1]], dtype=np.float32)
    queries, truth = np.array([0, 0, 0, 1, 1, 1]), np.array([0.0, 0, 1, 0, 0, 1])
    assert score_of("ndcg", truth, vectors, vectors, {}, queries).value == 1.0


@pytest.mark.parametrize("metric", ["spearman", "ndcg"])
def test_scores_that_are_no_numbers_and_negative_relevances_are_not_run(metric: str) -> None:
    """Broken: the check ends with an error of a library, and the candidate with "a bug of ours"."""
    random = np.random.default_rng(5)
    truth = random.integers(0, 3, (40, 6)).astype(float)
    scores = truth + random.normal(size=truth.shape)
    with pytest.raises(NotMeasurableError, match="NaN or infinite, so there is no order"):
        score_of(metric, truth, np.where(scores > 1, np.nan, scores), scores, {})
    if metric == "ndcg":
        queries = np.arange(240) // 6
        with pytest.raises(NotMeasurableError, match="needs relevances of 0 and more"):
            score_of(metric, truth.ravel() - 1, scores.ravel(), scores.ravel(), {}, queries)


def test_a_query_may_lose_its_correlation_and_as_much_again() -> None:
    """Broken: the bound of a lost query is half of what it can lose, so a `spearman` by query passes with half of the
    queries that show its limit."""
    truth = np.tile(np.arange(6.0), (40, 1))
    spearman, ndcg = (score_of(metric, truth, truth, truth, {}) for metric in ("spearman", "ndcg"))
    assert spearman.influence == pytest.approx(2 / 40)
    assert ndcg.influence == pytest.approx(1 / 40)


def test_a_constant_ranking_is_a_lost_one() -> None:
    """Broken: a candidate that answers one number for all items would be left out as undefined, and pass."""
    truth = np.random.default_rng(0).normal(size=400)
    check = judged(gate("spearman"), np.zeros(400), truth.copy(), truth)
    assert check.outcome is Outcome.FAIL
    assert check.measured == pytest.approx(1.0)


def test_few_queries_show_nothing_and_say_how_many_would() -> None:
    """Broken: 40 queries with the same order in both models would pass for proof that no query of 100 is lost."""
    random = np.random.default_rng(1)

    def check(number: int) -> Check:
        truth = random.integers(0, 3, (number, 6)).astype(float)
        truth[:, 0] = 2
        scores = truth + random.normal(size=truth.shape)
        return judged(gate("ndcg"), scores + 1e-9, scores, truth)

    assert check(40).outcome is Outcome.NOT_RUN
    assert "needs at least 299 samples, and there are 40" in check(40).reason
    assert check(320).outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("metric", "labels", "says"),
    [
        ("ndcg", np.arange(40.0), "nothing says which samples are one query's: name the column as data.queries"),
        ("spearman", np.array(["a"] * 40), "compares numbers, and the labels are <U1[n]"),
        ("coco_map", np.arange(40.0), "needs labels [n, objects, 5]"),
        ("wer", np.arange(40.0), "needs one text for each sample as labels, and these are float64[n]"),
    ],
)
def test_labels_of_another_kind_are_named(metric: str, labels: Any, says: str) -> None:
    """Broken: the wrong column as labels would end in a traceback, or in a number."""
    outputs: Any = np.random.default_rng(0).normal(size=40)
    if metric == "coco_map":
        outputs = {"boxes": np.zeros((40, 2, 4), np.float32), "scores": np.zeros((40, 2, 3), np.float32)}
    if metric == "wer":
        outputs = np.array(["a b"] * 40)
    check = judged(gate(metric), outputs, outputs, labels)
    assert check.outcome is Outcome.NOT_RUN
    assert says in check.reason


@pytest.mark.parametrize("metric", ["spearman", "wer"])
def test_an_original_that_does_not_do_it_is_not_kept_from_losing_it(metric: str) -> None:
    """Broken: labels with the wrong sign, or in another spelling, would pass every candidate: nothing can be lost."""
    pytest.importorskip("jiwer", reason=WITHOUT)
    random = np.random.default_rng(0)
    numbers, words = random.normal(size=400), np.array(["yes it is"] * 400)
    outputs, labels = (-numbers, numbers) if metric == "spearman" else (words, np.array(["NO NO NO"] * 400))
    check = judged(gate(metric), outputs, outputs, labels)
    assert check.outcome is Outcome.NOT_RUN
    assert f"the original's own {metric} is" in check.reason


# ----------------------------------------------------------------------------------------------------------- detection


def scene(seed: int, images: int = 30, most: int = 4) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Objects as labels, and what a detector of middling quality makes of them."""
    random = np.random.default_rng(seed)
    truth = np.full((images, most, 5), -1.0)
    boxes, scores = np.zeros((images, 2 * most, 4)), np.zeros((images, 2 * most))
    classes = random.integers(0, 3, (images, 2 * most)).astype(np.int64)
    for image in range(images):
        for place in range(int(random.integers(0, most + 1))):
            corner, size = random.uniform(0, 80, 2), random.uniform(8, 30, 2)
            truth[image, place] = [random.integers(0, 3), *corner, *(corner + size)]
    shaken = truth[..., 1:] + random.normal(scale=2, size=(images, most, 4))
    boxes[:, :most], boxes[:, most:] = shaken, random.uniform(0, 80, (images, most, 4))
    boxes[:, most:, 2:] += boxes[:, most:, :2]
    right = random.random((images, most)) < 0.8
    classes[:, :most] = np.where(right & (truth[..., 0] >= 0), truth[..., 0], classes[:, :most])
    scores[:, :most] = np.where(truth[..., 0] >= 0, random.uniform(0.3, 1, (images, most)), 0.01)
    scores[:, most:] = random.uniform(0, 0.6, (images, most))
    return truth, {
        "boxes": boxes.astype(np.float32), "scores": scores.astype(np.float32), "labels": classes
    }  # fmt: skip


def reference_map(truth: np.ndarray, outputs: dict[str, np.ndarray]) -> float:
    """pycocotools as its own examples call it: COCO's parameters, and the first line of its summary."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rows = [(image, row) for image, of in enumerate(truth) for row in of if row[0] >= 0]
    known = COCO()
    known.dataset = {
        "images": [{"id": i} for i in range(len(truth))],
        "categories": [{"id": c} for c in range(3)],
        "annotations": [
            {"id": n + 1, "image_id": i, "category_id": int(r[0]), "iscrowd": 0, "area": (r[3] - r[1]) * (r[4] - r[2]),
             "bbox": [r[1], r[2], r[3] - r[1], r[4] - r[2]]}
            for n, (i, r) in enumerate(rows)
        ],
    }  # fmt: skip
    known.createIndex()
    found = [
        {"image_id": i, "category_id": int(c), "score": float(s),
         "bbox": [float(b[0]), float(b[1]), float(b[2] - b[0]), float(b[3] - b[1])]}
        for i in range(len(truth))
        for b, s, c in zip(outputs["boxes"][i], outputs["scores"][i], outputs["labels"][i], strict=True)
    ]  # fmt: skip
    run = COCOeval(known, known.loadRes(found), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    return float(run.stats[0])


@pytest.mark.parametrize("seed", range(6))
def test_the_mean_average_precision_is_pycocotools(seed: int) -> None:
    """Broken: a detector would be judged by a number that its owner can't compare with any other."""
    pytest.importorskip("pycocotools", reason=WITHOUT)
    truth, outputs = scene(seed)
    _, detections = read_detections(outputs, {})
    score = coco_map(truth, detections, {})
    assert score.value == pytest.approx(reference_map(truth, outputs), abs=1e-12)
    assert score.of(np.ones((1, len(truth))))[0] == pytest.approx(score.value, abs=1e-12)
    drawn, weights = resampled(len(truth), seed)
    again = reference_map(truth[drawn], {name: values[drawn] for name, values in outputs.items()})
    # An image drawn twice has its detections in one step of the curve, and COCO takes them one by one.
    assert score.of(weights)[0] == pytest.approx(again, abs=0.01)
    many = score.of(np.concatenate([weights, np.ones_like(weights), weights]))
    assert many.tolist() == pytest.approx([score.of(weights)[0], score.value, score.of(weights)[0]])


@pytest.mark.parametrize("form", ["xywh", "cxcywh"])
def test_boxes_of_each_format_are_the_same_boxes(form: str) -> None:
    """Broken: DETR's centres read as corners would find nothing, or something else."""
    pytest.importorskip("pycocotools", reason=WITHOUT)
    truth, outputs = scene(3)
    plain = coco_map(truth, read_detections(outputs, {})[1], {}).value

    def changed(boxes: np.ndarray) -> np.ndarray:
        size = boxes[..., 2:] - boxes[..., :2]
        first = boxes[..., :2] if form == "xywh" else boxes[..., :2] + size / 2
        return np.concatenate([first, size], axis=-1)

    other = {**outputs, "boxes": changed(outputs["boxes"])}
    labels = np.concatenate([truth[..., :1], changed(truth[..., 1:])], axis=-1)
    options = {"format": form}
    assert coco_map(labels, read_detections(other, options)[1], options).value == pytest.approx(plain, abs=1e-6)


def test_raw_heads_take_the_best_class_that_is_not_the_background() -> None:
    """Broken: a DETR whose last class is "no object" would have a detection of it for each query."""
    boxes = np.zeros((1, 2, 4), np.float32)
    logits = np.array([[[2.0, 1.0, 9.0], [0.0, 4.0, 1.0]]], np.float32)
    outputs = {"logits": logits, "boxes": boxes}
    names, read = read_detections(outputs, {"activation": "softmax", "background": -1})
    assert names == ("boxes", "logits")
    soft = np.exp(logits[0]) / np.exp(logits[0]).sum(axis=1, keepdims=True)
    assert read[0, :, 0].tolist() == [0.0, 1.0]
    assert read[0, :, 1] == pytest.approx([soft[0, 0], soft[1, 1]])


def test_a_detector_that_loses_objects_fails_and_all_its_outputs_are_looked_at() -> None:
    """Broken: a compiled detector could lose a class, or its boxes be called unseen though the gate reads them."""
    pytest.importorskip("pycocotools", reason=WITHOUT)
    truth, outputs = scene(0, images=320)
    lost = {**outputs, "scores": np.where(outputs["labels"] == 1, 0.001, outputs["scores"]).astype(np.float32)}
    asked = gate("coco_map", 0.02)
    assert judged(asked, lost, outputs, truth).outcome is Outcome.FAIL
    samples = ComparedSamples(min_samples=2, real=True, labels=truth)
    checks = check_outputs([asked], outputs, outputs, samples, batch_size=1, seed=0)
    assert [c.reason for c in checks if c.outcome is not Outcome.PASS] == []
    samples = ComparedSamples(min_samples=2, real=True, labels=truth[:40])
    few = check_outputs([asked], *({n: o[:40] for n, o in outputs.items()},) * 2, samples, batch_size=1, seed=0)
    (check,) = [c for c in few if c.gate.metric == "coco_map"]
    assert check.outcome is Outcome.NOT_RUN
    assert "samples, and there are 40" in check.reason


# -------------------------------------------------------------------------------------------------------------- speech

VOCABULARY = ["<pad>", "|", "a", "b", "c"]


def frames(text: str, length: int = 24) -> np.ndarray:
    """CTC scores that say a text: each letter for two frames, a blank between."""
    places = [p for letter in text for p in (VOCABULARY.index(letter if letter != " " else "|"),) * 2 + (0,)]
    scores = np.zeros((length, len(VOCABULARY)), np.float32)
    scores[np.arange(length), places + [0] * (length - len(places))] = 5
    return scores


def test_ctc_scores_are_read_as_text() -> None:
    """Broken: repeats and blanks of a speech model would count as letters."""
    said = ["aa b", "c", "a cab"]
    options = {"vocabulary": VOCABULARY, "delimiter": "|"}
    assert transcripts(np.stack([frames(text) for text in said]), options) == said
    with pytest.raises(
        NotMeasurableError, match=r"scores of 5 tokens, and the limit names none: give wer \{vocabulary"
    ):
        transcripts(np.stack([frames("a")]), {})


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(
            st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), st.lists(st.sampled_from("abcd"), max_size=6)
        ),
        min_size=2,
        max_size=12,
    ),
    seed=st.integers(0, 1000),
)
def test_the_word_error_rate_is_jiwers_on_every_resample(pairs: list[tuple[list[str], list[str]]], seed: int) -> None:
    """Broken: the interval would be that of a mean over sentences, and short ones weigh as much as long ones."""
    jiwer = pytest.importorskip("jiwer", reason=WITHOUT)
    said, heard = [" ".join(a) for a, _ in pairs], [" ".join(b) for _, b in pairs]
    score = score_of("wer", np.array(said), np.array(heard), np.array(heard), {})
    assert score.value == pytest.approx(jiwer.wer(said, heard))
    drawn, weights = resampled(len(said), seed)
    again = jiwer.wer([said[i] for i in drawn], [heard[i] for i in drawn])
    assert score.of(weights)[0] == pytest.approx(again)


def test_a_model_that_mishears_more_fails() -> None:
    """Broken: int8 that turns every tenth word into another would be published."""
    pytest.importorskip("jiwer", reason=WITHOUT)
    said = np.array(["a b c a b c a b c a"] * 400)
    worse = np.array(["a b c a b c a b c b" if n % 2 else text for n, text in enumerate(said)])
    check = judged(gate("wer"), worse, said, said)
    assert check.outcome is Outcome.FAIL
    assert check.measured == pytest.approx(0.05)
    assert judged(gate("wer"), said, said, said).outcome is Outcome.PASS


# -------------------------------------------------------------------------------------------------- confidence and own


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), bins=st.integers(2, 30), classes=st.integers(2, 5))
def test_the_calibration_error_is_that_of_scikit_learns_curve(seed: int, bins: int, classes: int) -> None:
    """Broken: the confidence of a compiled model would be judged by bins of our own."""
    from sklearn.calibration import calibration_curve

    random = np.random.default_rng(seed)
    truth = random.integers(0, classes, 80)
    truth[:classes] = np.arange(classes)
    soft = random.dirichlet(np.ones(classes), 80)
    score = score_of("ece", truth, soft, soft, {"bins": bins})

    def by_curve(rows: np.ndarray) -> float:
        sure, right = soft[rows].max(axis=1), (soft[rows].argmax(axis=1) == truth[rows]).astype(float)
        share, mean = calibration_curve(right, sure, n_bins=bins)
        sizes = np.histogram(sure, np.linspace(0, 1, bins + 1))[0]
        return float(np.sum(np.abs(share - mean) * sizes[sizes > 0]) / len(rows))

    drawn, weights = resampled(80, seed)
    assert score.value == pytest.approx(by_curve(np.arange(80)), abs=1e-6)
    right = (soft.argmax(axis=1) == truth)[drawn].astype(float)
    if np.ptp(right) > 0:  # the curve needs both
        assert score.of(weights)[0] == pytest.approx(by_curve(drawn), abs=1e-6)


def test_a_model_that_grows_too_sure_fails() -> None:
    """Broken: every label stays, and what a threshold on the confidence decides does not."""
    random = np.random.default_rng(0)
    soft = random.dirichlet(np.ones(4) * 0.7, 2000)
    truth = np.array([random.choice(4, p=row) for row in soft])
    logits = np.log(soft)
    check = judged(gate("ece", 0.03), logits * 2, logits, truth)
    assert check.outcome is Outcome.FAIL
    assert check.measured is not None
    assert check.measured > 0.05
    assert judged(gate("ece", 0.03), logits, logits, truth).outcome is Outcome.PASS


def own(name: str, limit: float = 0.1, confidence: float | None = 0.95) -> Gate:
    metric = f"python:{__name__}:{name}"
    return Gate(metric=metric, limit=limit, direction="at_most", confidence=confidence)


def ratio_of_errors(candidate: Any, baseline: Any, labels: Any) -> float:
    """One number of all samples."""
    return float(np.abs(candidate - labels).mean() / np.abs(baseline - labels).mean() - 1)


def squares(candidate: Any, baseline: Any, labels: Any) -> Any:
    """One number for each sample."""
    return (candidate - baseline) ** 2


def always_zero(candidate: Any, baseline: Any, labels: Any) -> float:
    """Says nothing."""
    return 0.0


def test_an_own_metric_has_the_interval_of_a_paired_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a number that 40 samples make by luck would hold a limit that asks for confidence."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))
    random = np.random.default_rng(0)
    truth = random.normal(size=200)
    base = truth + random.normal(scale=0.1, size=200)
    worse = truth + random.normal(scale=0.105, size=200)
    check = judged(own("ratio_of_errors", 0.15), worse, base, truth)
    assert check.interval is not None
    low, high = check.interval
    assert check.measured is not None
    assert low < check.measured < high
    assert check.outcome is (Outcome.PASS if high <= 0.15 else Outcome.FAIL)
    mean = judged(replace(own("ratio_of_errors", 0.15), confidence=None), worse, base, truth)
    assert mean.interval is None
    assert mean.measured == check.measured
    halved = judged(own("ratio_of_errors", 0.15), worse, base, truth, groups=np.arange(200) // 2)
    assert halved.interval != check.interval
    parts = judged(own("squares", 0.5), worse, base, truth)
    assert parts.interval is not None
    assert parts.measured == pytest.approx(float(((worse - base) ** 2).mean()))
    constant = judged(own("always_zero"), worse, base, truth)
    assert constant.outcome is Outcome.NOT_RUN
    assert "leave `confidence` out" in constant.reason


def test_relative_drops_of_the_new_metrics_are_shares_of_the_originals() -> None:
    """Broken: `max_relative_drop` of a rank correlation would be read as points."""
    random = np.random.default_rng(0)
    truth = random.normal(size=500)
    base, worse = truth + random.normal(size=500), truth + 2 * random.normal(size=500)
    result = measure_task(gate("spearman", drop="max_relative_drop"), worse, base, truth, seed=0)
    assert result.value == pytest.approx((result.baseline - result.candidate) / result.baseline)


def test_whole_queries_are_taken(tmp_path: Any) -> None:
    """Broken: a sample of rows would leave a ranking without its relevant item, and another one in place of it."""
    from factories import prepare

    from compile_stage.core.records import DataSpec
    from compile_stage.core.tensors import Signature, TensorSpec
    from compile_stage.measure.samples import open_samples

    data = {"x": np.arange(120, dtype=np.float32)[:, None], "y": np.arange(120), "q": np.arange(120) // 6}
    np.savez(tmp_path / "d.npz", **data)
    signature = Signature(inputs=(TensorSpec(name="x", dtype="float32", shape=("n", 1)),), outputs=())
    spec = DataSpec(source=f"file:{tmp_path / 'd.npz'}", labels="y", max_samples=40, groups="q", whole_groups=True)
    chosen = prepare(spec, signature, tmp_path / "out", seed=0)
    assert (chosen.count, chosen.groups) == (36, 6)
    labels = np.asarray(open_samples(chosen).labels)
    assert set(np.bincount(labels // 6, minlength=20).tolist()) == {0, 6}
