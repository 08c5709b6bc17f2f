"""The resolved tree → `core.records.Policy`, which is all that the rest of the program ever sees of the YAML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from compile_stage.core import records
from compile_stage.core.digest import digest_of, plain
from compile_stage.core.language_models import LANGUAGE_MODELS_ONLY
from compile_stage.core.performance_keys import PERFORMANCE_KEYS
from compile_stage.policy import schema
from compile_stage.policy.checks import gate_name
from compile_stage.policy.limits import (
    Closeness,
    ColumnLimit,
    CustomLimit,
    DivergenceLimit,
    Drop,
    Increase,
    Limits,
    Performance,
    TokenShare,
    Tolerance,
    TopK,
)
from compile_stage.policy.metrics import METRICS, SERVED
from compile_stage.policy.named_files import data_file, located
from compile_stage.policy.nodes import Node, Path

_SERVED_CONFIDENCE = 0.95  # of the interval whose worse end must hold


def to_policy(document: schema.PolicyDocument, tree: Node, files: tuple[str, ...]) -> records.Policy:
    """The record of a document that has no problems left. `tree` is what it was made from, for origins."""
    policy = records.Policy(
        name=document.name,
        owner=document.owner,
        digest="",
        files=files,
        data=records.Data(
            validation=_data_spec(document.data.validation, document.data),
            calibration=_data_spec(document.data.calibration, document.data),
            min_samples=document.data.min_samples,
            seed=document.data.seed,
            robustness=_robustness(document.data.robustness),
        ),
        targets=tuple(_target(name, target, tree) for name, target in document.targets.items()),
        applies_to=records.AppliesTo(
            names=tuple(document.applies_to.names),
            tags=document.applies_to.tags,
            flavors=tuple(document.applies_to.flavors),
        ),
        budget=records.Budget(**document.budget.model_dump()),
        compliance=_compliance(document.compliance),
        waivers=tuple(_waiver(waiver) for waiver in document.waivers),
        publish_name=document.publish.name,
        elsewhere=document.publish.elsewhere,
        report=records.ReportContent(**document.report.model_dump()),
    )
    policy = replace(policy, families=_families(policy.targets))
    policy = replace(policy, digest=_digest(policy))
    trusted = tuple(map(located, tree.elements("compliance", "trusted_keys")))
    return replace(
        policy,
        data=_located_data(policy.data, tree),
        compliance=replace(policy.compliance, trusted_keys=trusted),
    )


def _robustness(robustness: schema.Robustness) -> records.Robustness | None:
    return records.Robustness(**robustness.model_dump()) if robustness.samples else None


def _families(targets: Sequence[records.TargetPolicy]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for one in targets:
        if one.family:
            found[one.family] = (*found.get(one.family, ()), one.target.name)
    return found


def _digest(policy: records.Policy) -> str:
    """Of what the policy means: not of where it was written, and of data and key files by the name that the policy
    gives them."""
    # What reports show changes nothing compiled, and what a family has is what its targets say.
    values = {key: value for key, value in plain(policy).items() if key not in ("report", "families")}
    return digest_of(_without_origins({**values, "files": [], "digest": "", "warnings": []}))


def _without_origins(value: Any) -> Any:
    if isinstance(value, dict):
        # Policies from before there were these keep their digest.
        later: dict[str, Any] = {
            "groups": None,
            "whole_groups": False,
            "approval": None,
            "approvers": [],
            "family": "",
            "elsewhere": "refuse",
            "generation": plain(records.Generation()),
            "serving": plain(records.Serving()),
        }
        kept = {key: item for key, item in value.items() if key != "origin" and later.get(key, value) != item}
        return {key: _without_origins(item) for key, item in kept.items()}
    return [_without_origins(item) for item in value] if isinstance(value, list) else value


def _data_spec(samples: schema.DataSet, data: schema.Data) -> records.DataSpec:
    return records.DataSpec(
        source=samples.source,
        labels=samples.labels,
        max_samples=samples.max_samples,
        groups=data.groups or data.queries,
        whole_groups=data.queries is not None,
    )


def _located_data(data: records.Data, tree: Node) -> records.Data:
    def with_path(spec: records.DataSpec, role: str) -> records.DataSpec:
        node = tree.get("data", role, "source")
        file = data_file(node) if node is not None else None
        return spec if file is None else replace(spec, source=f"file:{file}")

    return replace(
        data,
        validation=with_path(data.validation, "validation"),
        calibration=with_path(data.calibration, "calibration"),
    )


def _compliance(compliance: schema.Compliance) -> records.Compliance:
    allowed = compliance.allowed_backends
    return records.Compliance(
        allow_pickle=compliance.allow_pickle,
        allow_python=compliance.allow_python,
        allowed_backends=None if allowed is None else tuple(allowed),
        require_signature=compliance.require_signature,
        trusted_keys=tuple(compliance.trusted_keys),
        on_hardware_mismatch=compliance.on_hardware_mismatch,
        sandbox=compliance.sandbox,
        reuse_verdicts=compliance.reuse_verdicts,
        reuse_timings=compliance.reuse_timings,
    )


def _promotion(promote: schema.Promote) -> records.Promotion:
    return records.Promotion(**{**promote.model_dump(), "approvers": tuple(promote.approvers)})


def _waiver(waiver: schema.Waiver) -> records.Waiver:
    return records.Waiver(
        gate=gate_name(waiver.gate),
        target=waiver.target,
        reason=waiver.reason,
        owner=waiver.owner,
        expires=waiver.expires.isoformat(),
    )


def _target(name: str, target: schema.Target, tree: Node) -> records.TargetPolicy:
    path: Path = ("targets", name)
    return records.TargetPolicy(
        target=records.Target(
            name=name,
            device=target.device,
            backends=(target.backends,) if isinstance(target.backends, str) else tuple(target.backends),
            precisions=tuple(dict.fromkeys(target.precisions)),
            shapes={
                tensor: records.ShapeRange(min=tuple(s.min), typical=tuple(s.typical), max=tuple(s.max))
                for tensor, s in target.shapes.items()
            },
            batch_sizes=tuple(dict.fromkeys(target.batch_sizes)),
            threads=target.threads,
            required=target.required,
            hardware={str(key): value for key, value in target.hardware.items()},
            options=target.options,
            generation=records.Generation(**target.generation.model_dump()),
        ),
        tolerances={
            str(precision): tuple(_tolerance_gates(tolerance, tree, (*path, "tolerances", precision)))
            for precision, tolerance in target.tolerances.items()
            if tolerance is not None
        },
        performance=tuple(
            _performance_gates(target.performance, tree, (*path, "performance"), target.serving.currency)
        ),
        prefer=target.select.prefer,
        confidence_of=target.select.confidence_of,
        fallback=records.Fallback(**target.fallback.model_dump()),
        promote=_promotion(target.promote),
        ladder=target.ladder,
        serving=_serving(target.serving),
        family=target.family or "",
    )


def _serving(serving: schema.Serving) -> records.Serving:
    lists = {name: tuple(value) for name, value in serving.model_dump().items() if isinstance(value, list)}
    return records.Serving(**{**serving.model_dump(), **lists})


def _performance_gates(performance: Performance, tree: Node, path: Path, currency: str) -> Iterator[records.Gate]:
    for key, name in PERFORMANCE_KEYS.items():
        limit = getattr(performance, key)
        if limit is not None:
            metric = METRICS[name]
            origin = tree.place_of((*path, key)).origin
            unit = currency if metric.unit == "currency" else metric.unit
            gate = records.Gate(metric=name, limit=limit, direction=metric.direction, unit=unit, origin=origin)
            yield replace(gate, confidence=_SERVED_CONFIDENCE) if name in SERVED else gate


def _tolerance_gates(tolerance: Tolerance, tree: Node, path: Path) -> Iterator[records.Gate]:
    yield from _limit_gates(tolerance, tree, path, None)
    for output, limits in (tolerance.outputs or {}).items():
        if limits is not None:
            yield from _limit_gates(limits, tree, (*path, "outputs", output), output)


def _limit_gates(limits: Limits, tree: Node, path: Path, output: str | None) -> Iterator[records.Gate]:
    values = {name: getattr(limits, name) for name in type(limits).model_fields if name != "outputs"}
    for metric, value in {**values, **(limits.model_extra or {})}.items():
        if value is not None:
            place = tree.place_of((*path, metric))
            gate = _gate(metric, value, output, place.origin)
            if place.is_shipped and metric in METRICS and METRICS[metric].family == "tokens":
                gate = replace(gate, options={**gate.options, LANGUAGE_MODELS_ONLY: True})
            elif place.is_shipped and "drop" in gate.options:
                gate = replace(gate, options={**gate.options, "classes_only": True})
            yield gate


def _gate(metric: str, value: Any, output: str | None, origin: str) -> records.Gate:
    if isinstance(value, CustomLimit):
        return records.Gate(
            metric=metric,
            limit=value.limit,
            direction=value.direction,
            output=output,
            confidence=value.confidence,
            origin=origin,
        )
    known = METRICS[metric]
    limit, confidence, options = _limit(value)
    return records.Gate(
        metric=metric,
        limit=limit,
        direction=known.direction,
        unit=known.unit,
        output=output,
        confidence=confidence,
        options=options,
        origin=origin,
    )


def _limit(value: Any) -> tuple[float, float | None, dict[str, Any]]:
    """(limit, confidence, options) of one limit in its written-out form."""
    match value:
        case Drop(max_drop=float(limit)):
            return limit, value.confidence, {"drop": "max_drop", **_how(value)}
        case Drop(max_relative_drop=float(limit)):
            return limit, value.confidence, {"drop": "max_relative_drop", **_how(value)}
        case Closeness():
            return 1.0, None, {"rtol": value.rtol, "atol": value.atol}
        case TopK():
            return value.limit, None, {"k": value.k}
        case ColumnLimit():
            return value.limit, None, {"floor": value.floor}
        case DivergenceLimit() | TokenShare():
            return value.limit, value.confidence, {}
        case Increase():
            return value.max_relative_increase, value.confidence, {"drop": "max_relative_drop"}
    return float(value), None, {}


def _how(drop: Drop) -> dict[str, Any]:
    """The options of the metric of that kind of drop, beside the limit."""
    own = type(drop).model_fields.keys() - Drop.model_fields.keys()
    return {key: value for key in sorted(own) if (value := getattr(drop, key)) is not None}
