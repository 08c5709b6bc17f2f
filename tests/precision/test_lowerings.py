"""Lowerings: what they keep, what they refuse, and that the same input gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from compile_stage.core.digest import digest_tree
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Scheme
from compile_stage.plugin_support import onnx_weights
from compile_stage.precision import onnx_graph
from compile_stage.precision.float16 import Float16
from compile_stage.precision.int4 import Int4
from compile_stage.precision.int8 import DynamicInt8, StaticInt8
from compile_stage.testing import models

FP16 = Scheme(precision="fp16", name="fp16")
SAFE = {"reduce_range": hardware().sums_saturate}
U8 = Scheme(precision="int8", name="int8-u8", activations="uint8", weights="int8", options=SAFE)
SYMMETRIC = Scheme(precision="int8", name="int8-sym", activations="int8", weights="int8", symmetric=True, options=SAFE)
DYNAMIC = Scheme(precision="int8-dynamic", name="int8-dynamic", options=SAFE)
INT4 = Scheme(precision="int4", name="int4", weights="uint4")
ALL = [(Float16(), FP16), (StaticInt8(), U8), (StaticInt8(), SYMMETRIC), (DynamicInt8(), DYNAMIC)]
IDS = [scheme.name for _, scheme in ALL]


@pytest.fixture(scope="module", params=models.ALL, ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.conv_net(tmp_path_factory.mktemp("conv"))


def run(path: str, batch: Any) -> list[Any]:
    """As the graph says: on a CPU without VNNI, the optimised integer kernels saturate where weights have all 8
    bits."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, batch))


def read(samples: Any, model: Any, count: int) -> dict[str, Any]:
    inputs = Path(samples.path) / "inputs"
    return {spec.name: np.load(inputs / f"{spec.name}.npy")[:count] for spec in model.signature.inputs}


def nodes(model: Any) -> dict[str, Any]:
    return {node.name: node for node in onnx.load(model.path).graph.node}


@pytest.mark.parametrize(("lowering", "scheme"), ALL, ids=IDS)
def test_lowered_graph_is_the_same_model(lowering: Any, scheme: Any, made: Any, tmp_path: Path) -> None:
    """Names, types, free batch and description stay; the answer is near."""
    model, samples = made
    assert lowering.refuse(model, scheme) is None
    lowered = lowering.lower(model, scheme, samples, (), tmp_path / "out")
    onnx.checker.check_model(lowered.path, full_check=scheme.precision == "fp16")
    assert lowered.signature == model.signature
    assert lowered.precision == scheme.precision
    assert lowered.made_from == model.digest
    assert lowered.digest == digest_tree(tmp_path / "out")
    for before, after in zip(
        run(model.path, read(samples, model, 5)), run(lowered.path, read(samples, model, 5)), strict=True
    ):
        assert before.shape == after.shape
        assert before.dtype == after.dtype
        if before.dtype.kind == "f":
            assert np.max(np.abs(before - after)) <= 0.15 * np.max(np.abs(before))


@pytest.mark.parametrize(("lowering", "scheme"), ALL, ids=IDS)
def test_same_bytes_in_the_same_folder_again(lowering: Any, scheme: Any, conv: Any, tmp_path: Path) -> None:
    model, samples = conv
    digests = {lowering.lower(model, scheme, samples, (), tmp_path / folder).digest for folder in ("a", "a", "b")}
    assert len(digests) == 1


def test_same_bytes_in_another_process(conv: Any, tmp_path: Path) -> None:
    """The quantizer walks over sets of strings, whose order changes with every process."""
    model, samples = conv
    script = (
        "import sys; from pathlib import Path\n"
        "from compile_stage.core.digest import load_record\n"
        "from compile_stage.core.records import PortableModel, SampleSet, Scheme\n"
        "from compile_stage.precision.int8 import StaticInt8\n"
        "model, samples, scheme = (load_record(k, t) for k, t in zip((PortableModel, SampleSet, Scheme), "
        "sys.argv[1:4]))\nprint(StaticInt8().lower(model, scheme, samples, (), Path(sys.argv[4])).digest)\n"
    )
    from compile_stage.core.digest import canonical_json

    found = set()
    for seed in ("1", "2"):
        arguments = [canonical_json(model), canonical_json(samples), canonical_json(U8), str(tmp_path / seed)]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip().splitlines()[-1])
    assert len(found) == 1


@pytest.mark.parametrize(("lowering", "scheme"), ALL, ids=IDS)
def test_kept_node_stays_in_float32(lowering: Any, scheme: Any, conv: Any, tmp_path: Path) -> None:
    model, samples = conv
    name = next(node.name for node in onnx.load(model.path).graph.node if node.op_type == "Gemm")
    lowered = lowering.lower(model, scheme, samples, (name,), tmp_path)
    assert lowered.kept["fp32"] == (name,)
    found = nodes(lowered)
    kept = found.get(name) or found[f"{name}_MatMul"]  # the dynamic quantizer splits a Gemm, kept or not
    assert kept.op_type in ("Gemm", "MatMul")
    weights = {tensor.name: tensor for tensor in onnx.load(lowered.path).graph.initializer}
    assert weights[kept.input[1]].data_type == TensorProto.FLOAT


def test_kept_node_is_found_after_it_was_merged(conv: Any, tmp_path: Path) -> None:
    """A batch normalisation that is folded into its convolution keeps that convolution in float32."""
    model, samples = conv
    name = next(node.name for node in onnx.load(model.path).graph.node if node.op_type == "BatchNormalization")
    lowered = StaticInt8().lower(model, U8, samples, (name,), tmp_path)
    assert [nodes(lowered)[kept].op_type for kept in lowered.kept["fp32"]] == ["Conv"]


@pytest.mark.parametrize(("lowering", "scheme"), ALL, ids=IDS)
def test_unknown_kept_node_is_named(lowering: Any, scheme: Any, conv: Any, tmp_path: Path) -> None:
    model, samples = conv
    with pytest.raises(UsageError, match="no node called 'nowhere'"):
        lowering.lower(model, scheme, samples, ("nowhere",), tmp_path)


def test_static_needs_samples(conv: Any, tmp_path: Path) -> None:
    model, samples = conv
    for missing in (None, replace(samples, count=0)):
        with pytest.raises(UsageError, match=r"set data\.calibration"):
            StaticInt8().lower(model, U8, missing, (), tmp_path)


@pytest.mark.parametrize(("lowering", "scheme"), ALL, ids=IDS)
def test_refusals_say_why(lowering: Any, scheme: Any, conv: Any, tmp_path: Path) -> None:
    model, samples = conv
    assert "torch-export" in lowering.refuse(replace(model, form="torch-export"), scheme)
    assert "bf16 already" in lowering.refuse(replace(model, precision="bf16"), scheme)
    quantised = StaticInt8().lower(model, U8, samples, (), tmp_path)
    assert "quantised already" in lowering.refuse(replace(quantised, precision="fp32"), scheme)


def test_trees_are_refused_with_the_operator(tmp_path: Path) -> None:
    from onnx import helper

    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y")]
    graph = helper.make_graph([node], "trees", value[:1], value[1:])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    model, _ = models.perceptron(tmp_path / "any")
    trees = replace(model, path=str(tmp_path / "model.onnx"))
    for lowering, scheme in ALL:
        assert "TreeEnsembleRegressor" in str(lowering.refuse(trees, scheme))


def test_unknown_calibration_method_is_refused(conv: Any) -> None:
    model, _ = conv
    assert "mse, minmax, percentile, entropy" in str(
        StaticInt8().refuse(model, replace(U8, options={"calibration": "magic"}))
    )


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_other_calibrations_run(method: str, conv: Any, tmp_path: Path) -> None:
    model, samples = conv
    lowered = StaticInt8().lower(model, replace(U8, options={"calibration": method}), samples, (), tmp_path)
    assert lowered.precision == "int8"


def test_scheme_decides_types_and_ops(conv: Any, tmp_path: Path) -> None:
    """Signed symmetric activations have zero points of 0; ops that are not listed are not quantised."""
    model, samples = conv
    scheme = replace(SYMMETRIC, ops=("Conv",))
    graph = onnx.load(StaticInt8().lower(model, scheme, samples, (), tmp_path).path).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    points = [weights[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"]
    assert points
    assert all(point.data_type == TensorProto.INT8 and not numpy_helper.to_array(point).any() for point in points)
    gemm = next(node for node in graph.node if node.op_type == "Gemm")
    assert weights[gemm.input[1]].data_type == TensorProto.FLOAT


def test_overflow_stays_in_float32(tmp_path: Path) -> None:
    """Two neighbours past float16's range stay in float32 and hand their values on in float32."""
    g = models.Graph()
    large = g.add("MatMul", "x", g.constant(np.full((4, 4), 1e4, np.float32)))
    larger = g.add("Mul", large, g.constant(np.float32(100)))
    back = g.add("Mul", larger, g.constant(np.float32(1e-7)))
    g.add("MatMul", back, g.weight(4, 2), name="y")
    x = np.abs(g.random.standard_normal((8, 4))).astype(np.float32)
    model, samples = models.write(g, tmp_path / "m", {"x": x}, {"y": ("float32", ("batch", 2))})
    (exact,) = run(model.path, {"x": x})
    lowered = Float16().lower(model, FP16, samples, (), tmp_path / "out")
    (close,) = run(lowered.path, {"x": x})
    assert len(lowered.kept["fp32"]) == 3
    assert "float16's largest" in lowered.notes[-1]
    assert np.max(np.abs(close - exact)) <= 0.01 * np.max(np.abs(exact))


def test_weight_past_float16_keeps_its_node(tmp_path: Path) -> None:
    """Without samples too: the value is in the graph."""
    g = models.Graph()
    masked = g.add("Add", "x", g.constant(np.array([0, -1e38], np.float32)), name="masked")
    g.add("Softmax", masked, name="y", axis=-1)
    x = np.zeros((2, 2), np.float32)
    model, _ = models.write(g, tmp_path / "m", {"x": x}, {"y": ("float32", ("batch", 2))})
    lowered = Float16().lower(model, FP16, None, (), tmp_path / "out")
    assert lowered.kept["fp32"] == ("node_masked",)
    assert np.isfinite(run(lowered.path, {"x": x})[0]).all()


def test_large_graph_keeps_its_weights_beside_it(conv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past protobuf's limit weights go to a file; writing again replaces it. (The limit is lowered here, not the model
    grown.)"""
    model, samples = conv
    monkeypatch.setattr(onnx_graph, "INLINE_LIMIT_BYTES", 1000)
    for lowering, scheme in ALL:
        into = tmp_path / scheme.name
        first = lowering.lower(model, scheme, samples, (), into)
        assert (into / "model.onnx.data").exists() or scheme.precision != "fp16"
        assert lowering.lower(model, scheme, samples, (), into).digest == first.digest
        run(first.path, read(samples, model, 1))


@pytest.mark.parametrize(("lowering", "scheme"), [*ALL, (Int4(), INT4)], ids=[*IDS, "int4"])
def test_weights_beside_the_graph_are_lowered_as_those_in_it(lowering: Any, scheme: Scheme, tmp_path: Path) -> None:
    """Broken: a large model, whose weights lie beside its graph and are linked into the worker's folder, is refused, or
    becomes another graph than if they lay in it."""
    model, samples = models.transformer(tmp_path / "source")
    expected = lowering.lower(model, scheme, samples, (), tmp_path / "expected")
    beside = onnx_weights.write(onnx.load(model.path), tmp_path / "beside" / "model.onnx", "w.data", 0)
    os.link(beside.parent / "w.data", tmp_path / "link")
    lowered = lowering.lower(replace(model, path=str(beside)), scheme, samples, (), tmp_path / "lowered")
    assert lowered.digest == expected.digest


@pytest.mark.parametrize(("first", "turned"), [("MatMul", {}), ("Gemm", {}), ("Gemm", {"transB": 1})])
def test_tied_weights_are_quantised_for_each_reader(first: str, turned: dict[str, int], tmp_path: Path) -> None:
    """ONNX Runtime's quantizer turns a Gemm's weight in place; whoever read it too then multiplied by the wrong
    matrix."""
    g = models.Graph()
    tied = g.weight(32, 32)
    hidden = g.add(first, "x", tied, **turned)
    g.add("Gemm", hidden, tied, name="y", transB=1)
    rows = {"x": g.random.standard_normal((8, 32)).astype(np.float32)}
    model, _ = models.write(g, tmp_path / "tied", rows, {"y": ("float32", ("batch", 32))}, "batch")
    lowered = DynamicInt8().lower(model, DYNAMIC, None, (), tmp_path / "lowered")
    [exact], [found] = run(model.path, rows), run(lowered.path, rows)
    assert 10 * np.log10(np.sum(exact**2) / np.sum((exact - found) ** 2)) > 25


def test_unnamed_nodes_get_names_that_stay(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["a"], ["b"]), onnx.helper.make_node("Relu", ["b"], ["c"], name="Relu_0")],
        "g",
        [],
        [],
    )
    onnx_graph.name_nodes(graph)
    assert [node.name for node in graph.node] == ["Relu_0_", "Relu_0"]


def test_nothing_is_left_behind(conv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = conv
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    before = sorted(path.name for path in Path(model.path).parent.iterdir())
    for lowering, scheme in ALL:
        lowering.lower(model, scheme, samples, (), tmp_path / scheme.name)
    assert not list(Path.cwd().iterdir())
    assert sorted(path.name for path in Path(model.path).parent.iterdir()) == before
