"""Artifact against the FP32 baseline, on real samples → verdict."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context, whole_key
from compile_stage.core.digest import canonical_json, revive
from compile_stage.core.errors import SourceError
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Artifact,
    Check,
    Data,
    Gate,
    Job,
    Outcome,
    SampleSet,
    SourceModel,
    Target,
    Verdict,
    record,
)

_STEP = "validate/1"
_OUTPUTS = Gate(metric="outputs", limit=0.0, direction="at_most")  # how many outputs may be lost, renamed or misshapen


@record
class Reference:
    """What the original model answers.

    Attributes:
        outputs: Output name → `.npy` file, axis 0 being the sample.
        corners: The same at each corner of the policy's shapes that the samples do not have themselves, and between
            them.
        sample_s: Seconds that a warm call took for each of its samples: an idea, no measurement.
    """

    outputs: Mapping[str, str]
    corners: tuple[Mapping[str, Any], ...]
    digest: str
    batch_size: int
    sample_s: float


def reference(
    context: Context,
    worker: Worker,
    source: SourceModel,
    samples: SampleSet,
    target: Target,
) -> Reference:
    """Run the original over all samples once, at the largest batch size, since it is mostly the slowest of all:
    artifacts must agree with it at every batch size.

    Args:
        target: Its device is where the original runs (`core.baseline.reference_target`).
    """
    batch_sizes = list(target.batch_sizes)
    batch_size = max(batch_sizes)
    key = {
        "source": source.identity,
        "samples": samples.digest,
        "batch_size": batch_size,
        "batch_sizes": batch_sizes,
        "shapes": target.shapes,
        "threads": target.threads,
        "device": target.device,
        "made_by": plugins.made_by("sources", source.flavor),
        "hardware": context.hardware,
    }

    def make(into: Path) -> dict[str, Any]:
        worker.call("open_source", source=source, target=target)
        outputs = worker.call("predict", samples=samples, batch_size=batch_size, into=str(into))
        turn = worker.call("time_turn", samples=samples, batch_size=batch_size, seconds=0.0)
        corners = worker.call(
            "predict_corners", samples=samples, shapes=target.shapes, batch_sizes=batch_sizes, into=str(into)
        )
        return {
            "outputs": _below(outputs, into),
            "corners": [{**c, "outputs": _below(c["outputs"], into)} for c in corners],
            "sample_s": min(turn) / batch_size,
        }

    stored = context.cached("reference/3", "", key, make)
    here = Path(stored.path)
    return Reference(
        outputs=_above(stored.value["outputs"], here),
        corners=tuple({**c, "outputs": _above(c["outputs"], here)} for c in stored.value["corners"]),
        digest=stored.digest,
        batch_size=batch_size,
        sample_s=stored.value["sample_s"],
    )


@record
class ValidationSet:
    """What an artifact is compared with: the samples, what the original predicts for them, and what the policy says of
    samples."""

    samples: SampleSet
    reference: Reference
    data: Data


@record
class Validated:
    """The verdict, and whether it came from the cache."""

    verdict: Verdict
    cached: bool


def validate(context: Context, worker: Worker, job: Job, artifact: Artifact, validation: ValidationSet) -> Validated:
    """Judge every output of the artifact at every batch size of the target and at the corners of its shapes."""
    gates = _unplaced(job.gates)

    def make(_: Path) -> Verdict:
        worker.call("open_artifact", artifact=artifact, threads=job.target.threads)
        checks: list[Check] = []
        for batch_size in job.target.batch_sizes:
            checks += _at_batch_size(worker, gates, validation, batch_size)
        checks += _at_corners(worker, job, gates, validation)
        if any(check.outcome is Outcome.NOT_RUN for check in checks):
            raise _UnprovenError(tuple(checks))
        return Verdict(checks=tuple(checks))

    try:
        stored = context.cached(_STEP, job.id, _key(context, job, artifact, validation), make)
    except _UnprovenError as unproven:  # what could not be looked at is looked at again next time
        return Validated(verdict=_located(unproven.checks, job.gates), cached=False)
    verdict: Verdict = revive(Verdict, stored.value)
    return Validated(verdict=_located(verdict.checks, job.gates), cached=stored.hit)


def validated_before(context: Context, job: Job, artifact: Artifact, validation: ValidationSet) -> bool:
    """True when the cache holds the verdict, so that `validate` costs nothing."""
    return context.cache.read(_STEP, whole_key(_key(context, job, artifact, validation))) is not None


def _key(context: Context, job: Job, artifact: Artifact, validation: ValidationSet) -> dict[str, Any]:
    gates = _unplaced(job.gates)
    key = {
        "artifact": artifact.digest,
        "backend": job.backend,
        "scheme": job.scheme,
        "options": artifact.options,
        "toolchain": artifact.toolchain,
        "made_by": plugins.made_by("backends", job.backend),
        "hardware": context.hardware,
        "reference": validation.reference.digest,
        "samples": validation.samples.digest,
        "gates": gates,
        "target": job.target,
        "data": {"min_samples": validation.data.min_samples, "seed": validation.data.seed},
    }
    if any(gate.metric.startswith("python:") for gate in gates):
        key["nonce"] = secrets.token_hex(16)  # what an own metric answers can't be known without calling it
    return key


def _unplaced(gates: tuple[Gate, ...]) -> tuple[Gate, ...]:
    """Where a limit is written changes no verdict."""
    return tuple(replace(gate, origin="") for gate in gates)


class _UnprovenError(Exception):
    def __init__(self, checks: tuple[Check, ...]) -> None:
        super().__init__(next(check.reason for check in checks if check.outcome is Outcome.NOT_RUN))
        self.checks = checks


def _at_batch_size(
    worker: Worker, gates: tuple[Gate, ...], validation: ValidationSet, batch_size: int
) -> tuple[Check, ...]:
    from compile_stage.measure.metrics import check_outputs
    from compile_stage.measure.predict import open_outputs
    from compile_stage.measure.samples import open_samples

    samples, data = validation.samples, validation.data
    with tempfile.TemporaryDirectory(prefix="compile-stage-outputs-") as folder:
        try:
            written = worker.call("predict", samples=samples, batch_size=batch_size, into=folder)
        except SourceError as error:  # it answers, but with something that can't be laid beside the original's answers
            return (replace(_not_run(_OUTPUTS, error.problem), batch_size=batch_size),)
        return check_outputs(
            gates,
            open_outputs(written),
            open_outputs(validation.reference.outputs),
            open_samples(samples).labels,
            batch_size=batch_size,
            seed=data.seed,
            min_samples=data.min_samples,
            real=samples.real,
        )


def _at_corners(worker: Worker, job: Job, gates: tuple[Gate, ...], validation: ValidationSet) -> list[Check]:
    """The smallest and largest shapes that the policy promises. Their inputs are real samples, cropped or tiled, so
    they are judged by the elementwise gates only: nobody has labels for them. An own metric of samples with labels may
    want them, and is left out too."""
    samples, data, expected = validation.samples, validation.data, validation.reference
    if not expected.corners:
        return []
    from compile_stage.measure.metrics import check_outputs
    from compile_stage.measure.predict import open_outputs

    elementwise = tuple(
        gate
        for gate in gates
        if "drop" not in gate.options and not (samples.has_labels and gate.metric.startswith("python:"))
    )
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="compile-stage-corners-") as folder:
        answers = worker.call(
            "predict_corners",
            samples=samples,
            shapes=job.target.shapes,
            batch_sizes=list(job.target.batch_sizes),
            into=folder,
            labels=[corner["label"] for corner in expected.corners],
        )
        by_label = {answer["label"]: answer["outputs"] for answer in answers}
        for corner in expected.corners:
            label = corner["label"]
            if label not in by_label:
                checks.append(_not_run(gates[0], f"the artifact gave no answer at the shape corner {label}"))
                continue
            corner_checks = check_outputs(
                elementwise,
                open_outputs(by_label[label]),
                open_outputs(corner["outputs"]),
                None,
                batch_size=0,
                seed=data.seed,
                min_samples=1,
                real=True,
            )
            checks += [
                replace(c, batch_size=None, reason=f"at the shape corner {label}: {c.reason}") for c in corner_checks
            ]
    return checks


def _located(checks: tuple[Check, ...], gates: tuple[Gate, ...]) -> Verdict:
    """The gates as the policy wrote them, with file and line; a gate of our own making stays as it is."""
    written = {canonical_json(replace(gate, origin="")): gate for gate in gates}
    return Verdict(
        checks=tuple(replace(check, gate=written.get(canonical_json(check.gate), check.gate)) for check in checks)
    )


def _not_run(gate: Gate, reason: str) -> Check:
    return Check(gate=gate, outcome=Outcome.NOT_RUN, measured=None, reason=reason)


def _below(files: Mapping[str, str], root: Path) -> dict[str, str]:
    return {name: Path(path).relative_to(root).as_posix() for name, path in files.items()}


def _above(files: Mapping[str, str], root: Path) -> dict[str, str]:
    return {name: str(root / path) for name, path in files.items()}
