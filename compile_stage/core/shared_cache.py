"""A cache that machines share, behind the one on each disk (`core.cache`): what a disk lacks is looked for there, and
what is made is put there.

Nothing of it is believed that its seal and its digests do not vouch for. An entry that does not hold is a miss, said
once in the log, and is replaced by the one that is then made. A server that does not answer ends the use of the shared
cache, not the run. Nothing is raised here but what is wrong with the settings.

    <url>/v1/<seal>/<step>/<first two digits>/<digest of the key>

`<seal>` is `unsigned`, `mac-<id of the secret>` or `signed`: who has another secret looks elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from compile_stage.core.cache import refuse_entry, sealed_entry
from compile_stage.core.digest import canonical_json, digest_tree, list_tree
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.reuse import HERE, UNSIGNED, Reuse, made_here, may_be_unsigned
from compile_stage.core.shared_entries import Header, RefusedError, pack, read_header, unpack
from compile_stage.core.shared_store import PART_MARK, Store, StoreError, open_store
from compile_stage.core.tuning_records import MAX_BYTES, checked_key
from compile_stage.core.unsigned_entries import refuse_unsigned

URL_VARIABLE = "COMPILE_STAGE_SHARED_CACHE"
MODE_VARIABLE = "COMPILE_STAGE_SHARED_CACHE_MODE"
MODES = ("read-write", "read")
VERSION = "v1"
_RECORD = "tuning/1"
_WARNINGS = 3  # of refused entries; the rest are counted

_log = logging.getLogger(__name__)


class Seal(Protocol):
    """Vouches for entries, and knows whose seals hold.

    Attributes:
        name: The folder of the entries that have such seals.
        signs: False where only others' seals can be verified.
    """

    name: str
    signs: bool

    def sign(self, digest: str) -> Any:
        """The seal of a digest, as plain JSON."""

    def voucher(self, digest: str, seal: Any) -> str:
        """Who vouches for the digest; `nobody` where there are no seals. Raises RefusedError where none that is trusted
        does."""


class NoSeal:
    """Where no key is configured."""

    name, signs = "unsigned", True

    def sign(self, digest: str) -> Any:
        return None

    def voucher(self, digest: str, seal: Any) -> str:
        return UNSIGNED


class SecretSeal:
    """An HMAC-SHA256 by a secret that all share who read or write."""

    signs = True

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.new(secret, b"compile-stage shared cache", hashlib.sha256).digest()
        self.name = f"mac-{hashlib.sha256(self._secret).hexdigest()[:16]}"

    def sign(self, digest: str) -> Any:
        return hmac.new(self._secret, digest.encode(), hashlib.sha256).hexdigest()

    def voucher(self, digest: str, seal: Any) -> str:
        if not isinstance(seal, str) or not hmac.compare_digest(seal.encode(), self.sign(digest).encode()):
            raise RefusedError("its MAC is not one of this cache's secret")
        return self.name


class SharedCache:
    """The entries below one address. Safe for several threads at once.

    Args:
        writes: False: nothing is put there.
    """

    def __init__(self, store: Store, seal: Seal, *, writes: bool = True) -> None:
        self.store, self.seal = store, seal
        self._writes, self._reads = writes and seal.signs, True
        self._lock = threading.Lock()
        self._trouble: list[str] = []
        self._refused: set[str] = set()
        self.counts: Counter[str] = Counter()

    def pull(
        self, place: str, into: Path, reuse: Reuse, check: Callable[[Mapping[str, Any]], str | None]
    ) -> dict[str, Any] | None:
        """Take an entry: what `entry.json` holds of it, with who vouches for it; None where there is none that may be
        used.

        Args:
            place: Of the entry, `<step>/<two digits>/<digest>`.
            into: An empty folder for its files.
            reuse: What the policy says.
            check: None for what `entry.json` holds of the very entry that was asked for, or the reason.
        """
        step = place.partition("/")[0]
        if not self._reads or reuse.reach(step) == "never" or not self._holds(step):
            return None
        if place in self._refused:  # it is not fetched, and not counted, a second time
            return None
        path = self.path_of(place)

        def read(start: int, end: int) -> bytes:
            return self.store.read(path, start, end)

        try:
            header, rest = read_header(read)
            entry = self._admitted(header, check)
            if (reason := reuse.refuse(entry["step"], entry["made"])) is not None:
                _log.info("%s of the shared cache is not used: %s", place, reason)
                self._count("not used by the policy")
                return None
            if header.total_bytes - header.start > _free_bytes(into):
                raise RefusedError("it is larger than what is free on this disk")
            unpack(header, rest, read, into)
        except FileNotFoundError:
            self._count("missed")
            return None
        except RefusedError as refused:
            self._refuse(place, f"{refused}")
            return None
        except StoreError as error:
            self._give_up(f"{error}")
            return None
        self._count("taken")
        return entry

    def push(self, place: str, entry: Mapping[str, Any], files: Path, *, replace: bool = False) -> None:
        """Put an entry there, unless one is there already.

        Args:
            replace: Though one is there. One that was refused is replaced in any case.
        """
        if not self._writes or not self._pushes(entry, files):
            return
        replace = replace or place in self._refused
        try:
            home = files.parent  # the part beside it is cleared away with what else a killed process left
            with tempfile.TemporaryDirectory(prefix=f"{home.name[:16]}.part-", dir=home.parent) as folder:
                packed = Path(folder) / "packed"
                pack(entry, files, packed, self.seal.sign)
                if self.store.write(packed, self.path_of(place), replace=replace):
                    self._count("added")
        except (RefusedError, OSError) as error:  # the entry can't be had, or goes while it is read
            _log.info("%s is not put into the shared cache: %s", place, error)
        except StoreError as error:
            self._give_up(f"{error}", writing=True)
        except CompileStageError as error:  # of a signer
            self._give_up(error.problem, writing=True)

    def pull_records(self, key: str, have: Collection[str], into: Path) -> None:
        """Bring the tuning records of a key (`core.tuning_records`) that `have` does not name into an empty folder."""
        if not self._reads:
            return
        try:
            listed = {found.path.rpartition("/")[2] for found in self.store.list(self.path_of(_records(key)))}
            for name in sorted(listed - set(have)):
                if PART_MARK not in name:
                    self._pull_record(key, name, into)
        except StoreError as error:
            self._give_up(f"{error}")

    def push_records(self, key: str, records: Mapping[str, Path]) -> int:
        """Put the tuning records of a key there that are not; returns how many were."""
        if not self._writes:
            return 0
        added = 0
        try:
            listed = {found.path.rpartition("/")[2] for found in self.store.list(self.path_of(_records(key)))}
            for name in sorted(set(records) - listed):
                with tempfile.TemporaryDirectory(prefix="compile-stage-", dir=records[name].parent) as folder:
                    files = Path(folder) / "files"
                    files.mkdir()
                    shutil.copyfile(records[name], files / name)
                    asked = {"records": key, "name": name}
                    entry = sealed_entry(_RECORD, asked, None, digest_tree(files), made_here())
                    pack(entry, files, Path(folder) / "packed", self.seal.sign)
                    path = self.path_of(f"{_records(key)}/{name}")
                    added += self.store.write(Path(folder) / "packed", path, replace=False)
        except StoreError as error:
            self._give_up(f"{error}", writing=True)
        except CompileStageError as error:  # of a signer
            self._give_up(error.problem, writing=True)
        except RefusedError as refused:
            _log.info("tuning records of %s are not put into the shared cache: %s", key, refused)
        return added

    def _pull_record(self, key: str, name: str, into: Path) -> None:
        place = f"{_records(key)}/{name}"
        path = self.path_of(place)

        def read(start: int, end: int) -> bytes:
            return self.store.read(path, start, end)

        try:
            header, rest = read_header(read)
            self._admitted(header, lambda entry: refuse_entry(entry, _RECORD, {"records": key, "name": name}))
            if list(header.sizes) != [name] or header.sizes[name] > MAX_BYTES:
                raise RefusedError("it holds something else than a tuning record")
            unpack(header, rest, read, into)
        except FileNotFoundError:
            return
        except RefusedError as refused:
            (into / name).unlink(missing_ok=True)
            self._refuse(place, f"{refused}")

    def path_of(self, place: str) -> str:
        """Of an entry, below the root of the store."""
        return f"{VERSION}/{self.seal.name}/{place}"

    def refuse(self, path: str, check: Callable[[Mapping[str, Any]], str | None]) -> str | None:
        """None when a file of the store is a whole entry that somebody vouches for who is trusted; or the reason. All
        of it is read. Raises StoreError.

        Args:
            check: As of `pull`.
        """

        def read(start: int, end: int) -> bytes:
            return self.store.read(path, start, end)

        try:
            with tempfile.TemporaryDirectory(prefix="compile-stage-") as folder:
                header, rest = read_header(read)
                self._admitted(header, check)
                unpack(header, rest, read, Path(folder))
                if read(header.total_bytes - 1, header.total_bytes + 1)[1:]:
                    return "something follows its end"
        except FileNotFoundError:
            return "it is gone"
        except RefusedError as refused:
            return f"{refused}"
        return None

    def notes(self) -> tuple[str, ...]:
        """What a reader of the run's result should know."""
        label = self.store.label
        said = [f"{count} {what}" for what, count in sorted(self.counts.items()) if what != "missed"]
        notes = [f"shared cache {label}: {', '.join(said)}"] if said else []
        if isinstance(self.seal, NoSeal):
            notes.append(
                f"entries of the shared cache {label} carry no signature: only tuning records, lowered graphs "
                "and compiled artifacts that are no code are taken from it, and validated here (docs/shared-cache.md)"
            )
        return (*notes, *self._trouble)

    def _pushes(self, entry: Mapping[str, Any], files: Path) -> bool:
        """Only what was made on this disk; without a key only what others may use, who would warn of the rest."""
        if entry["made"]["vouched"] != HERE or not self._holds(entry["step"]):
            return False
        if not isinstance(self.seal, NoSeal):
            return True
        try:
            sizes = {name: (files / name).stat().st_size for name in list_tree(files)}
        except OSError as error:  # the entry goes while it is read
            _log.info("%s is not put into the shared cache: %s", entry["step"], error)
            return False
        return refuse_unsigned(entry["step"], entry["key"], entry["value"], entry["files"], sizes) is None

    def _holds(self, step: str) -> bool:
        """Without a key only what others may use."""
        return not isinstance(self.seal, NoSeal) or may_be_unsigned(step)

    def _admitted(self, header: Header, check: Callable[[Mapping[str, Any]], str | None]) -> dict[str, Any]:
        """What `entry.json` is to hold. Raises RefusedError, for content of any kind."""
        try:
            canonical_json(header.entry).encode()  # as it will be written
            return self._vouched(header, check)
        except (RecursionError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise RefusedError(f"it can't be read: {type(error).__name__}") from error

    def _vouched(self, header: Header, check: Callable[[Mapping[str, Any]], str | None]) -> dict[str, Any]:
        voucher = self.seal.voucher(header.sealed_digest, header.seal)
        entry = dict(header.entry)
        if (reason := check(entry)) is not None:
            raise RefusedError(reason)
        if voucher == UNSIGNED and may_be_unsigned(entry["step"]):
            reason = refuse_unsigned(entry["step"], entry["key"], entry["value"], entry["files"], header.sizes)
            if reason is not None:
                raise RefusedError(reason)
        return {**entry, "made": {"machine": entry["made"]["machine"], "vouched": voucher}}

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _refuse(self, place: str, reason: str) -> None:
        with self._lock:
            self.counts["refused"] += 1
            self._refused.add(place)
            many = self.counts["refused"]
        if many <= _WARNINGS:
            _log.warning(
                "the entry %s of the shared cache %s was refused, and is made anew: %s", place, self.store.label, reason
            )

    def _give_up(self, reason: str, *, writing: bool = False) -> None:
        with self._lock:
            if not (self._writes if writing else self._reads):
                return  # another thread said so
            self._writes = False
            self._reads = self._reads and writing
            said = f"the shared cache {self.store.label} was {'read' if writing else 'not used'} from then on"
            note = f"{said}{' only' if writing else ''}: {reason}; the run went on with this machine's cache"
            self._trouble.append(note)
        _log.warning("the shared cache %s can't be %s: %s; the run goes on without it", self.store.label,
                     "written" if writing else "read", reason)  # fmt: skip


def _records(key: str) -> str:
    """The folder of a key's tuning records."""
    return f"tuning/{checked_key(key)}"


def is_named(url: str | None = None) -> bool:
    """True where `shared_cache` finds an address."""
    return bool(os.environ.get(URL_VARIABLE, "") if url is None else url)


def shared_cache(seal: Seal, url: str | None = None) -> SharedCache | None:
    """The shared cache at `url`, or at `$COMPILE_STAGE_SHARED_CACHE`; None where neither names one, or the first is
    empty. `$COMPILE_STAGE_SHARED_CACHE_MODE=read` keeps from writing.

    Raises:
        UsageError: It is no such address, or no such mode.
        MissingDependencyError: The package for it is not installed.
    """
    named = os.environ.get(URL_VARIABLE, "") if url is None else url
    if not named:
        return None
    mode = os.environ.get(MODE_VARIABLE, "") or MODES[0]
    if mode not in MODES:
        raise UsageError(f"{MODE_VARIABLE} is {mode!r}", fix=f"set it to one of: {', '.join(MODES)}")
    return SharedCache(open_store(named), seal, writes=mode != "read")


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
