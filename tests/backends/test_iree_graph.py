"""What is changed in a graph before IREE imports it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from compile_stage.backends.iree_graph import fix_shapes, gather_before_strided_products
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.testing import models


def strided(window: int = 1, **attributes: Any) -> onnx.ModelProto:
    """A convolution of stride 2 by 3 over [batch, 3, 7, 8]."""
    g = models.Graph(0)
    weights = g.weight(4, 3, window, window)
    g.add("Conv", "image", weights, name="answer", **{"strides": [2, 3], **attributes})
    image = onnx.helper.make_tensor_value_info("image", 1, ["batch", 3, 7, 8])
    answer = onnx.helper.make_tensor_value_info("answer", 1, ["batch", 4, "high", "wide"])
    graph = onnx.helper.make_graph(g.nodes, "net", [image], [answer], g.weights)
    opset = onnx.helper.make_opsetid("", 18)
    return onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10))


def test_a_strided_convolution_with_a_window_of_one_reads_gathered_elements() -> None:
    """Broken: IREE runs the three of ResNet-50 element by element, 70 % of its time; or other elements are read."""
    before, after = strided(), strided()
    assert gather_before_strided_products(after.graph) == 1
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in after.graph.node] == ["Gather", "Gather", "Conv"]
    assert list(after.graph.node[2].attribute[0].ints) == [1, 1]
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in after.graph.value_info}
    assert [sizes[node.output[0]][1:] for node in after.graph.node[:2]] == [[3, 4, 8], [3, 4, 3]]
    image = {"image": np.random.default_rng(0).standard_normal((2, 3, 7, 8), dtype=np.float32)}
    answers = [onnxruntime.InferenceSession(one.SerializeToString()).run(None, image)[0] for one in (before, after)]
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-6)


@pytest.mark.parametrize(
    "given",
    [{"window": 3}, {"pads": [1, 0, 0, 0]}, {"auto_pad": "SAME_UPPER"}, {"strides": [1, 1]}],
    ids=["window of 3", "padding", "automatic padding", "no stride"],
)
def test_other_convolutions_stay(given: dict[str, Any]) -> None:
    """Broken: a window or padding is forgotten, and the answer is another."""
    model = strided(**given)
    assert gather_before_strided_products(model.graph) == 0
    assert [node.op_type for node in model.graph.node] == ["Conv"]


def test_sizes_of_a_bucket_are_written_into_a_copy() -> None:
    """Broken: the batch stays free, or the graph of the next bucket has this one's sizes."""
    model = strided()
    signature = Signature(
        inputs=(TensorSpec(name="image", dtype="float32", shape=("batch", 3, 7, 8)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", 4, 4, 3)),),
    )
    fixed = fix_shapes(model, signature, ((5, 3, 7, 8),))
    sizes = [
        [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in (*fixed.graph.input, *fixed.graph.output)
    ]
    assert [one[0] for one in sizes] == [5, 5]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
