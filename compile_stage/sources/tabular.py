"""What scikit-learn, XGBoost, LightGBM and CatBoost share: one float32 matrix in; labels, probabilities or a prediction
out.

The converters name and shape their outputs each in its own way; `standardize` gives the graph the names and shapes of
the Python API:

    classifier   label [batch] (int64, or strings)   probabilities [batch, classes]
                 label [batch, targets] where each row has several labels
    regressor    prediction [batch], or [batch, targets] where there are several, or it was fitted on a column
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from compile_stage.core.errors import SourceError
from compile_stage.core.records import SourceModel
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.sources import graph, mlmodel

if TYPE_CHECKING:
    from onnx import ModelProto

    from compile_stage.core.tensors import Batch

INPUT = "X"
LABEL = "label"
PROBABILITIES = "probabilities"
PREDICTION = "prediction"

CONVERTER_OPSET = 15
"""The newest operator set that onnxmltools writes; trees lie in their own domain anyway."""

# What a converter's output is, and what becomes of it: as it is, [batch, 1] → [batch], [batch] → [batch, 1], the second
# of two columns, or a label as a number.
Repair = Literal["keep", "flatten", "column", "second", "number"]


def signature(features: int, outputs: Sequence[TensorSpec], dtype: str = "float32") -> Signature:
    """One matrix `X` of that many features, and the outputs."""
    matrix = TensorSpec(name=INPUT, dtype=dtype, shape=(graph.BATCH, features))
    return Signature(inputs=(matrix,), outputs=tuple(outputs))


def label(dtype: str, *, targets: int | None = None) -> TensorSpec:
    """The class of each row: [batch]; or [batch, targets], of models that answer several."""
    return TensorSpec(name=LABEL, dtype=dtype, shape=(graph.BATCH,) if targets is None else (graph.BATCH, targets))


def probabilities(classes: int) -> TensorSpec:
    """The probability of each class."""
    return TensorSpec(name=PROBABILITIES, dtype="float32", shape=(graph.BATCH, classes))


def prediction(targets: int = 1, *, column: bool = False) -> TensorSpec:
    """The value of each row: [batch]; a column for each target where there are several, or as a `column`."""
    shape: tuple[int | str, ...] = (graph.BATCH, targets) if targets > 1 or column else (graph.BATCH,)
    return TensorSpec(name=PREDICTION, dtype="float32", shape=shape)


def label_dtype(classes: Any, source: SourceModel) -> str:
    """`int64`, `bool` or `str`. Raises SourceError for classes that ONNX has no label type for."""
    import numpy as np

    kind = np.asarray(classes).dtype.kind
    if kind == "b":
        return "bool"
    if kind in "iu":
        return "int64"
    if kind == "f" and np.all(np.asarray(classes) == np.round(classes)):
        return "int64"
    if kind in "US" or (kind == "O" and all(isinstance(item, str) for item in classes)):
        return "str"
    raise SourceError(
        f"its classes are {np.asarray(classes).dtype} values, for which ONNX has no labels",
        fix="train it on integer or text labels",
        where=source.uri,
    )


def standardize(model: ModelProto, wanted: Signature, repairs: Sequence[tuple[str, Repair]]) -> None:
    """Give the graph the names, shapes and outputs of `wanted`.

    Args:
        repairs: For each output of `wanted`, the converter's name of it and its repair. Other outputs of the converter
            go.
    """
    from onnx import helper

    inner = graph.signature_of(model)
    names = {inner.inputs[0].name: INPUT}
    # The converter's own values get out of the way of ours first.
    names |= {value: f"{value}_raw" for value, _ in repairs}
    graph.rename_values(model, names)
    del model.graph.output[:]
    for spec, (value, repair) in zip(wanted.outputs, repairs, strict=True):
        model.graph.node.append(_repair_node(model, f"{value}_raw", spec, repair))
        model.graph.output.append(helper.make_tensor_value_info(spec.name, _type_of(spec), list(spec.shape)))
    _input(model, wanted)
    if all(entry.domain not in ("", "ai.onnx") for entry in model.opset_import):  # a graph of trees alone
        model.opset_import.append(helper.make_opsetid("", CONVERTER_OPSET))
    # Intermediate shapes were inferred for the converter's outputs, and may be wrong (LightGBM: one row).
    del model.graph.value_info[:]


def standardize_columns(model: ModelProto, wanted: Signature, repairs: Sequence[tuple[str, Repair]]) -> None:
    """As `standardize`, of a graph with one input for each column. Raises SourceError where ONNX can't tell two columns
    apart, or one has the name of an output."""
    from onnx import helper

    inner = [value.name for value in graph.signature_of(model).inputs]
    names = [spec.name for spec in wanted.inputs]
    clash = set(names) & {spec.name for spec in wanted.outputs}
    # The converter writes `marital status` as `marital_status`.
    if len(inner) != len(names) or inner != [re.sub(r"\W", "_", name) for name in names] or clash:
        raise SourceError("two of its columns have names that ONNX can't tell apart", fix="rename the columns")
    graph.rename_values(model, {value: f"{value}_raw" for value, _ in repairs})
    graph.rename_values(model, dict(zip(inner, names, strict=True)))
    del model.graph.output[:]
    for spec, (value, repair) in zip(wanted.outputs, repairs, strict=True):
        model.graph.node.append(_repair_node(model, f"{value}_raw", spec, repair))
        model.graph.output.append(helper.make_tensor_value_info(spec.name, _type_of(spec), list(spec.shape)))
    del model.graph.input[:]
    for spec in wanted.inputs:
        model.graph.input.append(helper.make_tensor_value_info(spec.name, _type_of(spec), list(spec.shape)))
    del model.graph.value_info[:]


def join_columns(model: ModelProto, names: Sequence[str]) -> None:
    """Replace one input per column by the matrix `X`, split into them."""
    from onnx import TensorProto, helper

    inputs = [value.name for value in model.graph.input]
    del model.graph.input[:]
    model.graph.input.append(helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, [graph.BATCH, len(names)]))
    # The converter writes `mean radius` as `mean_radius`, and leaves out columns that no step takes.
    written = [re.sub(r"\W", "_", name) for name in names]
    parts = [name if name in inputs else f"unused_{index}" for index, name in enumerate(written)]
    if set(inputs) - set(parts):
        raise SourceError("two of its columns have names that ONNX can't tell apart", fix="rename the columns")
    model.graph.node.insert(
        0, helper.make_node("Split", [INPUT], parts, name="columns", axis=1, num_outputs=len(parts))
    )


def opsets() -> dict[str, int]:
    """The operator sets that converters are asked for."""
    return {"": graph.OPSET, "ai.onnx.ml": graph.ML_OPSET}


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """OpenMP and BLAS at most so wide while the model is open."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(limits=threads):
        yield


def prediction_format(
    source: SourceModel, outputs: Sequence[str], answered: Any = None, *, fitted: Sequence[str] = ()
) -> Mapping[str, Any]:
    """An array for an array and for a data frame alike, as the `predict` of all these frameworks does.

    Args:
        fitted: Names of the columns that a framework compares with a data frame's. They tell its columns apart where no
            signature does.
        answered: Something in the type that the model answers, which the published one takes again: labels, of which
            ONNX has int64 and texts alone, or numbers, which the graph computes in float32.
    """
    import numpy as np

    columns = mlmodel.columns(source) or (fitted if mlmodel.read(source).inputs is None else None)
    own = np.int64 if list(outputs) == [LABEL] else np.float32
    given = np.asarray(answered).dtype if answered is not None else np.dtype(own)
    # The name of NumPy's texts of up to three letters would be str96, which is no type that it reads.
    dtype = f"U{given.itemsize // 4}" if given.kind == "U" else given.name
    return {
        **({"dtype": dtype} if given.kind in "iufU" and given != own else {}),
        "kind": "array",
        "outputs": list(outputs),
        "columns": list(columns) if columns else None,
        "frame_in_frame_out": False,
    }


def as_predict_gets(source: SourceModel, inputs: Batch) -> Batch:
    """The matrix, or the columns, as the original's predict() gets them: MLflow lets float32 alone through where the
    signature says so, whatever a file of samples holds."""
    import numpy as np

    specs = mlmodel.read(source).inputs or ()
    narrow = _narrow(source)
    if len(inputs) > 1:
        named = {str(spec.get("name")) for spec, rounds in zip(specs, narrow, strict=True) if rounds}
        return {name: array.astype(np.float32) if name in named else array for name, array in inputs.items()}
    ((name, matrix),) = inputs.items()
    if not any(narrow) or matrix.dtype.kind != "f":
        return inputs
    if all(narrow):
        return {name: matrix.astype(np.float32)}
    if len(narrow) != matrix.shape[-1]:
        return inputs
    return {name: np.where(narrow, matrix.astype(np.float32), matrix)}


def is_given_float32(source: SourceModel) -> bool:
    """Whether the signature lets no other numbers than float32 through to predict()."""
    narrow = _narrow(source)
    return bool(narrow) and all(narrow)


def takes_float32(source: SourceModel) -> bool:
    """Whether the signature lets no other numbers than float32 through in one of its inputs."""
    return any(_narrow(source))


def _narrow(source: SourceModel) -> list[bool]:
    """For each input of the signature whether it is float32."""
    specs = mlmodel.read(source).inputs or ()
    types = [spec.get("tensor-spec", {}).get("dtype") or spec.get("type") for spec in specs]
    return [dtype in ("float", "float32") for dtype in types]


def thresholds_in_float32(thresholds: Any, *, is_given_float32: bool) -> Any:
    """Thresholds of trees that compare numbers in float64 by `<=`, rounded so that a graph that compares in float32
    sends each number where they send it.

    One float32 stands for many numbers in float64, of which data has the one with the fewest decimals: 33.1, where
    float32 has 33.099998. Trees have the middle of two values for a threshold, and of 33.0 and 33.2 that is 33.1, or a
    number next to it. So what float32 prints is held against the threshold in float64.

    Args:
        thresholds: [splits] in float64.
        is_given_float32: The trees get no other numbers; then float32's own number is held against it.

    Returns:
        [splits] in float32.
    """
    import numpy as np

    with np.errstate(over="ignore"):
        rounded = thresholds.astype(np.float32)
    given = rounded.astype(np.float64) if is_given_float32 else np.array([float(str(one)) for one in rounded])
    return np.where(given > thresholds, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def refuse_columns(source: SourceModel) -> str | None:
    """The reason when the data frame holds columns that are no numbers."""
    text = mlmodel.text_columns(source)
    if not text:
        return None
    which = f"columns {', '.join(text[:5])} hold" if len(text) > 1 else f"column {text[0]} holds"
    return (
        f"its {which} no numbers, and a compiled model takes one matrix of numbers: encode them before the model, and "
        "log the model that takes the encoded columns"
    )


def refuse_names(source: SourceModel, fitted: Sequence[str]) -> str | None:
    """The reason when the signature's columns are not those that the model was fitted on, in that order: a framework
    that compares them refuses every data frame that fits the signature."""
    logged = mlmodel.columns(source)
    if not fitted or logged is None or list(logged) == list(fitted):
        return None
    at = next((n for n, (one, other) in enumerate(zip(logged, fitted, strict=False)) if one != other), None)
    where = (
        f"has {len(logged)} columns, and it was fitted on {len(fitted)}"
        if at is None
        else f"has {logged[at]!r} as column {at + 1}, where it was fitted on {fitted[at]!r}"
    )
    return (
        f"its signature {where}, so its own predict() refuses every data frame that fits the signature: log it with "
        "the signature of the data frame that it was fitted on"
    )


def pick_columns(model: ModelProto, order: Sequence[int]) -> None:
    """Let the graph take the matrix `X` with its columns in another order: column n of the model is `order[n]` of
    `X`."""
    from onnx import helper

    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == INPUT:
                node.input[place] = "fitted_columns"
    _constant(model, "column_order", list(order))
    node = helper.make_node("Gather", [INPUT, "column_order"], ["fitted_columns"], name="columns", axis=1)
    model.graph.node.insert(0, node)


def _repair_node(model: ModelProto, raw: str, spec: TensorSpec, repair: Repair) -> Any:
    from onnx import TensorProto, helper

    name = f"{spec.name}_out"
    if repair == "number":
        return helper.make_node("Cast", [raw], [spec.name], name=name, to=TensorProto.FLOAT)
    if spec.dtype == "bool":  # ONNX classifiers answer with integers
        if repair == "flatten":
            _constant(model, "flat", [-1])
            flat = f"{spec.name}_flat"
            model.graph.node.append(helper.make_node("Reshape", [raw, "flat"], [flat], name=flat))
            raw = flat
        return helper.make_node("Cast", [raw], [spec.name], name=name, to=TensorProto.BOOL)
    if repair == "flatten":
        _constant(model, "flat", [-1])
        return helper.make_node("Reshape", [raw, "flat"], [spec.name], name=name)
    if repair == "column":
        _constant(model, "as_column", [-1, 1])
        return helper.make_node("Reshape", [raw, "as_column"], [spec.name], name=name)
    if repair == "second":
        _constant(model, "second_column", 1)
        return helper.make_node("Gather", [raw, "second_column"], [spec.name], name=name, axis=1)
    return helper.make_node("Identity", [raw], [spec.name], name=name)


def _input(model: ModelProto, wanted: Signature) -> None:
    from onnx import helper

    del model.graph.input[:]
    spec = wanted.inputs[0]
    model.graph.input.append(helper.make_tensor_value_info(spec.name, _type_of(spec), list(spec.shape)))


def _constant(model: ModelProto, name: str, value: Any) -> None:
    import numpy as np
    from onnx import numpy_helper

    if all(tensor.name != name for tensor in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.int64), name))


def _type_of(spec: TensorSpec) -> int:
    """ONNX's number for it."""
    import numpy as np
    from onnx import TensorProto, helper

    return TensorProto.STRING if spec.dtype == "str" else helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
