"""Models around a model that ask it for decision_function(): one class against the rest, pairs of classes, and
calibrations. skl2onnx asks for probabilities in many cases, which order the classes otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from compile_stage.sources.sklearn_corrections import last_step, thawed
from compile_stage.sources.sklearn_parts import parts

_INSTEAD = "use a LogisticRegression in its place, or one that takes several classes by itself, without"
_NOT_BY_PAIRS = (
    "BaggingClassifier",
    "NearestCentroid",
    "QuadraticDiscriminantAnalysis",
    "StackingClassifier",
    "VotingClassifier",
)

_NOT_BOOSTED = ("NuSVC", "SVC")
"""Their label is not that of the highest score."""

_NOT_BOOSTED_OF_TWO = ("LinearSVC", "RidgeClassifier", "RidgeClassifierCV")
"""Of two classes their scores are read as the probability of the second one."""


def refuse_decisions(estimator: Any) -> str | None:
    """The reason when skl2onnx asks a model for something else than scikit-learn does."""
    if type(last_step(estimator)).__name__ == "OneVsRestClassifier" and not hasattr(estimator, "predict_proba"):
        return (
            "skl2onnx converts a OneVsRestClassifier of models without probabilities to other labels: use one with "
            "probabilities, such as LogisticRegression, or one that takes several classes by itself, as SVC does"
        )
    if len(_fitted(estimator, "OneVsOneClassifier")) > 1:
        return (
            "it holds several OneVsOneClassifiers, and skl2onnx has all of them answer as the first one: use models "
            "that take several classes by themselves, as SVC and LogisticRegression do"
        )
    for part in _fitted(estimator, "OneVsRestClassifier"):
        for kind in map(_by_other_scores, part.estimators_):
            # Of two classes the second one is answered from a score of 0 on, which is a probability of 0.5 there.
            if kind and (len(part.estimators_) > 1 or kind != "SGDClassifier"):
                return (
                    "skl2onnx converts a OneVsRestClassifier to the class of the highest probability, and scikit-learn "
                    f"takes that of the highest decision_function() of its {kind}: {_INSTEAD} OneVsRestClassifier"
                )
    for part in _fitted(estimator, "AdaBoostClassifier"):
        kind = type(last_step(part.estimators_[0])).__name__
        if kind in _NOT_BOOSTED or (kind in _NOT_BOOSTED_OF_TWO and len(part.classes_) == 2):
            return (
                f"skl2onnx converts an AdaBoostClassifier of {kind} to other labels: use a LogisticRegression or a "
                "decision tree in its place"
            )
    for part in _fitted(estimator, "BaggingRegressor"):
        if _answers_several(part.estimators_[0], len(part.estimators_features_[0])):
            return (
                "skl2onnx does not convert a BaggingRegressor of several targets: fit it by "
                "MultiOutputRegressor(BaggingRegressor(...)), or use a RandomForestRegressor"
            )
    if any(type(part).__name__ == "RandomTreesEmbedding" for part in parts(estimator)):
        return (
            "it holds a RandomTreesEmbedding, which is not compiled: log the model that takes what it gives, and call "
            "it before the model"
        )
    for part in _fitted(estimator, "OneVsOneClassifier"):
        for model in part.estimators_:
            kind = type(last_step(model)).__name__
            if kind in _NOT_BY_PAIRS:
                return (
                    f"skl2onnx converts a OneVsOneClassifier of {kind} to other labels: {_INSTEAD} OneVsOneClassifier"
                )
    return None


def _answers_several(model: Any, features: int) -> bool:
    """Whether it answers each row with several numbers."""
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may have been fitted on a data frame
        answer = np.asarray(model.predict(np.zeros((1, features), np.float32)))
    return answer.ndim > 1 and answer.shape[1] > 1


def refuse_calibration(estimator: Any) -> str | None:
    """The reason when skl2onnx does not convert a calibrated classifier."""
    for part in parts(estimator):
        if type(part).__name__ == "_CalibratedClassifier":
            if part.method == "temperature":
                return (
                    "skl2onnx converts no calibration by a temperature: calibrate it with method='sigmoid', or log the "
                    "model without the calibration"
                )
            last, asked = last_step(part.estimator), hasattr(part.estimator, "decision_function")
            kind = type(last).__name__
            if kind in ("NearestCentroid", "QuadraticDiscriminantAnalysis") and asked:
                return (
                    f"skl2onnx converts no calibration by the decision_function() of a {kind}: log the model without "
                    "the calibration, or calibrate a LogisticRegression or a LinearDiscriminantAnalysis"
                )
            if kind in ("SVC", "NuSVC") and hasattr(last, "predict_proba"):
                return (
                    f"skl2onnx calibrates the probabilities of its {kind}, and scikit-learn its decision_function(): "
                    f"fit the {kind} without probability=True, which the calibration does not use"
                )
            if kind == "LinearSVC" and last is not thawed(part.estimator):
                return (
                    "skl2onnx converts no calibrated pipeline of a LinearSVC: put the steps before the calibration, as "
                    "in make_pipeline(StandardScaler(), CalibratedClassifierCV(LinearSVC()))"
                )
    return None


def raw_scores(estimator: Any) -> Mapping[int, dict[str, bool]]:
    """Options of skl2onnx by the id of the step that they are for. A calibration, and a model for two of the classes,
    takes decision_function() where there is one; the converters ask a classifier for it, and of a pipeline take the
    probabilities."""
    return {
        id(last_step(model)): {"raw_scores": True}
        for model in _asked(estimator)
        if hasattr(model, "steps") and hasattr(model, "decision_function")
    }


def _asked(estimator: Any) -> Iterator[Any]:
    for part in parts(estimator):
        if type(part).__name__ == "_CalibratedClassifier":
            yield part.estimator
    for part in _fitted(estimator, "OneVsOneClassifier"):
        yield from part.estimators_


def _fitted(estimator: Any, kind: str) -> list[Any]:
    return [part for part in parts(estimator) if type(part).__name__ == kind and hasattr(part, "estimators_")]


def _by_other_scores(model: Any) -> str | None:
    """Its kind, where the scores of several such models are ordered otherwise than their probabilities: those of an SVC
    are calibrated one by one, those of an SGDClassifier are often cut off at 0 and 1."""
    last = last_step(model)
    kind = type(last).__name__
    known = kind in ("SVC", "NuSVC", "BaggingClassifier", "SGDClassifier") and hasattr(model, "predict_proba")
    return kind if known and hasattr(model, "decision_function") else None
