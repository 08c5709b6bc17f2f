"""Pickles that hold bytecode: of functions and classes that no module can be imported for."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

from compile_stage.core.records import SourceModel
from compile_stage.sources import mlmodel

_ENDINGS = (
    ".joblib",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".statsmodels",
)  # as MLflow and its users name them
_MARKS = (b"_builtin_type", b"CodeType")  # how cloudpickle 1.6 and newer writes a code object


def refuse_other_python(source: SourceModel) -> str | None:
    """The reason why a model's pickles can't be loaded by this Python: they hold bytecode of another minor version,
    which is not the same language. At best it fails; Python 3.13 was seen to crash on 3.11's.

    Files are searched, and nothing in them is run.
    """
    logged = str(mlmodel.flavor(source, "python_function").get("python_version", ""))
    here = platform.python_version()
    if not logged or _minor(logged) == _minor(here):
        return None
    for file in sorted(Path(source.path).rglob("*")):
        if file.suffix in _ENDINGS and file.is_file() and _holds_bytecode(file):
            return (
                f"its {file.relative_to(source.path)} holds functions or classes in the bytecode of Python {logged}, "
                f"which Python {here} here can't run: run compile-stage with Python {_minor(logged)}; or log the model "
                f"with Python {_minor(here)}, or with its classes in a module (code_paths=[...])"
            )
    return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _holds_bytecode(file: Path) -> bool:
    with file.open("rb") as opened:
        try:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            return False
        with content:
            return all(content.find(mark) >= 0 for mark in _MARKS)
