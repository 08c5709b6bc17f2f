"""Move an alias, only to a published version that passed and is not slower than what it replaces."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.environment import Hardware
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import FilesGoneError, GateError, IntegrityError, InternalError, RegistryError
from compile_stage.core.provenance import refuse_code
from compile_stage.core.records import (
    Artifact,
    FetchedVersion,
    Gate,
    Job,
    Measurement,
    Policy,
    Receipt,
    SourceModel,
    TargetPolicy,
    TargetResult,
    Verdict,
    record,
)
from compile_stage.measure import speedups
from compile_stage.measure.recompute import refuse_published, refuse_verdict
from compile_stage.measure.request import MOST_TRIES
from compile_stage.measure.served_load import SERVED_GATES
from compile_stage.serving import approval
from compile_stage.serving.manifest import artifact_of, check_integrity, data_folder, refuse_machine, validations
from compile_stage.serving.signatures import verify_model
from compile_stage.serving.trust import Trust
from compile_stage.serving.variants import PORTABLE, every_variant, for_machine, holds_variants, proven_targets


@record
class Incumbent:
    """What an alias points to now.

    Attributes:
        artifact: Its artifact, fetched and verified; None when the alias is free, or what it points to has the
            successor's own files, options and threads.
        threads: With which that artifact serves; None when there is none.
        obstacle: Why it can't be compared with here; empty when it can.
        readable: Whether its files could be read: of one whose files are damaged or lost nobody can compare anything.
        gone: Why nobody can serve what it points to any more, so that nothing is left to compare with; else empty.
        version: Of the registered model; empty when the alias is free.
        uri: Its address; empty when the alias is free.
        path: Its model directory, where its artifact was fetched.
        newer: What it was made from, where that is a later version of this run's source; else empty. The alias stays
            then (docs/decisions/0039).
        proven: Of a version that holds a family, the targets that it holds something proven for.
        lacking: Those of them that what was published is not proven for. The alias stays then (docs/decisions/0075).
        batch_sizes: Those of its target: it is proven in batches of them.
    """

    artifact: Artifact | None = None
    threads: int | None = None
    obstacle: str = ""
    readable: bool = True
    gone: str = ""
    version: str = ""
    uri: str = ""
    newer: str = ""
    path: str = ""
    proven: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()


def where_aliases_ended(targets: Sequence[TargetResult]) -> tuple[TargetResult, ...]:
    """The targets as the run leaves them: of several that moved one alias the last has it, and the receipts of the
    others say so."""
    last: dict[tuple[str, str], tuple[str, str]] = {}  # model and alias → the version that has it, and its target
    for target in targets:
        if (receipt := target.receipt) is not None and receipt.promoted_to:
            last[receipt.name, receipt.promoted_to] = receipt.uri, target.policy.published_as
    return tuple(replace(target, receipt=_as_it_ended(target.receipt, last)) for target in targets)


def _as_it_ended(receipt: Receipt | None, last: Mapping[tuple[str, str], tuple[str, str]]) -> Receipt | None:
    if receipt is None or not receipt.promoted_to:
        return receipt
    uri, target = last[receipt.name, receipt.promoted_to]
    if uri == receipt.uri:
        return receipt
    note = f"alias {receipt.promoted_to!r} went on to {uri}, of target {target}"
    return replace(receipt, promoted_to=None, previous=None, note=note)


def lacking(policy: Policy, target: TargetResult, before: Incumbent) -> tuple[str, ...]:
    """The family's targets that what the alias points to is proven for, and what was published is not: machines of
    theirs would be left without an artifact."""
    bundle = target.bundle
    if bundle is None or not holds_variants(bundle.manifest):
        return ()
    family = policy.families.get(target.policy.family, ())
    held = proven_targets(bundle.manifest, Path(bundle.path))
    return tuple(name for name in before.proven if name in family and name not in held)


def alias_of(target: TargetResult) -> str | None:
    """The alias that the policy moves for a target (`{target}-prod` → `cpu-server-prod`); None when it moves none."""
    return target.policy.alias


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
    for variant in every_variant(manifest):
        if not holds_variants(manifest) or variant["verdict"] is not None:
            demand_passed(variant, folder, context.today, receipt.uri, trust)
    loaded = for_machine(manifest, folder, context.hardware, trust)
    if trust is None and (reason := refuse_code(receipt.uri, data_folder(folder), manifest)) is not None:
        raise GateError(f"{receipt.uri}, which was to be promoted, may not be run: {reason}")
    same = receipt.digest == bundle.digest and loaded.get("variant") == bundle.manifest.get("family", {}).get("lead")
    artifact = winner.artifact if same else artifact_of(loaded, data_folder(folder))
    return FetchedVersion(uri=receipt.uri, path=str(folder), artifact=artifact, variant=loaded.get("variant", ""))


def demand_passed(manifest: Mapping[str, Any], folder: Path, today: date, uri: str, trust: Trust | None = None) -> None:
    """Raise GateError unless what was measured of a published model makes its verdict pass today: outcomes are derived
    again from the measurements, and a waiver that ended waives nothing any more. For what could not be validated where
    it was compiled, a validation attached to it (in `folder`, its files) must pass so, signed by somebody whom `trust`
    names where it is given."""
    if manifest["verdict"] is not None:
        if (reason := refuse_published(manifest, today)) is not None:
            raise GateError(f"{reason}, so it can't be promoted", fix=_mend(manifest), where=uri)
        return
    attached = [one for one in validations(manifest, folder, trust) if one["passed"]]
    if not attached:
        signed = " and is signed by somebody trusted" if trust is not None else ""
        raise GateError(
            "it was compiled for hardware that was not there, and no validation is attached to it that "
            f"passed{signed}, so it can't be promoted",
            fix=_served_fix(manifest) or f"on a machine that it is for: compile-stage validate {uri}",
            where=uri,
        )
    reasons = [_refuse_validation(manifest, one, today) for one in attached]
    if all(reasons):
        fix = _served_fix(manifest) or f"compile-stage validate {uri}"
        raise GateError(f"{reasons[0]}, so it can't be promoted", fix=fix, where=uri)


def _served_fix(manifest: Mapping[str, Any]) -> str:
    """What to do about gates on what is served, which no validation looks at; empty where there are none."""
    asked = [gate["metric"] for gate in manifest.get("performance", []) if gate["metric"] in SERVED_GATES]
    if not asked:
        return ""
    named = " and ".join(asked)
    return (
        f"run the stage on a machine that it is for, since a validation does not measure {named}, or without that limit"
    )


def _refuse_validation(manifest: Mapping[str, Any], validation: Mapping[str, Any], today: date) -> str | None:
    job: Job = revive(Job, manifest["job"])
    machine: Hardware = revive(Hardware, validation["hardware"])
    if (reason := machine.refuse(dict(job.target.hardware))) is not None:
        return f"its validation is of a machine that it is not for: {reason}"
    performance = revive(tuple[Gate, ...], manifest.get("performance", []))
    return refuse_verdict(revive(Verdict, validation["verdict"]), job, performance, today)


def _mend(manifest: Mapping[str, Any]) -> str:
    owners = sorted({waiver.owner for waiver in revive(Verdict, manifest["verdict"]).waivers})
    renewed = f", once {' and '.join(owners)} renewed the waiver in the policy" if owners else ""
    return f"run the stage again{renewed}"


def incumbent(
    context: Context, source: SourceModel, receipt: Receipt, alias: str, successor: Artifact, threads: int
) -> Incumbent:
    """Fetch what the alias points to now, so that it can be measured against its successor.

    Args:
        threads: With which the successor serves.
    """
    registry = plugins.load("registries", source.registry)
    current = registry.current(receipt.name, alias)
    if current is None or current.version == receipt.version:
        return Incumbent(version=current.version if current else "")
    return replace(_look_at(context, source, current, successor, threads), version=current.version, uri=current.uri)


def published_now(
    context: Context, source: SourceModel, name: str, alias: str, successor: Artifact
) -> tuple[FetchedVersion | None, str]:
    """What an alias of a registered model points to now, fetched, for a comparison beside what would replace it; or
    None and why, empty where the alias is free or points to the successor's own files. Both are served with as many
    threads."""
    current = plugins.load("registries", source.registry).current(name, alias)
    if current is None:
        return None, ""
    found = _look_at(context, source, current, successor, None)
    if found.artifact is None:
        return None, found.obstacle or found.gone or (f"{alias!r} points to {found.newer}" if found.newer else "")
    if check_integrity(found.path).get("signature_required"):
        return None, f"{current.uri} is served with its signature verified, and was not served beside"
    return FetchedVersion(uri=current.uri, path=found.path, artifact=found.artifact), ""


def _look_at(
    context: Context, source: SourceModel, current: Receipt, successor: Artifact, threads: int | None
) -> Incumbent:
    registry = plugins.load("registries", source.registry)
    try:
        folder = registry.fetch(current.uri, Path(tempfile.mkdtemp(dir=context.scratch)) / "incumbent")
        whole = check_integrity(folder)
    except IntegrityError as error:
        return Incumbent(obstacle=f"{current.uri} is damaged: {error.problem}", readable=False)
    except FilesGoneError as error:
        return Incumbent(gone=f"{current.uri} can't be served any more: {error.problem}")
    except RegistryError as error:
        if error.code is not Code.REGISTRY:  # the registry itself is in trouble
            raise
        return Incumbent(obstacle=f"{current.uri} can't be had: {error.problem}", readable=False)
    proven = proven_targets(whole, folder) if holds_variants(whole) else ()
    manifest = for_machine(whole, folder, context.hardware)
    found = _comparable(context, source, current, successor, threads, (folder, manifest))
    return replace(found, proven=proven, batch_sizes=tuple(manifest["target"]["batch_sizes"]))


def _comparable(
    context: Context,
    source: SourceModel,
    current: Receipt,
    successor: Artifact,
    threads: int | None,
    fetched: tuple[Path, Mapping[str, Any]],
) -> Incumbent:
    folder, manifest = fetched
    if (newer := newer_source(manifest, source)) is not None:
        return Incumbent(newer=f"{current.uri}, made from {newer}")
    if (reason := refuse_code(current.uri, data_folder(folder), manifest)) is not None:
        return Incumbent(obstacle=f"{current.uri} may not be run: {reason}")
    artifact = artifact_of(manifest, data_folder(folder))
    there = {manifest["fingerprint"]} if manifest["verdict"] is not None else set()
    there |= {one["fingerprint"] for one in validations(manifest, folder) if one["passed"]}
    if holds_variants(manifest):
        # Where none of its variants is loaded on this machine, nothing is served here that could become slower.
        if manifest["variant"] != PORTABLE and refuse_machine(manifest, folder, machine=context.hardware) is not None:
            return Incumbent()
    elif context.hardware.fingerprint not in there:
        return Incumbent(
            obstacle=f"{current.uri} was measured on {' and '.join(sorted(there))}, and this machine is "
            f"{context.hardware.fingerprint}"
        )
    served_with = int(manifest.get("threads", 1))
    same = (artifact.digest, artifact.options) == (successor.digest, successor.options)
    same = same and threads in (None, served_with)
    if same and artifact.backend == successor.backend:  # two may run the same graph
        return Incumbent()
    if (absent := plugins.missing(plugins.load("backends", artifact.backend))) is not None:
        return Incumbent(obstacle=f"{current.uri} can't run here: {absent}")
    return Incumbent(artifact=artifact, threads=served_with, path=str(folder))


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
    """Move the alias to what was published for a target; where the policy asks for an approval that is not there, the
    alias stays, and the receipt's note says what it waits for.

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
        first = "compare them yourself, then" if before.readable else "bring its files back, or give it up"
        raise GateError(
            f"not promoted to {alias!r}: {before.obstacle}, so the two can't be compared",
            where=receipt.uri,
            fix=f"{first}: compile-stage promote {receipt.uri} --alias {alias}",
        )
    if before.artifact is not None:
        _refuse_slower(receipt, alias, before, successor, target.policy)
    if before.lacking:
        note = (
            f"alias {alias!r} stays at {before.uri}, which is proven for {' and '.join(before.lacking)}: of "
            "this source nothing is proven for that yet; the same run on such a machine adds it and moves the alias"
        )
        return replace(receipt, note=note)
    registry = plugins.load("registries", source.registry)
    if target.policy.promote.approval and before.version != receipt.version:
        tags = registry.published(receipt.uri).tags
        if (awaited := approval.awaited(target.policy.promote, tags, receipt.uri)) is not None:
            return replace(receipt, note=f"{awaited}; then: compile-stage promote {receipt.uri} --alias {alias}")
    with context.events.step("promote", alias):
        moved = registry.promote(receipt, alias, expected=before.version)
    said = (
        f"alias {alias!r} moved without a comparison: {before.gone}" if before.gone else _not_compared(target, before)
    )
    return replace(moved, note="; ".join(filter(None, (moved.note, said))))


def _not_compared(target: TargetResult, before: Incumbent) -> str:
    """What to know of batch sizes that what an alias pointed to is proven for, and of which the target has none: there
    the successor may answer a request in parts, or refuse it; empty where there are none."""
    asked = target.policy.target.batch_sizes
    if not (dropped := sorted(set(before.batch_sizes) - set(asked))):
        return ""
    sizes = " and ".join(map(str, dropped))
    return (
        f"nothing was compared at batch size {sizes}, for which {before.uri} was proven: the target's batch_sizes lack "
        "it, and such requests may be answered in parts, or refused. To compare there too, name it there and run again"
    )


def _refuse_slower(
    receipt: Receipt, alias: str, before: Incumbent, successor: Measurement | None, policy: TargetPolicy
) -> None:
    max_slowdown, old = policy.promote.max_slowdown, before.uri or "what the alias points to"
    if before.threads not in (None, policy.target.threads):
        old += f" with its {before.threads} thread{'' if before.threads == 1 else 's'} ({policy.target.threads} here)"
    for batch_size in policy.target.batch_sizes:
        timing = successor.timing(batch_size) if successor else None
        if timing is None or timing.speedup_interval is None:
            raise GateError(
                f"not promoted to {alias!r}: it could not be measured against {old} at batch size {batch_size}",
                where=receipt.uri,
            )
        slowest = 1 / timing.speedup_interval[0] if timing.speedup_interval[0] > 0 else float("inf")
        mean = timing.mean_speedup_interval
        if mean is not None and mean[1] < (1 - speedups.RESOLUTION) / max_slowdown <= timing.speedup_interval[1]:
            raise GateError(
                f"not promoted to {alias!r}: at batch size {batch_size} some of its calls take far longer than others: "
                f"all together take {1 / mean[1]:.3f} to {1 / mean[0]:.3f} times as long as those of {old}, at most "
                f"{max_slowdown:g} allowed",
                where=receipt.uri,
                fix="promote.max_slowdown in the policy sets the limit",
            )
        if slowest > max_slowdown:
            known = speedups.is_resolved(timing)
            # What is run again without the option takes these figures from the cache then.
            again = "--remeasure on " if successor is not None and successor.tries >= MOST_TRIES else ""
            p50 = f"{1 / timing.speedup:.3f} (up to {slowest:.3f})" if timing.speedup else f"up to {slowest:.3f}"
            raise GateError(
                f"not promoted to {alias!r}: at batch size {batch_size} its p50 is {p50} times that of {old}, at most "
                f"{max_slowdown:g} allowed"
                + ("" if known else f"; after {timing.rounds} rounds it is not known more narrowly"),
                where=receipt.uri,
                fix="promote.max_slowdown in the policy sets the limit"
                + ("" if known else f"; {again}a quieter machine, or a larger budget.measure_seconds, narrows it"),
            )
