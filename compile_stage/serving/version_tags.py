"""The tags of a published version that repeat what its manifest says, for people and for searches.

They decide nothing here: whoever may write to the registry may write tags. But others read them (a dashboard, a
webhook, `applies_to`), so a version whose tags and manifest disagree is not accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_stage.core.digest import revive
from compile_stage.core.errors import IntegrityError
from compile_stage.core.records import Verdict, Waiver
from compile_stage.serving.approval import version_tags
from compile_stage.serving.variants import every_variant

TAG = "compile_stage."
DELETED = "deleted:"
"""Before the key of a version in whose place a run published another, since its logged model was deleted: its files are
whole until they are removed."""


def check_tags(manifest: Mapping[str, Any], tags: Mapping[str, str], uri: str) -> None:
    """Raise IntegrityError for a tag of a version that says something else than its manifest. A tag that is not there,
    as an earlier version may lack it, says nothing."""
    for name, published in _published(manifest).items():
        there = tags.get(TAG + name)
        if there is not None and name == "key":
            there = there.removeprefix(DELETED)
        if there is not None and there != published:
            raise IntegrityError(
                f"the tag {TAG}{name} says {there!r}, and the manifest {published!r}",
                fix="publish again under a new version; find out who changed the tag",
                where=uri,
            )


def _published(manifest: Mapping[str, Any]) -> dict[str, str]:
    source, policy, scheme = manifest["source"], manifest["policy"], manifest["scheme"]
    tags = {
        "key": manifest["key"],
        "source": source["uri"],
        "source_digest": source["digest"],
        "policy": policy["name"],
        "policy_digest": policy["digest"],
        "target": manifest["target"]["name"],
        "backend": manifest["artifact"]["backend"],
        "precision": scheme["precision"],
        "scheme": scheme["name"],
        "verdict": _verdict(manifest),
    }
    tags |= version_tags(manifest) | variant_tags(manifest)
    tags["hardware" if manifest["verdict"] is not None else "compiled_on"] = manifest["fingerprint"]
    return tags


def variant_tags(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Of a version that holds a family, its name and its variants, without prefix."""
    family = manifest.get("family")
    return {"family": family["name"], "variants": ", ".join(manifest["variants"])} if family else {}


def waivers_of(manifest: Mapping[str, Any]) -> tuple[Waiver, ...]:
    """What a version passed under: of one that holds a family, what any of its variants did."""
    recorded = [one["verdict"] for one in every_variant(manifest) if one["verdict"] is not None]
    verdicts: list[Verdict] = [revive(Verdict, verdict) for verdict in recorded]
    return tuple(dict.fromkeys(waiver for verdict in verdicts for waiver in verdict.waivers))


def _verdict(manifest: Mapping[str, Any]) -> str:
    if manifest["verdict"] is None:
        return "not validated"
    return "passed under waivers" if waivers_of(manifest) else "passed"
