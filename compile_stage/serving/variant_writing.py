"""What a version that holds a family is written with: its manifest, with all variants, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_file, digest_of, list_tree
from compile_stage.core.records import Variant, record
from compile_stage.core.storage import demand_present
from compile_stage.serving.manifest import ARTIFACT_NAME
from compile_stage.serving.variant_files import folder_of, store_once

NO_PORTABLE = (
    "the version of the family {} holds nothing that runs anywhere, so it refuses other machines: publish.elsewhere is "
    "portable-fp32, and no fp32 candidate of a backend that can do that passed its tolerances"
)


def variant_note(family: str, variant: Variant) -> str:
    """One sentence for reports: what it is, who proved it, and where it comes from."""
    manifest, timing = variant.manifest, next(iter(variant.manifest["timing"].values()), None)
    latency = f", median {timing['p50_s'] * 1e3:.3g} ms" if timing else ""
    proven = "proven on" if manifest["verdict"] is not None else "not proven, compiled on"
    where = f", taken over from {variant.taken_from}" if variant.taken_from else ""
    what = f"{manifest['artifact']['backend']} {manifest['scheme']['name']}"
    holds = f"the version of the family {family} holds {variant.id}: {what}"
    return f"{holds}, {proven} {manifest['fingerprint']}{latency}{where}"


@record
class FamilyVersion:
    """What a version holds.

    Attributes:
        key: What versions have in common whose variants may be published together.
        variants: All of them, the lead too.
        elsewhere: What is done on a machine that none is proven for.
        after: The versions whose variants were looked at.
    """

    family: str
    key: str
    variants: tuple[Variant, ...]
    elsewhere: str
    after: tuple[str, ...] = ()


def with_variants(manifest: Mapping[str, Any], version: FamilyVersion, lead: str, staged: Path) -> dict[str, Any]:
    """The lead's manifest with all variants, and the others' files in `staged`, each file once."""
    own = staged / ARTIFACT_NAME
    stored = {digest_file(own / name): f"{ARTIFACT_NAME}/{name}" for name in list_tree(own)}
    keys: dict[str, str] = {}
    variants: dict[str, Any] = {}
    for one in version.variants:
        keys[one.id] = one.manifest["key"]
        if one.id == lead:
            variants[one.id] = {"key": keys[one.id], "folder": ARTIFACT_NAME, "stored": {}, "manifest": None}
            continue
        demand_present(one.path)
        folder = folder_of(one.id)
        places = store_once(Path(one.path), folder, staged, stored)
        variants[one.id] = {"key": keys[one.id], "folder": folder, "stored": places, "manifest": dict(one.manifest)}
    key = digest_of({"family": version.family, "elsewhere": version.elsewhere, "variants": sorted(keys.values())})
    family: dict[str, Any] = {"name": version.family, "elsewhere": version.elsewhere, "lead": lead, "key": version.key}
    return {**manifest, "key": key, "family": family, "variants": variants}
