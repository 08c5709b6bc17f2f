"""The node that is at fault is the one that is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel, Scheme
from compile_stage.graph_debug.graphs import INPUT_OP, Node, open_graph
from compile_stage.graph_debug.trace import DROP_DB, RUNTIME_GAP_DB, TensorErrors, judge, rank, trace
from compile_stage.precision.float16 import Float16

Sabotage = Callable[[PortableModel, str], Path]


@pytest.fixture
def as_openvino(tmp_path: Path) -> Callable[[Path], Path]:
    """The same graph as the artifact that the openvino backend writes."""

    def convert(path: Path) -> Path:
        import openvino

        into = tmp_path / f"{path.stem}.xml"
        openvino.save_model(openvino.Core().read_model(path), str(into), compress_to_fp16=False)
        return into

    return convert


@pytest.mark.parametrize("scheme", ["int8-u8", "int8-sym"])
@pytest.mark.parametrize(
    ("runtime", "layer"), [("onnxruntime", 0), ("onnxruntime", 25), ("onnxruntime", 51), ("openvino", 25)]
)
def test_a_layer_with_a_wrong_scale_is_named_among_52(
    network: Any, sabotage: Sabotage, as_openvino: Callable[[Path], Path], scheme: str, layer: int, runtime: str
) -> None:
    spoiled = sabotage(network.lowered[scheme], f"node_conv{layer}")
    candidate = as_openvino(spoiled) if runtime == "openvino" else spoiled
    found = trace(open_graph(network.model.path), open_graph(candidate), network.batches())
    assert found.first == f"node_conv{layer}"
    assert rank(found)[0].node == f"node_conv{layer}"
    assert found.precision == "int8"
    assert found.unmatched == 0


@pytest.mark.parametrize("scheme", ["int8-u8", "int8-sym"])
def test_rounding_alone_accuses_nobody(network: Any, scheme: str) -> None:
    """A sound int8 graph loses a little in every layer; none of them departs."""
    found = trace(open_graph(network.model.path), open_graph(network.lowered[scheme].path), network.batches())
    assert found.first is None
    assert max(error.drop_db for error in found.nodes) < DROP_DB
    assert found.notes == ()


def test_a_graph_against_itself_is_exact(network: Any) -> None:
    found = trace(open_graph(network.model.path), open_graph(network.model.path), network.batches(1))
    assert {error.snr_db for error in found.nodes} == {math.inf}
    assert found.first is None
    assert rank(found) == ()


def test_an_overflow_is_named_where_it_begins(tmp_path: Path) -> None:
    """Naive float16: the product passes 65504, and what follows is infinite too."""
    weight = numpy_helper.from_array(np.full((4, 4), 300, np.float32), "w")
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "x"], ["squared"], name="square"),
            helper.make_node("MatMul", ["squared", "w"], ["big"], name="too_big"),
            helper.make_node("Relu", ["big"], ["y"], name="after"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [weight],
    )
    fp32, fp16 = tmp_path / "fp32.onnx", tmp_path / "fp16.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, fp32)
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(model, keep_io_types=True), fp16)
    found = trace(open_graph(fp32), open_graph(fp16), [{"x": np.full((1, 4), 20, np.float32)}])
    first = found.find("too_big")
    assert found.first == "too_big"
    assert first is not None
    assert first.kind == "not finite"
    assert found.precision == "fp16"


def test_nodes_that_stay_in_fp32_amid_fp16_are_compared_too(network: Any, tmp_path: Path) -> None:
    """The converter gives their outputs new names."""
    kept = ("node_conv3", "node_relu3", "node_conv4")
    scheme = Scheme(precision="fp16", name="fp16")
    lowered = Float16().lower(network.model, scheme, None, kept, tmp_path / "fp16")
    found = trace(open_graph(network.model.path), open_graph(lowered.path), network.batches(1), precision="fp16")
    assert found.unmatched == 0
    assert found.first is None


def test_a_runtime_that_adds_error_of_its_own_is_told_from_the_graph() -> None:
    nodes = [
        Node(name="x", op=INPUT_OP, inputs=(), outputs=("x",)),
        Node(name="n", op="Conv", inputs=("x",), outputs=("y",)),
    ]
    measured = {"x": (math.inf, math.inf, 0.0), "y": (40.0, 40.0, 0.1)}
    errors = TensorErrors(measured=measured, outputs={"y": (40.0, 40.0 - RUNTIME_GAP_DB + 1)}, samples=1)
    quiet = judge(nodes, errors, precision="int8")
    loud = judge(nodes, replace(errors, outputs={"y": (40.0, 12.0)}), precision="int8")
    assert quiet.notes == ()
    assert "kernels" in loud.notes[0]


def test_what_is_no_graph_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"\xff\xfe no protobuf")
    (tmp_path / "a.xml").write_text("<nothing/>")
    for name in ("a.onnx", "a.xml", "a.pt"):
        with pytest.raises(UsageError):
            open_graph(tmp_path / name)


def test_errors_that_the_precision_explains_are_ranked_where_there_are_no_others() -> None:
    """Broken: an output misses a narrow limit, and debug says that both answer the same."""
    nodes = [
        Node(name="x", op=INPUT_OP, inputs=(), outputs=("x",)),
        Node(name="first", op="Conv", inputs=("x",), outputs=("h",)),
        Node(name="second", op="Conv", inputs=("h",), outputs=("y",)),
    ]
    measured = {"x": (math.inf, math.inf, 0.0), "h": (70.0, 70.0, 0.1), "y": (43.0, 43.0, 0.1)}
    found = judge(nodes, TensorErrors(measured=measured, outputs={"y": (43.0, 43.0)}, samples=1), precision="int8")
    assert found.first is None
    assert [error.node for error in rank(found)] == ["second", "first"]
