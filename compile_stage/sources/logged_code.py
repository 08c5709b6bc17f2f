"""Python modules that were logged beside a model (`code_paths` of MLflow's `log_model`), which its pickle imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from compile_stage.core.errors import SourceError
from compile_stage.core.records import SourceModel
from compile_stage.sources import mlmodel

T = TypeVar("T")


def load_pickle(source: SourceModel, read: Callable[[], T], not_loaded: Callable[[Exception], SourceError]) -> T:
    """What `read` answers, with the model's own code importable. The caller has asked `refuse`, which refuses pickles
    unless the policy allows them.

    Args:
        not_loaded: The error for whatever is raised, other than that a module is missing.

    Raises:
        SourceError: A module is neither installed nor logged with the model, or as `not_loaded` says.
    """
    _make_importable(source)
    return load(source, read, not_loaded)


def load(source: SourceModel, read: Callable[[], T], not_loaded: Callable[[Exception], SourceError]) -> T:
    """As `load_pickle`, of a file that runs no code: the model's own code stays out of the way of what is installed."""
    try:
        return read()
    except ModuleNotFoundError as error:
        raise _missing_module(source, error) from error
    except Exception as error:
        raise not_loaded(error) from error


def _make_importable(source: SourceModel) -> None:
    """Put the model's own folder of code before all others, as MLflow does where it loads the model: a module of the
    same name that happens to lie elsewhere is another version of it, or another module. The folder stays, since a
    forward may import when it is called."""
    name = mlmodel.flavor(source, "python_function").get("code") or mlmodel.flavor(source, source.flavor).get("code")
    if name:
        folder = str(mlmodel.within(source, name))
        sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
        sys.dont_write_bytecode = True  # a file more in the model's folder, and its digest is another


def _missing_module(source: SourceModel, error: ModuleNotFoundError) -> SourceError:
    """The error for a pickle that needs a module which is neither installed nor logged with the model."""
    return SourceError(
        f"its pickle needs the module {str(error.name)!r}, which is neither installed here nor logged with the model",
        fix="install its package (the model's requirements.txt has the version); of a module of your own: log the "
        "model with code_paths=['FILE_OR_FOLDER']",
        where=source.uri,
    )
