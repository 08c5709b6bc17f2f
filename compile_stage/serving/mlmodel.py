"""`MLmodel`: the fields that decide what MLflow serves are those that were published.

A registry writes ids, times and sizes into the file, so its bytes can't be compared. All other fields are in the
manifest, as the value `mlmodel`, and must be equal: which module loads the model, from which folder, with which
settings, which environment and signature.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.errors import IntegrityError
from compile_stage.core.read_errors import naming, raise_if_disk_fails

MLMODEL = "MLmodel"
LOADER_MODULE = "compile_stage.flavor"

_IDENTITY = frozenset(
    {
        "artifact_path",
        "databricks_runtime",
        "mlflow_version",
        "model_id",
        "model_size_bytes",
        "model_uuid",
        "run_id",
        "utc_time_created",
    }
)
"""Written by whoever registers the model; none of them changes what is loaded."""

_MAX_BYTES = 16 * 2**20  # a signature of 100,000 columns takes 10 MB
_MAX_VALUES = 2_000_000  # YAML aliases make billions of values of a few lines


def deciding_fields(model_dir: Path) -> dict[str, Any]:
    """The fields of `MLmodel` that decide what is served, as plain JSON values.

    Raises:
        IntegrityError: It can't be read, or is larger than any real one.
        OSError: The disk fails (EIO), which says nothing of the file.
    """
    from mlflow.utils.yaml_utils import read_yaml

    file = model_dir / MLMODEL
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise IntegrityError(f"MLmodel is larger than {_MAX_BYTES >> 20} MiB", where=str(file))
        with naming(file):
            whole = read_yaml(str(model_dir), MLMODEL)
    except IntegrityError:
        raise
    except Exception as error:  # whatever the YAML reader of the day raises
        raise_if_disk_fails(error)
        raise IntegrityError(f"MLmodel can't be read: {error}", where=str(file)) from error
    if not isinstance(whole, dict):
        raise IntegrityError("MLmodel holds no fields", where=str(file))
    deciding = {name: value for name, value in whole.items() if name not in _IDENTITY and value is not None}
    plain: dict[str, Any] = _plain(deciding, _Count(file))
    return plain


def check_mlmodel(manifest: Mapping[str, Any], model_dir: Path) -> None:
    """Compare the deciding fields of a model directory's `MLmodel` with the manifest.

    Of a model that an earlier version published, which kept no copy of them, only what calls the loader is compared.
    Where MLflow is not installed nothing is loaded by `MLmodel`, and it is not looked at.

    Raises:
        IntegrityError: A field was changed; the message names it.
    """
    if importlib.util.find_spec("mlflow") is None:
        return
    there = deciding_fields(model_dir)
    published = manifest.get("mlmodel")
    if published is None:
        there = _of_loader(there)
        published = {
            name: value for name, value in _loader_fields(manifest).items() if name in {*there, "loader_module"}
        }
    for field in _differences(published, there):
        raise IntegrityError(
            f"MLmodel is not what was published: its field {field} differs",
            fix="fetch the model again",
            where=str(model_dir / MLMODEL),
        )


def _loader_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What every version has written into the `python_function` flavor."""
    return {
        "loader_module": LOADER_MODULE,
        "data": "data",
        "code": "code",
        "config": {
            "threads": manifest.get("threads", 1),
            "on_hardware_mismatch": manifest.get("on_hardware_mismatch", "error"),
        },
    }


def _of_loader(fields: Mapping[str, Any]) -> dict[str, Any]:
    flavors = fields.get("flavors")
    pyfunc = flavors.get("python_function") if isinstance(flavors, Mapping) else None
    if not isinstance(pyfunc, Mapping):
        return {}
    return {name: pyfunc[name] for name in ("loader_module", "data", "code", "config") if name in pyfunc}


def _differences(published: Any, there: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields that differ, such as `flavors.python_function.data`."""
    if isinstance(published, Mapping) and isinstance(there, Mapping):
        for name in sorted(published.keys() | there.keys()):
            inner = f"{path}.{name}" if path else str(name)
            if name not in published or name not in there:
                yield inner
            else:
                yield from _differences(published[name], there[name], inner)
    elif type(published) is not type(there) or published != there:
        yield path


class _Count:
    def __init__(self, file: Path) -> None:
        self.left, self.file = _MAX_VALUES, file

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise IntegrityError("MLmodel holds more values than any real one", where=str(self.file))


def _plain(value: Any, count: _Count) -> Any:
    count.take()
    if isinstance(value, dict):
        return {str(key): _plain(item, count) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, count) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
