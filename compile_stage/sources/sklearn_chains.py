"""A model for each label or target: chains, which skl2onnx has no converter for, in which each model reads what those
before it answered, beside the columns; and MultiOutputClassifier, whose models it does not convert where they are
pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

from compile_stage.sources.sklearn_corrections import last_step
from compile_stage.sources.sklearn_nodes import add_node
from compile_stage.sources.sklearn_parts import parts


def refuse_chains(estimator: Any) -> str | None:
    """The reason when a chain hands on something else than labels and probabilities."""
    for chain in _chains(estimator):
        method = getattr(chain, "chain_method_", "predict")
        if method not in ("predict", "predict_proba"):
            return (
                f"its {type(chain).__name__} hands {method}() on to the next model, which is not compiled: "
                "fit it with chain_method='predict' or 'predict_proba'"
            )
    return None


def register_chain_converters(estimator: Any) -> None:
    """Have skl2onnx convert those in the estimator."""
    from skl2onnx import update_registered_converter

    several = [part for part in parts(estimator) if type(part).__name__ == "MultiOutputClassifier"]
    for kind in {type(model) for model in (*_chains(estimator), *several)}:
        update_registered_converter(
            kind,
            f"CompileStage{kind.__name__}",
            _infer_shape,
            _convert,
            options={"zipmap": [True, False, "columns"], "nocl": [True, False]},
            parser=_parse,
        )


def _chains(estimator: Any) -> list[Any]:
    return [part for part in parts(estimator) if type(part).__name__ in ("ClassifierChain", "RegressorChain")]


def _parse(scope: Any, chain: Any, inputs: Any, custom_parsers: Any = None) -> Any:
    """One output alone. skl2onnx expects two of each classifier."""
    from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType

    operator = scope.declare_local_operator(f"CompileStage{type(chain).__name__}", chain)
    operator.inputs = inputs
    kind = FloatTensorType
    if hasattr(chain, "classes_"):
        kind = StringTensorType if chain.classes_[0].dtype.kind in "OUS" else Int64TensorType
    operator.outputs.append(scope.declare_local_variable("label", kind()))
    return operator.outputs


def _infer_shape(operator: Any) -> None:
    rows = operator.inputs[0].get_first_dimension()
    operator.outputs[0].type.shape = [rows, len(operator.raw_operator.estimators_)]


def _convert(scope: Any, operator: Any, container: Any) -> None:
    import numpy as np
    from onnx import TensorProto
    from skl2onnx.common.data_types import FloatTensorType

    chain = operator.raw_operator
    is_label, is_chain = hasattr(chain, "classes_"), hasattr(chain, "order_")
    by_probability = getattr(chain, "chain_method_", "predict") == "predict_proba"
    column = str(scope.get_unique_variable_name("column"))
    container.add_initializer(column, TensorProto.INT64, [2], [-1, 1])

    node = partial(add_node, scope, container)
    handed_on: list[str] = []
    answers: list[str] = []
    for model in chain.estimators_:
        rows = scope.declare_local_variable("rows", FloatTensorType([None, int(model.n_features_in_)]))
        columns = [one.full_name for one in operator.inputs] + handed_on
        container.add_node("Concat", columns, rows.full_name, name=scope.get_unique_operator_name("rows"), axis=1)
        label, *others = (one.full_name for one in parse_inner(scope, container, model, rows))
        answers.append(node("Reshape", label, column))
        if not is_chain:
            continue
        if by_probability:  # that of the last class
            last = str(scope.get_unique_variable_name("last"))
            container.add_initializer(last, TensorProto.INT64, [1], [len(model.classes_) - 1])
            handed_on.append(node("Gather", others[0], last, axis=1))
        else:
            handed_on.append(node("Cast", answers[-1], to=TensorProto.FLOAT) if is_label else answers[-1])
    in_order = [answers[place] for place in np.argsort(chain.order_)] if is_chain else answers
    joined = operator.outputs[0].full_name
    container.add_node("Concat", in_order, joined, name=scope.get_unique_operator_name("chain"), axis=1)


def parse_inner(scope: Any, container: Any, model: Any, rows: Any) -> Any:
    """What a model inside another answers to `rows`, as variables; also of a pipeline, which skl2onnx's own way for
    models inside others (OnnxSubEstimator) takes for its last step alone."""
    from skl2onnx._parse import _parse_sklearn
    from sklearn.base import is_classifier
    from sklearn.svm import LinearSVC

    if is_classifier(model):
        last = last_step(model)
        plain = {id(last): {"nocl": False}} if isinstance(last, LinearSVC) else {id(model): {"zipmap": False}}
        for one, options in plain.items():
            scope.add_options(one, options=options)
            container.add_options(one, options=options)
    return _parse_sklearn(scope, model, [rows], custom_parsers=None)
