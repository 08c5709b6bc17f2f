"""Winner → what serving it costs: requests to MLflow's own server under load, and to what the alias points to now.

The servers run in a worker, the load generator in a process outside of it; both share the machine's cores, alone on it.
Each start of the servers gives one figure of the throughput, and the interval is over starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.environment import available_cores
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.generation import call_signature
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.quantities import quantity
from compile_stage.core.records import (
    Artifact,
    Budget,
    Layout,
    LoadPoint,
    Predictions,
    SampleSet,
    ServedLoad,
    Serving,
    ServingCost,
    Target,
    record,
)
from compile_stage.measure import served_load
from compile_stage.measure.energy import EnergyMeter
from compile_stage.measure.generator_process import LoadGenerator
from compile_stage.measure.served_tolerance import served_tolerance
from compile_stage.measure.servers import Servers
from compile_stage.measure.stats import samples_needed

WINNER, PRODUCTION = "the winner", "production"

_BODIES = 16
_STARTS = 3
_SHARES = {"layouts": 0.1, "closed": 0.2, "rates": 0.2}  # of the time; the search has the rest
_MOST_REQUESTS = 20_000  # of one trial: the arrivals and latencies of all are kept
_TRIALS = 5  # of a search, for which there should be time
_SHORTEST_S = 0.2  # of a closed loop
_NEEDED = samples_needed(served_load.LEVEL)
_SERVER_PACKAGES = ("mlflow", "uvicorn", "fastapi", "starlette", "h11", "httptools", "uvloop", "numpy", "pandas")
"""What answers, beside the model's runtime: uvicorn takes httptools and uvloop, which are faster, where they are
installed."""


@record
class ServedModel:
    """A published model, or one that will be: its directory, and what it was proven with."""

    path: str
    artifact: Artifact


@record
class ServingRequest:
    """What is measured.

    Attributes:
        models: By `WINNER` and, where there is one to compare with, `PRODUCTION`.
        samples: The validation samples.
        predictions: What the original answers to texts; None where predict() takes no text.
        asked_per_s: Requests a second that the policy's gates ask for; None without one.
    """

    models: Mapping[str, ServedModel]
    target: Target
    serving: Serving
    samples: SampleSet
    budget: Budget
    seed: int
    predictions: Predictions | None = None
    asked_per_s: float | None = None


def measure_serving(context: Context, request: ServingRequest) -> ServingCost:
    """What serving costs, from the cache or measured. What can't be measured has a reason, and is not kept."""
    serving, target = request.serving, request.target
    winner = request.models[WINNER].artifact
    key = {
        "models": {name: _identity(model) for name, model in request.models.items()},
        "samples": request.samples.digest,
        "predictions": request.predictions,
        # What it costs is computed of what was measured.
        "serving": replace(serving, price_per_hour=None, currency=""),
        "rows": serving.rows or target.batch_sizes[0],
        "asked_per_s": request.asked_per_s,
        "threads": target.threads,
        "device": target.device,
        "cores": available_cores(),
        "seed": request.seed,
        "packages": plugins.package_versions(*_SERVER_PACKAGES),
        "runtime": plugins.cache_identity("backends", winner.backend),
        "hardware": context.hardware,
    }
    measuring = _Measuring(context, request)

    def make(_: Any) -> ServingCost:
        found = measuring.measure()
        if found.reason or not _is_whole(found) or measuring.production_failed:
            raise _PartialError(found)
        return found

    try:
        made = context.cached("serving-cost/2", target.name, key, make, anew=context.remeasure)
        found: ServingCost = revive(ServingCost, made.value)
    except _PartialError as partial:
        found = partial.found
    return served_load.with_cost(replace(found, price_per_hour=serving.price_per_hour, currency=serving.currency))


def _identity(model: ServedModel) -> dict[str, Any]:
    artifact = model.artifact
    return {"digest": artifact.digest, "options": artifact.options, "toolchain": artifact.toolchain}


def _is_whole(found: ServingCost) -> bool:
    """What a disturbed machine left open is measured again by the next run."""
    return all(load is None or not load.reason for load in (found.winner, found.production))


class _PartialError(Exception):
    def __init__(self, found: ServingCost) -> None:
        super().__init__("serving was not measured to the end")
        self.found = found


@dataclass
class _Measuring:
    """One measurement.

    Attributes:
        bodies: By model, what is asked in turn.
        expected: By model, what is answered to these one at a time.
        points: By model, the trials so far.
        estimates: By model, the rate that each start of its servers held.
        held_per_s: The rate of the winner's long trials; 0 before the first.
        held: Their points, with the latencies of their requests.
        reasons: By model, why it has none.
        notes: What a reader should know.
        production_failed: What the alias points to now could not be served to the end.
        numbers: Of the trials, so that each has arrivals of its own.
    """

    context: Context
    request: ServingRequest
    bodies: dict[str, list[str]] = field(default_factory=dict)
    expected: dict[str, list[Any]] = field(default_factory=dict)
    points: dict[str, list[LoadPoint]] = field(default_factory=dict)
    estimates: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    production_failed: bool = False
    numbers: int = 0
    held_per_s: float = 0.0
    held: list[tuple[LoadPoint, Sequence[float | None]]] = field(default_factory=list)

    def measure(self) -> ServingCost:
        """All of it, alone on the machine."""
        serving, target = self.request.serving, self.request.target
        limit_s = serving.p99_ms / 1e3 if serving.p99_ms is not None else None
        found = ServingCost(
            server=_server(self.request.models[WINNER].artifact),
            limit_s=limit_s,
            rows=serving.rows or target.batch_sizes[0],
            cores=available_cores(),
        )
        try:
            with ExitStack() as stack, self.context.alone():
                self._prepare_all()
                generator = stack.enter_context(LoadGenerator())
                tried = self._choose(generator, limit_s)
                taken = next(layout for layout in tried if not layout.reason)
                self._points_of_winner(generator, taken, limit_s)
                if self.estimates[WINNER] and limit_s is not None:
                    self._search(generator, taken, limit_s)
                joules, energy = self._energy(generator, taken, limit_s)
        except (CompileStageError, WorkerError) as error:
            return replace(found, reason=error.problem)
        loads = {name: self._load(name, taken) for name in self.bodies}
        loads[WINNER] = replace(loads[WINNER], joules=joules, energy=energy)
        ratio, ratio_interval = self._ratio()
        return replace(
            found,
            layouts=tried,
            winner=loads[WINNER],
            production=loads.get(PRODUCTION),
            ratio=ratio,
            ratio_interval=ratio_interval,
            notes=self._notes(),
        )

    # ------------------------------------------------------------------------------------------------ before the load

    def _prepare_all(self) -> None:
        self._prepare(WINNER)
        if PRODUCTION in self.request.models:
            try:
                self._prepare(PRODUCTION)
            except CompileStageError as error:
                self._leave_out_production(error)

    def _leave_out_production(self, error: CompileStageError) -> None:
        """Trouble with what the alias points to now says nothing of the winner, which is measured without it."""
        for known in (self.bodies, self.expected, self.points, self.estimates):
            known.pop(PRODUCTION, None)
        self.production_failed = True
        self.notes.append(f"what the alias points to now was not served beside it: {error.problem}")

    def _prepare(self, name: str) -> None:
        """What a model is asked and must answer."""
        request, model = self.request, self.request.models[name]
        limits = WorkerLimits.within(request.budget, request.target.threads)
        self._progress(f"asking {name} one request at a time")
        with self.context.worker(f"requests {request.target.name}", limits) as worker:
            self.bodies[name] = worker.call(
                "make_requests",
                model={"path": model.path},
                samples=request.samples,
                signature=call_signature(model.artifact),
                predictions=request.predictions,
                rows=request.serving.rows or request.target.batch_sizes[0],
                count=_BODIES,
            )
        limits = replace(limits, interpreter=plugins.interpreter_of(model.artifact.backend))
        with self.context.worker(f"answers {request.target.name}", limits) as worker:
            self.expected[name] = worker.call("answer_requests", model={"path": model.path}, bodies=self.bodies[name])
        self.points[name], self.estimates[name] = [], []

    def _start(
        self, stack: ExitStack, generator: LoadGenerator, name: str, layout: Layout, limit_s: float | None
    ) -> Servers:
        """Servers in new processes, asked until their answers come as fast as they will."""
        model, target = self.request.models[name], self.request.target
        backend = model.artifact.backend
        limits = WorkerLimits.within(self.request.budget, layout.threads, plugins.interpreter_of(backend))
        worker = stack.enter_context(self.context.worker(f"servers {target.name}", limits))
        self._progress(f"starting {layout.instances} of {name}, {layout.threads} threads each")
        up = worker.call(
            "start_servers", model={"path": model.path}, instances=layout.instances, threads=layout.threads
        )
        tolerance = served_tolerance(model.artifact.precision)
        generator.aim(up["sockets"], self.bodies[name], self.expected[name], tolerance)
        servers = Servers(name, worker, generator, limit_s)
        for _ in range(2):  # the first seconds of a server are slower: lazily imported modules, caches
            servers.closed(2 * layout.instances, _SHORTEST_S)
        return servers

    def _seconds(self, part: str) -> float:
        return self.request.serving.seconds * _SHARES[part]

    # ---------------------------------------------------------------------------------------------------- the layout

    def _choose(self, generator: LoadGenerator, limit_s: float | None) -> tuple[Layout, ...]:
        """The layouts that were tried, all but the best with the reason: by successive halving, each round with twice
        the time for half of them."""
        left = list(served_load.layouts(self.request.serving, self.request.target.threads, available_cores()))
        if len(left) == 1:
            return tuple(left)
        share_s = self._seconds("layouts") / (len(left) - 1).bit_length()
        out: list[Layout] = []
        clients = self.request.serving.clients or [1]
        while len(left) > 1:
            scored = []
            for layout in left:
                with ExitStack() as stack:
                    servers = self._start(stack, generator, WINNER, layout, limit_s)
                    each_s = max(_SHORTEST_S, share_s / len(left) / len(clients))
                    points = [servers.closed(number, each_s) for number in clients]
                scored.append(replace(layout, throughput_per_s=served_load.best_of(points, limit_s)))
            scored.sort(key=lambda one: -(one.throughput_per_s or 0.0))
            kept = len(scored) // 2 if len(scored) > 1 else 1
            best = scored[0].throughput_per_s or 0.0
            out = [
                *(
                    replace(one, reason=f"{one.throughput_per_s or 0:.4g} requests/s, the best {best:.4g}")
                    for one in scored[kept:]
                ),
                *out,
            ]
            left = scored[:kept]
        return (*left, *out)

    # ---------------------------------------------------------------------------------------------------- the points

    def _points_of_winner(self, generator: LoadGenerator, layout: Layout, limit_s: float | None) -> None:
        """predict() alone, closed loops, the rates that the policy names, and the first search."""
        serving = self.request.serving
        with ExitStack() as stack:
            servers = self._start(stack, generator, WINNER, layout, limit_s)
            each_s = max(_SHORTEST_S, self._seconds("closed") / max(1, 2 * len(serving.clients)))
            for clients in serving.clients:
                self._progress(f"{clients} clients")
                self._add(WINNER, servers.closed(clients, each_s))
            capacity = max((point.throughput_per_s for point in self.points[WINNER]), default=0.0)
            for clients in serving.clients:
                self._add(WINNER, servers.predict(self.bodies[WINNER], clients, each_s))
            for rate in serving.rates:
                self._progress(f"{rate:g} requests/s")
                trial_s = self._seconds("rates") / len(serving.rates)
                self._add(WINNER, servers.open(rate, self._count(rate, trial_s), self._seed()))
            if limit_s is not None:
                capacity = capacity or servers.closed(2 * layout.instances, each_s).throughput_per_s
                reason = self._refuse_search(capacity)
                if reason:
                    self.reasons[WINNER] = reason
                else:
                    self._find(servers, 0.7 * capacity)

    def _count(self, rate: float, seconds: float) -> int:
        return min(_MOST_REQUESTS, max(_NEEDED, round(rate * seconds)))

    # ---------------------------------------------------------------------------------------------------- the search

    def _search(self, generator: LoadGenerator, layout: Layout, limit_s: float) -> None:
        """A search in each further start of the servers of each model; who begins alternates."""
        names = list(self.bodies)
        turns = [name for start in range(_STARTS) for name in (names if start % 2 == 0 else names[::-1])]
        for name in turns[1:]:
            if name not in self.bodies:
                continue
            try:
                with ExitStack() as stack:
                    servers = self._start(stack, generator, name, layout, limit_s)
                    known = self.estimates[name] or self.estimates[WINNER]
                    self._find(servers, known[-1] or 1.0)
            except CompileStageError as error:
                if name != PRODUCTION:
                    raise
                self._leave_out_production(error)

    def _refuse_search(self, capacity: float) -> str:
        """Why there is no use in looking for a rate; empty where there is."""
        if capacity <= 0:
            return "no request was answered rightly without a limit on the load"
        needed_s, each_s = _TRIALS * _NEEDED / (0.7 * capacity), self._search_s()
        if needed_s <= 2 * each_s:
            return ""
        whole = self.request.serving.seconds * needed_s / each_s
        return (
            f"a p99 takes {_NEEDED} requests at least, and at {quantity(capacity)} requests/s there is no time for "
            f"{_TRIALS} such trials; set serving.seconds to {whole:.0f}"
        )

    def _search_s(self) -> float:
        """For one search; a long trial of the winner takes as long."""
        serving = self.request.serving
        spent = _SHARES["closed"] + (_SHARES["rates"] if serving.rates else 0.0)
        layouts = served_load.layouts(serving, self.request.target.threads, available_cores())
        left = 1 - spent - (_SHARES["layouts"] if len(layouts) > 1 else 0.0)
        return serving.seconds * left / (_STARTS * (len(self.bodies) + 1))

    def _find(self, servers: Servers, first: float) -> None:
        """One start's figure, and of the winner the requests that show whether a rate holds."""
        seconds = self._search_s()
        ends, problems = time.monotonic() + seconds, []

        def measure(rate: float) -> bool | None:
            self._progress(f"{servers.name}: {rate:.4g} requests/s")
            point = servers.open(rate, self._count(rate, seconds / _TRIALS), self._seed())
            self._add(servers.name, point)
            problems.extend([point.invalid] if point.invalid else [])
            return None if point.invalid else served_load.holds(point)

        rate = served_load.find_rate(measure, first, lambda: time.monotonic() < ends)
        if rate is not None:
            self.estimates[servers.name].append(rate)
            if servers.name == WINNER:
                self._hold(servers, rate, seconds)
        elif problems:
            self.reasons[servers.name] = problems[-1]
        else:
            self.reasons[servers.name] = "no rate that holds was found in the time; raise serving.seconds"

    def _hold(self, servers: Servers, found: float, seconds: float) -> None:
        """A search takes whatever held by luck, and never asks again: what a policy relies on comes from trials whose
        rate was set before them, the same in all starts."""
        asked, whole_s = self.request.asked_per_s, _STARTS * seconds
        self.held_per_s = self.held_per_s or served_load.rate_to_hold(found, asked, whole_s)
        if self.held_per_s:
            self._progress(f"{servers.name}: {self.held_per_s:.4g} requests/s for {seconds:.3g} s")
            trial = servers.each_of(self.held_per_s, self._count(self.held_per_s, seconds), self._seed())
            self._add(servers.name, trial[0])
            self.held.append(trial)

    def _energy(self, generator: LoadGenerator, layout: Layout, limit_s: float | None) -> tuple[float | None, str]:
        """Joules of a request at the rate that holds, and what they were read from."""
        meter = EnergyMeter(self.request.target.device)
        rate, _ = served_load.over_starts(self.estimates[WINNER])
        before = meter.read()
        if before is None or not rate:
            return None, meter.source if before is None else "not measured: no rate holds the limit"
        with ExitStack() as stack:
            servers = self._start(stack, generator, WINNER, layout, limit_s)
            before = meter.read()
            point = servers.open(rate, self._count(rate, self.request.serving.seconds / 10), self._seed())
            joules = meter.between(before, meter.read())
        self._add(WINNER, point)
        return (joules / point.requests if joules is not None and point.requests else None), meter.source

    # ---------------------------------------------------------------------------------------------------- the result

    def _load(self, name: str, layout: Layout) -> ServedLoad:
        points, estimates = self.points[name], self.estimates[name]
        value, interval = served_load.over_starts(estimates)
        reason = "" if value is not None and interval is not None else self.reasons.get(name, "")
        p99_s, missing = self._shown() if name == WINNER and self.held_per_s else (None, "")
        if name == WINNER and value is not None and interval is not None:
            low = 0.0 if missing else self.held_per_s
            interval = (min(low, value), max(interval[1], low))
        decided = [*estimates, self.held_per_s]
        near = [p for p in points if p.kind == "open" and not p.invalid and p.rate in decided]
        return ServedLoad(
            layout=layout,
            points=tuple(points),
            throughput_per_s=value,
            interval=interval,
            starts_per_s=tuple(estimates),
            held_per_s=self.held_per_s or None if name == WINNER else None,
            held_p99_s=p99_s,
            held=missing,
            requests=sum(point.requests for point in near),
            reason=reason,
        )

    def _shown(self) -> tuple[float | None, str]:
        """The bound of the long trials' p99, and what they do not show; empty where they show that the limit is
        held."""
        points, rate = [point for point, _ in self.held], self.held_per_s
        limit_s = min(point.judged_s or math.inf for point in points)
        p99 = served_load.p99_of([latencies for _, latencies in self.held], rate)
        trials = f"at {quantity(rate)} requests/s {sum(point.requests for point in points):,} further requests"
        more = "raise serving.seconds, or measure on a quieter machine"
        if invalid := [point.invalid for point in points if point.invalid]:
            return None, f"{trials} tell nothing: {invalid[0]}"
        if any(point.overloaded for point in points):
            return None, f"{trials} were more than the servers could answer"
        if p99 is None:
            missed = f"{sum(point.missed for point in points):,} of them missed the limit"
            return None, f"{trials} are too few for a p99 (those that wait together count less), {missed}; {more}"
        if p99.high <= limit_s:
            return p99.high, ""
        limit = f"the limit is {limit_s * 1e3:.3g} ms"
        if limit_s * 1e3 < (self.request.serving.p99_ms or 0.0):
            limit = f"so few show no more than {limit_s * 1e3:.3g} ms"
        if p99.value > limit_s:
            found = (
                f"a p99 of {p99.value * 1e3:.3g} ms" if p99.value < math.inf else "no p99: too many were not answered"
            )
            return _finite(p99.high), f"{trials} have {found}; {limit}"
        bound = f"{p99.high * 1e3:.3g} ms" if p99.high < math.inf else "among those without a right answer"
        bounds = f"a p99 of {p99.value * 1e3:.3g} ms, and its 95 % bound is {bound}"
        return _finite(p99.high), f"{trials} have {bounds}; {limit}; {more}"

    def _ratio(self) -> tuple[float | None, tuple[float, float] | None]:
        ours, theirs = self.estimates[WINNER], self.estimates.get(PRODUCTION, [])
        if len(ours) != len(theirs) or not ours or min(*ours, *theirs) <= 0:
            return None, None
        return served_load.over_starts([one / other for one, other in zip(ours, theirs, strict=True)])

    def _notes(self) -> tuple[str, ...]:
        points = [point for points in self.points.values() for point in points]
        used = [point.generator_cores for point in points if point.generator_cores is not None]
        cores = available_cores()
        most = f"the load generator used at most {max(used):.2f} of the {cores} cores" if used else ""
        shared = f"{most}, which a server alone on the machine would have too" if most else ""
        invalid = sum(bool(point.invalid) for point in points)
        late = f"{invalid} of {len(points)} trials tell nothing, since the load generator was late" if invalid else ""
        return tuple(filter(None, (shared, late, self._short(), *self.notes)))

    def _short(self) -> str:
        """Where trials were too short for the limit."""
        decided = [p for name, points in self.points.items() for p in points if p.rate in self.estimates[name]]
        limit_s = (self.request.serving.p99_ms or 0.0) / 1e3
        judged = [point for point in decided if point.judged_s is not None and point.judged_s < limit_s]
        if not judged:
            return ""
        point = min(judged, key=lambda one: one.judged_s or 0.0)
        wanted = math.ceil(4 * (limit_s * (point.rate or 0.0)) ** 2)
        return (
            f"trials of {point.requests:,} requests at {point.rate:.4g} requests/s show a p99 of "
            f"{(point.judged_s or 0.0) * 1e3:.3g} ms, which was asked for in place of {limit_s * 1e3:g} ms: the "
            f"throughput is at least what is said. {wanted:,} requests show the limit itself: raise serving.seconds"
        )

    def _add(self, name: str, point: LoadPoint) -> None:
        self.points[name].append(point)

    def _seed(self) -> int:
        self.numbers += 1
        return self.request.seed * 1000 + self.numbers

    def _progress(self, message: str) -> None:
        self.context.events.progress("serving-cost", self.request.target.name, message)


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _server(artifact: Artifact) -> str:
    versions = plugins.package_versions("mlflow", "uvicorn")
    runtime = plugins.load("backends", artifact.backend).capabilities.runtime
    versions |= {name: artifact.toolchain[name] for name in runtime if name in artifact.toolchain}
    return "mlflow models serve: " + ", ".join(f"{name} {version}" for name, version in versions.items())
