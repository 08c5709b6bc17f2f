"""What the tests have a worker do, good and bad. Imported by name in the worker (`LocalEngine(calls="deeds")`)."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from compile_stage.core.errors import PolicyError, SourceError

_HOLD = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


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


def spin() -> None:
    while True:
        pass


def interrupt(pid: int) -> None:
    """As a Ctrl-C that comes while the stage waits for this call."""
    os.kill(pid, signal.SIGINT)
    spin()


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
    if kind == "bad_alloc":
        raise RuntimeError("std::bad_alloc")
    if kind == "from_memory":
        raise RuntimeError("compilation failed") from MemoryError("no more")
    sys.exit(kind)


def abort_bad_alloc() -> None:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def spawn(pids: str, then: str) -> str:
    """Start a child, a child in a session of its own, and one whose parent is gone; then do something else."""
    for detached in (False, True):
        subprocess.Popen([sys.executable, "-c", _HOLD, pids], start_new_session=detached)
    daemon = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_HOLD!r}, {pids!r}], start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", daemon], env={}, check=True)
    while not Path(pids).exists() or Path(pids).read_text().count("\n") < 3:
        time.sleep(0.01)
    with open(pids, "a") as out:
        out.write(f"{os.getpid()}\n{os.getppid()}\n")
    if then == "segfault":
        ctypes.string_at(0)
    if then == "spin":
        spin_native()
    return "done"


def note_times(path: str, seconds: float) -> None:
    began = time.monotonic()
    time.sleep(seconds)
    with open(path, "a") as out:
        out.write(f"{began} {time.monotonic()}\n")


CALLS = {
    **{f.__name__: f for f in (
        echo, process, spin, spin_native, interrupt, allocate, allocate_in_child, map_file, print_everywhere, print_for_ever,
        garbage_on_protocol, close_everything, cyclic, recurse, recurse_native, fail, fail_with, abort_bad_alloc, spawn,
        note_times,
    )},
    "sleep": time.sleep,
    "segfault": lambda: ctypes.string_at(0),
    "exit": os._exit,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_guard": lambda: [os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)],
    "big": lambda size: "x" * size,
    "unfit": lambda: {"array": {1, 2}},
    "raw": lambda: b"\x00\xff",
}  # fmt: skip
