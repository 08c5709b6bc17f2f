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
    """

    uri: str
    path: str
    artifact: Artifact
    predictions: Predictions | None = None


@record
class UnvalidatedBundle:
    """A candidate that was compiled for hardware that is not here. It may be published; what promotes it is a
    validation on such hardware."""

    job_id: str
    bundle: Bundle
    receipt: Receipt | None = None
