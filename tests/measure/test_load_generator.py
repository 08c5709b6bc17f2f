"""The load generator as a process, against real servers on local sockets that do what a test says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_stage.core.errors import UsageError
from compile_stage.measure.generator_process import LoadGenerator
from compile_stage.measure.load_generator import alike

BODIES = ['{"inputs": [0]}', '{"inputs": [1]}']
ANSWERS = [{"predictions": [0.5, 1.0]}, {"predictions": [1.5, -2.0]}]
Reply = Callable[[int, int], tuple[int, Any]]
"""(number of the request, its input) → status and answer."""


def right(_: int, given: int) -> tuple[int, Any]:
    return 200, ANSWERS[given]


class Server:
    """One thread for each connection; `reply` may sleep. `alone`: one request at a time."""

    def __init__(self, name: str, reply: Reply, *, alone: bool = False) -> None:
        self._reply, self._alone = reply, alone
        self.answered = 0
        self._lock, self._count = threading.Lock(), threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(name)  # in the current folder
        self._listening.listen(512)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as incoming:
            while line := incoming.readline():
                assert line.startswith(b"POST /invocations HTTP/1.1")
                length = 0
                while (field := incoming.readline()) != b"\r\n":
                    if field.lower().startswith(b"content-length:"):
                        length = int(field.split(b":")[1])
                (given,) = json.loads(incoming.read(length))["inputs"]
                with self._count:
                    self.answered += 1
                    number = self.answered
                if self._alone:
                    with self._lock:
                        status, answer = self._reply(number, given)
                else:
                    status, answer = self._reply(number, given)
                if status == 0:
                    return
                body = json.dumps(answer).encode()
                try:
                    connection.sendall(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
                except OSError:
                    return


@pytest.fixture
def aimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LoadGenerator]]:
    """Gives a generator that is aimed at so many servers with that reply."""
    servers: list[Server] = []
    with LoadGenerator() as generator:

        def aim(reply: Reply, number: int = 1, *, alone: bool = False) -> LoadGenerator:
            folder = tmp_path / "a-folder-whose-name-is-longer-than-an-address-of-a-local-socket-can-be" / ("x" * 40)
            folder.mkdir(parents=True, exist_ok=True)
            monkeypatch.chdir(folder)
            names = [f"s{len(servers) + index}" for index in range(number)]
            servers.extend(Server(name, reply, alone=alone) for name in names)
            sockets = [str(folder / name) for name in names]
            generator.aim(sockets, BODIES, ANSWERS, 1e-3)
            return generator

        yield aim
    for server in servers:
        server.close()


def test_every_arrival_is_answered_and_none_is_late_by_design(aimed: Callable[..., LoadGenerator]) -> None:
    """Broken: requests are lost, right answers count as wrong, or arrivals come at another rate than was asked for."""
    found = aimed(right, 2).arrive(rate=200, count=300, seed=1, drain_s=20)
    assert (found["right"], found["wrong"], found["errors"], found["unanswered"]) == (300, 0, 0, 0)
    assert 1.0 < found["seconds"] < 30  # 300 arrivals at 200/s take 1.5 s, on a busy machine longer
    assert all(value > 0 for value in found["latencies_s"])
    assert not found["overloaded"]


def test_what_is_wrong_or_refused_is_missed(aimed: Callable[..., LoadGenerator]) -> None:
    """Broken: a fast server that answers nonsense, refuses, or hangs up holds the limit."""

    def reply(number: int, given: int) -> tuple[int, Any]:
        if number % 10 == 1:
            return 200, {"predictions": [9.0, 9.0]}
        if number % 10 == 2:
            return 503, {}
        if number % 10 == 3:
            return 200, {"predictions": [value * (1 + 1e-5) for value in ANSWERS[given]["predictions"]]}
        return right(number, given)

    found = aimed(reply).arrive(rate=400, count=200, seed=1, drain_s=20)
    assert (found["wrong"], found["errors"], found["right"]) == (20, 20, 160)
    assert sum(value is None for value in found["latencies_s"]) == 40


def test_a_connection_that_ends_is_asked_once_more(aimed: Callable[..., LoadGenerator]) -> None:
    """Broken: a server that closes idle connections looks as if it failed; or one that never answers is asked for
    ever."""
    once = aimed(lambda number, given: (0, None) if number == 5 else right(number, given))
    assert once.arrive(rate=300, count=50, seed=1, drain_s=20)["right"] == 50
    never = aimed(lambda *_: (0, None)).arrive(rate=300, count=20, seed=1, drain_s=20)
    assert (never["right"], never["errors"]) == (0, 20)


def test_a_server_that_stops_delays_all_that_arrive_meanwhile(aimed: Callable[..., LoadGenerator]) -> None:
    """Broken: coordinated omission: while the server stops nothing is sent, so that one slow request stands for all
    that should have arrived, and the p99 is that of the good times."""

    def reply(number: int, given: int) -> tuple[int, Any]:
        if number == 50:
            time.sleep(1.0)
        return right(number, given)

    found = aimed(reply, alone=True).arrive(rate=60, count=150, seed=2, drain_s=20)
    assert found["right"] == 150
    # About 60 requests arrive in that second, and wait half of it on average.
    assert sum(value > 0.2 for value in found["latencies_s"]) >= 30
    assert max(found["latencies_s"]) >= 0.95


def test_a_rate_that_can_not_be_carried_is_overload(aimed: Callable[..., LoadGenerator]) -> None:
    """Broken: a growing queue is not seen, or the trial goes on for as long as the queue."""

    def slow(number: int, given: int) -> tuple[int, Any]:
        time.sleep(0.02)
        return right(number, given)

    found = aimed(slow, alone=True).arrive(rate=1000, count=5000, seed=1, drain_s=1)
    assert found["overloaded"]
    assert len(found["latencies_s"]) < 1000
    assert found["unanswered"] > 0


def test_clients_that_wait_have_one_request_each_on_its_way(aimed: Callable[..., LoadGenerator]) -> None:
    """Broken: a closed loop sends more than its clients, so that its throughput is that of another load."""
    lock, now, most = threading.Lock(), [0], [0]

    def reply(number: int, given: int) -> tuple[int, Any]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return right(number, given)

    found = aimed(reply, 2).loop(clients=4, seconds=0.5, drain_s=20)
    assert most[0] == 4
    assert found["wrong"] == found["errors"] == found["unanswered"] == 0
    assert 0 < found["right"] / found["seconds"] <= 4 / 0.01


def test_no_servers_are_an_error_in_words(tmp_path: Path) -> None:
    """Broken: a worker on another machine ends in a traceback, or requests go to whatever file has that name."""
    (tmp_path / "file").touch()
    with LoadGenerator() as generator:
        for path in (tmp_path / "none", tmp_path / "file"):
            with pytest.raises(UsageError, match="their worker runs elsewhere"):
                generator.aim([str(path)], BODIES, ANSWERS, 0.0)


def test_answers_are_alike_within_the_tolerance_and_of_one_kind() -> None:
    """Broken: labels are compared as roughly as numbers, or a missing value is as good as one."""
    assert alike({"p": [1.0005, 2]}, {"p": [1.0, 2]}, 1e-3)
    assert not alike({"p": [1.1, 2]}, {"p": [1.0, 2]}, 1e-3)
    assert not alike({"p": [1.0, 3]}, {"p": [1.0, 2]}, 10)
    assert not alike({"p": [1.0]}, {"p": [1.0, 2]}, 1)
    assert not alike({"p": [None]}, {"p": [1.0]}, 1)
    assert not alike({"p": ["a"]}, {"p": ["b"]}, 1)
    assert not alike({"p": [True]}, {"p": [1.0]}, 1)
    assert alike({"p": [float("nan")]}, {"p": [float("nan")]}, 0)
