"""Files at an address that several machines share (`s3://`, `gs://`, `az://`, `file://`), through fsspec.

Whatever the server does, a run waits for it a bounded time: each request has a deadline, those that failed are made
again after a pause, and the first that keeps failing ends the use of the store. What is shown of an address or of a
library's message has no credentials in it.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from compile_stage.core.errors import MissingDependencyError, UsageError
from compile_stage.core.redaction import redacted

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_S3 = ("s3", "s3a")
PART_MARK = ".part-"
"""In the name of what was not written to its end, at `file://`."""

_REQUEST_S = 30.0  # for one request; a range is 8 MB
_BYTES_PER_S = 250_000.0  # what an upload gets beside that
_PAUSES_S = (0.2, 0.8, 2.0)  # before the second, third and fourth attempt
_RANGE = 8 * 2**20  # of a file that is read
_PIECE = 16 * 2**20  # of an upload in parts, two of which are in memory


class StoreError(Exception):
    """The store can't be used now. The message is one clause, without credentials."""


@dataclass(frozen=True)
class Stored:
    """A file of the store: its path below the root, its size in bytes, and when it was written (seconds since 1970;
    0 where the store does not say)."""

    path: str
    size: int
    written: float


class Store:
    """The files below one address. Safe for several threads at once.

    Args:
        filesystem: fsspec's.
        root: Path of the folder in it.
        label: The address as it is shown.
    """

    def __init__(self, filesystem: Any, root: str, label: str) -> None:
        self._fs, self._root, self.label = filesystem, root.rstrip("/"), label
        protocols = filesystem.protocol
        self._protocols = (protocols,) if isinstance(protocols, str) else tuple(protocols)

    def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of a file, fewer where it ends before.

        Raises:
            FileNotFoundError: There is none.
            StoreError: The store does not answer, or refuses.
        """
        data = self._ask(lambda: self._fs.cat_file(self._path(path), start=start, end=end), _REQUEST_S)
        return bytes(data)

    def measure(self, path: str, listed: int) -> int:
        """How many bytes of a file the store answers with, at most one more than the `listed`. All of it is read.

        Raises:
            As `read`.
        """
        ends = [*range(_RANGE, listed, _RANGE), listed + 1]  # past its end in the last range, which begins within it
        return sum(len(self.read(path, start, end)) for start, end in pairwise([0, *ends])) if listed else 0

    def write(self, local: Path, path: str, *, replace: bool) -> bool:
        """Put a local file there, whole or not at all. False where there is one already and `replace` is not set.

        Raises:
            StoreError: The store does not answer, or refuses.
            OSError: The local file can't be read.
        """
        seconds = _REQUEST_S + local.stat().st_size / _BYTES_PER_S
        write = self._link if "file" in self._protocols else self._put
        try:
            return self._ask(lambda: write(local, self._path(path), replace), seconds)
        except FileNotFoundError as error:
            raise StoreError(_said(error)) from error

    def list(self, below: str = "") -> Iterator[Stored]:
        """All files below a folder of the store, also parts of those that were not finished. Raises StoreError."""
        try:
            found = self._ask(lambda: self._fs.find(self._path(below), detail=True), 4 * _REQUEST_S)
        except FileNotFoundError:
            return
        for name, detail in sorted(found.items()):
            path = name[len(self._root) :].lstrip("/") if name.startswith(self._root) else ""
            if path:
                yield Stored(path, int(detail.get("size") or 0), _written(detail))

    def delete(self, path: str) -> None:
        """Delete a file; one that is not there is no error. Raises StoreError."""
        with suppress(FileNotFoundError):
            self._ask(lambda: self._fs.rm_file(self._path(path)), _REQUEST_S)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _link(self, local: Path, path: str, replace: bool) -> bool:
        """Of a folder: written beside it, and given its name at the end."""
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f"{place.name}{PART_MARK}{uuid.uuid4().hex}")
        try:
            shutil.copyfile(local, part)
            with part.open("rb") as written:
                os.fsync(written.fileno())
            if not replace:
                try:
                    place.hardlink_to(part)
                except FileExistsError:
                    return False
                except OSError:  # the disk knows no links
                    if place.exists():
                        return False
                else:
                    return True
            part.replace(place)
            return True
        finally:
            part.unlink(missing_ok=True)

    def _put(self, local: Path, path: str, replace: bool) -> bool:
        """Of an object store, where a file appears when all of it is there."""
        more = {"chunksize": _PIECE, "max_concurrency": 2} if set(_S3) & set(self._protocols) else {}
        if not replace and local.stat().st_size > _PIECE and self._fs.exists(path):
            return False  # else S3 says so after all parts were sent
        try:
            self._fs.put_file(str(local), path, mode="overwrite" if replace else "create", **more)
        except FileExistsError:
            return False
        except Exception as error:
            if _is_there(error):
                return False
            if not _no_conditions(error):
                raise
            if not replace and self._fs.exists(path):
                return False
            self._fs.put_file(str(local), path, **more)
        return True

    def _ask(self, request: Callable[[], T], seconds: float) -> T:
        """The answer to a request, which is made up to four times. One that hangs is made once."""
        for pause in (*_PAUSES_S, None):
            try:
                return _within(request, seconds)
            except TimeoutError as error:
                raise StoreError(f"no answer within {seconds:.0f} s") from error
            except FileNotFoundError as error:
                if "bucket" in str(error).lower() and "does not exist" in str(error).lower():
                    raise StoreError(_said(error)) from error
                raise
            except Exception as error:
                if pause is None or _is_final(error):
                    raise StoreError(_said(error)) from error
                time.sleep(pause)
        raise AssertionError


def open_store(url: str) -> Store:
    """The store at an address.

    Raises:
        UsageError: It is no address of a kind that can be shared.
        MissingDependencyError: The package for it is not installed.
    """
    label = redacted(url)
    scheme, mark, rest = url.partition("://")
    if not mark or not rest.strip("/") or scheme not in ("file", *_EXTRAS):
        raise UsageError(
            f"{label} is no address of a shared cache",
            fix="give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or file:///FOLDER",
        )
    if label != url:  # workers of the run see the variable that names it
        raise UsageError(
            f"credentials stand in the address of the shared cache {label}",
            fix="give them as its client takes them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a role, ...",
        )
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True}
    if scheme != "file":
        options["use_listings_cache"] = False
    if scheme in _S3:
        waits = {"connect_timeout": 5, "read_timeout": 25, "retries": {"max_attempts": 0}}
        options["config_kwargs"] = waits
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingDependencyError(
            f"{label} needs a package that is not installed: {error}",
            fix=f'pip install "compile-stage[{_EXTRAS.get(scheme, scheme)}]"',
        ) from error
    except Exception as error:
        raise UsageError(f"{label} can't be used as a shared cache: {_said(error)}") from error
    if scheme in _S3:
        filesystem.retries = 1  # `_ask` makes a request again
    return Store(filesystem, root, label)


def _within(request: Callable[[], T], seconds: float) -> T:
    """Call it in a thread of its own, which is left behind when it hangs. Raises TimeoutError."""
    done: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            done.append(request())
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=call, name="shared-cache", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    if raised:
        raise raised[0]
    return done[0]


def _written(detail: dict[str, Any]) -> float:
    for name in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = detail.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0


def _is_final(error: Exception) -> bool:
    """True for what another attempt does not change."""
    if isinstance(error, PermissionError | NotImplementedError | TypeError | ValueError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EROFS, errno.ENOTDIR, errno.EISDIR):
        return True
    return type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")


def _is_there(error: Exception) -> bool:
    text = f"{error} {error.__cause__ or ''}"
    return "PreconditionFailed" in text or "pre-condition" in text or "ConditionalRequestConflict" in text


def _no_conditions(error: Exception) -> bool:
    return isinstance(error, TypeError | NotImplementedError) or "NotImplemented" in str(error)


def _said(error: BaseException) -> str:
    """One clause, at most 200 characters."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    return redacted(text)[:200].rstrip(".")
