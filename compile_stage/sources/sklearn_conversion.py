"""A scikit-learn model → the ONNX graph that skl2onnx makes of it, with what it converts to other answers put right."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import SourceModel
from compile_stage.core.tensors import Signature
from compile_stage.sources import mlmodel, tabular
from compile_stage.sources.plain_operators import without_ml_operators
from compile_stage.sources.sklearn_boosters import boosters, register_converters, takers_of_sparse
from compile_stage.sources.sklearn_categories import compared_one_by_one, register_category_converters
from compile_stage.sources.sklearn_centroids import register_centroid_converter
from compile_stage.sources.sklearn_chains import register_chain_converters
from compile_stage.sources.sklearn_corrections import (
    choose_one_against_rest_by_score,
    columns_by_number,
    count_bagged_labels,
    count_votes,
    divide_by_magnitude,
    halve_scores,
    keep_fractions,
    keep_means,
    label_by_score,
    last_step,
    name_pairs_classes,
    prepare,
    scale_exactly,
    scalers_before_trees,
    start_at_zero,
    thresholds_in_float32,
    write_logarithms,
)
from compile_stage.sources.sklearn_decisions import raw_scores
from compile_stage.sources.sklearn_encoders import register_encoders
from compile_stage.sources.sklearn_expansions import register_expansions
from compile_stage.sources.sklearn_float64 import widen_inputs
from compile_stage.sources.sklearn_functions import register_functions
from compile_stage.sources.sklearn_imputers import register_imputers
from compile_stage.sources.sklearn_isotonic import isotonic_interpolated
from compile_stage.sources.sklearn_labels import register_label_converters
from compile_stage.sources.sklearn_missing import write_missing_directions
from compile_stage.sources.sklearn_neighbours import weigh_neighbours
from compile_stage.sources.sklearn_powers import register_power_transformers
from compile_stage.sources.sklearn_scalers import edges_moved, register_clipped_scalers
from compile_stage.sources.sklearn_signature import ask_answer, column_names, has_columns, matrix_columns, steps
from compile_stage.sources.sklearn_stacking import register_stacking_converter
from compile_stage.sources.sklearn_support_vectors import write_linear_kernels
from compile_stage.sources.sklearn_targets import register_target_converter
from compile_stage.sources.sklearn_words import pad_with_no_word, word_options, write_sublinear_counts


def convert(estimator: Any, wanted: Signature, source: SourceModel) -> Any:
    """The converter's own ONNX model, with its answers put right. Raises SourceError with the step that has no
    converter."""
    from skl2onnx import to_onnx
    from skl2onnx.common.exceptions import MissingConverter, MissingShapeCalculator

    prepare(estimator)
    names = () if has_columns(wanted) else column_names(estimator)
    by_name = names if _picks_columns(estimator) else ()
    by_number = bool(names) and not by_name
    is_given_float32 = tabular.is_given_float32(source)
    _register_converters(estimator, wanted, source)
    types, options = _input_types(wanted, by_name), _options(estimator, wanted, is_given_float32=is_given_float32)
    try:
        with (
            warnings.catch_warnings(),
            columns_by_number(estimator) if by_number else nullcontext(),
            thresholds_in_float32(estimator, is_given_float32=is_given_float32),
            compared_one_by_one(estimator),
            edges_moved(estimator, is_given_float32=is_given_float32),
            isotonic_interpolated(),
        ):
            warnings.simplefilter("ignore")  # deprecations inside the converter
            model = to_onnx(estimator, initial_types=types, options=options, target_opset=tabular.opsets())
    except (MissingConverter, MissingShapeCalculator) as error:
        raise SourceError(
            f"{_blamed(error, estimator)} has no converter to ONNX",
            fix="replace that step (scikit-learn's own encoders, imputers and scalers have one); or, where skl2onnx "
            "can be given a converter for it (update_registered_converter), convert the model yourself, and log that "
            "with mlflow.onnx",
            where=source.uri,
        ) from error
    except Exception as error:
        raise _failure(error, estimator, wanted, source) from error
    _correct(model, estimator, is_given_float32=is_given_float32)
    if by_name:
        tabular.join_columns(model, matrix_columns(by_name, source))
    elif by_number and (ordered := matrix_columns(names, source)) != names:
        tabular.pick_columns(model, [ordered.index(name) for name in names])
    if any(spec.dtype == "float64" for spec in wanted.inputs):
        widen_inputs(model, estimator)
    write_linear_kernels(model, estimator)
    without_ml_operators(model)
    return model


def _picks_columns(estimator: Any) -> bool:
    from sklearn.compose import ColumnTransformer

    return any(isinstance(step, ColumnTransformer) for step in steps(estimator))


def _register_converters(estimator: Any, wanted: Signature, source: SourceModel) -> None:
    if boosters(estimator):
        with takers_of_sparse(estimator) as fed_sparse:
            ask_answer(estimator, wanted.inputs, source)
        register_converters(estimator, fed_sparse, is_given_float32=tabular.is_given_float32(source))
    register_target_converter(estimator)
    register_label_converters(estimator)
    register_chain_converters(estimator)
    register_centroid_converter(estimator)
    register_expansions(estimator)
    register_category_converters(estimator)
    register_imputers(estimator)
    register_functions(estimator)
    register_clipped_scalers(estimator)
    register_stacking_converter(estimator)
    register_encoders(estimator)
    register_power_transformers(estimator, is_given_float32=tabular.is_given_float32(source))


def _input_types(wanted: Signature, by_name: Sequence[str]) -> list[tuple[str, Any]]:
    """Each input, or, of a matrix whose columns a step picks by name, each of these by itself; numbers in float32, in
    which skl2onnx computes."""
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    if has_columns(wanted):
        kinds = {"str": StringTensorType}
        return [(spec.name, kinds.get(spec.dtype, FloatTensorType)([None, 1])) for spec in wanted.inputs]
    if by_name:
        return [(name, FloatTensorType([None, 1])) for name in by_name]
    return [(tabular.INPUT, FloatTensorType([None, int(wanted.inputs[0].shape[1])]))]


def _options(estimator: Any, wanted: Signature, *, is_given_float32: bool) -> dict[int, dict[str, Any]]:
    """The converter's, by the id of the step that they are for."""
    from sklearn.base import is_classifier
    from sklearn.svm import LinearSVC

    options: dict[int, dict[str, Any]] = {}
    if is_classifier(estimator):
        # Without this option a converter writes a list of dicts, also where there are no probabilities. That of
        # LinearSVC knows no such option, and must be given one that it knows.
        last = last_step(estimator)
        known = "nocl" if isinstance(last, LinearSVC) else "zipmap"
        has_probabilities = any(spec.name == tabular.PROBABILITIES for spec in wanted.outputs)
        options = {id(estimator): {"zipmap": False}} if has_probabilities else {id(last): {known: False}}
    options |= raw_scores(estimator)
    options |= word_options(estimator)
    return options | scalers_before_trees(estimator, is_given_float32=is_given_float32)


def _failure(error: Exception, estimator: Any, wanted: Signature, source: SourceModel) -> SourceError:
    step, last = _step_of(error), type(last_step(estimator)).__name__
    fix = "" if mlmodel.read(source).inputs else "log it with a signature: without, every column is taken for numbers"
    if step == "SimpleImputer" and has_columns(wanted):
        fix = (
            "give the imputer of text columns strategy='most_frequent', or 'constant' with a text as fill_value, "
            "and neither add_indicator nor missing_values of its own; or fill missing texts in before the model"
        )
    elif has_columns(wanted) and not _picks_columns(estimator):
        fix = f"put what encodes text before it: make_pipeline(ColumnTransformer(...), {last}(...))"
    problem = f"skl2onnx can't convert {step or last}: {first_line(error).partition(' You may raise')[0].rstrip('.')}"
    return SourceError(problem, fix=fix, where=source.uri)


def _correct(model: Any, estimator: Any, *, is_given_float32: bool) -> None:
    """Put right what the converter writes otherwise than the estimator answers."""
    _drop_lists(model)
    write_missing_directions(model, estimator)
    write_logarithms(model, estimator)
    count_votes(model, estimator)
    count_bagged_labels(model, estimator)
    halve_scores(model, estimator)
    label_by_score(model, estimator)
    choose_one_against_rest_by_score(model)
    name_pairs_classes(model, estimator)
    keep_fractions(model)
    divide_by_magnitude(model)
    weigh_neighbours(model)
    write_sublinear_counts(model, estimator)
    pad_with_no_word(model)
    keep_means(model, estimator)
    start_at_zero(model)
    scale_exactly(model, estimator, is_given_float32=is_given_float32)


def _drop_lists(model: Any) -> None:
    """Leave out outputs that are lists of arrays, as a MultiOutputClassifier's probabilities are: no backend has
    them."""
    lists = [value for value in model.graph.output if value.type.WhichOneof("value") == "sequence_type"]
    names = {value.name for value in lists}
    for made in [node for node in model.graph.node if names & set(node.output)]:
        model.graph.node.remove(made)
    for value in lists:
        model.graph.output.remove(value)


def _step_of(error: Exception) -> str | None:
    """The class of the step at which skl2onnx failed: whose converter, or shapes, it was in, if in any."""
    converted = [frame.f_locals.get("operator") for frame, _ in traceback.walk_tb(error.__traceback__)]
    steps = [step for step in (getattr(operator, "raw_operator", None) for operator in converted) if step is not None]
    return type(steps[-1]).__name__ if steps else None


def _blamed(error: Exception, estimator: Any) -> str:
    """The class without converter, with its package where that is not scikit-learn: others have classes of the same
    names, which are converted there (`OrdinalEncoder` of category_encoders)."""
    match = re.search(r"type '<class '([\w.]+)'>'", str(error)) or re.search(r"<class '([\w.]+)'>", str(error))
    path = match[1] if match else f"{type(estimator).__module__}.{type(estimator).__qualname__}"
    package, name = path.partition(".")[0], path.rpartition(".")[2]
    return name if package in ("sklearn", "__main__") else f"{package}.{name}"
