"""Products of one input as one product, on graphs written here: the answers stay the same to the last bit or two."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from compile_stage.backends.onnxruntime_products import merge

ROWS, DEEP, BLOCK = 3, 32, 16


class Graph:
    """A graph of products of `x` [3, 32]."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.outputs: list[str] = []

    def weight(self, name: str, *shape: int) -> str:
        values = self.random.standard_normal(shape).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def int4(self, name: str, width: int) -> str:
        """A weight [32, width] in 4 bits, by blocks of rows."""
        levels = self.random.integers(-8, 8, (DEEP, width))
        self.weights.append(helper.make_tensor(f"{name}.values", TensorProto.INT4, levels.shape, levels.ravel()))
        self.weight(f"{name}.scale", DEEP // BLOCK, width)
        inputs = [f"{name}.values", f"{name}.scale"]
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [name], axis=0, block_size=BLOCK))
        return name

    def product(self, name: str, weight: str, bias: int = 0) -> str:
        self.nodes.append(helper.make_node("MatMul", ["x", weight], [f"{name}_" if bias else name]))
        if bias:
            self.nodes.append(helper.make_node("Add", [f"{name}_", self.weight(f"{name}_bias", bias)], [name]))
        self.outputs.append(name)
        return name

    def model(self, opset: int = 21) -> Any:
        """Each product is an output, behind a Relu."""
        ends = [helper.make_node("Relu", [name], [f"{name}_out"]) for name in self.outputs]
        outputs = [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None) for name in self.outputs]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, DEEP])
        graph = helper.make_graph([*self.nodes, *ends], "g", [x], outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _answers(model: Any) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(9).standard_normal((ROWS, DEEP)).astype(np.float32)
    return list(session.run(None, {"x": x}))


def _merged(model: Any) -> tuple[tuple[int, int], int]:
    """What `merge` says, and how many products are left; the answers are compared."""
    before = _answers(model)
    said = merge(model)
    for one, other in zip(before, _answers(model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    return said, sum(node.op_type == "MatMul" for node in model.graph.node)


def test_floats_integers_and_biases_are_merged_each_with_their_kind() -> None:
    """Broken: an output gets another product's columns, or a bias, or blocks of integers are put together wrongly."""
    graph = Graph()
    for width in (5, 8, 2):
        graph.product(f"plain{width}", graph.weight(f"w{width}", DEEP, width))
    for width in (4, 7):
        graph.product(f"biased{width}", graph.weight(f"v{width}", DEEP, width), bias=width)
    for width in (6, 3):  # an odd width: two columns share a byte
        graph.product(f"packed{width}", graph.int4(f"q{width}", width))
    model = graph.model()
    assert _merged(model) == ((7, 3), 3)
    kept = {tensor.name for tensor in model.graph.initializer}
    assert not kept & {"w5", "v4", "q6.values", "biased4_bias"}, "weights are in the file twice"


def test_a_weight_that_others_read_stays() -> None:
    """Broken: a tied weight is in the file twice, or its other reader has none."""
    graph = Graph()
    shared = graph.weight("shared", DEEP, DEEP)
    graph.product("one", shared)
    graph.product("two", graph.weight("w", DEEP, 4))
    graph.product("three", shared)
    assert _merged(graph.model()) == ((0, 0), 3)


def test_only_products_of_the_same_tensor_are_merged() -> None:
    """Broken: a product reads another's input."""
    graph = Graph()
    graph.product("one", graph.weight("w", DEEP, 4))
    graph.nodes.append(helper.make_node("Neg", ["x"], ["y"]))
    graph.nodes.append(helper.make_node("MatMul", ["y", graph.weight("v", DEEP, 4)], ["two"]))
    graph.outputs.append("two")
    assert _merged(graph.model()) == ((0, 0), 2)


def test_what_a_subgraph_reads_keeps_its_name() -> None:
    """Broken: a branch reads a tensor that nobody makes any more."""
    graph = Graph()
    for name in ("one", "two"):
        graph.product(name, graph.weight(f"w_{name}", DEEP, 4), bias=4)
    value = helper.make_tensor_value_info("kept", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Neg", ["one_"], ["kept"])], "b", [], [value])
    graph.weights.append(numpy_helper.from_array(np.array(True), "yes"))
    graph.nodes.append(helper.make_node("If", ["yes"], ["three"], then_branch=branch, else_branch=branch))
    graph.outputs.append("three")
    assert _merged(graph.model()) == ((0, 0), 2)


def test_weights_outside_of_the_file_and_old_opsets_are_left(tmp_path: Any) -> None:
    """Broken: a graph whose weights are not read gets empty ones; or a Split is written as no old opset has it."""
    graph = Graph()
    for name in ("one", "two"):
        graph.product(name, graph.weight(f"w_{name}", DEEP, 4))
    assert _merged(graph.model(opset=12)) == ((0, 0), 2)
    onnx.save_model(graph.model(), tmp_path / "g.onnx", save_as_external_data=True, location="w", size_threshold=0)
    away = onnx.load(tmp_path / "g.onnx", load_external_data=False)
    assert merge(away) == (0, 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_attention_takes_queries_keys_and_values_as_one_tensor(order: tuple[int, ...]) -> None:
    """Broken: queries stand where keys are asked for; the exporter writes the products in any order."""
    graph = Graph()
    size, places = 16, ("past_key", "past_value")
    widths = {"q": 2 * size, "k": size, "v": size}
    for name in [list(widths)[at] for at in order]:
        graph.nodes.append(helper.make_node("MatMul", ["x3", graph.weight(f"w_{name}", DEEP, widths[name])], [name]))
    graph.nodes.insert(0, helper.make_node("Unsqueeze", ["x", "zero"], ["x3"]))
    graph.weights.append(numpy_helper.from_array(np.array([0]), "zero"))
    for name in places:
        graph.weights.append(numpy_helper.from_array(np.zeros((1, 1, 0, size), np.float32), name))
    graph.weights += [
        numpy_helper.from_array(np.array([ROWS - 1], np.int32), "last"),
        numpy_helper.from_array(np.array(ROWS, np.int32), "all"),
    ]
    graph.nodes.append(
        helper.make_node(
            "GroupQueryAttention", ["q", "k", "v", *places, "last", "all"], ["answer", "present_key", "present_value"],
            domain="com.microsoft", num_heads=2, kv_num_heads=1,
        )
    )  # fmt: skip
    graph.outputs += ["answer", "present_key"]
    model = graph.model()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert _merged(model) == ((3, 1), 1)
    assert "Split" not in {node.op_type for node in model.graph.node}
