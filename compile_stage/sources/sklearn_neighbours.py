"""Neighbours that are weighted by their distance. skl2onnx turns the sign of the distances round, takes each for the
least one that it allows, and so weights all neighbours alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compile_stage.sources.graph import put_behind

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def weigh_neighbours(model: ModelProto) -> None:
    """Weight each neighbour by one over its distance, as KNeighborsClassifier and KNeighborsRegressor with
    weights='distance' do. Where some are at distance 0, these alone count."""
    from onnx import numpy_helper

    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    for least in [node for node in model.graph.node if node.op_type == "Max"]:
        turned = makers.get(least.input[0])
        if turned is None or turned.op_type != "Mul" or not np.all(values.get(turned.input[1], 0) == -1):
            continue
        nearest = makers.get(turned.input[0])
        if nearest is not None and nearest.op_type == "TopK":
            _weigh(model, least, nearest.output[0])


def _weigh(model: ModelProto, least: NodeProto, distances: str) -> None:
    """Args: least: It takes no distance for less than a small one; what takes its answer is the weights."""
    from onnx import TensorProto, helper, numpy_helper

    inverse = next(node for node in model.graph.node if least.output[0] in node.input)
    weights = inverse.output[0]
    zero, columns, smallest = (f"{weights}_{word}" for word in ("zero", "columns", "smallest"))
    constants = {zero: np.float32(0), columns: np.asarray([1], np.int64), smallest: np.float32(1e-30)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    least.input[:] = [distances, smallest]
    inverse.output[0] = f"{weights}_inverse"
    is_same, same, has_same, some = (f"{weights}_{word}" for word in ("is_same", "same", "has_same", "some"))
    made = [
        helper.make_node("Equal", [distances, zero], [is_same], name=is_same),
        helper.make_node("Cast", [is_same], [same], name=same, to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", [same, columns], [has_same], name=has_same),
        helper.make_node("Greater", [has_same, zero], [some], name=some),
        helper.make_node("Where", [some, same, inverse.output[0]], [weights], name=weights),
    ]
    put_behind(model, inverse, made)
