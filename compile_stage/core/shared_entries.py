"""An entry of the cache as one file, as a shared cache holds it.

The first line says the format and the length of a header; the header is canonical JSON; then come the contents of the
files, one after another:

    compile-stage-entry 1 LENGTH
    {"entry": {...}, "files": [[NAME, BYTES, "sha256:..."], ...], "seal": {...}}
    CONTENT CONTENT ...

`entry` is what `entry.json` holds (`core.cache`), and `seal` vouches for the digest of `entry` and `files`. One file
appears in a store whole or not at all, the same entry gives the same bytes, and names and sizes are known, and vouched
for, before any content is read. An archive format would bring links, devices and headers of its own to look at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from compile_stage.core.digest import canonical_json, digest_of, list_tree
from compile_stage.core.records import record

_FORMAT = b"compile-stage-entry 1 "
_FIRST_BYTES = 2**18
_RANGE_BYTES = 8 * 2**20
_MAX_HEADER = 64 * 2**20
_MAX_FILES = 100_000
_MAX_NAME = 1000

Read = Callable[[int, int], bytes]
"""Bytes from one position to another, fewer at the end."""


class RefusedError(Exception):
    """It is no entry, or not the one that was asked for. The message is one clause."""


@record
class Header:
    """What stands before the contents.

    Attributes:
        sizes: Name → size in bytes, in the order of the contents.
        digests: Name → `sha256:...`.
        start: Where the contents start, in bytes.
    """

    entry: Mapping[str, Any]
    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    seal: Any
    start: int

    @property
    def sealed_digest(self) -> str:
        """What the seal is over."""
        return _digest(self.entry, [[name, self.sizes[name], self.digests[name]] for name in self.sizes])

    @property
    def total_bytes(self) -> int:
        """Size of the whole file."""
        return self.start + sum(self.sizes.values())


def pack(entry: Mapping[str, Any], files: Path, into: Path, sign: Callable[[str], Any]) -> None:
    """Write an entry as one file.

    Args:
        entry: Of `entry.json`.
        files: Its folder.
        sign: Makes the seal of a digest.

    Raises:
        RefusedError: The files are not those that the entry was made with, or have names that others can't hold.
    """
    names = list_tree(files)
    if any(path.is_dir() and not any(path.iterdir()) for path in files.rglob("*")):
        raise RefusedError("it holds an empty folder")
    listed: list[list[Any]] = []
    for name in names:
        if (reason := _refuse_name(name)) is not None:
            raise RefusedError(reason)
        with (files / name).open("rb") as stream:
            sha = hashlib.file_digest(stream, "sha256").hexdigest()
            listed.append([name, stream.tell(), f"sha256:{sha}"])
    if digest_of({name: sha for name, _, sha in listed}) != entry["files"]:
        raise RefusedError("its files were changed on this disk")
    seal = sign(_digest(entry, listed))
    header = canonical_json({"entry": entry, "files": listed, "seal": seal}).encode() + b"\n"
    with into.open("wb") as out:
        out.write(_FORMAT + b"%d\n" % len(header) + header)
        for name, size, sha in listed:
            _copy(files / name, out, size, sha)


def read_header(read: Read) -> tuple[Header, bytes]:
    """The header, and what was read of the contents with it.

    Raises:
        RefusedError: It is none.
    """
    first = read(0, _FIRST_BYTES)
    line, mark, _ = first[:64].partition(b"\n")
    length = line.removeprefix(_FORMAT)
    if not mark or length == line or not length.isdigit() or len(length) > 12:
        raise RefusedError("it is no entry")
    start, end = len(line) + 1, len(line) + 1 + int(length)
    if int(length) > _MAX_HEADER:
        raise RefusedError("its header is larger than 64 MB")
    if end > len(first) and len(first) == _FIRST_BYTES:
        first += _all(read, len(first), end)
    if end > len(first):
        raise RefusedError("it is truncated")
    return _header(first[start:end], end), first[end:]


def unpack(header: Header, rest: bytes, read: Read, into: Path) -> None:
    """Write the files into an empty folder, a range of the contents at a time.

    Args:
        rest: What `read_header` read of them.

    Raises:
        RefusedError: One of them is not what the header says.
    """
    position, ahead = header.start, rest
    for name, size in header.sizes.items():
        sha, left = hashlib.sha256(), size
        with _new_file(into / name) as out:
            while left:
                if not ahead:
                    ahead = read(position, min(position + _RANGE_BYTES, header.total_bytes))
                    if not ahead:
                        raise RefusedError("it is truncated")
                piece, ahead = ahead[:left], ahead[left:]
                out.write(piece)
                sha.update(piece)
                left -= len(piece)
                position += len(piece)
        if f"sha256:{sha.hexdigest()}" != header.digests[name]:
            raise RefusedError(f"its file {name} is not what its header says")


def _new_file(place: Path) -> IO[bytes]:
    """Raises RefusedError for a name that this disk can't hold beside those before it."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return place.open("xb")
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL):
            raise RefusedError(f"it names a file {place.name[:80]!r} that can't be made") from error
        raise


def _header(text: bytes, start: int) -> Header:
    try:
        said = json.loads(text)
        listed = said["files"]
        if len(listed) > _MAX_FILES:
            raise ValueError("too many files")
        sizes = {str(name): int(size) for name, size, _ in listed}
        digests = {str(name): str(sha) for name, _, sha in listed}
        header = Header(entry=dict(said["entry"]), sizes=sizes, digests=digests, seal=said["seal"], start=start)
        if len(sizes) != len(listed) or any(size < 0 for size in sizes.values()):
            raise ValueError("a name stands twice, or a size is none")
        if digest_of(dict(sorted(digests.items()))) != header.entry["files"]:
            raise ValueError("its list of files is not that of the entry")
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise RefusedError(f"its header can't be read: {error}"[:200]) from error
    for name in sizes:
        if (reason := _refuse_name(name)) is not None:
            raise RefusedError(reason)
    return header


def _refuse_name(name: str) -> str | None:
    """None for a relative path that leads nowhere else, on any system."""
    parts = PurePosixPath(name).parts
    odd = any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name) or "\\" in name or ":" in name
    if (
        not parts
        or name.startswith("/")
        or ".." in parts
        or odd
        or len(name) > _MAX_NAME
        or str(PurePosixPath(name)) != name
    ):
        return f"it names a file {name[:80]!r}"
    return None


def _digest(entry: Mapping[str, Any], listed: list[list[Any]]) -> str:
    return digest_of({"entry": entry, "files": listed})


def _all(read: Read, start: int, end: int) -> bytes:
    parts = []
    while start < end and (piece := read(start, min(end, start + _RANGE_BYTES))):
        parts.append(piece)
        start += len(piece)
    return b"".join(parts)


def _copy(file: Path, out: Any, size: int, sha: str) -> None:
    """Raises RefusedError where the file was changed since it was digested."""
    seen, left = hashlib.sha256(), size
    with file.open("rb") as stream:
        while left and (piece := stream.read(min(left, _RANGE_BYTES))):
            out.write(piece)
            seen.update(piece)
            left -= len(piece)
    if left or f"sha256:{seen.hexdigest()}" != sha:
        raise RefusedError("its files were changed on this disk")
