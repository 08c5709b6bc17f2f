"""The registry that is MLflow: an embedded database by default, or any tracking server by MLflow's own variables."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from compile_stage.core import alias_history
from compile_stage.core.alias_history import History
from compile_stage.core.capabilities import RegistryCapabilities
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import AliasMovedError, RegistryError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import Registry
from compile_stage.core.records import Bundle, Receipt, RegisteredVersion, SourceModel
from compile_stage.core.tuning_records import checked_key
from compile_stage.registry import (
    mlflow_download,
    mlflow_pinning,
    mlflow_publish,
    mlflow_records,
    mlflow_search,
    mlflow_source,
    mlflow_versions,
    mlflow_watch,
)
from compile_stage.registry.mlflow_connection import (
    ALIASES,
    connect,
    is_code,
    reason_unreachable,
    single_writer,
    trouble,
    where,
)
from compile_stage.registry.mlflow_endings import ending_what_failed
from compile_stage.registry.mlflow_retries import UnreachableError, repeatable
from compile_stage.registry.model_files import (
    KEY_TAG,
    check_alias,
    check_alias_to_move,
    check_name,
    check_published,
    demand_mlmodel,
    moved_meanwhile,
    not_published,
    nothing_to_roll_back,
    prefixed,
    replaced,
)

_SETTLED_S = 1.0  # longer than it takes from reading an alias to setting it, over any network worth a registry


class MLflowRegistry(Registry):
    """Resolve, publish, promote and roll back in an MLflow registry.

    Every method raises RegistryError, in words, when the registry can't be reached, refuses, or lacks what was asked
    for.
    """

    name: ClassVar[str] = "mlflow"
    requires: ClassVar[tuple[str, ...]] = ("mlflow",)
    extra: ClassVar[str] = ""
    capabilities: ClassVar[RegistryCapabilities] = RegistryCapabilities(
        keeps_tuning_records=True, has_place=True, can_be_watched=True
    )

    def accepts(self, uri: str) -> bool:
        return uri.startswith(("models:/", "runs:/"))

    @repeatable
    def resolve(self, uri: str, into: Path) -> SourceModel:
        return mlflow_source.resolve(connect(), uri, Path(into))

    @repeatable
    def dataset(self, source: SourceModel, name: str, into: Path) -> Path:
        return mlflow_source.dataset(connect(), source, name, Path(into))

    def publication_name(self, source: SourceModel, name: str) -> str:
        check_name(name)
        return name

    @repeatable
    def find(self, name: str, key: str) -> Receipt | None:
        check_name(name)
        client = connect()
        with trouble(name):
            return mlflow_versions.find(client, name, key)

    @repeatable
    def find_family(self, name: str, family_key: str) -> tuple[Receipt, ...]:
        check_name(name)
        client = connect()
        with trouble(name):
            return mlflow_versions.find_family(client, name, family_key)

    @repeatable
    def published(self, uri: str) -> Receipt:
        client = connect()
        pinned = mlflow_pinning.pin(client, uri)
        if KEY_TAG not in pinned.tags or not pinned.version:
            raise not_published(pinned.uri)
        with trouble(pinned.uri):
            version = client.get_model_version(pinned.name, pinned.version)
            deleted, receipt = mlflow_versions.refuse_deleted(client, version), mlflow_versions.receipt_of(version)
            anew = (
                "a run published a new version in its place"
                if replaced(receipt.tags)
                else "the next run publishes it anew"
            )
            return replace(receipt, note=f"{deleted}: {anew}" if deleted else "")

    def push(self, bundle: Bundle, source: SourceModel, files: Mapping[str, Path]) -> Receipt:
        with ending_what_failed(bundle.name) as began:
            return self._push(bundle, source, files, began)

    @repeatable
    def _push(
        self, bundle: Bundle, source: SourceModel, files: Mapping[str, Path], began: Callable[[str], None]
    ) -> Receipt:
        return mlflow_publish.push(connect(), bundle, source, files, began)

    @repeatable
    def current(self, name: str, alias: str) -> Receipt | None:
        check_name(name)
        check_alias(alias)
        client = connect()
        with trouble(f"models:/{name}@{alias}"):
            return self._current(client, name, alias)

    @repeatable
    def promote(self, receipt: Receipt, alias: str, *, expected: str | None = None) -> Receipt:
        check_alias_to_move(alias)
        client = connect()
        with (
            trouble(receipt.uri, missing=f"there is no version {receipt.uri}"),
            single_writer(receipt.name, of=ALIASES),
        ):
            client.get_model_version(receipt.name, receipt.version)
            before = self._current(client, receipt.name, alias)
            if before is not None and before.version == receipt.version:
                return replace(
                    receipt,
                    promoted_to=alias,
                    previous=self._history(client, before, alias).previous or None,
                    note="the alias was already there",
                )
            previous = before.version if before else ""
            if expected is not None and previous != expected:
                raise self._lost(receipt.name, alias, before)
            # Written first: should we die between the two calls, the tag says nothing until the alias points here.
            history = self._history(client, before, alias).moved_on(previous) if before else History()
            self._remember(client, receipt, alias, history)
            self._move(client, receipt.name, alias, previous, receipt.version)
            return replace(receipt, promoted_to=alias, previous=previous or None)

    def rollback(self, name: str, alias: str, *, expected: str | None = None) -> Receipt:
        check_name(name)
        check_alias(alias)
        client, uri = connect(), f"models:/{name}@{alias}"
        with trouble(uri), single_writer(name, of=ALIASES):
            now = self._current(client, name, alias)
            if now is None:
                with mlflow_pinning.naming_what_is_missing(client, uri, name):
                    raise nothing_to_roll_back(name, alias, client.get_registered_model(name).aliases, uri)
            history = self._history(client, now, alias)
            previous = history.previous
            if expected is not None and previous != expected:
                raise self._lost(name, alias, now)
            if not previous:
                raise RegistryError(
                    f"no version is recorded that {alias!r} pointed to before {now.uri}",
                    fix=f"name one: compile-stage promote models:/{name}/VERSION --alias {alias}",
                    where=uri,
                )
            with trouble(uri, missing=f"version {previous}, which {alias!r} pointed to before, is no longer there"):
                target = mlflow_versions.receipt_of(client.get_model_version(name, previous))
            # That version may have come twice, and its tag tell of another time. Written before the alias moves:
            # after a kill between the two, this version's own tag still leads there.
            if (earlier := history.moved_back()) is not None:
                self._remember(client, target, alias, earlier)
            try:
                with trouble(uri):
                    self._move(client, name, alias, now.version, previous)
            except (UnreachableError, _UnconfirmedError) as error:
                raise _perhaps_moved(error, name, alias, now.version, previous) from error
            return replace(target, promoted_to=alias, previous=now.version)

    @repeatable
    def remove_alias(self, name: str, alias: str, *, expected: str) -> None:
        check_name(name)
        check_alias(alias)
        client = connect()
        with trouble(f"models:/{name}@{alias}"), single_writer(name, of=ALIASES):
            now = self._current(client, name, alias)
            if now is None:
                return
            if now.version != expected:
                raise self._lost(name, alias, now)
            client.delete_registered_model_alias(name, alias)

    @repeatable
    def attach(self, receipt: Receipt, files: Mapping[str, Path]) -> None:
        mlflow_publish.attach(connect(), receipt, files)

    @repeatable
    def attest(self, receipt: Receipt, validation: Path, tags: Mapping[str, str]) -> None:
        client = connect()
        with (
            trouble(receipt.uri),
            single_writer(receipt.name),
            temporary_folder() as scratch,
        ):
            folder = Path(scratch) / "validations"
            folder.mkdir()
            shutil.copy2(validation, folder)
            version = client.get_model_version(receipt.name, receipt.version)
            # A version that was copied has the files of the one that was published, and no logged model of its own.
            if not (model_id := mlflow_pinning.origin_id(client, version, receipt.uri)):
                raise RegistryError(
                    "no validation can be attached to it: it was registered from plain files, or copied from a version "
                    "whose logged model is gone",
                    fix="validate the version that compile-stage published",
                    where=receipt.uri,
                )
            self._log_to_model(client, model_id, Path(scratch), receipt.uri)
            for key, value in prefixed(tags).items():
                client.set_model_version_tag(receipt.name, receipt.version, key, value)

    def _log_to_model(self, client: Any, model_id: str, folder: Path, uri: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            client.log_model_artifacts(model_id, str(folder))
        except MlflowException as error:
            if not is_code(error, "RESOURCE_DOES_NOT_EXIST"):
                raise
            raise RegistryError(
                f"no validation can be attached to it: its logged model {model_id} was deleted, and MLflow's next gc "
                "deletes the files that the version has",
                fix="delete the version, and run the stage again: it publishes a new one",
                where=uri,
                code=Code.NOT_IN_REGISTRY,
            ) from error

    @repeatable
    def fetch(self, uri: str, into: Path) -> Path:
        client, into = connect(), Path(into)
        pinned = mlflow_pinning.pin(client, uri)
        shutil.rmtree(into, ignore_errors=True)
        into.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder = mlflow_download.download(pinned.download, into, pinned.uri)
            absent = [name for name in mlflow_download.published_files(folder) if not (folder / name).is_file()]
            mlflow_download.demand_listed(pinned.download, absent, pinned.uri)
            demand_mlmodel(folder, pinned.uri, partial(mlflow_versions.files_removed, client, pinned))
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
        check_published(folder, pinned.tags, pinned.uri)
        return folder

    def result(self, uri: str, into: Path) -> Path:
        client, receipt = connect(), self.published(uri)
        with trouble(receipt.uri, missing=f"the run of {receipt.uri} is no longer there, so no result.json"):
            run = client.get_model_version(receipt.name, receipt.version).run_id
            if not run:
                raise RegistryError("it has no run, so no result.json", where=receipt.uri)
            if "result.json" not in {file.path for file in client.list_artifacts(run)}:
                raise RegistryError(
                    f"no result.json is stored with {receipt.uri}",
                    fix="name a result.json of yours, or the folder that holds one",
                    where=receipt.uri,
                    code=Code.NOT_IN_REGISTRY,
                )
            return mlflow_download.download_of_run(client, run, "result.json", into)

    def check(self) -> str | None:
        return reason_unreachable()

    @repeatable
    def pull_records(self, source: SourceModel, key: str, have: Collection[str], into: Path) -> None:
        mlflow_records.pull(connect(), checked_key(key), have, Path(into))

    @repeatable
    def push_records(self, source: SourceModel, key: str, records: Mapping[str, Path]) -> int:
        return mlflow_records.push(connect(), checked_key(key), records)

    def versions(self) -> Iterator[RegisteredVersion]:
        return mlflow_watch.versions(connect())

    def search(self, name: str, alias: str = "", tags: Mapping[str, str] | None = None) -> Iterator[RegisteredVersion]:
        return mlflow_search.search(connect(), name, alias, tags or {})

    @repeatable
    def flavor(self, uri: str) -> str:
        return mlflow_search.flavor(connect(), uri)

    @repeatable
    def version(self, name: str, number: str) -> RegisteredVersion | None:
        return mlflow_watch.version(connect(), name, number)

    def register_webhook(self, name: str, url: str, secret: str | None) -> str | None:
        return mlflow_watch.register_webhook(connect(), name, url, secret)

    def place(self) -> str:
        """The tracking URI that MLflow's variables name, without its password."""
        return where()

    def _current(self, client: Any, name: str, alias: str) -> Receipt | None:
        from mlflow.exceptions import MlflowException

        try:
            version = client.get_registered_model(name).aliases.get(alias)
        except MlflowException as error:
            if is_code(error, "RESOURCE_DOES_NOT_EXIST"):
                return None
            raise
        if version is None:
            return None
        return mlflow_versions.receipt_of(client.get_model_version(name, str(version)))

    def _history(self, client: Any, receipt: Receipt, alias: str) -> History:
        from mlflow.exceptions import MlflowException

        tag = alias_history.previous_tag(alias)

        def tag_of(version: str) -> str | None:
            if version == receipt.version:
                return receipt.tags.get(tag)
            try:
                held = client.get_model_version(receipt.name, version)
            except MlflowException as error:
                if is_code(error, "RESOURCE_DOES_NOT_EXIST"):
                    return None
                raise
            return mlflow_versions.own_tags(held).get(tag)

        return alias_history.followed(receipt.version, tag_of)

    def _remember(self, client: Any, receipt: Receipt, alias: str, history: History) -> None:
        tag = alias_history.previous_tag(alias)
        held = client.get_model_version(receipt.name, receipt.version)
        if (value := alias_history.write(history)) == mlflow_versions.own_tags(held).get(tag, ""):
            return
        if mlflow_versions.is_copy(held):
            self._own_histories(client, held)
        if value:
            client.set_model_version_tag(receipt.name, receipt.version, tag, value)
        else:
            client.delete_model_version_tag(receipt.name, receipt.version, tag)

    def _own_histories(self, client: Any, copy: Any) -> None:
        """Take away the histories that came with a copy, and say that those written from now on are its own."""
        own = mlflow_versions.own_tags(copy)
        for tag in sorted(set(copy.tags) - set(own)):
            client.delete_model_version_tag(copy.name, copy.version, tag)
        client.set_model_version_tag(copy.name, copy.version, alias_history.OWNER_TAG, str(copy.creation_timestamp))

    def _move(self, client: Any, name: str, alias: str, expected: str, version: str) -> None:
        """Set the alias, and read it before and after: MLflow has no compare-and-set, and other machines don't know our
        lock. Of two that set it at once, each but the last finds the other's version there."""
        now = self._current(client, name, alias)
        if (now.version if now else "") != expected:
            raise self._lost(name, alias, now)
        client.set_registered_model_alias(name, alias, version)
        if where().startswith("http"):  # another machine may be between its look and its move
            time.sleep(_SETTLED_S)
        try:
            with trouble(f"models:/{name}@{alias}"):
                now = self._current(client, name, alias)
        except UnreachableError:
            raise
        except RegistryError as error:  # an account that expired since
            raise _UnconfirmedError(error.problem, fix=error.fix, where=error.where, code=error.code) from error
        if now is None or now.version != version:
            raise self._lost(name, alias, now)

    def _lost(self, name: str, alias: str, now: Receipt | None) -> AliasMovedError:
        return moved_meanwhile(alias, now.uri if now else "", f"models:/{name}@{alias}")


class _UnconfirmedError(RegistryError):
    """The alias was set, and the registry refuses to say where it points to now."""


def _perhaps_moved(error: RegistryError, name: str, alias: str, version: str, previous: str) -> RegistryError:
    """What to say of a rollback that was asked for and not confirmed: a second one goes one version further."""
    first = f"{error.fix}. Then look" if isinstance(error, _UnconfirmedError) else "look"
    return RegistryError(
        f"{error.problem}; the rollback of {alias!r} from version {version} to {previous} was not confirmed, and may "
        "have been done",
        fix=f"{first} at what the alias points to. To go to version {previous} whatever it is: compile-stage promote "
        f"models:/{name}/{previous} --alias {alias}. A second rollback may go one version further back",
        where=error.where or f"models:/{name}@{alias}",
        code=Code.REGISTRY_UNREACHABLE,
    )
