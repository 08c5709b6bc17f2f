"""What serving costs, beside what the alias points to now."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import artifact, run_context, target

from compile_stage.core import plugins
from compile_stage.core.errors import WorkerError
from compile_stage.core.records import Budget, Gate, LoadPoint, Outcome, SampleSet, Serving, ServingCost
from compile_stage.measure import served_load
from compile_stage.steps import serving_cost
from compile_stage.steps.serving_cost import PRODUCTION, WINNER, ServedModel, ServingRequest


class Generator:
    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Servers:
    """Hold 400 requests a second."""

    def __init__(self, name: str) -> None:
        self.name = name

    def closed(self, clients: int, _: float) -> LoadPoint:
        return self._point("closed", 500.0, clients=clients)

    def predict(self, _: Any, clients: int, seconds: float) -> LoadPoint:
        return self.closed(clients, seconds)

    def open(self, rate: float, requests: int, _: int) -> LoadPoint:
        return self._point("open", rate, requests=requests)

    def each_of(self, rate: float, requests: int, seed: int) -> tuple[LoadPoint, list[float | None]]:
        return self.open(rate, requests, seed), [0.003] * requests

    def _point(self, kind: Any, rate: float, clients: int = 0, requests: int = 500) -> LoadPoint:
        holds = kind == "closed" or rate < 400
        return LoadPoint(
            kind=kind, rate=rate, clients=clients, requests=requests, seconds=1.0, throughput_per_s=rate, wrong=0,
            errors=0, unanswered=0, over_limit=0 if holds else requests, judged_s=0.05, p50_s=0.001, p95_s=0.002,
            p99_s=0.003 if holds else 0.2, late_p99_s=0.0, overloaded=not holds,
        )  # fmt: skip


def request_of(*models: str) -> ServingRequest:
    return ServingRequest(
        models={name: ServedModel(path="", artifact=artifact()) for name in models},
        target=target(threads=1),
        serving=Serving(p99_ms=50, instances=(1,), threads=(1,), seconds=60),
        samples=SampleSet(path="", digest="", count=8, real=True, source="input_example"),
        budget=Budget(),
        seed=0,
    )


@pytest.mark.parametrize("at", ["prepared", "started"])
def test_a_production_version_that_crashes_says_nothing_of_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Broken: an old version that crashes keeps every new one from replacing it; or a measurement without it is kept,
    and taken for one beside it."""
    context = run_context(tmp_path, SimpleNamespace(exclusive=nullcontext))
    measuring = serving_cost._Measuring(context, request_of(WINNER, PRODUCTION))
    crash = WorkerError("crash", "production's server ended with exit code 1")

    def prepare(name: str) -> None:
        measuring.bodies[name], measuring.points[name], measuring.estimates[name] = ["{}"], [], []
        if name == PRODUCTION and at == "prepared":
            raise crash

    def start(_: Any, __: Any, name: str, *given: Any) -> Servers:
        if name == PRODUCTION:
            raise crash
        return Servers(name)

    monkeypatch.setattr(serving_cost, "LoadGenerator", Generator)
    monkeypatch.setattr(measuring, "_prepare", prepare)
    monkeypatch.setattr(measuring, "_start", start)
    monkeypatch.setattr(measuring, "_energy", lambda *_: (None, "none"))
    found = measuring.measure()
    assert found.reason == ""
    assert found.winner is not None
    assert found.winner.throughput_per_s == pytest.approx(400, rel=0.1)
    assert found.production is None
    assert measuring.production_failed, "so it is measured again by the next run"
    assert any("exit code 1" in note for note in found.notes)


@pytest.mark.parametrize("package", ["uvloop", "httptools"])
def test_a_package_that_makes_the_server_faster_is_part_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Broken: a run reports the throughput and the cost of a server that is no longer the one that answers."""
    asked: list[object] = []

    def measure(measuring: object) -> ServingCost:
        asked.append(measuring)
        return ServingCost()

    monkeypatch.setattr(serving_cost._Measuring, "measure", measure)
    context, request = run_context(tmp_path), request_of(WINNER)
    for installed in ({}, {}, {package: "1.0"}):
        monkeypatch.setattr(
            plugins,
            "package_versions",
            lambda *names, installed=installed: {name: installed[name] for name in names if name in installed},
        )
        serving_cost.measure_serving(context, request)
    assert len(asked) == 2, "once without the package, and once with it"


class Pausing(Servers):
    """Answer all in 1 ms, but for 0.2 s in 4 s, in which nothing is answered. Requests arrive one after the other."""

    def __init__(self, name: str, clock: SimpleNamespace) -> None:
        super().__init__(name)
        self._clock = clock

    def each_of(self, rate: float, requests: int, _: int) -> tuple[LoadPoint, list[float | None]]:
        into = [(self._clock.now + number / rate) % 4 for number in range(requests)]
        latencies: list[float | None] = [0.001 + (4 - at) * (at >= 3.8) for at in into]
        self._clock.now += requests / rate
        found = {"latencies_s": latencies, "late_s": [], "wrong": 0, "errors": 0, "unanswered": 0, "overloaded": False}
        point = served_load.point_of("open", {**found, "seconds": 1.0, "right": requests}, 0.05, rate=rate)
        return replace(point, overloaded=rate > 400), latencies

    def open(self, rate: float, requests: int, seed: int) -> LoadPoint:
        return self.each_of(rate, requests, seed)[0]


@pytest.mark.parametrize(("pauses", "holds"), [(True, False), (False, True)])
def test_a_rate_that_held_by_luck_is_not_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: bool, holds: bool
) -> None:
    """Broken: a search takes what held in a trial that no pause met, and 4 % of the requests wait for longer than the
    limit at a rate that passed; or what holds its limit at all times is not believed."""
    context, clock = run_context(tmp_path, SimpleNamespace(exclusive=nullcontext)), SimpleNamespace(now=0.0)
    measuring = serving_cost._Measuring(context, replace(request_of(WINNER), asked_per_s=200.0))
    measuring.bodies[WINNER], measuring.points[WINNER], measuring.estimates[WINNER] = ["{}"], [], []
    monkeypatch.setattr(serving_cost, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(serving_cost, "LoadGenerator", Generator)
    monkeypatch.setattr(measuring, "_prepare", lambda _: None)
    monkeypatch.setattr(measuring, "_energy", lambda *_: (None, "none"))
    monkeypatch.setattr(measuring, "_start", lambda *_: Pausing(WINNER, clock) if pauses else Servers(WINNER))
    found = measuring.measure()
    assert found.winner is not None
    assert found.winner.interval is not None
    assert min(found.winner.starts_per_s) > 200, "each search found more"
    (check,) = served_load.judge_served(
        [Gate(metric="throughput_at_p99", limit=200, direction="at_least", unit="requests/s", confidence=0.95)], found
    )
    assert (check.outcome is Outcome.PASS) is holds, check.reason
    assert found.winner.interval[0] == (200 if holds else 0)
    assert ("further requests have a p99 of" in check.reason) is not holds
