"""A load generator: HTTP requests to servers behind local sockets, and when each was answered.

It runs as a program of its own, so that no other work of the stage delays it, and imports the standard library alone.
It reads JSON, a line for each trial, and answers with a line each. A latency begins when a request was to arrive,
whether or not it could be sent then: a server that stops for a second delays all that arrive meanwhile, and each of
them counts (no coordinated omission).

Requests go to the server that has the fewest unanswered ones. One that finds all connections in use waits here, as it
would before a load balancer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

CONNECTIONS = 64
"""To each server at a time. MLflow's server works on a few more requests than it has cores; more would wait there."""

_ANSWER_BYTES = 64_000_000
_READ_BYTES = 1 << 18
_DESCRIPTORS = 960  # select() takes numbers below 1024
_VARIANTS = 1000  # of answers to one body that are told apart
_PATH = "/invocations"


class Connection:
    """A connection to a server, with at most one request on its way.

    Attributes:
        request: Number of the request on its way; -1 for none.
    """

    def __init__(self, path: str, server: int) -> None:
        self.server, self.path, self.request = server, path, -1
        self._buffer = bytearray()
        self._left = b""
        folder, name = os.path.split(path)
        os.chdir(folder)  # an address of a local socket has room for 107 bytes
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(name)
        self.socket.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, request: int, message: bytes) -> None:
        """Begin a request. Raises OSError where the server has closed the connection."""
        self.request, self._left = request, message
        self._buffer.clear()
        self.flush()

    def flush(self) -> bool:
        """Send what is left; True when all is sent."""
        with contextlib.suppress(BlockingIOError):
            while self._left:
                self._left = self._left[self.socket.send(self._left) :]
        return not self._left

    @property
    def is_sending(self) -> bool:
        return bool(self._left)

    @property
    def has_answer_begun(self) -> bool:
        return bool(self._buffer)

    def read(self) -> tuple[int, bytes] | None:
        """Status and body once the answer is whole, else None. Raises OSError where the connection ended before, or the
        answer can't be read."""
        try:
            part = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionResetError
        self._buffer += part
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(":", 1) for line in lines[1:] if ":" in line)
        try:
            status, length = int(lines[0].split(" ")[1]), int(fields["content-length"])
        except (KeyError, ValueError, IndexError) as error:
            raise OSError from error
        if length > _ANSWER_BYTES:
            raise OSError
        whole = end + 4 + length
        return (status, bytes(self._buffer[end + 4 : whole])) if len(self._buffer) >= whole else None


class Answers:
    """Which answers are right: as those that the model gave one at a time, without load.

    Args:
        expected: Of each body, the answer as plain JSON.
        tolerance: Of the largest number in an answer, by which a number may differ.
    """

    def __init__(self, expected: list[Any], tolerance: float) -> None:
        self._expected, self._tolerance = expected, tolerance
        self._seen: list[dict[bytes, int]] = [{} for _ in expected]

    def note(self, body: int, answer: bytes) -> int:
        """A number for this answer to that body; looked at after the trial, so that it costs no time within."""
        seen = self._seen[body]
        if answer not in seen and len(seen) >= _VARIANTS:
            return -1
        return seen.setdefault(answer, len(seen))

    def right(self) -> list[list[bool]]:
        """Of each body, whether each of its answers is right."""
        return [
            [self._is_right(answer, expected) for answer in seen]
            for seen, expected in zip(self._seen, self._expected, strict=True)
        ]

    def _is_right(self, answer: bytes, expected: Any) -> bool:
        try:
            found = json.loads(answer)
        except ValueError:
            return False
        return alike(found, expected, self._tolerance * max(map(abs, numbers(expected)), default=0.0))


def numbers(value: Any) -> Iterator[float]:
    """The finite numbers of plain JSON."""
    if isinstance(value, dict):
        for one in value.values():
            yield from numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
        yield float(value)


def alike(found: Any, expected: Any, slack: float) -> bool:
    """Whether two answers, as plain JSON, are the same, numbers within `slack`."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(alike(found[key], value, slack) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(alike(one, other, slack) for one, other in zip(found, expected, strict=True))
        )
    if isinstance(expected, float):
        if not isinstance(found, float | int) or isinstance(found, bool):
            return False
        return found == expected or abs(found - expected) <= slack or (found != found and expected != expected)
    return type(found) is type(expected) and bool(found == expected)


class Trial:
    """One trial. Times are seconds from its begin.

    Args:
        due: When each request is to arrive; endless where that is decided on the way (`closed`).
    """

    def __init__(self, config: dict[str, Any], due: list[float]) -> None:
        self._paths: list[str] = config["sockets"]
        self._messages = [_message(body.encode()) for body in config["bodies"]]
        self._answers = Answers(config["expected"], config["tolerance"])
        self.due, count = due, len(due)
        self.sent, self.ended = [math.nan] * count, [math.nan] * count
        self._late = [math.nan] * count
        self._status, self._answer = [0] * count, [-1] * count
        self._retried: set[int] = set()
        self._waiting: deque[int] = deque()
        self._idle: list[list[Connection]] = [[] for _ in self._paths]
        self._open = [0] * len(self._paths)
        self._busy: dict[int, Connection] = {}
        self._on_way = [0] * len(self._paths)
        self._most = min(CONNECTIONS, _DESCRIPTORS // len(self._paths))
        self.asked = self.done = 0
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    @property
    def unanswered(self) -> int:
        return len(self._waiting) + len(self._busy)

    def connect(self, number: int) -> None:
        """Open so many connections, shared out among the servers."""
        for index in range(number):
            server = index % len(self._paths)
            if self._open[server] < self._most:
                self._idle[server].append(self._connection(server))
        self._began = time.perf_counter()

    def arrive(self, request: int) -> None:
        """A request is there: it is sent, or waits for a connection."""
        self.asked += 1
        self._waiting.append(request)
        self._send_waiting(late=True)

    def wait(self, seconds: float) -> None:
        """Until something is answered, at most so long."""
        connections = [*self._busy.values()]
        idle = [one for those in self._idle for one in those]
        readable, writable, _ = select.select(
            connections + idle, [one for one in connections if one.is_sending], [], max(0.0, seconds)
        )
        for connection in writable:
            try:
                connection.flush()
            except OSError:
                self._broken(connection)
        for connection in readable:
            if connection.request < 0:  # the server closes what was idle for some seconds
                self._idle[connection.server].remove(connection)
                self._close(connection)
            elif id(connection) in self._busy:
                self._read(connection)
        self._send_waiting(late=False)

    def close(self) -> None:
        for connection in [*self._busy.values(), *(one for those in self._idle for one in those)]:
            connection.socket.close()

    def outcome(self) -> dict[str, Any]:
        """Latencies of right answers in seconds, by request; None of those without one."""
        right, bodies = self._answers.right(), len(self._messages)
        latencies: list[float | None] = []
        wrong = errors = 0
        for request in range(self.asked):
            if not self._status[request]:
                latencies.append(None)
            elif self._status[request] != 200:
                errors += 1
                latencies.append(None)
            elif self._answer[request] < 0 or not right[request % bodies][self._answer[request]]:
                wrong += 1
                latencies.append(None)
            else:
                latencies.append(self.ended[request] - self.due[request])
        unanswered = sum(not status for status in self._status[: self.asked])
        late = [value for value in self._late[: self.asked] if value == value]
        return {
            "latencies_s": latencies, "wrong": wrong, "errors": errors, "unanswered": unanswered, "late_s": late,
        }  # fmt: skip

    def _send_waiting(self, *, late: bool) -> None:
        while self._waiting:
            connection = self._free()
            if connection is None:
                return
            request = self._waiting.popleft()
            moment = self.now()
            if math.isnan(self.sent[request]):
                self.sent[request] = moment
                if late:  # it found a connection when it was there: what it waited is the generator's own doing
                    self._late[request] = moment - self.due[request]
            self._busy[id(connection)] = connection
            self._on_way[connection.server] += 1
            try:
                connection.send(request, self._messages[request % len(self._messages)])
            except OSError:
                self._broken(connection)

    def _free(self) -> Connection | None:
        """A connection to the server with the fewest requests on their way that takes one more."""
        open_to = [server for server, number in enumerate(self._on_way) if number < self._most]
        if not open_to:
            return None
        server = min(open_to, key=self._on_way.__getitem__)
        return self._idle[server].pop() if self._idle[server] else self._connection(server)

    def _connection(self, server: int) -> Connection:
        self._open[server] += 1
        return Connection(self._paths[server], server)

    def _read(self, connection: Connection) -> None:
        try:
            answer = connection.read()
        except OSError:
            self._broken(connection)
            return
        if answer is None:
            return
        request, moment = connection.request, self.now()
        self.ended[request], self._status[request] = moment, answer[0]
        if answer[0] == 200:
            self._answer[request] = self._answers.note(request % len(self._messages), answer[1])
        self._free_again(connection)
        connection.request = -1
        self._idle[connection.server].append(connection)
        self.done += 1

    def _broken(self, connection: Connection) -> None:
        """Asked once more where the server had closed the connection before it began to answer."""
        request, begun = connection.request, connection.has_answer_begun
        self._free_again(connection)
        self._close(connection)
        if begun or request in self._retried:
            self.ended[request], self._status[request] = self.now(), -1
            self.done += 1
        else:
            self._retried.add(request)
            self._waiting.appendleft(request)

    def _free_again(self, connection: Connection) -> None:
        del self._busy[id(connection)]
        self._on_way[connection.server] -= 1

    def _close(self, connection: Connection) -> None:
        self._open[connection.server] -= 1
        connection.socket.close()


def run_open(config: dict[str, Any], rate: float, count: int, seed: int, drain_s: float) -> dict[str, Any]:
    """Requests that arrive as a Poisson process, whatever becomes of those before.

    It stops early where far more requests wait than chance makes wait in a queue that can be carried: after n arrivals
    that is a random walk's distance, 3 sqrt(2 n), and as many as the connections hold.
    """
    chance = random.Random(seed)  # noqa: S311 - arrivals, no secret
    due, at = [], 0.0
    for _ in range(count):
        at += chance.expovariate(rate)
        due.append(at)
    trial = Trial(config, due)
    trial.connect(min(8, count))
    request, overloaded = 0, False
    while request < count and not overloaded:
        if due[request] <= trial.now():
            trial.arrive(request)
            request += 1
            overloaded = trial.unanswered > 3 * math.sqrt(2 * request) + CONNECTIONS
        else:
            trial.wait(due[request] - trial.now())
    seconds = trial.now()
    waiting = trial.unanswered
    _drain(trial, drain_s)
    trial.close()
    found = trial.outcome()
    done = sum(value is not None for value in found["latencies_s"])
    grown = waiting > 3 * math.sqrt(2 * max(1, request))
    return {**found, "seconds": max(seconds, trial.now()), "overloaded": overloaded or grown, "right": done}


def run_closed(config: dict[str, Any], clients: int, seconds: float, drain_s: float) -> dict[str, Any]:
    """Clients that wait for their answers: each asks again as soon as it has one."""
    trial = Trial(config, [])
    trial.connect(clients)

    def ask() -> None:
        request = len(trial.due)
        trial.due.append(trial.now())
        for values in (trial.sent, trial.ended, trial._late):
            values.append(math.nan)
        trial._status.append(0)
        trial._answer.append(-1)
        trial.arrive(request)

    for _ in range(clients):
        ask()
    while trial.now() < seconds:
        before = trial.done
        trial.wait(seconds - trial.now())
        for _ in range(trial.done - before):
            ask()
    lasted = trial.now()
    # What is on its way at the end is waited for and counts as a request; the throughput is that of the time before.
    answered = trial.done
    _drain(trial, drain_s)
    trial.close()
    found = trial.outcome()
    right = sum(value is not None for value in found["latencies_s"])
    share = right / max(1, trial.done)
    return {**found, "late_s": [], "seconds": lasted, "overloaded": False, "right": answered * share}


def _drain(trial: Trial, seconds: float) -> None:
    ends = trial.now() + seconds
    while trial.unanswered and (left := ends - trial.now()) > 0:
        trial.wait(left)


def _message(body: bytes) -> bytes:
    head = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Trials from standard input, until it ends. A line with `config` names sockets, bodies and what they answer."""
    config: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "config" in asked:
            config = asked["config"]
            continue
        before, began = _cpu_s(), time.perf_counter()
        try:
            found = run_open(config, **asked["open"]) if "open" in asked else run_closed(config, **asked["closed"])
            found["generator_cores"] = (_cpu_s() - before) / max(1e-9, time.perf_counter() - began)
        except OSError as error:
            found = {"problem": f"the server can't be reached: {error.strerror or type(error).__name__}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
