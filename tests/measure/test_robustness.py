"""Samples beyond the validation set: what they are made of, and what they tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Gate, Outcome, SampleSet
from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
from compile_stage.measure.robustness import (
    CODES,
    answered,
    judge_kind,
    moves_as_much,
    other_samples,
    refused_kind,
    usual_gates,
    write_samples,
)
from compile_stage.measure.samples import Samples, open_samples
from compile_stage.measure.tolerance import tolerance_used

RANDOM = np.random.default_rng(0)
TABLE = np.hstack([RANDOM.normal(50, 5, size=(64, 3)), RANDOM.integers(0, 4, size=(64, 2))]).astype(np.float32)
IMAGES = RANDOM.uniform(size=(64, 1, 6, 6)).astype(np.float32)
IDS = RANDOM.integers(5, 50, size=(64, 7))
MASK = (np.arange(7) < RANDOM.integers(3, 8, size=(64, 1))).astype(np.int64)


def samples(**inputs: Any) -> Samples:
    return Samples(64, inputs, None)


def test_each_kind_is_what_it_says_it_is() -> None:
    """Broken: what is called scaled would stay within the range, or noise leave it."""
    made = {kind: batch["x"] for kind, batch in other_samples(samples(x=TABLE), 40, 0).items()}
    assert list(made) == ["noise", "mixed", "scaled", "permuted", "synthetic"]
    low, high = TABLE.min(axis=0), TABLE.max(axis=0)
    for kind, rows in made.items():
        assert rows.shape == (8, 5), kind
        assert rows.dtype == TABLE.dtype
        assert set(rows[:, 3:].ravel()) <= {0.0, 1.0, 2.0, 3.0}, kind  # codes have no values in between
        assert not (rows[:, None] == TABLE).all(axis=2).any(), f"{kind} repeats samples"
        inside = bool(((rows >= low) & (rows <= high)).all())
        assert inside == (kind != "scaled"), kind
    for column in range(3):
        assert set(made["permuted"][:, column]) <= set(TABLE[:, column])


def test_whole_numbers_are_only_mixed_by_column_and_fitting_inputs_stay_fitting() -> None:
    """Broken: a token that no vocabulary holds, or a mask that does not belong to its ids."""
    made = other_samples(samples(ids=IDS, mask=MASK * IDS), 40, 0)
    assert set(made) == {"mixed", "permuted", "synthetic"}
    for batch in made.values():
        for name, seen in (("ids", IDS), ("mask", MASK * IDS)):
            assert batch[name].dtype == seen.dtype
            assert all(set(batch[name][:, i]) <= set(seen[:, i]) for i in range(7))
        assert bool(((batch["mask"] == 0) | (batch["mask"] == batch["ids"])).all())


def test_text_and_missing_values_are_taken_as_they_are() -> None:
    """Broken: a table with holes, or with text, would end the run."""
    table = TABLE.copy()
    table[::3, 1] = np.nan
    table[:, 2] = np.nan
    words = np.array([["a"], ["bb"]] * 32)
    for batch in other_samples(samples(x=table, word=words), 40, 0).values():
        assert set(batch["word"].ravel()) <= {"a", "bb"}
        assert np.isnan(batch["x"][:, 2]).all()
        assert np.isfinite(batch["x"][:, 0]).all()


def test_images_are_moved_and_equal_seeds_make_equal_samples() -> None:
    """Broken: an image would be shuffled into noise, or each candidate be judged by other samples."""
    made = other_samples(samples(x=IMAGES), 40, 0)
    for row in made["permuted"]["x"]:
        assert any(np.array_equal(np.sort(row, axis=None), np.sort(image, axis=None)) for image in IMAGES)
    again = other_samples(samples(x=IMAGES), 40, 0)
    assert all(np.array_equal(made[kind]["x"], again[kind]["x"]) for kind in made)
    assert not np.array_equal(made["mixed"]["x"], other_samples(samples(x=IMAGES), 40, 1)["mixed"]["x"])


def test_a_column_of_many_whole_numbers_is_no_code() -> None:
    """Broken: digits of 0 to 16 would never be scaled, and what is wrong beyond their range not be seen."""
    table = RANDOM.integers(0, CODES + 5, size=(64, 4)).astype(np.float32)
    assert "scaled" in other_samples(samples(x=table), 40, 0)


def test_samples_are_written_as_workers_read_them(tmp_path: Path) -> None:
    """Broken: no worker could run them."""
    batch = other_samples(samples(x=TABLE), 40, 0)["mixed"]
    like = SampleSet(path="", digest="", count=64, real=True, source="input_example", has_labels=True)
    written = write_samples(batch, like, tmp_path)
    opened = open_samples(written)
    assert (written.real, written.source, written.has_labels) == (True, "input_example", False)
    assert np.array_equal(opened.inputs["x"], batch["x"])
    assert list(answered({"y": np.array([[1.0, 2.0], [np.nan, 0.0]]), "n": np.array([1, 2])})) == [True, False]


INT8 = (
    Gate(metric="cosine", limit=0.99, direction="at_least"),
    Gate(metric="mean_snr_db", limit=20.0, direction="at_least", unit="dB"),
    Gate(metric="column_nrmse", limit=0.5, direction="at_most", options={"floor": 0.06}),
    Gate(metric="column_spread", limit=0.1, direction="at_least", options={"floor": 0.06}),
    Gate(metric="top1_regret", limit=0.2, direction="at_most"),
)
WANTED = RANDOM.normal(size=(8, 10)).astype(np.float32)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (WANTED, Outcome.PASS),
        (WANTED + 0.2 * RANDOM.normal(size=WANTED.shape), Outcome.PASS),  # 14 dB: clipped beyond the calibrated range
        (np.zeros_like(WANTED), Outcome.FAIL),
        (np.roll(WANTED, 1, axis=0), Outcome.FAIL),  # another sample's answer
        (np.broadcast_to(WANTED.mean(axis=0), WANTED.shape), Outcome.FAIL),
        (WANTED * np.nan, Outcome.FAIL),
    ],
    ids=["exact", "clipped", "zeros", "memorised", "constant", "NaN"],
)
def test_limits_are_generous_and_no_dead_answer_holds_them(answer: Any, outcome: Outcome) -> None:
    """Broken: what is right on the validation set alone would pass, or an int8 network fail beyond its ranges."""
    checks = check_outputs(INT8, {"y": answer.astype(np.float32)}, {"y": WANTED}, SINGLE_CALL, batch_size=1, seed=0)
    check = judge_kind("mixed", checks, 5.0, 8)
    assert check.outcome is outcome, check.reason
    assert (check.gate.metric, check.gate.limit, check.gate.options) == ("robustness", 5.0, {"samples": "mixed"})
    assert check.reason.startswith("mixed samples (8): ")


@pytest.mark.parametrize(
    ("gate", "measured", "used"),
    [
        (Gate(metric="max_abs", limit=0.1, direction="at_most"), 0.3, 3.0),
        (Gate(metric="mean_snr_db", limit=20.0, direction="at_least", unit="dB"), 14.0, 1.995),
        (Gate(metric="cosine", limit=0.99, direction="at_least"), 0.96, 2.0),
        (Gate(metric="cosine", limit=1.0, direction="at_least"), 1.0, 0.0),
        (Gate(metric="agreement", limit=0.9, direction="at_least"), 0.75, 1.0),  # two rows of eight
        (Gate(metric="max_rel", limit=0.5, direction="at_most"), 1.0, np.inf),
        (Gate(metric="python:m:corr", limit=0.9, direction="at_least"), 0.45, 2.0),
        (Gate(metric="python:m:minus_mse", limit=-0.1, direction="at_least"), -25.0, 250.0),
        (Gate(metric="python:m:minus_mse", limit=0.0, direction="at_least"), -25.0, np.inf),
        (Gate(metric="python:m:noise", limit=-20.0, direction="at_most"), -4.0, 5.0),
        (Gate(metric="python:m:noise", limit=-20.0, direction="at_most"), 3.0, np.inf),
        (Gate(metric="python:m:cosine_distance", limit=0.1, direction="at_most"), 0.9, 9.0),
        (Gate(metric="python:m:disagreement", limit=0.1, direction="at_most"), 0.9, 9.0),
    ],
)
def test_times_a_tolerance(gate: Gate, measured: float, used: float) -> None:
    """Broken: a factor of 5 would mean another thing for each metric."""
    from compile_stage.core.records import Check

    check = Check(gate=gate, outcome=Outcome.FAIL, measured=measured, reason="", samples=8)
    assert tolerance_used(check) == pytest.approx(used, rel=1e-3)


def test_what_the_artifact_refuses_is_a_failure() -> None:
    """Broken: an artifact that raises for all but the validation samples would pass."""
    check = refused_kind("scaled", 5.0, 8, "ValueError: unknown sample")
    assert (check.outcome, check.measured) == (Outcome.FAIL, None)
    assert "the original answers them, the artifact does not: ValueError" in check.reason


def test_the_spread_of_answers_that_hardly_differ_is_not_looked_at() -> None:
    """Broken: noise in place of images, to which a network has one answer, would fail every int8 candidate."""
    reference = {"y": WANTED, "label": np.arange(8)}
    assert moves_as_much({"y": 0.6 * WANTED, "label": np.zeros(8, int)}, reference)
    assert not moves_as_much({"y": 0.3 * WANTED, "label": np.zeros(8, int)}, reference)


def test_synthetic_images_have_the_spectrum_of_real_ones() -> None:
    """Broken: pixels independent of each other, an edge at each of them, leave every calibrated range: honest int8 of
    a network of images fails for an input that nobody will ever send."""
    turns, shift = np.arange(32) * 2 * np.pi / 32, RANDOM.uniform(0, 6, size=(2, 64, 1, 1))
    waves = np.sin(turns[:, None] + shift[0]) * np.cos(turns + shift[1])
    images = np.stack([waves, 1 - waves], axis=1).astype(np.float32)
    made = other_samples(samples(x=images), 40, 0)["synthetic"]["x"]
    assert made.shape == (8, 2, 32, 32)
    assert bool(((made >= images.min(axis=0)) & (made <= images.max(axis=0))).all())
    assert not (made[:, None] == images).all(axis=(2, 3, 4)).any()

    def edges(batch: Any) -> float:
        return float(np.abs(np.diff(batch, axis=-1)).mean() / batch.std())

    white = RANDOM.uniform(images.min(axis=0), images.max(axis=0), size=(8, 2, 32, 32))
    assert edges(made) < 2 * edges(images) + 0.1
    assert edges(white) > 2 * edges(made)


def test_beyond_the_calibrated_ranges_a_tight_policy_asks_for_the_usual_noise() -> None:
    """Broken: int8 that holds a policy's 36 dB fails for clipping at 15 dB where samples leave the calibrated range;
    or what has nothing of the answer passes there."""
    tight = (Gate(metric="snr_db", limit=36.0, direction="at_least", unit="dB"),)
    usual = usual_gates(tight, "scaled", "int8")
    assert [(gate.metric, gate.limit) for gate in usual] == [("mean_snr_db", 20.0)]
    assert usual_gates(tight, "mixed", "int8") == usual_gates(tight, "scaled", "fp32") == ()
    kept = Gate(metric="agreement", limit=0.98, direction="at_least")
    assert usual_gates((*tight, kept), "scaled", "int8")[1:] == (kept,)
    for noise, outcome in ((0.18, Outcome.PASS), (1.0, Outcome.FAIL)):
        answer = (WANTED + noise * RANDOM.normal(size=WANTED.shape)).astype(np.float32)
        found = [
            check_outputs(gates, {"y": answer}, {"y": WANTED}, SINGLE_CALL, batch_size=1, seed=0)
            for gates in (tight, usual)
        ]
        assert judge_kind("scaled", found[0], 5.0, 8).outcome is Outcome.FAIL
        assert judge_kind("scaled", found[1], 5.0, 8).outcome is outcome
