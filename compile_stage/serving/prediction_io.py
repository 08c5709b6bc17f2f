"""How a published model takes what it is given, and answers as the model that it was made from did.

Vendored into every published model beside `compile_stage.flavor`. What comes in may be an array, a dict, or a data
frame, with the types that JSON or pandas left it in; what goes to the runtime has exactly the names, types and shapes
of its signature.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.refused_values import RefusedValues

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch


class InputRefusedError(ValueError):
    """What was given can't be fed to the model; the message names the input and says what fits."""


def to_batch(data: Any, signature: Signature, how: Mapping[str, Any], refused: RefusedValues | None = None) -> Batch:
    """The model's inputs by name, in its own types, from an array, a list, a dict, a series or a data frame.

    Args:
        data: As a user or the scoring server gives it. Axis 0 of every array is the batch.
        how: The manifest's `answer`; its `columns` name the data frame's columns that make up a single input, and its
            `fills` the texts that missing ones are filled in with.
        refused: The values that the original refuses; None where nobody asked it.

    Raises:
        InputRefusedError: A name, type or shape does not fit, a value would be changed by more than rounding, or is
            infinite, or one that is refused.
    """
    columns = how.get("columns")
    if _is_pandas(data, "Series"):
        data = data.to_frame()
    if isinstance(data, Mapping) and columns is not None and set(columns) <= {str(key) for key in data}:
        given = _from_columns(data, signature, columns)
    elif _is_pandas(data, "DataFrame"):
        given = _from_frame(data, signature, columns)
    elif isinstance(data, Mapping):
        given = {str(name): _array(str(name), value) for name, value in data.items()}
    elif len(signature.inputs) == 1:
        name = signature.inputs[0].name
        given = {name: _array(name, data)}
    else:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise InputRefusedError(
            f"the model has {len(signature.inputs)} inputs; give a dict or a data frame with {names}"
        )
    known = {spec.name: spec for spec in signature.inputs}
    fills = how.get("fills") or {}
    batch = {
        name: _coerced(array, known[name], fills.get(name)) if name in known else array for name, array in given.items()
    }
    asked = one_row_for_none(batch) if how.get("no_rows") else None
    if (reason := signature.refuse(asked or batch)) is not None:
        raise InputRefusedError(reason)
    _demand_taken(batch, refused, columns if len(signature.inputs) == 1 else None)
    return batch


def one_row_for_none(batch: Batch) -> Batch | None:
    """A row of zeros or empty texts in the place of a batch of none; None for any other batch, also for one that is
    empty along another axis. Runtimes answer no batch of none, and originals do."""
    if not batch or not all(array.ndim and not len(array) and 0 not in array.shape[1:] for array in batch.values()):
        return None
    import numpy as np

    return {
        name: np.full((1, *array.shape[1:]), "" if array.dtype == object else 0, array.dtype)
        for name, array in batch.items()
    }


def run_any_rows(run: Callable[[Batch], Batch], batch: Batch, how: Mapping[str, Any]) -> Batch:
    """All outputs by name, of no rows too where the original answers these.

    Args:
        how: The manifest's `answer`, or its `python_model`; with `no_rows` the original answers a batch of none.
    """
    asked = one_row_for_none(batch) if how.get("no_rows") else None
    if asked is None:
        return run(batch)
    return {name: array[:0] for name, array in run(asked).items()}


def demand_params(params: Mapping[str, Any] | None, how: Mapping[str, Any]) -> None:
    """Raises InputRefusedError for a param that would change the original's answer: one value of it is compiled.

    Args:
        how: The manifest's `answer`; its `params` are those that the original's own code takes, with that value.
    """
    compiled = how.get("params") or {}
    for name, value in (params or {}).items():
        if name in compiled and not same_param(value, compiled[name]):
            raise InputRefusedError(
                f"the param {name!r} can't be {value!r} here: the model is compiled for {compiled[name]!r} alone; "
                "leave the param out, or call the original model"
            )


def same_param(one: Any, other: Any) -> bool:
    """Whether two values of a param are the same; JSON and MLflow turn tuples into lists and arrays."""
    return bool(_plain_param(one) == _plain_param(other))


def _plain_param(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain_param(item) for item in value] if isinstance(value, list | tuple) else value


def _demand_taken(batch: Batch, refused: RefusedValues | None, columns: list[str] | None) -> None:
    """MLflow turns JSON's numbers into the signature's type before we see them, and 1e39 becomes infinite in float32:
    nothing tells an infinite value from an overflow. A NaN stands for what is missing."""
    import numpy as np

    finite = True
    for name, array in batch.items():
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            finite = False
            if bool(np.isinf(array).any()):
                most = np.finfo(array.dtype.name).max
                raise InputRefusedError(
                    f"input {name!r} holds an infinite value, or one that {array.dtype.name} can't hold: send numbers "
                    f"from {-most:.3g} to {most:.3g}, or call compile_stage.flavor.load_model(URI).run, which takes "
                    "infinite values"
                )
    if refused is not None and (reason := refused.refuse(batch, columns, is_finite=finite)) is not None:
        raise InputRefusedError(reason)


def from_outputs(outputs: Batch, data: Any, how: Mapping[str, Any]) -> Any:
    """The answer to `data`: an array, a list or a dict of arrays, or a data frame, as the source model answered.

    Args:
        outputs: All outputs of the runtime, by name.
        data: What was asked with; a data frame may be answered with one, under its index.
        how: The manifest's `answer` (`core.ports.Exporter.prediction_format`).
    """
    names = how.get("outputs") or list(outputs)
    chosen = {name: _numpys_own(outputs[name]) for name in names}
    if "dtype" in how:
        chosen = {name: array.astype(how["dtype"]) for name, array in chosen.items()}
    kind = how.get("kind", "dict")
    framed = _is_pandas(data, "DataFrame")
    if kind == "dataframe" or (framed and how.get("frame_in_frame_out", False)):
        return _frame(chosen, kind, data.index if framed else None)
    if kind == "series" and framed:
        import pandas as pd

        return pd.Series(next(iter(chosen.values())), index=data.index)
    if kind in ("array", "series") and len(chosen) == 1:
        return next(iter(chosen.values()))
    return list(chosen.values()) if kind == "list" else chosen


def _numpys_own(array: Array) -> Array:
    """In the type that NumPy itself means by its name. C has two types of 64 bits, and ONNX Runtime answers with the
    other one: it compares equal, but pandas finds no int64 in it, nor does MLflow's spark_udf."""
    import numpy as np

    if array.dtype.kind not in "iu":
        return array
    own = np.dtype(array.dtype.name)
    return array if array.dtype.char == own.char else array.view(own)


def _is_pandas(data: Any, kind: str) -> bool:
    """Whether it is a `Series` or a `DataFrame`; where pandas was never loaded there is none, and it stays so."""
    wanted = getattr(sys.modules.get("pandas"), kind, None)
    return wanted is not None and isinstance(data, wanted)


def _from_columns(data: Mapping[Any, Any], signature: Signature, columns: list[str]) -> dict[str, Array]:
    """A dict that has every column: numbers become the input's matrix at once, all else as from a data frame."""
    import numpy as np

    held = {str(key): value for key, value in data.items()}
    aligned = any(_is_pandas(value, "Series") for value in held.values())  # by their index, which is pandas' work
    if len(signature.inputs) == 1 and not aligned:
        arrays = [np.asarray(held[column]) for column in columns if not isinstance(held[column], str)]
        plain = len(arrays) == len(columns) > 1 and all(
            array.ndim == 1 and array.dtype.kind in "iuf" for array in arrays
        )
        if plain and len({len(array) for array in arrays}) == 1:
            return {signature.inputs[0].name: np.column_stack(arrays)}
    import pandas as pd

    return _from_frame(pd.DataFrame(dict(data)), signature, columns)


def _from_frame(frame: Any, signature: Signature, columns: list[str] | None) -> dict[str, Array]:
    inputs = signature.inputs
    names = frame.columns.tolist()
    if names == columns and len(inputs) == 1:
        return {inputs[0].name: _matrix(frame, inputs[0])}  # to choose columns costs more than a small model
    held = dict(zip(map(str, names), frame.columns, strict=True))
    unnamed = columns is not None and len(names) == len(columns) and not any(isinstance(name, str) for name in names)
    if columns is not None and len(inputs) == 1 and not unnamed:  # pandas numbers columns that nobody named
        if missing := [column for column in columns if column not in held]:
            raise InputRefusedError(
                f"the data frame lacks {', '.join(map(repr, missing))}; the model takes {', '.join(columns)}"
            )
        return {inputs[0].name: _matrix(frame[[held[column] for column in columns]], inputs[0])}
    if all(spec.name in held for spec in inputs):
        return {spec.name: _column(frame[held[spec.name]].to_numpy(), spec) for spec in inputs}
    if len(inputs) == 1:
        return {inputs[0].name: _matrix(frame, inputs[0])}
    missing = [spec.name for spec in inputs if spec.name not in held]
    raise InputRefusedError(
        f"the data frame lacks {', '.join(map(repr, missing))}: one column for each input of the model"
    )


def _matrix(frame: Any, spec: TensorSpec) -> Array:
    if frame.shape[1] == 1:
        return _column(frame.iloc[:, 0].to_numpy(), spec)
    matrix: Array = frame.to_numpy()
    return matrix


def _column(values: Array, spec: TensorSpec) -> Array:
    """A column as an array; cells that hold arrays are stacked."""
    import numpy as np

    if values.dtype == object and len(values) and isinstance(values[0], np.ndarray | list | tuple):
        try:
            return np.stack([np.asarray(value) for value in values])
        except ValueError as error:
            raise InputRefusedError(f"the cells of column {spec.name!r} do not all have one shape") from error
    return values.reshape(-1, 1) if len(spec.shape) == 2 else values


def _array(name: str, value: Any) -> Array:
    import numpy as np

    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise InputRefusedError(f"input {name!r} is not a regular array: {error}") from error


def _coerced(array: Array, spec: TensorSpec, fill: Mapping[str, str] | None = None) -> Array:
    """The array in the input's type. JSON knows one kind of number and pandas prefers 64 bits, so rounding is allowed;
    what is not: an overflow, a fraction cut off, a number for a text."""
    import numpy as np

    if spec.dtype == "str":
        return _texts(array, spec, fill)
    try:
        wanted = np.dtype(spec.dtype)
    except TypeError as error:
        raise InputRefusedError(f"input {spec.name!r} is {spec.dtype}, which NumPy does not know") from error
    if array.dtype == wanted:
        return array
    if array.dtype == object:
        array = _numbers(array, spec)
    if array.dtype.kind not in "biuf":
        raise InputRefusedError(f"input {spec.name!r} must be {spec.dtype}, not {array.dtype.name}")
    if np.can_cast(array.dtype, wanted, "safe"):
        return array.astype(wanted)
    if wanted.kind == "f":
        with np.errstate(over="ignore"):
            cast = array.astype(wanted)
        if bool(np.any(np.isinf(cast) & np.isfinite(array))):
            raise InputRefusedError(f"input {spec.name!r} holds a value that {spec.dtype} can't hold")
        return cast
    if wanted.kind in "iu" and array.dtype.kind in "iuf":
        if array.dtype.kind == "f" and not bool(np.all(np.isfinite(array) & (array == np.trunc(array)))):
            raise InputRefusedError(f"input {spec.name!r} must be {spec.dtype}, and holds a number that is not whole")
        limits = np.iinfo(wanted)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise InputRefusedError(f"input {spec.name!r} holds a value that {spec.dtype} can't hold")
        return array.astype(wanted)
    raise InputRefusedError(
        f"input {spec.name!r} must be {spec.dtype}; {array.dtype.name} would lose what does not fit"
    )


def fill_texts(values: Array, fill: Mapping[str, str]) -> Array:
    """A copy, in objects, with a text in the place of each missing one.

    Args:
        fill: Kind of missing text (`missing_kind`) → the text; a kind that is not in it stays as it is.
    """
    import numpy as np

    filled = np.array(values, dtype=object, order="C")
    flat = filled.reshape(-1)
    for at, value in enumerate(flat):
        if not isinstance(value, str) and (text := fill.get(missing_kind(value) or "")) is not None:
            flat[at] = text
    return filled


def missing_kind(value: Any) -> str | None:
    """`NaN`, `None` or `NA` (pandas' own mark): how a value is missing; None of one that is not. scikit-learn
    tells them apart."""
    if value is None:
        return "None"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return "NA" if type(value).__name__ == "NAType" else None


def _texts(array: Array, spec: TensorSpec, fill: Mapping[str, str] | None = None) -> Array:
    import numpy as np

    texts = array.astype(object)
    if fill and not all(isinstance(value, str) for value in texts.ravel()):
        texts = fill_texts(texts, fill)
    if not all(isinstance(value, str) for value in texts.ravel()):
        if fill and (kind := next(filter(None, map(missing_kind, texts.ravel())), None)):
            raise InputRefusedError(
                f"input {spec.name!r} holds a missing text as {kind}, which this model does not take: send a text in "
                f"its place, or {' or '.join(fill)} where the original answers the same to that"
            )
        if all(isinstance(value, str) or missing_kind(value) for value in texts.ravel()):
            raise InputRefusedError(
                f"input {spec.name!r} holds a missing text (null), which a compiled model can't take: send a text in "
                "its place, the one that missing texts had in training, or '' where the model ignores texts that it "
                "does not know"
            )
        other = next(value for value in texts.ravel() if not isinstance(value, str) and not missing_kind(value))
        raise InputRefusedError(
            f"input {spec.name!r} must be text, and holds {other!r:.80} ({type(other).__name__}): send it as text, "
            "written as in training"
        )
    return np.asarray(texts, dtype=object)


def _numbers(array: Array, spec: TensorSpec) -> Array:
    import numpy as np

    if np.dtype(spec.dtype).kind == "f":  # a column of null alone comes as objects, and databases give decimals
        array = np.array(array, order="C")
        flat = array.reshape(-1)
        for at, value in enumerate(flat):
            if value is None or isinstance(value, Decimal):
                flat[at] = math.nan if value is None else float(value)
    try:
        return np.asarray(array.tolist()) if array.size else np.empty(array.shape, dtype=spec.dtype)
    except ValueError as error:
        raise InputRefusedError(f"input {spec.name!r} is not a regular array of {spec.dtype}") from error


def _frame(outputs: Mapping[str, Array], kind: str, index: Any) -> Any:
    import pandas as pd

    if kind == "array" and len(outputs) == 1:
        only = next(iter(outputs.values()))
        return pd.DataFrame(only if only.ndim <= 2 else {0: list(only)}, index=index)
    if kind == "dict" and len({array.size for array in outputs.values()}) == 1:
        # MLflow's own ONNX flavor flattens each output, and drops the index; it fails where they differ in size.
        return pd.DataFrame({name: array.reshape(-1) for name, array in outputs.items()})
    return pd.DataFrame({name: _cells(array) for name, array in outputs.items()}, index=index)


def _cells(array: Array) -> Any:
    return array.reshape(-1) if array.ndim <= 1 or array.shape[1:] == (1,) else list(array)
