"""What an MLflow model directory says of itself, without loading the model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import SourceModel
from compile_stage.serving.examples import is_example_name
from compile_stage.serving.prediction_io import same_param

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch, Signature

_MAX_EXAMPLE_BYTES = 256 * 2**20  # as JSON; it is read whole


class Description(NamedTuple):
    """What `MLmodel` says of how the payload is read.

    Attributes:
        inputs: Specs of the signature as MLflow writes them (`{"type": "tensor", "name": ...}`); None when there is no
            signature.
        example: An input example was logged.
    """

    flavors: Mapping[str, Mapping[str, Any]]
    inputs: Sequence[Mapping[str, Any]] | None
    outputs: Sequence[Mapping[str, Any]] | None
    example: bool


def read(source: SourceModel) -> Description:
    """From what the registry parsed, or from the file. Raises SourceError when `MLmodel` is missing or can't be
    read."""
    mlmodel = source.mlmodel or _model(source).to_dict()
    signature = mlmodel.get("signature") or {}
    return Description(
        flavors=mlmodel.get("flavors") or {},
        inputs=_specs(signature.get("inputs")),
        outputs=_specs(signature.get("outputs")),
        example=bool(mlmodel.get("saved_input_example_info")),
    )


def _specs(text: str | None) -> Sequence[Mapping[str, Any]] | None:
    return json.loads(text) if text else None


def _model(source: SourceModel) -> Any:
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    try:
        return Model.load(str(Path(source.path) / "MLmodel"))
    except (OSError, MlflowException, TypeError, ValueError) as error:
        raise SourceError(f"its MLmodel file can't be read: {first_line(error)}", where=source.uri) from error


def flavor(source: SourceModel, name: str) -> Mapping[str, Any]:
    """The configuration of one flavor; empty when the model does not have it."""
    settings: Mapping[str, Any] = read(source).flavors.get(name, {})
    return settings


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


def not_loaded(source: SourceModel, problem: str, package: Any, version_key: str) -> SourceError:
    """The error for a model that its framework can't load, with the framework's version there and here.

    Args:
        package: The framework's module.
        version_key: Under which MLflow notes in the flavor which version of the framework logged the model.
    """
    flavor_name = "pytorch" if package.__name__ == "torch" else package.__name__
    logged = flavor(source, flavor_name).get(version_key, "of an unknown version")
    there, here = (str(version).partition("+")[0] for version in (logged, package.__version__))
    fix = (
        f"{package.__name__} {package.__version__} logged it and can't read it back: log it again, and try "
        "mlflow.pyfunc.load_model on it"
        if there == here
        else f"it was logged with {package.__name__} {logged}, here is {package.__version__}: "
        "use that version, or log it again"
    )
    return SourceError(problem, fix=fix, where=source.uri)


def tensor_names(source: SourceModel) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Names of the signature's inputs and outputs, each None unless the signature is of tensors that are all named."""
    described = read(source)
    return _tensor_names(described.inputs), _tensor_names(described.outputs)


def open_axes(source: SourceModel, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Input → the axes that the signature leaves open (-1); empty where its tensors are not these inputs.

    Args:
        names: The model's inputs. A signature of one tensor need not name it.
    """
    specs = read(source).inputs
    own = _tensor_names(specs)
    if own is None and specs and _of_tensors(specs) and len(specs) == len(names) == 1:
        own = tuple(names)
    shapes = [spec.get("tensor-spec", {}).get("shape", ()) for spec in specs or ()]
    return {
        name: tuple(axis for axis, size in enumerate(shape) if size == -1)
        for name, shape in zip(own or (), shapes, strict=False)
    }


def columns(source: SourceModel) -> tuple[str, ...] | None:
    """The data frame's columns in order; None when the signature is not a data frame's, or there is none."""
    specs = read(source).inputs
    if not specs or _of_tensors(specs) or "name" not in specs[0]:
        return None
    return tuple(str(spec["name"]) for spec in specs)


def params(source: SourceModel) -> dict[str, Any]:
    """The params of predict() that the signature names, each with its default; MLflow hands no others on."""
    signature = (source.mlmodel or _model(source).to_dict()).get("signature") or {}
    return {str(spec["name"]): spec.get("default") for spec in _specs(signature.get("params")) or ()}


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function takes with a default, by name."""
    taken = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in taken if each.default is not inspect.Parameter.empty}


def refuse_params(source: SourceModel, own: Mapping[str, Any]) -> str | None:
    """The reason when predict() without params computes something else than what is compiled.

    Args:
        own: The params that the model's own code takes, with the defaults that are compiled.
    """
    for name, value in params(source).items():
        if name in own and not same_param(value, own[name]):
            return (
                f"its signature has the param {name} with the default {value!r}, so its pyfunc calls the model with "
                f"it, and what is compiled is {name}={own[name]!r}: log it with that default, or without the param"
            )
    return None


def has_tensor_signature(source: SourceModel) -> bool:
    """True when the signature is of tensors: MLflow then hands the model an array, even where it was given a data
    frame."""
    specs = read(source).inputs
    return bool(specs) and _of_tensors(specs or ())


def text_columns(source: SourceModel) -> tuple[str, ...]:
    """Columns of the data frame that hold no numbers."""
    specs = read(source).inputs
    if not specs or _of_tensors(specs) or "name" not in specs[0]:
        return ()
    numbers = {"boolean", "integer", "long", "float", "double"}
    return tuple(str(spec["name"]) for spec in specs if str(spec.get("type")).lower() not in numbers)


def raw_example(source: SourceModel) -> Any:
    """The input example as it was logged: an array, a dict, a list, a data frame; None when there is none.

    Raises:
        SourceError: `MLmodel` names a file that is not the model's own, or one that is larger than an example.
    """
    if not read(source).example:
        return None
    model = _model(source)
    name = model.saved_input_example_info.get("artifact_path")
    if not is_example_name(name):
        raise SourceError(f"its MLmodel names no file of its folder as input example ({name})", where=source.uri)
    file = within(source, name)
    if file.is_file() and file.stat().st_size > _MAX_EXAMPLE_BYTES:
        raise SourceError(
            f"its input example has {file.stat().st_size / 2**20:.0f} MiB",
            fix=f"log the model with an example of at most {_MAX_EXAMPLE_BYTES / 2**20:.0f} MiB as JSON",
            where=source.uri,
        )
    return model.load_input_example(source.path)


def drawn_example(source: SourceModel) -> Any:
    """In the place of an input example two rows of normally distributed floats, as the signature has them: an array, a
    dict of arrays, a data frame. None where it does not say enough: no signature, whole numbers or texts as tensors
    (which ones a model takes is in no signature), sizes open beside the batch's."""
    import numpy as np

    draw = np.random.default_rng(0)
    specs = read(source).inputs
    if names := columns(source):
        import pandas as pd

        return None if text_columns(source) else pd.DataFrame(draw.normal(size=(2, len(names))), columns=list(names))
    if not specs or not _of_tensors(specs):
        return None
    arrays = []
    for spec in specs:
        dtype, shape = np.dtype(spec["tensor-spec"]["dtype"]), spec["tensor-spec"]["shape"]
        if dtype.kind != "f" or not shape or -1 in shape[1:]:
            return None
        arrays.append(draw.normal(size=(2 if shape[0] == -1 else shape[0], *shape[1:])).astype(dtype))
    named = _tensor_names(specs)
    return dict(zip(named, arrays, strict=True)) if named else arrays[0]


def named_example(source: SourceModel, signature: Signature, *, as_given: bool = False) -> Batch | None:
    """The input example as tensors with the names and dtypes of `signature`; None when there is none, or it does not
    fit.

    Args:
        as_given: Leave numbers in the type that they have, so that what rounding them changes is seen.
    """
    raw = raw_example(source)
    return None if raw is None else name_tensors(raw, signature, as_given=as_given)


def name_tensors(raw: Any, signature: Signature, *, as_given: bool = False) -> Batch | None:
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
        values = [_matrix(single) if hasattr(single, "to_numpy") else single]
    else:
        return None
    return {
        spec.name: given
        if as_given and (given := np.asarray(value)).dtype.kind in "biuf"
        else np.asarray(value, dtype=object if spec.dtype == "str" else spec.dtype)
        for spec, value in zip(specs, values, strict=True)
    }


def _matrix(frame: Any) -> Any:
    """A data frame, or series, as an array. Of truth values beside numbers pandas makes objects, whose type says
    nothing of the numbers': so these are 0 and 1 there."""
    if hasattr(frame, "columns") and frame.dtypes.nunique() > 1:
        frame = frame.astype({name: "uint8" for name, kind in frame.dtypes.items() if kind == "bool"})
    return frame.to_numpy()


def _of_tensors(specs: Sequence[Mapping[str, Any]]) -> bool:
    return all(spec.get("type") == "tensor" for spec in specs)


def _tensor_names(specs: Sequence[Mapping[str, Any]] | None) -> tuple[str, ...] | None:
    if not specs or not _of_tensors(specs) or "name" not in specs[0]:
        return None
    return tuple(str(spec["name"]) for spec in specs)
