"""`result.json` → the records that reports are drawn from, so that a report can be made again without a run.

What reports don't show is not in the file, and is empty in these records: they are for reports alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.records import (
    Artifact,
    Bundle,
    Candidate,
    Check,
    Data,
    DataSpec,
    Event,
    Failure,
    Gate,
    Job,
    JsonMap,
    Measurement,
    OptimizationStep,
    Outcome,
    OutputErrors,
    Policy,
    PolicyValue,
    PortableModel,
    PredictSpeedup,
    Profile,
    Profiled,
    Receipt,
    Refusal,
    Replacement,
    RunResult,
    SamplePreview,
    SampleSet,
    Scheme,
    Selection,
    ServingCost,
    SourceModel,
    Target,
    TargetPolicy,
    TargetResult,
    Timing,
    Trial,
    UnvalidatedBundle,
    Verdict,
    Waiver,
    WrittenText,
)
from compile_stage.core.tensors import Signature
from compile_stage.report.result import SCHEMA, result_json_schema

_NO_SIGNATURE = Signature(inputs=(), outputs=())


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a `result.json`, or of that in a folder. Raises UsageError for a file that is none."""
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    try:
        document = read_json_object(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)  # its path is said
        raise UsageError(f"it can't be read: {why}", where=str(path), fix="name a result.json of a run") from error
    if document.get("schema") != SCHEMA:
        raise UsageError(f"it is not a {SCHEMA}", where=str(path), fix="name a result.json of a run")
    if (mistake := best_match(Draft202012Validator(result_json_schema()).iter_errors(document))) is not None:
        problem = f"it does not hold to {SCHEMA}: {mistake.json_path}: {mistake.message[:200]}"
        raise UsageError(problem, where=str(path), fix="name a result.json as a run wrote it")
    return document


def read_result(path: str | os.PathLike[str]) -> RunResult:
    """The result in a `result.json`, or in that of a folder. Raises UsageError for a file that is none."""
    document = read_document(path)
    try:
        return result_of(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"a field of it can't be read: {error}", where=str(path), fix="name a result.json as a run wrote it"
        ) from error


def result_of(document: JsonMap) -> RunResult:
    """The records of a document that holds to the schema."""
    policy = document["policy"]
    targets = tuple(_target(target) for target in document["targets"])
    none = DataSpec(source="")
    return RunResult(
        status=document["status"],
        exit_code=document["exit_code"],
        problem=document.get("problem") or "",
        started_at=document.get("started_at") or "",
        source=SourceModel(**_texts(document["source"]), path=""),
        policy=Policy(
            name=policy["name"],
            owner=policy["owner"],
            digest=policy["digest"] or "",
            files=tuple(policy["files"]),
            data=Data(validation=none, calibration=none),
            targets=tuple(target.policy for target in targets),
            warnings=tuple(policy.get("warnings", ())),
        ),
        policy_values=revive(tuple[PolicyValue, ...], policy.get("values", [])),
        environment=document["environment"],
        targets=targets,
        refused=tuple(
            Refusal(
                job_id=one["job_id"],
                target=target["name"],
                backend=one["backend"],
                precision=one["precision"],
                reason=one["reason"],
            )
            for target in document["targets"]
            for one in target["candidates"]
            if one["scheme"] is None
        ),
        baseline_framework=document["baseline"]["framework"],
        baseline={
            name: taken
            for name, one in document["baseline"].get("by_target", {}).items()
            if (taken := _measurement(one)) is not None
        },
        samples={role: _samples(samples) for role, samples in document["data"].items()},
        duration_s=document["duration_s"],
        events=revive(tuple[Event, ...], document["events"]),
        notes=tuple(document["notes"]),
    )


def _texts(source: JsonMap) -> dict[str, Any]:
    names = ("uri", "name", "version", "digest", "flavor", "registry", "logged_model_id", "run_id")
    return {name: source[name] for name in names if source.get(name) is not None}


def _target(target: JsonMap) -> TargetResult:
    where = Target(
        name=target["name"],
        device=target.get("device", "cpu"),
        threads=target.get("threads", 1),
        batch_sizes=tuple(target.get("batch_sizes", (1,))),
        required=target["required"],
    )
    tried = [one for one in target["candidates"] if one["scheme"] is not None]
    return TargetResult(
        policy=TargetPolicy(target=where, tolerances={}, performance=(), prefer=target["prefer"]),
        candidates=tuple(_candidate(one, where) for one in tried),
        selection=Selection(
            target=where.name,
            winner=target["winner"],
            reason=target["reason"] or next((c["reason"] for c in tried if c["job_id"] == target["winner"]), ""),
            states={one["job_id"]: one["state"] for one in tried},
            reasons={one["job_id"]: one["reason"] for one in tried},
        ),
        samples={role: _samples(samples) for role, samples in target.get("data", {}).items()},
        bundle=_bundle(target["bundle"], where.name),
        receipt=_receipt(target["receipt"]),
        unvalidated=tuple(_unvalidated(one, where.name) for one in target.get("drafts", ())),
        ladder=tuple(_step(step) for step in target.get("ladder", ())),
        previews=revive(tuple[SamplePreview, ...], target.get("worst_samples", [])),
        texts=revive(tuple[WrittenText, ...], target.get("texts", [])),
        replaced=_replaced(target.get("replaced")),
        predict_speedup=revive(PredictSpeedup | None, target.get("predict_speedup")),
        serving=revive(ServingCost | None, target.get("serving")),
        profiles=tuple(_profiles(target.get("profiles") or {"models": {}})),
    )


def _profiles(profiles: JsonMap) -> Iterator[Profiled]:
    for name, one in profiles["models"].items():
        yield Profiled(
            name=name,
            runtime=one["runtime"],
            profile=revive(Profile, one["profile"]) if one["profile"] is not None else None,
            reason=one["reason"] or "",
            trace=one["trace"] or "",
        )


def _unvalidated(draft: JsonMap, target: str) -> UnvalidatedBundle:
    bundle = _bundle(draft["bundle"], target)
    if bundle is None:
        raise ValueError("a draft without a bundle")
    return UnvalidatedBundle(job_id=draft["job_id"], bundle=bundle, receipt=_receipt(draft["receipt"]))


def _replaced(replaced: JsonMap | None) -> Replacement | None:
    if replaced is None:
        return None
    return Replacement(
        alias=replaced["alias"],
        uri=replaced["uri"],
        measurement=_measurement(replaced["timing"]),
        note=replaced["note"] or "",
    )


def _step(step: JsonMap) -> OptimizationStep:
    return OptimizationStep(
        kind=step["kind"],
        name="" if step["kind"] == "original" else step["name"],
        job_id=step["job_id"] or "",
        accepted=step["climbed"],
        tried=step["tried"] if "tried" in step else _was_tried(step),
        reason=step["reason"] or "",
        options=step["options"],
        speedup=step["speedup"],
        speedup_interval=_pair(step["speedup_interval"]),
    )


def _was_tried(step: JsonMap) -> bool:
    """Of a step in a file that has no field for it: such files say so of a setting in the reason alone."""
    return step["climbed"] or step["job_id"] is not None or (step["reason"] or "").startswith("rejected:")


def _bundle(bundle: JsonMap | None, target: str) -> Bundle | None:
    if bundle is None:
        return None
    return Bundle(
        path="", digest=bundle["digest"], key=bundle["key"], target=target, name=bundle["name"], manifest={}, tags={},
        metrics={}, params={},
    )  # fmt: skip


def _receipt(receipt: JsonMap | None) -> Receipt | None:
    if receipt is None:
        return None
    return Receipt(
        uri=receipt["uri"],
        name=receipt["name"],
        version=receipt["version"],
        digest=receipt["digest"],
        created=receipt["created"],
        promoted_to=receipt["alias"],
        previous=receipt.get("previous"),
        note=receipt.get("note") or "",
    )


def _samples(samples: JsonMap) -> SampleSet:
    return SampleSet(
        path="",
        digest=samples.get("digest") or "",
        count=samples["count"],
        real=samples["real"],
        source=samples["source"],
        has_labels=samples.get("has_labels", False),
        notes=tuple(samples.get("notes", ())),
        groups=samples.get("groups") or 0,
    )


def _candidate(one: JsonMap, target: Target) -> Candidate:
    scheme = Scheme(precision=one["precision"], name=one["scheme"], native=one["precision"] == "fp32")
    verdict, error = one["verdict"], one["error"]
    return Candidate(
        job=Job(id=one["job_id"], source="", target=target, backend=one["backend"], scheme=scheme, gates=()),
        state=one["state"],
        reason=one["reason"],
        portable=_portable(one),
        artifact=_artifact(one),
        verdict=None if verdict is None else Verdict(checks=tuple(map(_check, verdict["checks"]))),
        measurement=_measurement(one["timing"]),
        failure=None if error is None else revive(Failure, error),
        compile_s=one["compile_s"],
        cache=one["cache"],
        trials=tuple(map(_trial, one.get("trials", ()))),
        errors=revive(tuple[OutputErrors, ...], one.get("sample_errors", [])),
    )


def _portable(one: JsonMap) -> PortableModel | None:
    if one.get("form") is None:
        return None
    return PortableModel(
        path="", digest="", form=one["form"], opset=0, precision=one["precision"], signature=_NO_SIGNATURE,
        kept={precision: tuple(nodes) for precision, nodes in one["kept"].items()},
        notes=() if one["artifact_digest"] is not None else tuple(one["notes"]),
    )  # fmt: skip


def _artifact(one: JsonMap) -> Artifact | None:
    if one["artifact_digest"] is None:
        return None
    return Artifact(
        path="", entry="", digest=one["artifact_digest"], job_id=one["job_id"], backend=one["backend"],
        precision=one["precision"], toolchain=one["toolchain"], hardware="", signature=_NO_SIGNATURE,
        size_bytes=one["size_bytes"], executed=one["executed"], notes=tuple(one["notes"]),
    )  # fmt: skip


def _trial(trial: JsonMap) -> Trial:
    return Trial(
        kept=tuple(trial["kept"]),
        float_type=trial["float_type"],
        passed=trial["passed"],
        decisive=None if trial["decisive"] is None else _check(trial["decisive"]),
        latency_s=trial["latency_s"],
        problem=trial["problem"] or "",
    )


def _check(check: JsonMap) -> Check:
    waiver, measured = check.get("waiver"), check["measured"]
    return Check(
        gate=Gate(
            metric=check["metric"],
            limit=float(check["limit"]),
            direction=check["direction"],
            unit=check.get("unit") or "",
            confidence=check.get("confidence"),
            options=check.get("options") or {},
            origin=check.get("origin") or "",
        ),
        outcome=Outcome(check["outcome"]),
        measured=None if measured is None else float(measured),
        reason=check["reason"],
        output=check["output"],
        batch_size=check["batch_size"],
        interval=_pair(check.get("interval")),
        samples=check.get("samples", 0),
        worst=tuple(check.get("worst_samples", ())),
        waived=None if waiver is None else revive(Waiver, waiver),
    )


def _measurement(timing: JsonMap | None) -> Measurement | None:
    if timing is None:
        return None
    return Measurement(
        timings=tuple(_timing(int(size), one) for size, one in timing["by_batch"].items()),
        load_s=timing["load_s"],
        peak_memory_bytes=timing["peak_memory_bytes"],
        stopped_early=timing.get("stopped_early") or "",
        tries=timing.get("tries", 1),
        notes=tuple(timing.get("notes", ())),
    )


def _timing(batch_size: int, timing: Mapping[str, Any]) -> Timing:
    return Timing(
        latency_s=tuple(timing["samples_s"]),
        batch_size=batch_size,
        stable=timing["stable"],
        environment=timing.get("hardware_fingerprint") or "",
        rounds=timing["rounds"],
        turns=tuple(timing.get("calls_of_rounds", ())),
        disturbed=timing.get("dropped_rounds", 0),
        speedup=timing["speedup"],
        speedup_interval=_pair(timing["speedup_interval"]),
        mean_speedup_interval=_pair(timing.get("mean_speedup_interval")),
        processes=tuple(timing.get("process_of_rounds", ())),
        cpu_s=tuple(timing.get("cpu_s", ())),
        threads=timing.get("threads") or 0,
        first_s=tuple(timing.get("first_token_s", ())),
        new_tokens=timing.get("new_tokens", 0),
    )


def _pair(interval: Any) -> tuple[float, float] | None:
    return None if interval is None else (float(interval[0]), float(interval[1]))
