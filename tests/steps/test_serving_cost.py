"""What serving costs, beside what the alias points to now."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import artifact, run_context, target

from compile_stage.core import plugins
from compile_stage.core.errors import WorkerError
from compile_stage.core.records import Budget, LoadPoint, SampleSet, Serving, ServingCost
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
