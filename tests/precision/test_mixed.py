"""Nodes given back to a quantised graph, and the measured effect by which they are ranked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.core.sample_files import write_index
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.precision.int8 import DynamicInt8, StaticInt8
from compile_stage.precision.mixed import find_units, load_pair, mix
from compile_stage.precision.sensitivity import rank_nodes
from compile_stage.testing.models import Graph, write

SAFE = {"reduce_range": hardware().sums_saturate}
UNSIGNED = Scheme(precision="int8", name="u8", activations="uint8", weights="int8", options=SAFE)
SYMMETRIC = Scheme(
    precision="int8",
    name="sym",
    activations="int8",
    weights="int8",
    symmetric=True,
    ops=("Conv", "Gemm", "MatMul"),
    options=SAFE,
)
DYNAMIC = Scheme(precision="int8-dynamic", name="dynamic", weights="int8", per_channel=False, options=SAFE)
SCHEMES = pytest.mark.parametrize("scheme", [UNSIGNED, SYMMETRIC, DYNAMIC], ids=lambda scheme: scheme.name)


@pytest.fixture(scope="module")
def model(outlier_net: Any, tmp_path_factory: pytest.TempPathFactory) -> PortableModel:
    import onnx

    folder = tmp_path_factory.mktemp("model")
    onnx.save(outlier_net, folder / "model.onnx")
    return PortableModel(
        path=str(folder / "model.onnx"),
        digest="sha256:source",
        form="onnx",
        opset=18,
        precision="fp32",
        signature=Signature(
            inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 3, "height", "width")),),
            outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 10)),),
        ),
    )


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    folder = tmp_path_factory.mktemp("samples")
    (folder / "inputs").mkdir()
    np.save(folder / "inputs" / "x.npy", np.random.default_rng(1).standard_normal((32, 3, 20, 20)).astype(np.float32))
    write_index(folder, {"x": "inputs/x.npy"}, labels=False, count=32)
    return SampleSet(path=str(folder), digest="sha256:samples", count=32, real=True, source="test")


def lowered(model: PortableModel, scheme: Scheme, samples: SampleSet, into: Path) -> PortableModel:
    lowering = DynamicInt8() if scheme is DYNAMIC else StaticInt8()
    return lowering.lower(model, scheme, samples, [], into)


def run(path: str, samples: SampleSet) -> np.ndarray:
    """As the graph says: on a CPU without VNNI, the optimised integer kernels saturate where weights have all 8
    bits."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    answer: np.ndarray = session.run(None, {"x": np.load(Path(samples.path) / "inputs" / "x.npy")})[0]
    return answer.astype(np.float64)


def noise(model: PortableModel, other: PortableModel, samples: SampleSet) -> float:
    """Noise power over signal power of the output."""
    clean = run(model.path, samples)
    return float(np.sum((run(other.path, samples) - clean) ** 2) / np.sum(clean**2))


@SCHEMES
def test_the_measured_effects_foretell_what_giving_back_brings(
    scheme: Scheme, model: PortableModel, samples: SampleSet, tmp_path: Path
) -> None:
    """Broken: the ranking would be a guess, and a mixed graph would not be what was ranked."""
    quantised = lowered(model, scheme, samples, tmp_path / "lowered")
    ranking = sorted(rank_nodes(model, quantised, samples, 1), key=lambda entry: -entry.effect)
    assert all(entry.cost >= 1 for entry in ranking)
    # The outlier's layer, or the one that reads its output rounded, by their names in the source.
    assert {"depthwise", "depthwise.clip", "pointwise"} & {entry.node for entry in ranking[:2]}
    before = noise(model, quantised, samples)
    for kept in range(1, len(ranking)):
        mixed = mix(model, quantised, [entry.node for entry in ranking[:kept]], tmp_path / str(kept))
        left = sum(entry.effect for entry in ranking[kept:])
        measured = noise(model, mixed, samples)
        assert left / 4 < measured < left * 4, f"{kept} kept: {measured} is not near the {left} foretold"
        assert measured < before
        before = max(measured, left) * 2
        assert set(mixed.kept["fp32"]) == {entry.node for entry in ranking[:kept]}


@SCHEMES
def test_a_mixed_graph_is_whole(scheme: Scheme, model: PortableModel, samples: SampleSet, tmp_path: Path) -> None:
    """Broken: names, free dimensions or the checker's rules would not survive, or the same input would give other
    bytes."""
    import onnx

    quantised = lowered(model, scheme, samples, tmp_path / "lowered")
    source, twin = load_pair(model, quantised)
    names = [unit.node for unit in find_units(source.graph, twin.graph)]
    assert len(set(names)) == len(names)
    for node in names:
        first = mix(model, quantised, [node], tmp_path / "a")
        second = mix(model, quantised, [node], tmp_path / "b")
        assert first.digest == second.digest
        proto = onnx.load(first.path)
        onnx.checker.check_model(proto, full_check=True)
        assert [dim.dim_param for dim in proto.graph.input[0].type.tensor_type.shape.dim] == [
            "batch",
            "",
            "height",
            "width",
        ]
        assert any(part.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for part in proto.graph.node)
        assert np.isfinite(run(first.path, samples)).all()


def test_openvino_reads_a_mixed_graph_alike(model: PortableModel, samples: SampleSet, tmp_path: Path) -> None:
    """Broken: a mixed graph would mean one thing to one runtime and another to the next."""
    openvino = pytest.importorskip("openvino")
    narrow = replace(SYMMETRIC, options={"reduce_range": True})  # of 7 bits: full ones saturate on a CPU without VNNI
    quantised = lowered(model, narrow, samples, tmp_path / "lowered")
    mixed = mix(model, quantised, ["pointwise", "depthwise"], tmp_path / "mixed")
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(mixed.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    answer = compiled(np.load(Path(samples.path) / "inputs" / "x.npy"))[0]
    reference = run(mixed.path, samples)
    assert np.abs(answer - reference).max() < 0.02 * np.abs(reference).max()


def test_every_node_that_is_given_back_is_listed(tmp_path: Path) -> None:
    """Layers that are equalised with each other are given back together; only one of them was listed, and what ran in
    float was not what was said."""
    import onnx

    g, x = Graph(4), "x"
    for layer in range(6):
        weight = g.random.standard_normal((16, 16)) / 3
        if layer == 1:
            weight[:, :2] *= 50  # two loud channels: the layer takes a factor out of them, and the next one puts it in
        x = g.add("MatMul", x, g.constant(weight.astype(np.float32)), name=f"product{layer}")
        x = g.add("Relu", x, name=f"relu{layer}") if layer < 5 else x
    rows = g.random.standard_normal((32, 16)).astype(np.float32)
    net, sets = write(g, tmp_path / "net", {"x": rows}, {x: ("float32", ("n", 16))}, "n")
    quantised = StaticInt8().lower(net, UNSIGNED, sets, [], tmp_path / "lowered")
    ranking = rank_nodes(net, quantised, sets, 1)
    assert any(entry.together for entry in ranking)
    for entry in ranking:
        mixed = mix(net, quantised, [entry.node], tmp_path / "mixed")
        graph = onnx.load(mixed.path).graph
        rounded = {out for node in graph.node if node.op_type == "DequantizeLinear" for out in node.output}
        in_float = {node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] not in rounded}
        assert set(mixed.kept["fp32"]) == in_float == {entry.node, *entry.together}


def test_refusals(model: PortableModel, samples: SampleSet, tmp_path: Path) -> None:
    """Broken: a misspelt node would be ignored, or an fp32 model would go by the name of int8."""
    quantised = lowered(model, SYMMETRIC, samples, tmp_path / "lowered")
    with pytest.raises(UsageError, match="no quantised node called 'nobody'"):
        mix(model, quantised, ["nobody"], tmp_path / "mixed")
    source, twin = load_pair(model, quantised)
    every = [unit.node for unit in find_units(source.graph, twin.graph)]
    with pytest.raises(UsageError, match="fp32 model itself"):
        mix(model, quantised, every, tmp_path / "mixed")
