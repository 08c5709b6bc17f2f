"""Classifiers whose label is not that of the highest probability: hard votes, and thresholds of one's own. skl2onnx
takes what a voter's scores look like for its vote, and leaves a threshold out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from compile_stage.sources.sklearn_nodes import add_node
from compile_stage.sources.sklearn_parts import parts

_OPTIONS: Mapping[str, list[Any]] = {
    "zipmap": [True, False, "columns"],
    "output_class_labels": [False, True],
    "nocl": [True, False],
}


def refuse_thresholds(estimator: Any) -> str | None:
    """The reason when something else than a probability is held against a threshold."""
    for model in _with_threshold(estimator):
        if model.response_method == "decision_function" or not hasattr(model.estimator_, "predict_proba"):
            return (
                f"its {type(model).__name__} holds decision_function() against the threshold, which is not compiled: "
                "fit it with response_method='predict_proba', on a model that has it"
            )
    return None


def refuse_large_labels(estimator: Any) -> str | None:
    """The reason when a label has more than 32 bits: many of skl2onnx's converters cut them off, and answer 0."""
    for part in parts(estimator):
        classes = getattr(part, "__dict__", {}).get("classes_")
        if isinstance(classes, np.ndarray) and classes.dtype.kind in "iuf" and classes.size:
            largest = max(classes.tolist(), key=abs)
            if not -(2**31) <= largest < 2**31:
                return (
                    f"its {type(part).__name__} has the label {largest!r}, and skl2onnx writes labels in 32 bits: "
                    "train it on smaller numbers, or on texts"
                )
    return None


def register_label_converters(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator."""
    from skl2onnx import update_registered_converter
    from skl2onnx.common.shape_calculator import calculate_linear_classifier_output_shapes

    votes = [part for part in parts(estimator) if type(part).__name__ == "VotingClassifier"]
    for convert, models in ((_convert_votes, votes), (_convert_threshold, _with_threshold(estimator))):
        for kind in {type(model) for model in models}:
            update_registered_converter(
                kind,
                f"CompileStage{kind.__name__}",
                calculate_linear_classifier_output_shapes,
                convert,
                options=dict(_OPTIONS),
            )


def _with_threshold(estimator: Any) -> Iterator[Any]:
    kinds = ("FixedThresholdClassifier", "TunedThresholdClassifierCV")
    yield from (part for part in parts(estimator) if type(part).__name__ in kinds and hasattr(part, "estimator_"))


def _convert_votes(scope: Any, operator: Any, container: Any) -> None:
    """Each voter's vote is its label, which is the number of a class there. skl2onnx takes the place of its highest
    score, and an SVC has scores of another kind."""
    from onnx import TensorProto
    from skl2onnx.common.data_types import Int64TensorType
    from skl2onnx.operator_converters.voting_classifier import convert_voting_classifier

    model = operator.raw_operator
    if model.voting != "hard":
        convert_voting_classifier(scope, operator, container)
        return
    weights = model._weights_not_none or [1.0] * len(model.estimators_)
    numbers, column = (scope.get_unique_variable_name(name) for name in ("numbers", "column"))
    container.add_initializer(numbers, TensorProto.INT64, [1, len(model.classes_)], list(range(len(model.classes_))))
    container.add_initializer(column, TensorProto.INT64, [2], [-1, 1])
    counted = []
    for voter, weight in zip(model.estimators_, weights, strict=True):
        label, _ = _declared(scope, operator, voter, Int64TensorType())
        vote = add_node(scope, container, "Reshape", label, column)
        is_class = add_node(scope, container, "Equal", vote, numbers)
        one = add_node(scope, container, "Cast", is_class, to=TensorProto.FLOAT)
        name = scope.get_unique_variable_name("weight")
        container.add_initializer(name, TensorProto.FLOAT, [], [float(weight)])
        counted.append(add_node(scope, container, "Mul", one, name))
    total = operator.outputs[1].full_name
    container.add_node("Sum", counted, total, name=scope.get_unique_operator_name("votes"))
    most = add_node(scope, container, "ArgMax", total, axis=1, keepdims=0)
    write_label(scope, operator, container, model.classes_, most)


def _convert_threshold(scope: Any, operator: Any, container: Any) -> None:
    from onnx import TensorProto

    model = operator.raw_operator
    classes = list(model.classes_)
    fixed = hasattr(model, "threshold")
    threshold = model.threshold if fixed else model.best_threshold_
    positive = model.pos_label if fixed else model._curve_scorer._get_pos_label()
    place = 1 if positive is None else classes.index(positive)
    _, probabilities = _declared(scope, operator, model.estimator_, operator.outputs[0].type)
    answer = operator.outputs[1].full_name
    container.add_node("Identity", probabilities, answer, name=scope.get_unique_operator_name("probabilities"))
    chosen, least = (scope.get_unique_variable_name(name) for name in ("positive", "threshold"))
    container.add_initializer(chosen, TensorProto.INT64, [], [place])
    container.add_initializer(least, TensorProto.FLOAT, [], [0.5 if threshold == "auto" else float(threshold)])
    score = add_node(scope, container, "Gather", answer, chosen, axis=1)
    reached = add_node(scope, container, "GreaterOrEqual", score, least)
    number = add_node(scope, container, "Cast", reached, to=TensorProto.INT64)
    write_label(scope, operator, container, np.asarray(model.classes_)[[1 - place, place]], number)


def _declared(scope: Any, operator: Any, model: Any, label_type: Any) -> tuple[str, str]:
    """The names of the label and the probabilities, or scores, of a model inside, which is given the same columns."""
    from skl2onnx._supported_operators import sklearn_operator_name_map

    inner = scope.declare_local_operator(sklearn_operator_name_map[type(model)], model)
    inner.inputs = operator.inputs
    for name, kind in (("inner_label", label_type), ("inner_scores", operator.outputs[1].type)):
        inner.outputs.append(scope.declare_local_variable(name, type(kind)()))
    return tuple(variable.full_name for variable in inner.outputs)


def write_label(scope: Any, operator: Any, container: Any, classes: Any, numbers: str) -> None:
    """Args: numbers: For each row the place of its label in `classes`."""
    from onnx import TensorProto

    labels = scope.get_unique_variable_name("labels")
    if np.asarray(classes).dtype.kind in "biuf":
        container.add_initializer(labels, TensorProto.INT64, [len(classes)], [int(label) for label in classes])
    else:
        container.add_initializer(labels, TensorProto.STRING, [len(classes)], [str(one).encode() for one in classes])
    output = operator.outputs[0].full_name
    container.add_node("Gather", [labels, numbers], output, name=scope.get_unique_operator_name("label"))
