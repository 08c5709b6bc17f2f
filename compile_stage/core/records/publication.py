"""What is published, and what the registry says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.model import Artifact, Predictions


@record
class Bundle:
    """What is published for one target: a folder that `compile_stage.flavor` can load.

    Attributes:
        path: An MLflow model directory: `MLmodel`, `data/` (artifact, `manifest.json`), `code/` (vendored loader).
        key: Idempotency key: same source, policy, target and toolchain give the same key.
        manifest: Content of `manifest.json`.
        summary: One line for people: what it is, how fast, how exact. The description of the published version begins
            with it.
    """

    path: str
    digest: str
    key: str
    target: str
    name: str
    manifest: JsonMap
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    summary: str = ""


@record
class Receipt:
    """What the registry holds after publication.

    Attributes:
        tags: Of the version, with our prefix. They change (a report is added, an alias moves), so that two receipts
            are equal without them.
    """

    uri: str
    name: str
    version: str
    digest: str
    created: bool
    promoted_to: str | None = None
    previous: str | None = None
    note: str = ""
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)


@record
class FetchedVersion:
    """The files of a published version, as its registry gives them out: an MLflow model directory, and the artifact in
    it or the one that it was made from.

    Attributes:
        predictions: What the original's predict() answers to texts; None where nothing is known of it.
        variant: Of a version that holds several artifacts, the id of the one that is to be loaded; else empty.
    """

    uri: str
    path: str
    artifact: Artifact
    predictions: Predictions | None = None
    variant: str = ""


@record
class Variant:
    """One artifact of a version that holds a family (`serving.variants`).

    Attributes:
        id: Its name within the version.
        manifest: Its own, as plain JSON values: what it is, what proved it, where.
        path: The folder with the artifact's files.
        taken_from: URI of the published version that it was taken over from; empty for what this run made.
        validations: Files that `compile-stage validate` attached to it there.
    """

    id: str
    manifest: JsonMap
    path: str
    taken_from: str = ""
    validations: tuple[str, ...] = ()


@record
class TakenOver:
    """What a run found of a family in the registry.

    Attributes:
        variants: That it publishes again with its own.
        notes: On those that were left out.
        versions: That were looked at. What is published then comes after them.
    """

    variants: tuple[Variant, ...] = ()
    notes: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


@record
class UnvalidatedBundle:
    """A candidate that was compiled for hardware that is not here. It may be published; what promotes it is a
    validation on such hardware."""

    job_id: str
    bundle: Bundle
    receipt: Receipt | None = None


@record
class RegisteredVersion:
    """A version of a registered model, as the registry describes it at one moment.

    Attributes:
        published: compile-stage published it, so it is no source.
        approval: The tag that must be set before an alias moves to it, and that alias; both empty where none is asked.
        owner: Its tag `owner`, or else that of its registered model; empty where neither is set.
        location: Where its files are, in the registry's words: two versions with one location are one model. Empty
            where the registry does not say.
    """

    uri: str
    name: str
    version: str
    tags: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    published: bool = False
    approval: tuple[str, str] = ("", "")
    owner: str = ""
    location: str = ""
