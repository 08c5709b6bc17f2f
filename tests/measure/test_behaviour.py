"""How a model behaves from call to call: each fault of an artifact is found, and none that the original has too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.behaviour import calls_to_compare, judge_calls, make_calls, mixed_rows, parts_of
from compile_stage.measure.gates import that_held
from compile_stage.measure.samples import Samples
from compile_stage.measure.tolerance import elementwise_gates

GATES = (
    Gate(metric="cosine", limit=0.99, direction="at_least"),
    Gate(metric="max_rel", limit=0.01, direction="at_most"),
)
ACCURACY = Gate(metric="accuracy", limit=0.01, direction="at_most", options={"drop": "max_drop"})
WEIGHTS = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
SAMPLES = Samples(20, {"x": np.random.default_rng(2).normal(size=(20, 4)).astype(np.float32)}, None)
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 3)),),
)


class Model:
    """A linear model, with a fault of its own."""

    signature = SIGNATURE

    def __init__(self, fault: Callable[[Model, Any, Any], Any] = lambda model, x, y: y) -> None:
        self._fault, self.calls, self.buffer = fault, 0, np.zeros((8, 3), np.float32)

    def run(self, batch: Any) -> Any:
        self.calls += 1
        return {"y": self._fault(self, batch["x"], batch["x"] @ WEIGHTS)}


def wrong_between(model: Model, x: Any, y: Any) -> Any:
    return y if len(x) in (1, 8) else y * 0


def refuses_between(model: Model, x: Any, y: Any) -> Any:
    if len(x) not in (1, 8):
        raise ValueError(f"compiled for batches of 1 and 8, not of {len(x)}")
    return y


def by_position(model: Model, x: Any, y: Any) -> Any:
    return y * np.linspace(1, 2, len(y), dtype=np.float32)[:, None]


def overwrites(model: Model, x: Any, y: Any) -> Any:
    model.buffer[: len(y)] = y
    return model.buffer[: len(y)]


def overwrites_later(model: Model, x: Any, y: Any) -> Any:
    """Answers in one of sixteen buffers, by turns."""
    if model.buffer.ndim == 2:
        model.buffer = np.zeros((16, *model.buffer.shape), np.float32)
    answer = model.buffer[model.calls % 16, : len(y)]
    answer[:] = y
    return answer


def changes_input(model: Model, x: Any, y: Any) -> Any:
    x += 1
    return y


def drifts(model: Model, x: Any, y: Any) -> Any:
    return y * np.float32(1.1**model.calls)


def of_its_thread(model: Model, x: Any, y: Any) -> Any:
    return y if threading.current_thread() is threading.main_thread() else 0 * y


def refuses_other_threads(model: Model, x: Any, y: Any) -> Any:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("no context is current")
    return y


def of_the_batch(model: Model, x: Any, y: Any) -> Any:
    """Batch normalisation that was left in training mode."""
    return (y - y.mean(axis=0)) / (y.std(axis=0) + 1e-6)


def failures(own: Model, original: Model, tmp_path: Path) -> dict[str, str]:
    """Check → reason, of those that did not pass."""
    calls = calls_to_compare(SAMPLES.count, (1, 8), 0)
    made = [make_calls(model, SAMPLES, calls, tmp_path / str(id(model))) for model in (own, original)]
    checks = judge_calls(GATES, calls, *made, 0)
    assert len({check.gate.metric for check in checks}) == len(checks)
    return {check.gate.metric: check.reason for check in checks if check.outcome is not Outcome.PASS}


@pytest.mark.parametrize(
    ("fault", "sizes", "depends"), [(of_the_batch, (1, 8), True), (of_the_batch, (2,), True), (None, (1, 8), False)]
)
def test_rows_that_depend_on_each_other_are_seen_in_the_original(
    fault: Any, sizes: tuple[int, ...], depends: bool, tmp_path: Path
) -> None:
    """Broken: artifacts of such a model fail as if they were wrong, and nobody looks at the model."""
    model = Model(fault) if fault else Model()
    calls = calls_to_compare(SAMPLES.count, sizes, 0)
    answers = make_calls(model, SAMPLES, calls, tmp_path)
    size = max(sizes)
    whole = [model.run({"x": SAMPLES.inputs["x"][at : at + size]})["y"] for at in range(0, SAMPLES.count, size)]
    found = mixed_rows(calls, answers, {"y": np.concatenate(whole)})
    assert found.startswith("output 'y' in a batch of ") is depends, found


@pytest.mark.parametrize(("wrong", "fails"), [(0, False), (1, False), (3, True)])
def test_labels_that_are_all_wrong_in_a_few_rows_are_found(wrong: int, fails: bool, tmp_path: Path) -> None:
    """Broken: of an artifact that answers labels alone, all could be wrong in batches of up to four rows, since two
    times two of so few may change."""

    def labels(model: Model, x: Any, y: Any) -> Any:
        found = y.argmax(axis=1)
        return found if len(x) == 4 else np.where(np.arange(len(found)) < wrong, found + 1, found)

    calls = calls_to_compare(SAMPLES.count, (4,), 0)
    own = make_calls(Model(labels), SAMPLES, calls, tmp_path / "own")
    original = make_calls(Model(lambda model, x, y: y.argmax(axis=1)), SAMPLES, calls, tmp_path / "original")
    gates = (Gate(metric="agreement", limit=0.99, direction="at_least"),)
    failed = {
        check.gate.metric for check in judge_calls(gates, calls, own, original, 0) if check.outcome is not Outcome.PASS
    }
    assert failed == ({"other_batch_sizes"} if fails else set())


def test_answers_that_no_gate_can_judge_must_resemble_the_originals(tmp_path: Path) -> None:
    """Broken: where a policy looks at labels alone, any answer would pass in another order and in other sizes."""
    calls = calls_to_compare(SAMPLES.count, (8,), 0)
    models = {"own": Model(lambda model, x, y: -y), "original": Model(), "scaled": Model(lambda model, x, y: 1.5 * y)}
    made = {name: make_calls(model, SAMPLES, calls, tmp_path / name) for name, model in models.items()}
    gates = elementwise_gates(that_held([ACCURACY], []), has_labels=True, few_rows=True)
    checks = {c.gate.metric: c for c in judge_calls(gates, calls, made["own"], made["original"], 0)}
    assert checks["permuted_batch"].outcome is Outcome.FAIL
    assert "rows are off by more than 0.7" in checks["permuted_batch"].reason
    assert checks["other_batch_sizes"].outcome is Outcome.FAIL
    scaled = judge_calls(gates, calls, made["scaled"], made["original"], 0)
    assert {check.outcome for check in scaled} == {Outcome.PASS}


def test_of_an_artifact_with_a_waiver_no_resemblance_is_asked() -> None:
    """Broken: an output that a waiver gave up would fail by a check that no waiver reaches."""
    missed = Check(gate=ACCURACY, outcome=Outcome.FAIL, measured=0.5, reason="")
    assert that_held([ACCURACY], [missed]) == ()


def test_the_calls_are_between_the_batch_sizes() -> None:
    """Broken: a size that the policy names would be run twice, and none that it does not."""
    calls = calls_to_compare(20, (1, 8), 0)
    assert [(call["check"], len(call["rows"])) for call in calls] == [
        ("permuted_batch", 8), ("other_batch_sizes", 2), ("other_batch_sizes", 4), ("other_batch_sizes", 7),
        ("larger_batches", 10),
    ]  # fmt: skip
    assert sorted(calls[0]["rows"]) == list(range(8)) != calls[0]["rows"]
    assert [len(call["rows"]) for call in calls_to_compare(20, (8,), 0)] == [8, 1, 2, 4, 7, 10]
    assert [len(call["rows"]) for call in calls_to_compare(20, (1,), 0)] == [1, 3]
    assert [len(call["rows"]) for call in calls_to_compare(99, (24,), 0)] == [24, 1, 2, 4, 8, 12, 16, 23, 26]
    assert max(calls_to_compare(3, (8,), 0)[0]["rows"]) == 2


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        (wrong_between, "other_batch_sizes", "in a batch of 4: "),
        (by_position, "permuted_batch", "in a batch of 8: "),
        (overwrites, "answer_kept", "a later call overwrites an earlier answer: output 'y'"),
        (overwrites_later, "answer_kept", "a later call overwrites an earlier answer: output 'y'"),
        (changes_input, "input_unchanged", "a call changes its input 'x'"),
        (drifts, "repeatable", "output 'y' of two equal calls differs by 0.61 of its size"),
        (of_its_thread, "repeatable", "differs by 1 of its size, one of them from another thread"),
        (refuses_other_threads, "repeatable", "from another thread is refused (RuntimeError: no context is current)"),
    ],
)
def test_a_fault_between_calls_is_found_by_name(fault: Any, check: str, words: str, tmp_path: Path) -> None:
    """Broken: right in each call by itself, wrong for whoever serves it."""
    found = failures(Model(fault), Model(), tmp_path)
    assert words in found[check]


@pytest.mark.parametrize(
    "fault",
    [of_the_batch, by_position, overwrites, overwrites_later, changes_input, of_its_thread, refuses_other_threads],
)
def test_what_the_original_does_too_is_no_fault(fault: Any, tmp_path: Path) -> None:
    """Broken: no artifact of a model whose answers depend on the batch could pass."""
    assert failures(Model(fault), Model(fault), tmp_path) == {}


def larger(own: Model, original: Model, tmp_path: Path) -> Check:
    calls = calls_to_compare(SAMPLES.count, (1, 8), 0)
    made = (
        make_calls(own, SAMPLES, parts_of(calls, (1, 8)), tmp_path / "own"),
        make_calls(original, SAMPLES, calls, tmp_path / "original"),
    )
    checks = judge_calls(GATES, calls, *made, 0)
    other = next(check for check in checks if check.gate.metric == "other_batch_sizes")
    assert other.batch_sizes == (2, 4, 7)
    return next(check for check in checks if check.gate.metric == "larger_batches")


def test_a_larger_batch_in_parts_is_compared_with_the_original_in_one(tmp_path: Path) -> None:
    """Broken: what is published would be run in parts, and nobody would have seen whether that is right."""
    seen: list[int] = []
    own = Model(lambda model, x, y: (seen.append(len(x)), y)[1])
    assert larger(own, Model(), tmp_path).batch_sizes == (10,)
    assert max(seen) == 8
    assert 10 not in seen


def test_an_original_that_looks_at_the_whole_batch_is_not_run_in_parts(tmp_path: Path) -> None:
    """Broken: a request of ten rows would be answered in parts, and otherwise than the original does; or a faithful
    artifact would fail for it."""
    check = larger(Model(of_the_batch), Model(of_the_batch), tmp_path)
    assert check.outcome is Outcome.PASS
    assert check.batch_sizes == ()
    assert "refuses batch sizes that were not proven" in check.reason


def test_an_original_that_is_random_demands_no_repetition(tmp_path: Path) -> None:
    """Broken: dropout in the original would fail artifacts for being like it."""
    noisy = Model(lambda model, x, y: y + np.float32(0.5 * model.calls))
    assert "repeatable" not in failures(Model(lambda model, x, y: y + np.float32(0.5 * model.calls)), noisy, tmp_path)


def test_a_size_that_is_refused_is_wrong_only_where_the_policy_names_it(tmp_path: Path) -> None:
    """Broken: an artifact of fixed shapes could not pass, or one that refuses everything could."""
    calls = calls_to_compare(SAMPLES.count, (1, 8), 0)
    own, original = (
        make_calls(model, SAMPLES, calls, tmp_path / name)
        for name, model in (("own", Model(refuses_between)), ("original", Model()))
    )
    checks = {check.gate.metric: check for check in judge_calls(GATES, calls, own, original, 0)}
    assert {check.outcome for check in checks.values()} == {Outcome.PASS}
    assert "a batch of 4 is refused (ValueError: compiled for batches of 1 and 8" in checks["other_batch_sizes"].reason
    refuses_all = make_calls(Model(lambda model, x, y: x @ x), SAMPLES, calls, tmp_path / "all")
    checks = {check.gate.metric: check for check in judge_calls(GATES, calls, refuses_all, original, 0)}
    assert checks["permuted_batch"].outcome is Outcome.FAIL


def test_a_size_that_the_original_refuses_is_not_looked_at(tmp_path: Path) -> None:
    """Broken: an artifact that takes more than its original would fail for it."""
    assert failures(Model(wrong_between), Model(refuses_between), tmp_path) == {}
