"""Models of imbalanced-learn, whose samplers change the rows of a fit and have no part in an answer."""

from __future__ import annotations

from typing import Any

from compile_stage.sources.sklearn_parts import parts

_ANSWERS = ("predict", "predict_proba", "decision_function")


def without_samplers(estimator: Any) -> Any:
    """The estimator, with what is imbalanced-learn's in it made scikit-learn's, which skl2onnx knows.

    A pipeline loses its samplers (SMOTE, RandomUnderSampler): `predict` passes over each step that has `fit_resample`
    (`imblearn.pipeline.Pipeline._iter`). An ensemble (BalancedRandomForestClassifier) becomes the one that it is a
    subclass of, where it answers by that one's methods.
    """
    from sklearn.pipeline import Pipeline

    for part in list(parts(estimator)):
        kind = type(part)
        if not kind.__module__.startswith("imblearn."):
            continue
        if issubclass(kind, Pipeline):
            part.steps = [(name, step) for name, step in part.steps if not hasattr(step, "fit_resample")]
            part.__class__ = Pipeline
            continue
        own = [base for base in kind.__mro__ if base.__module__.startswith("imblearn.")]
        ensemble = next((base for base in kind.__mro__ if base.__module__.startswith("sklearn.ensemble.")), None)
        if ensemble is not None and not any(name in vars(base) for base in own for name in _ANSWERS):
            part.__class__ = ensemble
    return estimator
