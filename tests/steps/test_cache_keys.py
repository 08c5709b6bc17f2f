"""What a cached result depends on is part of its key: an old verdict never stands for a new question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from factories import COSINE, SIGNATURE, artifact, job, run_context, source, target, verdict

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import canonical_json
from compile_stage.core.records import (
    Answers,
    Budget,
    Candidate,
    Data,
    DataSpec,
    Generation,
    PortableModel,
    Robustness,
    SampleSet,
    ShapeRange,
)
from compile_stage.measure.reference import Reference
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.timed_answers import Proof
from compile_stage.steps.benchmark import benchmark
from compile_stage.steps.compile import compile_job
from compile_stage.steps.lower import lower
from compile_stage.steps.reference import reference
from compile_stage.steps.rewrite import rewrite
from compile_stage.steps.soak import soak
from compile_stage.steps.validate import ValidationSet, validate

SPEC = DataSpec(source="input_example")
DATA = Data(validation=SPEC, calibration=SPEC)
SAMPLES = SampleSet(path="", digest="sha256:s", count=64, real=True, source="input_example")
MODEL = PortableModel(
    path="", digest="sha256:g", form="onnx", opset=17, precision="fp32", kept={}, signature=SIGNATURE, made_from=""
)
REFERENCE = Reference(
    outputs={}, corners=(), digest="sha256:r", batch_size=1, sample_s=0.01, path="", distinct=64, extra=None
)
STATIC = replace(job("int8"), scheme=replace(job("int8").scheme, calibrates=True))
LOWERED = job("int8", native=False)
COMPILED = artifact(job())
VALIDATION = ValidationSet(samples=SAMPLES, reference=REFERENCE, data=DATA)
CANDIDATE = Candidate(job=job(), artifact=COMPILED, verdict=verdict())
ORIGINAL = Answers(outputs={}, digest="sha256:a", samples=SAMPLES, seed=0)
REQUEST = MeasurementRequest(label="cpu", samples=SAMPLES, target=target(), budget=Budget(measure_seconds=5.0), seed=0)


PROOF = Proof(gates={"a": (), "b": ()}, reference={}, digest="sha256:p")
PROOFS = [
    PROOF,
    replace(PROOF, gates={"a": (COSINE,), "b": ()}),
    replace(PROOF, digest="sha256:other"),
    replace(PROOF, waived=("a",)),
    replace(PROOF, mixed=True),
]


class _AskedError(Exception):
    """Ends a step where it asks the cache."""


@pytest.fixture
def key_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    context = run_context(tmp_path)
    asked: list[str] = []

    def cached(_: Context, step: str, job_id: str, key: Mapping[str, Any], *rest: Any, **named: Any) -> None:
        asked.append(canonical_json(key))
        raise _AskedError

    monkeypatch.setattr(Context, "cached", cached)

    def key(call: Callable[..., Any], given: Mapping[str, Any], where: Mapping[str, Any]) -> str:
        with pytest.raises(_AskedError):
            call(replace(context, **where), **given)
        return asked.pop()

    return key


def of_target(**fields: Any) -> Any:
    return replace(STATIC, target=replace(STATIC.target, **fields))


RANGE = {"x": ShapeRange(min=(1, 4), typical=(1, 4), max=(8, 4))}
STEPS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, list[Any]]]] = {
    "compile": (
        compile_job,
        {"worker": None, "job": STATIC, "model": MODEL, "calibration": SAMPLES},
        {
            "model": [replace(MODEL, digest="sha256:other")],
            "calibration": [replace(SAMPLES, digest="sha256:other")],
            "job": [
                replace(STATIC, backend="openvino"),
                replace(STATIC, scheme=replace(STATIC.scheme, per_channel=not STATIC.scheme.per_channel)),
                of_target(threads=3),
                of_target(device="gpu"),
                of_target(batch_sizes=(8,)),
                of_target(shapes=RANGE),
                of_target(options={"onnxruntime": {"a": 1}}),
            ],
        },
    ),
    "lower": (
        lower,
        {"worker": None, "job": LOWERED, "model": MODEL, "calibration": SAMPLES, "keep": ()},
        {
            "model": [replace(MODEL, digest="sha256:other")],
            "calibration": [replace(SAMPLES, digest="sha256:other")],
            "keep": [("/fc/MatMul",)],
            "job": [replace(LOWERED, scheme=replace(LOWERED.scheme, per_channel=not LOWERED.scheme.per_channel))],
        },
    ),
    "rewrite": (
        rewrite,
        {"worker": None, "model": MODEL, "samples": SAMPLES},
        {"model": [replace(MODEL, digest="sha256:other")], "samples": [replace(SAMPLES, digest="sha256:other")]},
    ),
    "reference": (
        reference,
        {
            "worker": None,
            "source": source(),
            "exported": MODEL,
            "samples": SAMPLES,
            "data": DATA,
            "target": target(),
        },
        {
            "source": [source(digest="sha256:other"), source(flavor="sklearn")],
            "exported": [replace(MODEL, digest="sha256:other")],
            "samples": [replace(SAMPLES, digest="sha256:other")],
            "data": [
                replace(DATA, min_samples=DATA.min_samples + 1),
                replace(DATA, seed=DATA.seed + 1),
                replace(DATA, robustness=Robustness()),
                replace(DATA, robustness=Robustness(samples=80)),
            ],
            "target": [
                target(threads=3),
                target(device="gpu"),
                target(batch_sizes=(1, 8)),
                target(batch_sizes=(2, 8)),
                target(shapes=RANGE),
            ],
        },
    ),
    "validate": (
        validate,
        {"worker": None, "job": job(), "artifact": COMPILED, "validation": VALIDATION},
        {
            "job": [
                replace(job(), backend="openvino"),
                replace(job(), gates=(replace(COSINE, limit=0.999),)),
                replace(job(), scheme=replace(job().scheme, precision="fp16")),
                job(where=target(threads=3)),
                job(where=target(batch_sizes=(1, 8))),
            ],
            "artifact": [
                replace(COMPILED, digest="sha256:other"),
                replace(COMPILED, options={"a": 1}),
                replace(COMPILED, toolchain={"onnxruntime": "0"}),
            ],
            "validation": [
                replace(VALIDATION, samples=replace(SAMPLES, digest="sha256:other")),
                replace(VALIDATION, reference=replace(REFERENCE, digest="sha256:other")),
                replace(VALIDATION, data=replace(DATA, min_samples=DATA.min_samples + 1)),
                replace(VALIDATION, data=replace(DATA, seed=DATA.seed + 1)),
                replace(VALIDATION, data=replace(DATA, robustness=Robustness())),
                replace(VALIDATION, original=source()),
                replace(VALIDATION, original=source(digest="sha256:other")),
                replace(VALIDATION, waived=frozenset({"cosine"})),
            ],
        },
    ),
    "soak": (
        soak,
        {"candidate": CANDIDATE, "original": ORIGINAL, "budget": Budget(soak_seconds=5.0)},
        {
            "candidate": [
                replace(CANDIDATE, artifact=replace(COMPILED, digest="sha256:other")),
                replace(CANDIDATE, artifact=replace(COMPILED, options={"a": 1})),
                replace(CANDIDATE, artifact=replace(COMPILED, toolchain={"onnxruntime": "0"})),
                replace(CANDIDATE, job=replace(job(), gates=(replace(COSINE, limit=0.999),))),
                replace(CANDIDATE, job=job(where=target(threads=3))),
                replace(CANDIDATE, job=job(where=target(batch_sizes=(8,)))),
            ],
            "original": [
                replace(ORIGINAL, digest="sha256:other"),
                replace(ORIGINAL, samples=replace(SAMPLES, digest="sha256:other")),
                replace(ORIGINAL, mixed_batch=1),
                replace(ORIGINAL, seed=1),
            ],
            "budget": [Budget(soak_seconds=6.0)],
        },
    ),
    "benchmark": (
        benchmark,
        {"baseline": source(), "artifacts": {"a": COMPILED}, "request": REQUEST},
        {
            "baseline": [source(digest="sha256:other"), source(flavor="sklearn")],
            "artifacts": [
                {"b": COMPILED},
                {"a": COMPILED, "b": COMPILED},
                {"a": replace(COMPILED, digest="sha256:other")},
                {"a": replace(COMPILED, options={"a": 1})},
                {"a": replace(COMPILED, toolchain={"onnxruntime": "0"})},
            ],
            "request": [
                replace(REQUEST, samples=replace(SAMPLES, digest="sha256:other")),
                replace(REQUEST, target=target(threads=3)),
                replace(REQUEST, target=target(device="gpu")),
                replace(REQUEST, target=target(batch_sizes=(8,))),
                replace(REQUEST, budget=Budget(measure_seconds=6.0)),
                replace(REQUEST, seed=1),
                replace(REQUEST, min_calls=100),
                replace(REQUEST, drop_behind=()),
                replace(REQUEST, holds=lambda *_: True),
                replace(REQUEST, starts=3),
                replace(REQUEST, first_look=True),
                replace(REQUEST, baseline_threads=4),
                replace(REQUEST, overtime=REQUEST.overtime + 1),
                replace(REQUEST, left_s=3.0),
                replace(REQUEST, target=replace(target(), generation=Generation(new_tokens=7))),
                replace(REQUEST, drop_behind=(COSINE,)),
                *(replace(REQUEST, proof=proof) for proof in PROOFS),
            ],
        },
    ),
}
NO_PART_OF_A_MEASUREMENT = {"label", "decided", "more", "each_time", "after_a_kill"}
OF_THIS_MACHINE = ("compile", "reference", "validate", "soak", "benchmark")


@pytest.mark.parametrize("step", STEPS)
def test_a_result_is_not_taken_for_that_of_other_inputs(step: str, key_of: Callable[..., str]) -> None:
    """Broken: a changed model, artifact, sample, limit or setting would get the verdict or the time of the old one."""
    call, given, others = STEPS[step]
    keys = {"as it is": key_of(call, given, {})}
    assert key_of(call, given, {}) == keys["as it is"]
    for name, values in others.items():
        for place, other in enumerate(values):
            keys[f"{name} {place}"] = key_of(call, {**given, name: other}, {})
    same = {name: [other for other, key in keys.items() if key == keys[name] and other != name] for name in keys}
    assert {name: others for name, others in same.items() if others} == {}


def test_each_field_of_a_measurements_request_is_part_of_its_key_or_known_not_to_be() -> None:
    """Broken: a field that is added, and forgotten in the key, gets the figures of another measurement."""
    _, _, others = STEPS["benchmark"]
    varied = {
        field.name
        for request in others["request"]
        for field in fields(MeasurementRequest)
        if getattr(request, field.name) != getattr(REQUEST, field.name)
    }
    assert varied == {field.name for field in fields(MeasurementRequest)} - NO_PART_OF_A_MEASUREMENT


@pytest.mark.parametrize("step", OF_THIS_MACHINE)
def test_a_result_is_not_taken_for_that_of_another_machine(
    step: str, key_of: Callable[..., str], tmp_path: Path
) -> None:
    """Broken: with a shared cache, what was proven or timed on one chip would count for another."""
    call, given, _ = STEPS[step]
    here = run_context(tmp_path).hardware
    assert key_of(call, given, {"hardware": replace(here, cpu="another")}) != key_of(call, given, {})


@pytest.mark.parametrize("step", STEPS)
def test_a_result_is_not_taken_for_that_of_other_packages(
    step: str, key_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after an update of a runtime, or of what the original runs in, the old verdict would stand."""
    call, given, _ = STEPS[step]
    before = key_of(call, given, {})
    monkeypatch.setattr(plugins, "cache_identity", lambda group, name: {group: f"{name} updated"})
    monkeypatch.setattr(plugins, "package_versions", lambda *names: dict.fromkeys(names, "updated"))
    assert key_of(call, given, {}) != before


@pytest.mark.parametrize("group", ["sources", "backends"])
def test_figures_are_of_the_packages_of_both_sides(
    group: str, key_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after an update of what the original alone, or the artifact alone, runs in, the old speedup would
    stand."""
    call, given, _ = STEPS["benchmark"]
    before, identity = key_of(call, given, {}), plugins.cache_identity
    monkeypatch.setattr(
        plugins, "cache_identity", lambda of, name: {of: "updated"} if of == group else identity(of, name)
    )
    assert key_of(call, given, {}) != before
