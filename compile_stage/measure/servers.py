"""Servers of a published model that are up in a worker, and trials of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compile_stage.core.errors import UsageError
from compile_stage.core.ports import Worker
from compile_stage.core.records import LoadPoint
from compile_stage.measure import served_load
from compile_stage.measure.generator_process import LoadGenerator

_DRAIN_S = 10.0  # for what is on its way when a trial ends


@dataclass
class Servers:
    """Servers of one model.

    Attributes:
        name: Of the model, for messages.
        worker: In which they run.
        generator: It is aimed at them.
        limit_s: That 99 % of the requests must hold; None without one.
    """

    name: str
    worker: Worker
    generator: LoadGenerator
    limit_s: float | None

    def closed(self, clients: int, seconds: float) -> LoadPoint:
        """Of clients that wait for their answers."""
        return self._metered("closed", lambda: self.generator.loop(clients, seconds, _DRAIN_S), clients=clients)[0]

    def open(self, rate: float, count: int, seed: int) -> LoadPoint:
        """Of so many requests that arrive at a rate."""
        return self.each_of(rate, count, seed)[0]

    def each_of(self, rate: float, count: int, seed: int) -> tuple[LoadPoint, Sequence[float | None]]:
        """As `open`, with the latency of each request in seconds, in the order of arrival; None of what had no right
        answer."""
        return self._metered("open", lambda: self.generator.arrive(rate, count, seed, _DRAIN_S), rate=rate)

    def predict(self, bodies: Sequence[str], clients: int, seconds: float) -> LoadPoint:
        """Of calls without a server; what they take is the process's own word."""
        found = self.worker.call("time_predicts", bodies=list(bodies), clients=clients, seconds=seconds)
        calls = found["latencies_s"]
        whole = {**found, "late_s": [], "wrong": 0, "errors": 0, "unanswered": 0, "overloaded": False}
        return served_load.point_of("predict", {**whole, "right": len(calls)}, self.limit_s, clients=clients)

    def _metered(
        self, kind: Any, ask: Callable[[], dict[str, Any]], **named: Any
    ) -> tuple[LoadPoint, Sequence[float | None]]:
        before = self.worker.metered("are_servers_up")
        found = ask()
        after = self.worker.metered("are_servers_up")
        if not after.value:
            raise UsageError(f"a server of {self.name} ended under load")
        point = served_load.point_of(kind, found, self.limit_s, **named)
        cpu_s = after.after.cpu_s - before.after.cpu_s
        point = replace(point, server_cpu_s=cpu_s / point.requests if point.requests else None)
        return point, found["latencies_s"]
