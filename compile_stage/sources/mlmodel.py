"""What an MLflow model directory says of itself, without loading the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError
from compile_stage.core.records import SourceModel

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch, Signature


def read(source: SourceModel) -> Any:
    """The `mlflow.models.Model` of the directory. Raises SourceError when `MLmodel` is missing or can't be read."""
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    try:
        return Model.load(str(Path(source.path) / "MLmodel"))
    except (OSError, MlflowException, TypeError, ValueError) as error:
        raise SourceError(f"its MLmodel file can't be read: {first_line(error)}", where=source.uri) from error


def flavor(source: SourceModel, name: str) -> Mapping[str, Any]:
    """The configuration of one flavor; empty when the model does not have it."""
    found: Mapping[str, Any] = read(source).flavors.get(name, {})
    return found


def data_file(source: SourceModel, name: str, *, flavor_name: str, key: str, default: str) -> Path:
    """The file or folder that a flavor's configuration names under `key`."""
    return within(source, flavor(source, flavor_name).get(key) or default) / name


def within(source: SourceModel, name: object) -> Path:
    """A file that `MLmodel` names. Raises SourceError for one outside of the model's folder, which was never the
    model's own."""
    root = Path(source.path)
    path = root / str(name)
    if not path.resolve().is_relative_to(root.resolve()):
        raise SourceError(f"its MLmodel names a file outside of the model's folder ({name})", where=source.uri)
    return path


def missing_file(path: Path, source: SourceModel) -> str | None:
    """The reason when a file of the model is not there (a registry lists versions whose upload never ended)."""
    if path.exists():
        return None
    relative = path.relative_to(source.path) if path.is_relative_to(source.path) else path
    return f"its file {relative} is missing from the registry: log and register the model again"


def tensor_names(source: SourceModel) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Names of the signature's inputs and outputs, each None unless the signature is of tensors that are all named."""
    signature = read(source).signature
    return (None, None) if signature is None else (_names(signature.inputs), _names(signature.outputs))


def columns(source: SourceModel) -> tuple[str, ...] | None:
    """The data frame's columns in order; None when the signature is not a data frame's, or there is none."""
    schema = _input_schema(source)
    if schema is None or schema.is_tensor_spec() or not schema.has_input_names():
        return None
    return tuple(str(name) for name in schema.input_names())


def has_tensor_signature(source: SourceModel) -> bool:
    """True when the signature is of tensors: MLflow then hands the model an array, even where it was given a data
    frame."""
    schema = _input_schema(source)
    return schema is not None and bool(schema.is_tensor_spec())


def text_columns(source: SourceModel) -> tuple[str, ...]:
    """Columns of the data frame that hold no numbers."""
    schema = _input_schema(source)
    if schema is None or schema.is_tensor_spec() or not schema.has_input_names():
        return ()
    numbers = {"boolean", "integer", "long", "float", "double"}
    return tuple(
        str(spec.name) for spec in schema.inputs if str(getattr(spec.type, "name", spec.type)).lower() not in numbers
    )


def raw_example(source: SourceModel) -> Any:
    """The input example as it was logged: an array, a dict, a list, a data frame; None when there is none."""
    model = read(source)
    if not getattr(model, "saved_input_example_info", None):
        return None
    return model.load_input_example(source.path)


def named_example(source: SourceModel, signature: Signature) -> Batch | None:
    """The input example as tensors with the names and dtypes of `signature`; None when there is none, or it does not
    fit."""
    raw = raw_example(source)
    return None if raw is None else name_tensors(raw, signature)


def name_tensors(raw: Any, signature: Signature) -> Batch | None:
    """Arrays by name, list by position, a single array or data frame as the only input; None when `raw` does not
    fit."""
    import numpy as np

    specs = signature.inputs
    values: Sequence[Any]
    if isinstance(raw, Mapping):
        if {spec.name for spec in specs} - set(raw):
            return None
        values = [raw[spec.name] for spec in specs]
    elif len(specs) > 1 and hasattr(raw, "columns"):
        if {spec.name for spec in specs} - set(raw.columns):
            return None
        values = [np.stack([np.asarray(cell) for cell in raw[spec.name]]) for spec in specs]
    elif len(specs) > 1 and isinstance(raw, list | tuple) and len(raw) == len(specs):
        values = raw
    elif len(specs) == 1:
        single = raw[0] if isinstance(raw, list | tuple) and len(raw) == 1 and np.ndim(raw[0]) > 0 else raw
        values = [single.to_numpy() if hasattr(single, "to_numpy") else single]
    else:
        return None
    return {
        spec.name: np.asarray(value, dtype=object if spec.dtype == "str" else spec.dtype)
        for spec, value in zip(specs, values, strict=True)
    }


def _input_schema(source: SourceModel) -> Any:
    signature = read(source).signature
    return None if signature is None else signature.inputs


def _names(schema: Any) -> tuple[str, ...] | None:
    if schema is None or not schema.is_tensor_spec() or not schema.has_input_names():
        return None
    return tuple(str(name) for name in schema.input_names())


def first_line(error: BaseException) -> str:
    """What a library's error says, without the pages of advice and stack that follow it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
