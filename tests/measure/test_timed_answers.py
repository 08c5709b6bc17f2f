"""Answers that were given while they were timed, laid beside the original's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Gate
from compile_stage.measure import timed_answers
from compile_stage.measure.participant import Turn
from compile_stage.measure.timed_answers import AnswerLog, Proof
from compile_stage.measure.timed_inputs import LARGEST_CHANGE, checked_batch

Array = np.ndarray[Any, Any]
COUNT, BATCH, ROUNDS = 64, 2, 12
EXACT = np.random.default_rng(0).normal(0, 1, (COUNT, 5))
FP32 = (
    Gate(metric="max_rel", limit=1e-3, direction="at_most"),
    Gate(metric="cosine", limit=0.9999, direction="at_least"),
)
INT8 = (
    Gate(metric="cosine", limit=0.99, direction="at_least"),
    Gate(metric="mean_snr_db", limit=20, direction="at_least"),
)


def noisy(share: float) -> Callable[[Array], Array]:
    random = np.random.default_rng(1)
    return lambda rows: rows + share * random.normal(0, 1, rows.shape)


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., str]:
    """The verdict over rounds in which the original answers `whole[rows]`, and the candidate what `change` makes of
    that."""

    def judged(
        change: Callable[[Array], Array],
        gates: tuple[Gate, ...] = FP32,
        whole: Array = EXACT,
        names: tuple[str, str] = ("y", "y"),
        mixed: Array | None = None,
    ) -> str:
        np.save(tmp_path / "reference.npy", whole)
        shutil.rmtree(tmp_path / "answers", ignore_errors=True)
        log = AnswerLog(tmp_path / "answers", COUNT, BATCH)
        for number in range(ROUNDS):
            _, folder = log.begin_round()
            seed = number  # as drawn, but the same in each run of the test
            turns = {}
            for name, answer in (("baseline", lambda rows: rows), ("own", change)):
                (folder / name).mkdir(parents=True)
                answers = []
                for j in range(2):
                    batch = checked_batch(COUNT, BATCH, seed, j)
                    rows = whole[batch.rows[batch.order]]
                    if mixed is not None:
                        rows = rows - mixed * rows.mean(axis=0)
                    if not batch.plain and rows.dtype.kind == "f":
                        rows = rows * (1 - LARGEST_CHANGE)
                    path = folder / name / f"{j}-0.npy"
                    np.save(path, answer(rows))
                    answers.append({names[name == "own"]: str(path)})
                turns[name] = Turn(latency_s=(0.1,), answers=tuple(answers))
            log.end_round(seed, folder, turns)
        return log.refuse(
            "own",
            "baseline",
            Proof(
                gates={"own": gates},
                reference={names[0]: str(tmp_path / "reference.npy")},
                digest="",
                mixed=mixed is not None,
            ),
        )

    return judged


def test_an_original_whose_rows_depend_on_each_other_is_laid_beside_itself(judge: Callable[..., str]) -> None:
    """Broken: an exact artifact of such a model is called a liar, or its garbage is not seen."""
    assert judge(noisy(0), mixed=np.ones(5)) == ""
    assert "wrong for" in judge(lambda rows: rows * 1.01, mixed=np.ones(5))


@pytest.mark.parametrize(("gates", "noise"), [(FP32, 0.0), (FP32, 1e-4), (INT8, 0.08), ((), 0.2)])
def test_answers_within_their_limits_are_right(
    judge: Callable[..., str], gates: tuple[Gate, ...], noise: float
) -> None:
    """Broken: honest candidates would be called liars."""
    assert judge(noisy(noise), gates) == ""


@pytest.mark.parametrize("gates", [FP32, INT8, (), (Gate(metric="mean_snr_db", limit=20, direction="at_least"),)])
@pytest.mark.parametrize(
    "lie",
    [
        np.zeros_like,
        lambda rows: rows[::-1],
        lambda rows: -rows,
        lambda rows: np.full_like(rows, np.nan),
        lambda rows: rows * 3,
    ],
    ids=["zeros", "of other samples", "negated", "nan", "scaled"],
)
def test_garbage_is_named_whatever_the_gates_are(
    judge: Callable[..., str], gates: tuple[Gate, ...], lie: Callable[[Array], Array]
) -> None:
    """Broken: what answers nothing while it is timed would win by its speed."""
    reason = judge(lie, gates)
    assert reason.startswith("answered differently while it was timed: output 'y' is wrong for ")
    assert reason.endswith(f"(batch {BATCH})")


def test_another_precision_than_that_which_was_proven_is_seen(judge: Callable[..., str]) -> None:
    """Broken: fp32 would be proven, and a kernel of 8 bits timed."""
    assert judge(noisy(0.02), INT8) == ""
    assert "wrong for" in judge(noisy(0.02), FP32)


def test_an_outputs_own_limit_takes_the_place_of_the_general_one(judge: Callable[..., str]) -> None:
    """Broken: what validation let through by the limit of its output would be called a liar by the general one, or the
    other way round."""
    strict, loose = (Gate(metric="max_rel", limit=limit, direction="at_most") for limit in (1e-9, 0.1))
    of_y, of_another = (replace(loose, output=name) for name in ("y", "z"))
    assert judge(noisy(0.005), (strict, of_y)) == ""
    assert "wrong for" in judge(noisy(0.005), (strict, of_another))
    assert "wrong for" in judge(noisy(0.005), (loose, replace(strict, output="y")))


def test_one_wrong_answer_to_a_sample_is_enough_and_one_beside_a_threshold_is_not(judge: Callable[..., str]) -> None:
    """Broken: a wrong answer in ten would pass, or an honest tree would fail because a changed sample crossed a
    threshold."""
    plain = [[checked_batch(COUNT, BATCH, number, j).plain for j in range(2)] for number in range(ROUNDS)]
    order = [is_plain for row in plain for is_plain in row]

    def wrong_in(place: int) -> Callable[[Array], Array]:
        calls = iter(range(1000))
        return lambda rows: rows * np.array([[-1.0], [1.0]]) if next(calls) == place else rows

    assert "for 1 of" in judge(wrong_in(order.index(True)))
    assert judge(wrong_in(order.index(False))) == ""


def test_an_output_that_is_lost_or_misshapen_or_of_another_kind_is_named(judge: Callable[..., str]) -> None:
    """Broken: nothing would be compared, and nothing compared would be right."""
    assert "it has the outputs ['z'], and the original ['y']" in judge(lambda rows: rows, names=("y", "z"))
    assert "has the shape [4], the original's [5]" in judge(lambda rows: rows[:, :4])
    assert "holds int64, the original's float64" in judge(lambda rows: rows.astype(np.int64))


def test_an_output_that_only_labels_are_made_of_may_be_off_in_some_rows(judge: Callable[..., str]) -> None:
    """Broken: a detector whose boxes come in another order, and which its own metric proved, would be called a liar."""
    calls = count()

    def every_third(rows: Array) -> Array:
        return rows if next(calls) % 3 else rows[:, ::-1]

    gates = (Gate(metric="top1_agreement", limit=0.9, direction="at_least"),)
    assert judge(every_third, gates) == ""
    assert "is wrong for" in judge(np.zeros_like, gates)


def test_labels_may_differ_a_little_more_often_than_proven(judge: Callable[..., str]) -> None:
    """Broken: a classifier that answers one label would win, or one that is honestly off once would fail."""
    labels = np.random.default_rng(3).integers(0, 10, COUNT)
    gates = (Gate(metric="agreement", limit=0.98, direction="at_least"),)
    assert judge(lambda rows: rows, gates, labels) == ""
    assert "values that are not the original's" in judge(np.zeros_like, gates, labels)


def test_a_limit_on_the_whole_range_is_not_one_on_the_few_rows_that_were_kept(judge: Callable[..., str]) -> None:
    """Broken: an error that is small beside the output's range would be large beside a small answer."""
    whole = EXACT * np.where(np.arange(COUNT) < 2, 1000.0, 1.0)[:, None]
    gates = (Gate(metric="max_rel", limit=1e-3, direction="at_most"),)
    assert judge(noisy(0.1), gates, whole) == ""


def test_large_answers_do_not_fill_the_disk(
    judge: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: hours of rounds of a segmentation network would leave hundreds of gigabytes."""
    monkeypatch.setattr(timed_answers, "_FOLDER_BYTES", 2000)
    assert "wrong for" in judge(np.zeros_like)
    left = sum(path.stat().st_size for path in (tmp_path / "answers").rglob("*.npy"))
    assert left <= 2000
