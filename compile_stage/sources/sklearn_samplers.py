"""Samplers of imbalanced-learn, which change the rows of a fit and have no part in an answer."""

from __future__ import annotations

from typing import Any

from compile_stage.sources.sklearn_parts import parts


def without_samplers(estimator: Any) -> Any:
    """The estimator, with imbalanced-learn's pipelines in it made scikit-learn's, without their samplers (SMOTE,
    RandomUnderSampler).

    Their `predict` passes over each step that has `fit_resample` (`imblearn.pipeline.Pipeline._iter`), so the answers
    are the same; skl2onnx knows neither a sampler nor, within another pipeline, imbalanced-learn's class.
    """
    from sklearn.pipeline import Pipeline

    for part in list(parts(estimator)):
        kind = type(part)
        if (kind.__module__, kind.__name__) == ("imblearn.pipeline", "Pipeline"):
            part.steps = [(name, step) for name, step in part.steps if not hasattr(step, "fit_resample")]
            part.__class__ = Pipeline
    return estimator
