"""What a worker may do on its machine; applied in the worker before it loads a plug-in, a model or an artifact.

A worker runs code of strangers: plug-ins, compilers, pickles. It needs the interpreter, its packages, the files that
its calls name and a folder of its own. It needs no network, no other process, no home folder and none of the stage's
secrets. So, as far as the machine can:

| what | by | from |
|---|---|---|
| files: reads of the toolchain and of what is handed over, writes to its own folder | Landlock | Linux 5.13; 6.2 |
| network: its own, with a loopback only | a network namespace | where users may make namespaces |
| network: no sockets but local ones | the seccomp filter | Linux, elsewhere |
| processes: no signals, no tracing beyond its own | Landlock, seccomp | Linux 6.12 |
| processes: no limits, no priorities but its own | seccomp | Linux on x86-64 or ARM64 |
| system calls that ways out begin with | seccomp | Linux on x86-64 and ARM64 |
| no privileges, no new ones | capabilities, no-new-privs | Linux |
| /dev/shm of its own, bounded; /run hidden | a mount namespace | where users may make namespaces |
| size of a file, number of processes | resource limits | Linux, macOS |

Landlock keeps all writes from Linux 6.2 on; before, a file outside could be truncated.
`confine` says what is in force (`core.ports.Confinement`). The environment is cleaned everywhere (`environment_of`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.engine import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_NAMESPACES = _NEW_USER | _NEW_NETWORK | _NEW_MOUNTS | _NEW_IPC
_CAPABILITY_VERSION = 0x20080522
_NOSUID_NODEV = 0b110

# Read and run: what interpreters, compilers and runtimes of a machine are made of. Of /etc and /run only what tells of
# the machine: there are passwords and tokens in both.
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store", "/proc", "/sys",
    "/run/current-system", "/run/opengl-driver", "/run/nvidia", "/System", "/Library",
    *(f"/etc/{name}" for name in (
        "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "locale.alias", "locale.conf", "passwd",
        "group", "nsswitch.conf", "hosts", "host.conf", "protocols", "services", "os-release", "alternatives",
        "mime.types", "magic", "OpenCL", "vulkan", "glvnd", "nvidia", "nvidia-container-runtime", "fonts", "ssl/certs",
        "ssl/openssl.cnf", "java", "debian_version", "lsb-release", "gai.conf",
    )),
)  # fmt: skip
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - mounted over, or shared
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ACCELERATORS = ("nvidia*", "dri", "kfd", "accel", "dxg", "davinci*", "apex_*", "habanalabs*")
_NVIDIA = ("nvidia*", "dxg")

# Names of variables that a worker gets, beside those that the engine sets. They decide which libraries and compilers
# are used and how many threads they start.
_VARIABLES = frozenset((
    "PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH",
    "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "PKG_CONFIG_PATH", "CC", "CXX", "CFLAGS",
    "CXXFLAGS", "LDFLAGS", "CONDA_PREFIX", "VIRTUAL_ENV", "JAVA_HOME", "SDKROOT", "DEVELOPER_DIR",
    "MACOSX_DEPLOYMENT_TARGET", "PYTHONPATH", "PYTHONWARNINGS", "PYTHONNOUSERSITE", "PYTHONUTF8",
    "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "SOURCE_DATE_EPOCH", "NO_COLOR",
))  # fmt: skip
_PREFIXES = (
    "LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "VECLIB_", "RAYON_", "MALLOC_", "CUDA_",
    "CUDNN_", "CUBLAS_", "NVIDIA_", "NVRTC_", "TENSORRT_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ZE_", "SYCL_", "ONEAPI_",
    "DNNL_", "ONEDNN_", "OV_", "OPENVINO_", "NNCF_", "ORT_", "ONNX_", "ONNXRUNTIME_", "IREE_", "XLA_", "JAX_", "TF_",
    "TVM_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "ATEN_", "TRITON_", "LITERT_", "COMPILE_STAGE_",
)  # fmt: skip
_SECRET = frozenset((
    "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "PWD", "KEY", "KEYS",
    "APIKEY", "CREDENTIAL", "CREDENTIALS", "AUTH", "COOKIE",
))  # fmt: skip
_PATH_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "PYTHONPATH", "CONDA_PREFIX", "VIRTUAL_ENV", "JAVA_HOME", "CUDA_HOME", "CUDA_PATH",
)  # fmt: skip
HANDED_ON = "COMPILE_STAGE_WORKER_ENV"
"""Environment variable of the stage: names, with commas between, of further variables that workers get."""


def environment_of(stage: Mapping[str, str]) -> dict[str, str]:
    """Of the stage's environment what a worker gets: variables that are listed here or that `HANDED_ON` names. None
    whose name has a word for a secret in it, unless it is named there."""
    named = {name.strip() for name in stage.get(HANDED_ON, "").split(",")}
    return {name: value for name, value in stage.items() if name in named or _is_known(name)}


def _is_known(name: str) -> bool:
    if not _SECRET.isdisjoint(name.upper().split("_")):
        return False
    return name in _VARIABLES or name.startswith(_PREFIXES)


def folders_of(environment: Mapping[str, str]) -> list[str]:
    """The folders and files that a worker's environment names, such as where programs and libraries lie."""
    words = (word for name in _PATH_VARIABLES for word in environment.get(name, "").split(os.pathsep))
    return [word for word in words if Path(word).is_absolute()]


def hands_files_over() -> bool:
    """True where a worker can be kept from files, so that what it may read and write must be handed to it."""
    return landlock.abi() > 0


def has_nvidia() -> bool:
    """Whether this machine has a GPU whose driver names a process's threads."""
    return any(device for pattern in _NVIDIA for device in Path("/dev").glob(pattern))


def confine(
    *,
    reads: Sequence[str],
    writes: Sequence[str],
    home: str,
    shared_memory_bytes: int,
    file_bytes: int,
    names_threads: bool,
    namespaces: bool | None,
) -> dict[str, Any]:
    """Give up, for good, what a worker does not need. To be called while the process has one thread.

    Args:
        reads: Files and folders that are handed over, beside the interpreter's own and the system's.
        writes: Its own folders.
        home: The user's home folder, which is no part of what `reads` grants.
        shared_memory_bytes: Size of its own /dev/shm.
        file_bytes: No file may grow larger.
        names_threads: It may write below its own `/proc/self/task` (`has_nvidia`).
        namespaces: True where they were seen to work, False where not; None tries it in a child first.

    Returns:
        What is in force: `core.ports.Confinement` as plain JSON, and `namespaces` for the next worker.

    Raises:
        OSError: Namespaces worked before and do not now, so the process is in neither state.
    """
    _limit(file_bytes)
    if not sys.platform.startswith("linux"):
        return {"limits": "size of files", "namespaces": False}
    granted = list(_grants(reads, writes, home, names_threads=names_threads))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if namespaces is None:
        namespaces = _works_in_a_child(lambda: _enter_namespaces(libc, shared_memory_bytes, granted))
    if namespaces:
        _enter_namespaces(libc, shared_memory_bytes, granted)
        _limit_processes()
    _drop_capabilities(libc)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    version = 0
    with contextlib.suppress(OSError):
        # A rule is of an inode, and /proc makes a new one once this one's name is forgotten, as memory gets scarce.
        os.set_inheritable(os.open("/proc/self/task", os.O_PATH), True)
        version = landlock.restrict(granted, close_tcp=not namespaces)
    filtered = True
    try:
        seccomp.restrict(close_network=not namespaces)
    except OSError:
        filtered = False
    return {
        "files": f"Landlock ABI {version}" if version else "",
        "network": _network(namespaces, filtered, version),
        "system_calls": "seccomp filter" if filtered else "",
        "shared_memory": "own mount" if namespaces and _is_free(_SHARED_MEMORY, granted) else "",
        "limits": "size of files, number of processes" if namespaces and os.getuid() else "size of files",
        "complete": version >= landlock.KEEPS_FILES and (namespaces or filtered),
        "namespaces": namespaces,
    }


def _network(namespaces: bool, filtered: bool, version: int) -> str:
    if namespaces:
        return "own namespace"
    if filtered:
        return "seccomp filter"
    return "Landlock, TCP only" if version >= landlock.KEEPS_TCP else ""


# ---------------------------------------------------------------------------------------------------------------- files


def _grants(
    reads: Iterable[str], writes: Iterable[str], home: str, *, names_threads: bool
) -> Iterator[tuple[str, int]]:
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path]
    seen: set[str] = set()
    for path in (*_SYSTEM, *(part for entry in (*own, *reads) for part in _without_home(entry, home))):
        if path not in seen:
            seen.add(path)
            yield path, landlock.READ
    for path in _DEVICES:
        yield path, landlock.DEVICE
    for pattern in _ACCELERATORS:
        for device in Path("/dev").glob(pattern):
            yield str(device), landlock.DEVICE
    yield _SHARED_MEMORY, landlock.WRITE  # semaphores of multiprocessing; the worker's own where it can be
    for path in writes:
        yield path, landlock.WRITE
    # The log, which may lie elsewhere: programs open /dev/stderr anew.
    yield "/proc/self/fd/2", landlock.DEVICE
    # Names of its own threads: cuInit of NVIDIA's drivers from 570 on writes them to /proc/self/task/*/comm, and where
    # it can't, fails with error 304, so that no GPU is found. The rule holds for this process, not for its children:
    # those that need a GPU are started by `engine.starter`. Without such a GPU it is not given: beside the names lies
    # `clear_refs`, by which a process makes the kernel forget its peak memory.
    if names_threads:
        yield "/proc/self/task", landlock.DEVICE


def _without_home(entry: str, home: str) -> Iterator[str]:
    """The entry; of one that is the home folder, or holds it, what lies in it and is not hidden. An environment that
    was made right in the home folder is usable so, and the keys beside it stay unread."""
    if not entry or not Path(entry).is_absolute():
        return
    real, home = os.path.realpath(entry), os.path.realpath(home)
    if real == "/":
        return
    if not f"{home}/".startswith(f"{real}/"):
        yield real
        return
    with contextlib.suppress(OSError):
        for part in os.scandir(real):
            if not part.name.startswith(".") and not f"{home}/".startswith(f"{part.path}/"):
                yield part.path


# ----------------------------------------------------------------------------------------------------------- namespaces


def _enter_namespaces(libc: ctypes.CDLL, shared_memory_bytes: int, granted: Sequence[tuple[str, int]]) -> None:
    """A network with nothing but a loopback, shared memory of its own, and a /run without other programs' sockets."""
    user, group = os.geteuid(), os.getegid()
    _checked(libc.unshare(_NAMESPACES))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text, encoding="utf-8")
    _raise_loopback(libc)
    for place, size in ((_SHARED_MEMORY, shared_memory_bytes), ("/run", 4096)):
        if _is_free(place, granted):
            options = f"size={size}".encode()
            _checked(libc.mount(b"tmpfs", place.encode(), b"tmpfs", _NOSUID_NODEV, options))


def _is_free(place: str, granted: Sequence[tuple[str, int]]) -> bool:
    """True where nothing that the worker needs would be hidden, such as its own folder below a TMPDIR in memory."""
    below = (path for path, _ in granted if path.startswith(f"{place}/"))
    return Path(place).is_dir() and not any(Path(path).exists() for path in below)


def _raise_loopback(libc: ctypes.CDLL) -> None:
    """`ip link set lo up`: compilers that measure in several processes talk over it."""
    local, datagram, set_flags, up = 2, 2, 0x8914, 0x1
    descriptor = _checked(libc.socket(local, datagram, 0))
    try:
        _checked(libc.ioctl(descriptor, set_flags, struct.pack("16sh22x", b"lo", up)))
    finally:
        os.close(descriptor)


def _works_in_a_child(enter: Any) -> bool:
    """Whether `enter` ends without an error. Some systems let a user make namespaces and then do nothing in them, and
    there is no way back."""
    child = os.fork()
    if child == 0:
        try:
            enter()
        except BaseException:  # noqa: BLE001 - nothing may return from here
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


# --------------------------------------------------------------------------------------------------------------- limits


def _limit(file_bytes: int) -> None:
    import resource

    for kind, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, file_bytes)):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _limit_processes() -> None:
    """In a user namespace of its own the kernel counts what the worker starts, threads included, and nothing else of
    its user. Root is not counted there; the stage counts processes everywhere (`engine.watch`)."""
    import resource

    allowed = max(4096, 64 * (os.cpu_count() or 1))  # each of several pools starts a thread per core
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    allowed = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (allowed, allowed))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Of root as of a namespace's own root: the rights to mount, to load, to read what others own."""
    header, nothing = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    libc.capset(ctypes.create_string_buffer(header), ctypes.create_string_buffer(nothing))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number))
    return result
