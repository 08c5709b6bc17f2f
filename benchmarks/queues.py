"""Queues in place of servers: what the stage's measurement under load finds of one whose throughput is known."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from compile_stage.core.records import Budget, Layout, LoadPoint, SampleSet, ServedLoad, Serving, Target
from compile_stage.measure import served_load
from compile_stage.steps import serving_cost
from compile_stage.steps.serving_cost import WINNER, ServingRequest

_APART_S = 0.1  # between two trials


class Queue:
    """One server, first come first served, that stops now and then.

    Args:
        kind: Of the time that a request takes: `exponential`, `constant` or `lognormal` (standard deviation of its
            logarithm: 1).
        served: Requests a second that it can answer, but for its pauses.
        pause_s: Length of a pause, in which nothing is answered.
        every_s: Mean time between two, which begin by chance.
    """

    def __init__(
        self, kind: str, served: float, generator: np.random.Generator, *, pause_s: float = 0.0, every_s: float = 0.0
    ) -> None:
        self.kind, self.served, self.pause_s, self.every_s = kind, served, pause_s, every_s
        self.generator, self.now_s = generator, 0.0
        self._begins: list[float] = [float(generator.exponential(every_s))] if every_s else []

    def latencies(self, rate: float, count: int) -> np.ndarray:
        """`[count]`: seconds from each request's arrival to its answer; they arrive as a Poisson process."""
        arrive = self.now_s + np.cumsum(self.generator.exponential(1 / rate, count))
        takes = self._takes(count)
        begins = self._pauses(arrive[-1] + 10.0)
        stopped_s = np.arange(len(begins) + 1) * self.pause_s
        # On a clock that stands still in pauses: Lindley's recursion.
        before = np.searchsorted(begins, arrive, side="right")
        inside = (before > 0) & (arrive < np.append(begins, math.inf)[before - 1] + self.pause_s)
        working = np.where(
            inside, np.append(begins, 0.0)[before - 1] - stopped_s[before - 1], arrive - stopped_s[before]
        )
        done = np.cumsum(takes)
        ends = done + np.maximum.accumulate(working - np.concatenate([[0.0], done[:-1]]))
        ends += stopped_s[np.searchsorted(begins - stopped_s[:-1], ends, side="left")]
        self.now_s = float(max(arrive[-1], ends[-1])) + _APART_S
        found: np.ndarray = ends - arrive
        return found

    def _takes(self, count: int) -> np.ndarray:
        if self.kind == "exponential":
            return self.generator.exponential(1 / self.served, count)
        if self.kind == "constant":
            return np.full(count, 1 / self.served)
        return self.generator.lognormal(-0.5, 1.0, count) / self.served

    def _pauses(self, until_s: float) -> np.ndarray:
        """When those that are not over begin."""
        while self._begins and self._begins[-1] < until_s:
            self._begins.append(self._begins[-1] + self.pause_s + float(self.generator.exponential(self.every_s)))
        self._begins = [begin for begin in self._begins if begin + self.pause_s >= self.now_s]
        return np.array(self._begins)


def true_rate(queue: Queue, limit_s: float, count: int = 1_000_000) -> float:
    """The highest rate at which 99 % of the requests hold the limit."""
    low, high = 0.01 * queue.served, queue.served
    while high / low > 1.01:
        rate = math.sqrt(low * high)
        held = float(np.mean(queue.latencies(rate, count) <= limit_s)) >= served_load.LEVEL
        low, high = (rate, high) if held else (low, rate)
    return low


class _Servers:
    """As `measure.servers.Servers`."""

    def __init__(self, queue: Queue, limit_s: float) -> None:
        self.name, self._queue, self._limit_s = WINNER, queue, limit_s

    def closed(self, clients: int, _: float) -> LoadPoint:
        found = {"latencies_s": [], "late_s": [], "wrong": 0, "errors": 0, "unanswered": 0, "overloaded": False}
        found |= {"seconds": 1.0, "right": self._queue.served}
        return served_load.point_of("closed", found, self._limit_s, clients=clients)

    def predict(self, _: Any, clients: int, seconds: float) -> LoadPoint:
        return replace(self.closed(clients, seconds), kind="predict")

    def open(self, rate: float, count: int, seed: int) -> LoadPoint:
        return self.each_of(rate, count, seed)[0]

    def each_of(self, rate: float, count: int, _: int) -> tuple[LoadPoint, list[float | None]]:
        began_s, latencies = self._queue.now_s, self._queue.latencies(rate, count)
        waiting = int(np.sum(latencies[::-1] > np.arange(count) / rate))  # about, when the last one arrives
        found: dict[str, Any] = {
            "latencies_s": latencies.tolist(), "late_s": [], "wrong": 0, "errors": 0, "unanswered": 0,
            "overloaded": waiting > 3 * math.sqrt(2 * count), "right": count, "seconds": self._queue.now_s - began_s,
        }  # fmt: skip
        return served_load.point_of("open", found, self._limit_s, rate=rate), found["latencies_s"]


class _Measuring(serving_cost._Measuring):
    """The stage's own measurement, of queues."""

    def measured(self, make: Any, limit_s: float) -> ServedLoad:
        """Of three starts, each a queue that `make` gives."""
        layout, now = Layout(instances=1, threads=1), [Queue("constant", 1.0, np.random.default_rng(0))]
        self.bodies[WINNER], self.points[WINNER], self.estimates[WINNER] = ["{}"], [], []

        def start(*_: Any) -> _Servers:
            now[0] = make()
            return _Servers(now[0], limit_s)

        clock = SimpleNamespace(monotonic=lambda: now[0].now_s)
        patches: tuple[AbstractContextManager[Any], ...] = (
            patch.object(self, "_start", start), patch.object(serving_cost, "time", clock),
            patch.object(self, "_progress", lambda _: None),
        )  # fmt: skip
        with patches[0], patches[1], patches[2]:
            generator: Any = None
            self._points_of_winner(generator, layout, limit_s)
            if self.estimates[WINNER]:
                self._search(generator, layout, limit_s)
        return self._load(WINNER, layout)


def measure(make: Any, limit_s: float, asked_per_s: float | None, seconds: float = 60.0) -> ServedLoad:
    """What the stage finds of queues.

    Args:
        make: A new one, for each start.
        asked_per_s: By a gate.
        seconds: `serving.seconds`.
    """
    serving = Serving(p99_ms=1e3 * limit_s, instances=(1,), threads=(1,), clients=(1,), seconds=seconds)
    request = ServingRequest(
        models={}, target=Target(name="cpu", threads=1), serving=serving, budget=Budget(), seed=0,
        samples=SampleSet(path="", digest="", count=1, real=True, source=""), asked_per_s=asked_per_s,
    )  # fmt: skip
    context: Any = None
    return _Measuring(context, request).measured(make, limit_s)
