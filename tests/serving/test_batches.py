"""A published model runs batches of proven sizes, whatever it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import COSINE, target
from hypothesis import given
from hypothesis import strategies as st
from tiny_bundle import WEIGHTS, save_bundle

from compile_stage import flavor
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Check, Gate, Outcome, ShapeRange, Verdict
from compile_stage.serving.batches import ProvenBatches, proven_batches
from compile_stage.serving.manifest import VALIDATIONS, batches_of, read_manifest, write_validation

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

BATCHES = {"sizes": [1, 2, 4, 7, 8], "splits": True}


class Session:
    """A linear model that is right in the proven sizes only, and remembers which it was asked for."""

    def __init__(self, sizes: Any) -> None:
        self.known, self.seen = set(sizes), []

    def run(self, batch: Any) -> Any:
        self.seen.append(len(batch["x"]))
        answer = batch["x"] @ WEIGHTS
        return {"y": answer if len(answer) in self.known else answer * 0}


def rows(count: int) -> Any:
    return np.random.default_rng(count).random((count, 4), np.float32)


@given(sizes=st.sets(st.integers(1, 40), min_size=1), count=st.integers(1, 200))
def test_only_proven_sizes_are_run_and_each_row_has_its_answer(sizes: set[int], count: int) -> None:
    """Broken: a size that nobody compared with the original would be run, or rows would be lost, doubled or swapped."""
    session, x = Session(sizes), rows(count)
    answer = ProvenBatches(sizes, splits=True).run(session.run, {"x": x})
    assert set(session.seen) <= sizes
    np.testing.assert_allclose(answer["y"], x @ WEIGHTS, rtol=1e-5)
    assert len(session.seen) == -(-count // max(sizes))  # no more calls than the largest size asks for


@given(sizes=st.sets(st.integers(1, 12), min_size=1), count=st.integers(1, 60))
def test_each_prompt_has_its_own_continuation_in_proven_sizes(sizes: set[int], count: int) -> None:
    """Broken: prompts are answered with the continuation of another, or in a batch that nobody compared."""
    seen: list[int] = []

    def run(rows: Any) -> list[list[int]]:
        seen.append(len(rows))
        return [[int(row[0]), -int(row[0])] for row in rows]

    answers = ProvenBatches(sizes, splits=True).run_lists(run, np.arange(count)[:, None])
    assert answers == [[number, -number] for number in range(count)]
    assert set(seen) <= sizes
    if count not in sizes:
        with pytest.raises(UsageError, match=f"a batch of {count} was not proven"):
            ProvenBatches(sizes, splits=False).run_lists(run, np.arange(count)[:, None])


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ({"batches": {"sizes": [8, 1], "splits": True}}, ((1, 8), True)),
        ({"batches": {"sizes": [4]}}, ((4,), False)),
        ({"batches": {"sizes": []}}, None),
        ({"batches": None}, None),
        ({}, None),
    ],
)
def test_the_rule_is_the_manifests(manifest: Any, expected: Any) -> None:
    """Broken: a model that runs in parts refuses other sizes, or one that may not is run in parts; or one of an earlier
    version, whose manifest has no rule, is not served."""
    rule = ProvenBatches.of(manifest)
    assert (None if rule is None else (rule.sizes, rule.splits)) == expected


@pytest.mark.parametrize(("count", "seen"), [(1, [1]), (3, [4]), (5, [7]), (8, [8]), (9, [8, 1]), (19, [8, 8, 4])])
def test_what_is_cut_and_what_is_filled_up(count: int, seen: list[int]) -> None:
    """Broken: three rows would be run as three batches of one, or as one of eight."""
    session = Session(BATCHES["sizes"])
    ProvenBatches(BATCHES["sizes"], splits=True).run(session.run, {"x": rows(count)})
    assert session.seen == seen


def test_what_depends_on_the_rest_of_the_batch_is_not_run_in_parts() -> None:
    """Broken: a model that looks at the whole batch would be asked for parts of it, and answer something else."""
    proven = ProvenBatches([1, 8], splits=False)
    assert proven.run(Session([1, 8]).run, {"x": rows(8)})["y"].shape == (8, 3)
    with pytest.raises(UsageError, match=r"a batch of 3 was not proven: batches of 1 and 8 were"):
        proven.run(Session([1, 8]).run, {"x": rows(3)})


@pytest.mark.parametrize(
    "broken",
    [
        lambda batch: {"y": np.float32(1)},
        lambda batch: {"y": batch["x"][:1]},
        lambda batch: {"y": batch["x"][:, : 1 + int(batch["x"][0, 0])]},
    ],
    ids=["a number", "one row", "another width in each part"],
)
def test_answers_that_can_not_be_cut_or_joined_are_an_error(broken: Callable[[Any], Any]) -> None:
    """Broken: rows of one part would be taken for those of another."""
    x = np.repeat(np.arange(3, dtype=np.float32), 2)[:5, None] * np.ones((1, 4), np.float32)
    with pytest.raises(UsageError, match=r"one row for each|can't be put together"):
        ProvenBatches([2], splits=True).run(broken, {"x": x})


# ----------------------------------------------------------------------------------------------------- published models


@pytest.mark.parametrize("count", [1, 3, 5, 8, 9, 100])
def test_a_published_model_answers_any_number_of_rows(count: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Broken: predict would run a batch size that was never compared with the original."""
    import mlflow

    loaded = mlflow.pyfunc.load_model(str(save_bundle(tmp_path, batches=BATCHES)))
    session, seen = loaded.get_raw_model()._session, []
    run = type(session).run
    monkeypatch.setattr(type(session), "run", lambda self, b: (seen.append(len(b["x"])), run(self, b))[1])
    np.testing.assert_allclose(loaded.predict(rows(count)), rows(count) @ WEIGHTS, rtol=1e-5)
    assert set(seen) <= set(BATCHES["sizes"])
    assert sum(seen) >= count


def test_what_was_not_proven_is_answered_with_400(tmp_path: Path) -> None:
    """Broken: a client would read `unexpected error`, or get an answer that nobody proved; no rows at all would reach
    the runtime."""
    import mlflow
    from mlflow.exceptions import MlflowException

    loaded = mlflow.pyfunc.load_model(str(save_bundle(tmp_path, batches={"sizes": [1, 8], "splits": False})))
    assert len(loaded.predict(rows(8))) == 8
    for count, words in ((3, "a batch of 3 was not proven"), (9, "a batch of 9 was not proven"), (0, "is empty")):
        with pytest.raises(MlflowException, match=words) as caught:
            loaded.predict(rows(count))
        assert caught.value.get_http_status_code() == 400
    native = loaded.get_raw_model()
    for wrong in ({}, {"x": rows(0)}, {"x": np.float32(1)}, {"x": rows(3)[:, :2]}):
        with pytest.raises(UsageError):
            native.run(wrong)


class Writer:
    """A language model's session that ends each prompt with its own first token, in the proven sizes only."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def generate(self, ids: Any, new_tokens: int) -> list[list[int]]:
        self.seen.append(len(ids))
        return [[int(row[0])] * new_tokens for row in ids]


def test_prompts_are_continued_in_batches_that_were_proven(tmp_path: Path) -> None:
    """Broken: a language model would write in a batch that was never compared with the original, mix up its prompts, or
    write beyond its places; and a call without a prompt would reach the runtime, which ends the server over it."""
    places = {"text": {"longest": 16}}
    with flavor.load_model(str(save_bundle(tmp_path, batches=BATCHES, answer=places))) as model:
        model._session = session = Writer()  # type: ignore[assignment]
        ids = np.arange(19)[:, None] * np.ones((1, 5), np.int64)
        assert model.generate(ids, 3) == [[number] * 3 for number in range(19)]
        assert session.seen == [8, 8, 4]
        assert model.generate([[7, 8]], 15) == [[7] * 15]  # type: ignore[arg-type]
        for wrong, new, words in (
            (ids[:0], 3, r"these are int64\[0, 5\]"),
            (np.zeros((2, 0), np.int64), 3, "at least one token"),
            (ids + 0.7, 3, "whole numbers"),
            (np.arange(3), 3, "whole numbers"),
            ([[1, 2], [3]], 3, "one length"),
            ([[7, 8]], 16, "places for 16"),
        ):
            with pytest.raises(UsageError, match=words):
                model.generate(wrong, new)  # type: ignore[arg-type]
        assert len(session.seen) == 4
    proven = ProvenBatches([1, 8], splits=False)
    with pytest.raises(UsageError, match="a batch of 3 was not proven"):
        proven.run_lists(lambda rows: [[0]] * len(rows), rows(3))


def test_what_an_earlier_version_published_is_served_as_before(tmp_path: Path) -> None:
    """Broken: models that are served today would be refused, or slower, after an update of compile-stage."""
    path = save_bundle(tmp_path)
    assert "batches" not in read_manifest(path)
    with flavor.load_model(str(path)) as model:
        assert model.run({"x": rows(100)})["y"].shape == (100, 3)


def test_sizes_of_a_validation_on_this_machine_count(tmp_path: Path) -> None:
    """Broken: what was compiled for other hardware would never take more than the sizes that it was compiled for."""
    path = save_bundle(tmp_path, batches={"sizes": [1], "splits": False}, verdict=None)
    manifest, here = read_manifest(path), hardware()
    found = {
        "artifact": manifest["artifact"]["digest"], "hardware": here, "fingerprint": here.fingerprint, "passed": True,
        "batches": BATCHES, "runtime": {}, "at": "2026-11-23",
    }  # fmt: skip
    before = batches_of(manifest, path)
    assert before is not None
    assert (before.sizes, before.splits) == ((1,), False)
    write_validation(found, path / VALIDATIONS)
    proven = batches_of(manifest, path)
    assert proven is not None
    assert (proven.sizes, proven.splits) == ((1, 2, 4, 7, 8), True)


# ---------------------------------------------------------------------------------------------------- from a verdict


def check(metric: str, *batch_sizes: int) -> Check:
    gate = Gate(metric=metric, limit=0.0, direction="at_most")
    return Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason="", batch_sizes=batch_sizes)


def test_sizes_come_from_what_was_compared() -> None:
    """Broken: a size that the artifact refused when it was proven would be run when it is served."""
    proof = Check(gate=COSINE, outcome=Outcome.PASS, measured=1.0, reason="", batch_size=8)
    where = target(batch_sizes=(1, 8))
    assert proven_batches(Verdict(checks=(proof, check("other_batch_sizes", 4, 7))), where) == {
        "sizes": [1, 4, 7, 8], "splits": False
    }  # fmt: skip
    whole = Verdict(checks=(proof, check("other_batch_sizes"), check("larger_batches", 10)))
    assert proven_batches(whole, where) == {"sizes": [1, 8], "splits": True}
    assert proven_batches(None, where) == {"sizes": [1, 8], "splits": False}


def test_the_corners_of_a_policys_shapes_are_proven_batches() -> None:
    """Broken: a policy whose shapes go up to 32 rows would be served in batches of 8."""
    shape = ShapeRange(min=(1, 16), typical=(8, 64), max=(32, 128))
    table = ShapeRange(min=(1, 2), typical=(2, 2), max=(2, 2))  # the corner has the most rows that any input has
    where = target(batch_sizes=(8,), shapes={"table": table, "x": shape})
    proven = proven_batches(Verdict(checks=(check("larger_batches", 10),)), where)
    assert proven == {"sizes": [1, 8, 32], "splits": True}
