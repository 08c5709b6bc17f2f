"""A content-addressed store of step results.

An entry is a folder named by the digest of everything that its content depends on. It holds `files/` and `entry.json`,
which carries the step's answer as plain JSON and the digest of `files/`. It is written under a temporary name, flushed
and renamed, so a reader sees all of it or nothing; it is verified when read, and an entry that does not hold is thrown
away and made anew. Only successes are stored: when `make` raises, nothing remains.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.digest import canonical_json, digest_of, digest_tree
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


class Cache:
    """The store below one folder. Safe for several processes and threads at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
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
        if not anew and (held := self._read(entry)) is not None:
            return held
        entry.parent.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock  # what loads a published model may have none

        with FileLock(f"{entry}.lock"):
            if not anew and (held := self._read(entry)) is not None:  # another process made it while we waited
                return held
            for left in entry.parent.glob(f"{_part_prefix(entry)}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            return self._write(entry, step, key, make)

    def read(self, step: str, key: Mapping[str, Any]) -> Cached | None:
        """The entry for `key`, verified; None when it is not there."""
        return self._read(self.locate(step, key))

    def locate(self, step: str, key: Mapping[str, Any]) -> Path:
        """The folder of an entry, there or not."""
        digest = digest_of({"step": step, "key": key})[7:]
        return self.root / step.partition("/")[0] / digest[:2] / digest

    def _read(self, entry: Path) -> Cached | None:
        try:
            stored = json.loads((entry / "entry.json").read_text())
            if stored["files"] != digest_tree(entry / "files"):
                return None
            self._used.add(entry)
            return Cached(value=stored["value"], path=str(entry / "files"), digest=stored["files"], hit=True)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, entry: Path, step: str, key: Mapping[str, Any], make: Callable[[Path], Any]) -> Cached:
        part = Path(tempfile.mkdtemp(prefix=_part_prefix(entry), dir=entry.parent))
        self._used.add(part)
        try:
            (part / "files").mkdir()
            value = json.loads(canonical_json(make(part / "files")))
            digest = digest_tree(part / "files")
            (part / "entry.json").write_text(
                canonical_json({"step": step, "key": key, "value": value, "files": digest})
            )
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
