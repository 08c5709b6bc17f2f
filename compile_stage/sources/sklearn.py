"""scikit-learn: estimators and pipelines, saved by skops; pickles where the policy allows them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.sources import graph, mlmodel, saved, tabular
from compile_stage.sources.known_categories import known_categories, refuse_dropped, refuse_rounded
from compile_stage.sources.session import SourceSession
from compile_stage.sources.sklearn_agreement import refuse_answers
from compile_stage.sources.sklearn_boosters import BOOSTERS, refuse_boosters
from compile_stage.sources.sklearn_categories import refuse_categories
from compile_stage.sources.sklearn_chains import refuse_chains
from compile_stage.sources.sklearn_conversion import convert
from compile_stage.sources.sklearn_corrections import (
    last_step,
    refuse_what_runs_nowhere,
    without_search,
)
from compile_stage.sources.sklearn_decisions import refuse_calibration, refuse_decisions
from compile_stage.sources.sklearn_expansions import refuse_expansions
from compile_stage.sources.sklearn_functions import refuse_functions
from compile_stage.sources.sklearn_labels import refuse_large_labels, refuse_thresholds
from compile_stage.sources.sklearn_samplers import without_samplers
from compile_stage.sources.sklearn_signature import (
    ask_answer,
    column_names,
    example_columns,
    find_text_fills,
    framer,
    has_columns,
    matrix_columns,
    read_signature,
    steps,
)
from compile_stage.sources.sklearn_targets import refuse_targets
from compile_stage.sources.sklearn_texts import name_missing
from compile_stage.sources.sklearn_words import refuse_words

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

# Their `predict` is the class of highest probability, by their own code. For these the baseline computes the
# probabilities once and takes the labels from them, as a skilled user would; calling both methods would make every
# compiled model look twice as fast as it is.
_LABEL_IS_LIKELIEST = re.compile(
    "DecisionTreeClassifier|ExtraTreeClassifier|ExtraTreesClassifier|RandomForestClassifier|GradientBoostingClassifier|"
    "HistGradientBoostingClassifier|XGBClassifier|XGBRFClassifier|LGBMClassifier|LogisticRegression|LogisticRegressionCV|GaussianNB|MultinomialNB|BernoulliNB|ComplementNB"
)

# Packages whose models follow scikit-learn's interface, and what is compiled of them.
_BY_ITSELF = {
    "catboost": "mlflow.catboost.log_model(model, ...)",
    "skorch": "mlflow.pytorch.log_model(model.module_.eval(), ...)",
    "scikeras": "mlflow.keras.log_model(model.model_, ...)",
}


_just_converted: dict[tuple[str, str, str], Any] = {}
"""Identity of a source → what it is converted to, of the one that was inspected last: where the same worker exports it
next, a forest of 300 deep trees is converted once (15 s) and not twice. `export` takes it out, since it changes it."""


class SklearnSource(Exporter):
    """Models that `mlflow.sklearn` logged."""

    name = "sklearn"
    requires = ("sklearn", "skl2onnx", "skops")
    extra = "sklearn"
    framework = "scikit-learn"
    capabilities = SourceCapabilities(computes_wider=True, asked_on_one_thread=True, planned_by_graph=True)

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
        wanted = read_signature(estimator, source)
        demand_shapes(wanted, shapes, source)
        model = _just_converted.pop(source.identity, None) or convert(estimator, wanted, source)
        repairs: list[tuple[str, tabular.Repair]] = []
        column: tabular.Repair
        for spec, value in zip(wanted.outputs, graph.signature_of(model).outputs, strict=False):
            column = "column" if spec.shape[1:] == (1,) and spec.name == tabular.PREDICTION else "keep"
            repairs.append((value.name, "flatten" if len(spec.shape) == 1 else column))
        if has_columns(wanted):
            tabular.standardize_columns(model, wanted, repairs)
        else:
            tabular.standardize(model, wanted, repairs)
        return graph.finish(model, source, shapes, into)

    def example(self, source: SourceModel) -> Batch | None:
        estimator = _load(source)
        signature = read_signature(estimator, source)
        if has_columns(signature):
            return example_columns(estimator, source, signature.inputs, as_given=True)
        return mlmodel.named_example(source, signature, as_given=True)

    def categories(self, source: SourceModel) -> Mapping[str, Mapping[int, Sequence[Any]]]:
        estimator = _load(source)
        known = known_categories(estimator)
        if not known:
            return {}
        signature = read_signature(estimator, source)
        if has_columns(signature):
            return {spec.name: {0: known[at]} for at, spec in enumerate(signature.inputs) if at in known}
        if names := column_names(estimator):
            places = matrix_columns(names, source)
            known = {places.index(names[at]): values for at, values in known.items()}
        return {tabular.INPUT: known}

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        estimator = _load(source)
        fitted = _fitted_names(estimator)
        wanted = read_signature(estimator, source)
        found = find_text_fills(estimator, source, wanted.inputs)
        fills = {"fills": found} if found else {}
        if _predict_fn(source) == "predict_proba":
            answer = ask_answer(estimator, wanted.inputs, source, "predict_proba", as_given=True)
            return {**tabular.prediction_format(source, [tabular.PROBABILITIES], answer, fitted=fitted), **fills}
        name, labels = wanted.outputs[0].name, getattr(estimator, "classes_", None)
        if name != tabular.LABEL or labels is None or len(wanted.outputs[0].shape) > 1:
            labels = ask_answer(estimator, wanted.inputs, source, as_given=True)
        return {**tabular.prediction_format(source, [name], labels, fitted=fitted), **fills}

    def packages(self) -> Mapping[str, str]:
        of_boosters = ("onnxmltools", "xgboost", "xgboost-cpu", "lightgbm")
        return package_versions("scikit-learn", "skl2onnx", "onnx", *of_boosters)


@contextmanager
def _open(source: SourceModel, target: Target, *, as_given: bool = False) -> Iterator[Session]:
    estimator = _load(source)
    limit_jobs(estimator, target.threads)
    signature = read_signature(estimator, source)
    as_frame = framer(estimator, signature, source, as_given=as_given)
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
    held = saved.load(_file(source), _format(source), source, logged_with)
    return name_missing(without_samplers(without_search(held)))


# ----------------------------------------------------------------------------------------------------------- estimators


def _refuse_estimator(estimator: Any, source: SourceModel) -> str | None:
    if not hasattr(estimator, "predict"):
        return f"{type(estimator).__name__} has no predict()"
    model = last_step(estimator)
    if (logged := _BY_ITSELF.get(type(model).__module__.partition(".")[0])) is not None:
        return (
            f"skl2onnx does not convert its {type(model).__name__}: log that by itself, with {logged}, and call the "
            "steps before it where it is called"
        )
    # A function may make columns of its own: what is read of the steps behind it does not fit the signature then.
    if reason := refuse_functions(estimator) or _refuse_other_columns(estimator, source):
        return reason
    signature = read_signature(estimator, source)
    if reason := refuse_categories(estimator):
        return reason
    if reason := refuse_decisions(estimator):
        return reason
    if reason := refuse_rounded(estimator) or refuse_dropped(estimator):
        return reason
    if reason := refuse_calibration(estimator) or refuse_boosters(estimator):
        return reason
    if reason := refuse_targets(estimator) or refuse_thresholds(estimator) or refuse_large_labels(estimator):
        return reason
    if reason := refuse_words(estimator) or refuse_what_runs_nowhere(estimator):
        return reason
    if reason := refuse_chains(estimator) or refuse_expansions(estimator):
        return reason
    method = _predict_fn(source)
    if method not in ("predict", "predict_proba") or (method != "predict" and len(signature.outputs) < 2):
        return f"its pyfunc answers with {method}(), which is not compiled: log it with pyfunc_predict_fn='predict'" + (
            " or 'predict_proba'" if len(signature.outputs) > 1 else ""
        )
    converted = convert(estimator, signature, source)
    reason = refuse_answers(estimator, signature, source, converted) or (
        None if has_columns(signature) else _refuse_names(estimator, signature, source)
    )
    _just_converted.clear()
    if reason is None:
        _just_converted[source.identity] = converted
    return reason


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
            expected = estimator.predict(framer(estimator, signature, source)([rows]))
        except Exception:  # noqa: BLE001 - rows of our own are no rows of its: nothing can be said
            return None
        try:
            found = estimator.predict(pd.DataFrame(rows, columns=logged))
        except Exception:  # noqa: BLE001 - whatever a step raises for names that it was not fitted on
            return tabular.refuse_names(source, fitted)
    by_name = not column_names(estimator) and any(isinstance(step, ColumnTransformer) for step in steps(estimator))
    if not by_name and np.array_equal(np.asarray(found), np.asarray(expected)):
        return None
    return (
        "a step picks its columns by name in a way that is not compiled, and its signature has them in another order "
        "than it was fitted on: log it with the signature of the data frame that it was fitted on"
    )


def _predict_fn(source: SourceModel) -> str:
    """The method that the pyfunc calls (`pyfunc_predict_fn` of `mlflow.sklearn.log_model`)."""
    return str(mlmodel.flavor(source, "python_function").get("predict_fn") or "predict")


def _target_shape(signature: Signature, rows: int) -> tuple[int, ...]:
    return (rows, *(int(size) for size in signature.outputs[0].shape[1:]))


def limit_jobs(estimator: Any, threads: int) -> None:
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
