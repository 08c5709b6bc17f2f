"""Inputs in float64, of models whose trees stand behind steps that compute.

A tree's threshold is a value of the training data, or the middle of two, so numbers on a threshold are common where
data has few decimals. float32 has 33.099998 for 33.1, and a scaler brings that to another number than 33.1: of 2,700
rows with one decimal up to 1,668 were answered otherwise. So these graphs take float64 and compute in it up to the
trees; all else in them gets the same numbers rounded to float32, as other graphs are given them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.records import SourceModel
from compile_stage.sources import graph, lightgbm, tabular
from compile_stage.sources.graph import put_behind
from compile_stage.sources.sklearn_boosters import boosters
from compile_stage.sources.sklearn_corrections import has_thresholds
from compile_stage.sources.sklearn_parts import parts

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

_COMPUTING = ("MaxAbsScaler", "MinMaxScaler", "PowerTransformer", "RobustScaler", "StandardScaler")
"""Steps that the export writes in float64 before thresholds."""

_MOVING = {  # operator: which of its inputs are numbers, which it hands on or multiplies; None for all
    "ArrayFeatureExtractor": (0,), "Clip": None, "Concat": None, "Flatten": (0,), "Gather": (0,), "Identity": (0,),
    "ReduceProd": (0,), "Reshape": (0,), "Slice": (0,), "Split": (0,), "Squeeze": (0,), "Unsqueeze": (0,),
    "Where": (1, 2),
}  # fmt: skip

_ARITHMETIC = ("Abs", "Add", "Clip", "Div", "Exp", "Log", "Mul", "Neg", "Sub", "Where")

_WHOLE = (
    *("And", "ArgMax", "ConstantOfShape", "Equal", "Greater", "IsNaN", "LabelEncoder", "Less", "Not"),
    *("OneHotEncoder", "Or"),
)
"""Operators that answer small whole numbers, which float32 and float64 both have."""


def number_type(estimator: Any, source: SourceModel) -> str:
    """`float64` where a step computes before thresholds, and predict() is given no float32; else `float32`."""
    held = list(parts(estimator))
    computes = any(type(part).__name__ in _COMPUTING for part in held)
    return "float64" if computes and has_thresholds(held) and not tabular.takes_float32(source) else "float32"


def widen_inputs(model: ModelProto, estimator: Any) -> None:
    """Have the graph's numbers come in float64, and whatever computes in float64 take them as they come."""
    from onnx import TensorProto, helper

    given = [value for value in model.graph.input if value.type.tensor_type.elem_type == TensorProto.FLOAT]
    names = {value.name: f"{value.name}_rounded" for value in given}
    graph.rename_values(model, names)
    for value, (name, rounded) in zip(given, names.items(), strict=True):
        value.name, value.type.tensor_type.elem_type = name, TensorProto.DOUBLE
        model.graph.node.insert(0, helper.make_node("Cast", [name], [rounded], name=rounded, to=TensorProto.FLOAT))
    wide = _Wide(model, estimator, {rounded: name for name, rounded in names.items()})
    for node in list(model.graph.node):
        if _is_cast(node, TensorProto.DOUBLE) and (found := wide.of(node.input[0])) is not None:
            node.op_type, node.input[0] = "Identity", found
            del node.attribute[:]
    exact = _exact_thresholds(estimator)
    for node in list(model.graph.node):
        found = wide.of(node.input[0]) if node.op_type.startswith("TreeEnsemble") else None
        if found is not None and not _compare_in_float64(model, node, found, exact):
            node.input[0] = wide.rounded(node.input[0])


def _is_cast(node: NodeProto | None, to: int) -> bool:
    return node is not None and node.op_type == "Cast" and node.attribute[0].i == to


class _Wide:
    """Where a graph's values in float32 are to be had in float64.

    Args:
        held: Value in float32 → the same in float64.
    """

    def __init__(self, model: ModelProto, estimator: Any, held: dict[str, str]) -> None:
        self._model, self._held = model, held
        self._makers = {output: node for node in model.graph.node for output in node.output}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._fills = [
            np.asarray(part.statistics_, np.float64)
            for part in parts(estimator)
            if type(part).__name__ == "SimpleImputer" and hasattr(part, "statistics_")
            if part.statistics_.dtype.kind == "f"
        ]

    def of(self, name: str) -> str | None:
        """The same value in float64; None where it was computed in float32."""
        from onnx import TensorProto

        if name in self._held:
            return self._held[name]
        node, constant = self._makers.get(name), self._constants.get(name)
        if constant is not None:
            if constant.data_type == TensorProto.FLOAT:
                self._held[name] = self._constant(f"{name}_wide", self._exact(constant))
        elif node is None:
            return None
        elif _is_cast(node, TensorProto.FLOAT):
            found = node.input[0] if self._is_float64(node.input[0]) else self.of(node.input[0])
            self._held |= {name: found} if found is not None else {}
        elif node.op_type in _MOVING:
            self._move(node)
        elif node.op_type == "Imputer":
            self._impute(node)
        if name not in self._held and node is not None and self._is_whole(name):
            self._convert(node, name)
        return self._held.get(name)

    def rounded(self, name: str) -> str:
        """A value that `of` has found, in float32 again: with all that leads to it computed in float64."""
        from onnx import TensorProto, helper

        wide, node = self._held[name], self._makers[name]
        if node.op_type == "Cast" and node.input[0] == wide:
            return name
        again = f"{name}_again"
        if again not in self._makers:
            made = helper.make_node("Cast", [wide], [again], name=again, to=TensorProto.FLOAT)
            put_behind(self._model, self._makers.get(wide, node), [made])
            self._makers[again] = made
        return again

    def _is_float64(self, name: str) -> bool:
        from onnx import TensorProto

        node, constant = self._makers.get(name), self._constants.get(name)
        if constant is not None:
            return bool(constant.data_type == TensorProto.DOUBLE)
        if node is None or _is_cast(node, TensorProto.DOUBLE):
            return node is not None
        return node.op_type in _ARITHMETIC and any(map(self._is_float64, node.input))

    def _is_whole(self, name: str) -> bool:
        from onnx import TensorProto

        node = self._makers.get(name)
        if node is None:
            return False
        if node.op_type == "Cast":
            return node.attribute[0].i not in (TensorProto.FLOAT, TensorProto.DOUBLE) or self._is_whole(node.input[0])
        if node.op_type not in _MOVING:
            return node.op_type in _WHOLE
        places = _MOVING[node.op_type] or range(len(node.input))
        return all(self._is_whole(node.input[place]) for place in places if node.input[place])

    def _convert(self, node: NodeProto, name: str) -> None:
        from onnx import TensorProto, helper

        wide = f"{name}_wide"
        self._put(node, [helper.make_node("Cast", [name], [wide], name=wide, to=TensorProto.DOUBLE)], {name: wide})

    def _exact(self, constant: TensorProto) -> Any:
        """In float64; what missing numbers are filled in with as the imputer has it."""
        from onnx import numpy_helper

        rounded = numpy_helper.to_array(constant)
        return self._exact_fills(rounded.ravel()).reshape(rounded.shape)

    def _exact_fills(self, rounded: Any) -> Any:
        for fills in self._fills:
            if len(fills) == len(rounded) and np.array_equal(fills.astype(np.float32), rounded, equal_nan=True):
                return fills
        return rounded.astype(np.float64)

    def _constant(self, name: str, value: Any) -> str:
        from onnx import numpy_helper

        tensor = numpy_helper.from_array(np.asarray(value, np.float64), name)
        self._model.graph.initializer.append(tensor)
        self._constants[name] = tensor
        return name

    def _move(self, node: NodeProto) -> None:
        """Write the node once more, in float64, where all of its numbers are to be had so."""
        places = _MOVING[node.op_type] or range(len(node.input))
        found = {place: self.of(node.input[place]) for place in places if node.input[place]}
        if None in found.values():
            return
        copied = type(node)()
        copied.CopyFrom(node)
        copied.name = f"{node.name}_wide"
        for place, name in found.items():
            copied.input[place] = name
        copied.output[:] = [f"{output}_wide" for output in node.output]
        self._put(node, [copied], dict(zip(node.output, copied.output, strict=True)))

    def _impute(self, node: NodeProto) -> None:
        """An imputer of ai.onnx.ml takes no float64."""
        from onnx import helper

        named = {entry.name: entry for entry in node.attribute}
        fills = self._exact_fills(np.asarray(named["imputed_value_floats"].floats, np.float32))
        missing = named["replaced_value_float"].f if "replaced_value_float" in named else 0.0
        if (given := self.of(node.input[0])) is None:
            return
        answer = f"{node.output[0]}_wide"
        fill, is_missing = self._constant(f"{answer}_fills", fills.reshape(1, -1)), f"{answer}_missing"
        if np.isnan(missing):
            asked = helper.make_node("IsNaN", [given], [is_missing], name=is_missing)
        else:
            value = self._constant(f"{answer}_value", missing)
            asked = helper.make_node("Equal", [given, value], [is_missing], name=is_missing)
        filled = helper.make_node("Where", [is_missing, fill, given], [answer], name=answer)
        self._put(node, [asked, filled], {node.output[0]: answer})

    def _put(self, node: NodeProto, made: list[NodeProto], held: Mapping[str, str]) -> None:
        put_behind(self._model, node, made)
        self._makers |= {output: one for one in made for output in one.output}
        self._held |= held


def _exact_thresholds(estimator: Any) -> dict[tuple[int, float], float]:
    """Of trees that compare in float64: (column, threshold as the graph has it) → the threshold."""
    found: dict[tuple[int, float], float] = {}

    def add(columns: Any, thresholds: Any) -> None:
        with np.errstate(over="ignore"):
            written = thresholds.astype(np.float32)
        found.update(zip(zip(columns, written.tolist(), strict=True), thresholds.tolist(), strict=True))

    for part in parts(estimator):
        if type(part).__name__ == "TreePredictor":
            splits = part.nodes[(part.nodes["is_leaf"] == 0) & (part.nodes["is_categorical"] == 0)]
            add(splits["feature_idx"].tolist(), splits["num_threshold"])
    for model in boosters(estimator):
        if type(model).__name__.startswith("LGBM"):
            for columns, thresholds in lightgbm.splits(model):
                add(columns, thresholds)
    return found


def _compare_in_float64(
    model: ModelProto, trees: NodeProto, given: str, exact: Mapping[tuple[int, float], float]
) -> bool:
    """Have trees compare what comes in float64 with their thresholds in float64; False where they are others, which
    compare in float32."""
    from onnx import helper, numpy_helper

    named = {entry.name: entry for entry in trees.attribute}
    values = np.asarray(named["nodes_values"].floats, np.float64)
    modes, columns = named["nodes_modes"].strings, named["nodes_featureids"].ints
    splits = [place for place, mode in enumerate(modes) if mode == b"BRANCH_LEQ"]
    keys = [(columns[place], float(values[place])) for place in splits]
    if not splits or not exact.keys() >= set(keys):
        return False
    values[splits] = [exact[key] for key in keys]
    wide = {"nodes_values": values}
    for name in ("nodes_hitrates", "base_values", "class_weights", "target_weights"):
        if name in named:
            wide[name] = np.asarray(named[name].floats, np.float64)
    for name, numbers in wide.items():
        trees.attribute.remove(named[name])
        trees.attribute.append(helper.make_attribute(f"{name}_as_tensor", numpy_helper.from_array(numbers)))
    trees.input[0] = given
    for entry in model.opset_import:
        if entry.domain == trees.domain:  # tensors as attributes came with version 3
            entry.version = max(entry.version, graph.ML_OPSET)
    return True
