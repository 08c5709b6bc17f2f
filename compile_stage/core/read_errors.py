"""Errors of reading a file that don't name it, or say nothing of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an OSError name the file that is read: the kernel gives a failing disk's no name."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def raise_if_disk_fails(error: BaseException) -> None:
    """Raise an error again that is the disk's (EIO), so that nobody calls the file damaged."""
    if isinstance(error, OSError) and error.errno == errno.EIO:
        raise error


def raise_if_too_many_open(error: OSError) -> None:
    """Raise an error again that is of this process, which could open no further file."""
    if error.errno in TOO_MANY_OPEN:
        raise error
