"""Dynamic int8: what ONNX Runtime's quantizer makes of the same graph, without its copies of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compile_stage.core.records import PortableModel, SampleSet
from compile_stage.plugin_support import onnx_weights
from compile_stage.precision import dynamic
from compile_stage.precision.onnx_graph import open_session, read_batches, simplify
from compile_stage.testing import models

Made = tuple[PortableModel, SampleSet]


def write(g: models.Graph, folder: Path, width: int, output: int = 8) -> Made:
    rows = {"x": g.random.standard_normal((8, width)).astype(np.float32)}
    return models.write(g, folder, rows, {"y": ("float32", ("batch", output))})


def linear(folder: Path) -> Made:
    """PyTorch's linear layers: a Gemm whose weight is transposed, with a bias and without."""
    g = models.Graph(1)
    hidden = g.add("Relu", g.add("Gemm", "x", g.weight(16, 12), g.weight(16), transB=1))
    g.add("Gemm", hidden, g.weight(8, 16), name="y", transB=1)
    return write(g, folder, 12)


def scaled(folder: Path) -> Made:
    """A Gemm that scales its product stays as it is."""
    g = models.Graph(2)
    hidden = g.add("Gemm", "x", g.weight(12, 16), g.weight(16), alpha=0.5)
    g.add("MatMul", hidden, g.weight(16, 8), name="y")
    return write(g, folder, 12)


def recurrent(folder: Path) -> Made:
    """An LSTM, whose weights the quantizer rounds itself."""
    g = models.Graph(4)
    steps = g.add("Reshape", "x", g.constant(np.array([3, -1, 4])))
    hidden = g.add("LSTM", steps, g.weight(1, 32, 4), g.weight(1, 32, 8), g.weight(1, 64), hidden_size=8)
    last = g.add("Squeeze", g.add("Gather", hidden, g.constant(np.array(2))), g.constant(np.array([0])))
    g.add("MatMul", last, g.weight(8, 8), name="y")
    return write(g, folder, 12)


MODELS = [models.conv_net, models.perceptron, models.transformer, linear, scaled, recurrent]


def by_the_quantizer(simple: Path, into: Path, kept: list[str], *, per_channel: bool, reduce_range: bool) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        str(simple), str(into), op_types_to_quantize=list(dynamic.OPS), per_channel=per_channel,
        reduce_range=reduce_range, weight_type=QuantType.QInt8,
        nodes_to_exclude=[*kept, *(f"{name}_MatMul" for name in kept)],
    )  # fmt: skip
    return into


def integers(graph: onnx.GraphProto) -> list[bytes]:
    held = (onnx_weights.values(one) for one in graph.initializer if one.data_type == onnx.TensorProto.INT8)
    return sorted(array.tobytes() for array in held)


@pytest.mark.parametrize(("per_channel", "levels"), [(True, 127), (False, 127), (True, 64)])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_it_is_what_the_quantizer_makes(
    make: Callable[[Path], Made], per_channel: bool, levels: int, tmp_path: Path
) -> None:
    """Broken: a weight would be rounded along another axis, transposed twice, or put where another belongs."""
    model, samples = make(tmp_path / "made")
    simple = simplify(Path(model.path), tmp_path)
    theirs = tmp_path / "theirs.onnx"
    by_the_quantizer(simple, theirs, [], per_channel=per_channel, reduce_range=levels < 127)
    ours = dynamic.quantise(simple, dynamic.OPS, [], per_channel=per_channel, levels=levels)
    assert integers(ours.graph) == integers(onnx.load(theirs).graph)
    batch = next(iter(read_batches(model, samples)))
    for mine, other in zip(
        open_session(ours).run(None, dict(batch)), open_session(theirs).run(None, dict(batch)), strict=True
    ):
        np.testing.assert_array_equal(mine, other)


def test_a_node_that_is_kept_reads_the_weight_itself(tmp_path: Path) -> None:
    """Broken: a node that stays in float32 would read the outline's zeros."""
    model, samples = linear(tmp_path / "made")
    simple = simplify(Path(model.path), tmp_path)
    kept = [next(node.name for node in onnx.load(simple).graph.node if node.op_type == "Gemm")]
    theirs = by_the_quantizer(simple, tmp_path / "theirs.onnx", kept, per_channel=True, reduce_range=False)
    ours = dynamic.quantise(simple, dynamic.OPS, kept, per_channel=True, levels=127)
    batch = dict(next(iter(read_batches(model, samples))))
    np.testing.assert_array_equal(open_session(ours).run(None, batch), open_session(theirs).run(None, batch))


def test_the_quantizer_never_holds_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a model of 2.2 GB took 13 GB of memory, more than budget.job_memory_mb grants."""
    import onnxruntime.quantization as theirs

    g = models.Graph(6)
    table = g.add("Gather", g.weight(900, 600), g.constant(np.array(3)))
    hidden = g.add("Add", g.add("Gemm", "x", g.weight(600, 600), transB=1), table)
    g.add("MatMul", hidden, g.weight(600, 8), name="y")
    model, samples = write(g, tmp_path / "made", 600)
    sizes: list[int] = []
    quantize = theirs.quantize_dynamic

    def seen(given: str, *rest: Any, **options: Any) -> None:
        sizes.append(sum(path.stat().st_size for path in Path(given).parent.glob(f"{Path(given).name}*")))
        quantize(given, *rest, **options)

    monkeypatch.setattr(theirs, "quantize_dynamic", seen)
    ours = dynamic.quantise(simplify(Path(model.path), tmp_path), dynamic.OPS, [], per_channel=True, levels=127)
    assert sizes
    assert max(sizes) < 40_000
    assert noise_db(model, samples, ours) > 25


def noise_db(model: PortableModel, samples: SampleSet, lowered: onnx.ModelProto) -> float:
    """Of weights of 7 bits it is the same on every CPU: 16-bit sums of 8 bits saturate on those without VNNI."""
    batch = dict(next(iter(read_batches(model, samples))))
    [exact], [found] = open_session(Path(model.path)).run(None, batch), open_session(lowered).run(None, batch)
    return float(10 * np.log10(np.sum(exact**2) / np.sum((exact - found) ** 2)))


def test_each_reader_of_a_weight_gets_it_as_it_reads_it(tmp_path: Path) -> None:
    """Broken: a weight that is a table, a factor, and a factor transposed would be wrong for one of them; ONNX Runtime
    1.31 transposes it for all."""
    g = models.Graph(3)
    weight = g.weight(12, 12)
    row = g.add("Gather", weight, g.constant(np.array(3)))
    hidden = g.add("Add", g.add("MatMul", "x", weight), row)
    hidden = g.add("Gemm", hidden, weight, transB=1)
    hidden = g.add("MatMul", hidden, g.add("Abs", weight))
    g.add("MatMul", hidden, g.weight(12, 8), name="y")
    model, samples = write(g, tmp_path / "made", 12)
    ours = dynamic.quantise(simplify(Path(model.path), tmp_path), dynamic.OPS, [], per_channel=True, levels=64)
    assert noise_db(model, samples, ours) > 25


def test_a_product_by_a_stack_of_matrices_stays_in_float(tmp_path: Path) -> None:
    """Broken: ONNX Runtime would refuse to run the whole graph for the sake of this product."""
    g = models.Graph(5)
    by_head = g.add("MatMul", g.add("Unsqueeze", "x", g.constant(np.array([1]))), g.weight(1, 12, 12))
    g.add("MatMul", g.add("Squeeze", by_head, g.constant(np.array([1]))), g.weight(12, 8), name="y")
    model, samples = write(g, tmp_path / "made", 12)
    ours = dynamic.quantise(simplify(Path(model.path), tmp_path), dynamic.OPS, [], per_channel=True, levels=64)
    assert {"MatMul", "MatMulInteger"} <= {node.op_type for node in ours.graph.node}
    assert noise_db(model, samples, ours) > 25
