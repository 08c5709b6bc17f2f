"""Records for tests: one job, what was compiled, proven and measured of it. Every argument has a default that passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compile_stage.core.records import (
    Artifact,
    Budget,
    Candidate,
    Check,
    Data,
    DataSpec,
    Gate,
    Job,
    Measurement,
    Outcome,
    Policy,
    Scheme,
    SourceModel,
    Target,
    TargetPolicy,
    Timing,
    Verdict,
)
from compile_stage.core.tensors import Signature, TensorSpec

COSINE = Gate(metric="cosine", limit=0.99, direction="at_least")
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 3)),),
)
BASELINE_S = 0.01
"""Median latency of the original, in seconds."""


def target(name: str = "cpu", **fields: Any) -> Target:
    return replace(Target(name=name, backends=("onnxruntime",), precisions=("fp32",)), **fields)


def target_policy(where: Target | None = None, **fields: Any) -> TargetPolicy:
    gates = dict.fromkeys(("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4"), (COSINE,))
    return replace(TargetPolicy(target=where or target(), tolerances=gates, performance=()), **fields)


def policy(*targets: TargetPolicy, **fields: Any) -> Policy:
    spec = DataSpec(source="input_example")
    given = {
        "name": "test",
        "owner": "tests",
        "digest": "sha256:policy",
        "files": (),
        "data": Data(validation=spec, calibration=spec, min_samples=1),
        "targets": targets or (target_policy(),),
        "budget": Budget(measure_seconds=0.2),
    }
    return Policy(**{**given, **fields})


def source(**fields: Any) -> SourceModel:
    given = {"uri": "models:/m/1", "name": "m", "version": "1", "flavor": "onnx", "path": "", "digest": "sha256:m"}
    return SourceModel(**{**given, **fields})


def job(
    precision: str = "fp32", backend: str = "onnxruntime", where: Target | None = None, *, native: bool = True
) -> Job:
    where = where or target()
    scheme = Scheme(precision=precision, name=precision, native=native)
    name = f"m-1--{where.name}--{backend}--{precision}"
    return Job(id=name, source="models:/m/1", target=where, backend=backend, scheme=scheme, gates=(COSINE,))


def artifact(of: Job, **fields: Any) -> Artifact:
    made = Artifact(
        path="/nowhere", entry="model.onnx", digest="sha256:0", job_id=of.id, backend=of.backend, precision=of.scheme.precision,
        toolchain={}, hardware="here", signature=SIGNATURE, size_bytes=1000,
    )  # fmt: skip
    return replace(made, **fields)


def timing(speedup: float | None = 2.0, rounds: int = 12, batch_size: int = 1, noise: float = 0.001) -> Timing:
    """One call in each round; the ratio to a baseline of `BASELINE_S` is `speedup`."""
    latency = BASELINE_S / (speedup or 1.0)
    calls = tuple(latency * (1 + noise * (-1) ** (i // 2)) for i in range(rounds))
    interval = None if speedup is None else (speedup * (1 - noise), speedup * (1 + noise))
    return Timing(
        latency_s=calls, batch_size=batch_size, stable=True, environment="here", rounds=rounds, turns=(1,) * rounds,
        speedup=speedup, speedup_interval=interval,
    )  # fmt: skip


def measurement(speedup: float | None = 2.0, **fields: Any) -> Measurement:
    return replace(Measurement(timings=(timing(speedup),), load_s=0.1, peak_memory_bytes=10**8), **fields)


def verdict(cosine: float = 0.999) -> Verdict:
    outcome = Outcome.PASS if cosine >= COSINE.limit else Outcome.FAIL
    return Verdict(checks=(Check(gate=COSINE, outcome=outcome, measured=cosine, reason=f"cosine is {cosine}"),))


def passed(of: Job | None = None, speedup: float = 2.0, **fields: Any) -> Candidate:
    """A candidate that holds every gate and was measured."""
    of = of or job()
    candidate = Candidate(job=of, artifact=artifact(of), verdict=verdict(), measurement=measurement(speedup), **fields)
    return candidate.in_state("passed", "every tolerance holds")


def states(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Scheme name → state."""
    return {candidate.job.scheme.name: candidate.state for candidate in candidates}
