"""A registry: where models come from and are published to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from compile_stage.core.capabilities import RegistryCapabilities
from compile_stage.core.errors import RegistryError
from compile_stage.core.ports.plugin import Plugin
from compile_stage.core.records import Bundle, Receipt, SourceModel


class Registry(Plugin, Protocol):
    """Where models live (`compile_stage.registries`)."""

    capabilities: ClassVar[RegistryCapabilities]

    @abstractmethod
    def accepts(self, uri: str) -> bool:
        """True if this registry understands such a URI."""

    @abstractmethod
    def resolve(self, uri: str, into: Path) -> SourceModel:
        """Pin the URI to an immutable version and copy its files to a folder below `into`, named by digest."""

    @abstractmethod
    def dataset(self, source: SourceModel, name: str, into: Path) -> Path:
        """Fetch a data set by name as one file (.parquet, .csv or .npz) below `into`."""

    @abstractmethod
    def publication_name(self, source: SourceModel, name: str) -> str:
        """The whole name under which `push` publishes: what `find`, `current` and `rollback` take, and a receipt
        holds."""

    @abstractmethod
    def find(self, name: str, key: str) -> Receipt | None:
        """The published version with that idempotency key."""

    @abstractmethod
    def published(self, uri: str) -> Receipt:
        """The published version that a URI means now. Raises RegistryError when it is none of ours."""

    @abstractmethod
    def push(self, bundle: Bundle, source: SourceModel, files: Mapping[str, Path]) -> Receipt:
        """Publish, idempotently: same key, same version. `files` are the reports as they are before publication."""

    @abstractmethod
    def attach(self, receipt: Receipt, files: Mapping[str, Path]) -> None:
        """Replace the reports that lie with a published version by the final ones (report.html, result.json, ...),
        which hold its receipt.

        Idempotent: a version that has its final report, for the alias that the receipt names, keeps it. Killed halfway,
        the next call does all of it."""

    @abstractmethod
    def attest(self, receipt: Receipt, validation: Path, tags: Mapping[str, str]) -> None:
        """Add the file to a published version's own files, below `validations/`, and then the tags to the version. A
        file of that name is replaced."""

    @abstractmethod
    def current(self, name: str, alias: str) -> Receipt | None:
        """What the alias points to now."""

    @abstractmethod
    def promote(self, receipt: Receipt, alias: str, *, expected: str | None = None) -> Receipt:
        """Move the alias to that version, recording what it pointed to before.

        Args:
            expected: The version that the alias must still point to, empty for none; None: whatever it points to.

        Raises:
            AliasMovedError: It points to another, or somebody else moved it at the same moment.
        """

    @abstractmethod
    def rollback(self, name: str, alias: str) -> Receipt:
        """Move the alias back to what it pointed to before."""

    @abstractmethod
    def fetch(self, uri: str, into: Path) -> Path:
        """Download a published version into the folder `into`; returns the MLflow model directory."""

    @abstractmethod
    def check(self) -> str | None:
        """None when it can be reached, or the reason: for `doctor`."""

    def is_configured(self, uri: str) -> bool:
        """True when the URI is of the registry that this machine is set up for, which vouches for what it holds. False
        when it names a place of its own, that anybody may have filled."""
        return True

    def place(self) -> str:
        """Of a registry that `has_place`: where it is, for `doctor`, without passwords."""
        raise RegistryError(f"the registry {self.name} has no place of its own")

    def pull_records(self, source: SourceModel, key: str, have: Collection[str], into: Path) -> None:
        """Of a registry that `keeps_tuning_records`: copy the records of a key into the folder `into`, whoever pushed
        them; not those whose names are in `have`. They may be damaged, or none: the caller looks at each. Raises
        RegistryError when it can't be reached or refuses."""
        raise RegistryError(f"the registry {self.name} keeps no tuning records")

    def push_records(self, source: SourceModel, key: str, records: Mapping[str, Path]) -> int:
        """Of a registry that `keeps_tuning_records`: add records by name, those that it has not; returns how many that
        were. What others push at the same time stays too. Raises RegistryError as `pull_records` does.

        Args:
            source: Whose registry it is.
        """
        raise RegistryError(f"the registry {self.name} keeps no tuning records")
