"""A content-addressed store of step results.

An entry is a folder named by the digest of everything that its content depends on. It holds `files/` and `entry.json`,
which carries step and key, the step's answer as plain JSON, the digest of `files/`, and the digest of all that. It is
written under a temporary name, flushed and renamed, so a reader sees all of it or nothing. When it is read, both
digests and the key must hold: an entry that was changed, damaged or copied from another key is thrown away and made
anew. Only successes are stored: when `make` raises, nothing remains.

Digests tell accidents. Where others may write to the cache, `$COMPILE_STAGE_CACHE_KEY` names a file with a secret: then
entries carry a MAC over all that they say, and one without it, or with another, is made anew too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.cache_eviction import touch
from compile_stage.core.digest import canonical_json, digest_of, digest_tree, plain
from compile_stage.core.errors import UsageError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.records import record


@record
class Cached:
    """An entry as read: the step's answer, the folder of its files and their digest, and whether it was there
    before."""

    value: Any
    path: str
    digest: str
    hit: bool


def cache_root() -> Path:
    """`$COMPILE_STAGE_CACHE`, or the user's cache folder."""
    if named := os.environ.get("COMPILE_STAGE_CACHE"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("compile-stage")


SECRET_VARIABLE = "COMPILE_STAGE_CACHE_KEY"  # noqa: S105 - the variable's name
_SECRET_BYTES = 32


def cache_secret() -> bytes | None:
    """The secret that `$COMPILE_STAGE_CACHE_KEY` names a file of; None where it is not set.

    Raises:
        UsageError: The file can't be read, or holds fewer than 32 bytes.
    """
    named = os.environ.get(SECRET_VARIABLE)
    if not named:
        return None
    fix = f"head -c {_SECRET_BYTES} /dev/urandom > FILE && chmod 600 FILE, and set {SECRET_VARIABLE}=FILE"
    try:
        secret = Path(named).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"the cache's secret can't be read: {error.strerror}", fix=fix, where=named) from error
    if len(secret) < _SECRET_BYTES:
        raise UsageError(f"the cache's secret has {len(secret)} bytes, fewer than 32", fix=fix, where=named)
    return secret


class Cache:
    """The store below one folder. Safe for several processes and threads at once.

    Args:
        secret: With it, entries are written with a MAC, and read only with it.
    """

    def __init__(self, root: Path, secret: bytes | None = None) -> None:
        self.root, self._secret = root, secret
        self._used: set[Path] = set()  # what callers of this process were given, and go on using by path

    def use(self, path: Path) -> None:
        """Have `removed` look at a path too that lies below the root and is no entry."""
        self._used.add(path)

    def removed(self) -> Path | None:
        """An entry that was given out and is no longer there; None while all are."""
        return next((path for path in sorted(self._used) if not path.exists()), None)

    def fetch(self, step: str, key: Mapping[str, Any], make: Callable[[Path], Any], *, anew: bool = False) -> Cached:
        """The entry for `key`, made by `make(folder)` if it is not there.

        Args:
            step: Name and version of the step, such as `compile/1`; part of the key.
            key: Everything the result depends on: digests of inputs, tool versions, hardware where it matters.
            make: Writes files into the folder it is given and returns the answer as plain JSON.
            anew: Make it though it is there, and replace it; when `make` raises, what was there stays.
        """
        entry = self.locate(step, key)
        if not anew and (held := self._read(step, key)) is not None:
            return held
        entry.parent.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock  # what loads a published model may have none

        with FileLock(f"{entry}.lock"):
            if not anew and (held := self._read(step, key)) is not None:  # another process made it while we waited
                return held
            for left in entry.parent.glob(f"{_part_prefix(entry)}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            return self._write(step, key, make)

    def read(self, step: str, key: Mapping[str, Any]) -> Cached | None:
        """The entry for `key`, verified; None when it is not there."""
        return self._read(step, key)

    def locate(self, step: str, key: Mapping[str, Any]) -> Path:
        """The folder of an entry, there or not."""
        digest = digest_of({"step": step, "key": key})[7:]
        return self.root / step.partition("/")[0] / digest[:2] / digest

    def _read(self, step: str, key: Mapping[str, Any]) -> Cached | None:
        entry = self.locate(step, key)
        try:
            stored = read_json_object(entry / "entry.json")
            mac = stored.pop("mac", "")
            if stored != _sealed(step, key, stored["value"], stored["files"]):
                return None
            if self._secret is not None and not hmac.compare_digest(mac, self._mac(stored)):
                return None
            if stored["files"] != digest_tree(entry / "files"):
                return None
            self._used.add(entry)
            touch(entry)
            return Cached(value=stored["value"], path=str(entry / "files"), digest=stored["files"], hit=True)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, step: str, key: Mapping[str, Any], make: Callable[[Path], Any]) -> Cached:
        entry = self.locate(step, key)
        part = Path(tempfile.mkdtemp(prefix=_part_prefix(entry), dir=entry.parent))
        self._used.add(part)
        try:
            (part / "files").mkdir()
            value = json.loads(canonical_json(make(part / "files")))
            digest = digest_tree(part / "files")
            sealed = _sealed(step, key, value, digest)
            stored = sealed if self._secret is None else {**sealed, "mac": self._mac(sealed)}
            (part / "entry.json").write_text(canonical_json(stored))
            flush_tree(part)
            shutil.rmtree(entry, ignore_errors=True)  # damaged, or to be replaced
            part.rename(entry)
            self._used.add(entry)
        except BaseException:
            if part.exists():  # else `removed` is to name it
                self._used.discard(part)
            raise
        else:
            self._used.discard(part)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return Cached(value=value, path=str(entry / "files"), digest=digest, hit=False)

    def _mac(self, sealed: Mapping[str, Any]) -> str:
        """HMAC-SHA256 of the digest, which is over all that the entry says."""
        return hmac.new(self._secret or b"", sealed["digest"].encode(), hashlib.sha256).hexdigest()


def _sealed(step: str, key: Mapping[str, Any], value: Any, files: str) -> dict[str, Any]:
    """What `entry.json` holds, with the digest of the rest of it."""
    content = plain({"step": step, "key": key, "value": value, "files": files})
    return {**content, "digest": digest_of(content)}


def _part_prefix(entry: Path) -> str:
    return f"{entry.name[:16]}.part-"


def flush_tree(root: Path) -> None:
    """fsync every file below `root`, so that a rename that follows never shows empty files after a power cut."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
