"""Artifact against the FP32 baseline, on real samples → verdict."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context, cache_key
from compile_stage.core.digest import canonical_json, digest_tree, revive
from compile_stage.core.errors import IntegrityError, SourceError, WorkerError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Artifact,
    Check,
    Data,
    Gate,
    Job,
    Outcome,
    OutputErrors,
    SampleSet,
    SourceModel,
    Verdict,
    record,
)
from compile_stage.core.sample_files import RAW, digest_of_samples
from compile_stage.measure.extra_calls import check_calls, check_other_samples, not_looked_at
from compile_stage.measure.reference import Reference

_STEP = "validate/22"
_PREDICT_ROUNDS = 31  # pairs of calls of predict()
_OUTPUTS = Gate(metric="outputs", limit=0.0, direction="at_most")  # how many outputs may be lost, renamed or misshapen


@record
class ValidationSet:
    """What an artifact is compared with: the samples, what the original predicts for them, and what the policy says of
    samples.

    Attributes:
        original: Of a model whose predict() is compared as a whole; None for any other.
        waived: The metrics whose FAIL a waiver lets through on this target.
    """

    samples: SampleSet
    reference: Reference
    data: Data
    original: SourceModel | None = None
    waived: frozenset[str] = frozenset()

    def demand_unchanged(self) -> None:
        """Raise IntegrityError when the samples, their labels or the reference answers on disk are not those that were
        written: what was compared with them proves nothing."""
        for what, digest, now, path in (
            ("samples", self.samples.digest, digest_of_samples(self.samples), self.samples.path),
            ("reference answers", self.reference.digest, digest_tree(self.reference.path), self.reference.path),
        ):
            if now != digest:
                raise IntegrityError(
                    f"the {what} were changed while candidates were compared with them", where=path,
                    fix="run again; find out who writes there: a worker can't where `doctor` says that files are "
                        "closed",
                )  # fmt: skip


@record
class Validated:
    """The verdict, how far each output is from the original's sample by sample, and whether both came from the
    cache."""

    verdict: Verdict
    cached: bool
    errors: tuple[OutputErrors, ...] = ()


@record
class _Stored:
    verdict: Verdict
    errors: tuple[OutputErrors, ...]


def validate(context: Context, worker: Worker, job: Job, artifact: Artifact, validation: ValidationSet) -> Validated:
    """Judge every output of the artifact at every batch size of the target and at the corners of its shapes; no further
    than to the first failure that no waiver lets through."""
    gates = _unplaced(job.gates)

    def make(_: Path) -> _Stored:
        worker.call("open_artifact", artifact=artifact, threads=job.target.threads)
        checks: list[Check] = []
        errors: tuple[OutputErrors, ...] = ()
        for batch_size in job.target.batch_sizes:
            if _has_failed(checks, validation.waived):
                break
            checked, of_samples = _at_batch_size(worker, job, gates, validation, batch_size)
            checks, errors = [*checks, *checked], errors or of_samples
        # One after the other: each is asked for what it costs only where the verdict still depends on it.
        if not _has_failed(checks, validation.waived):
            checks += _at_corners(worker, job, gates, validation)
        if not _has_failed(checks, validation.waived):
            checks += _whole_predict(worker, job, artifact, gates, validation)
        if not _has_failed(checks, validation.waived):
            checks += _beyond(worker, job, gates, validation, checks)
        worker.call("close_model")  # the worker may be kept for another job
        validation.demand_unchanged()
        if any(check.outcome is Outcome.NOT_RUN for check in checks):
            raise _NotRunError(tuple(checks), errors)
        return _Stored(verdict=Verdict(checks=tuple(checks)), errors=errors)

    try:
        stored = context.cached(_STEP, job.id, _key(context, job, artifact, validation), make)
    except _NotRunError as not_run:  # what could not be looked at is looked at again next time
        checks = _beside_chance(not_run.checks, validation)
        return Validated(verdict=_located(checks, job.gates), cached=False, errors=not_run.errors)
    held: _Stored = revive(_Stored, stored.value)
    checks = _beside_chance(held.verdict.checks, validation)
    return Validated(verdict=_located(checks, job.gates), cached=stored.hit, errors=held.errors)


def _beside_chance(checks: tuple[Check, ...], validation: ValidationSet) -> tuple[Check, ...]:
    """Where the original does not repeat its own answers, or gives others in another batch, each gate that failed says
    so: it blames the artifact for what the original does."""
    from compile_stage.measure.behaviour import not_repeated
    from compile_stage.measure.original_cause import blame_original

    extra, cause, same_mates = validation.reference.extra, "", 0
    if extra is not None and (what := not_repeated(extra.answers)):
        cause = f"it does not repeat its answers ({what}): log a model without chance or state in it"
    elif what := validation.reference.mixed_rows:
        same_mates = size = validation.reference.batch_size  # the artifact had the same batches there
        cause = (
            f"its answer to a sample depends on the rest of the batch ({what}), and it answered in batches of {size}: "
            f"say batch_sizes: [{size}] alone (smaller batches are then compared call by call), or log a model without "
            "that"
        )
    return blame_original(checks, cause, same_mates)


def _has_failed(checks: Sequence[Check], waived: Collection[str]) -> bool:
    """Whether it can't pass any more, whatever the rest says."""
    return any(check.outcome is Outcome.FAIL and check.gate.metric not in waived for check in checks)


def _beyond(
    worker: Worker, job: Job, gates: tuple[Gate, ...], validation: ValidationSet, checks: Sequence[Check]
) -> Iterator[Check]:
    """Other calls and other samples than those of the validation set. They can take as long as all others, so they are
    not looked at where a check was not run already, which keeps the verdict from a pass whatever these say."""
    from compile_stage.measure.gates import that_held

    samples, data, extra = validation.samples, validation.data, validation.reference.extra
    unproven = next((c for c in checks if c.outcome is Outcome.NOT_RUN), None)
    if unproven is not None:
        yield from not_looked_at(f"{unproven.gate.metric} was not run: {unproven.reason}", data)
        return
    if extra is None:
        yield from not_looked_at("the original was not asked either, since the samples prove nothing", data)
        return
    # What is waived has said so: here a gate shows what is wrong with other calls and other samples alone.
    sound = that_held(gates, checks)
    for check in check_calls(worker, job, sound, extra, samples, data.seed):
        yield _or_rounding(check, validation.reference.rounding)
    for check in check_other_samples(worker, job, sound, extra, samples, data):
        yield _or_rounding(check, validation.reference.rounding)


def _or_rounding(check: Check, rounding: str) -> Check:
    """Of other calls and samples nobody knows the original's answers to rounded ones, so rounding is no more than a
    possible cause."""
    if check.outcome is not Outcome.FAIL or not rounding:
        return check
    return replace(check, reason=f"{check.reason}; rounding may be the cause: {rounding}")


def validated_before(context: Context, job: Job, artifact: Artifact, validation: ValidationSet) -> bool:
    """True when the cache holds the verdict, so that `validate` costs nothing."""
    return context.cache.read(_STEP, cache_key(_key(context, job, artifact, validation))) is not None


def _key(context: Context, job: Job, artifact: Artifact, validation: ValidationSet) -> dict[str, Any]:
    gates = _unplaced(job.gates)
    key = {
        "artifact": artifact.digest,
        "backend": job.backend,
        "scheme": job.scheme,
        "options": artifact.options,
        "toolchain": artifact.toolchain,
        "made_by": plugins.cache_identity("backends", job.backend),
        "hardware": context.hardware,
        "reference": validation.reference.digest,
        # Whose predict() is compared as a whole: another one around the same network has the same reference.
        "original": _predict_of(validation.original),
        "mixed": validation.reference.extra.mixed if validation.reference.extra is not None else "",
        "samples": validation.samples.digest,
        "gates": gates,
        "target": job.target,
        "waived": sorted(validation.waived),  # what else fails is asked for no more
        "data": {
            "min_samples": validation.data.min_samples,
            "seed": validation.data.seed,
            "robustness": validation.data.robustness,
        },
    }
    if any(gate.metric.startswith("python:") for gate in gates):
        key["nonce"] = secrets.token_hex(16)  # what an own metric answers can't be known without calling it
    return key


def _predict_of(original: SourceModel | None) -> list[Any]:
    return [original.identity, plugins.cache_identity("sources", original.flavor)] if original is not None else []


def _unplaced(gates: tuple[Gate, ...]) -> tuple[Gate, ...]:
    """Where a limit is written changes no verdict."""
    return tuple(replace(gate, origin="") for gate in gates)


class _NotRunError(Exception):
    def __init__(self, checks: tuple[Check, ...], errors: tuple[OutputErrors, ...]) -> None:
        super().__init__(next(check.reason for check in checks if check.outcome is Outcome.NOT_RUN))
        self.checks, self.errors = checks, errors


def _at_batch_size(
    worker: Worker, job: Job, gates: tuple[Gate, ...], validation: ValidationSet, batch_size: int
) -> tuple[tuple[Check, ...], tuple[OutputErrors, ...]]:
    """The checks, and of the target's first batch size the errors of the samples."""
    from compile_stage.measure.claims import check_claim
    from compile_stage.measure.metrics import ComparedSamples, check_outputs
    from compile_stage.measure.predict import open_outputs
    from compile_stage.measure.sample_errors import errors_of
    from compile_stage.measure.samples import open_samples

    samples, data = validation.samples, validation.data
    with temporary_folder("outputs") as folder:
        try:
            written = worker.call("predict", samples=samples, batch_size=batch_size, into=folder)
        except SourceError as error:  # it answers, but with something that can't be laid beside the original's answers
            return (replace(_not_run(_OUTPUTS, error.problem), batch_size=batch_size),), ()
        validation.demand_unchanged()
        opened = open_samples(samples)
        reference = validation.reference
        own, original = open_outputs(written), open_outputs(reference.outputs)
        compared = ComparedSamples(
            min_samples=data.min_samples,
            real=samples.real,
            labels=opened.labels,
            groups=opened.groups,
            distinct=reference.distinct,
        )
        checks = check_outputs(gates, own, original, compared, batch_size=batch_size, seed=data.seed)
        failed = [check.gate for check in checks if check.outcome is Outcome.FAIL and check.gate in gates]
        if failed and reference.rounding and reference.rounded is not None:
            rounded = open_outputs(reference.rounded)
            beside, alone = (
                check_outputs(failed, *pair, compared, batch_size=batch_size, seed=data.seed)
                for pair in ((own, rounded), (rounded, original))
            )
            checks = _name_rounding(checks, beside, alone, reference.rounding)
        claim = (check_claim(own, original, batch_size),) if job.scheme.precision == "fp32" else ()
        errors = errors_of(own, original) if batch_size == job.target.batch_sizes[0] else ()
        return (*checks, *claim), errors


def _name_rounding(
    checks: tuple[Check, ...], beside: tuple[Check, ...], alone: tuple[Check, ...], rounding: str
) -> tuple[Check, ...]:
    """With rounding as the cause of what is missed, where it is, and where it may be.

    Args:
        beside: What the artifact's answers miss beside the original's to the rounded samples.
        alone: What those miss beside the original's to the samples as they are.
    """
    from compile_stage.measure.rounding import HELP

    held = [(check.gate, check.output) for check in beside if check.outcome is Outcome.PASS]
    missed = [(check.gate, check.output) for check in alone if check.outcome is Outcome.FAIL]

    def named(check: Check) -> Check:
        if check.outcome is not Outcome.FAIL:
            return check
        if (check.gate, check.output) in held:
            because = "the cause is rounding: beside the original's answers to rounded samples it holds"
        elif (check.gate, check.output) in missed:
            because = "rounding may be the cause: the original's own answers to rounded samples miss it too"
        else:
            return check
        return replace(check, reason=f"{check.reason}; {because}, and {rounding}: {HELP}")

    return tuple(named(check) for check in checks)


def _at_corners(worker: Worker, job: Job, gates: tuple[Gate, ...], validation: ValidationSet) -> list[Check]:
    """The smallest and largest shapes that the policy promises. Their inputs are real samples, cropped or tiled, so
    they are judged by the elementwise gates only: nobody has labels for them. An own metric of samples with labels may
    want them, and is left out too."""
    samples, data, expected = validation.samples, validation.data, validation.reference
    if not expected.corners:
        return []
    from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
    from compile_stage.measure.predict import open_outputs
    from compile_stage.measure.tolerance import elementwise_gates

    elementwise = elementwise_gates(gates, has_labels=samples.has_labels, few_rows=True)
    checks: list[Check] = []
    with temporary_folder("corners") as folder:
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
                SINGLE_CALL,
                batch_size=0,
                seed=data.seed,
            )
            checks += [
                replace(c, batch_size=None, reason=f"at the shape corner {label}: {c.reason}") for c in corner_checks
            ]
    return checks


def _whole_predict(
    worker: Worker, job: Job, artifact: Artifact, gates: tuple[Gate, ...], validation: ValidationSet
) -> list[Check]:
    """The original's own predict() with the artifact in its network's place, beside the same with the network."""
    if validation.original is None:
        return []
    from compile_stage.measure.whole_predict import PREDICT, judge_predict

    with temporary_folder("predict") as folder:
        try:
            answers = worker.call(
                "predict_whole",
                source=validation.original,
                columns={"path": str(Path(validation.samples.path) / RAW)},
                artifact=artifact,
                target=job.target,
                rounds=_PREDICT_ROUNDS,
                into=folder,
            )
        except (SourceError, WorkerError) as error:
            if isinstance(error, WorkerError) and error.worker_is_gone:
                raise
            gate = Gate(metric=PREDICT, limit=0.0, direction="at_most")
            return [replace(_not_run(gate, f"predict() can't be called around it: {error.problem}"))]
        return judge_predict(gates, answers, validation.data.seed)


def _located(checks: tuple[Check, ...], gates: tuple[Gate, ...]) -> Verdict:
    """The gates as the policy wrote them, with file and line; a gate of our own making stays as it is."""
    written = {canonical_json(replace(gate, origin="")): gate for gate in gates}
    return Verdict(
        checks=tuple(replace(check, gate=written.get(canonical_json(check.gate), check.gate)) for check in checks)
    )


def _not_run(gate: Gate, reason: str) -> Check:
    return Check(gate=gate, outcome=Outcome.NOT_RUN, measured=None, reason=reason)
