"""How the folder registry reads and writes: one writer of a name at a time, and each file whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from compile_stage.core.errors import RegistryError
from compile_stage.core.json_files import read_json_object


@contextmanager
def file_trouble(where: str) -> Iterator[None]:
    """What the disk refuses is a RegistryError."""
    try:
        yield
    except OSError as error:
        raise RegistryError(
            f"files of the registry can't be read or written: {error.strerror or error}",
            fix=disk_fix(error),
            where=where,
        ) from error


def disk_fix(error: OSError) -> str:
    """What to do about a file of a registry that the disk refuses; empty where that is not known."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return "give this user the right to read and write there, then run again"
    if error.errno == errno.EROFS:
        return "mount it for writing, then run again"
    if error.errno == errno.EIO:
        return (
            "look at the disk there (the kernel's log: dmesg), or at the server that it is mounted from; then run again"
        )
    return "free space there, then run again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""


@contextmanager
def writing(home: Path) -> Iterator[None]:
    """Be the only writer of a registered name; what a dead writer left behind is cleared away first."""
    with file_trouble(str(home)):
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / ".lock"):
            for part in (*home.glob(".part-*"), *home.glob("*/.part-*")):
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            yield


def read_json(file: Path) -> dict[str, Any]:
    """A record; empty where there is none. Raises RegistryError where it can't be read."""
    try:
        return read_json_object(file)
    except FileNotFoundError:
        return {}  # a model that was put there by hand has no record, a name without aliases no list of them
    except (OSError, ValueError) as error:
        raise RegistryError(f"the registry's record can't be read: {error}", where=str(file)) from error


def as_texts(values: Any, file: Path) -> dict[str, str]:
    """Tags or aliases of a record, which people edit by hand: a number or a list among them as its text. Raises
    RegistryError where they are no map."""
    if not isinstance(values, dict):
        raise RegistryError(
            "the registry's record can't be read: its tags are no JSON object",
            fix='write them as {"name": "value"}',
            where=str(file),
        )
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """All of it or nothing, also after a power cut."""
    descriptor, part = tempfile.mkstemp(prefix=".part-", dir=file.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    Path(part).chmod(0o644)
    Path(part).replace(file)
    flush_folder(file.parent)


def write_files(folder: Path, files: Mapping[str, Path]) -> None:
    """Copy files into the folder: name below it → where it is. Raises RegistryError for a name that leads out of it."""
    for name, path in files.items():
        (folder / checked_name(name)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def checked_name(name: str) -> str:
    """The name. Raises RegistryError where it leads out of the folder that it is a name in."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise RegistryError(f"{name!r} can't be the name of a published file: it leads out of the version's folder")
    return name


def replace_file(final: Path, source: Path, part_in: Path) -> None:
    """Copy a file to its place, all of it or nothing, also after a power cut. The part lies in `part_in`, a folder of
    the same file system, where `writing` clears it away."""
    final.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=".part-", dir=part_in)
    with os.fdopen(descriptor, "wb") as stream, Path(source).open("rb") as content:
        shutil.copyfileobj(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    Path(part).chmod(0o644)
    Path(part).replace(final)
    flush_folder(final.parent)


def flush_folder(folder: Path) -> None:
    """fsync the folder itself: without it, a rename may be undone by a power cut."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
