"""Published versions as OCI artifacts, in a container registry: `compile-stage export --to oci` writes them, and they
are verified and exported from there. They are no sources, and have no aliases.

URIs are `oci://HOST[:PORT]/NAME[:TAG]`, `oci://HOST[:PORT]/NAME@sha256:...`, and `oci+http://...` for a registry that
speaks HTTP. Credentials are those of Docker's `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NoReturn

from compile_stage.core.capabilities import RegistryCapabilities
from compile_stage.core.errors import RegistryError, SourceError
from compile_stage.core.ports import Registry
from compile_stage.core.records import Bundle, Receipt, SourceModel
from compile_stage.plugin_support.oci import PLAIN_SCHEME, SCHEME, Reference, pull_folder

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
"""Of the CNCF's ModelPack specification."""
_FIX = "publish to MLflow or to a folder, and export from there"


class OciRegistry(Registry):
    """Reads artifacts; what a run publishes goes to another registry."""

    name: ClassVar[str] = "oci"
    requires: ClassVar[tuple[str, ...]] = ("oras",)
    extra: ClassVar[str] = "oci"
    capabilities: ClassVar[RegistryCapabilities] = RegistryCapabilities()

    def accepts(self, uri: str) -> bool:
        return uri.startswith((SCHEME, PLAIN_SCHEME))

    def fetch(self, uri: str, into: Path) -> Path:
        folder, _ = pull_folder(Reference.parse(uri), ARTIFACT_TYPE, Path(into))
        return folder

    def is_configured(self, uri: str) -> bool:
        return False  # a URI names any registry, which vouches for nothing

    def check(self) -> str | None:
        return None  # there is none that this machine is set up for

    def published(self, uri: str) -> Receipt:
        _refuse("has no version with tags", uri)

    def resolve(self, uri: str, into: Path) -> SourceModel:
        raise SourceError(
            "an OCI artifact holds what was compiled already, which is no source",
            fix="name the model that it was made from, as models:/NAME/VERSION or folder:/PATH",
            where=uri,
        )

    def dataset(self, source: SourceModel, name: str, into: Path) -> Path:
        _refuse("holds no data sets", source.uri)

    def publication_name(self, source: SourceModel, name: str) -> str:
        _refuse("is no place to publish to", source.uri)

    def find(self, name: str, key: str) -> Receipt | None:
        _refuse("is not searched by keys", name)

    def push(self, bundle: Bundle, source: SourceModel, files: Mapping[str, Path]) -> Receipt:
        _refuse("is no place to publish to", bundle.name)

    def attach(self, receipt: Receipt, files: Mapping[str, Path]) -> None:
        _refuse("takes no reports", receipt.uri)

    def attest(self, receipt: Receipt, validation: Path, tags: Mapping[str, str]) -> None:
        _refuse("takes no validations", receipt.uri)

    def current(self, name: str, alias: str) -> Receipt | None:
        _refuse("has no aliases", name)

    def promote(self, receipt: Receipt, alias: str, *, expected: str | None = None) -> Receipt:
        _refuse("has no aliases", receipt.uri)

    def rollback(self, name: str, alias: str, *, expected: str | None = None) -> Receipt:
        _refuse("has no aliases", name)


def _refuse(what: str, where: str) -> NoReturn:
    raise RegistryError(f"an OCI artifact {what}", fix=_FIX, where=where)
