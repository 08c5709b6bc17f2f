"""The stage's ends of a worker's two pipes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from typing import Any, BinaryIO, cast

from compile_stage.engine.protocol import MAX_MESSAGE_BYTES, decode


class Pipe:
    """Lines to and from a worker, never blocking longer than asked to."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._requests = cast("BinaryIO", process.stdin)
        self._answers = cast("BinaryIO", process.stdout)
        self._poll = select.poll()
        for stream in (self._requests, self._answers):
            os.set_blocking(stream.fileno(), False)
        self._poll.register(self._answers, select.POLLIN)
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def send(self, line: bytes) -> None:
        """Begin to send; `turn` goes on with it."""
        self._unsent = memoryview(line)
        self._poll.register(self._requests, select.POLLOUT)

    def turn(self, seconds: float) -> bytes | None:
        """Send and receive what can be within that time; a line when one is complete.

        Raises:
            EOFError: The other end is closed.
            ValueError: What came is longer than any message.
        """
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._requests.fileno():
                self._write()
            elif (line := self._read()) is not None:
                return line
        return None

    def close(self) -> None:
        """Close both ends."""
        for stream in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                stream.close()

    def _write(self) -> None:
        try:
            sent = os.write(self._requests.fileno(), self._unsent)
        except BlockingIOError:
            return
        except BrokenPipeError:  # it is dead; why is found at the other pipe
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._poll.unregister(self._requests)

    def _read(self) -> bytes | None:
        try:
            chunk = os.read(self._answers.fileno(), 1 << 20)
        except BlockingIOError:
            return None
        if not chunk:
            raise EOFError
        seen = len(self._received)
        self._received += chunk
        if (end := self._received.find(b"\n", seen)) < 0:
            if len(self._received) > MAX_MESSAGE_BYTES:
                raise ValueError(f"more than {MAX_MESSAGE_BYTES} bytes without an end")
            return None
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line


def open_message(line: bytes, number: int) -> dict[str, Any]:
    """The answer to request `number`. Raises ValueError for anything else."""
    message = decode(line)
    if message["id"] != number or ("result" in message) == isinstance(message.get("error"), dict):
        raise ValueError("not an answer to the request")
    return message
