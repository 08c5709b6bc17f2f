"""An HTTP proxy that loses a share of what passes through it, in four ways that networks and gateways have.

Used by `benchmarks/faults.py` and by the suite, in front of a real `mlflow server`.
"""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("dropped", "answer lost", "truncated", "error 500")
"""The connection ends before the server saw the request; after the server did its work; in the middle of the answer;
a gateway answers 500 in the server's place."""

_OWN_HEADERS = ("connection", "keep-alive", "transfer-encoding", "content-length", "host")


class FaultyProxy(ThreadingHTTPServer):
    """Listens on a port of its own on 127.0.0.1 and hands requests on to `port`.

    Args:
        share: Of requests that meet a fault, 0 to 1. `/health` meets them like any other.
        faults: Which ones, alike often.
    """

    daemon_threads = True

    def __init__(self, port: int, share: float, seed: int, faults: Sequence[str] = FAULTS) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.share = share
        self.seen: Counter[str] = Counter()
        self._faults = tuple(faults)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.waiting, self.released = threading.Event(), threading.Event()  # of requests that hang
        self.flipped_at = 0

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def draw(self, command: str, path: str) -> str:
        """The fault of the next request, or nothing."""
        with self._lock:
            fault = self._random.choice(self._faults) if self._random.random() < self.share else ""
            self.seen[fault or "passed"] += 1
            return fault

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: the other side hangs up on us all the time."""

    @contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.draw(self.command, self.path)
        if fault == "hang":
            self.server.waiting.set()
            self.server.released.wait(120)
        if fault in ("dropped", "hang"):
            self._hang_up()
        elif fault == "error 500":
            self._answer(500, [("Content-Type", "text/html")], b"<html>Internal Server Error</html>")
        elif fault == "log-in page":
            self._answer(200, [("Content-Type", "text/html")], b"<html><title>Sign in</title></html>")
        else:
            status, headers, answer = self._forward(body)
            if fault == "answer lost":
                self._hang_up()
            else:
                if fault == "flipped" and answer:
                    at = self.server.flipped_at % len(answer)
                    answer = answer[:at] + bytes([answer[at] ^ 0x40]) + answer[at + 1 :]
                self._answer(status, headers, answer, cut=fault == "truncated")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _handle  # noqa: N815 - called by these names

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
            connection.request(self.command, self.path, body=body or None, headers=headers)
            response = connection.getresponse()
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _OWN_HEADERS]
            return response.status, kept, response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Nothing on standard error."""
