"""Is a `.pt2` archive data only? `torch.export.load` would run code that a crafted one carries.

It unpickles sample inputs and some constants without restriction, evaluates the expressions of symbolic shapes as
Python (through sympy), and loads shared libraries that lie in the archive. What `torch.export.save` writes of an
ordinary module needs none of that: its tensors are raw bytes, its graph is JSON, and its sample inputs pass PyTorch's
restricted unpickler.

A zip file can be made so that Python's reader and torch's see different records in it. So torch never sees the file
itself: `checked` copies what was read and found harmless into an archive of our own, and that is what is loaded.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
_TEXT_RECORDS = frozenset({"version", "archive_format", "archive_version", "byteorder", "serialization_id"})
_TEXT = re.compile(rb"[A-Za-z0-9._-]{1,64}\n?")
_TENSOR_CONFIG = re.compile(r"data/(?:weights|constants)/[^/]+_config\.json")
_RAW_TENSOR = re.compile(r"(?:weight|tensor)_\d+")

# What sympy's srepr writes of a shape: calls of these names on symbols and numbers. No other string, no bracket, no
# attribute.
_SYMBOL = re.compile(r"\bSymbol\('\w+'")
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),<>=.]*")
_FUNCTION = re.compile(
    "Abs|Add|And|CeilToInt|CleanDiv|Eq|Equality|Float|FloatPow|FloatTrueDiv|FloorDiv|FloorToInt|Ge|GreaterThan|Gt|Identity|"
    "IntTrueDiv|Integer|LShift|Le|LessThan|Lt|Max|Min|Mod|ModularIndexing|Mul|Ne|Not|Or|Pow|PowByNatural|PythonMod|RShift|"
    "Rational|RoundToInt|StrictGreaterThan|StrictLessThan|Symbol|ToFloat|TruncToFloat|TruncToInt|Unequality|Where|ceiling|floor|sqrt"
)


class RefusedError(ValueError):
    """Loading the archive could run code of its own, or it can't be read; the message says why."""


def refuse(path: Path) -> str | None:
    """None when loading the archive's records can't run code of their own, or the reason."""
    try:
        with _checked_records(path):
            return None
    except RefusedError as error:
        return str(error)


@contextmanager
def checked(path: Path) -> Iterator[Path]:
    """A copy of the archive that holds the records that `refuse` looks at, and nothing else; it ends with the context.

    Raises:
        RefusedError: `refuse` has a reason.
    """
    with (
        _checked_records(path) as (archive, names),
        tempfile.TemporaryDirectory(prefix="compile-stage-pt2-") as scratch,
    ):
        copy = Path(scratch) / "model.pt2"
        with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as safe:
            for name in names:
                info = zipfile.ZipInfo(name)
                info.file_size = archive.getinfo(name).file_size  # beyond 4 GiB it needs another header
                with archive.open(name) as record, safe.open(info, "w") as written:
                    shutil.copyfileobj(record, written, _CHUNK)
        yield copy


@contextmanager
def _checked_records(path: Path) -> Iterator[tuple[zipfile.ZipFile, list[str]]]:
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise RefusedError(f"{path.name} is not a readable torch.export archive: {error}") from error
    with archive:
        try:
            reason = _refuse_records(archive, path.stat().st_size)
        except (OSError, zipfile.BadZipFile, ValueError, RecursionError, NotImplementedError, RuntimeError) as error:
            raise RefusedError(f"{path.name} is not a readable torch.export archive: {error}") from error
        if reason is not None:
            raise RefusedError(reason)
        yield archive, archive.namelist()


def _refuse_records(archive: zipfile.ZipFile, size: int) -> str | None:
    records = {name.split("/", 1)[-1]: name for name in archive.namelist() if not name.endswith("/")}
    if len(records) != len(archive.namelist()):
        return "its archive holds two records of one name"
    # torch writes its records as they are, so that they can be mapped.
    if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
        return "its archive is compressed, which torch.export.save never does"
    if sum(record.file_size for record in archive.infolist()) > size:
        return "its archive's records overlap"
    raw = _raw_tensors(archive, records)
    for short, name in records.items():
        if short in raw:
            continue
        content = archive.read(name)
        if short.rpartition("/")[2] in _TEXT_RECORDS and _TEXT.fullmatch(content):
            continue
        if short.endswith(".json"):
            reason = _refuse_expressions(json.loads(content), short)
        else:
            reason = _refuse_pickle(content, short)
        if reason is not None:
            return reason
    return None


def _raw_tensors(archive: zipfile.ZipFile, records: dict[str, str]) -> set[str]:
    """Records that the loader reads as plain bytes: those that every configuration names with `use_pickle: false`."""
    raw: set[str] = set()
    pickled: set[str] = set()
    for short, name in records.items():
        if not _TENSOR_CONFIG.fullmatch(short):
            continue
        folder = short.rpartition("/")[0]
        for entry in json.loads(archive.read(name)).get("config", {}).values():
            record = f"{folder}/{entry.get('path_name')}"
            plain = entry.get("use_pickle") is False and _RAW_TENSOR.fullmatch(str(entry.get("path_name")))
            (raw if plain else pickled).add(record)
    return raw - pickled


def _refuse_expressions(document: Any, record: str) -> str | None:
    for written in _expressions(document):
        text = _SYMBOL.sub("Symbol(0", written)
        calls = set(re.findall(r"([A-Za-z_]\w*)\s*\(", text))
        attribute = re.search(r"[A-Za-z_)]\s*\.|\.\s*[A-Za-z_]", text)
        if not _EXPRESSION.fullmatch(text) or "__" in text or attribute or not all(map(_FUNCTION.fullmatch, calls)):
            return f"its archive's {record} holds the shape expression {written[:60]!r}, which could run code"
    return None


def _expressions(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "expr_str" and isinstance(value, str):
                yield value
            yield from _expressions(value)
    elif isinstance(document, list):
        for value in document:
            yield from _expressions(value)


def _refuse_pickle(content: bytes, record: str) -> str | None:
    import torch

    # Classes that some library declared safe for itself are not safe for a stranger's file.
    declared = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a hostile stream may raise anything
        return f"its archive's record {record} is not plain tensors ({type(error).__name__})"
    finally:
        torch.serialization.add_safe_globals(declared)
    return None
