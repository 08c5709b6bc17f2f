"""Which whole numbers and categories the original takes, and whether an artifact then answers as it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest

from compile_stage.core.digest import plain as to_plain
from compile_stage.core.digest import revive
from compile_stage.core.errors import SourceError, UsageError, WorkerError
from compile_stage.core.records import Check, DataSpec, Gate, SampleSet, Verdict
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.engine import calls, open_model
from compile_stage.measure import taken_search
from compile_stage.measure.samples import open_samples
from compile_stage.measure.taken_search import find_taken
from compile_stage.measure.taken_values import TakenAnswers, ask_original, check_taken
from compile_stage.serving.taken_values import proven_taken

GATES = (Gate(metric="max_abs", limit=1e-3, direction="at_most"),)
SOURCE = factories.source(flavor="pytorch")
TABLES = (10, 500, 500)


def signature(width: int = 3, dtype: str = "int64") -> Signature:
    return Signature(
        inputs=(
            TensorSpec(name="ids", dtype=dtype, shape=("batch", width)),
            TensorSpec(name="mask", dtype="int64", shape=("batch", 2)),
        ),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
    )


class Model:
    """A session that picks rows of a table for each column of `ids`, and takes any `mask`."""

    def __init__(
        self,
        tables: tuple[int, ...] = TABLES,
        from_end: bool = False,
        value: Callable[[Any], Any] = lambda rows: rows,
        dtype: str = "int64",
    ) -> None:
        self.signature = signature(len(tables), dtype)
        self._tables, self._from_end, self._value = tables, from_end, value

    def run(self, batch: Any) -> Any:
        rows = batch["ids"].astype(np.int64)
        for column, size in enumerate(self._tables):
            ids = rows[:, column]
            if (ids >= size).any() or (ids < (-size if self._from_end else 0)).any():
                message = "index out of range in self"
                raise IndexError(message)
        picked = np.where(rows < 0, rows + np.asarray(self._tables), rows)
        return {"y": (self._value(picked).sum(axis=1) + (batch["mask"] > 0).sum(axis=1)).astype(np.float32)}


class Here:
    """A worker in this process that has a model open."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model, self._patch = model, monkeypatch

    def call(self, name: str, /, **given: Any) -> Any:
        for module in (open_model, calls):
            self._patch.setattr(module, "open_session", lambda: self._model)
        try:
            return calls.CALLS[name](**{key: to_plain(value) for key, value in given.items()})
        except IndexError as error:
            raise WorkerError("exception", str(error)) from error


def samples_of(folder: Path, model: Model, tables: tuple[int, ...] = TABLES) -> SampleSet:
    random = np.random.default_rng(0)
    ids = np.stack([random.integers(size * 0.9, size=32) for size in tables], axis=1).astype(
        model.signature.inputs[0].dtype
    )
    np.savez(folder / "data.npz", ids=ids, mask=random.integers(2, size=(32, 2)))
    return factories.prepare(DataSpec(source=f"file:{folder}/data.npz"), model.signature, folder / "samples", seed=0)


def check_of(original: Any, artifact: Any, samples: SampleSet, folder: Path, patch: pytest.MonkeyPatch) -> Check:
    asked = ask_original(Here(original, patch), SOURCE, samples, 2, folder)  # type: ignore[arg-type]
    check = check_taken(Here(artifact, patch), GATES, asked, seed=0)  # type: ignore[arg-type]
    assert check.measured == 0.0, "a verdict with it is read again, and it never fails"
    return check


def rules_of(check: Check) -> list[tuple[Any, Any, Any]]:
    """What the manifest lists: columns, least, most."""
    proven = proven_taken(Verdict(checks=(check,)))
    assert proven is not None
    assert all(rule["input"] == "ids" for rule in proven["rules"]), "a mask takes any number"
    return [(rule["columns"], rule["least"], rule["most"]) for rule in proven["rules"]]


def test_each_column_has_the_limits_of_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an id beyond one table would be answered, or one within another refused."""
    model = Model()
    check = check_of(model, model, samples_of(tmp_path, model), tmp_path, monkeypatch)
    assert rules_of(check) == [([0], 0, 9), ([1, 2], 0, 499)]
    assert check.reason.startswith(
        "column 0 of input 'ids' takes whole numbers from 0 to 9: "
        "the original refuses any other (IndexError: index out of range in self)"
    )


def test_one_larger_table_among_many_is_seen_by_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the limits of the columns that were looked at would hold for it too, and good requests be refused."""
    tables = (90, 90, 900, 90, 90, 90, 90, 90)
    model = Model(tables)
    check = check_of(model, model, samples_of(tmp_path, model, tables), tmp_path, monkeypatch)
    assert rules_of(check) == [([0, 1, 3, 4, 5, 6, 7], 0, 89), ([2], 0, 899)]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32"])
def test_no_number_is_asked_for_that_the_type_can_not_hold(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: NumPy would raise, and the run fail."""
    model = Model((10, 100), dtype=dtype)
    check = check_of(model, model, samples_of(tmp_path, model, (10, 100)), tmp_path, monkeypatch)
    least = None if dtype == "uint8" else 0
    assert rules_of(check) == [([0], least, 9), ([1], least, 99)]


def test_of_tokens_in_a_wide_matrix_all_have_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a model of long texts would be asked thousands of times, or not at all."""
    tables = (300,) * 100
    model = Model(tables)
    check = check_of(model, model, samples_of(tmp_path, model, tables), tmp_path, monkeypatch)
    assert rules_of(check) == [(None, 0, 299)]


def test_a_wide_matrix_of_several_tables_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the limits of the column in the middle would hold for all, and good requests be refused."""
    tables = (300,) * 50 + (400,) * 50
    model = Model(tables)
    assert not rules_of(check_of(model, model, samples_of(tmp_path, model, tables), tmp_path, monkeypatch))


def test_numbers_from_the_end_are_taken_where_the_artifact_counts_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a runtime that does not count from the end would be served, or one that does refused."""
    original = Model((50,), from_end=True)
    samples = samples_of(tmp_path, original, (50,))
    assert rules_of(check_of(original, original, samples, tmp_path / "same", monkeypatch)) == [(None, -50, 49)]
    refuses = Model((50,))
    check = check_of(original, refuses, samples, tmp_path / "refuses", monkeypatch)
    assert rules_of(check) == [(None, 0, 49)]
    assert "the compiled model does not take it" in check.reason
    other = Model((50,), from_end=True, value=lambda rows: np.where(rows > 45, 0, rows))
    check = check_of(original, other, samples, tmp_path / "other", monkeypatch)
    assert rules_of(check) == [(None, 0, 49)]
    assert "otherwise than the original" in check.reason


def test_an_original_that_takes_all_is_asked_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: trees over many columns of whole numbers would be asked for each column."""
    asked = []

    class Takes(Model):
        def run(self, batch: Any) -> Any:
            asked.append(int(batch["ids"].max()))
            return {"y": batch["ids"].sum(axis=1).astype(np.float32)}

    model = Takes((9,) * 40)
    assert not rules_of(check_of(model, model, samples_of(tmp_path, model, (9,) * 40), tmp_path, monkeypatch))
    assert len(asked) < 35
    assert 2**31 - 1 in asked


class Computes:
    """A session of two columns of whole numbers that takes any; or numbers up to `most` in the first column."""

    def __init__(self, kind: str, held: str, most: int | None = None) -> None:
        self.signature = Signature(
            inputs=(TensorSpec(name="ids", dtype=kind, shape=("batch", 2)),),
            outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
        )
        self._held, self._most = np.iinfo(held), most

    def run(self, batch: Any) -> Any:
        if self._most is not None and (batch["ids"][:, 0] > self._most).any():
            message = "index out of range in self"
            raise IndexError(message)
        ids = np.clip(batch["ids"].astype(object), int(self._held.min), int(self._held.max)).astype(np.float64)
        return {"y": (ids @ [1.0, 2.0]).astype(np.float32)}


@pytest.mark.parametrize(
    ("kind", "most", "rules"),
    [
        ("int64", None, [(None, -(2**31), 2**31 - 1)]),
        ("int64", 50, [([0], None, 50), ([1], -(2**31), 2**31 - 1)]),
        ("uint32", None, [(None, 0, 2**31 - 1)]),
        ("int32", None, []),
    ],
)
def test_an_artifact_that_computes_in_32_bits_is_given_no_more(
    kind: str, most: int | None, rules: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: OpenVINO holds whole numbers in 32 bits, and a time stamp that no sample had would be answered as the
    largest of these."""
    original, narrow = Computes(kind, kind, most), Computes(kind, "int32", most)
    np.savez(tmp_path / "data.npz", ids=np.random.default_rng(0).integers(50, size=(32, 2)).astype(kind))
    spec = DataSpec(source=f"file:{tmp_path}/data.npz")
    samples = factories.prepare(spec, original.signature, tmp_path / "samples", seed=0)
    check = check_of(original, narrow, samples, tmp_path / "narrow", monkeypatch)
    assert rules_of(check) == rules
    assert ("otherwise than the original" in check.reason) == (kind != "int32")
    same = rules_of(check_of(original, original, samples, tmp_path / "same", monkeypatch))
    assert same == rules[: most is not None], "one that computes as the original does takes all that it takes"


def test_an_artifact_that_refuses_what_takes_more_than_32_bits_is_given_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: LiteRT refuses such numbers by itself, and every model with an attention mask was refused for it."""

    class Refuses(Computes):
        def run(self, batch: Any) -> Any:
            if (abs(batch["ids"]) > self._held.max).any():
                raise UsageError("the compiled model takes int32 only")
            return super().run(batch)

    original = Computes("int64", "int64")
    np.savez(tmp_path / "data.npz", ids=np.random.default_rng(0).integers(50, size=(32, 2)))
    spec = DataSpec(source=f"file:{tmp_path}/data.npz")
    samples = factories.prepare(spec, original.signature, tmp_path / "samples", seed=0)
    check = check_of(original, Refuses("int64", "int32"), samples, tmp_path / "asked", monkeypatch)
    assert rules_of(check) == [(None, -(2**31), 2**31 - 1)]
    assert "the compiled model takes int32 only" in check.reason


def test_an_original_that_ends_its_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the run would end with the worker's error alone, and nobody know what was asked."""
    model = Model()

    class Dies(Here):
        def call(self, name: str, /, **given: Any) -> Any:
            raise WorkerError("crash", "the worker was ended by SIGSEGV")

    with pytest.raises(SourceError, match="asked which whole numbers it takes: the worker was ended by SIGSEGV"):
        ask_original(Dies(model, monkeypatch), SOURCE, samples_of(tmp_path, model), 2, tmp_path)  # type: ignore[arg-type]


def test_a_limit_that_is_the_length_of_the_request_is_none(tmp_path: Path) -> None:
    """Broken: a longer request, whose tokens are counted in a second input, would be refused."""

    class Counts:
        signature = Signature(
            inputs=(
                TensorSpec(name="x", dtype="float32", shape=("batch", "time")),
                TensorSpec(name="valid", dtype="int64", shape=("batch",)),
            ),
            outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
        )

        def run(self, batch: Any) -> Any:
            if (batch["valid"] > batch["x"].shape[1]).any() or (batch["valid"] < 1).any():
                message = "lengths"
                raise ValueError(message)
            return {"y": batch["x"].sum(axis=1)}

    np.savez(tmp_path / "data.npz", x=np.ones((8, 40), np.float32), valid=np.arange(20, 28))
    spec = DataSpec(source=f"file:{tmp_path}/data.npz")
    samples = factories.prepare(spec, Counts.signature, tmp_path / "samples", seed=0)
    (rule,) = find_taken(Counts(), open_samples(samples), 1, {})["rules"]  # type: ignore[arg-type]
    assert (rule["input"], rule["least"], rule["most"]) == ("valid", 1, None)


class Demands:
    """A session of whole numbers, and one of floats `x`, that raises where its condition does not hold."""

    def __init__(self, shapes: dict[str, tuple[int | str, ...]], holds: Callable[[Any], Any]) -> None:
        self.signature = Signature(
            inputs=tuple(
                TensorSpec(name=name, dtype="float32" if name == "x" else "int64", shape=("batch", *shape))
                for name, shape in shapes.items()
            ),
            outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
        )
        self._holds = holds

    def run(self, batch: Any) -> Any:
        if not np.all(self._holds(batch)):
            message = "no"
            raise ValueError(message)
        return {"y": np.zeros(len(next(iter(batch.values()))), np.float32)}


def limits_in(tmp_path: Path, model: Demands, **inputs: Any) -> list[tuple[Any, Any, Any, Any]]:
    tmp_path.mkdir(exist_ok=True)
    np.savez(tmp_path / "data.npz", **inputs)
    spec = DataSpec(source=f"file:{tmp_path}/data.npz")
    samples = factories.prepare(spec, model.signature, tmp_path / "samples", seed=0)
    rules = find_taken(model, open_samples(samples), 1, {})["rules"]  # type: ignore[arg-type]
    return [(rule["input"], rule["columns"], rule["least"], rule["most"]) for rule in rules]


def test_what_depends_on_another_input_is_no_limit(tmp_path: Path) -> None:
    """Broken: a start beyond the end of the first sample would be refused in every request."""
    random = np.random.default_rng(0)
    start, end = random.integers(20, size=32), random.integers(30, 100, size=32)
    model = Demands({"start": (), "end": ()}, lambda batch: batch["start"] < batch["end"])
    assert limits_in(tmp_path, model, start=start, end=end) == []
    model = Demands({"span": (2,)}, lambda batch: batch["span"][:, 0] < batch["span"][:, 1])
    assert limits_in(tmp_path / "b", model, span=np.stack([start, end], axis=1)) == []


def test_a_limit_that_follows_from_the_length_is_none_and_one_of_its_size_is_kept(tmp_path: Path) -> None:
    """Broken: a longer request, which has more places, would be refused; or ids beyond a table be answered."""
    x, place = np.ones((16, 40), np.float32), np.arange(16) % 15
    model = Demands(
        {"x": ("time",), "place": ()}, lambda batch: (batch["place"] >= 0) & (batch["place"] < batch["x"].shape[1] // 2)
    )
    assert limits_in(tmp_path, model, x=x, place=place) == [("place", None, 0, None)]
    ids = np.random.default_rng(0).integers(40, size=(16, 40))
    model = Demands({"ids": ("time",)}, lambda batch: (batch["ids"] >= 0) & (batch["ids"] < 40))
    assert limits_in(tmp_path / "b", model, ids=ids) == [("ids", None, 0, 39)]


def test_one_larger_table_among_some_columns_is_seen_without_samples_of_it(tmp_path: Path) -> None:
    """Broken: a rare code of that column would be refused."""
    tables, ids = np.array([90, 90, 90, 90, 90, 100, 90]), np.random.default_rng(0).integers(20, size=(32, 7))
    model = Demands({"ids": (7,)}, lambda batch: (batch["ids"] >= 0) & (batch["ids"] < tables))
    assert limits_in(tmp_path, model, ids=ids) == [("ids", [0, 1, 2, 3, 4, 6], 0, 89), ("ids", [5], 0, 99)]
    steps = np.repeat(ids[:, None, :4], 12, axis=1)
    model = Demands({"ids": (12, 4)}, lambda batch: (batch["ids"] >= 0) & (batch["ids"] < [90, 90, 100, 90]))
    assert limits_in(tmp_path / "b", model, ids=steps) == []


def test_columns_of_a_matrix_of_any_width_have_no_rule_of_their_own(tmp_path: Path) -> None:
    """Broken: a narrower request has no such column, and predict() would end with an IndexError."""
    tables, ids = np.array([90, 50, 70, 80]), np.random.default_rng(0).integers(20, size=(32, 4))
    model = Demands(
        {"ids": ("time",)}, lambda batch: (batch["ids"] >= 0) & (batch["ids"] < tables[: batch["ids"].shape[1]])
    )
    assert limits_in(tmp_path, model, ids=ids) == [("ids", None, 0, None)]


def test_codes_with_gaps_are_no_range(tmp_path: Path) -> None:
    """Broken: a code beyond a gap that the samples lack would be refused."""
    model = Demands({"code": ()}, lambda batch: np.isin(batch["code"], [1, 5, 9]))
    assert limits_in(tmp_path, model, code=np.tile([1, 5], 8)) == [("code", None, 1, None)]


@pytest.mark.parametrize("pauses", [1, 1000])
def test_a_number_that_takes_long_ends_the_search_and_a_pause_of_the_machine_does_not(
    pauses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a number could take all memory, and the check say that none is refused; or a busy machine lose a rule."""
    clock = {"now": 0.0, "pauses": float(pauses)}
    monkeypatch.setattr(taken_search.time, "perf_counter", lambda: clock["now"])

    def holds(batch: Any) -> Any:
        if batch["ids"].max() >= 256 and clock["pauses"] > 0:
            clock["pauses"] -= 1
            clock["now"] += 5.0
        return batch["ids"] < 1000

    model = Demands({"ids": ()}, holds)
    np.savez(tmp_path / "data.npz", ids=np.arange(32))
    spec = DataSpec(source=f"file:{tmp_path}/data.npz")
    samples = factories.prepare(spec, model.signature, tmp_path / "samples", seed=0)
    found = find_taken(model, open_samples(samples), 1, {})  # type: ignore[arg-type]
    assert [rule["most"] for rule in found["rules"]] == ([999] if pauses == 1 else [])
    assert [note for note in found["notes"] if "much longer" in note] == found["notes"]
    assert len(found["notes"]) == (pauses > 1)


def test_where_nobody_asked_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a validation on a GPU would say that every number is taken, and undo what the manifest lists."""
    nobody = TakenAnswers(rules=None, notes=("not asked: the original runs on cuda",))
    check = check_taken(Here(Model(), monkeypatch), GATES, revive(TakenAnswers, to_plain(nobody)), seed=0)  # type: ignore[arg-type]
    assert check.reason == "not asked: the original runs on cuda"
    assert check.measured == 0.0, "a verdict with it is read again"
    assert proven_taken(Verdict(checks=(check,))) is None


class Encoder:
    """A session that knows some categories of its column, or takes any."""

    def __init__(self, known: Any, dtype: str, refuses: bool = True) -> None:
        self.signature = Signature(
            inputs=(TensorSpec(name="city", dtype=dtype, shape=("batch", 1)),),
            outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
        )
        self._known, self._refuses = set(known), refuses

    def run(self, batch: Any) -> Any:
        if self._refuses and (new := set(batch["city"].ravel().tolist()) - self._known):
            message = f"unknown categories {new}"
            raise ValueError(message)
        return {"y": np.zeros(len(batch["city"]), np.float32)}


def found_in(tmp_path: Path, encoder: Encoder, rows: Any, categories: Any) -> dict[str, Any]:
    np.savez(tmp_path / "data.npz", city=rows)
    spec = DataSpec(source=f"file:{tmp_path}/data.npz")
    samples = factories.prepare(spec, encoder.signature, tmp_path / "samples", seed=0)
    return find_taken(encoder, open_samples(samples), 1, {"city": {0: categories}})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["texts", "numbers"])
def test_categories_that_the_samples_lack_are_taken(kind: str, tmp_path: Path) -> None:
    """Broken: a rare category that the original knows would be refused, or an unknown one be answered."""
    known: list[Any] = ["Bonn", "Oslo", "Rome and its hills"] if kind == "texts" else [1, 5, 9]
    dtype = "str" if kind == "texts" else "float32"
    rows = np.asarray(known[:2] * 16).reshape(-1, 1)
    found = found_in(tmp_path, Encoder(known, dtype), rows, [*known, "Atlantis" if kind == "texts" else 77])
    (rule,) = found["rules"]
    assert (rule["input"], rule["columns"], rule["values"]) == ("city", None, known)
    assert rule["reason"] == "the original refuses any other (ValueError)"


def test_an_encoder_that_takes_any_has_no_rule(tmp_path: Path) -> None:
    """Broken: OneHotEncoder(handle_unknown="ignore") would refuse what it was made to take."""
    rows = np.asarray(["Bonn", "Oslo"] * 16).reshape(-1, 1)
    assert found_in(tmp_path, Encoder(["Bonn"], "str", refuses=False), rows, ["Bonn", "Oslo"]) == {
        "rules": [], "wide": [], "notes": []
    }  # fmt: skip


def test_categories_of_what_was_scaled_before_make_no_rule(tmp_path: Path) -> None:
    """Broken: categories behind a scaler are others than the input's, and each request would be refused."""
    rows = np.asarray([[1.0], [5.0]] * 16, np.float32)
    found = found_in(tmp_path, Encoder([1.0, 5.0], "float32"), rows, [-1.0, 1.0])
    assert not found["rules"]
    assert found["notes"] == ["the original refuses some values of 'city', and which is not known: they are answered"]
