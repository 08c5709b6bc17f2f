"""A content-addressed store of step results.

An entry is a folder named by the digest of everything that its content depends on. It holds `files/` and `entry.json`,
which carries step and key, the step's answer as plain JSON, the digest of `files/`, and the digest of all that. It is
written under a temporary name, flushed and renamed, so a reader sees all of it or nothing. When it is read, both
digests and the key must hold: an entry that was changed, damaged or copied from another key is thrown away and made
anew. Only successes are stored: when `make` raises, nothing remains.

Digests tell accidents. Where others may write to the cache, `$COMPILE_STAGE_CACHE_KEY` names a file with a secret: then
entries carry a MAC over all that they say, and one without it, or with another, is made anew too.

An entry says which machine made it, and whether it came from a shared cache (`core.shared_cache`): what the policy
allows of that is used (`core.reuse`), all else is made anew. What is not here is looked for in the shared cache, where
there is one, and what is made here is put there.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from compile_stage.core.cache_eviction import touch
from compile_stage.core.digest import canonical_json, digest_of, digest_tree, plain
from compile_stage.core.errors import UsageError, WorkerError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.read_errors import raise_if_too_many_open
from compile_stage.core.records import record
from compile_stage.core.reuse import Reuse, made_here
from compile_stage.core.storage import raise_if_full


class SharedEntries(Protocol):
    """Where other machines put what they made: `core.shared_cache.SharedCache`, which a published model's loader does
    not carry."""

    def pull(
        self, place: str, into: Path, reuse: Reuse, check: Callable[[Mapping[str, Any]], str | None]
    ) -> dict[str, Any] | None: ...

    def push(self, place: str, entry: Mapping[str, Any], files: Path, *, replace: bool = False) -> None: ...

    def pull_records(self, key: str, have: Collection[str], into: Path) -> None: ...

    def push_records(self, key: str, records: Mapping[str, Path]) -> int: ...

    def notes(self) -> tuple[str, ...]: ...


@record
class Cached:
    """An entry as read: the step's answer, the folder of its files and their digest, and whether it was there
    before."""

    value: Any
    path: str
    digest: str
    hit: bool


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
        shared: Where entries are looked for that are not here.
        reuse: Which results of earlier runs may be used.
    """

    def __init__(
        self,
        root: Path,
        secret: bytes | None = None,
        *,
        shared: SharedEntries | None = None,
        reuse: Reuse = Reuse(),  # noqa: B008 - frozen
    ) -> None:
        self.root, self._secret, self.shared, self._reuse = root, secret, shared, reuse
        self._own: set[Path] = set()  # made by this very object
        self._used: set[Path] = set()  # what callers of this process were given, and go on using by path
        self._placing = threading.Lock()  # held while an entry is not where `_used` says
        self._left = threading.Event()  # set when nobody wants an entry any more

    def use(self, path: Path) -> None:
        """Have `removed` look at a path too that lies below the root and is no entry."""
        self._used.add(path)

    def stop_waiting(self) -> None:
        """Send away everybody who waits for an entry that another process makes, and everybody who comes."""
        self._left.set()

    def notes(self) -> tuple[str, ...]:
        """What a reader of a run's result should know of the shared cache."""
        return self.shared.notes() if self.shared is not None else ()

    def removed(self) -> Path | None:
        """An entry that was given out and is no longer there; None while all are."""
        with self._placing:
            return next((path for path in sorted(self._used) if not path.exists()), None)

    def fetch(self, step: str, key: Mapping[str, Any], make: Callable[[Path], Any], *, anew: bool = False) -> Cached:
        """The entry for `key`, made by `make(folder)` if it is not there.

        Args:
            step: Name and version of the step, such as `compile/1`; part of the key.
            key: Everything the result depends on: digests of inputs, tool versions, hardware where it matters.
            make: Writes files into the folder it is given and returns the answer as plain JSON.
            anew: Make it though it is there, and replace it; when `make` raises, what was there stays.

        Raises:
            WorkerError: `stop_waiting` was called while another process made it.
        """
        if not anew and (held := self._read(step, key)) is not None:
            return held
        with self._locked(step, key):
            if not anew and (held := self._read(step, key)) is not None:  # another process made it while we waited
                return held
            if not anew and (held := self._pull(step, key)) is not None:
                return held
            made = self._write(step, key, make)
        self._push(step, key, replace=anew)
        return made

    def read(self, step: str, key: Mapping[str, Any]) -> Cached | None:
        """The entry for `key`, verified; None when it is neither here nor in the shared cache."""
        held = self._read(step, key)
        if held is not None or self.shared is None:
            return held
        with self._locked(step, key):
            return self._read(step, key) or self._pull(step, key)

    def locate(self, step: str, key: Mapping[str, Any]) -> Path:
        """The folder of an entry, there or not."""
        digest = digest_of({"step": step, "key": key})[7:]
        return self.root / step.partition("/")[0] / digest[:2] / digest

    def refuse(self, entry: Path) -> str | None:
        """None when the entry in this folder is whole and unchanged, and lies where its key belongs; or the reason."""
        try:
            stored = read_json_object(entry / "entry.json")
            mac = stored.pop("mac", "")
            if (reason := refuse_entry(stored, stored["step"], stored["key"])) is not None:
                return reason
            if self.locate(stored["step"], stored["key"]) != entry:
                return "it lies where the entry of another key belongs"
            if self._secret is not None and not hmac.compare_digest(mac, self._mac(stored)):
                return "its MAC is not one of this cache's secret"
            return None if stored["files"] == digest_tree(entry / "files") else "its files were changed"
        except OSError as error:
            raise_if_too_many_open(error)
            return f"it can't be read: {error.strerror or type(error).__name__}"
        except (ValueError, KeyError, TypeError) as error:
            return f"it can't be read: {type(error).__name__}"

    def delete(self, entry: Path, refuse: Callable[[], str | None]) -> str | None:
        """Delete an entry for which `refuse` gives a reason while nobody makes it anew; returns the reason, or None
        where the entry stays, or was gone. Raises PermissionError where it can't be deleted."""
        from filelock import FileLock

        with FileLock(f"{entry}.lock"):
            if (reason := refuse()) is None or not entry.exists():
                return None
            shutil.rmtree(entry, ignore_errors=True)
            if entry.exists():  # another user's
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(entry))
            return reason

    @contextmanager
    def _locked(self, step: str, key: Mapping[str, Any]) -> Iterator[None]:
        """Alone with the entry, and without what a process left that was killed."""
        from filelock import FileLock, Timeout  # what loads a published model may have none

        entry = self.locate(step, key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:  # another run may hold it for hours, and Ctrl-C wakes the main thread only
                stack.enter_context(FileLock(f"{entry}.lock").acquire(cancel_check=self._left.is_set))
            except Timeout:
                raise WorkerError("crash", "the run ended while it waited for another one to make this") from None
            for left in entry.parent.glob(f"{_part_prefix(entry)}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield

    def _read(self, step: str, key: Mapping[str, Any]) -> Cached | None:
        entry = self.locate(step, key)
        try:
            stored = read_json_object(entry / "entry.json")
            mac = stored.pop("mac", "")
            if refuse_entry(stored, step, key) is not None:
                return None
            if self._secret is not None and not hmac.compare_digest(mac, self._mac(stored)):
                return None
            if stored["files"] != digest_tree(entry / "files"):
                return None
            if entry not in self._own and self._reuse.refuse(step, stored["made"]) is not None:
                return None
            self._used.add(entry)
            touch(entry)
            return Cached(value=stored["value"], path=str(entry / "files"), digest=stored["files"], hit=True)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, step: str, key: Mapping[str, Any], make: Callable[[Path], Any]) -> Cached:
        """Make it."""
        with self._part(step, key) as part:
            (part / "files").mkdir()
            value = json.loads(canonical_json(make(part / "files")))
            digest = digest_tree(part / "files")
            held = self._place(part, sealed_entry(step, key, value, digest, made_here()))
        self._own.add(self.locate(step, key))
        return held

    def _pull(self, step: str, key: Mapping[str, Any]) -> Cached | None:
        """Take it from the shared cache."""
        if self.shared is None:
            return None
        with self._part(step, key) as part:
            (part / "files").mkdir()
            entry = self.shared.pull(
                self._name(step, key), part / "files", self._reuse, lambda entry: refuse_entry(entry, step, key)
            )
            if entry is None:
                return None
            held = self._place(part, sealed_entry(step, key, entry["value"], entry["files"], entry["made"]))
            return replace(held, hit=True)

    def _push(self, step: str, key: Mapping[str, Any], *, replace: bool) -> None:
        """Put what was made here into the shared cache."""
        if self.shared is None:
            return
        entry = self.locate(step, key)
        try:
            stored = read_json_object(entry / "entry.json")
        except (OSError, ValueError):  # another process makes it anew, and will put that there
            return
        stored.pop("mac", None)
        self.shared.push(self._name(step, key), stored, entry / "files", replace=replace)

    @contextmanager
    def _part(self, step: str, key: Mapping[str, Any]) -> Iterator[Path]:
        """A folder that becomes the entry, or goes."""
        entry = self.locate(step, key)
        part = entry.parent / f"{_part_prefix(entry)}{secrets.token_hex(8)}"
        part.mkdir()  # for all whom the umask lets: `mkdtemp` makes it private, and several users may have one cache
        self._used.add(part)
        try:
            yield part
        except BaseException as error:
            if part.exists():  # else `removed` is to name it
                self._used.discard(part)
                if isinstance(error, OSError):
                    raise_if_full(error, part)
            raise
        else:
            self._used.discard(part)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _place(self, part: Path, sealed: Mapping[str, Any]) -> Cached:
        """Give the part the entry's name."""
        entry = self.locate(sealed["step"], sealed["key"])
        stored = sealed if self._secret is None else {**sealed, "mac": self._mac(sealed)}
        (part / "entry.json").write_text(canonical_json(stored), encoding="utf-8")
        flush_tree(part)
        with self._placing:
            shutil.rmtree(entry, ignore_errors=True)  # damaged, or to be replaced
            if entry.exists():  # another user's, who keeps it private
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(entry))
            part.rename(entry)
            self._used.discard(part)
            self._used.add(entry)
        return Cached(value=sealed["value"], path=str(entry / "files"), digest=sealed["files"], hit=False)

    def _name(self, step: str, key: Mapping[str, Any]) -> str:
        return self.locate(step, key).relative_to(self.root).as_posix()

    def _mac(self, sealed: Mapping[str, Any]) -> str:
        """HMAC-SHA256 of the digest, which is over all that the entry says."""
        return hmac.new(self._secret or b"", sealed["digest"].encode(), hashlib.sha256).hexdigest()


def sealed_entry(step: str, key: Mapping[str, Any], value: Any, files: str, made: Mapping[str, str]) -> dict[str, Any]:
    """What `entry.json` holds, with the digest of the rest of it."""
    content = plain({"step": step, "key": key, "value": value, "files": files, "made": made})
    return {**content, "digest": digest_of(content)}


def refuse_entry(stored: Mapping[str, Any], step: str, key: Mapping[str, Any]) -> str | None:
    """None when that is what `entry.json` holds for the key, whole and unchanged; or the reason."""
    try:
        made = {name: stored["made"][name] for name in ("machine", "vouched")}
        if not all(isinstance(text, str) for text in (*made.values(), stored["files"])):
            return "what it says of its origin can't be read"
        same = stored == sealed_entry(step, key, stored["value"], stored["files"], made)
        return None if same else "it is the entry of another key, or was changed"
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        return f"it can't be read: {type(error).__name__}"


def _part_prefix(entry: Path) -> str:
    return f"{entry.name[:16]}.part-"


def flush_tree(root: Path) -> None:
    """fsync every file below `root`, so that a rename that follows never shows empty files after a power cut."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:  # the kernel names no file
                raise OSError(error.errno, error.strerror, str(path)) from error
            finally:
                os.close(descriptor)
