"""Does the calibration set show the model everything that the validation set holds?

A static quantisation clips what lies outside of the ranges that it saw. Both sets run through the FP32 graph, one
sample at a time in each thread; ranges and shares are reduced inside of the graph, so that no activation is kept.
Shares, which cost most, are counted only where so many samples leave the range that it could be worth a word.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.parallel import in_threads
from compile_stage.core.quantities import percent
from compile_stage.core.records import PortableModel, SampleSet, record
from compile_stage.measure.samples import open_samples
from compile_stage.plugin_support import onnx_weights
from compile_stage.precision.onnx_graph import name_nodes, read_types, write_graph

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

NOTED_SHARE = 0.01
_BY_CHANCE = 3.0

_FUSED = ("Relu", "Clip")
_MOVES = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Expand", "MaxPool")
"""What answers with values of its input alone: what does not leave the range there does not leave it here."""


@record
class Clipped:
    """One tensor's values of the validation set that lie outside of the range of the calibration set.

    Attributes:
        node: That computes it; empty for an input of the model.
        share: Of its values, 0 to 1.
        low, high: The calibrated range.
    """

    tensor: str
    node: str
    share: float
    low: float
    high: float


@record
class Coverage:
    """The float tensors that may be clipped, the most clipped first.

    Attributes:
        tensors: Those of which a larger part of the samples than `limit` leaves the range.
        limit: A share beyond it is no chance. From 1 on, with five calibration samples or fewer, no share is
            significant.
        looked_at: How many tensors were looked at.
    """

    tensors: tuple[Clipped, ...]
    limit: float
    looked_at: int
    calibration: int
    validation: int

    @property
    def uncovered(self) -> tuple[Clipped, ...]:
        """The tensors that are clipped by more than chance explains."""
        return tuple(tensor for tensor in self.tensors if tensor.share > self.limit)


def noted_share(calibration: int) -> float:
    """The largest share that is not worth a word: 1 %, or three times what chance gives.

    One more value from the same distribution lies outside of the range of n others with probability 2 / (n + 1).
    """
    return max(NOTED_SHARE, _BY_CHANCE * 2 / (calibration + 1))


def coverage(model: PortableModel, calibration: SampleSet, validation: SampleSet, threads: int = 1) -> Coverage:
    """The clipped share of the float tensors of an FP32 ONNX graph."""

    graph = onnx_weights.load_whole(model.path)
    name_nodes(graph.graph)
    floats = _float_tensors(graph)
    seen = _Watched(graph, _range_nodes(floats), floats, threads)
    ranges = _ranges(seen, floats, _batches(model, calibration))
    bounds = {name: _widened(*ends) for name, ends in ranges.items()}
    leaving, rounds = dict.fromkeys(ranges, 0), 0
    for batch_ranges in seen.each(_batches(model, validation)):
        rounds += 1
        for name, (least, most) in bounds.items():
            leaving[name] += bool(batch_ranges[name][0] < least or batch_ranges[name][1] > most)
    del seen
    limit = noted_share(calibration.count)
    worth = limit if limit < 1 else NOTED_SHARE
    # Of a sample that stays in the range no value is clipped: the share is at most that of the samples that leave it.
    suspects = {name: bounds[name] for name, count in leaving.items() if count > worth * rounds}
    shares = _shares(graph, suspects, _batches(model, validation), threads) if suspects else {}
    producer = {name: node.name for node in graph.graph.node for name in node.output}
    tensors = [
        Clipped(tensor=name, node=producer.get(name, ""), share=share, low=ranges[name][0], high=ranges[name][1])
        for name, share in shares.items()
    ]
    return Coverage(
        tensors=tuple(sorted(tensors, key=lambda tensor: -tensor.share)),
        limit=limit,
        looked_at=len(ranges),
        calibration=calibration.count,
        validation=validation.count,
    )


def coverage_note(measured: Coverage) -> str | None:
    """One sentence about what is not covered, or that there are too few samples to know; None when everything is."""
    if measured.limit >= 1:
        return _too_few(measured)
    if not measured.uncovered:
        return None
    worst = ", ".join(
        f"{c.tensor}{f' (node {c.node})' if c.node else ' (an input)'} {percent(c.share, 1)}"
        for c in measured.uncovered[:3]
    )
    return (
        f"the {measured.calibration} calibration samples do not cover the validation samples: in "
        f"{len(measured.uncovered)} of {measured.looked_at} tensors more than {percent(measured.limit, 1)} of the "
        f"values lie outside of the calibrated range and would be clipped; most in {worst}. Take calibration samples "
        "from the data that the model will see"
    )


def _too_few(measured: Coverage) -> str:
    """Of so few samples chance alone may leave everything outside, so that no share would be worth a word."""
    text = (
        f"{_samples(measured.calibration)} too few to tell whether they cover the {measured.validation} validation "
        "samples"
    )
    if measured.tensors:
        worst = measured.tensors[0]
        text += (
            f"; up to {percent(worst.share, 1)} of a tensor's values lie outside of the calibrated range and would be "
            f"clipped ({worst.tensor}{f', node {worst.node}' if worst.node else ', an input'})"
        )
    return f"{text}. Take more calibration samples from the data that the model will see"


def _samples(count: int) -> str:
    return "1 calibration sample is" if count == 1 else f"{count} calibration samples are"


def overlap_note(shared: int, calibration: int, validation: int) -> str | None:
    """One sentence about samples that both sets hold; None when there are none."""
    if not shared:
        return None
    return (
        f"Calibration and validation share {shared} sample{'' if shared == 1 else 's'} (of {calibration} and "
        f"{validation}): accuracy will look too good; give data.calibration samples of its own"
    )


# --------------------------------------------------------------------------------------------------------------- within


def _float_tensors(model: Any) -> list[str]:
    import onnx

    weights = {tensor.name for tensor in model.graph.initializer}
    constants = {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    moved = {name for node in model.graph.node if node.op_type in _MOVES for name in node.output}
    floats = [name for name, kind in read_types(model).items() if kind == onnx.TensorProto.FLOAT]
    left_out = weights | constants | moved | _before_activations(model.graph)
    return [name for name in floats if name not in left_out]


def _before_activations(graph: Any) -> set[str]:
    """The tensors that nothing but an activation reads that is computed along with them: no runtime rounds these, and
    one that is wanted for itself has the runtime compute both apart."""
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(output.name for output in graph.output)
    return {node.input[0] for node in graph.node if node.op_type in _FUSED and readers[node.input[0]] == 1}


def _ranges(seen: _Watched, tensors: Sequence[str], batches: Iterator[Batch]) -> dict[str, tuple[float, float]]:
    """The smallest and the largest value of each tensor.

    Those that have none, or one that is not finite, are left out.
    """
    low, high = dict.fromkeys(tensors, np.inf), dict.fromkeys(tensors, -np.inf)
    for batch_ranges in seen.each(batches):
        for name, (least, most) in batch_ranges.items():
            low[name], high[name] = min(low[name], float(least)), max(high[name], float(most))
    return {name: (low[name], high[name]) for name in tensors if np.isfinite([low[name], high[name]]).all()}


def _widened(low: float, high: float) -> tuple[float, float]:
    """A value that another batch composition moved by a rounding is not clipped."""
    slack = 1e-5 * max(abs(low), abs(high))
    return low - slack, high + slack


def _shares(
    graph: Any, bounds: Mapping[str, tuple[float, float]], batches: Iterator[Batch], threads: int
) -> dict[str, float]:
    """The part of each tensor's values that lies outside of its bounds."""
    sums, rounds = dict.fromkeys(bounds, 0.0), 0
    for batch_shares in _Watched(graph, _share_nodes(bounds), tuple(bounds), threads).each(batches):
        rounds += 1
        for name, (below, above) in batch_shares.items():
            sums[name] += float(below) + float(above)
    return {name: total / rounds for name, total in sums.items()}


def _range_nodes(tensors: Sequence[str]) -> Iterator[Any]:
    from onnx import helper

    for position, name in enumerate(tensors):
        for op, word in (("ReduceMin", "a"), ("ReduceMax", "b")):
            yield helper.make_node(op, [name], [_output(word, position)], keepdims=0)


def _share_nodes(bounds: Mapping[str, tuple[float, float]]) -> Iterator[Any]:
    from onnx import TensorProto, helper

    for position, (name, (low, high)) in enumerate(bounds.items()):
        for op, word, bound in (("Less", "a", low), ("Greater", "b", high)):
            limit, outside, share = (f"{_output(word, position)}/{part}" for part in ("limit", "outside", "share"))
            tensor = helper.make_tensor(limit, TensorProto.FLOAT, [], [bound])
            yield helper.make_node("Constant", [], [limit], value=tensor)
            yield helper.make_node(op, [name, limit], [outside])
            yield helper.make_node("Cast", [outside], [share], to=TensorProto.FLOAT)
            yield helper.make_node("ReduceMean", [share], [_output(word, position)], keepdims=0)


class _Watched:
    """A graph with nodes that reduce each tensor to two numbers."""

    def __init__(self, model: Any, nodes: Iterator[Any], tensors: Sequence[str], threads: int) -> None:
        import onnx
        import onnxruntime

        watched = onnx.ModelProto()
        watched.CopyFrom(model)
        watched.graph.node.extend(nodes)
        self._tensors, self._threads = tensors, threads
        self._wanted = [_output(word, position) for position in range(len(tensors)) for word in ("a", "b")]
        watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._wanted)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            path = write_graph(watched, Path(scratch))
            del watched
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def each(self, batches: Iterator[Batch]) -> Iterator[dict[str, tuple[Any, Any]]]:
        """Two numbers for each tensor, batch by batch; several batches run at once, each on one thread."""

        def run(batch: Batch) -> dict[str, tuple[Any, Any]]:
            values = self._session.run(self._wanted, dict(batch))
            return {name: (values[2 * i], values[2 * i + 1]) for i, name in enumerate(self._tensors)}

        return in_threads(run, batches, self._threads)


def _batches(model: PortableModel, samples: SampleSet) -> Iterator[Batch]:
    size = model.signature.fixed_batch or 1
    opened = open_samples(samples)
    for start in range(0, opened.count - size + 1, size):
        yield opened.batch(start, start + size)


def _output(word: str, position: int) -> str:
    return f"compile_stage/{word}/{position}"
