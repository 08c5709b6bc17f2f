"""A full disk, or a folder that can't be written: trouble of the machine, not a bug of ours."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from compile_stage.core import address_space
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.errors import CompileStageError, InternalError, RemovedError, StorageError, UsageError
from compile_stage.core.read_errors import TOO_MANY_OPEN

NO_SPACE_BYTES = 1_000_000  # with less free, a disk is full: what was too large for the rest leaves a little
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG, errno.EFBIG)
_FIX = (
    "free space or give the rights there, or name other folders: --out (of some commands --output or --state) for "
    "results, COMPILE_STAGE_CACHE for the cache, TMPDIR for the rest"
)

STANDARD_OUTPUT = "standard output"
"""Named where a file has no path that we know."""
_FIX_OF_OUTPUT = "free space there, or redirect the output to another disk"

_FIX_OF_DISK = (
    "look at the disk (the kernel's log: dmesg), or at the server that it is mounted from; or name folders on another "
    "one: --out for results, COMPILE_STAGE_CACHE for the cache, TMPDIR for the rest. Then run again"
)
_FIX_OF_ANOTHERS_CACHE = (
    "name a cache folder of your own in COMPILE_STAGE_CACHE; what several users share goes behind it, with "
    "--shared-cache file:///FOLDER (docs/shared-cache.md)"
)


@contextmanager
def storage_trouble() -> Iterator[None]:
    """Turn what the machine's disks and folders refuse into StorageError; everything else goes through as it is."""
    try:
        yield
    except CompileStageError:
        raise
    except Exception as error:
        if (trouble := storage_error(error)) is None:
            raise
        raise trouble from error


def storage_error(
    error: BaseException | None, codes: Collection[int] = (*_FULL, *_REFUSED, errno.ENOENT)
) -> StorageError | None:
    """What to say when a disk or a folder is at the bottom of `error`; None when it is something else."""
    for caught in with_causes(error):
        if errno.ENOENT in codes and (gone := _removed(caught)) is not None:
            return removed(gone)
        code, place = _code_and_place(caught)
        if code in codes and code is not None:
            return StorageError(_said(code, place), fix=_fix(code, place), where=place)
    return None


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what was caught before it: libraries wrap."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def removed(path: str | os.PathLike[str]) -> RemovedError:
    """What to say of a file of ours that is gone."""
    return RemovedError(
        "it was removed while the run used it",
        fix="run again; keep clean-up jobs away from COMPILE_STAGE_CACHE and TMPDIR while a run goes on",
        where=os.fspath(path),
    )


def demand_present(path: str | os.PathLike[str]) -> None:
    """Raise RemovedError for a file or folder of ours that is gone."""
    if not Path(path).exists():
        raise removed(path)


def _removed(error: BaseException) -> str | None:
    """The file that is missing, where it is one of our own: below the cache, or temporary. Any other that is missing is
    no storage trouble."""
    missing: list[str] = []
    if isinstance(error, FileNotFoundError):
        missing = [str(name) for name in (error.filename, error.filename2) if name]
    elif isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        missing = [str(source) for source, _, reason in error.args[0] if os.strerror(errno.ENOENT) in str(reason)]
    return next((name for name in missing if _is_ours(Path(name)) and not Path(name).exists()), None)


def _is_ours(path: Path) -> bool:
    if path.is_relative_to(cache_root()):
        return True
    temporary = Path(tempfile.gettempdir())
    return path.is_relative_to(temporary) and f"{path.relative_to(temporary)}".startswith("compile-stage-")


def explained(error: BaseException) -> CompileStageError:
    """What to say to people of whatever was raised: too few open files, our own errors as they are, a disk's or a
    folder's trouble, else a bug of ours."""
    if not isinstance(error, UsageError) and (many := _too_many_open(error)) is not None:
        return many
    if isinstance(error, CompileStageError):
        return error
    known = storage_error(error) or without_folder(error) or _without_memory(error) or _too_many_threads(error)
    return known or InternalError(f"{type(error).__name__}: {error}")


def without_folder(error: BaseException) -> UsageError | None:
    """What to say where the current folder was deleted, so that no relative path means anything; None otherwise."""
    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            Path.cwd()
        except FileNotFoundError:
            return UsageError("the current folder is not there any more", fix="change to a folder that is there")
    return None


def _without_memory(error: BaseException) -> UsageError | None:
    """What to say where this process, and not a worker, could get no more memory; None when it is something else."""
    if not any(_wants_memory(caught) for caught in with_causes(error)):
        return None
    limit, said = address_space.limit_bytes(), str(error) or type(error).__name__
    if limit is None:
        return UsageError(f"this process got no more memory: {said}", fix="free memory, or take a larger machine")
    return UsageError(
        f"{address_space.said_in_mb(limit)}, and that was too little: {said}",
        fix=f"allow more ({address_space.option()} unlimited): libraries map more than they use. A control group limits"
        " what is used",
    )


def _wants_memory(error: BaseException) -> bool:
    if isinstance(error, ImportError):  # a library that can't be loaded, as the dynamic linker says it
        return any(words in str(error) for words in ("failed to map segment", os.strerror(errno.ENOMEM)))
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _too_many_open(error: BaseException) -> UsageError | None:
    """What to say where no further file could be opened, also of an error that calls the file damaged; None when it is
    something else."""
    for caught in with_causes(error):
        if isinstance(caught, OSError) and caught.errno in TOO_MANY_OPEN:
            return UsageError(
                f"no further file can be opened: {os.strerror(caught.errno)}",
                fix="allow more (ulimit -n), or end other programs",
                where=str(caught.filename or ""),
            )
    return None


def _too_many_threads(error: BaseException) -> UsageError | None:
    """What to say where this process could start no further thread; None when it is something else."""
    if not any(isinstance(one, RuntimeError) and "can't start new thread" in str(one) for one in with_causes(error)):
        return None
    return UsageError(
        "this process can start no further thread",
        fix="allow more (pids.max of the control group, docker's --pids-limit, ulimit -u), or end other programs",
    )


def disk_full(error: BaseException) -> StorageError | None:
    """What to say when a full disk of this machine is at the bottom of `error`; None when it is something else."""
    return storage_error(error, _FULL)


def raise_if_full(error: OSError, folder: Path) -> None:
    """Raise StorageError where an error that names no file came while files were written into the folder, and its disk
    has no space left. A file that can't be written on has no name in the kernel's error, and for a large array NumPy
    gives not even the error's number."""
    if error.filename is None and shutil.disk_usage(folder).free < NO_SPACE_BYTES:
        raise no_space_below(str(folder)) from error


def no_space_below(place: str) -> StorageError:
    """What to say of a disk that was seen to be full, by a folder on it."""
    return StorageError(_said(errno.ENOSPC, place), fix=_FIX, where=place)


def disk_full_of_text(text: str, place: str) -> StorageError | None:
    """The same for a library that keeps of an error only its text; also of a file that may not become so large."""
    code = next((code for code in (*_FULL, errno.EFBIG) if os.strerror(code) in text), None)
    return StorageError(_said(code, place), fix=_FIX, where=place) if code is not None else None


def _said(code: int | None, place: str) -> str:
    if code == errno.EDQUOT:  # `df` shows free space
        return f"the disk is full for this user: {os.strerror(errno.EDQUOT)}"
    if code in _FULL:
        none_left = " of files: it has no free inode (df -i), whatever space is free" if _lacks_inodes(place) else ""
        return f"the disk is full{none_left}"
    does = "read or written" if code == errno.EIO else "written"
    return f"it can't be {does}: {os.strerror(code or errno.EIO)}"


def _lacks_inodes(place: str) -> bool:
    """True where the disk of a file or folder, which need not be there, can hold no further file."""
    there = next((path for path in (Path(place), *Path(place).parents) if path.exists()), None) if place else None
    if there is None or not hasattr(os, "statvfs"):
        return False
    disk = os.statvfs(there)
    return bool(disk.f_files > 0 and disk.f_favail == 0)


def _fix(code: int | None, place: str) -> str:
    """What to do about a folder or file that can't be written; of one in another user's cache, that users share what is
    behind their caches."""
    if place == STANDARD_OUTPUT:
        return _FIX_OF_OUTPUT
    if code == errno.EIO:
        return _FIX_OF_DISK
    root = cache_root()
    if code not in (errno.EACCES, errno.EPERM) or not Path(place).is_relative_to(root):
        return _FIX
    there = next((path for path in (Path(place), *Path(place).parents) if os.path.lexists(path)), root)
    is_anothers = there.is_relative_to(root) and hasattr(os, "geteuid") and there.lstat().st_uid != os.geteuid()
    return _FIX_OF_ANOTHERS_CACHE if is_anothers else _FIX


def _code_and_place(error: BaseException) -> tuple[int | None, str]:
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        for _, target, reason in error.args[0]:  # of `copytree`, which keeps of each failure only the text
            for code in (*_FULL, *_REFUSED):
                if os.strerror(code) in str(reason):
                    return code, str(target)
    if isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return errno.ENOSPC, ""
    if isinstance(error, OSError) and error.errno in (*_FULL, *_REFUSED):
        return error.errno, str(error.filename2 or error.filename or "")
    return None, ""


def demand_writable(folder: str | os.PathLike[str]) -> None:
    """Make the folder, and a file in it, now: before hours of work whose results would have no place.

    Raises:
        StorageError: It can't be.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"?")
    except OSError as error:
        place = os.fspath(folder)
        raise StorageError(_said(error.errno, place), fix=_fix(error.errno, place), where=place) from error
