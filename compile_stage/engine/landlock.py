"""Landlock: the kernel's own limit on which files, ports and processes a process may reach; it needs no privileges.

Called through `syscall(2)`, since libraries for it are rare and a worker must not need one. A limit holds for the
calling thread and everything that it starts, and can never be lifted again, so it is set while there is one thread. See
https://docs.kernel.org/userspace-api/landlock.html, from which all numbers are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))  # remove and make files, folders, links, pipes, sockets, devices
_MAKE_DEVICE = 1 << 6 | 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_BIND_AND_CONNECT_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = READ | _WRITE_FILE | _TRUNCATE | _REFER | (_CHANGE_FOLDER & ~_MAKE_DEVICE)
DEVICE = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _IOCTL_DEVICE

KEEPS_FILES = 3
"""The first ABI that no write escapes: before it a file outside could be truncated (Linux 6.2)."""

KEEPS_TCP = 4
"""The first ABI with rules for TCP ports (Linux 6.7)."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """The version of Landlock that this kernel offers; 0 for none."""
    if not sys.platform.startswith("linux"):
        return 0
    version: int = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    return max(0, version)


def restrict(grants: Iterable[tuple[str, int]], *, close_tcp: bool) -> int:
    """Limit this process to `grants`, once and for all; `PR_SET_NO_NEW_PRIVS` must be set.

    Args:
        grants: Path and `READ`, `WRITE` or `DEVICE`; a folder stands for all below it. What is not there is left out.
        close_tcp: TCP ports can't be bound or connected to either, where the kernel can do that.

    Returns:
        The ABI that is in force.

    Raises:
        OSError: The kernel has no Landlock, or it is off.
    """
    version, libc = abi(), _libc()
    if version == 0:
        raise OSError("the kernel has no Landlock")
    handled = (1 << (13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16)) - 1
    asked = _Ruleset(
        files=handled,
        net=_BIND_AND_CONNECT_TCP if close_tcp and version >= KEEPS_TCP else 0,
        scoped=_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0,
    )
    size = 8 if version < KEEPS_TCP else 16 if version < 6 else 24
    ruleset = _checked(libc.syscall(_CREATE_RULESET, ctypes.byref(asked), ctypes.c_size_t(size), ctypes.c_uint32(0)))
    try:
        for path, access in grants:
            _grant(libc, ruleset, path, access & handled)
        _checked(libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    finally:
        os.close(ruleset)
    return version


def _grant(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not there, or not ours to see: then there is nothing to grant
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            access &= _OF_FILES
        rule = _PathBeneath(access=access, parent=parent)
        _checked(libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0)))
    except OSError as error:
        if error.errno != errno.EBADFD:  # a pipe: it has no path, and needs no rule
            raise
    finally:
        os.close(parent)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
