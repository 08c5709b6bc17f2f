"""What the tests have a worker do, good and bad. Imported by name in the worker (`LocalEngine(calls="deeds")`)."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.core.errors import PolicyError, SourceError
from compile_stage.engine.starter import Process, start

_HOLD = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


_children: list[subprocess.Popen[bytes]] = []
_left: list[Process] = []


def echo(**arguments: Any) -> Any:
    return arguments


def process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "cwd": str(Path.cwd()),
        "modules": sorted(sys.modules),
        "environment": dict(os.environ),
        "executable": sys.executable,
    }


def forget_peak() -> None:
    """Reset the peak that the kernel keeps of this process's memory."""
    Path(f"/proc/self/task/{threading.get_native_id()}/clear_refs").write_text("5")


def name_a_thread(name: str) -> str:
    """A thread that begins now writes its own name to /proc, as NVIDIA's driver does."""
    came: list[str] = []

    def work() -> None:
        own = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        own.write_text(name)
        came.append(own.read_text().strip())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return came[0] if came else ""


_IN_ANOTHER = """
import json, sys
sys.path[:], module, name, arguments = json.loads(input())
print(json.dumps(getattr(__import__(module), name)(**arguments)), flush=True)
input()
raise SystemExit(7)
"""


def in_a_process_it_starts(function: str, **arguments: Any) -> dict[str, Any]:
    """One of these in a process that the worker has started as it starts those that load a model."""
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-c", _IN_ANOTHER]
        started = start(command, cwd=str(Path.cwd()), environment=os.environ, stderr=said)
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(json.dumps([sys.path, __name__, function, arguments]) + "\n")
        started.stdin.flush()
        line, running = started.stdout.readline(), started.poll() is None
        said.seek(0)
        assert line, said.read().decode()
        started.stdin.write("\n")
        started.stdin.close()
        return {"answer": json.loads(line), "running": running, "code": started.wait(10)}


def start_and_leave() -> int:
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
        _left.append(started := start(command, cwd=str(Path.cwd()), environment=os.environ, stderr=said))
        assert started.stdout is not None
        return int(started.stdout.readline())


def start_what_is_not_there() -> str:
    with tempfile.TemporaryFile() as said:
        try:
            start(["/no/such/program"], cwd="/", environment={}, stderr=said)
        except OSError as error:
            return str(error)
    return ""


def start_cuda() -> int:
    """What `cuInit` returns: 0 where the GPU can be used."""
    result: int = ctypes.CDLL("libcuda.so.1").cuInit(0)
    return result


def spin() -> None:
    while True:
        pass


def spin_native() -> None:
    """Blocks in C with the interpreter's lock held: no Python thread of the process can run any more."""
    ctypes.PyDLL(None).sleep(600)


def allocate(chunk_mb: int, chunks: int) -> int:
    import numpy as np

    kept = []
    for _ in range(chunks):
        kept.append(np.ones(chunk_mb * 125_000))
        time.sleep(0.01)
    return len(kept)


def allocate_in_child(chunk_mb: int, chunks: int) -> None:
    code = f"import deeds; deeds.allocate({chunk_mb}, {chunks})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


def compute(seconds: float, threads: int) -> None:
    """So many threads, each of which takes so much CPU time, however long that is, and lives on. Hashing lets others
    run meanwhile."""
    data, done = bytes(1_000_000), threading.Barrier(threads + 1)

    def work() -> None:
        while time.thread_time() < seconds:
            hashlib.sha256(data)
        done.wait()
        time.sleep(600)

    for _ in range(threads):
        threading.Thread(target=work, daemon=True).start()
    done.wait()


def compute_in_child(seconds: float) -> None:
    code = f"import time; ends = time.process_time() + {seconds}\nwhile time.process_time() < ends: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


def hold_in_child(size: int, freed: bool = False) -> None:
    then = "del held; " * freed
    code = f"import sys; held = bytearray(b'1') * {size}; {then}print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    _children.append(child)


def map_file(path: str) -> int:
    """Reads a mapped file: pages that are resident but the kernel's to drop."""
    import numpy as np

    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    total = int(mapped[::4096].sum())
    time.sleep(0.4)
    return total


def print_everywhere() -> str:
    print('{"id": 1, "result": "from Python"}')
    os.write(1, b'{"id": 1, "result": "from C"}\n')
    subprocess.run(["echo", "from a child"], check=True)
    return "the answer"


def print_for_ever() -> None:
    while True:
        os.write(1, b"x" * 1_000_000)


def garbage_on_protocol(text: str) -> str:
    for descriptor in range(3, 30):
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, text.encode())
        except OSError:
            continue
    time.sleep(0.2)
    return "the answer"


def close_everything() -> None:
    os.closerange(3, 100)
    time.sleep(600)


def cyclic() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def recurse() -> None:
    recurse()


def recurse_native() -> None:
    """Overflows the native stack, which no RecursionError guards."""
    sys.setrecursionlimit(10**9)

    class Endless:
        def __getattr__(self, name: str) -> Any:
            return getattr(self, name + "x")

    nested: Any = ()
    for _ in range(10**6):
        nested = (nested,)
    hash(nested)
    repr(nested)


def fail(text: str) -> None:
    raise ValueError(text)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class OwnSourceError(SourceError):
    """A plug-in's own class, unknown to the stage."""


def fail_with(kind: str) -> None:
    if kind == "source":
        raise OwnSourceError("the model is frozen", fix="thaw it", where="models:/m/1")
    if kind == "policy":
        raise PolicyError("2 mistakes", problems=("a.yaml:1:1: one", "a.yaml:2:1: two"))
    if kind == "mute":
        raise MuteError
    if kind == "full":  # as the kernel says it of a file that can't be written on: without its name
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "bad_alloc":
        raise RuntimeError("std::bad_alloc")
    if kind == "from_memory":
        raise RuntimeError("compilation failed") from MemoryError("no more")
    sys.exit(kind)


def abort_bad_alloc() -> None:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def spawn(then: str) -> list[int]:
    """Start a child, a child in a session of its own, and one whose parent is gone; then do something else.

    Prints and returns their process ids, the worker's and its guard's."""
    pids = str(Path("pids").absolute())
    for detached in (False, True):
        subprocess.Popen([sys.executable, "-c", _HOLD, pids], start_new_session=detached)
    daemon = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_HOLD!r}, {pids!r}], start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", daemon], env={}, check=True)
    while not Path(pids).exists() or Path(pids).read_text().count("\n") < 3:
        time.sleep(0.01)
    numbers = [*map(int, Path(pids).read_text().split()), os.getpid(), os.getppid()]
    print("processes", *numbers)
    if then == "segfault":
        ctypes.string_at(0)
    if then == "spin":
        spin_native()
    return numbers


def note_times(seconds: float) -> list[float]:
    """When the call began and ended."""
    began = time.monotonic()
    time.sleep(seconds)
    return [began, time.monotonic()]


def reach(files: list[str], ports: list[int], pids: list[int]) -> dict[str, str]:
    """What a stranger's code tries, each with what came of it: "done", or the error."""
    tried: dict[str, Callable[[], Any]] = {}
    for file in files:
        tried[f"read {file}"] = partial(_read, file)
        tried[f"write {file}"] = partial(_write, file)
    for port in ports:
        tried[f"connect {port}"] = partial(socket.create_connection, ("127.0.0.1", port), 5)
        tried[f"send {port}"] = partial(_send, port)
    for pid in pids:
        tried[f"signal {pid}"] = partial(os.kill, pid, 0)
        tried[f"environment {pid}"] = partial(_read, f"/proc/{pid}/environ")
        tried[f"memory {pid}"] = partial(_write, f"/proc/{pid}/mem")
    tried["mount"] = partial(_libc, "mount", b"none", b"/mnt", b"tmpfs", 0, b"")
    tried["namespace"] = partial(_libc, "unshare", 0x10000000)
    tried["trace"] = partial(_libc, "ptrace", 16, os.getppid(), 0, 0)
    tried["own folder"] = partial(_write, "here")
    tried["own child"] = partial(subprocess.run, ["true"], check=True)
    tried["own memory"] = partial(_write, "/dev/shm/here")
    return {name: _outcome(attempt) for name, attempt in tried.items()}


def meddle(pid: int) -> dict[str, str]:
    """What a stranger's code tries on another process of its user, each with what came of it, and on itself."""
    tried: dict[str, Callable[[], Any]] = {}
    for whose, number in (("other", pid), ("own", 0)):
        limits = resource.prlimit(0, resource.RLIMIT_NOFILE)
        tried[f"limits {whose}"] = partial(resource.prlimit, number, resource.RLIMIT_NOFILE, limits)
        tried[f"priority {whose}"] = partial(os.setpriority, os.PRIO_PROCESS, number, 0)
        tried[f"scheduling {whose}"] = partial(os.sched_setscheduler, number, os.SCHED_OTHER, os.sched_param(0))
        tried[f"disk {whose}"] = partial(_libc, "syscall", _IOPRIO_SET[platform.machine()], 1, number, 2 << 13 | 4)
    tried["priority user"] = partial(os.setpriority, os.PRIO_USER, 0, 0)
    tried["priority group"] = partial(os.setpriority, os.PRIO_PGRP, 0, 0)
    return {name: _outcome(attempt) for name, attempt in tried.items()}


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _write(path: str) -> None:
    with open(path, "r+b" if Path(path).exists() else "wb") as file:
        file.write(b"")


def _send(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendto(b"secret", ("127.0.0.1", port))


def _libc(function: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), function)


def write_files(into: str, text: str) -> dict[str, str]:
    """A file, one in a folder, and the paths as a call answers them."""
    (Path(into) / "deep").mkdir(parents=True)
    (Path(into) / "a.txt").write_text(text)
    (Path(into) / "deep" / "b.txt").write_text(text)
    return {"path": f"{into}/a.txt"}


def write_link(into: str, target: str) -> None:
    (Path(into) / "link").symlink_to(target)


def name_file(into: str, name: str) -> dict[str, str]:
    return {"path": f"{into}/{name}"}


def keep_open(into: str) -> None:
    """Write a file, and write into it again after the answer."""
    file = open(f"{into}/late.txt", "w")  # noqa: SIM115 - it stays open
    file.write("proven")
    file.flush()
    threading.Timer(0.2, lambda: (file.seek(0), file.write("another"), file.flush())).start()


def read_path(path: str) -> dict[str, Any]:
    """Content and place of a file, and what lies beside it; then it tries to change it."""
    here = Path(path)
    text = here.read_text()
    beside = sorted(entry.name for entry in here.parent.iterdir())
    return {"text": text, "seen": str(here.parent.name), "beside": beside, "write": _outcome(partial(_write, path))}


def start_processes(count: int) -> None:
    """As a fork bomb that stops by itself: each lives for a minute at most."""
    for _ in range(count):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    time.sleep(60)


def fill(path: str, megabytes: int) -> None:
    """Write to a file, in pieces of a megabyte."""
    with open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(bytes(1_000_000))


CALLS = {
    **{f.__name__: f for f in (
        echo, process, spin, spin_native, allocate, allocate_in_child, map_file, print_everywhere, print_for_ever,
        garbage_on_protocol, close_everything, cyclic, recurse, recurse_native, fail, fail_with, abort_bad_alloc, spawn,
        note_times, reach, meddle, write_files, write_link, name_file, keep_open, read_path, start_processes, fill,
        compute,
        compute_in_child, hold_in_child, forget_peak, name_a_thread, start_cuda,
        in_a_process_it_starts, start_and_leave, start_what_is_not_there,
    )},
    "sleep": time.sleep,
    "segfault": lambda: ctypes.string_at(0),
    "exit": os._exit,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "big": lambda size: "x" * size,
    "unfit": lambda: {"array": {1, 2}},
    "raw": lambda: b"\x00\xff",
}  # fmt: skip
