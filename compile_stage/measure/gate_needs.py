"""What gates need of a model's outputs and of the labels: said by `plan` before anything is compiled.

Asked of the outputs' declared types and shapes, by the functions that the metrics themselves ask where a candidate is
judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.measure.elementwise import NotMeasurableError
from compile_stage.measure.gates import fitting, in_force, suits
from compile_stage.measure.label_needs import NUMBERS
from compile_stage.measure.task_scores import CLASS_TASKS, label_values
from compile_stage.measure.tasks import HIGHER_IS_BETTER, scored_output
from compile_stage.measure.tokens import TEXT_METRICS, is_text

if TYPE_CHECKING:
    from compile_stage.core.records import Gate
    from compile_stage.core.tensors import Array, Signature

_UNKNOWN_SIZE = 16
"""Of an axis whose size the signature leaves open. What is asked about such an output says nothing of the size."""


def declared_outputs(signature: Signature, rows: int) -> tuple[dict[str, Array], bool]:
    """Arrays of the declared types and shapes with so many rows, which take no memory, and whether all sizes beside the
    rows are known. None at all where a graph does not say how many axes an output has."""
    outputs: dict[str, Array] = {}
    sizes_known = True
    if not all(spec.shape for spec in signature.outputs):
        return {}, False
    for spec in signature.outputs:
        sizes_known &= all(isinstance(size, int) for size in spec.shape[1:])
        shape = [rows, *(size if isinstance(size, int) else _UNKNOWN_SIZE for size in spec.shape[1:])]
        outputs[spec.name] = np.broadcast_to(np.zeros((), _dtype(spec.dtype)), shape)
    return outputs, sizes_known


def _dtype(name: str) -> np.dtype[Any]:
    """NumPy's own of that kind. It has no `bfloat16`, or one that is no float, where a package registered it."""
    if name == "str":
        return np.dtype("U1")
    if name == "bfloat16":
        return np.dtype(np.float32)
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(np.float32)


def task_problem(gates: Sequence[Gate], outputs: Mapping[str, Array], labels: Array) -> str | None:
    """None where each task metric finds an output that these labels can be read for, or the first reason.

    Args:
        outputs: `declared_outputs`, all of whose sizes are known.
        labels: `[n, ...]`.
    """
    for gate in fitting(gates, outputs, labels)[0]:
        if gate.metric not in HIGHER_IS_BETTER or gate.metric == "coco_map":
            continue
        named = any(other.metric == gate.metric and other.output is not None for other in gates)
        if gate.output is None and named:  # it gives way, or reads another output
            continue
        try:
            _demand_readable(gate, outputs, labels)
        except NotMeasurableError as error:
            return f"{gate.metric} can't be measured: {error}"
    return None


def _demand_readable(gate: Gate, outputs: Mapping[str, Array], labels: Array) -> None:
    metric = gate.metric
    if gate.output is None or metric in NUMBERS:
        asked = outputs if gate.output is None else {gate.output: outputs[gate.output]}
        output = outputs[scored_output(metric, asked, labels)]
    else:
        output = outputs[gate.output]
    if metric in CLASS_TASKS and output.dtype.kind == "f" and output.ndim <= 2:
        scores = output.shape[1] if output.ndim == 2 and output.shape[1] > 1 else 2
        label_values(labels, scores, gate.options)


def unseen_outputs(gates: Sequence[Gate], outputs: Mapping[str, Array], labels: Array | None) -> Iterator[str]:
    """The outputs that no gate looks at, of which nothing would be proven.

    Args:
        outputs: `declared_outputs`.
        labels: None where they are not known; then a metric of labels may look at any output.
    """
    gates = fitting(gates, outputs, labels)[0]
    of_labels = [gate for gate in gates if gate.metric in (*HIGHER_IS_BETTER, *TEXT_METRICS)]
    if any(gate.metric == "coco_map" or (labels is None and gate.output is None) for gate in of_labels):
        return
    read = {gate.output for gate in of_labels if gate.output is not None}
    if labels is not None:
        read |= {name for gate in of_labels if gate.output is None for name in _read_by(gate, outputs, labels)}
    for name, output in outputs.items():
        others = [gate for gate in in_force(gates, name) if gate not in of_labels]
        if name not in read and not any(gate.output == name or suits(gate, output) for gate in others):
            yield name


def _read_by(gate: Gate, outputs: Mapping[str, Array], labels: Array) -> tuple[str, ...]:
    if gate.metric in TEXT_METRICS:
        return tuple(name for name, output in outputs.items() if is_text(labels, output))
    try:
        return (scored_output(gate.metric, outputs, labels),)
    except NotMeasurableError:
        return ()
