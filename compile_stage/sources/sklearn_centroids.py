"""NearestCentroid, which skl2onnx has no converter for."""

from __future__ import annotations

from typing import Any

from compile_stage.sources.sklearn_parts import parts


def register_centroid_converter(estimator: Any) -> None:
    """Have skl2onnx convert it, where the estimator holds one."""
    from skl2onnx import update_registered_converter
    from skl2onnx.common.shape_calculator import calculate_linear_classifier_output_shapes

    for kind in {type(part) for part in parts(estimator) if type(part).__name__ == "NearestCentroid"}:
        update_registered_converter(
            kind,
            "CompileStageNearestCentroid",
            calculate_linear_classifier_output_shapes,
            _convert,
            options={"zipmap": [True, False, "columns"], "nocl": [True, False], "output_class_labels": [False, True]},
        )


def _convert(scope: Any, operator: Any, container: Any) -> None:
    """By scikit-learn's own two ways: probabilities, and labels where the classes have unlike priors, come from
    distances in units of the spread within the classes (equation 18.2 of The Elements of Statistical Learning); where
    all priors are alike the label is that of the nearest centroid in the columns' own units."""
    import numpy as np
    from skl2onnx.algebra.onnx_ops import OnnxArgMax, OnnxArrayFeatureExtractor, OnnxReshapeApi13, OnnxSoftmax

    model, opset = operator.raw_operator, {"op_version": container.target_opset}
    rows = operator.inputs[0]
    spread = np.where(model.within_class_std_dev_ != 0, model.within_class_std_dev_, 1.0)
    scores = _scores(rows, model, spread, 2.0 * np.log(model.class_prior_), opset)
    alike = np.isclose(model.class_prior_, 1 / len(model.classes_)).all()
    nearest = _scores(rows, model, np.ones_like(spread), None, opset) if alike else scores
    place = OnnxArgMax(nearest, axis=1, keepdims=0, **opset)
    classes = model.classes_
    labels = classes.astype(np.int64) if classes.dtype.kind in "biuf" else np.array([str(one) for one in classes])
    label = OnnxArrayFeatureExtractor(labels.reshape(1, -1), place, **opset)
    outputs = operator.outputs
    OnnxReshapeApi13(label, np.array([-1], np.int64), output_names=outputs[:1], **opset).add_to(scope, container)
    OnnxSoftmax(scores, axis=1, output_names=outputs[1:2], **opset).add_to(scope, container)


def _scores(rows: Any, model: Any, spread: Any, prior: Any, opset: Any) -> Any:
    """[rows, classes], the larger the nearer: the negative square of each distance, plus what `prior` adds."""
    import numpy as np
    from skl2onnx.algebra.onnx_ops import (
        OnnxAbs,
        OnnxAdd,
        OnnxDiv,
        OnnxMul,
        OnnxNeg,
        OnnxReduceSumApi11,
        OnnxSub,
        OnnxUnsqueezeApi11,
    )

    float32 = np.float32
    each = OnnxUnsqueezeApi11(rows, axes=[1], **opset)  # [rows, 1, columns]
    apart = OnnxDiv(OnnxSub(each, model.centroids_.astype(float32), **opset), spread.astype(float32), **opset)
    if model.metric == "manhattan":
        far = OnnxReduceSumApi11(OnnxAbs(apart, **opset), axes=[2], keepdims=0, **opset)
        far = OnnxMul(far, far, **opset)
    else:
        far = OnnxReduceSumApi11(OnnxMul(apart, apart, **opset), axes=[2], keepdims=0, **opset)
    scores = OnnxNeg(far, **opset)
    return scores if prior is None else OnnxAdd(scores, prior.astype(float32), **opset)
