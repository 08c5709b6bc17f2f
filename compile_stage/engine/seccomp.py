"""A seccomp filter: system calls that no compiler or runtime needs, and that ways out of a confinement begin with.

The filter is a short classic-BPF program that the kernel runs before every system call. It looks at the number of the
call, for `socket` at the address family, and for calls that change how a process runs at whose it is. A denied call
fails with "operation not permitted", as it would for lack of rights, so a program that only tries goes on.

`sched_setaffinity` is not among these: a runtime places its own threads by it, and names them by numbers that the
filter can't tell from those of another process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
_ALLOW, _DENY, _NO_FAMILY = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.EAFNOSUPPORT
_X32 = 0x40000000  # numbers of another ABI of x86-64 processors
_LOCAL_FAMILIES = (1, 16)  # AF_UNIX, AF_NETLINK: they reach this machine only

# Since Linux 5.1 new calls have one number on all architectures.
_SHARED = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip
# asm/unistd_64.h and asm-generic/unistd.h
_X86_64 = {
    "ptrace": 101, "pivot_root": 155, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104,
    "init_module": 105, "delete_module": 106, "ptrace": 117, "reboot": 142, "add_key": 217, "request_key": 218,
    "keyctl": 219, "swapon": 224, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
}  # fmt: skip
# machine → AUDIT_ARCH of its native calls, number of `socket`, denied calls
_MACHINES = {
    "x86_64": (0xC000003E, 41, {**_SHARED, **_X86_64}),
    "aarch64": (0xC00000B7, 198, {**_SHARED, **_AARCH64}),
}
# Landlock keeps signals from other processes of the user, and not these: a limit on the CPU time of another process
# ends it, and one of a low priority looks slow. Call → its arguments, by place, that mean the caller itself.
_OF_THE_CALLER = {
    "prlimit64": {0: 0}, "setpriority": {0: 0, 1: 0}, "sched_setscheduler": {0: 0}, "sched_setattr": {0: 0},
    "ioprio_set": {0: 1, 1: 0},
}  # fmt: skip
_OF_THE_CALLER_NUMBERS = {
    "x86_64": {
        "prlimit64": 302, "setpriority": 141, "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251,
    },
    "aarch64": {
        "prlimit64": 261, "setpriority": 140, "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30,
    },
}  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.c_char_p))


def available() -> bool:
    """True on a system and processor for which there is a filter here."""
    return sys.platform.startswith("linux") and platform.machine() in _MACHINES


def restrict(*, close_network: bool) -> None:
    """Install the filter, once and for all; `PR_SET_NO_NEW_PRIVS` must be set.

    Args:
        close_network: Sockets of families that reach beyond this machine can't be made either.

    Raises:
        OSError: There is no filter for this machine, or the kernel takes none.
    """
    if not available():
        raise OSError(errno.ENOSYS, f"there is no filter for {platform.machine()}")
    code = program(platform.machine(), close_network=close_network)
    filtered = _Program(length=len(code) // 8, instructions=code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filtered), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def program(machine: str, *, close_network: bool) -> bytes:
    """The filter of a machine as instructions of 8 bytes each: code, jump if true, jump if false, constant."""
    native, socket_number, denied = _MACHINES[machine]
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, native, 1, 0),
        _line(_RETURN, _DENY),  # calls of another ABI have other numbers
        _line(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [_line(_AT_LEAST, _X32, 0, 1), _line(_RETURN, _DENY)]
    for number in sorted(denied.values()):
        lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, _DENY)]
    for name, number in _OF_THE_CALLER_NUMBERS[machine].items():
        looks = []
        for place, own in _OF_THE_CALLER[name].items():  # all of them are ints: the lower half of an argument
            looks += [_line(_LOAD, _FIRST_ARGUMENT + 8 * place), _line(_EQUAL, own, 1, 0), _line(_RETURN, _DENY)]
        lines += [_line(_EQUAL, number, 0, len(looks) + 1), *looks, _line(_RETURN, _ALLOW)]
    if close_network:
        lines += [_line(_EQUAL, socket_number, 0, len(_LOCAL_FAMILIES) + 2), _line(_LOAD, _FIRST_ARGUMENT)]
        left = len(_LOCAL_FAMILIES)
        lines += [_line(_EQUAL, family, left - index, 0) for index, family in enumerate(_LOCAL_FAMILIES)]
        lines += [_line(_RETURN, _NO_FAMILY)]
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, constant)
