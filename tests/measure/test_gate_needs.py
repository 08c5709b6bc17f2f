"""What is said of gates before anything is run holds for what is then run."""

from __future__ import annotations

import numpy as np
import pytest

from compile_stage.core.records import Gate
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.gate_needs import declared_outputs, task_problem, unseen_outputs
from compile_stage.measure.label_needs import CLASSES_ONLY

LABELS = np.arange(40) % 10


def signature(**outputs: tuple[str, tuple[int | str, ...]]) -> Signature:
    made = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in outputs.items())
    return Signature(inputs=(), outputs=made)


def gate(metric: str, output: str | None = None, **options: object) -> Gate:
    kind = {"drop": "max_drop"} if metric in ("accuracy", "mae", "r2", "class_recall") else {}
    return Gate(metric=metric, limit=0.1, direction="at_most", output=output, options={**kind, **options})


@pytest.mark.parametrize("metric", ["accuracy", "mae"])
def test_an_output_whose_axes_the_graph_does_not_declare_is_no_reason_to_refuse(metric: str) -> None:
    """Broken: an ONNX file without shapes for its outputs, which passed, is refused: it is taken for one score a
    sample, of which 10 classes can't be read."""
    outputs, sizes_known = declared_outputs(signature(logits=("float32", ())), 40)
    assert not sizes_known
    assert not list(unseen_outputs([gate(metric)], outputs, LABELS))


def test_what_can_be_measured_is_not_refused() -> None:
    """Broken: plan and run refuse what passes."""
    of_classes = signature(logits=("float32", ("batch", 10)), label=("int64", ("batch",)))
    outputs, sizes_known = declared_outputs(of_classes, 40)
    assert sizes_known
    for gates in (
        [gate("accuracy")],
        [gate("accuracy", "logits")],
        [gate("class_recall", **{CLASSES_ONLY: True})],
    ):
        assert task_problem(gates, outputs, LABELS) is None
    numbers, _ = declared_outputs(signature(price=("float32", ("batch", 1))), 40)
    assert task_problem([gate("mae"), gate("accuracy", **{CLASSES_ONLY: True})], numbers, LABELS + 0.5) is None
    assert list(unseen_outputs([gate("max_abs"), gate("agreement")], outputs, None)) == []
    assert list(unseen_outputs([gate("accuracy")], outputs, None)) == [], "labels that nobody has seen may be of any"
    assert list(unseen_outputs([gate("accuracy"), gate("max_abs")], outputs, LABELS)) == []
    assert list(unseen_outputs([gate("python:a.b:c")], outputs, LABELS)) == []


def test_what_can_not_be_measured_is_said() -> None:
    """Broken: an hour of compiling ends with the sentence that could have been said before."""
    outputs, _ = declared_outputs(signature(logits=("float32", ("batch", 10)), bits=("bfloat16", ("batch", 3))), 40)
    assert "no output can be read for mae" in str(task_problem([gate("mae")], outputs, LABELS))
    assert "3 classes" in str(task_problem([gate("accuracy", "bits")], outputs, LABELS))
    assert list(unseen_outputs([gate("agreement")], outputs, LABELS)) == ["logits", "bits"]
    assert list(unseen_outputs([gate("accuracy", "logits")], outputs, LABELS)) == ["bits"]


def test_a_limit_on_an_output_takes_the_general_one_away_before_anything_is_run_too() -> None:
    """Broken: plan refuses a policy that names the output whose classes the labels are, as its message asks for."""
    outputs, _ = declared_outputs(signature(logits=("float32", ("batch", 10)), other=("float32", ("batch", 10))), 40)
    assert "can't be measured" in str(task_problem([gate("accuracy")], outputs, LABELS))
    assert task_problem([gate("accuracy"), gate("accuracy", "logits")], outputs, LABELS) is None


def test_boxes_are_no_matter_of_shapes() -> None:
    """Broken: plan refuses every detector: which outputs hold boxes is seen only when they are computed."""
    outputs, _ = declared_outputs(signature(boxes=("float32", ("batch", 7, 4)), scores=("float32", ("batch", 7))), 40)
    labels = np.zeros((40, 2, 5), dtype=np.float32)
    assert task_problem([gate("coco_map", drop="max_drop")], outputs, labels) is None
    assert list(unseen_outputs([gate("coco_map", drop="max_drop")], outputs, labels)) == []


def test_a_metric_of_labels_sees_the_output_that_it_reads_and_no_other() -> None:
    """Broken: a second head is compiled, and published as proven, though no gate ever looked at it."""
    outputs, _ = declared_outputs(signature(label=("int64", ("batch",)), price=("float32", ("batch", 1))), 40)
    assert list(unseen_outputs([gate("accuracy")], outputs, LABELS)) == ["price"]
    assert list(unseen_outputs([gate("accuracy", "label")], outputs, None)) == ["price"]
    assert list(unseen_outputs([gate("accuracy", "label"), gate("mae")], outputs, LABELS + 0.5)) == []


def test_probabilities_of_two_classes_may_be_one_score() -> None:
    """Broken: plan refuses a binary classifier with one output of one column, which is measured well."""
    outputs, _ = declared_outputs(signature(score=("float32", ("batch", 1))), 40)
    assert task_problem([gate("accuracy")], outputs, LABELS % 2) is None
    assert "10" in str(task_problem([gate("accuracy")], outputs, LABELS))
