"""What is exported: a published version, or a bundle, whose files and verdict hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.errors import GateError, RegistryError, UsageError
from compile_stage.core.generation import call_signature
from compile_stage.core.records import Artifact, record
from compile_stage.core.tensors import Signature
from compile_stage.core.uris import is_uri
from compile_stage.serving.batches import ProvenBatches
from compile_stage.serving.manifest import artifact_of, data_folder
from compile_stage.steps.promote import demand_passed
from compile_stage.verification import Published, open_published

_TAIL = ", so it can't be promoted"


@record
class Version:
    """A published version.

    Attributes:
        uri: Pinned: never an alias.
        name: Of the registered model; of a bundle, of its source and its target.
        number: In the registry; `1` for what has none.
        published: Its files, which hold.
    """

    uri: str
    name: str
    number: str
    published: Published

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.published.manifest

    @property
    def artifact(self) -> Artifact:
        return artifact_of(self.manifest, data_folder(self.published.folder))

    @property
    def signature(self) -> Signature:
        """Of a call: names, types and shapes."""
        return call_signature(self.artifact)

    @property
    def batches(self) -> ProvenBatches:
        """The sizes that were proven; of what earlier versions published, those of its policy."""
        sizes = self.manifest["target"]["batch_sizes"]
        return ProvenBatches.of(self.manifest) or ProvenBatches(map(int, sizes), splits=False)

    @property
    def answers_requests(self) -> bool:
        """True where predict() is more than the graph: texts, pictures, recordings, or a pyfunc's own code."""
        answer = self.manifest.get("answer", {})
        return any(answer.get(key) for key in ("text", "media", "python_model"))

    @property
    def lineage(self) -> dict[str, str]:
        """What it was made from, by whom it is vouched for: for labels and annotations."""
        manifest, verdict = self.manifest, self.manifest["verdict"]
        signed_by = self.published.signed_by
        return {
            "version": self.uri,
            "key": str(manifest["key"]),
            "manifest_digest": str(manifest["digest"]),
            "artifact_digest": str(manifest["artifact"]["digest"]),
            "source": str(manifest["source"]["uri"]),
            "source_digest": str(manifest["source"]["digest"]),
            "policy": str(manifest["policy"]["name"]),
            "policy_digest": str(manifest["policy"]["digest"]),
            "target": str(manifest["target"]["name"]),
            "backend": str(manifest["artifact"]["backend"]),
            "precision": str(manifest["artifact"]["precision"]),
            "hardware": str(manifest["fingerprint"]),
            "verdict": "passed" if verdict is not None else "validated elsewhere",
            **({"signed_by": signed_by.name} if signed_by is not None else {}),
        }


def open_version(context: Context, uri: str, trusted: Any) -> Version:
    """A published version that may be exported.

    Raises:
        IntegrityError: Its files or its signature are not what was published.
        GateError: What was measured does not make its verdict pass today.
        RegistryError: It can't be had.
    """
    pinned, name, number = uri, "", ""
    if is_uri(uri):
        with suppress(RegistryError):  # an OCI artifact has files and no version
            receipt = plugins.registry_for(uri).published(uri)
            pinned, name, number = receipt.uri, receipt.name.rpartition("/")[2], receipt.version
    published = open_published(context, pinned, trusted)
    manifest = published.manifest
    if "job" not in manifest or "verdict" not in manifest:
        raise UsageError(
            "its manifest says nothing of a validation, so nothing shows what it answers", where=uri,
            fix="publish it by compile-stage run",
        )  # fmt: skip
    try:
        demand_passed(manifest, published.folder, context.today, pinned, published.trust)
    except GateError as error:
        raise GateError(
            f"{error.problem.removesuffix(_TAIL)}, so it is not exported", fix=error.fix, where=error.where
        ) from error
    name = name or f"{manifest['source']['name']}-{manifest['target']['name']}"
    return Version(uri=pinned, name=name, number=number if number.isdigit() else "1", published=published)


def plain_name(name: str, pattern: str = r"[^A-Za-z0-9._-]+") -> str:
    """A name for a server: what matches the pattern becomes a hyphen."""
    return re.sub(pattern, "-", name).strip("-._") or "model"


def kubernetes_name(name: str) -> str:
    """A name for Kubernetes: lower case letters, digits and hyphens, at most 63, the first one a letter."""
    cleaned = plain_name(name.lower(), r"[^a-z0-9]+")
    return (cleaned if cleaned[0].isalpha() else f"m-{cleaned}")[:63].rstrip("-")
