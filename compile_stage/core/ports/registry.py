"""A registry: where models come from and are published to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from compile_stage.core.capabilities import RegistryCapabilities
from compile_stage.core.errors import RegistryError
from compile_stage.core.ports.plugin import Plugin
from compile_stage.core.records import Bundle, Receipt, RegisteredVersion, SourceModel


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
        holds. Raises RegistryError for a name that it does not take."""

    @abstractmethod
    def find(self, name: str, key: str) -> Receipt | None:
        """The published version with that idempotency key."""

    def find_family(self, name: str, family_key: str) -> tuple[Receipt, ...]:
        """The published versions that hold variants of a family, by the tag `compile_stage.family_key`, and that no
        other was made after (`compile_stage.family_after`), the newest first: more than one where machines published
        side by side. Empty where there is none, or the registry does not look for it: a run then publishes its own
        variants alone. Raises RegistryError when it can't be reached or refuses."""
        return ()

    @abstractmethod
    def published(self, uri: str) -> Receipt:
        """The published version that a URI means now; `note` says so where the registry is about to remove its files.
        Raises RegistryError when it is none of ours."""

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
    def rollback(self, name: str, alias: str, *, expected: str | None = None) -> Receipt:
        """Move the alias back to what it pointed to before.

        Args:
            expected: The version that must be recorded as the one before, empty for none; None: whatever is recorded.

        Raises:
            AliasMovedError: Another is recorded: somebody else moved the alias meanwhile.
        """

    @abstractmethod
    def fetch(self, uri: str, into: Path) -> Path:
        """Download a published version into the folder `into`; returns the MLflow model directory."""

    def result(self, uri: str, into: Path) -> Path:
        """Copy the `result.json` that was stored with a published version into the folder `into`; returns the file.
        Raises RegistryError where there is none."""
        raise RegistryError(f"the registry {self.name} keeps no reports", where=uri)

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

    def versions(self) -> Iterator[RegisteredVersion]:
        """Of a registry that `can_be_watched`: every version that it holds. Raises RegistryError as `pull_records`
        does."""
        raise RegistryError(f"the registry {self.name} can't be watched")

    def search(self, name: str, alias: str = "", tags: Mapping[str, str] | None = None) -> Iterator[RegisteredVersion]:
        """Of a registry that `can_be_watched`: the versions of the models whose name matches, page by page, so that no
        more than a page of them is held. Raises RegistryError as `pull_records` does.

        Args:
            name: Glob pattern.
            alias: Glob pattern; versions that have such an alias. Empty: the newest version of each model.
            tags: That the version must have; the server leaves others out where it can.
        """
        raise RegistryError(f"the registry {self.name} can't be searched")

    def flavor(self, uri: str) -> str:
        """Of a registry that `can_be_watched`: the flavor that a version would be read as. Fetches its `MLmodel` alone.
        Raises RegistryError as `pull_records` does, SourceError where that file can't be read."""
        raise RegistryError(f"the registry {self.name} can't be searched")

    def version(self, name: str, number: str) -> RegisteredVersion | None:
        """Of a registry that `can_be_watched`: one version as it is now; None where there is none. Raises RegistryError
        as `pull_records` does."""
        raise RegistryError(f"the registry {self.name} can't be watched")

    def remove_alias(self, name: str, alias: str, *, expected: str) -> None:
        """Of a registry that `can_be_watched`: take an alias away, where it still points to the version `expected`.
        Nothing happens where it is gone already. Raises AliasMovedError where it points to another, RegistryError as
        `pull_records` does."""
        raise RegistryError(f"the registry {self.name} removes no aliases")

    def register_webhook(self, name: str, url: str, secret: str | None) -> str | None:
        """Of a registry that `can_be_watched`: have it report new versions, aliases and tags to an address, signed with
        the secret. Returns None when an example got there, or what became of it. Raises RegistryError where it
        refuses."""
        raise RegistryError(f"the registry {self.name} can't be watched")
