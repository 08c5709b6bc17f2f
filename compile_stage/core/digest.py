"""Canonical JSON, and SHA-256 of records, files and trees.

Canonical means: keys sorted, no blanks, UTF-8, no NaN (a NaN is written as the string `"NaN"` so that two runs
with the same NaN agree), so equal values give equal bytes in any process and on any machine.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union

from compile_stage.core.read_errors import naming

T = TypeVar("T")

_CHUNK = 1 << 20


def plain(value: Any) -> Any:
    """A record, or anything built of records, as dicts, lists, strings and numbers. Raises TypeError for anything
    else."""
    kind: Any = type(value)
    if kind is str or kind is int or kind is bool or value is None:  # nearly all that a result is made of
        return value
    if kind is float and math.isfinite(value):
        return value
    if (names := _fields(kind)) is not None:
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        # Most are hundreds of thousands of latencies. The sum is finite where each is.
        if _are_floats(value) and math.isfinite(sum(value)):
            return list(value)
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} can't travel as JSON")


def _are_floats(values: Collection[Any]) -> bool:
    return set(map(type, values)) == {float}


@cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of a record's fields; None for what is no record."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def canonical_json(value: Any) -> str:
    """The one spelling of a value."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def revive(kind: Any, value: Any) -> Any:
    """The inverse of `plain`: a value of the type `kind` (a record, a tuple of records, ...) from plain JSON.

    Unknown keys are ignored, so that a newer writer's records can be read. Raises TypeError or ValueError for a value
    that does not fit.
    """
    origin, arguments = (None, ()) if type(kind) is type else (typing.get_origin(kind), typing.get_args(kind))
    if kind is Any or kind is object:
        return value
    if origin in (Union, types.UnionType):
        return _revive_union(arguments, value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {arguments}")
        return value
    if origin is tuple:
        return _revive_tuple(arguments, value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is not a mapping")
        return {revive(arguments[0], key): revive(arguments[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _revive_record(typing.cast("type", kind), value)
    if isinstance(kind, type):
        return _revive_scalar(kind, value)
    raise TypeError(f"can't revive {kind!r}")


def _revive_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """As the first of the types that the value fits."""
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return revive(kind, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{value!r} is none of {kinds}")


def _revive_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is not a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        if kinds[0] is float and _are_floats(value):
            return tuple(value)
        return tuple(revive(kinds[0], item) for item in value)
    if len(kinds) != len(value):
        raise ValueError(f"{value!r} does not have {len(kinds)} items")
    return tuple(revive(kind, item) for kind, item in zip(kinds, value, strict=True))


def _revive_record(kind: type, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a {kind}")
    hints = _hints(kind)
    # Published manifests keep the names that fields had when they were written.
    former = getattr(kind, "FORMER_NAMES", {})
    given = {former.get(key, key): item for key, item in value.items()}
    fields = [f.name for f in dataclasses.fields(kind) if f.name in given]
    return kind(**{name: revive(hints[name], given[name]) for name in fields})


def _revive_scalar(kind: type, value: Any) -> Any:
    if issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError(f"{value!r} is not a number")
        return float(value)  # float("NaN") undoes `plain`
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def load_record(kind: type[T], text: str) -> T:
    """A record from its canonical JSON."""
    return typing.cast("T", revive(kind, json.loads(text)))


def digest_of(value: Any) -> str:
    """`sha256:...` of a value's canonical JSON. A path may hold bytes that are no UTF-8, which Python keeps as lone
    surrogates."""
    return "sha256:" + hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def digest_file(path: str | os.PathLike[str]) -> str:
    """`sha256:...` of a file's bytes, read in pieces. An OSError names the file."""
    sha = hashlib.sha256()
    with naming(path), open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            sha.update(chunk)
    return "sha256:" + sha.hexdigest()


def list_tree(root: str | os.PathLike[str], leave_out: Collection[str] = ()) -> list[str]:
    """Every file under `root` as a sorted relative POSIX path, without those named in `leave_out`."""
    base = Path(root)
    names = (p.relative_to(base).as_posix() for p in base.rglob("*") if p.is_file())
    return sorted(name for name in names if name not in leave_out)


def digest_tree(root: str | os.PathLike[str], leave_out: Collection[str] = ()) -> str:
    """`sha256:...` over the names and contents of all files of a folder. Renaming a file changes it."""
    return digest_of({name: digest_file(Path(root) / name) for name in list_tree(root, leave_out)})


def tree_size(root: str | os.PathLike[str]) -> int:
    """Sum of the sizes of all files of a folder, in bytes."""
    return sum((Path(root) / name).stat().st_size for name in list_tree(root))
