"""XGBoost's and LightGBM's models inside scikit-learn's: onnxmltools converts them where skl2onnx meets one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from compile_stage.sources import lightgbm, xgboost
from compile_stage.sources.sklearn_parts import parts

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BOOSTERS = (
    "xgboost.core.Booster",
    *(f"xgboost.sklearn.{name}" for name in xgboost.WRAPPERS),
    *lightgbm.WRAPPERS,
)
"""Types that a skops file may hold: they store trees, and are data to their libraries."""

_CLASSIFIERS = ("XGBClassifier", "XGBRFClassifier", "LGBMClassifier")
_REGRESSORS = ("XGBRegressor", "XGBRFRegressor", "LGBMRegressor")


def boosters(estimator: Any) -> list[Any]:
    """All fitted models of the two libraries in it, each once."""
    return [
        part
        for part in parts(estimator)
        if type(part).__name__ in (*_CLASSIFIERS, *_REGRESSORS) and part.__sklearn_is_fitted__()
    ]


def refuse_boosters(estimator: Any) -> str | None:
    """The reason when one of them would be converted to other answers, or can't be."""
    for part in boosters(estimator):
        kind = type(part).__name__
        library = "lightgbm" if _is_lightgbm(part) else "xgboost"
        if find_spec("onnxmltools") is None:
            install = f'pip install "compile-stage[{library}]"'
            return f"its {kind} is converted by onnxmltools, which is not installed: {install}"
        reason = lightgbm.refuse_model(part) if _is_lightgbm(part) else _refuse_xgboost(part)
        if reason is not None:
            return f"of its {kind}: {reason}"
    return None


def register_converters(estimator: Any, fed_sparse: set[int], *, is_given_float32: bool) -> None:
    """Have skl2onnx convert them by onnxmltools.

    Args:
        fed_sparse: The ids of those that are given sparse matrices (`takers_of_sparse`).
        is_given_float32: The estimator gets no other numbers.
    """
    from skl2onnx import update_registered_converter
    from skl2onnx.common.shape_calculator import (
        calculate_linear_classifier_output_shapes,
        calculate_linear_regressor_output_shapes,
    )

    of_lightgbm = _lightgbm_converter(is_given_float32)
    for kind in {type(part) for part in boosters(estimator)}:
        classifies = kind.__name__ in _CLASSIFIERS
        options = {"nocl": [True, False], "zipmap": [True, False, "columns"]}
        if kind.__name__.startswith("LGBM") and hasattr(kind, "decision_function"):  # from LightGBM 4.7 on
            options["raw_scores"] = [True, False]  # a calibration asks for them where it can be had
        update_registered_converter(
            kind,
            f"CompileStage{kind.__name__}",
            calculate_linear_classifier_output_shapes if classifies else calculate_linear_regressor_output_shapes,
            of_lightgbm if kind.__name__.startswith("LGBM") else _xgboost_converter(fed_sparse),
            options=options if classifies else None,
        )


@contextmanager
def takers_of_sparse(estimator: Any) -> Iterator[set[int]]:
    """The ids of XGBoost's models in it that were given a sparse matrix in what was asked meanwhile.

    To XGBoost a number that such a matrix does not store is missing; elsewhere it is 0.
    """
    from scipy.sparse import issparse

    found: set[int] = set()

    def watched(part: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(rows: ArrayLike, *args: Any, **options: Any) -> Any:
            if issparse(rows):
                found.add(id(part))
            return method(rows, *args, **options)

        return call

    watching = [part for part in boosters(estimator) if not _is_lightgbm(part)]
    methods = [(part, name) for part in watching for name in ("predict", "predict_proba") if hasattr(part, name)]
    for part, name in methods:
        setattr(part, name, watched(part, getattr(part, name)))
    try:
        yield found
    finally:
        for part, name in methods:
            delattr(part, name)


def _is_lightgbm(part: Any) -> bool:
    return type(part).__name__.startswith("LGBM")


def _refuse_xgboost(part: Any) -> str | None:
    import numpy as np

    booster = part.get_booster()
    if part.missing is not None and not np.isnan(part.missing):
        return f"it takes {part.missing} for a missing number: train it with missing=numpy.nan, on NaN in its place"
    if (reason := xgboost.refuse_inside(booster)) is not None:
        return reason
    return xgboost.refuse_booster(booster) or xgboost.refuse_dropout(bytes(booster.save_raw("json")), booster)


def _lightgbm_converter(is_given_float32: bool) -> Callable[[Any, Any, Any], None]:
    def convert(scope: Any, operator: Any, container: Any) -> None:
        from onnxmltools.convert.lightgbm.operator_converters.LightGbm import convert_lightgbm

        written = len(container.nodes)
        convert_lightgbm(scope, operator, container)
        model = operator.raw_operator
        lightgbm.correct_trees(container.nodes[written:], model, is_given_float32=is_given_float32)
        nodes, weights = lightgbm.cut_fractions(container.nodes[written:], model)
        container.nodes.extend(nodes)
        container.initializers.extend(weights)
        options = (
            container.get_options(operator.raw_operator, {"raw_scores": False}, fail=False) or {}
        )  # None: a regressor's
        if not options.get("raw_scores"):
            return
        for entry in [entry for node in container.nodes[written:] for entry in node.attribute]:
            if entry.name == "post_transform":
                entry.s = b"NONE"

    return convert


def _xgboost_converter(fed_sparse: set[int]) -> Callable[[Any, Any, Any], None]:
    def convert(scope: Any, operator: Any, container: Any) -> None:
        from onnx import TensorProto
        from onnxmltools.convert.xgboost.operator_converters.XGBoost import convert_xgboost

        model = operator.raw_operator
        written = len(container.nodes)
        with xgboost.convertible(model):
            convert_xgboost(scope, operator, container)
            xgboost.name_classes(container.nodes[written:], model)
            xgboost.write_probabilities(container.nodes[written:], model)
        if id(model) not in fed_sparse:
            return
        rows = operator.inputs[0].full_name
        zero, missing = (scope.get_unique_variable_name(name) for name in ("zero", "missing"))
        is_zero, given = (scope.get_unique_variable_name(name) for name in ("is_zero", "given"))
        container.add_initializer(zero, TensorProto.FLOAT, [], [0.0])
        container.add_initializer(missing, TensorProto.FLOAT, [], [float("nan")])
        for node in container.nodes[written:]:
            node.input[:] = [given if name == rows else name for name in node.input]
        container.add_node("Equal", [rows, zero], is_zero, name=scope.get_unique_operator_name("is_zero"))
        container.add_node("Where", [is_zero, missing, rows], given, name=scope.get_unique_operator_name("given"))

    return convert
