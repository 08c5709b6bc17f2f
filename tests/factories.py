"""Records for tests: one job, what was compiled, validated and measured of it. Every argument has a default that
passes. `fields` are those of the record that is returned, and win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from compile_stage.core.cache import Cache
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree
from compile_stage.core.environment import hardware
from compile_stage.core.events import EventLog
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
    PortableModel,
    SampleSet,
    Scheme,
    SourceModel,
    Target,
    TargetPolicy,
    Timing,
    Verdict,
)
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure import samples
from compile_stage.measure.readers import SampleRequest

COSINE = Gate(metric="cosine", limit=0.99, direction="at_least")
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 3)),),
)
BASELINE_S = 0.01
"""Median latency of the original, in seconds."""
POLICY_TEXT = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: cpu-server
owner: ml-platform
data:
  validation: {source: "input_example"}
  calibration: {source: "input_example"}
targets:
  cpu-server: {device: cpu, precisions: [int8, fp32]}
"""
"""A valid policy of one target that uses the model's own example."""


def policy_text(data: Path, target: str, body: str = "", *, calibrated: int = 64) -> str:
    """A policy that validates and calibrates on the file `data`, and asks for no profiles.

    Args:
        target: Keys of its one target, as YAML in one line.
        body: Further sections.
        calibrated: How many samples are for calibration, at the most.
    """
    return f"""\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: test
owner: tests
data:
  validation: {{source: "file:{data}", max_samples: 64}}
  calibration: {{source: "file:{data}", max_samples: {calibrated}}}
report: {{profile: false}}
targets:
  cpu: {{device: cpu, threads: 1, {target}}}
{body}
"""


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


def run_context(folder: Path, engine: Any = None, **fields: Any) -> Context:
    """Cache and scratch files are in `folder`. Without an engine nothing may start a process."""
    context = Context(
        cache=Cache(folder), engine=engine, events=EventLog(), hardware=hardware(), scratch=folder, today=date.today()
    )
    return replace(context, **fields)


def job(
    precision: str = "fp32",
    backend: str = "onnxruntime",
    where: Target | None = None,
    *,
    native: bool = True,
    **fields: Any,
) -> Job:
    where = where or target()
    scheme = Scheme(precision=precision, name=precision, native=native)
    name = f"m-1--{where.name}--{backend}--{precision}"
    one = Job(id=name, source="models:/m/1", target=where, backend=backend, scheme=scheme, gates=(COSINE,))
    return replace(one, **fields)


def saved_program(program: Any, folder: Path, signature: Signature) -> PortableModel:
    """A program of `torch.export` as `folder/model.pt2`; the folder must not be there yet."""
    import torch

    folder.mkdir(parents=True)
    torch.export.save(program, str(folder / "model.pt2"))
    return PortableModel(
        path=str(folder / "model.pt2"), digest=digest_tree(folder), form="torch-export", opset=0, precision="fp32",
        signature=signature,
    )  # fmt: skip


def artifact(of: Job | None = None, **fields: Any) -> Artifact:
    of = of or job()
    compiled = Artifact(
        path="/nowhere", entry="model.onnx", digest="sha256:0", job_id=of.id, backend=of.backend,
        precision=of.scheme.precision, toolchain={}, hardware="here", signature=SIGNATURE, size_bytes=1000,
    )  # fmt: skip
    return replace(compiled, **fields)


def timing(
    speedup: float | None = 2.0, rounds: int = 12, batch_size: int = 1, noise: float = 0.001, **fields: Any
) -> Timing:
    """One call in each round; the ratio to a baseline of `BASELINE_S` is `speedup`."""
    latency = BASELINE_S / (speedup or 1.0)
    calls = tuple(latency * (1 + noise * (-1) ** (i // 2)) for i in range(rounds))
    interval = None if speedup is None else (speedup * (1 - noise), speedup * (1 + noise))
    times = Timing(
        latency_s=calls, batch_size=batch_size, stable=True, environment="here", rounds=rounds, turns=(1,) * rounds,
        speedup=speedup, speedup_interval=interval,
    )  # fmt: skip
    return replace(times, **fields)


def measurement(speedup: float | None = 2.0, **fields: Any) -> Measurement:
    return replace(Measurement(timings=(timing(speedup),), load_s=0.1, peak_memory_bytes=10**8), **fields)


def verdict(cosine: float = 0.999) -> Verdict:
    outcome = Outcome.PASS if cosine >= COSINE.limit else Outcome.FAIL
    return Verdict(checks=(Check(gate=COSINE, outcome=outcome, measured=cosine, reason=f"cosine is {cosine}"),))


def passed(of: Job | None = None, speedup: float = 2.0, **fields: Any) -> Candidate:
    """A candidate that holds every gate and was measured."""
    of = of or job()
    candidate = Candidate(job=of, artifact=artifact(of), verdict=verdict(), measurement=measurement(speedup))
    return replace(candidate.in_state("passed", "every tolerance holds"), **fields)


def states(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Scheme name → state."""
    return {candidate.job.scheme.name: candidate.state for candidate in candidates}


def prepare(spec: DataSpec, signature: Signature, into: Path, *, seed: int, **given: Any) -> SampleSet:
    """The samples of `spec` in the folder `into`; what is `given` belongs to the request (shapes, dataset,
    keep_given) or comes from the model."""
    asked = {name: given.pop(name) for name in ("shapes", "dataset", "keep_given") if name in given}
    request = SampleRequest(spec=spec, signature=signature, seed=seed, **asked)
    return samples.prepare(request, into, samples.FromModel(**given))
