"""Approval by a person before an alias moves: a tag of the published version that the policy names.

The manifest says which tag is asked for and what it must hold, so a writer of the registry can't take the demand away;
who may set tags is up to the tracking server's permissions (docs/decisions/0066).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_stage.core.errors import GateError
from compile_stage.core.records import Promotion, TargetPolicy

APPROVED = "approved"
"""The value that approves where a policy names no approvers."""


def manifest_entry(rules: TargetPolicy) -> dict[str, Any]:
    """What the manifest of a published model says of its approval: nothing where none is asked for."""
    promote = rules.promote
    if not promote.approval:
        return {}
    return {"approval": {"tag": promote.approval, "approvers": promote.approvers, "alias": rules.alias}}


def version_tags(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The same as tags of the version, without prefix: for searches, and for who waits for the approval."""
    asked = manifest.get("approval")
    return {"approval": asked["tag"], "approval_alias": asked["alias"] or ""} if asked else {}


def asked_of(manifest: Mapping[str, Any]) -> Promotion:
    """What a manifest asks for, as a policy says it."""
    asked = manifest.get("approval") or {}
    return Promotion(approval=asked.get("tag"), approvers=tuple(asked.get("approvers", ())))


def awaited(promote: Promotion, tags: Mapping[str, str], uri: str) -> str | None:
    """None when nobody is asked, or somebody approved; else what is waited for, as a sentence.

    Args:
        tags: Of the version, as they are now.
    """
    tag = promote.approval
    if not tag:
        return None
    allowed = promote.approvers or (APPROVED,)
    there = tags.get(tag)
    if there in allowed:
        return None
    set_it = f"set the tag {tag}={' or '.join(allowed)} on {uri}"
    if there is None:
        return f"waiting for approval: {set_it}"
    return f"waiting for approval: its tag {tag} is {there!r}; {set_it}"


def demand_approved(manifest: Mapping[str, Any], tags: Mapping[str, str], uri: str) -> None:
    """Raise GateError unless who must approve a published model did."""
    if (reason := awaited(asked_of(manifest), tags, uri)) is not None:
        problem, _, fix = reason.rpartition("; " if "; " in reason else ": ")
        raise GateError(f"{problem}, so it can't be promoted", fix=fix, where=uri)
