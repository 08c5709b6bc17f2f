"""Artifact against the FP32 baseline, on real samples → verdict."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
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
    SampleSet,
    SourceModel,
    Target,
    Verdict,
    record,
)
from compile_stage.core.sample_files import RAW, digest_of_samples

_STEP = "validate/6"
_PREDICT_ROUNDS = 31  # pairs of calls of predict()
_OUTPUTS = Gate(metric="outputs", limit=0.0, direction="at_most")  # how many outputs may be lost, renamed or misshapen


@record
class Calls:
    """Attributes:
    made: `{"check", "rows"}` each.
    answers: What `measure.behaviour.make_calls` says of the original.
    """

    made: tuple[Mapping[str, Any], ...]
    answers: Mapping[str, Any]


@record
class OtherSamples:
    """One kind of `measure.robustness`.

    Attributes:
        outputs: Output name → `.npy` file of the original's answers.
        rows: Those that have a finite answer.
    """

    kind: str
    samples: SampleSet
    outputs: Mapping[str, str]
    rows: tuple[int, ...]


@record
class Reference:
    """What the original model answers.

    Attributes:
        outputs: Output name → `.npy` file, axis 0 being the sample.
        corners: The same at each corner of the policy's shapes that the samples do not have themselves, and between
            them.
        path: The folder of all these files, whose digest it is.
        sample_s: Seconds that a warm call took for each of its samples: an idea, no measurement.
        distinct: How many samples differ, and have a finite answer.
        calls: The calls that show how a model behaves (`measure.behaviour`), and what the original made of them.
        robustness: Samples beyond those of the validation set, by kind, and the original's answers.
    """

    outputs: Mapping[str, str]
    corners: tuple[Mapping[str, Any], ...]
    digest: str
    batch_size: int
    sample_s: float
    path: str
    distinct: int
    calls: Calls
    robustness: tuple[OtherSamples, ...]


def reference(
    context: Context,
    worker: Worker,
    source: SourceModel,
    samples: SampleSet,
    data: Data,
    target: Target,
) -> Reference:
    """Run the original over all samples once, at the largest batch size, since it is mostly the slowest of all:
    artifacts must agree with it at every batch size.

    Args:
        data: What the policy says of samples: the seed, and how many are made beside them.
        target: Its device is where the original runs (`core.baseline.reference_target`).
    """
    from compile_stage.measure.behaviour import calls_to_compare

    calls = calls_to_compare(samples.count, target.batch_sizes, data.seed)
    batch_sizes = list(target.batch_sizes)
    batch_size = max(batch_sizes)
    key = {
        "source": source.identity,
        "samples": samples.digest,
        "batch_size": batch_size,
        "batch_sizes": batch_sizes,
        "calls": calls,
        "seed": data.seed,
        "robustness": data.robustness.samples if data.robustness else 0,
        "shapes": target.shapes,
        "threads": target.threads,
        "device": target.device,
        "made_by": plugins.cache_identity("sources", source.flavor),
        "hardware": context.hardware,
    }

    def make(into: Path) -> dict[str, Any]:
        from compile_stage.measure.predict import open_outputs
        from compile_stage.measure.samples import count_distinct, open_samples

        worker.call("open_source", source=source, target=target)
        outputs = worker.call("predict", samples=samples, batch_size=batch_size, into=str(into))
        turn = worker.call("quick_turn", samples=samples, batch_size=batch_size, seconds=0.0)
        corners = worker.call(
            "predict_corners", samples=samples, shapes=target.shapes, batch_sizes=batch_sizes, into=str(into)
        )
        return {
            "outputs": _below(outputs, into),
            "corners": [{**c, "outputs": _below(c["outputs"], into)} for c in corners],
            "sample_s": min(turn) / batch_size,
            "distinct": count_distinct(open_samples(samples), open_outputs(outputs)),
            "calls": _answers_below(
                worker.call("make_calls", samples=samples, calls=calls, into=str(into / "calls")), into
            ),
            "robustness": list(_other_samples(worker, samples, data, batch_size, into)),
        }

    stored = context.cached("reference/6", "", key, make)
    here = Path(stored.path)
    return Reference(
        outputs=_above(stored.value["outputs"], here),
        corners=tuple({**c, "outputs": _above(c["outputs"], here)} for c in stored.value["corners"]),
        digest=stored.digest,
        path=stored.path,
        batch_size=batch_size,
        sample_s=stored.value["sample_s"],
        distinct=stored.value["distinct"],
        calls=Calls(made=tuple(calls), answers=_answers_above(stored.value["calls"], here)),
        robustness=tuple(_placed(revive(OtherSamples, kind), here) for kind in stored.value["robustness"]),
    )


def _other_samples(
    worker: Worker, samples: SampleSet, data: Data, batch_size: int, into: Path
) -> Iterator[OtherSamples]:
    """Each kind with the original's answers, paths being relative to `into`. A kind that the original refuses, such as
    values that it was not trained for, is left out."""
    if data.robustness is None or not samples.real or samples.count == 0:
        return
    from compile_stage.measure.predict import open_outputs
    from compile_stage.measure.robustness import answered, other_samples, write_samples
    from compile_stage.measure.samples import open_samples

    count = min(data.robustness.samples, max(10, samples.count // 4))
    for kind, batch in other_samples(open_samples(samples), count, data.seed).items():
        made = write_samples(batch, samples, into / "robustness" / kind)
        try:
            # Not below the samples' folder: that is handed to whoever runs the candidate.
            answers = str(into / "robustness-answers" / kind)
            outputs = worker.call("predict", samples=made, batch_size=batch_size, into=answers)
        except WorkerError as error:
            if error.kind != "exception":
                raise
            continue
        except SourceError:
            continue
        rows = tuple(int(row) for row in answered(open_outputs(outputs)).nonzero()[0])
        if rows:
            below = replace(made, path=Path(made.path).relative_to(into).as_posix())
            yield OtherSamples(kind=kind, samples=below, outputs=_below(outputs, into), rows=rows)


def _placed(other: OtherSamples, root: Path) -> OtherSamples:
    samples = replace(other.samples, path=str(root / other.samples.path))
    return replace(other, samples=samples, outputs=_above(other.outputs, root))


def _answers_below(made: Mapping[str, Any], root: Path) -> dict[str, Any]:
    answers = [files and _below(files, root) for files in made["answers"]]
    return {**made, "answers": answers}


def _answers_above(made: Mapping[str, Any], root: Path) -> dict[str, Any]:
    answers = [files and _above(files, root) for files in made["answers"]]
    return {**made, "answers": answers}


@record
class ValidationSet:
    """What an artifact is compared with: the samples, what the original predicts for them, and what the policy says of
    samples.

    Attributes:
        original: Of a model whose predict() is compared as a whole; None for any other.
    """

    samples: SampleSet
    reference: Reference
    data: Data
    original: SourceModel | None = None

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
            checks += _at_batch_size(worker, job, gates, validation, batch_size)
        checks += _at_corners(worker, job, gates, validation)
        checks += _whole_predict(worker, job, artifact, gates, validation)
        if not any(c.gate.metric in ("outputs", "shape") and c.outcome is not Outcome.PASS for c in checks):
            # What failed has said so: here a gate shows what is wrong with other calls and other samples alone.
            failed = [c.gate for c in checks if c.outcome is not Outcome.PASS]
            sound = tuple(gate for gate in gates if gate not in failed)
            checks += _between_calls(worker, job, sound, validation)
            checks += _on_other_samples(worker, sound, validation, job.scheme.precision)
        validation.demand_unchanged()
        if any(check.outcome is Outcome.NOT_RUN for check in checks):
            raise _NotRunError(tuple(checks))
        return Verdict(checks=tuple(checks))

    try:
        stored = context.cached(_STEP, job.id, _key(context, job, artifact, validation), make)
    except _NotRunError as not_run:  # what could not be looked at is looked at again next time
        return Validated(verdict=_located(not_run.checks, job.gates), cached=False)
    verdict: Verdict = revive(Verdict, stored.value)
    return Validated(verdict=_located(verdict.checks, job.gates), cached=stored.hit)


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
        "samples": validation.samples.digest,
        "gates": gates,
        "target": job.target,
        "data": {
            "min_samples": validation.data.min_samples,
            "seed": validation.data.seed,
            "robustness": validation.data.robustness,
        },
    }
    if any(gate.metric.startswith("python:") for gate in gates):
        key["nonce"] = secrets.token_hex(16)  # what an own metric answers can't be known without calling it
    return key


def _unplaced(gates: tuple[Gate, ...]) -> tuple[Gate, ...]:
    """Where a limit is written changes no verdict."""
    return tuple(replace(gate, origin="") for gate in gates)


class _NotRunError(Exception):
    def __init__(self, checks: tuple[Check, ...]) -> None:
        super().__init__(next(check.reason for check in checks if check.outcome is Outcome.NOT_RUN))
        self.checks = checks


def _at_batch_size(
    worker: Worker, job: Job, gates: tuple[Gate, ...], validation: ValidationSet, batch_size: int
) -> tuple[Check, ...]:
    from compile_stage.measure.claims import check_claim
    from compile_stage.measure.metrics import ComparedSamples, check_outputs
    from compile_stage.measure.predict import open_outputs
    from compile_stage.measure.samples import open_samples

    samples, data = validation.samples, validation.data
    with temporary_folder("outputs") as folder:
        try:
            written = worker.call("predict", samples=samples, batch_size=batch_size, into=folder)
        except SourceError as error:  # it answers, but with something that can't be laid beside the original's answers
            return (replace(_not_run(_OUTPUTS, error.problem), batch_size=batch_size),)
        validation.demand_unchanged()
        opened = open_samples(samples)
        own, original = open_outputs(written), open_outputs(validation.reference.outputs)
        compared = ComparedSamples(
            min_samples=data.min_samples,
            real=samples.real,
            labels=opened.labels,
            groups=opened.groups,
            distinct=validation.reference.distinct,
        )
        checks = check_outputs(gates, own, original, compared, batch_size=batch_size, seed=data.seed)
        claim = (check_claim(own, original, batch_size),) if job.scheme.precision == "fp32" else ()
        return (*checks, *claim)


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
            if isinstance(error, WorkerError) and error.kind != "exception":
                raise
            gate = Gate(metric=PREDICT, limit=0.0, direction="at_most")
            return [replace(_not_run(gate, f"predict() can't be called around it: {error.problem}"))]
        return judge_predict(gates, answers, validation.data.seed)


def _between_calls(worker: Worker, job: Job, gates: tuple[Gate, ...], validation: ValidationSet) -> list[Check]:
    """How the artifact behaves from call to call, beside the original."""
    from compile_stage.measure.behaviour import judge_calls, parts_of
    from compile_stage.measure.tolerance import elementwise_gates

    samples, calls = validation.samples, validation.reference.calls
    suited = elementwise_gates(gates, has_labels=samples.has_labels, few_rows=True)
    with temporary_folder("calls") as folder:
        answers = worker.call(
            "make_calls", samples=samples, calls=parts_of(calls.made, job.target.batch_sizes), into=folder
        )
        return judge_calls(suited, calls.made, answers, calls.answers, validation.data.seed)


def _on_other_samples(
    worker: Worker, gates: tuple[Gate, ...], validation: ValidationSet, precision: str
) -> Iterator[Check]:
    """One check for each kind of `measure.robustness`."""
    from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
    from compile_stage.measure.predict import open_outputs
    from compile_stage.measure.robustness import BEYOND_RANGES, judge_kind, moves_as_much, refused_kind, usual_gates
    from compile_stage.measure.tolerance import elementwise_gates, worst

    data, expected = validation.data, validation.reference
    if data.robustness is None:
        return
    reference = open_outputs(expected.outputs)
    for other in expected.robustness:
        rows = list(other.rows)
        with temporary_folder("robustness") as folder:
            try:
                written = worker.call("predict", samples=other.samples, batch_size=expected.batch_size, into=folder)
            except (SourceError, WorkerError) as error:
                if isinstance(error, WorkerError) and error.kind != "exception":
                    raise
                yield refused_kind(other.kind, data.robustness.factor, len(rows), error.problem)
                continue
            own, original = (
                {name: array[rows] for name, array in open_outputs(files).items()} for files in (written, other.outputs)
            )
            steady = other.kind in BEYOND_RANGES or not moves_as_much(original, reference)
            suited = elementwise_gates(gates, has_labels=validation.samples.has_labels, few_rows=steady)
            judged = [
                check_outputs(wanted, own, original, SINGLE_CALL, batch_size=expected.batch_size, seed=data.seed)
                for wanted in (suited, usual_gates(suited, other.kind, precision))
                if wanted
            ]
        if not judged:  # of its gates, none held on the validation samples: it has failed
            continue
        checks = min(judged, key=lambda checks: worst(checks)[0])
        yield judge_kind(other.kind, checks, data.robustness.factor, len(rows))


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
