"""scikit-learn: estimators and pipelines, saved by skops; pickles where the policy allows them."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.prediction_io import fill_texts
from compile_stage.sources import encoders, graph, mlmodel, saved, tabular
from compile_stage.sources.session import SourceSession
from compile_stage.sources.sklearn_boosters import (
    BOOSTERS,
    boosters,
    refuse_boosters,
    register_converters,
    takers_of_sparse,
)
from compile_stage.sources.sklearn_converted import (
    calibrated_scores,
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
    refuse_calibration,
    refuse_neighbours_in_gaps,
    scale_exactly,
    scalers_before_trees,
    thresholds_rounded_down,
    without_search,
    write_logarithms,
)
from compile_stage.sources.sklearn_functions import refuse_functions, register_functions
from compile_stage.sources.sklearn_imputers import register_imputers
from compile_stage.sources.sklearn_labels import refuse_thresholds, register_label_converters
from compile_stage.sources.sklearn_missing import write_missing_directions
from compile_stage.sources.sklearn_neighbours import weigh_neighbours
from compile_stage.sources.sklearn_parts import parts
from compile_stage.sources.sklearn_targets import refuse_targets, register_target_converter
from compile_stage.sources.sklearn_texts import find_fills
from compile_stage.sources.sklearn_words import pad_with_no_word, refuse_words, word_options, write_sublinear_counts

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

# Their `predict` is the class of highest probability, by their own code. For these the baseline computes the
# probabilities once and takes the labels from them, as a skilled user would; calling both methods would make every
# compiled model look twice as fast as it is.
_LABEL_IS_LIKELIEST = re.compile(
    "DecisionTreeClassifier|ExtraTreeClassifier|ExtraTreesClassifier|RandomForestClassifier|GradientBoostingClassifier|"
    "HistGradientBoostingClassifier|XGBClassifier|XGBRFClassifier|LGBMClassifier|LogisticRegression|LogisticRegressionCV|GaussianNB|MultinomialNB|BernoulliNB|ComplementNB"
)


class SklearnSource(Exporter):
    """Models that `mlflow.sklearn` logged."""

    name = "sklearn"
    requires = ("sklearn", "skl2onnx", "skops")
    extra = "sklearn"
    framework = "scikit-learn"
    capabilities = SourceCapabilities(computes_wider=True, asked_on_one_thread=True)

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        path = _file(source)
        if (reason := mlmodel.missing_file(path, source)) is not None:
            return reason
        if (reason := saved.refuse(path, _format(source), _trusted(source), compliance, BOOSTERS)) is not None:
            return reason
        try:
            return _refuse_estimator(_load(source), source)
        except SourceError as error:
            return error.reason

    def open(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        return _open(source, target)

    def open_as_given(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        return _open(source, target, as_given=True)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        estimator = _load(source)
        wanted = _signature(estimator, source)
        demand_shapes(wanted, shapes, source)
        model = _convert(estimator, wanted, source)
        repairs: list[tuple[str, tabular.Repair]] = []
        column: tabular.Repair
        for spec, value in zip(wanted.outputs, graph.signature_of(model).outputs, strict=False):
            column = "column" if spec.shape[1:] == (1,) and spec.name == tabular.PREDICTION else "keep"
            repairs.append((value.name, "flatten" if len(spec.shape) == 1 else column))
        if _has_columns(wanted):
            tabular.standardize_columns(model, wanted, repairs)
        else:
            tabular.standardize(model, wanted, repairs)
        return graph.finish(model, source, shapes, into)

    def example(self, source: SourceModel) -> Batch | None:
        estimator = _load(source)
        signature = _signature(estimator, source)
        if _has_columns(signature):
            return _example_columns(estimator, source, signature.inputs, as_given=True)
        return mlmodel.named_example(source, signature, as_given=True)

    def categories(self, source: SourceModel) -> Mapping[str, Mapping[int, Sequence[Any]]]:
        estimator = _load(source)
        known = encoders.known_categories(estimator)
        if not known:
            return {}
        signature = _signature(estimator, source)
        if _has_columns(signature):
            return {spec.name: {0: known[at]} for at, spec in enumerate(signature.inputs) if at in known}
        if names := _column_names(estimator):
            places = _matrix_columns(names, source)
            known = {places.index(names[at]): values for at, values in known.items()}
        return {tabular.INPUT: known}

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        estimator = _load(source)
        fitted = _fitted_names(estimator)
        wanted = _signature(estimator, source)
        found = _fills(estimator, source, wanted.inputs)
        fills = {"fills": found} if found else {}
        if _predict_fn(source) == "predict_proba":
            return {**tabular.prediction_format(source, [tabular.PROBABILITIES], fitted=fitted), **fills}
        name, labels = wanted.outputs[0].name, getattr(estimator, "classes_", None)
        if name == tabular.LABEL and labels is None:
            labels = _answer(estimator, wanted.inputs, source)
        return {**tabular.prediction_format(source, [name], labels, fitted=fitted), **fills}

    def packages(self) -> Mapping[str, str]:
        of_boosters = ("onnxmltools", "xgboost", "xgboost-cpu", "lightgbm")
        return package_versions("scikit-learn", "skl2onnx", "onnx", *of_boosters)


@contextmanager
def _open(source: SourceModel, target: Target, *, as_given: bool = False) -> Iterator[Session]:
    estimator = _load(source)
    _limit_jobs(estimator, target.threads)
    signature = _signature(estimator, source)
    as_frame = _framer(estimator, signature, source, as_given=as_given)
    likeliest = _LABEL_IS_LIKELIEST.fullmatch(type(last_step(estimator)).__name__) is not None
    with tabular.limited_threads(target.threads), warnings.catch_warnings():
        # The model may have been fitted on a data frame; the baseline gets the bare matrix, which is faster.
        warnings.filterwarnings("ignore", message="X does not have valid feature names")

        def call(arrays: Sequence[Any]) -> Sequence[Any]:
            rows = as_frame(arrays)
            if len(signature.outputs) == 1:
                return [estimator.predict(rows).reshape(_target_shape(signature, len(arrays[0])))]
            found = estimator.predict_proba(rows)
            if likeliest:
                return [estimator.classes_.take(found.argmax(axis=1)), found]
            return [estimator.predict(rows), found]

        yield SourceSession(signature, call, partial(tabular.as_predict_gets, source) if as_given else None)


# ------------------------------------------------------------------------------------------------------------- loading


def _file(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "sklearn").get("pickled_model") or "model.pkl")


def _format(source: SourceModel) -> str:
    return str(mlmodel.flavor(source, "sklearn").get("serialization_format") or "pickle")


def _trusted(source: SourceModel) -> list[str]:
    return [str(name) for name in mlmodel.flavor(source, "sklearn").get("skops_trusted_types") or ()]


def _load(source: SourceModel) -> Any:
    logged_with = f"scikit-learn {mlmodel.flavor(source, 'sklearn').get('sklearn_version', 'of an unknown version')}"
    return without_search(saved.load(_file(source), _format(source), source, logged_with))


# ----------------------------------------------------------------------------------------------------------- estimators


def _refuse_estimator(estimator: Any, source: SourceModel) -> str | None:
    if not hasattr(estimator, "predict"):
        return f"{type(estimator).__name__} has no predict()"
    if reason := _refuse_other_columns(estimator, source):
        return reason
    signature = _signature(estimator, source)
    categorical = (getattr(step, "is_categorical_", None) for step in _steps(estimator))
    if any(columns is not None and any(columns) for columns in categorical):
        return (
            "skl2onnx converts no categorical_features of a HistGradientBoosting model: encode these columns in a step "
            "before it (OneHotEncoder, OrdinalEncoder), and fit it without categorical_features"
        )
    if type(last_step(estimator)).__name__ == "OneVsRestClassifier" and not hasattr(estimator, "predict_proba"):
        return (
            "skl2onnx converts a OneVsRestClassifier of models without probabilities to other labels: use one with "
            "probabilities, such as LogisticRegression, or one that takes several classes by itself, as SVC does"
        )
    if reason := encoders.refuse_rounded(estimator) or encoders.refuse_dropped(estimator):
        return reason
    if reason := refuse_calibration(estimator) or refuse_boosters(estimator):
        return reason
    if reason := refuse_targets(estimator) or refuse_thresholds(estimator):
        return reason
    if reason := refuse_words(estimator) or refuse_functions(estimator) or refuse_neighbours_in_gaps(estimator):
        return reason
    method = _predict_fn(source)
    if method not in ("predict", "predict_proba") or (method != "predict" and len(signature.outputs) < 2):
        return f"its pyfunc answers with {method}(), which is not compiled: log it with pyfunc_predict_fn='predict'" + (
            " or 'predict_proba'" if len(signature.outputs) > 1 else ""
        )
    converted = _convert(estimator, signature, source)
    return _refuse_answers(estimator, signature, source, converted) or (
        None if _has_columns(signature) else _refuse_names(estimator, signature, source)
    )


def _fitted_names(estimator: Any) -> list[str]:
    return [str(name) for name in getattr(estimator, "feature_names_in_", ())]


def _refuse_other_columns(estimator: Any, source: SourceModel) -> str | None:
    """The reason when the signature has more or fewer columns than the fit. A ColumnTransformer takes a data frame
    without the columns that it drops, or with further ones; a graph takes all of those that it was fitted on, and
    MLflow hands on those of the signature alone."""
    logged, features = mlmodel.columns(source), getattr(estimator, "n_features_in_", None)
    if logged is None or features is None or len(logged) == int(features):
        return None
    fitted = _fitted_names(estimator)
    lacks = [name for name in fitted if name not in logged]
    more = [name for name in logged if name not in fitted] if fitted else []
    named = [f"{word} {', '.join(map(repr, of[:5]))}" for word, of in (("lacks", lacks), ("also has", more)) if of]
    which = f" (the signature {' and '.join(named)})" if named else ""
    return (
        f"its signature has {len(logged)} columns, and a compiled model takes the {features} of the fit{which}: log it "
        "with the signature of the data frame that it was fitted on, or fit it on the signature's columns alone"
    )


def _refuse_names(estimator: Any, signature: Signature, source: SourceModel) -> str | None:
    """The reason when the estimator refuses a data frame with the signature's columns, or answers it otherwise than the
    matrix that is compiled. Which steps compare the names, or pick columns by them, it alone knows: so it is asked,
    where the signature has other names or another order than the fit. A ColumnTransformer that was fitted on a data
    frame picks by name always, where it was given numbers of columns too."""
    import numpy as np
    import pandas as pd
    from sklearn.compose import ColumnTransformer

    fitted = _fitted_names(estimator)
    logged = list(mlmodel.columns(source) or ())
    if len(fitted) != len(logged) or logged == fitted:
        return None
    rows = np.random.default_rng(0).normal(size=(64, len(fitted))).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = estimator.predict(_framer(estimator, signature, source)([rows]))
        except Exception:  # noqa: BLE001 - rows of our own are no rows of its: nothing can be said
            return None
        try:
            found = estimator.predict(pd.DataFrame(rows, columns=logged))
        except Exception:  # noqa: BLE001 - whatever a step raises for names that it was not fitted on
            return tabular.refuse_names(source, fitted)
    by_name = not _column_names(estimator) and any(isinstance(step, ColumnTransformer) for step in _steps(estimator))
    if not by_name and np.array_equal(np.asarray(found), np.asarray(expected)):
        return None
    return (
        "a step picks its columns by name in a way that is not compiled, and its signature has them in another order "
        "than it was fitted on: log it with the signature of the data frame that it was fitted on"
    )


def _predict_fn(source: SourceModel) -> str:
    """The method that the pyfunc calls (`pyfunc_predict_fn` of `mlflow.sklearn.log_model`)."""
    return str(mlmodel.flavor(source, "python_function").get("predict_fn") or "predict")


def _signature(estimator: Any, source: SourceModel) -> Signature:
    from sklearn.base import is_classifier, is_regressor

    features = getattr(estimator, "n_features_in_", None)
    if features is None:
        first = next((step for step in _steps(estimator) if hasattr(step, "build_analyzer")), None)
        if first is not None:
            kind = type(first).__name__
            raise SourceError(
                f"its {kind} reads a list of texts, and columns alone are compiled",
                fix=f"put it into ColumnTransformer([('text', {kind}(), 'text')]), and fit that on a data frame",
                where=source.uri,
            )
        raise SourceError("it is not fitted, or does not say how many features it takes", where=source.uri)
    inputs = _inputs(estimator, source, int(features))
    if is_classifier(estimator):
        classes = getattr(estimator, "classes_", ())
        if isinstance(classes, list) or _has_several_labels(last_step(estimator)):
            raise SourceError("it predicts several labels at once, which is not supported", where=source.uri)
        outputs = [tabular.label(tabular.label_dtype(classes, source))]
        if hasattr(estimator, "predict_proba"):
            outputs.append(tabular.probabilities(len(classes)))
        return Signature(inputs=inputs, outputs=tuple(outputs))
    answer = _answer(estimator, inputs, source)
    if not is_regressor(estimator) and answer.ndim == 1 and answer.dtype.kind == "i":  # clusters, or outliers
        outputs = [tabular.label("int64")]
        if hasattr(estimator, "predict_proba"):  # of mixtures
            outputs.append(tabular.probabilities(_answer(estimator, inputs, source, "predict_proba").shape[1]))
        return Signature(inputs=inputs, outputs=tuple(outputs))
    targets, column = (answer.shape[1], True) if answer.ndim > 1 else (1, False)
    return Signature(inputs=inputs, outputs=(tabular.prediction(targets, column=column),))


def _has_several_labels(model: Any) -> bool:
    """Of a classifier whose classes do not say it: whether each row may have several of them."""
    binarizer = getattr(model, "label_binarizer_", getattr(model, "_label_binarizer", None))
    return str(getattr(binarizer, "y_type_", "")).startswith("multilabel")


def _answer(estimator: Any, inputs: tuple[TensorSpec, ...], source: SourceModel, method: str = "predict") -> Any:
    """What it answers to two rows of zeros, or to the example where an encoder refuses zeros; for the shape and the
    type of its answers. Raises SourceError where it refuses both."""
    import numpy as np

    signature = Signature(inputs=inputs, outputs=())
    ask = getattr(estimator, method)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        if _has_columns(signature):
            return np.asarray(
                ask(_framer(estimator, signature, source)(list(_example_columns(estimator, source, inputs).values())))
            )
        as_frame = _framer(estimator, signature, source)
        try:
            return np.asarray(ask(as_frame([np.zeros((2, int(inputs[0].shape[1])), np.float32)])))
        except ValueError as error:  # an encoder that knows no 0
            example = mlmodel.named_example(source, signature, as_given=True)
            if example is None:
                raise SourceError(
                    f"it refuses rows of zeros ({first_line(error)}), and was logged without an input example",
                    fix="log it with input_example=..., some rows that it takes",
                    where=source.uri,
                ) from error
            as_frame = _framer(estimator, signature, source, as_given=True)
            return np.asarray(ask(as_frame(list(example.values()))))


def _inputs(estimator: Any, source: SourceModel, features: int) -> tuple[TensorSpec, ...]:
    """One matrix; or, where columns hold text, one tensor for each column, under its name."""
    text = mlmodel.text_columns(source)
    if not text:
        return tabular.signature(features, ()).inputs
    names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
    if len(names) != features or set(text) - set(names):
        raise SourceError(
            f"its columns {', '.join(text[:5])} hold text, and it does not know its columns by name",
            fix="fit it on a data frame, with a ColumnTransformer that picks columns by name",
            where=source.uri,
        )
    return tuple(
        TensorSpec(name=name, dtype="str" if name in text else "float32", shape=(graph.BATCH, 1)) for name in names
    )


def _has_columns(signature: Signature) -> bool:
    """Whether the inputs are columns, and not one matrix."""
    return len(signature.inputs) > 1 or signature.inputs[0].name != tabular.INPUT


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


def _fills(estimator: Any, source: SourceModel, inputs: Sequence[TensorSpec]) -> dict[str, dict[str, str]]:
    """What missing texts are filled in with, as `prediction_format` says it."""
    texts = [spec.name for spec in inputs if spec.dtype == "str"]
    return find_fills(estimator, _example_frame(source, inputs), texts) if texts else {}


def _example_columns(
    estimator: Any, source: SourceModel, inputs: Sequence[TensorSpec], *, as_given: bool = False
) -> dict[str, Any]:
    """The logged example, column by column, with missing texts filled in; numbers `as_given`, or in float32. Raises
    SourceError where there is none, or a text of it is missing that is not filled in."""
    raw, fills = _example_frame(source, inputs), _fills(estimator, source, inputs)
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
        number = values.dtype if as_given and values.dtype.kind in "biuf" else "float32"
        dtype = object if spec.dtype == "str" else number
        columns[spec.name] = values.astype(dtype).reshape(-1, 1)
    return columns


def _refuse_answers(estimator: Any, signature: Signature, source: SourceModel, converted: Any) -> str | None:
    """The reason when the converted graph answers the logged example otherwise than the original: what splits texts, or
    encodes them, is not converted alike in every case, and some models are converted to something else.

    Of numbers, most rows must be far off: how much rounding may change is for the policy's tolerances.
    """
    import numpy as np
    import onnxruntime

    texts = _has_columns(signature)
    inputs = (
        _example_columns(estimator, source, signature.inputs) if texts else mlmodel.named_example(source, signature)
    )
    if inputs is None or signature.refuse(inputs) is not None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = list(_both_answers(estimator, signature, source, inputs))
        except Exception:
            if texts:
                raise
            return None  # an example that the original itself refuses says nothing of the graph
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is said in the reason
    try:
        session = onnxruntime.InferenceSession(
            converted.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        fed = dict(zip((value.name for value in session.get_inputs()), inputs.values(), strict=True))
        found = session.run(None, fed)
    except Exception as error:  # noqa: BLE001 - whatever the runtime says of a graph that it can't take
        if "locale" in str(error):
            return (
                "ONNX Runtime can't run what it is converted to without the locale en_US.UTF-8: install it here, and "
                "where the model is served (package locales, `locale-gen en_US.UTF-8`), or split texts before the model"
            )
        return f"ONNX Runtime can't run what it is converted to: {first_line(error)}"
    rtol, atol, most = (1e-3, 1e-4, 0.0) if texts else (0.01, None, 0.5)
    for spec, one, *others in zip(signature.outputs, found, *expected, strict=False):
        apart = [_rows_apart(np.asarray(one), np.asarray(other), rtol, atol) for other in others]
        if np.logical_and.reduce(apart).mean() > most:
            way = (
                "run its first steps before the model, and log the model that takes what they give"
                if hasattr(estimator, "steps")
                else "use another estimator, or convert it yourself, and log that with mlflow.onnx"
            )
            return f"skl2onnx does not convert it exactly: its {spec.name} of rows of the logged example differ: {way}"
    return None


def _both_answers(estimator: Any, signature: Signature, source: SourceModel, rounded: Batch) -> Iterator[list[Any]]:
    """What the original answers to the example with its numbers rounded to float32, and as predict() is given it. The
    graph's numbers are rounded too, but so are its thresholds: where one is a value of the training data, the graph may
    answer as the original does to the number that is not rounded."""
    given: Batch | None
    if _has_columns(signature):
        given = _example_columns(estimator, source, signature.inputs, as_given=True)
    else:
        given = mlmodel.named_example(source, signature, as_given=True)
    given = rounded if given is None else given  # there is one where there is a rounded one
    for inputs, keeps_type in ((rounded, False), (tabular.as_predict_gets(source, given), True)):
        rows = _framer(estimator, signature, source, as_given=keeps_type)(list(inputs.values()))
        answers = [estimator.predict(rows)]
        if len(signature.outputs) > 1:
            answers.append(estimator.predict_proba(rows))
        yield answers


def _rows_apart(one: Any, other: Any, rtol: float, atol: float | None) -> Any:
    """For each row whether an answer differs from the other, [rows] in bool. `atol` is by default that share, `rtol`,
    of the other's largest number."""
    import numpy as np

    if one.size != other.size:
        return np.ones(len(other), bool)
    one, other = one.reshape(len(other), -1), other.reshape(len(other), -1)
    if other.dtype.kind == "f":
        atol = rtol * float(np.nanmax(np.abs(other), initial=0.0)) if atol is None else atol
        return ~np.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True).all(axis=1)
    return (one != other).any(axis=1)


def _target_shape(signature: Signature, rows: int) -> tuple[int, ...]:
    return (rows, *(int(size) for size in signature.outputs[0].shape[1:]))


def _convert(estimator: Any, wanted: Signature, source: SourceModel) -> Any:
    """The converter's own ONNX model. Raises SourceError with the step that has no converter."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from skl2onnx.common.exceptions import MissingConverter, MissingShapeCalculator
    from sklearn.base import is_classifier
    from sklearn.compose import ColumnTransformer
    from sklearn.svm import LinearSVC

    prepare(estimator)
    features = int(wanted.inputs[0].shape[1])
    names = () if _has_columns(wanted) else _column_names(estimator)
    picks = any(isinstance(step, ColumnTransformer) for step in _steps(estimator))
    is_given_float32 = tabular.is_given_float32(source)
    by_name = names if picks else ()
    by_number = bool(names) and not by_name
    types = (
        [(name, FloatTensorType([None, 1])) for name in by_name]
        if by_name
        else [(tabular.INPUT, FloatTensorType([None, features]))]
    )
    if _has_columns(wanted):
        kinds = {"str": StringTensorType, "float32": FloatTensorType}
        types = [(spec.name, kinds[spec.dtype]([None, 1])) for spec in wanted.inputs]
    has_probabilities = any(spec.name == tabular.PROBABILITIES for spec in wanted.outputs)
    # Without this option a converter writes a list of dicts, also where there are no probabilities. That of LinearSVC
    # knows no such option, and must be given one that it knows.
    last = last_step(estimator)
    known = "nocl" if isinstance(last, LinearSVC) else "zipmap"
    options: dict[int, dict[str, Any]] = (
        {id(estimator): {"zipmap": False}} if has_probabilities else {id(last): {known: False}}
    )
    if not is_classifier(estimator):
        options = {}
    options |= calibrated_scores(estimator)
    if boosters(estimator):
        with takers_of_sparse(estimator) as fed_sparse:
            _answer(estimator, wanted.inputs, source)
        register_converters(estimator, fed_sparse, is_given_float32=is_given_float32)
    register_target_converter(estimator)
    register_label_converters(estimator)
    register_imputers(estimator)
    register_functions(estimator)
    encoders.register_encoders(estimator)
    options |= word_options(estimator)
    options |= scalers_before_trees(estimator, is_given_float32=is_given_float32)
    try:
        with (
            warnings.catch_warnings(),
            columns_by_number(estimator) if by_number else nullcontext(),
            thresholds_rounded_down(estimator, is_given_float32=is_given_float32),
        ):
            warnings.simplefilter("ignore")  # deprecations inside the converter
            model = to_onnx(estimator, initial_types=types, options=options, target_opset=tabular.opsets())
    except (MissingConverter, MissingShapeCalculator) as error:
        raise SourceError(
            f"{_blamed(error, estimator)} has no converter to ONNX",
            fix="replace that step; or, where skl2onnx can be given a converter for it (update_registered_converter), "
            "convert the model yourself, and log that with mlflow.onnx",
            where=source.uri,
        ) from error
    except Exception as error:
        step = _step_of(error) or type(last_step(estimator)).__name__
        problem = f"skl2onnx can't convert {step}: {first_line(error).partition(' You may raise')[0].rstrip('.')}"
        fix = (
            "" if mlmodel.read(source).inputs else "log it with a signature: without, every column is taken for numbers"
        )
        if step == "SimpleImputer" and _has_columns(wanted):
            fix = (
                "give the imputer of text columns strategy='most_frequent', or 'constant' with a text as fill_value, "
                "and neither add_indicator nor missing_values of its own; or fill missing texts in before the model"
            )
        elif _has_columns(wanted) and not picks:
            kind = type(last_step(estimator)).__name__
            fix = f"put what encodes text before it: make_pipeline(ColumnTransformer(...), {kind}(...))"
        raise SourceError(problem, fix=fix, where=source.uri) from error
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
    scale_exactly(model, estimator, is_given_float32=is_given_float32)
    if by_name:
        tabular.join_columns(model, _matrix_columns(by_name, source))
    elif by_number and (ordered := _matrix_columns(names, source)) != names:
        tabular.pick_columns(model, [ordered.index(name) for name in names])
    tabular.without_ml_operators(model)
    return model


def _step_of(error: Exception) -> str | None:
    """The class of the step at which skl2onnx failed: whose converter, or shapes, it was in, if in any."""
    converted = [frame.f_locals.get("operator") for frame, _ in traceback.walk_tb(error.__traceback__)]
    steps = [step for step in (getattr(operator, "raw_operator", None) for operator in converted) if step is not None]
    return type(steps[-1]).__name__ if steps else None


def _blamed(error: Exception, estimator: Any) -> str:
    match = re.search(r"type '<class '([\w.]+)'>'", str(error)) or re.search(r"<class '([\w.]+)'>", str(error))
    return match[1].rpartition(".")[2] if match else type(estimator).__name__


def _column_names(estimator: Any) -> tuple[str, ...]:
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


def _steps(estimator: Any) -> Iterator[Any]:
    yield estimator
    for _, step in getattr(estimator, "steps", ()):
        yield from _steps(step)


def _matrix_columns(names: Sequence[str], source: SourceModel) -> tuple[str, ...]:
    """The names of the matrix's columns in order. Samples and requests come in the order of the model's signature; what
    picks columns by name may have been fitted on another."""
    logged = mlmodel.columns(source)
    return logged if logged is not None and sorted(logged) == sorted(names) else tuple(names)


def _framer(estimator: Any, signature: Signature, source: SourceModel, *, as_given: bool = False) -> Any:
    """The inputs' arrays → what the estimator takes: a data frame when a step picks columns by name.

    Args:
        as_given: Leave a matrix in the type that it has.
    """
    if _has_columns(signature):
        import pandas as pd

        given = [spec.name for spec in signature.inputs]
        return lambda arrays: pd.DataFrame({name: array[:, 0] for name, array in zip(given, arrays, strict=True)})
    # A clusterer refuses rows of another type than its centers.
    dtype = getattr(getattr(last_step(estimator), "cluster_centers_", None), "dtype", None if as_given else "float32")
    names = _column_names(estimator)
    if not names:
        return lambda arrays: arrays[0].astype(dtype or arrays[0].dtype, copy=False)
    import pandas as pd

    ordered = list(_matrix_columns(names, source))
    return lambda arrays: pd.DataFrame(arrays[0].astype(dtype or arrays[0].dtype, copy=False), columns=ordered)


def _limit_jobs(estimator: Any, threads: int) -> None:
    """A model that was made to use several processes or threads uses as many as the policy says; one that was not stays
    as it is."""
    parameters = estimator.get_params(deep=True)
    wanted = {
        name: threads
        for name, value in parameters.items()
        if (name == "n_jobs" or name.endswith("__n_jobs")) and value not in (None, 1)
    }
    if wanted:
        estimator.set_params(**wanted)
