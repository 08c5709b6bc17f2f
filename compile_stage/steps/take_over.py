"""What other machines proved of a family → variants that this run publishes with its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import CompileStageError, IntegrityError
from compile_stage.core.provenance import refuse_code
from compile_stage.core.records import Plan, Receipt, TakenOver, TargetResult, Variant
from compile_stage.measure.recompute import refuse_published
from compile_stage.serving.manifest import artifact_of, check_integrity, data_folder, validations
from compile_stage.serving.signatures import verify_model
from compile_stage.serving.trust import Trust
from compile_stage.serving.variants import PORTABLE, every_variant
from compile_stage.serving.version_tags import TAG, check_tags

# Of the version that it was in, not of the variant.
_OF_THE_VERSION = (
    "schema", "files", "code", "beside", "mlmodel", "digest", "family", "variants", "folder", "stored", "variant",
)  # fmt: skip


def take_over(
    context: Context, plan: Plan, members: Sequence[TargetResult], key: str, trust: Trust | None
) -> TakenOver:
    """The variants of a family that are of other kinds of machine than this: of its newest version, and of those that
    other machines published at the same time.

    What is of this kind of machine, of a target that this run looked at, is this run's to decide.

    Args:
        key: Of the family (`family_key`).
        trust: With it, each version must be signed by somebody whom it names.

    Raises:
        RegistryError: The registry can't be reached, or refuses.
    """
    variants: dict[str, Variant] = {}
    notes: list[str] = []
    found = _latest(plan, key)
    for receipt in found:
        taken, left_out = _of_version(context, plan, members, receipt, trust)
        variants = {**{variant.id: variant for variant in taken}, **variants}  # the newest version comes first
        notes += left_out
    versions = tuple(receipt.version for receipt in found)
    return TakenOver(variants=tuple(variants.values()), notes=tuple(notes), versions=versions)


def published_meanwhile(plan: Plan, target: TargetResult, key: str) -> tuple[str, ...]:
    """URIs of the versions of a family that other machines published since this run looked: what it published does not
    hold their variants yet. Raises RegistryError as `take_over` does."""
    if target.bundle is None or target.receipt is None:
        return ()
    seen = {target.receipt.version, *target.bundle.tags.get(TAG + "family_after", "").split(", ")}
    return tuple(receipt.uri for receipt in _latest(plan, key) if receipt.version not in seen)


def _latest(plan: Plan, key: str) -> tuple[Receipt, ...]:
    registry = plugins.load("registries", plan.source.registry)
    name = registry.publication_name(plan.source, plan.policy.publish_name.replace("{model}", plan.source.name))
    return registry.find_family(name, key)


def _of_version(
    context: Context, plan: Plan, members: Sequence[TargetResult], receipt: Receipt, trust: Trust | None
) -> tuple[tuple[Variant, ...], tuple[str, ...]]:
    registry = plugins.load("registries", plan.source.registry)
    try:
        folder = registry.fetch(receipt.uri, Path(tempfile.mkdtemp(dir=context.scratch)) / "family")
    except IntegrityError as error:
        return (), (f"no variant of {receipt.uri} was taken over: {error.problem}",)
    try:
        if trust is not None:
            verify_model(folder, trust)
        whole = check_integrity(folder, beside=True)
        check_tags(whole, receipt.tags, receipt.uri)
    except CompileStageError as error:
        return (), (f"no variant of {receipt.uri} was taken over: {error.problem}",)
    taken: list[Variant] = []
    notes: list[str] = []
    looked_at = {member.policy.target.name for member in members}
    for manifest in every_variant(whole):
        if manifest["variant"] == PORTABLE or _is_ours(context, manifest, looked_at):
            continue
        reason = _refuse(context, receipt, folder, manifest, trust)
        if reason is None:
            taken.append(_variant(receipt, folder, manifest, trust))
        else:
            notes.append(f"the variant {manifest['variant']} of {receipt.uri} was not taken over: {reason}")
    return tuple(taken), tuple(notes)


def _is_ours(context: Context, manifest: Mapping[str, Any], looked_at: set[str]) -> bool:
    machine: Hardware = revive(Hardware, manifest["hardware"])
    device = manifest["target"]["device"]
    same = machine.kind_for(device) == context.hardware.kind_for(device)
    return same and manifest["target"]["name"] in looked_at


def _refuse(
    context: Context, receipt: Receipt, folder: Path, manifest: Mapping[str, Any], trust: Trust | None
) -> str | None:
    """None when it may be published again, or the reason."""
    if trust is None and (reason := refuse_code(receipt.uri, data_folder(folder), manifest)) is not None:
        return reason
    if manifest["artifact"]["backend"] not in plugins.names("backends"):
        return f"the backend {manifest['artifact']['backend']} is not installed here"
    wanted: Mapping[str, str] = manifest["runtime"]
    installed = plugins.package_versions(*wanted)
    for package, there in wanted.items():
        if installed.get(package, there) != there:
            return f"it was proven with {package} {there}, and here is {installed[package]}: one version serves both"
    if manifest["verdict"] is None:
        return None
    return refuse_published(manifest, context.today)


def _variant(receipt: Receipt, folder: Path, manifest: Mapping[str, Any], trust: Trust | None) -> Variant:
    files = folder / "validations"
    attached = [one for one in validations(manifest, folder, trust) if one.get("variant") == manifest["variant"]]
    return Variant(
        id=manifest["variant"],
        manifest={name: value for name, value in manifest.items() if name not in _OF_THE_VERSION},
        path=artifact_of(manifest, data_folder(folder)).path,
        taken_from=receipt.uri,
        validations=tuple(str(files / f"{one['fingerprint']}--{one['variant']}.json") for one in attached),
    )
