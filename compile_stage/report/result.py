"""`result.json`: the whole truth of a run, under names that others rely on.

The fields of `docs/result.md` keep their name and meaning within `compile-stage/result/v1`; more may be added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import plain
from compile_stage.core.records import (
    Bundle,
    Candidate,
    Check,
    Measurement,
    Receipt,
    Refusal,
    Replacement,
    RunResult,
    SampleSet,
    TargetResult,
    Timing,
    Trial,
    Waiver,
)
from compile_stage.core.redaction import redacted
from compile_stage.report.option_tuning import OptionTuningRow, option_tuning_rows
from compile_stage.report.profiles import profile_document
from compile_stage.report.serving import serving_document
from compile_stage.report.summary import reason_of, state_of
from compile_stage.serving.variants import every_variant, holds_variants

if TYPE_CHECKING:
    from compile_stage.measure.token_times import TokenTimes

SCHEMA = "compile-stage/result/v1"

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # one for all: `dumps` makes a new one at each call
_PERCENTILES = {"p50_s": 0.5, "p90_s": 0.9, "p95_s": 0.95, "p99_s": 0.99}


def result_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every `result.json` of this version satisfies."""
    text = files("compile_stage.report").joinpath("result-v1.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def result_text(result: RunResult) -> str:
    """The content of `result.json`: indented, keys in the documented order, ending in a newline."""
    return _indented(result_document(result), "\n") + "\n"


def _indented(value: Any, newline: str) -> str:
    """JSON for people, without secrets: a list of plain values, such as tens of thousands of timings, stands on one
    line."""
    deeper = newline + "  "
    if isinstance(value, dict) and value:
        items = [f"{_indented(key, deeper)}: {_indented(item, deeper)}" for key, item in value.items()]
        return "{" + deeper + f",{deeper}".join(items) + newline + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[" + deeper + f",{deeper}".join(_indented(item, deeper) for item in value) + newline + "]"
    written = _ENCODER.encode(value)
    # Hundreds of thousands of timings hold no secret, and to look for one takes longer than to write them.
    return redacted(written) if '"' in written else written


def result_document(result: RunResult) -> dict[str, Any]:
    """A run as plain JSON values. A measured NaN or infinity is a string, since JSON has no such number."""
    source, policy = result.source, result.policy
    document = {
        "schema": SCHEMA,
        "status": result.status,
        "exit_code": result.exit_code,
        "problem": result.problem or None,
        "started_at": result.started_at or None,
        "source": {
            "uri": source.uri,
            "name": source.name,
            "version": source.version,
            "digest": source.digest,
            "flavor": source.flavor,
            "registry": source.registry,
            "logged_model_id": source.logged_model_id,
            "run_id": source.run_id,
        },
        "policy": {
            "name": policy.name,
            "owner": policy.owner,
            "digest": policy.digest,
            "files": policy.files,
            "warnings": policy.warnings,
            "values": result.policy_values,
        },
        "environment": result.environment,
        "data": {role: _samples(samples) for role, samples in result.samples.items()},
        "targets": [_target(result, target) for target in result.targets],
        "baseline": _baseline(result),
        "duration_s": result.duration_s,
        "events": result.events,
        "notes": result.notes,
    }
    plain_document: dict[str, Any] = plain(document)
    return plain_document


def timing_summary(timing: Timing) -> dict[str, Any]:
    """One batch size, without the raw samples."""
    from compile_stage.measure.quantiles import percentiles

    found = percentiles(timing, list(_PERCENTILES.values()))
    summary: dict[str, Any] = dict(zip(_PERCENTILES, found, strict=True))
    median = summary["p50_s"]
    from compile_stage.measure.token_times import token_times

    times = token_times(timing)
    of_tokens = {} if times is None else {"tokens": _token_times(times)}
    return (
        summary
        | of_tokens
        | {
            "throughput_per_s": timing.batch_size / median if median else None,
            "speedup": timing.speedup,
            "speedup_interval": timing.speedup_interval,
            "mean_speedup_interval": timing.mean_speedup_interval,
            "rounds": timing.rounds,
            "processes": len(set(timing.processes)) or None,
            "stable": timing.stable,
            "cpu_per_call_s": timing.cpu_per_call_s,
            "threads": timing.threads or None,
            "hardware_fingerprint": timing.environment,
        }
    )


def _token_times(times: TokenTimes) -> dict[str, Any]:
    """Of a language model: [value, low, high] of each."""
    named = {
        "ttft_s": times.first_s,
        "tpot_s": times.next_s,
        "ttft_p95_s": times.first_p95_s,
        "tpot_p95_s": times.next_p95_s,
        "tokens_per_s": times.tokens_per_s,
    }
    return {key: None if known is None else [known.value, known.low, known.high] for key, known in named.items()}


def _samples_s(calls: Sequence[float]) -> list[float]:
    """Every call. No clock ticks finer than a nanosecond: further digits are noise of a subtraction, and half of the
    file."""
    import numpy as np

    rounded: list[float] = np.round(np.asarray(calls, dtype=np.float64), 9).tolist()
    return rounded


def _target(result: RunResult, target: TargetResult) -> dict[str, Any]:
    selection, spec = target.selection, target.policy.target
    seen = {candidate.job.id for candidate in target.candidates}
    refused = [r for r in result.refused if r.target == spec.name and r.job_id not in seen]
    return {
        "name": spec.name,
        "required": spec.required,
        "device": spec.device,
        "threads": spec.threads,
        "batch_sizes": spec.batch_sizes,
        "prefer": target.policy.prefer,
        "confidence_of": target.policy.confidence_of,
        **({"family": target.policy.family} if target.policy.family else {}),
        "data": {role: _samples(samples) for role, samples in target.samples.items()},
        "winner": selection.winner,
        "reason": selection.reason if selection.winner is None else None,
        "receipt": _receipt(target.receipt),
        "bundle": _bundle(target.bundle),
        "drafts": [
            {
                "job_id": unvalidated.job_id,
                "receipt": _receipt(unvalidated.receipt),
                "bundle": _bundle(unvalidated.bundle),
            }
            for unvalidated in target.unvalidated
        ],
        "candidates": [_candidate(target, c) for c in target.candidates] + [_refusal(r) for r in refused],
        "ladder": [_tuning_row(row) for row in option_tuning_rows(result, target)],
        "worst_samples": target.previews,
        **({"texts": target.texts} if target.texts else {}),
        "replaced": _replaced(target.replaced),
        "predict_speedup": target.predict_speedup,
        **({"serving": serving_document(target.serving)} if target.serving is not None else {}),
        "profiles": profile_document(spec.name, target.profiles) if target.profiles else None,
    }


def _tuning_row(row: OptionTuningRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "name": row.what,
        "job_id": row.job_id or None,
        "climbed": row.accepted,
        "tried": row.tried,
        "reason": row.reason or None,
        "options": row.options,
        "p50_s": row.p50_s,
        "speedup": row.speedup,
        "speedup_interval": row.speedup_interval,
        "peak_memory_bytes": row.peak_memory_bytes,
        "size_bytes": row.size_bytes,
        "error": None if row.error is None else _check(row.error),
    }


def _replaced(replaced: Replacement | None) -> dict[str, Any] | None:
    if replaced is None:
        return None
    return {
        "alias": replaced.alias,
        "uri": replaced.uri,
        "timing": _measurement(replaced.measurement),
        "note": replaced.note or None,
    }


def _receipt(receipt: Receipt | None) -> dict[str, Any] | None:
    if receipt is None:
        return None
    return {
        "uri": receipt.uri,
        "name": receipt.name,
        "version": receipt.version,
        "digest": receipt.digest,
        "alias": receipt.promoted_to,
        "previous": receipt.previous,
        "created": receipt.created,
        "note": receipt.note,
    }


def _bundle(bundle: Bundle | None) -> dict[str, Any] | None:
    if bundle is None:
        return None
    variants = [_variant(one) for one in every_variant(bundle.manifest)] if holds_variants(bundle.manifest) else []
    known = {"digest": bundle.digest, "key": bundle.key, "name": bundle.name}
    return {**known, "variants": variants} if variants else known


def _variant(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": manifest["variant"],
        "target": manifest["target"]["name"],
        "backend": manifest["artifact"]["backend"],
        "precision": manifest["scheme"]["precision"],
        "fingerprint": manifest["fingerprint"],
        "proven": manifest["verdict"] is not None,
    }


def _candidate(target: TargetResult, candidate: Candidate) -> dict[str, Any]:
    job, artifact, failure = candidate.job, candidate.artifact, candidate.failure
    portable = candidate.portable
    return {
        "job_id": job.id,
        "backend": job.backend,
        "precision": job.scheme.precision,
        "scheme": job.scheme.name,
        "form": portable.form if portable is not None else None,
        "state": state_of(target, candidate),
        "reason": reason_of(target, candidate),
        "error": None
        if failure is None
        else {
            "kind": failure.kind,
            "step": failure.step,
            "problem": failure.problem,
            "detail": failure.detail or failure.problem,
        },
        "kept": portable.kept if portable is not None else {},
        "trials": [_trial(trial) for trial in candidate.trials],
        "cache": candidate.cache,
        "verdict": None
        if candidate.verdict is None
        else {
            "passed": candidate.verdict.passed,
            "checks": [_check(check) for check in candidate.verdict.checks],
            "waivers": [_waiver(waiver) for waiver in candidate.verdict.waivers],
        },
        "sample_errors": candidate.errors,
        "timing": _measurement(candidate.measurement),
        "size_bytes": artifact.size_bytes if artifact is not None else None,
        "compile_s": candidate.compile_s,
        "artifact_digest": artifact.digest if artifact is not None else None,
        "toolchain": artifact.toolchain if artifact is not None else {},
        "executed": artifact.executed if artifact is not None else {},
        "notes": [
            *(portable.notes if portable is not None else ()),
            *(artifact.notes if artifact is not None else ()),
            *(candidate.measurement.notes if candidate.measurement is not None else ()),
        ],
    }


def _refusal(refusal: Refusal) -> dict[str, Any]:
    """A job that the plan refused, in the shape of a candidate."""
    return {
        "job_id": refusal.job_id,
        "backend": refusal.backend,
        "precision": refusal.precision,
        "scheme": None,
        "form": None,
        "state": "refused",
        "reason": refusal.reason,
        "error": None,
        "kept": {},
        "trials": [],
        "cache": {},
        "verdict": None,
        "sample_errors": [],
        "timing": None,
        "size_bytes": None,
        "compile_s": 0.0,
        "artifact_digest": None,
        "toolchain": {},
        "executed": {},
        "notes": [],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "kept": trial.kept,
        "float_type": trial.float_type,
        "passed": trial.passed,
        "decisive": None if trial.decisive is None else _check(trial.decisive),
        "latency_s": trial.latency_s,
        "problem": trial.problem or None,
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "metric": check.gate.metric,
        "output": check.output,
        "batch_size": check.batch_size,
        "limit": check.gate.limit,
        "direction": check.gate.direction,
        "unit": check.gate.unit,
        "confidence": check.gate.confidence,
        "options": check.gate.options,
        "measured": check.measured,
        "interval": check.interval,
        "samples": check.samples,
        "worst_samples": check.worst,
        "outcome": check.outcome,
        "reason": check.reason,
        "waiver": None if check.waived is None else _waiver(check.waived),
        "origin": check.gate.origin,
    }


def _waiver(waiver: Waiver) -> dict[str, Any]:
    return {
        "gate": waiver.gate,
        "target": waiver.target,
        "reason": waiver.reason,
        "owner": waiver.owner,
        "expires": waiver.expires,
    }


def _measurement(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    return {
        "by_batch": {
            str(timing.batch_size): timing_summary(timing)
            | {
                "samples_s": _samples_s(timing.latency_s),
                **(
                    {"first_token_s": _samples_s(timing.first_s), "new_tokens": timing.new_tokens}
                    if timing.first_s
                    else {}
                ),
                "cpu_s": timing.cpu_s,
                "calls_of_rounds": timing.turns,
                "process_of_rounds": timing.processes,
                "dropped_rounds": timing.disturbed,
            }
            for timing in measurement.timings
        },
        "load_s": measurement.load_s,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "stopped_early": measurement.stopped_early or None,
        "tries": measurement.tries,
        "notes": measurement.notes,
    }


def _baseline(result: RunResult) -> dict[str, Any]:
    by_target: Mapping[str, Any] = {name: _measurement(taken) for name, taken in result.baseline.items()}
    return {
        "framework": result.baseline_framework,
        # The first target's, which is the only one of most policies; threads and batch sizes differ by target.
        "timing": next(iter(by_target.values()), None),
        "by_target": by_target,
    }


def _samples(samples: SampleSet) -> dict[str, Any]:
    return {
        "source": samples.source,
        "count": samples.count,
        "real": samples.real,
        "has_labels": samples.has_labels,
        "groups": samples.groups or None,
        "digest": samples.digest,
        "notes": samples.notes,
    }
