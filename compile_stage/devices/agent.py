"""The process of ours on a device: it takes files, starts workers, asks them, and meters them from outside.

It needs the standard library alone. Each message is a line of JSON (`engine.protocol`); the bytes of a file follow the
line that announces them. When its input ends, the sender is gone: it ends its workers and removes what it wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from compile_stage.core.digest import plain
from compile_stage.core.environment import hardware, python_version
from compile_stage.core.errors import CompileStageError, IntegrityError, InternalError, WorkerError
from compile_stage.core.ports import WorkerMemory, WorkerUsage
from compile_stage.core.storage import disk_full
from compile_stage.devices import meter
from compile_stage.engine.protocol import decode, describe_error, encode

PROTOCOL = 1
"""Raised when a message changes its meaning. Both ends are of one release: the sender brings the other."""

HERE = "@device/"
"""Before a path below the session's folder, in arguments and in results."""

SILENCE_S = 300.0
"""The sender says something every 20 s; after so long without a word its connection is dead."""

_CHUNK = 1 << 20
_LOG_TAIL_BYTES = 4000
_END_S = 5.0


def serve(folder: str, lock: object, removed: int, mark: str) -> None:
    """Answer until the sender is gone; what is left of the session then is nothing.

    Args:
        folder: Of the session; it holds the validator.
        lock: The open file that says that the session lives; None where this system has no such locks.
        removed: Sessions of others that had ended without removing their files.
        mark: What the line begins with that says that the agent listens.
    """
    incoming = sys.stdin.buffer
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything here prints is no message
    agent = Agent(Path(folder), outgoing)
    machine = hardware()
    hello = {
        "protocol": PROTOCOL,
        "python": python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "hardware": machine,
        "folder": folder,
        "free_bytes": shutil.disk_usage(folder).free,
        "removed": removed,
        "locks": lock is not None,
    }
    outgoing.write(b"\n" + mark.encode() + encode({"id": 0, "result": hello}))
    outgoing.flush()
    listener = Listener(incoming, agent)
    listener.start()
    while (request := listener.requests.get()) is not None:
        if not agent.answer(request):
            break
    agent.end(lock)


class Listener:
    """Reads requests as they come, also while one is answered: the end of the input ends everything."""

    def __init__(self, incoming: BinaryIO | IO[bytes], agent: Agent) -> None:
        self.requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._incoming, self._agent = incoming, agent
        self._heard = time.monotonic()

    def start(self) -> None:
        """In threads of its own."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            for line in self._incoming:
                self._heard = time.monotonic()
                if not line.strip():
                    continue
                request = decode(line)
                if request.get("function") == "put":
                    request["failed"] = self._take(request["arguments"])
                self.requests.put(request)
        self._agent.kill()
        self.requests.put(None)

    def _take(self, asked: Mapping[str, Any]) -> BaseException | None:
        """The bytes of a file, as they follow; what went wrong, where something did. They are read in any case."""
        left, digest, failed = int(asked["size"]), hashlib.sha256(), None
        with contextlib.ExitStack() as stack:
            target: IO[bytes] | None = None
            try:
                path = self._agent.below(str(asked["path"]))
                path.parent.mkdir(parents=True, exist_ok=True)
                target = stack.enter_context(path.open("wb"))
            except (OSError, CompileStageError) as error:
                failed = error
            while left:
                chunk = self._incoming.read(min(left, _CHUNK))
                if not chunk:
                    return EOFError()
                left -= len(chunk)
                self._heard = time.monotonic()
                digest.update(chunk)
                try:
                    if target is not None and failed is None:
                        target.write(chunk)
                except OSError as error:
                    failed = error
        if failed is None and f"sha256:{digest.hexdigest()}" != asked["digest"]:
            return IntegrityError(f"{asked['path']} did not arrive as it was sent")
        return failed

    def _watch(self) -> None:
        while time.monotonic() - self._heard < SILENCE_S:
            time.sleep(5)
        self._agent.kill()
        self.requests.put(None)


class Agent:
    """The session's folder and workers."""

    def __init__(self, folder: Path, outgoing: IO[bytes]) -> None:
        self._folder, self._outgoing = folder.resolve(), outgoing
        self._workers: dict[str, DeviceWorker] = {}
        self._held: list[object] = []
        self._functions: dict[str, Callable[..., Any]] = {
            "put": lambda **_: None,
            "describe": self._describe,
            "start": self._start,
            "call": self._call,
            "memory": lambda worker: self._workers[worker].memory(),
            "stop": self._stop,
            "list": self._list,
            "remove": lambda path: shutil.rmtree(self.below(path), ignore_errors=True),
            "machine": lambda: meter.machine_usage(),
            "alone": self._alone,
            "together": self._held.clear,
        }

    def answer(self, request: Mapping[str, Any]) -> bool:
        """Answer one request; False for the last."""
        number, function = request["id"], request.get("function")
        arguments = request.get("arguments", {})
        if function == "bye":
            return False
        try:
            if function == "get":
                self._send_file(number, self.below(arguments["path"]))
                return True
            if (failed := request.get("failed")) is not None:
                raise failed
            if function not in self._functions:
                raise InternalError(f"the agent has no function {function!r}")
            reply = {"id": number, "result": self._functions[function](**arguments)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender hears of it
            if isinstance(error, OSError) and (full := disk_full(error)) is not None:
                error = full
            reply = {"id": number, "error": describe_error(error)}
        with contextlib.suppress(OSError):  # the sender is gone; the listener says so too
            self._outgoing.write(encode(reply))
            self._outgoing.flush()
        return True

    def below(self, path: str) -> Path:
        """A path of the session. Raises IntegrityError for one that leads out of its folder."""
        parts = path.split("/")
        if any(part in ("", ".", "..") or ":" in part or "\\" in part or "\0" in part for part in parts):
            raise IntegrityError(f"{path!r} is no path below the session's folder")
        return self._folder.joinpath(*parts)

    def kill(self) -> None:
        """End all workers, from any thread."""
        for worker in list(self._workers.values()):
            worker.kill()

    def end(self, lock: Any) -> None:
        """Leave nothing behind, and end the process."""
        self.kill()
        sessions = [part for part in self._folder.parent.glob("session-*") if part.is_dir()]
        if self._alone() and sessions == [self._folder]:  # of the last session
            with contextlib.suppress(OSError):
                (self._folder.parent / "measuring.lock").unlink()
        for _ in range(50):
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._folder.exists():
                break
            time.sleep(0.1)  # a worker that is just ending still writes, or has a file open
        if lock is not None and sys.platform == "win32":  # an open file can't be removed there
            lock.close()
        with contextlib.suppress(OSError):
            self._folder.with_name(f"{self._folder.name}.lock").unlink()
        os._exit(0)  # threads that wait for input, and a runtime's own, have nothing more to say

    def _describe(self, modules: list[str], distributions: list[str]) -> dict[str, Any]:
        """Which modules can't be imported here, and the versions of distributions."""
        versions = {}
        for name in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        return {"absent": [name for name in modules if not _importable(name)], "versions": versions}

    def _start(self, worker: str, threads: int) -> Any:
        self._workers[worker] = started = DeviceWorker(worker, self._folder, threads)
        return started.confine()

    def _stop(self, worker: str) -> None:
        self._workers.pop(worker).kill()

    def _call(self, worker: str, function: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if isinstance(into := arguments.get("into"), str):
            self.below(into.removeprefix(HERE)).mkdir(parents=True, exist_ok=True)
        asked = _with_paths(arguments, lambda text: str(self.below(text.removeprefix(HERE))), HERE)
        answer = self._workers[worker].call(function, asked, timeout_s)
        here = f"{self._folder}{os.sep}"
        found = _with_paths(plain(answer), lambda text: HERE + text.removeprefix(here).replace(os.sep, "/"), here)
        return dict(found)

    def _list(self, path: str) -> list[list[Any]]:
        """Path below the given one, and size in bytes, of each file there."""
        root = self.below(path)
        files = sorted(file for file in root.rglob("*") if file.is_file() and not file.is_symlink())
        return [[file.relative_to(root).as_posix(), file.stat().st_size] for file in files]

    def _send_file(self, number: int, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            self._outgoing.write(encode({"id": number, "result": {"size": size}}))
            left = size
            while left and (chunk := file.read(min(left, _CHUNK))):
                self._outgoing.write(chunk)
                left -= len(chunk)
            self._outgoing.write(b"\0" * left)  # it was cut short meanwhile: no array is read from that
        self._outgoing.flush()

    def _alone(self) -> bool:
        """Have the device alone among sessions, until `together`; False while another has it."""
        if self._held:
            return True
        held = meter.lock_of(self._folder.parent / "measuring.lock")
        self._held += [held] if held is not None else []
        return held is not None


class DeviceWorker:
    """One process with one model, driven over its pipes."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self._writes = folder / "work" / name
        self._writes.mkdir(parents=True)
        self._log_file = folder / f"{name}.log"
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-u", str(folder / "validator.pyz"), str(self._writes), str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=self._writes, env=environment,
            )  # fmt: skip
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._number = 0
        self._said: Mapping[str, float] = {}

    def confine(self) -> Any:
        """What keeps it from the rest of the device. It is the first request, and before it nothing is loaded."""
        return self._request("confine", {}, 120.0)["result"]

    def call(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer, and what was used before and after it."""
        before = self.usage()
        began = time.monotonic()
        message = self._request(function, arguments, timeout_s)
        wall_s = time.monotonic() - began
        found = {"wall_s": wall_s, "before": before, "after": self.usage()}
        key = "error" if "error" in message else "value"
        return {**found, key: message["error"] if key == "error" else message.get("result")}

    def usage(self) -> WorkerUsage:
        """What it used so far: by the kernel's counters, or, where none can be read, by its own word."""
        return meter.usage_of(self._process.pid) or WorkerUsage(
            at_s=time.monotonic(), cpu_s=self._said.get("cpu_s", 0.0), threads={}, waits={}
        )

    def memory(self) -> WorkerMemory:
        """What it held at most."""
        seen = meter.memory_of(self._process.pid)
        return seen or WorkerMemory(peak_bytes=int(self._said.get("peak_bytes", 0)))

    def kill(self) -> None:
        """End it, and what it started where the system lets us find that."""
        for pid in meter.children_of(self._process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _request(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._number += 1
        with contextlib.suppress(OSError):  # it has ended; the missing answer says so
            assert self._process.stdin is not None
            self._process.stdin.write(encode({"id": self._number, "function": function, "arguments": dict(arguments)}))
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise WorkerError("timeout", f"{function!r} took longer than {timeout_s:.0f} s on the device") from None
        if not line:
            raise self._death(function)
        message = decode(line)
        self._said = message.get("used", {})
        return message

    def _death(self, function: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        log = self._log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        if code == -9:
            why = "it was killed, as a system without free memory does"
            return WorkerError("out_of_memory", f"{function!r} ended on the device: {why}", detail=log)
        last = log.strip().splitlines()[-1:]
        said = f": {last[0][:300]}" if last else ""
        return WorkerError("crash", f"{function!r} ended the process on the device (code {code}){said}", detail=log)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")


def _with_paths(value: Any, change: Callable[[str], str], prefix: str) -> Any:
    if isinstance(value, str):
        return change(value) if value.startswith(prefix) else value
    if isinstance(value, Mapping):
        return {key: _with_paths(item, change, prefix) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_paths(item, change, prefix) for item in value]
    return value


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
