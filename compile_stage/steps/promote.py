"""Move an alias, only to a published version that passed and is not slower than what it replaces."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import GateError, IntegrityError, InternalError
from compile_stage.core.provenance import refuse_code
from compile_stage.core.records import (
    Artifact,
    FetchedVersion,
    Gate,
    Job,
    Measurement,
    Receipt,
    SourceModel,
    TargetPolicy,
    TargetResult,
    Verdict,
    record,
)
from compile_stage.measure import stats
from compile_stage.measure.recompute import refuse_verdict
from compile_stage.serving.manifest import artifact_of, check_integrity, data_folder, validations
from compile_stage.serving.signatures import verify_model
from compile_stage.serving.trust import Trust


@record
class Incumbent:
    """What an alias points to now.

    Attributes:
        artifact: Its artifact, fetched and verified; None when the alias is free, or what it points to has the
            successor's own files.
        obstacle: Why it can't be compared with here; empty when it can.
        version: Of the registered model; empty when the alias is free.
        newer: What it was made from, where that is a later version of this run's source; else empty. The alias stays
            then (docs/decisions/0039).
    """

    artifact: Artifact | None = None
    obstacle: str = ""
    version: str = ""
    newer: str = ""


def alias_of(target: TargetResult) -> str | None:
    """The alias that the policy moves for a target (`{target}-prod` → `cpu-server-prod`); None when it moves none."""
    template, name = target.policy.promote.alias, target.policy.target.name
    return template.replace("{target}", name) if template else None


def shipped(context: Context, source: SourceModel, target: TargetResult, trust: Trust | None = None) -> FetchedVersion:
    """What the version of a target's receipt holds, fetched from the registry: what is promoted is what is looked at.
    Its artifact is this run's winner, or, where the registry held a version of the same inputs already, the one of
    that.

    Args:
        trust: With it, the version must be signed by somebody whom it names.

    Raises:
        GateError: That version is damaged, or its verdict holds no more.
    """
    receipt, bundle, winner = target.receipt, target.bundle, target.winner
    if receipt is None or bundle is None or winner is None or winner.artifact is None:
        raise InternalError(f"nothing was published for {target.policy.target.name}, so nothing can be promoted")
    registry = plugins.load("registries", source.registry)
    try:
        folder = registry.fetch(receipt.uri, Path(tempfile.mkdtemp(dir=context.scratch)) / "shipped")
        if trust is not None:
            verify_model(folder, trust)
        manifest = check_integrity(folder, beside=True)
    except IntegrityError as error:
        raise GateError(f"{receipt.uri}, which was to be promoted, is damaged: {error.problem}") from error
    demand_passed(manifest, folder, context.today, receipt.uri, trust)
    if trust is None and (reason := refuse_code(receipt.uri, data_folder(folder), manifest)) is not None:
        raise GateError(f"{receipt.uri}, which was to be promoted, may not be run: {reason}")
    same = receipt.digest == bundle.digest
    artifact = winner.artifact if same else artifact_of(manifest, data_folder(folder))
    return FetchedVersion(uri=receipt.uri, path=str(folder), artifact=artifact)


def demand_passed(manifest: Mapping[str, Any], folder: Path, today: date, uri: str, trust: Trust | None = None) -> None:
    """Raise GateError unless what was measured of a published model makes its verdict pass today: outcomes are derived
    again from the measurements, and a waiver that ended waives nothing any more. For what could not be validated where
    it was compiled, a validation attached to it (in `folder`, its files) must pass so, signed by somebody whom `trust`
    names where it is given."""
    if manifest["verdict"] is not None:
        if (reason := _refuse(manifest, manifest["verdict"], today)) is not None:
            raise GateError(f"{reason}, so it can't be promoted", fix=_mend(manifest), where=uri)
        return
    attached = [one for one in validations(manifest, folder, trust) if one["passed"]]
    if not attached:
        signed = " and is signed by somebody trusted" if trust is not None else ""
        raise GateError(
            "it was compiled for hardware that was not there, and no validation is attached to it that "
            f"passed{signed}, so it can't be promoted",
            fix=f"on a machine that it is for: compile-stage validate {uri}",
            where=uri,
        )
    reasons = [_refuse_validation(manifest, one, today) for one in attached]
    if all(reasons):
        raise GateError(f"{reasons[0]}, so it can't be promoted", fix=f"compile-stage validate {uri}", where=uri)


def _refuse_validation(manifest: Mapping[str, Any], validation: Mapping[str, Any], today: date) -> str | None:
    job: Job = revive(Job, manifest["job"])
    machine: Hardware = revive(Hardware, validation["hardware"])
    if (reason := machine.refuse(dict(job.target.hardware))) is not None:
        return f"its validation is of a machine that it is not for: {reason}"
    return _refuse(manifest, validation["verdict"], today)


def _refuse(manifest: Mapping[str, Any], recorded: Mapping[str, Any], today: date) -> str | None:
    performance = revive(tuple[Gate, ...], manifest.get("performance", []))
    return refuse_verdict(revive(Verdict, recorded), revive(Job, manifest["job"]), performance, today)


def _mend(manifest: Mapping[str, Any]) -> str:
    owners = sorted({waiver.owner for waiver in revive(Verdict, manifest["verdict"]).waivers})
    renewed = f", once {' and '.join(owners)} renewed the waiver in the policy" if owners else ""
    return f"run the stage again{renewed}"


def incumbent(context: Context, source: SourceModel, receipt: Receipt, alias: str, successor: Artifact) -> Incumbent:
    """Fetch what the alias points to now, so that it can be measured against its successor."""
    registry = plugins.load("registries", source.registry)
    current = registry.current(receipt.name, alias)
    if current is None or current.version == receipt.version:
        return Incumbent(version=current.version if current else "")
    return replace(_look_at(context, source, current, successor), version=current.version)


def _look_at(context: Context, source: SourceModel, current: Receipt, successor: Artifact) -> Incumbent:
    registry = plugins.load("registries", source.registry)
    try:
        folder = registry.fetch(current.uri, Path(tempfile.mkdtemp(dir=context.scratch)) / "incumbent")
        manifest = check_integrity(folder)
    except IntegrityError as error:
        return Incumbent(obstacle=f"{current.uri} is damaged: {error.problem}")
    if (newer := newer_source(manifest, source)) is not None:
        return Incumbent(newer=f"{current.uri}, made from {newer}")
    if (reason := refuse_code(current.uri, data_folder(folder), manifest)) is not None:
        return Incumbent(obstacle=f"{current.uri} may not be run: {reason}")
    artifact = artifact_of(manifest, data_folder(folder))
    there = {manifest["fingerprint"]} if manifest["verdict"] is not None else set()
    there |= {one["fingerprint"] for one in validations(manifest, folder) if one["passed"]}
    if context.hardware.fingerprint not in there:
        return Incumbent(
            obstacle=f"{current.uri} was measured on {' and '.join(sorted(there))}, and this machine is "
            f"{context.hardware.fingerprint}"
        )
    if (artifact.digest, artifact.options) == (successor.digest, successor.options):
        return Incumbent()
    if (absent := plugins.missing(plugins.load("backends", artifact.backend))) is not None:
        return Incumbent(obstacle=f"{current.uri} can't run here: {absent}")
    return Incumbent(artifact=artifact)


def newer_source(manifest: Mapping[str, Any], source: SourceModel) -> str | None:
    """The URI of what a published model was made from, where that is a later version of the same registered model as
    `source`; None where it is not, or where one of the two is no version of a registered model."""
    uri = str(manifest["source"]["uri"])
    theirs, ours = uri.rpartition("/"), source.uri.rpartition("/")
    numbered = theirs[0] == ours[0] and theirs[2].isdecimal() and ours[2].isdecimal()
    return uri if numbered and int(theirs[2]) > int(ours[2]) else None


def promote(
    context: Context,
    source: SourceModel,
    target: TargetResult,
    alias: str,
    before: Incumbent,
    successor: Measurement | None,
) -> Receipt:
    """Move the alias to what was published for a target.

    Args:
        successor: Measured with the incumbent as its baseline, so its speed-up is old time / new time.

    Raises:
        AliasMovedError: The alias no longer points to `before`.
        GateError: It is slower than what it would replace, or could not be compared with it.
    """
    receipt = target.receipt
    if receipt is None:
        raise InternalError(f"nothing was published for {target.policy.target.name}, so nothing can be promoted")
    if before.obstacle:
        raise GateError(
            f"alias {alias!r} was not moved to {receipt.uri}: {before.obstacle}, so the two can't be compared",
            fix=f"compare them yourself, then: compile-stage promote {receipt.uri} --alias {alias}",
        )
    if before.artifact is not None:
        _refuse_slower(receipt, alias, successor, target.policy)
    with context.events.step("promote", alias):
        return plugins.load("registries", source.registry).promote(receipt, alias, expected=before.version)


def _refuse_slower(receipt: Receipt, alias: str, successor: Measurement | None, policy: TargetPolicy) -> None:
    max_slowdown = policy.promote.max_slowdown
    for batch_size in policy.target.batch_sizes:
        timing = successor.timing(batch_size) if successor else None
        if timing is None or timing.speedup_interval is None:
            raise GateError(
                f"alias {alias!r} was not moved to {receipt.uri}: it could not be measured against its predecessor at "
                f"batch size {batch_size}"
            )
        slowest = 1 / timing.speedup_interval[0] if timing.speedup_interval[0] > 0 else float("inf")
        if slowest > max_slowdown:
            raise GateError(
                f"alias {alias!r} was not moved to {receipt.uri}: at batch size {timing.batch_size} it takes up to "
                f"{slowest:.3f} times as long as what the alias points to now, and the policy allows {max_slowdown:g}"
                + (
                    "" if stats.is_resolved(timing) else f"; after {timing.rounds} rounds it is not known more narrowly"
                ),
                fix="promote.max_slowdown in the policy sets the limit"
                + (
                    ""
                    if stats.is_resolved(timing)
                    else "; a quieter machine, or a larger budget.measure_seconds, narrows it"
                ),
            )
