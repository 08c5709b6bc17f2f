"""Whether what a scikit-learn model was converted to answers the logged example as the model does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import first_line
from compile_stage.core.records import SourceModel
from compile_stage.core.tensors import Signature
from compile_stage.sources import mlmodel, tabular
from compile_stage.sources.sklearn_signature import example_columns, framer, has_columns

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch


def refuse_answers(estimator: Any, signature: Signature, source: SourceModel, converted: Any) -> str | None:
    """The reason when the converted graph answers the logged example otherwise than the original: what splits texts, or
    encodes them, is not converted alike in every case, and some models are converted to something else.

    Of numbers, most rows must be far off: how much rounding may change is for the policy's tolerances.
    """
    import numpy as np
    import onnxruntime

    texts = has_columns(signature)
    inputs = example_columns(estimator, source, signature.inputs) if texts else mlmodel.named_example(source, signature)
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
    if has_columns(signature):
        given = example_columns(estimator, source, signature.inputs, as_given=True)
    else:
        given = mlmodel.named_example(source, signature, as_given=True)
    given = rounded if given is None else given  # there is one where there is a rounded one
    for inputs, keeps_type in ((rounded, False), (tabular.as_predict_gets(source, given), True)):
        rows = framer(estimator, signature, source, as_given=keeps_type)(list(inputs.values()))
        answers = [estimator.predict(rows)]
        if len(signature.outputs) > 1:
            answers.append(estimator.predict_proba(rows))
        yield answers


def _rows_apart(one: Any, other: Any, rtol: float, atol: float | None) -> Any:
    """For each row whether an answer differs from the other, [rows] in bool. `atol` is by default that share, `rtol`,
    of the other's largest number."""
    import numpy as np

    if one.size != other.size or len(one) != len(other):  # targets below each other, or one row too few
        return np.ones(len(other), bool)
    one, other = one.reshape(len(other), -1), other.reshape(len(other), -1)
    if other.dtype.kind == "f":
        atol = rtol * float(np.nanmax(np.abs(other), initial=0.0)) if atol is None else atol
        return ~np.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True).all(axis=1)
    return (one != other).any(axis=1)
