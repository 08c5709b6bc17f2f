"""Operators of ONNX Runtime's own set ai.onnx.ml, written as those of the default set, which every compiler and every
quantiser knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compile_stage.sources import graph

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

TINY = 1e-30
"""What a sum of magnitudes is at least before it divides: a row of zeros stays one, as in `Normalizer`."""


def without_ml_operators(model: ModelProto) -> None:
    """Write scalers, imputers of NaN, linear models, `Normalizer` with the norm L1, and what picks columns or looks up
    a class, as operators that every compiler knows.

    Only where nothing else of ai.onnx.ml is left then: such a graph is for ONNX Runtime alone anyway, where one
    operator is faster than the two or three that say the same.
    """
    from onnx import NodeProto, TensorProto, numpy_helper

    plain = _Plain(model)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.domain != "ai.onnx.ml":
            nodes.append(node)
            continue
        written = plain.write(node)
        if written is None:
            return
        nodes += written
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]  # what is deleted from a graph is gone
    del model.graph.node[:]
    model.graph.node.extend(kept)
    read = {name for node in graph.nodes(model.graph) for name in node.input}
    held = [tensor for tensor in model.graph.initializer if tensor.name in read]
    held += [numpy_helper.from_array(value, name) for name, value in plain.constants.items()]
    held = [TensorProto.FromString(tensor.SerializeToString()) for tensor in held]
    del model.graph.initializer[:]
    model.graph.initializer.extend(held)


class _Plain:
    """Writes the operators of one graph; `constants` are what they need beside it, by name."""

    def __init__(self, model: ModelProto) -> None:
        from onnx import numpy_helper

        self._model = model
        self._held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self._known = _known(model)
        self._read = {name for node in graph.nodes(model.graph) for name in node.input} | {
            value.name for value in model.graph.output
        }
        self._sums_to_one: set[str] = set()
        self.constants: dict[str, Any] = {}

    def write(self, node: NodeProto) -> list[NodeProto] | None:
        """Nodes that say the same; None where there are none."""
        from onnx.helper import get_attribute_value

        values = {entry.name: get_attribute_value(entry) for entry in node.attribute}
        match node.op_type:
            case "Scaler":
                return self._scaler(node, values)
            case "Imputer":
                return self._imputer(node, values)
            case "LinearRegressor":
                return self._regressor(node, values)
            case "LinearClassifier":
                return self._classifier(node, values)
            case "Normalizer" if values.get("norm") == b"L1":
                return self._shares(node)
            case "ArrayFeatureExtractor" if self._looks_up_one_row(node):
                return [_node("Gather", list(node.input), node.output[0], axis=0)]
            case "ArrayFeatureExtractor" if node.input[1] in self._held and self._has_columns(node.input[0]):
                places = self._constant(f"{node.output[0]}/plain_places", self._held[node.input[1]].ravel())
                return [_node("Gather", [node.input[0], places], node.output[0], axis=1)]
        return None

    def _constant(self, name: str, value: Any) -> str:
        self.constants[name] = value
        return name

    def _type(self, name: str) -> int | None:
        return self._known[name].elem_type if name in self._known else None

    def _has_columns(self, name: str) -> bool:
        return name in self._known and len(self._known[name].shape.dim) == 2

    def _floats(self, node: NodeProto) -> tuple[list[NodeProto], str]:
        """Its first input in float32, which operators of ai.onnx.ml make of any number by themselves."""
        from onnx import TensorProto

        name, out = node.input[0], f"{node.output[0]}/plain_in_float"
        if self._type(name) == TensorProto.FLOAT:
            return [], name
        return [_node("Cast", [name], out, to=TensorProto.FLOAT)], out

    def _scaler(self, node: NodeProto, values: Mapping[str, Any]) -> list[NodeProto]:
        """(X - offset) * scale, each a number for all columns or one for each."""
        import numpy as np

        cast, taken = self._floats(node)
        out = node.output[0]
        offset, scale = (
            self._constant(f"{out}/plain_{key}", np.asarray(values[key], np.float32)) for key in ("offset", "scale")
        )
        return [
            *cast,
            _node("Sub", [taken, offset], f"{out}/plain_centred"),
            _node("Mul", [f"{out}/plain_centred", scale], out),
        ]

    def _imputer(self, node: NodeProto, values: Mapping[str, Any]) -> list[NodeProto] | None:
        """A number for all columns or one for each, in the place of NaN."""
        import numpy as np
        from onnx import TensorProto

        filled = values.get("imputed_value_floats")
        in_float = self._type(node.input[0]) == TensorProto.FLOAT
        if not filled or not in_float or not np.isnan(values.get("replaced_value_float", 0.0)):
            return None
        name, out = node.input[0], node.output[0]
        constant = self._constant(f"{out}/plain_filled", np.asarray(filled, np.float32))
        return [
            _node("IsNaN", [name], f"{out}/plain_missing"),
            _node("Where", [f"{out}/plain_missing", constant, name], out),
        ]

    def _regressor(self, node: NodeProto, values: Mapping[str, Any]) -> list[NodeProto] | None:
        if values.get("post_transform", b"NONE") != b"NONE":
            return None
        return self._scores(node, values, values.get("targets", 1), node.output[0])

    def _classifier(self, node: NodeProto, values: Mapping[str, Any]) -> list[NodeProto] | None:
        """The label is the class with the highest score, the first of several, as in scikit-learn."""
        import numpy as np

        texts = values.get("classlabels_strings")
        labels = np.asarray([text.decode() for text in texts], object) if texts else None
        labels = np.asarray(values.get("classlabels_ints", ()), np.int64) if labels is None else labels
        after = {b"NONE": "Identity", b"LOGISTIC": "Sigmoid", b"SOFTMAX": "Softmax"}.get(
            values.get("post_transform", b"NONE")
        )
        if after is None or len(labels) < 2 or len(values.get("intercepts", ())) != len(labels):
            return None
        label, answer = node.output
        scores, number = f"{answer}/plain_scores", f"{label}/plain_number"
        written = self._scores(node, values, len(labels), scores)
        if label in self._read:
            classes = self._constant(f"{label}/plain_classes", labels)
            written.append(_node("ArgMax", [scores], number, axis=1, keepdims=0))
            written.append(_node("Gather", [classes, number], label, axis=0))
        if after == "Softmax":
            self._sums_to_one.add(answer)
        if answer in self._read:
            written.append(_node(after, [scores], answer, **({"axis": 1} if after == "Softmax" else {})))
        return written

    def _scores(self, node: NodeProto, values: Mapping[str, Any], count: int, out: str) -> list[NodeProto]:
        """X [batch, features] @ coefficients.T [features, count] + intercepts [count]."""
        import numpy as np

        cast, taken = self._floats(node)
        table = np.asarray(values["coefficients"], np.float32).reshape(count, -1)
        coefficients = self._constant(f"{out}/plain_coefficients", np.ascontiguousarray(table.T))
        product = f"{out}/plain_product"
        beside = np.asarray(values.get("intercepts") or [0.0] * count, np.float32)
        return [
            *cast,
            _node("MatMul", [taken, coefficients], product),
            _node("Add", [product, self._constant(f"{out}/plain_intercepts", beside)], out),
        ]

    def _shares(self, node: NodeProto) -> list[NodeProto]:
        """Each row over the sum of its magnitudes."""
        import numpy as np

        cast, taken = self._floats(node)
        out = node.output[0]
        if taken in self._sums_to_one:
            return [_node("Identity", [taken], out)]
        axes = self._constant(f"{out}/plain_axes", np.asarray([1], np.int64))
        least = self._constant(f"{out}/plain_least", np.asarray(TINY, np.float32))
        return [
            *cast,
            _node("Abs", [taken], f"{out}/plain_magnitudes"),
            _node("ReduceSum", [f"{out}/plain_magnitudes", axes], f"{out}/plain_sum", keepdims=1),
            _node("Max", [f"{out}/plain_sum", least], f"{out}/plain_divisor"),
            _node("Div", [taken, f"{out}/plain_divisor"], out),
        ]

    def _looks_up_one_row(self, node: NodeProto) -> bool:
        """It takes numbers of a single row, and what comes out is flattened at once: its shape, in which the two
        operators differ, is seen by nobody."""
        table = self._held.get(node.input[0])
        users = self._readers(node.output[0])
        while len(users) == 1 and users[0].op_type == "Cast":
            users = self._readers(users[0].output[0])
        shapes = [self._held.get(user.input[1]) for user in users if user.op_type == "Reshape"]
        flattened = len(users) == len(shapes) == 1 and shapes[0] is not None and shapes[0].tolist() == [-1]
        return table is not None and table.ndim == 1 and table.dtype.kind in "iuf" and flattened

    def _readers(self, name: str) -> list[NodeProto]:
        return [node for node in graph.nodes(self._model.graph) if name in node.input]


def _known(model: ModelProto) -> dict[str, Any]:
    """Tensors whose type ONNX can tell → that type, with the shape where it is known."""
    import onnx

    known = onnx.shape_inference.infer_shapes(model).graph
    return {value.name: value.type.tensor_type for value in (*known.input, *known.value_info, *known.output)}


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    from onnx import helper

    return helper.make_node(kind, inputs, [output], name=output, **attributes)
