"""The connection to a device's agent: requests and files, each with a time within which something must happen."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_file, revive
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import DeviceError, IntegrityError, InternalError
from compile_stage.core.hosts import Host
from compile_stage.core.leftovers import temporary_folder
from compile_stage.devices import bootstrap
from compile_stage.devices.transport import command_of, explain
from compile_stage.engine.protocol import MAX_MESSAGE_BYTES, decode, encode, revive_error

ANSWER_S = 120.0
"""So long may anything take that is no call of a model: a slow board imports Python's library meanwhile."""

_START_S = 180.0
_ALIVE_S = 20.0
_CHUNK = 1 << 20
_MOST_FILES, _MOST_BYTES = 10_000, 64 << 30  # of one answer
_BEFORE_BYTES = 1 << 20  # what a shell may print before the agent speaks
_SAFE_PART = re.compile(r"[^/\\:\0]+\Z")


class Link:
    """A session with a device. Made by `open_link`; for one thread at a time.

    Attributes:
        hello: What the agent said of itself: Python, platform, free bytes.
        hardware: The device, as `doctor` there would say it.
    """

    def __init__(self, host: Host, process: subprocess.Popen[bytes], log: Path) -> None:
        self.host = host
        self.hello: Mapping[str, Any] = {}
        self._process, self._log = process, log
        assert process.stdin is not None
        assert process.stdout is not None
        self._incoming, self._outgoing = process.stdout, process.stdin
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._number = 0
        self._late = ""

    @property
    def hardware(self) -> Hardware:
        hardware: Hardware = revive(Hardware, self.hello["hardware"])
        return hardware

    # ------------------------------------------------------------------------------------------------------- requests

    def request(self, function: str, /, within_s: float = ANSWER_S, **arguments: Any) -> Any:
        """What a function of the agent's answers.

        Args:
            within_s: The connection is ended when no answer came within this time.

        Raises:
            DeviceError: The connection was lost, or nothing came within the time.
            CompileStageError: As it was raised on the device.
        """
        with self._lock:
            return self._request(function, arguments, within_s)

    def put(self, file: Path, path: str) -> None:
        """Send a file."""
        size, digest = file.stat().st_size, digest_file(file)
        with self._lock, file.open("rb") as opened:
            self._send(self._encoded("put", {"path": path, "size": size, "digest": digest}))
            left = size
            while left:
                chunk = opened.read(min(left, _CHUNK))
                if not chunk:
                    self._kill()
                    raise IntegrityError("the file became shorter while it was sent", where=str(file))
                left -= len(chunk)
                self._send(chunk)
            self._answer("put", ANSWER_S)

    def fetch(self, path: str, into: Path) -> None:
        """Every file below a folder of the session, into a folder here."""
        files = self.request("list", path=path)
        total = 0
        for name, size in files:
            parts = str(name).split("/")
            total += int(size)
            if not all(_SAFE_PART.match(part) and part not in (".", "..") for part in parts):
                raise IntegrityError(f"the device names a file that is none: {name!r}", where=self.host.name)
            if total > _MOST_BYTES or len(files) > _MOST_FILES:
                raise IntegrityError("the device answers with more than any model does", where=self.host.name)
            target = into.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fetch_file(f"{path}/{name}", int(size), target)

    def _fetch_file(self, path: str, size: int, target: Path) -> None:
        with self._lock, target.open("wb") as file:
            answer = self._request("get", {"path": path}, ANSWER_S)
            if answer["size"] != size:
                self._kill()
                raise IntegrityError(f"{path} changed on the device while it was read", where=self.host.name)
            left = size
            while left:
                with self._within(ANSWER_S, "the bytes of a file"):
                    chunk = self._incoming.read(min(left, _CHUNK))
                if not chunk:
                    raise self._lost("get")
                left -= len(chunk)
                file.write(chunk)

    def _request(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        self._send(self._encoded(function, arguments))
        return self._answer(function, timeout_s)

    def _encoded(self, function: str, arguments: Mapping[str, Any]) -> bytes:
        self._number += 1
        return encode({"id": self._number, "function": function, "arguments": arguments})

    def _send(self, content: bytes) -> None:
        try:
            with self._within(ANSWER_S, "the connection"):
                self._outgoing.write(content)
                self._outgoing.flush()
        except OSError as error:
            raise self._lost("send") from error

    def _answer(self, function: str, timeout_s: float) -> Any:
        with self._within(timeout_s, repr(function)):
            line = self._incoming.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise self._lost(function)
        try:
            message = decode(line)
        except ValueError as error:
            self._kill()
            raise DeviceError("the device answered with something else", where=self.host.name) from error
        if message["id"] != self._number:
            self._kill()
            raise InternalError(f"the answer {message['id']} came to the request {self._number}")
        if "error" in message:
            raise revive_error(message["error"])
        return message.get("result")

    @contextmanager
    def _within(self, seconds: float, what: str) -> Iterator[None]:
        """End the connection when it takes longer."""

        def end() -> None:
            self._late = f"{what} took longer than {seconds:.0f} s, so the connection was ended"
            self._kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        """End the client with all that it started: one of these may hold its pipes open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _lost(self, function: str) -> DeviceError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        last = [line for line in self._said().splitlines() if line.strip()][-1:]
        why = self._late or (last[0].strip()[:300] if last else f"{self.host.transport} ended")
        return DeviceError(
            f"the connection was lost in {function!r}: {why}",
            fix="look at the device: was it switched off, out of memory, or out of reach? Then validate again",
            where=self.host.name,
        )

    def _said(self) -> str:
        with self._log.open("rb") as file:
            return file.read(_BEFORE_BYTES).decode(errors="replace")

    # ---------------------------------------------------------------------------------------------- beginning and end

    def start(self, validator: bytes) -> None:
        """Send the validator, and hear the agent's first words."""
        script = Path(bootstrap.__file__).read_bytes()
        asked = {"folder": self.host.folder, "size": len(validator), "digest": hashlib.sha256(validator).hexdigest()}
        with self._within(_START_S, "the start"):
            with contextlib.suppress(OSError):  # what it said before it ended tells why
                self._outgoing.write(f"{len(script)}\n".encode() + script + json.dumps(asked).encode() + b"\n")
                self._outgoing.write(validator)
                self._outgoing.flush()
            before = b""
            while (line := self._incoming.readline(_BEFORE_BYTES)) and len(before) < _BEFORE_BYTES:
                if line.startswith(bootstrap.MARK.encode()):
                    break
                before += line
            else:
                raise self._silent(before)
        message = decode(line.removeprefix(bootstrap.MARK.encode()))
        if "error" in message:
            refused = message["error"]
            raise DeviceError(str(refused["problem"]), fix=str(refused["fix"]), where=self.host.name)
        self.hello = message["result"]
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def _silent(self, before: bytes) -> DeviceError:
        if self._late:
            return DeviceError(f"it was reached, and nothing came: {self._late}", where=self.host.name)
        code = self._process.wait()
        return explain(self.host, code, self._said() + before.decode(errors="replace"))

    def _keep_alive(self) -> None:
        """An agent that hears nothing for minutes takes the sender for gone."""
        while not self._ended.wait(_ALIVE_S):
            if self._lock.acquire(blocking=False):
                try:
                    self._outgoing.write(b"\n")
                    self._outgoing.flush()
                except (OSError, ValueError):
                    return
                finally:
                    self._lock.release()

    def close(self) -> None:
        """End the session; the agent removes what was sent, and the client ends after it."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._outgoing.write(self._encoded("bye", {}))
        with contextlib.suppress(OSError):
            self._outgoing.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._incoming.close()


@contextmanager
def open_link(host: Host, validator: bytes) -> Iterator[Link]:
    """A session with a device, which leaves nothing there.

    Raises:
        DeviceError: It can't be reached, or its Python is not one that can be used.
    """
    command = command_of(host)
    with temporary_folder("device") as folder, (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - the address can't be an option (`policy.hosts`)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        link = Link(host, process, folder / "log")
        try:
            link.start(validator)
            yield link
        finally:
            link.close()
