"""What a scikit-learn model takes and answers: one matrix, or columns of which some hold text."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import SourceModel
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.prediction_io import fill_texts
from compile_stage.sources import graph, mlmodel, tabular
from compile_stage.sources.sklearn_corrections import last_step
from compile_stage.sources.sklearn_float64 import number_type
from compile_stage.sources.sklearn_parts import parts
from compile_stage.sources.sklearn_texts import find_fills


def read_signature(estimator: Any, source: SourceModel) -> Signature:
    """Its inputs, one matrix or columns, and its outputs: a label, with probabilities where it has them; several labels
    alone, whose probabilities are a list of arrays; or numbers.
    Raises SourceError where it is not fitted, or reads bare texts."""
    from sklearn.base import is_classifier, is_regressor

    features = getattr(estimator, "n_features_in_", None)
    if features is None:
        first = next((step for step in steps(estimator) if hasattr(step, "build_analyzer")), None)
        if first is not None:
            kind = type(first).__name__
            raise SourceError(
                f"its {kind} reads a list of texts, and columns alone are compiled",
                fix=f"put it into ColumnTransformer([('text', {kind}(), 'text')]), and fit that on a data frame",
                where=source.uri,
            )
        # A step of somebody's own says nothing of its features; whether it can be converted is asked with those of the
        # signature.
        features = len(mlmodel.columns(source) or ()) if _is_fitted(estimator) else None
    if not features:
        raise SourceError(
            "it is not fitted, or neither it nor its signature says how many features it takes",
            fix="log it, fitted, with the signature of a data frame: infer_signature(frame, model.predict(frame))",
            where=source.uri,
        )
    inputs = _inputs(estimator, source, int(features))
    if is_classifier(estimator):
        classes = getattr(estimator, "classes_", ())
        if isinstance(classes, list) or _has_several_labels(last_step(estimator)):
            return Signature(inputs=inputs, outputs=(_several_labels(estimator, inputs, source),))
        outputs = [tabular.label(tabular.label_dtype(classes, source))]
        if hasattr(estimator, "predict_proba"):
            outputs.append(tabular.probabilities(len(classes)))
        return Signature(inputs=inputs, outputs=tuple(outputs))
    answer = ask_answer(estimator, inputs, source)
    if not is_regressor(estimator) and answer.ndim == 1 and answer.dtype.kind == "i":  # clusters, or outliers
        outputs = [tabular.label("int64")]
        if hasattr(estimator, "predict_proba"):  # of mixtures
            outputs.append(tabular.probabilities(ask_answer(estimator, inputs, source, "predict_proba").shape[1]))
        return Signature(inputs=inputs, outputs=tuple(outputs))
    targets, column = (answer.shape[1], True) if answer.ndim > 1 else (1, False)
    return Signature(inputs=inputs, outputs=(tabular.prediction(targets, column=column),))


def _is_fitted(estimator: Any) -> bool:
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError:
        return False
    return True


def _has_several_labels(model: Any) -> bool:
    """Of a classifier whose classes do not say it: whether each row may have several of them."""
    binarizer = getattr(model, "label_binarizer_", getattr(model, "_label_binarizer", None))
    return str(getattr(binarizer, "y_type_", "")).startswith("multilabel")


def _several_labels(estimator: Any, inputs: tuple[TensorSpec, ...], source: SourceModel) -> TensorSpec:
    from scipy.sparse import issparse

    answer = ask_answer(estimator, inputs, source)
    if answer.ndim != 2 or issparse(answer[0, 0]):  # neighbours answer an array of such matrices
        raise SourceError(
            "it answers several labels at once as a sparse matrix, which is not compiled",
            fix="fit it on labels as a plain array: y.toarray()",
            where=source.uri,
        )
    dtype, kind = tabular.label_dtype(answer.ravel(), source), type(last_step(estimator)).__name__
    if dtype == "str" and kind != "MultiOutputClassifier":
        raise SourceError(
            f"its {kind} answers several texts at once, which skl2onnx does not convert",
            fix=f"number its labels, or fit MultiOutputClassifier({kind}(...))",
            where=source.uri,
        )
    return tabular.label(dtype, targets=answer.shape[1])


def ask_answer(
    estimator: Any,
    inputs: tuple[TensorSpec, ...],
    source: SourceModel,
    method: str = "predict",
    *,
    as_given: bool = False,
) -> Any:
    """What it answers to two rows of zeros, or to the example where an encoder refuses zeros; for the shape and the
    type of its answers. Raises SourceError where it refuses both.

    Args:
        as_given: Ask in the type that its pyfunc is given, float64 where the signature does not say float32 alone: a
            model that was fitted on float32 answers in the wider of both. Else in float32.
    """
    import numpy as np

    signature = Signature(inputs=inputs, outputs=())
    ask = getattr(estimator, method)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        if has_columns(signature):
            columns = example_columns(estimator, source, inputs, as_given=as_given)
            return np.asarray(ask(framer(estimator, signature, source)(list(columns.values()))))
        as_frame = framer(estimator, signature, source, as_given=as_given)
        given = np.float64 if as_given and not tabular.is_given_float32(source) else np.float32
        try:
            return np.asarray(ask(as_frame([np.zeros((2, int(inputs[0].shape[1])), given)])))
        except (ValueError, TypeError) as error:  # an encoder that knows no 0, or a step that takes no other type
            example = mlmodel.named_example(source, signature, as_given=True)
            if example is None:
                raise SourceError(
                    f"it refuses rows of zeros ({first_line(error)}), and was logged without an input example",
                    fix="log it with input_example=..., some rows that it takes",
                    where=source.uri,
                ) from error
            as_frame = framer(estimator, signature, source, as_given=True)
            try:
                return np.asarray(ask(as_frame(list(example.values()))))
            except (ValueError, TypeError) as of_example:
                raise SourceError(
                    f"it refuses rows of zeros, and its own input example: {first_line(of_example)}",
                    fix="log it with input_example=..., some rows that it takes",
                    where=source.uri,
                ) from of_example


def _inputs(estimator: Any, source: SourceModel, features: int) -> tuple[TensorSpec, ...]:
    """One matrix; or, where columns hold text, one tensor for each column, under its name."""
    text, number = mlmodel.text_columns(source), number_type(estimator, source)
    if not text:
        return tabular.signature(features, (), number).inputs
    names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
    if len(names) != features or set(text) - set(names):
        raise SourceError(
            f"its columns {', '.join(text[:5])} hold text, and it does not know its columns by name",
            fix="fit it on a data frame, with a ColumnTransformer that picks columns by name",
            where=source.uri,
        )
    return tuple(
        TensorSpec(name=name, dtype="str" if name in text else number, shape=(graph.BATCH, 1)) for name in names
    )


def has_columns(signature: Signature) -> bool:
    """Whether the inputs are columns, and not one matrix."""
    return len(signature.inputs) > 1 or signature.inputs[0].name != tabular.INPUT


def framer(estimator: Any, signature: Signature, source: SourceModel, *, as_given: bool = False) -> Any:
    """The inputs' arrays → what the estimator takes: a data frame when a step picks columns by name.

    Args:
        as_given: Leave a matrix in the type that it has.
    """
    if has_columns(signature):
        import pandas as pd

        given = [spec.name for spec in signature.inputs]
        return lambda arrays: pd.DataFrame({name: array[:, 0] for name, array in zip(given, arrays, strict=True)})
    # A clusterer refuses rows of another type than its centers.
    own = None if as_given else signature.inputs[0].dtype
    dtype = getattr(getattr(last_step(estimator), "cluster_centers_", None), "dtype", own)
    names = column_names(estimator)
    if not names:
        return lambda arrays: arrays[0].astype(dtype or arrays[0].dtype, copy=False)
    import pandas as pd

    ordered = list(matrix_columns(names, source))
    return lambda arrays: pd.DataFrame(arrays[0].astype(dtype or arrays[0].dtype, copy=False), columns=ordered)


def column_names(estimator: Any) -> tuple[str, ...]:
    """Names of the columns when a step, or one of a model inside, picks them by name; else empty."""
    from sklearn.compose import ColumnTransformer

    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return ()
    for part in parts(estimator):
        if isinstance(part, ColumnTransformer) and any(
            isinstance(column, str)
            for _, _, chosen in getattr(part, "transformers_", ())
            for column in ([chosen] if isinstance(chosen, str) else chosen if isinstance(chosen, list) else [])
        ):
            return tuple(str(name) for name in names)
    return ()


def matrix_columns(names: Sequence[str], source: SourceModel) -> tuple[str, ...]:
    """The names of the matrix's columns in order. Samples and requests come in the order of the model's signature; what
    picks columns by name may have been fitted on another."""
    logged = mlmodel.columns(source)
    return logged if logged is not None and sorted(logged) == sorted(names) else tuple(names)


def steps(estimator: Any) -> Iterator[Any]:
    """It, and the steps of a pipeline, and of those inside."""
    yield estimator
    for _, step in getattr(estimator, "steps", ()):
        yield from steps(step)


def find_text_fills(estimator: Any, source: SourceModel, inputs: Sequence[TensorSpec]) -> dict[str, dict[str, str]]:
    """What missing texts are filled in with, as `prediction_format` says it."""
    texts = [spec.name for spec in inputs if spec.dtype == "str"]
    return find_fills(estimator, _example_frame(source, inputs), texts) if texts else {}


def example_columns(
    estimator: Any, source: SourceModel, inputs: Sequence[TensorSpec], *, as_given: bool = False
) -> dict[str, Any]:
    """The logged example, column by column, with missing texts filled in; numbers `as_given`, or in the inputs' type.
    Raises SourceError where there is none, or a text of it is missing that is not filled in."""
    raw, fills = _example_frame(source, inputs), find_text_fills(estimator, source, inputs)
    columns = {}
    for spec in inputs:
        values = raw[spec.name].to_numpy()
        if spec.name in fills:
            values = fill_texts(values, fills[spec.name])
        if values.dtype.kind in "mM":
            raise SourceError(
                f"its column {spec.name!r} holds dates or times, which ONNX has not",
                fix="compute numbers of them before the model, and log the model that takes those",
                where=source.uri,
            )
        if spec.dtype == "str" and not all(isinstance(value, str) for value in values):
            raise SourceError(
                f"its column {spec.name!r} holds something else than text, or nothing",
                fix="fill missing texts in before the model, or in it by an imputer that fills NaN in, as "
                "SimpleImputer(strategy='most_frequent') does",
                where=source.uri,
            )
        number = values.dtype if as_given and values.dtype.kind in "biuf" else spec.dtype
        dtype = object if spec.dtype == "str" else number
        columns[spec.name] = values.astype(dtype).reshape(-1, 1)
    return columns


def _example_frame(source: SourceModel, inputs: Sequence[TensorSpec]) -> Any:
    """The logged example as a data frame of the inputs' columns. Raises SourceError where there is none."""
    raw = mlmodel.raw_example(source)
    if not hasattr(raw, "columns") or any(spec.name not in raw for spec in inputs):
        raise SourceError(
            "its columns hold text, and it was logged without a data frame of them as its input example",
            fix="log it with input_example=frame.head(20)",
            where=source.uri,
        )
    return raw[[spec.name for spec in inputs]]
