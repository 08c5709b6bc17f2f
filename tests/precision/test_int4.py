"""int4 by blocks: the arithmetic, what is written, and that two runtimes keep it compressed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import Scheme, Target
from compile_stage.precision import block_weights, blocks
from compile_stage.precision.int4 import Int4
from compile_stage.precision.mixed import mix
from compile_stage.precision.sensitivity import rank_nodes
from compile_stage.testing import models

ASYMMETRIC = Scheme(precision="int4", name="int4", weights="uint4")
SYMMETRIC = Scheme(precision="int4", name="int4-s", weights="int4", options={"method": "rtn"})
TARGET = Target(name="cpu", threads=1)


def deep(folder: Path, rows: int = 64, layers: int = 3) -> Any:
    """Products alone: x [batch, rows] → y, and samples."""
    g = models.Graph()
    x = "x"
    for layer in range(layers):
        x = g.add("MatMul", x, g.weight(rows, rows), name="y" if layer == layers - 1 else "")
    data = g.random.standard_normal((16, rows)).astype(np.float32)
    return models.write(g, folder, {"x": data}, {"y": ("float32", ("batch", rows))})


def snr_db(exact: Any, near: Any) -> float:
    return float(10 * np.log10(np.sum(exact.astype(np.float64) ** 2) / np.sum((exact - near).astype(np.float64) ** 2)))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([16, 32, 128]),
    symmetric=st.booleans(),
    method=st.sampled_from(blocks.METHODS),
    spread=st.sampled_from([0.0, 1e-40, 1e-20, 1.0, 1e30]),
    offset=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_every_weight_is_within_half_a_step_of_its_range(
    seed: int, size: int, symmetric: bool, method: str, spread: float, offset: float
) -> None:
    """Broken: a block of zeros, of denormals, or of one sign would become NaN, or leave its 4 bits."""
    random = np.random.default_rng(seed)
    weight = ((random.standard_normal((size * 2, 3)) + offset) * spread).astype(np.float32)
    found = blocks.quantize(weight, size, symmetric, method)
    low, high = (-8, 7) if symmetric else (0, 15)
    assert low <= found.values.min() <= found.values.max() <= high
    assert np.isfinite(found.scale).all()
    assert (found.scale > 0).all()
    error = np.abs(found.dequantize() - weight)
    assert np.isfinite(error).all()
    if method == "rtn":
        steps = np.repeat(found.scale, size, axis=0)
        assert (error <= steps * (1.0 if not symmetric else 0.51)).all()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([16, 32]),
    levels=st.sampled_from([64, 127]),
    spread=st.sampled_from([0.0, 1e-40, 1e-20, 1.0, 1e30]),
)
def test_a_byte_is_within_half_a_step_and_the_graph_says_the_same(
    seed: int, size: int, levels: int, spread: float
) -> None:
    """Broken: a weight in 8 bits leaves the range that a CPU's sums have room for, or is off by more than half a step;
    or what stands in the graph is not what was rounded."""
    random = np.random.default_rng(seed)
    weight = (random.standard_normal((size * 2, 3)) * spread).astype(np.float32)
    found = blocks.round_to_bytes(weight, size, levels)
    assert np.abs(found.values.astype(int)).max() <= levels
    assert (np.abs(found.dequantize() - weight) <= 0.5001 * np.repeat(found.scale, size, axis=0)).all()
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [], [])
    graph.initializer.append(numpy_helper.from_array(weight, "w"))
    assert block_weights.write(graph, ["MatMul"], (), size, lambda *_: found, "int8") == (1, [])
    written = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    np.testing.assert_array_equal(written[graph.node[0].input[0]], found.values)
    assert [graph.node[0].op_type, graph.node[1].input[1]] == ["DequantizeLinear", graph.node[0].output[0]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("draw", ["standard_normal", "laplace"])
def test_half_quadratic_fits_better_than_rounding(draw: str, symmetric: bool) -> None:
    """Broken: the costlier method would be worth nothing. In its own norm it is never worse, block by block."""
    random = np.random.default_rng(0)
    sizes = {"size": (512, 64)}
    weight = (random.standard_normal(**sizes) if draw == "standard_normal" else random.laplace(**sizes)).astype(
        np.float32
    )
    rounded, fitted = (blocks.quantize(weight, 32, symmetric, method).dequantize() for method in ("rtn", "hqq"))
    assert snr_db(weight, fitted) > snr_db(weight, rounded) + 0.1
    norms = [np.sum(np.abs(weight - one).reshape(16, 32, 64) ** 0.7, axis=1) for one in (rounded, fitted)]
    assert (norms[1] <= norms[0] * 1.001).all()


def test_a_wide_matrix_is_quantised_in_parts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: columns at the border of two parts are left out, or get another's scale."""
    weight = np.random.default_rng(0).standard_normal((64, 50)).astype(np.float32)
    whole = blocks.quantize(weight, 32, False, "hqq").dequantize()
    monkeypatch.setattr(blocks, "_CHUNK", 64 * 7)
    # NumPy's power differs in the last bit by where a number lies in a vector of the CPU.
    np.testing.assert_allclose(blocks.quantize(weight, 32, False, "hqq").dequantize(), whole, rtol=1e-5)


@pytest.mark.parametrize("scheme", [ASYMMETRIC, SYMMETRIC], ids=["uint4", "int4"])
def test_the_graph_means_what_was_computed(scheme: Scheme, tmp_path: Path) -> None:
    """Broken: halves of a byte would be swapped, or scales belong to other blocks. No samples are needed."""
    model, _ = deep(tmp_path / "m", layers=1)
    lowered = Int4().lower(model, scheme, None, (), tmp_path / "out")
    onnx.checker.check_model(lowered.path, full_check=True)
    assert lowered.opset == 21
    weight = numpy_helper.to_array(onnx.load(model.path).graph.initializer[0])
    method = str(scheme.options.get("method", "hqq"))
    wanted = blocks.quantize(weight, 32, scheme.weights == "int4", method).dequantize()
    (found,) = ReferenceEvaluator(lowered.path).run(None, {"x": np.eye(64, dtype=np.float32)})
    assert np.allclose(found, wanted, atol=1e-6)


def test_turned_shared_ragged_and_embedded_weights(tmp_path: Path) -> None:
    """Broken: a transposed Gemm would not be merged by ONNX Runtime, a shared weight be stored twice, or a table be
    quantised."""
    g = models.Graph()
    table, shared = g.weight(10, 32), g.weight(32, 32)
    x = g.add("Gather", table, "ids")
    x = g.add("MatMul", g.add("MatMul", x, shared), shared)
    x = g.add("Gemm", x, g.weight(40, 32), g.weight(40, scale=0.1), transB=1)
    g.add("MatMul", x, g.weight(40, 4), name="y")
    ids = g.random.integers(0, 10, (8,))
    model, _ = models.write(g, tmp_path / "m", {"ids": ids}, {"y": ("float32", ("batch", 4))})
    lowered = Int4().lower(model, ASYMMETRIC, None, (), tmp_path / "out")
    graph = onnx.load(lowered.path).graph
    made = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert len(made) == 2
    assert not [
        a for node in graph.node if node.op_type == "Gemm" for a in node.attribute if a.name == "transB" and a.i
    ]
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert kinds[table] == TensorProto.FLOAT
    assert shared not in kinds, "the float weight would be carried along"
    assert lowered.notes[-1] == "1 matrix products stay in fp32: a weight's rows are no whole blocks of 16"
    batch = {"ids": ids}
    (exact,), (near,) = (ReferenceEvaluator(one.path).run(None, batch) for one in (model, lowered))
    assert snr_db(exact, near) > 15


@pytest.mark.parametrize(("rows", "asked", "taken"), [(128, 128, 128), (192, 128, 64), (48, 32, 16)])
def test_the_block_is_the_largest_that_divides_the_rows(rows: int, asked: int, taken: int, tmp_path: Path) -> None:
    model, _ = deep(tmp_path / "m", rows=rows, layers=1)
    scheme = replace(ASYMMETRIC, options={"block": asked, "method": "rtn"})
    graph = onnx.load(Int4().lower(model, scheme, None, (), tmp_path / "out").path).graph
    (size,) = (a.i for node in graph.node for a in node.attribute if a.name == "block_size")
    assert size == taken


def test_refusals_say_why(tmp_path: Path) -> None:
    model, _ = deep(tmp_path / "m", rows=24)
    assert "no whole blocks of 16" in str(Int4().refuse(model, ASYMMETRIC))
    good, _ = deep(tmp_path / "good")
    for change, said in (
        ({"options": {"method": "magic"}}, "there is hqq, rtn"),
        ({"options": {"block": 24}}, "power of two from 16 on, not 24"),
        ({"weights": "int3"}, "int4 or uint4, not int3"),
        ({"ops": ("Conv",)}, "has no Conv"),
    ):
        assert said in str(Int4().refuse(good, replace(ASYMMETRIC, **change)))
    assert Int4().refuse(good, ASYMMETRIC) is None
    every = [node.name for node in onnx.load(good.path).graph.node]
    with pytest.raises(UsageError, match="nothing was quantised"):
        Int4().lower(good, ASYMMETRIC, None, every, tmp_path / "out")


def test_kept_nodes_stay_and_nodes_can_be_given_back(tmp_path: Path) -> None:
    """Broken: the search for mixed precision would have nothing to search in."""
    model, samples = models.transformer(tmp_path / "m")
    scheme = OnnxRuntime().schemes(TARGET, "int4")[0]
    lowered = Int4().lower(model, scheme, None, ("node_matmul_1",), tmp_path / "out")
    assert lowered.kept == {"fp32": ("node_matmul_1",)}
    ranking = rank_nodes(model, lowered, samples, 1)
    assert len(ranking) == 5
    assert all(entry.effect > 0 for entry in ranking)
    mixed = mix(model, lowered, [entry.node for entry in ranking[:3]], tmp_path / "mixed")
    artifact = OnnxRuntime().compile(mixed, scheme, TARGET, "job", tmp_path / "art")
    assert artifact.executed["precision"]["matrix_and_convolution"]["int4"] == 2


def test_onnx_runtime_keeps_the_weights_compressed(tmp_path: Path) -> None:
    """Broken: int4 would be a smaller file, and nothing else."""
    model, samples = deep(tmp_path / "m", rows=128)
    for scheme in OnnxRuntime().schemes(TARGET, "int4"):
        lowered = Int4().lower(model, scheme, None, (), tmp_path / scheme.name / "low")
        artifact = OnnxRuntime().compile(lowered, scheme, TARGET, "job", tmp_path / scheme.name / "art")
        assert artifact.executed["precision"]["matrix_and_convolution"] == {"int8": 0, "float": 0, "int4": 3}
        assert artifact.executed["ops"] == {"com.microsoft.MatMulNBits": 3}
        assert artifact.notes == ("3 matrix operators read weights in 4 bits and multiply in int8, none in float",)
        assert artifact.size_bytes < 0.2 * Path(model.path).stat().st_size
        batch = {"x": np.load(Path(samples.path) / "inputs" / "x.npy")}
        (exact,) = ReferenceEvaluator(model.path).run(None, batch)
        with OnnxRuntime().open(artifact, 1) as session:
            assert snr_db(exact, session.run(batch)["y"]) > 12


@pytest.mark.parametrize("level", ["basic", "disabled"])
def test_weights_that_are_expanded_are_an_error(level: str, tmp_path: Path) -> None:
    """Broken: a candidate called int4 would hold its weights in float32 while it runs."""
    model, _ = deep(tmp_path / "m")
    scheme = OnnxRuntime().schemes(TARGET, "int4")[0]
    lowered = Int4().lower(model, scheme, None, (), tmp_path / "low")
    asked = replace(TARGET, options={"onnxruntime": {"graph_optimization": level}})
    with pytest.raises(NothingCompiledError, match="keeps no weight in 4 bits"):
        OnnxRuntime().compile(lowered, scheme, asked, "job", tmp_path / "art")


def test_products_in_float_can_be_asked_for_and_are_told(tmp_path: Path) -> None:
    model, _ = deep(tmp_path / "m")
    scheme = OnnxRuntime().schemes(TARGET, "int4")[0]
    lowered = Int4().lower(model, scheme, None, (), tmp_path / "low")
    config = {"session.qdq_matmulnbits_accuracy_level": "1"}
    asked = replace(TARGET, options={"onnxruntime": {"config": config}})
    artifact = OnnxRuntime().compile(lowered, scheme, asked, "job", tmp_path / "art")
    assert "multiply in float" in artifact.notes[0]
    assert artifact.options["config"] == config


def test_openvino_keeps_the_weights_compressed(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    from compile_stage.backends.openvino import OpenVino

    model, _ = deep(tmp_path / "m", rows=128)
    scheme = OpenVino().schemes(TARGET, "int4")[0]
    lowered = Int4().lower(model, scheme, None, (), tmp_path / "low")
    artifact = OpenVino().compile(lowered, scheme, TARGET, "job", tmp_path / "art")
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"u4": 3}
    assert artifact.notes[0].startswith("3 matrix layers read weights in 4 bits")
    with pytest.raises(NothingCompiledError, match="runs none of the matrix and convolution layers in it"):
        OpenVino().compile(model, scheme, TARGET, "job", tmp_path / "float")


def test_both_backends_share_one_graph() -> None:
    """Broken: the same weights would be quantised once for each backend."""
    pytest.importorskip("openvino")
    from compile_stage.backends.openvino import OpenVino

    ours, theirs = (
        [replace(scheme, float_types=()) for scheme in backend.schemes(TARGET, "int4")]
        for backend in (OnnxRuntime(), OpenVino())
    )
    assert theirs == ours[:1]
