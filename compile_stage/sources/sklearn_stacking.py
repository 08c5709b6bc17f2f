"""StackingClassifier. skl2onnx takes the last model's highest score for its label, which an SVC's, a RidgeClassifier's
or a NearestCentroid's is not, and fails where a model of two classes hands its scores or labels on."""

from __future__ import annotations

from functools import partial
from typing import Any

from compile_stage.sources.sklearn_chains import parse_inner
from compile_stage.sources.sklearn_corrections import last_step
from compile_stage.sources.sklearn_labels import write_label
from compile_stage.sources.sklearn_nodes import add_node
from compile_stage.sources.sklearn_parts import parts


def register_stacking_converter(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator as they answer."""
    from skl2onnx import update_registered_converter
    from skl2onnx.common.shape_calculator import calculate_linear_classifier_output_shapes

    for kind in {type(part) for part in parts(estimator) if type(part).__name__ == "StackingClassifier"}:
        update_registered_converter(
            kind,
            "SklearnStackingClassifier",
            calculate_linear_classifier_output_shapes,
            _convert,
            options={
                "zipmap": [True, False, "columns"],
                "nocl": [True, False],
                "output_class_labels": [False, True],
                "raw_scores": [True, False],
            },
        )


def _convert(scope: Any, operator: Any, container: Any) -> None:
    from onnx import TensorProto
    from skl2onnx.common.data_types import FloatTensorType

    stack = operator.raw_operator
    rows = scope.declare_local_variable("stacked_rows", FloatTensorType([None, int(stack.n_features_in_)]))
    given = [one.full_name for one in operator.inputs]
    container.add_node("Concat", given, rows.full_name, name=scope.get_unique_operator_name("rows"), axis=1)
    blocks = [
        _answers(scope, container, model, method, rows, len(stack.classes_))
        for model, method in zip(stack.estimators_, (one for one in stack.stack_method_ if one), strict=True)
    ]
    blocks += [rows.full_name] if stack.passthrough else []
    last = stack.final_estimator_
    stacked = scope.declare_local_variable("stacked", FloatTensorType([None, int(last.n_features_in_)]))
    container.add_node("Concat", blocks, stacked.full_name, name=scope.get_unique_operator_name("stacked"), axis=1)
    if container.get_options(stack, {"raw_scores": False})["raw_scores"]:
        _ask_for_scores(scope, container, last)
    label, *others = (one.full_name for one in parse_inner(scope, container, last, stacked))
    # Its own labels are the places of the classes.
    flat, sizes = (scope.get_unique_variable_name(name) for name in ("places", "sizes"))
    container.add_initializer(sizes, TensorProto.INT64, [1], [-1])
    container.add_node("Reshape", [label, sizes], flat, name=scope.get_unique_operator_name("places"))
    write_label(scope, operator, container, stack.classes_, flat)
    if others:
        name = scope.get_unique_operator_name("probabilities")
        container.add_node("Identity", others[0], operator.outputs[1].full_name, name=name)


def _answers(scope: Any, container: Any, model: Any, method: str, rows: Any, classes: int) -> str:
    """What a model hands on, [batch, columns]: of two classes the second one's probability or score alone."""
    from onnx import TensorProto

    node = partial(add_node, scope, container)
    if method == "decision_function":
        _ask_for_scores(scope, container, model)
    label, *others = (one.full_name for one in parse_inner(scope, container, model, rows))
    if method == "predict":
        column = str(scope.get_unique_variable_name("column"))
        container.add_initializer(column, TensorProto.INT64, [2], [-1, 1])
        return node("Cast", node("Reshape", label, column), to=TensorProto.FLOAT)
    if classes > 2:
        return str(others[0])
    second = str(scope.get_unique_variable_name("second"))
    container.add_initializer(second, TensorProto.INT64, [1], [-1])
    return node("Gather", others[0], second, axis=1)


def _ask_for_scores(scope: Any, container: Any, model: Any) -> None:
    last, wanted = last_step(model), {"raw_scores": True, "zipmap": False}
    if container.has_options(last, "raw_scores"):
        # Without `zipmap` a model at the end of a pipeline would make a list of dicts.
        known = {key: value for key, value in wanted.items() if container.has_options(last, key)}
        for holder in (scope, container):
            holder.add_options(id(last), options=known)
