"""A model opened as it is served: by the loader that lies in its own folder, not by the installed package.

A worker has the installed package loaded, under the same name. So that is kept apart while the model's own code is
imported, and put back afterwards: what measures goes on with the installed one, and the session runs the model's own.
What is missing in the model's folder is missing here too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from compile_stage.core.errors import UsageError
from compile_stage.serving.trust import TRUST_VARIABLE

if TYPE_CHECKING:
    from compile_stage.core.ports import Session

_PACKAGE = "compile_stage"


@contextmanager
def open_as_served(model: Path) -> Iterator[Session]:
    """Open a model directory with the code that it carries; that of the machine it was made on, so the hardware is not
    compared, and that of this run, which is signed when it is published: no signature is asked for.

    Raises:
        UsageError: The code that it carries can't be imported.
        CompileStageError: As `compile_stage.flavor.CompiledModel`; of the class of that name in the model's own code.
    """
    os.environ.pop(TRUST_VARIABLE, None)
    with _own_code(model / "code"):
        try:
            flavor = importlib.import_module(f"{_PACKAGE}.flavor")
            opened = flavor.CompiledModel(model, on_hardware_mismatch="ignore")
        except Exception as error:
            if (lacking := _lacking(error)) is None:
                raise
            raise UsageError(
                f"serving can't load it: {type(lacking).__name__}: {lacking}",
                fix="import what the backend needs of compile_stage by import statements: what these name is published "
                "with the model",
            ) from error
        if not Path(str(flavor.__file__)).is_relative_to(model):
            raise UsageError(f"it was loaded by {flavor.__file__}, not by the code that it carries")
    with opened as session:
        yield session


def _lacking(error: BaseException | None) -> ImportError | None:
    """Of an error and what caused it, the one that says that a part of our package is not there."""
    while error is not None:
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == _PACKAGE:
            return error
        error = error.__cause__
    return None


@contextmanager
def _own_code(code: Path) -> Iterator[None]:
    installed = _take_modules()
    sys.path.insert(0, str(code))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(code))
        _take_modules()
        sys.modules.update(installed)


def _take_modules() -> dict[str, ModuleType]:
    """All modules of the package that are loaded; they are not any more."""
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}
