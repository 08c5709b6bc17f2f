"""An engine without processes: its workers do at once what a scenario says, so that `pipeline/` is driven through whole
runs in milliseconds.

Steps, cache, verdicts, statistics and selection are the real ones; only what happens inside a worker is made up.
Outputs are real arrays on disk: the original's, plus as much error as the scenario gives a scheme.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier
from typing import Any
from uuid import uuid4

import numpy as np
from factories import SIGNATURE

from compile_stage.core.digest import digest_of, plain
from compile_stage.core.ports import MeteredCall, Worker, WorkerLimits, WorkerMemory, WorkerUsage
from compile_stage.core.records import Artifact, Job, PortableModel, SampleSet, Scheme, Sensitivity
from compile_stage.core.sample_files import LABELS, digest_of_samples, write_index
from compile_stage.measure.timed_inputs import checked_batch
from compile_stage.serving.manifest import artifact_of, data_folder, read_manifest

SAMPLES = 64


def mean_off(own: np.ndarray[Any, Any], base: np.ndarray[Any, Any], _: object) -> np.ndarray[Any, Any]:
    """A metric of a policy's own, with one number for each sample."""
    return np.asarray(np.abs(own - base).mean(axis=1))


@dataclass
class Scenario:
    """What happens in workers.

    Attributes:
        errors: Scheme name → noise over signal of its outputs; a scheme that is not named is exact.
        latency_s: Scheme name → seconds of a call; `original` for the baseline.
        raises: (function, scheme name or "") → the exception that the call ends with.
        effects: Node → how much of a scheme's error goes away when it stays in higher precision.
        factor: Of every latency of a candidate, by its backend's options.
        calls: (function, scheme name) → how often it was called.
        sharing: Names of the workers that were said to share the cores with others.
        meeting: Where given, these wait for each other: a busy machine would give the second job the first's worker.
        key: Its own, for a cache that no other scenario uses.
    """

    errors: dict[str, float] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)
    raises: dict[tuple[str, str], BaseException] = field(default_factory=dict)
    effects: dict[str, float] = field(default_factory=dict)
    factor: Callable[[Mapping[str, Any]], float] = lambda options: 1.0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sharing: set[str] = field(default_factory=set)
    meeting: Barrier | None = None
    key: str = field(default_factory=lambda: uuid4().hex)


class FakeEngine:
    """`compile_stage.engines`, without processes."""

    name = "fake"
    requires = ()
    extra = ""

    def __init__(self, scenario: Scenario, lanes: int = 2) -> None:
        self.scenario, self._lanes, self.closed = scenario, lanes, False

    @contextmanager
    def worker(self, name: str, limits: WorkerLimits) -> Iterator[Worker]:
        if limits.shares_cores:
            self.scenario.sharing.add(name)
            if self.scenario.meeting is not None:
                self.scenario.meeting.wait(timeout=60)
        yield FakeWorker(self.scenario)

    def max_parallel(self, memory_bytes: int) -> int:
        return self._lanes

    def free_memory_bytes(self) -> int:
        return 10**12

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self.closed = True


class FakeWorker:
    """One process of the scenario: it has at most one model open."""

    _lock = threading.Lock()

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._open, self._factor = scenario, "", 1.0

    def call(self, function: str, /, **arguments: Any) -> Any:
        scheme = self._scheme(function, arguments)
        with self._lock:
            self._scenario.calls[function, scheme] += 1
        for key in ((function, scheme), (function, "*")):
            if key in self._scenario.raises:
                raise self._scenario.raises[key]
        return plain(getattr(self, "_" + function)(**arguments))

    def metered(self, function: str, /, **arguments: Any) -> MeteredCall:
        value = self.call(function, **arguments)
        used = WorkerUsage(at_s=0.0, cpu_s=0.0, threads={}, waits={})
        wall_s = sum(value) if function == "time_turn" else 0.0
        return MeteredCall(value=value, wall_s=wall_s, before=used, after=used)

    def memory(self) -> WorkerMemory:
        return WorkerMemory(peak_bytes=10**8)

    def _scheme(self, function: str, arguments: Mapping[str, Any]) -> str:
        if isinstance(scheme := arguments.get("scheme"), Scheme):
            return scheme.name
        if isinstance(job := arguments.get("job"), Job):
            return job.scheme.name
        if function in ("open_source", "open_artifact", "open_served"):
            artifact = arguments.get("artifact")
            if function == "open_served":
                artifact = _served(arguments["model"])
            options = artifact.options if isinstance(artifact, Artifact) else {"scheme": "original"}
            self._open = options["scheme"].partition("+")[0]
            self._factor = self._scenario.factor(options)
        return self._open

    # ----------------------------------------------------------------------------------------------------- source

    def _inspect_source(self, **_: Any) -> Any:
        return {"framework": "Fake", "prediction_format": {"kind": "array"}, "processor": {}}

    def _export(self, into: str, **_: Any) -> PortableModel:
        return _model(into, "fp32")

    def _prepare_samples(self, into: str, **_: Any) -> SampleSet:
        folder = Path(into)
        (folder / "inputs").mkdir(parents=True)
        np.save(folder / "inputs" / "x.npy", np.random.default_rng(0).standard_normal((SAMPLES, 4), np.float32))
        write_index(folder, {"x": "inputs/x.npy"}, labels=(folder / LABELS).exists(), count=SAMPLES)
        written = SampleSet(path=into, digest="", count=SAMPLES, real=True, source="input_example")
        return replace(written, digest=digest_of_samples(written))

    def _rewrite_graph(self, model: PortableModel, **_: Any) -> PortableModel:
        return model

    def _compare_samples(self, **_: Any) -> Any:
        return {"overlap": 0, "coverage": None}

    # ---------------------------------------------------------------------------------------------- lower, compile

    def _lower(self, scheme: Scheme, into: str, keep: list[str], **_: Any) -> PortableModel:
        return _model(into, scheme.precision, {"fp32": tuple(keep)} if keep else {})

    def _mix(self, lowered: PortableModel, keep: list[str], into: str, **_: Any) -> PortableModel:
        return _model(into, lowered.precision, {"fp32": tuple(keep)})

    def _rank_nodes(self, **_: Any) -> list[Sensitivity]:
        return [
            Sensitivity(node=node, op="MatMul", effect=part, cost=1.0) for node, part in self._scenario.effects.items()
        ]

    def _refuse_model(self, **_: Any) -> None:
        return None

    def _compile_model(self, model: PortableModel, job: Job, into: str, **_: Any) -> Artifact:
        scheme = job.scheme
        kept = [node for nodes in model.kept.values() for node in nodes]
        error = self._scenario.errors.get(scheme.name, self._scenario.errors.get(scheme.precision, 0.0))
        left = error * (1 - sum(self._scenario.effects.get(node, 0.0) for node in kept)) if kept else error
        Path(into, "model.bin").write_text(f"{scheme.name} {left}")
        return Artifact(
            path=into, entry="model.bin", digest="", job_id=job.id, backend=job.backend, precision=scheme.precision,
            toolchain={}, hardware="", signature=SIGNATURE, size_bytes=0,
            options={"scheme": scheme.name, "error": left, **job.target.options.get(job.backend, {})},
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------------- run, measure

    def _close_model(self) -> None:
        self._open = ""

    def _open_source(self, **_: Any) -> Any:
        self._error = 0.0
        return {"load_s": 0.01, "signature": SIGNATURE}

    def _open_artifact(self, artifact: Artifact, **_: Any) -> Any:
        self._error = float(artifact.options["error"])
        return {"load_s": 0.01, "signature": SIGNATURE}

    def _open_served(self, model: dict[str, str], **_: Any) -> Any:
        return self._open_artifact(_served(model))

    def _predict(self, into: str, **_: Any) -> Any:
        path = Path(into) / "y.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, self._answers())
        return {"y": str(path)}

    def _answers(self) -> np.ndarray[Any, Any]:
        exact = np.random.default_rng(1).standard_normal((SAMPLES, 3)).astype(np.float32)
        noise = np.random.default_rng(2).standard_normal(exact.shape).astype(np.float32)
        return exact + np.float32(self._error) * noise

    def _predict_corners(self, **_: Any) -> Any:
        return []

    def _make_calls(self, calls: list[Any], **_: Any) -> Any:
        answers = [None] * len(calls)
        return {"answers": answers, "refusals": {}, "repeated": {}, "changed_inputs": [], "changed_answers": []}

    def _find_mixed_rows(self, **_: Any) -> Any:
        return ""

    def _find_refused_missing(self, **_: Any) -> Any:
        return []

    def _find_taken_values(self, **_: Any) -> Any:
        return {"rules": [], "wide": [], "notes": []}

    def _soak(self, **_: Any) -> Any:
        return {"calls": 1000, "kept": []}

    def _warm_up(self, **_: Any) -> Any:
        return {"calls": 1, "seconds": 0.0, "steady": True, "latency_s": self._latency_s()}

    def _quick_turn(self, **_: Any) -> Any:
        return [self._latency_s()] * 20

    def _latency_s(self) -> float:
        return self._factor * self._scenario.latency_s.get(self._open, 0.01)

    def _prepare_turn(self, checked_seed: int | None, **_: Any) -> int:
        self._checked_seed = checked_seed
        return 20

    def _call_untimed(self, seconds: float) -> None:
        pass

    def _time_turn(self, **_: Any) -> Any:
        return [self._latency_s()] * 20

    def _end_turn(self, into: str | None) -> Any:
        if into is None or self._checked_seed is None:
            return []
        batch = checked_batch(SAMPLES, 1, self._checked_seed, 0)
        path = Path(into) / "0-0.npy"
        np.save(path, self._answers()[batch.rows])
        return [{"y": str(path)}]


def _served(model: Mapping[str, str]) -> Artifact:
    folder = data_folder(model["path"])
    return artifact_of(read_manifest(folder), folder)


def _model(into: str, precision: str, kept: Mapping[str, tuple[str, ...]] | None = None) -> PortableModel:
    path = Path(into) / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{precision} {kept}")
    return PortableModel(
        path=str(path), digest=digest_of([precision, kept or {}]), form="onnx", opset=17, precision=precision,
        signature=SIGNATURE, kept=kept or {},
    )  # fmt: skip
