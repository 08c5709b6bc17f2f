"""`cache ls`, `verify` and `gc`: what is in a cache, whether it holds, and less of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compile_stage.core.cache import Cache, cache_secret, refuse_entry
from compile_stage.core.cache_eviction import collect, entries_of
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import StorageError, UsageError
from compile_stage.core.read_errors import raise_if_too_many_open
from compile_stage.core.records import record
from compile_stage.core.shared_cache import MODE_VARIABLE, URL_VARIABLE, SharedCache
from compile_stage.core.shared_store import PART_MARK, StoreError
from compile_stage.shared_caching import open_shared

_DAY_S = 24 * 3600.0
_SOURCES = "sources"
_MANY = 5  # entries that do not hold: from here on, not most of a cache is deleted
_MANY_HERE_FIX = (
    "so many at once say more of the way to them than of them: look at COMPILE_STAGE_CACHE_KEY, whether its secret is "
    "that which they were made with, and at the disk (the kernel's log: dmesg). `compile-stage cache verify` names "
    "them. Where they are damaged, delete this folder while no run uses it; runs make them anew"
)
_MANY_SHARED_FIX = (
    "so many at once say more of the way to them than of them: look at what is in front of the store (a proxy), and, "
    "of signed ones, at COMPILE_STAGE_TRUST. `compile-stage cache verify --shared` names them. Where they are damaged, "
    "`compile-stage cache gc --shared --max-gb 0` deletes all; runs make them anew"
)


@record
class CacheEntry:
    """One entry.

    Attributes:
        step: Of what; `sources` of a source model.
        path: Below the cache's folder, or below the address.
        bytes: On the disk, or in the store.
        used: When it was last used; in a shared cache, when it was written. Seconds since 1970.
        seal: Of a shared cache: `unsigned`, `mac-ID` or `signed`.
    """

    step: str
    path: str
    bytes: int
    used: float
    seal: str = ""


@record
class CacheContent:
    """What is in a cache.

    Attributes:
        where: Its folder, or the address of a shared one.
    """

    where: str
    entries: tuple[CacheEntry, ...]


@record
class CacheCheck:
    """Whether entries hold.

    Attributes:
        checked: How many were looked at.
        refused: Path → why it does not.
        removed: The refused were deleted.
    """

    where: str
    checked: int
    refused: Mapping[str, str]
    removed: bool = False


def cache_entries(shared: str | None = None) -> CacheContent:
    """What is in this machine's cache, or in a shared one.

    Args:
        shared: The address of a shared cache; "" for `$COMPILE_STAGE_SHARED_CACHE`; None for this machine's.

    Raises:
        UsageError: There is no such shared cache.
        StorageError: It does not answer.
    """
    if shared is not None:
        with _shared(shared) as cache:
            return CacheContent(where=cache.store.label, entries=tuple(_stored(cache)))
    root = cache_root()
    found = tuple(
        CacheEntry(
            step=entry.relative_to(root).parts[0], path=entry.relative_to(root).as_posix(), bytes=size, used=used
        )
        for entry, size, used in entries_of(root)
    )
    return CacheContent(where=str(root), entries=found)


def verify_cache(shared: str | None = None, *, remove: bool = False) -> CacheCheck:
    """Read every entry of this machine's cache, or of a shared one, and hold it against its digests and its seal. Of a
    shared one, entries with another kind of seal than this machine's are not looked at.

    Args:
        shared: As for `cache_entries`.
        remove: Delete what does not hold, and does not when it is read a second time, after all others.

    Raises:
        StorageError: As `cache_entries`; or an entry can't be deleted; or most of several entries are to be deleted,
            or what a shared cache answers has another size than it lists. Nothing is deleted then.
        UsageError: As `cache_entries`; or this process can open no further file.
    """
    if shared is not None:
        with _shared(shared, writes=remove) as cache:
            return _verify_shared(cache, remove)
    root, refused, checked = cache_root(), {}, 0
    local = Cache(root, cache_secret())
    for entry, _, _ in entries_of(root):
        parts = entry.relative_to(root).parts
        if len(parts[-1]) != 64:  # what is being made, or was left by somebody who was killed
            continue
        reason = _refuse_here(local, entry)
        if reason is not None and not entry.exists():  # a run made room meanwhile
            continue
        checked += 1
        if reason is not None:
            refused[entry.relative_to(root).as_posix()] = reason
    if remove:  # after all others: a disk that answered wrongly once does not have a good entry deleted
        again = {path: reason for path in refused if (reason := _refuse_here(local, root / path)) is not None}
        _demand_few(again, checked, str(root), _MANY_HERE_FIX)
        refused = {path: reason for path in again if (reason := _delete_here(local, root / path)) is not None}
    return CacheCheck(where=str(root), checked=checked, refused=refused, removed=remove)


def collect_cache(
    shared: str | None = None, *, max_age_days: float | None = None, max_gb: float | None = None, dry_run: bool = False
) -> CacheContent:
    """Delete the oldest entries of this machine's cache, or of a shared one; returns them.

    Args:
        shared: As for `cache_entries`. Entries with any seal are deleted.
        max_age_days: Those that were last used longer ago; of a shared cache, written longer ago.
        max_gb: Of the rest, the oldest until so many GB (10^9 bytes) are left.
        dry_run: Only say which.

    Raises:
        UsageError: Neither bound is given, or one is negative. Else as `cache_entries`.
    """
    if max_age_days is None and max_gb is None:
        raise UsageError("nothing says what may go", fix="give --max-age, --max-gb or both")
    if not all(value >= 0 for value in (max_age_days, max_gb) if value is not None):  # nan is below nothing
        raise UsageError("a bound is negative, or no number", fix="give a number from 0")
    oldest = time.time() - max_age_days * _DAY_S if max_age_days is not None else 0.0
    limit = max_gb * 1e9 if max_gb is not None else float("inf")
    if shared is not None:
        with _shared(shared, writes=not dry_run) as cache:
            return _collect_shared(cache, oldest, limit, dry_run)
    root = cache_root()
    gone = [(path.relative_to(root), size) for path, size in collect(root, oldest, limit, dry_run=dry_run)]
    entries = tuple(CacheEntry(step=p.parts[0], path=p.as_posix(), bytes=size, used=0.0) for p, size in gone)
    return CacheContent(where=str(root), entries=entries)


@contextmanager
def _shared(url: str, *, writes: bool = False) -> Iterator[SharedCache]:
    cache = open_shared(url or None)
    if cache is None:
        raise UsageError("no shared cache is named", fix=f"give --shared-cache URL, or set {URL_VARIABLE}")
    if writes and os.environ.get(MODE_VARIABLE) == "read":
        raise UsageError(f"{MODE_VARIABLE} is 'read', and this deletes", fix=f"unset {MODE_VARIABLE}")
    try:
        yield cache
    except StoreError as error:
        raise StorageError(
            f"the shared cache can't be used: {error}",
            fix="check its address (--shared-cache, AWS_ENDPOINT_URL), its client's account (AWS_ACCESS_KEY_ID, a "
            "role, ...), that it has not expired and has the rights, that the server "
            "works, and what is in front of it (a proxy, a log-in page); then run again",
            where=cache.store.label,
        ) from error


def _stored(cache: SharedCache) -> Iterator[CacheEntry]:
    """Entries of the store, not the parts that uploads to `file://` left."""
    for found in cache.store.list():
        parts = found.path.split("/")
        if len(parts) >= 4 and PART_MARK not in parts[-1]:
            yield CacheEntry(step=parts[2], path=found.path, bytes=found.size, used=found.written, seal=parts[1])


def _verify_shared(cache: SharedCache, remove: bool) -> CacheCheck:
    refused, checked = {}, 0
    for found in _stored(cache):
        if found.seal != cache.seal.name:
            continue
        reason = _refuse_shared(cache, found.path)
        if reason is not None and not _is_read_whole(cache, found.path):
            continue
        checked += 1
        if reason is not None:
            refused[found.path] = reason
    if remove:
        refused = _deleted(cache, refused, checked)
    return CacheCheck(where=cache.store.label, checked=checked, refused=refused, removed=remove)


def _is_read_whole(cache: SharedCache, path: str) -> bool:
    """False for an entry that is gone: `gc` deleted it meanwhile. Raises StoreError where the store answers with
    another number of bytes than it lists: a log-in page or a cut answer says nothing of the entry."""
    for _ in range(2):  # a run may replace it between the list and the answer
        # In its folder's list: a server that answers for the entry with a page does so of its size too.
        listed = next((one.size for one in cache.store.list(path.rpartition("/")[0]) if one.path == path), None)
        if listed is None:
            return False
        try:
            got = cache.store.measure(path, listed)
        except FileNotFoundError:
            return False
        if got == listed:
            return True
    raise StoreError(f"its answer for {path} has another size than it lists ({listed:,} bytes)")


def _deleted(cache: SharedCache, refused: Mapping[str, str], checked: int) -> dict[str, str]:
    """Delete the entries that do not hold the second time either; returns them. Raises as `_demand_few`."""
    again = {path: reason for path in refused if (reason := _refuse_shared(cache, path)) is not None}
    _demand_few(again, checked, cache.store.label, _MANY_SHARED_FIX)
    for path in again:
        cache.store.delete(path)
    return again


def _demand_few(refused: Mapping[str, str], checked: int, where: str, fix: str) -> None:
    """Raises StorageError where most of several entries do not hold: an account, a proxy, a secret or a trust file that
    went wrong looks like that."""
    if len(refused) >= _MANY and 2 * len(refused) > checked:
        raise StorageError(
            f"{len(refused)} of {checked} entries do not hold, the first since {next(iter(refused.values()))}; nothing "
            "was deleted",
            fix=fix,
            where=where,
        )


def _refuse_shared(cache: SharedCache, path: str) -> str | None:
    nowhere = Cache(Path("/"))

    def check(entry: Mapping[str, Any]) -> str | None:
        try:
            step, key = entry["step"], entry["key"]
            if (reason := refuse_entry(entry, step, key)) is not None:
                return reason
            place = cache.path_of(nowhere.locate(step, key).relative_to("/").as_posix())
            if "records" in key:  # of tuning
                place = cache.path_of(f"tuning/{key['records']}/{key['name']}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return f"it can't be read: {type(error).__name__}"
        return None if place == path else "it lies where the entry of another key belongs"

    return cache.refuse(path, check)


def _collect_shared(cache: SharedCache, oldest: float, limit: float, dry_run: bool) -> CacheContent:
    known = sorted(_stored(cache), key=lambda entry: entry.used)
    total, gone = sum(entry.bytes for entry in known), []
    for entry in known:
        if entry.used >= oldest and total <= limit:
            break
        if not dry_run:
            cache.store.delete(entry.path)
        total -= entry.bytes
        gone.append(entry)
    if not dry_run:
        for found in list(cache.store.list()):
            if PART_MARK in found.path.rpartition("/")[2] and found.written < time.time() - _DAY_S:
                cache.store.delete(found.path)
    return CacheContent(where=cache.store.label, entries=tuple(gone))


def _refuse_here(cache: Cache, entry: Path) -> str | None:
    """Why an entry of this machine's cache does not hold; None where it does."""
    in_sources = entry.relative_to(cache.root).parts[0] == _SOURCES
    return _refuse_source(entry) if in_sources else cache.refuse(entry)


def _delete_here(cache: Cache, entry: Path) -> str | None:
    """Delete an entry that does not hold when it is read again; returns why, or None where it stays or is gone."""
    return cache.delete(entry, lambda: _refuse_here(cache, entry))


def _refuse_source(entry: Path) -> str | None:
    """A source model's folder has the digest of its files as its name (`registry.model_files.keep`)."""
    try:
        holds = digest_tree(entry) == f"sha256:{entry.name}"
    except OSError as error:
        raise_if_too_many_open(error)
        return f"it can't be read: {error.strerror}"
    return None if holds else "its files are not those that its name is the digest of"
