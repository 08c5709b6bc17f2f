"""Runs built by hand: one with every way in which a candidate can end, for every report to show."""

from __future__ import annotations

import dataclasses
import random

import factories

from compile_stage.core.records import (
    Bundle,
    Candidate,
    Check,
    Data,
    DataSpec,
    Event,
    Failure,
    Gate,
    Job,
    Measurement,
    OptimizationStep,
    Outcome,
    Policy,
    PortableModel,
    PredictSpeedup,
    Receipt,
    Refusal,
    RunResult,
    SampleSet,
    Scheme,
    Selection,
    SourceModel,
    Target,
    TargetPolicy,
    TargetResult,
    Timing,
    Verdict,
    Waiver,
)
from compile_stage.core.tensors import Signature, TensorSpec

HARDWARE = "x86_64-1a2b3c4d5e6f7081"
SIGNATURE = Signature(
    inputs=(TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8)),),
    outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 10)),),
)
COSINE = Gate(metric="cosine", limit=0.99, direction="at_least", origin="cpu-server.yaml:21")
ACCURACY = Gate(
    metric="accuracy",
    limit=0.01,
    direction="at_most",
    confidence=0.95,
    options={"drop": "max_drop"},
    origin="cpu-server.yaml:22",
)
SPEEDUP = Gate(metric="speedup", limit=1.0, direction="at_least", unit="ratio", origin="cpu-server.yaml:27")


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def latencies(median_s: float, count: int = 240, seed: int = 7) -> tuple[float, ...]:
    """Skewed to the right, as latencies are: most near the median, a few much slower."""
    draw = random.Random(seed)
    return tuple(round(median_s * (0.97 + draw.lognormvariate(-3.4, 0.7)), 9) for _ in range(count))


def timing(median_s: float, speedup: float | None, *, batch: int = 1, count: int = 240, stable: bool = True) -> Timing:
    interval = None if speedup is None else (speedup * 0.97, speedup * 1.02)
    calls = latencies(median_s * batch**0.8, count, seed=batch)
    return factories.timing(
        speedup, max(1, count // 10), batch, latency_s=calls, turns=(), stable=stable, environment=HARDWARE,
        speedup_interval=interval,
    )  # fmt: skip


def measurement(median_s: float, speedup: float | None, *, count: int = 240, stable: bool = True) -> Measurement:
    timings = (
        timing(median_s, speedup, count=count, stable=stable),
        timing(median_s, None if speedup is None else speedup * 0.9, batch=8, count=count, stable=stable),
    )
    return factories.measurement(timings=timings, load_s=0.04, peak_memory_bytes=92_000_000)


def check(gate: Gate, outcome: Outcome, measured: float | None, reason: str, **more: object) -> Check:
    return dataclasses.replace(
        Check(gate=gate, outcome=outcome, measured=measured, reason=reason, samples=360),
        **more,  # type: ignore[arg-type]
    )


def good_checks(cosine: float) -> tuple[Check, ...]:
    return (
        check(COSINE, Outcome.PASS, cosine, f"{cosine} >= 0.99 over 360 samples", output="logits", batch_size=1),
        check(COSINE, Outcome.PASS, cosine, f"{cosine} >= 0.99 over 360 samples", output="logits", batch_size=8),
        check(
            ACCURACY,
            Outcome.PASS,
            0.0028,
            "the drop is at most 0.0083 with 95 % confidence",
            interval=(-0.0028, 0.0083),
            batch_size=1,
        ),
    )


def job(backend: str, precision: str, scheme: str, target: Target) -> Job:
    name = f"digits-cnn-1--{target.name}--{backend}--{scheme}"
    kind = Scheme(precision=precision, name=scheme, native=precision == "fp32")
    return factories.job(
        precision, backend, target, id=name, source="models:/digits-cnn/1", scheme=kind, gates=(COSINE, ACCURACY)
    )


def candidate(
    of: Job,
    checks: tuple[Check, ...] | None = None,
    measured: Measurement | None = None,
    failure: Failure | None = None,
    size: int = 48_200,
    notes: tuple[str, ...] = (),
) -> Candidate:
    precision = of.scheme.precision
    portable = PortableModel(
        path="/cache/model.onnx",
        digest=digest("b"),
        form="onnx",
        opset=18,
        precision=precision,
        signature=SIGNATURE,
        kept={"fp32": ("/fc/Gemm",)} if precision == "int8" else {},
        notes=notes,
    )
    artifact = factories.artifact(
        of, path="/cache/artifact", digest=digest("c"), toolchain={of.backend: "1.31.0", "onnx": "1.19.0"},
        hardware=HARDWARE, signature=SIGNATURE, size_bytes=size, executed={"precision": {precision: 7}},
    )  # fmt: skip
    return Candidate(
        job=of,
        portable=portable,
        artifact=artifact if failure is None else None,
        verdict=None if checks is None else Verdict(checks=checks),
        measurement=measured,
        failure=failure,
        compile_s=2.13,
        cache={"compile": "miss", "validate": "miss", "benchmark": "miss"} if failure is None else {},
    )


def cpu_server(name: str = "cpu-server", **more: object) -> TargetPolicy:
    target = Target(
        name=name,
        backends=("onnxruntime", "openvino"),
        precisions=("int8", "bf16", "fp32"),
        batch_sizes=(1, 8),
        threads=2,
    )
    return TargetPolicy(
        target=dataclasses.replace(target, **more),  # type: ignore[arg-type]
        tolerances={"int8": (COSINE, ACCURACY), "fp32": (COSINE,)},
        performance=(SPEEDUP,),
    )


def every_ending() -> TargetResult:
    """Won, lost, failed (a gate; a check that could not run), crashed, slower than the baseline, waived."""
    policy = cpu_server()
    target = policy.target
    winner = job("openvino", "int8", "int8-sym", target)
    slower = job("onnxruntime", "int8-dynamic", "int8-dynamic", target)
    missed = job("onnxruntime", "int8", "int8-u8s8", target)
    second = job("onnxruntime", "fp32", "fp32", target)
    crashed = job("openvino", "bf16", "bf16", target)
    waiver = Waiver(
        gate="max_rel",
        target="cpu-server",
        reason="recalibrated next sprint",
        owner="vision-team",
        expires="2027-01-31",
    )
    max_rel = Gate(metric="max_rel", limit=0.05, direction="at_most")
    candidates = (
        candidate(
            winner,
            (
                *good_checks(0.9987),
                check(max_rel, Outcome.FAIL, 0.062, "0.062 > 0.05 over 360 samples", output="logits", waived=waiver),
                check(SPEEDUP, Outcome.PASS, 6.52, "6.32 >= 1 at the low end"),
            ),
            measurement(0.00031, 6.52),
            size=18_400,
            notes=("1 node stays in FP32: it overflows",),
        ),
        candidate(second, good_checks(0.9999997), measurement(0.00062, 3.26)),
        candidate(
            slower,
            (*good_checks(0.9991), check(SPEEDUP, Outcome.FAIL, 0.41, "0.41 < 1: slower than the baseline")),
            measurement(0.0049, 0.41, stable=False, count=60),
        ),
        candidate(
            missed,
            (
                check(
                    COSINE,
                    Outcome.FAIL,
                    0.941,
                    "0.941 < 0.99 on the worst of 360 samples",
                    output="logits",
                    batch_size=1,
                    worst=(17, 203, 5),
                ),
                check(ACCURACY, Outcome.NOT_RUN, None, "the data has no labels", samples=0),
            ),
        ),
        candidate(
            crashed,
            failure=Failure(
                kind="crash",
                step="compile",
                problem="the worker died of signal 11 (SIGSEGV)",
                detail="openvino/plugin.so: segmentation fault\nat line <3>",
            ),
        ),
    )
    selection = Selection(
        target="cpu-server",
        winner=winner.id,
        reason="lowest median latency of those that passed every gate",
        states={
            winner.id: "won",
            second.id: "lost",
            slower.id: "failed",
            missed.id: "failed",
            crashed.id: "failed",
        },
        reasons={
            winner.id: "lowest median latency of those that passed every gate",
            second.id: "passed, but 2.00× slower than the winner",
            slower.id: "speedup 0.41× is below 1×: slower than the baseline",
            missed.id: "cosine of logits is 0.941, at least 0.99 was asked for (worst samples 17, 203, 5)",
            crashed.id: "crash while compiling: the worker died of signal 11 (SIGSEGV)",
        },
    )
    return TargetResult(
        policy=policy,
        candidates=candidates,
        selection=selection,
        bundle=Bundle(
            path="/out/bundle",
            digest=digest("d"),
            key=digest("e"),
            target="cpu-server",
            name="digits-cnn-compiled",
            manifest={},
            tags={},
            metrics={},
            params={},
        ),
        receipt=Receipt(
            uri="models:/digits-cnn-compiled/3",
            name="digits-cnn-compiled",
            version="3",
            digest=digest("d"),
            created=True,
            promoted_to="cpu-server-prod",
            previous="2",
        ),
        predict_speedup=PredictSpeedup(
            speedup=1.84,
            interval=(1.71, 1.97),
            stable=True,
            rows=1,
            pairs=31,
            original_s=0.00262,
            compiled_s=0.00142,
            given="a data frame",
        ),
    )


def with_option_tuning() -> TargetResult:
    """The first target with option tuning: an option that was accepted and won, one rejected, one not tried."""
    target = every_ending()
    stand, fp32 = target.candidates[:2]
    lean = dataclasses.replace(
        stand.job,
        id=stand.job.id + "--memory-lean",
        scheme=dataclasses.replace(stand.job.scheme, name="int8-sym+lean"),
        tuning_options=("lean",),
    )
    tuned = candidate(lean, good_checks(0.9987), measurement(0.00029, 6.97), size=18_400)
    tuned = dataclasses.replace(tuned, measurement=dataclasses.replace(tuned.measurement, peak_memory_bytes=61_000_000))
    selection = dataclasses.replace(
        target.selection,
        winner=lean.id,
        states={**target.selection.states, stand.job.id: "lost", lean.id: "won"},
        reasons={**target.selection.reasons, stand.job.id: "1.07 times the winner's", lean.id: "best latency"},
    )
    steps = (
        OptimizationStep(kind="original", name=""),
        OptimizationStep(kind="graph", name="fp32", job_id=fp32.job.id, reason="in fp32", speedup=3.26),
        OptimizationStep(
            kind="precision", name="int8-sym", job_id=stand.job.id, speedup=2.0, speedup_interval=(1.9, 2.1)
        ),
        OptimizationStep(
            kind="memory",
            name="lean",
            job_id=lean.id,
            reason="accepted: 61 MB instead of 92 MB",
            options={"arena": False},
            speedup=1.07,
            speedup_interval=(1.05, 1.09),
        ),
        OptimizationStep(
            kind="tuning",
            name="<b>liar</b>",
            job_id=lean.id + "--tuned-liar",
            accepted=False,
            reason="rejected: cosine is 0.2",
            options={"config": {"lie": "1"}},
        ),
        OptimizationStep(
            kind="tuning", name="late", accepted=False, reason="nothing is left of the budget", tried=False
        ),
    )
    return dataclasses.replace(
        target, candidates=(stand, fp32, *target.candidates[2:], tuned), selection=selection, ladder=steps
    )


def no_winner() -> TargetResult:
    """A target whose only candidate misses its tolerance."""
    policy = cpu_server("edge", required=False)
    only = job("onnxruntime", "int8", "int8-u8s8", policy.target)
    failed = check(COSINE, Outcome.FAIL, float("nan"), "the candidate answers NaN where the baseline does not")
    return TargetResult(
        policy=policy,
        candidates=(candidate(only, (failed,)),),
        selection=Selection(
            target="edge",
            winner=None,
            reason="no candidate passed its gates",
            states={only.id: "failed"},
            reasons={only.id: "cosine is NaN: the candidate answers NaN where the baseline does not"},
        ),
    )


def make_result(*targets: TargetResult, status: str = "passed", exit_code: int = 0) -> RunResult:
    chosen = targets or (every_ending(), no_winner())
    policy = Policy(
        name="cpu-server",
        owner="ml-platform",
        digest=digest("f"),
        files=("org-base.yaml", "cpu-server.yaml"),
        data=Data(
            validation=DataSpec(source="file:val.npz", labels="y"), calibration=DataSpec(source="file:train.npz")
        ),
        targets=tuple(target.policy for target in chosen),
    )
    events = [
        Event(step="resolve", job_id="", started_s=0.0, ended_s=0.6),
        Event(step="plan", job_id="", started_s=0.6, ended_s=0.62),
        Event(step="export", job_id="", started_s=0.62, ended_s=4.1),
    ]
    for index, found in enumerate(chosen[0].candidates):
        start = 4.1 + 0.7 * index
        events += [
            Event(step="lower", job_id=found.job.id, started_s=start, ended_s=start + 0.5, cached=index == 1),
            Event(step="compile", job_id=found.job.id, started_s=start + 0.5, ended_s=start + 2.63),
            Event(step="validate", job_id=found.job.id, started_s=start + 2.63, ended_s=start + 3.4),
        ]
    events.append(Event(step="benchmark", job_id="", started_s=11.0, ended_s=19.4))
    events.append(Event(step="publish", job_id="", started_s=19.4, ended_s=20.9))
    return RunResult(
        status=status,  # type: ignore[arg-type]
        exit_code=exit_code,
        source=SourceModel(
            uri="models:/digits-cnn/1",
            name="digits-cnn",
            version="1",
            flavor="pytorch",
            path="/cache/source",
            digest=digest("a"),
            logged_model_id="m-0123456789abcdef",
            run_id="4f5e6d",
        ),
        policy=policy,
        environment={
            "hardware": {
                "system": "Linux",
                "machine": "x86_64",
                "cpu": "Example CPU @ 2.10GHz",
                "features": ["avx2", "avx512_vnni"],
                "cores": 2,
                "accelerators": [],
            },
            "hardware_fingerprint": HARDWARE,
            "python": "3.11.7",
            "packages": {"onnxruntime": "1.31.0", "openvino": "2026.4.0", "torch": "2.13.0"},
        },
        targets=chosen,
        refused=(
            Refusal(
                job_id="digits-cnn-1--cpu-server--onnxruntime--bf16",
                target="cpu-server",
                backend="onnxruntime",
                precision="bf16",
                reason="onnxruntime has no bf16 on cpu here",
            ),
        ),
        baseline_framework="PyTorch (eager)",
        baseline={target.policy.target.name: measurement(0.00202, None) for target in chosen},
        samples={
            "validation": SampleSet(
                path="/cache/val", digest=digest("1"), count=360, real=True, source="file:val.npz", has_labels=True
            ),
            "calibration": SampleSet(
                path="/cache/cal", digest=digest("2"), count=300, real=True, source="file:train.npz"
            ),
        },
        duration_s=21.4,
        events=tuple(events),
        notes=("the cache held 1 of 17 steps",),
    )
