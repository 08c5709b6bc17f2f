"""Move an alias, only to a published version that passed and is not slower than what it replaces."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import GateError, IntegrityError, InternalError
from compile_stage.core.records import (
    Artifact,
    Measurement,
    Receipt,
    SourceModel,
    TargetPolicy,
    TargetResult,
    Verdict,
    record,
)
from compile_stage.measure import stats
from compile_stage.serving.manifest import artifact_of, check_integrity, data_folder, validations


@record
class Incumbent:
    """What an alias points to now.

    Attributes:
        artifact: Its artifact, fetched and verified; None when the alias is free, or what it points to has the
            successor's own files.
        obstacle: Why it can't be compared with here; empty when it can.
    """

    artifact: Artifact | None = None
    obstacle: str = ""


def alias_of(target: TargetResult) -> str | None:
    """The alias that the policy moves for a target (`{target}-prod` → `cpu-server-prod`); None when it moves none."""
    template, name = target.policy.promote.alias, target.policy.target.name
    return template.replace("{target}", name) if template else None


def shipped(context: Context, source: SourceModel, target: TargetResult) -> Artifact:
    """What the version of a target's receipt holds: this run's winner, or, where the registry held a version of the
    same inputs already, the artifact of that one. What is promoted is what is looked at.

    Raises:
        GateError: That version is damaged, or its verdict holds no more.
    """
    receipt, bundle, winner = target.receipt, target.bundle, target.winner
    if receipt is None or bundle is None or winner is None or winner.artifact is None:
        raise InternalError(f"nothing was published for {target.policy.target.name}, so nothing can be promoted")
    if receipt.digest == bundle.digest:
        return winner.artifact
    registry = plugins.load("registries", source.registry)
    folder = registry.fetch(receipt.uri, Path(tempfile.mkdtemp(dir=context.scratch)) / "shipped")
    try:
        manifest = check_integrity(folder)
    except IntegrityError as error:
        raise GateError(
            f"{receipt.uri}, which holds what was made from the same inputs before, is damaged: {error.problem}"
        ) from error
    demand_passed(manifest, folder, context.today, receipt.uri)
    return artifact_of(manifest, data_folder(folder))


def demand_passed(manifest: Mapping[str, Any], folder: Path, today: date, uri: str) -> None:
    """Raise GateError unless a published model's verdict passed, and holds today: a waiver that ended waives nothing
    any more. For what could not be validated where it was compiled, a validation attached to it (in `folder`, its
    files) must have."""
    if manifest["verdict"] is not None:
        _demand(revive(Verdict, manifest["verdict"]), today, uri)
        return
    proofs = [revive(Verdict, one["verdict"]) for one in validations(manifest, folder) if one["passed"]]
    if not proofs:
        raise GateError(
            "it was compiled for hardware that was not there, and no validation is attached to it that passed, so it can't be promoted",
            fix=f"on a machine that it is for: compile-stage validate {uri}",
            where=uri,
        )
    _demand(next((proof for proof in proofs if not proof.waivers), proofs[0]), today, uri)


def _demand(verdict: Verdict, today: date, uri: str) -> None:
    if not verdict.passed:
        raise GateError("its verdict did not pass, so it can't be promoted", where=uri)
    for waiver in verdict.waivers:
        if date.fromisoformat(waiver.expires) < today:
            raise GateError(
                f"it passed under a waiver of {waiver.gate} that ended on {waiver.expires}, so it can't be promoted",
                fix=f"ask {waiver.owner} to renew the waiver in the policy, and run the stage again",
                where=uri,
            )


def incumbent(context: Context, source: SourceModel, receipt: Receipt, alias: str, successor: Artifact) -> Incumbent:
    """Fetch what the alias points to now, so that it can be measured against its successor."""
    registry = plugins.load("registries", source.registry)
    current = registry.current(receipt.name, alias)
    if current is None or current.version == receipt.version:
        return Incumbent()
    folder = registry.fetch(current.uri, Path(tempfile.mkdtemp(dir=context.scratch)) / "incumbent")
    try:
        manifest = check_integrity(folder)
    except IntegrityError as error:
        return Incumbent(obstacle=f"{current.uri} is damaged: {error.problem}")
    artifact = artifact_of(manifest, data_folder(folder))
    there = {manifest["fingerprint"]} if manifest["verdict"] is not None else set()
    there |= {one["fingerprint"] for one in validations(manifest, folder) if one["passed"]}
    if context.hardware.fingerprint not in there:
        return Incumbent(
            obstacle=f"{current.uri} was measured on {' and '.join(sorted(there))}, and this machine is {context.hardware.fingerprint}"
        )
    if (artifact.digest, artifact.options) == (successor.digest, successor.options):
        return Incumbent()
    if (absent := plugins.missing(plugins.load("backends", artifact.backend))) is not None:
        return Incumbent(obstacle=f"{current.uri} can't run here: {absent}")
    return Incumbent(artifact=artifact)


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
        return plugins.load("registries", source.registry).promote(receipt, alias)


def _refuse_slower(receipt: Receipt, alias: str, successor: Measurement | None, policy: TargetPolicy) -> None:
    max_slowdown = policy.promote.max_slowdown
    for batch_size in policy.target.batch_sizes:
        timing = successor.timing(batch_size) if successor else None
        if timing is None or timing.speedup_interval is None:
            raise GateError(
                f"alias {alias!r} was not moved to {receipt.uri}: it could not be measured against its predecessor at batch size {batch_size}"
            )
        slowest = 1 / timing.speedup_interval[0] if timing.speedup_interval[0] > 0 else float("inf")
        if slowest > max_slowdown:
            raise GateError(
                f"alias {alias!r} was not moved to {receipt.uri}: at batch size {timing.batch_size} it takes up to {slowest:.3f} times "
                f"as long as what the alias points to now, and the policy allows {max_slowdown:g}"
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
