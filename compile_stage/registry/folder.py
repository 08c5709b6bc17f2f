"""A registry that is a plain folder: for tests, for air-gapped places, and for a model that lies in no registry at all.

    ROOT/NAME/VERSION/version.json   key, digest, tags, metrics, params: the record of the version
    ROOT/NAME/VERSION/model/         an MLflow model directory
    ROOT/NAME/VERSION/files/         report.html, ...
    ROOT/NAME/aliases.json           alias → version
    ROOT/NAME/.lock                  held by the one writer
    ROOT/.tuning/KEY/                tuning records (`core.tuning_records`)

URIs are `folder:/ROOT/NAME/VERSION`, `folder:/ROOT/NAME@ALIAS`, `folder:/ROOT/NAME/latest`, and, for a source only,
`folder:/PATH/TO/MODEL` of an MLflow model directory. A version is written beside its place, flushed and renamed, so
that a reader, or a crash, sees all of it or nothing.

Publications go to the root that the source came from; to `$COMPILE_STAGE_FOLDER_REGISTRY` when that is set; and for a
model directory outside of any registry, to the folder `compiled-models` beside it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from compile_stage.core import alias_history, tuning_records
from compile_stage.core.alias_history import History
from compile_stage.core.cache import flush_tree
from compile_stage.core.capabilities import RegistryCapabilities
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import FilesGoneError, IntegrityError, RegistryError, SourceError
from compile_stage.core.file_trees import refuse_tree
from compile_stage.core.leftovers import part_folder
from compile_stage.core.ports import Registry
from compile_stage.core.records import Bundle, Receipt, SourceModel, record
from compile_stage.registry.folder_files import (
    as_texts,
    checked_name,
    file_trouble,
    flush_folder,
    read_json,
    replace_file,
    write_files,
    write_json,
    writing,
)
from compile_stage.registry.held_files import differing, refuse_folder
from compile_stage.registry.model_files import (
    DAMAGED,
    DATASET_SUFFIXES,
    DIGEST_TAG,
    FAMILY_TAG,
    KEY_TAG,
    REPORT_TAG,
    check_alias,
    check_alias_to_move,
    check_dataset_name,
    check_name,
    check_published,
    copy_model,
    demand_mlmodel,
    has_report,
    keep,
    latest_of_family,
    moved_meanwhile,
    not_published,
    nothing_to_roll_back,
    payload_digest,
    prefixed,
    read_model,
    replaced,
    replaced_note,
    report_state,
)

_SCHEME = "folder:"
_ROOT_VARIABLE = "COMPILE_STAGE_FOLDER_REGISTRY"
_FORMS = "write folder:/ROOT/NAME/VERSION, folder:/ROOT/NAME@ALIAS or folder:/PATH/TO/MODEL"


@record
class _Place:
    """Where a version is: `version` is empty for a model directory outside of any registry."""

    root: Path
    name: str
    version: str
    model: Path


class FolderRegistry(Registry):
    """Resolve, publish, promote and roll back in a folder; the same rules as in MLflow."""

    name: ClassVar[str] = "folder"
    requires: ClassVar[tuple[str, ...]] = ("mlflow",)  # to read MLmodel
    extra: ClassVar[str] = ""
    capabilities: ClassVar[RegistryCapabilities] = RegistryCapabilities(keeps_tuning_records=True)

    def accepts(self, uri: str) -> bool:
        return uri.startswith(_SCHEME)

    def resolve(self, uri: str, into: Path) -> SourceModel:
        place = _locate(uri)
        tags = _tags(place.root / place.name, place.version) if place.version else {}
        exact = _uri(place)
        if KEY_TAG in tags:
            raise SourceError(
                "this version was published by compile-stage: it is already compiled and can't be a source",
                fix=f"name the model that it was made from: {tags.get('compile_stage.source', 'see version.json')}",
                where=exact,
            )
        if not (place.model / "MLmodel").is_file():
            read_model(place.model, exact)  # raises with the reason
        with file_trouble(exact):
            folder = keep(Path(into), exact, lambda part: copy_model(place.model, part / "model", exact))
        files, digest = read_model(folder, exact), payload_digest(folder)
        return SourceModel(
            uri=exact if place.version else f"{exact}#{digest}",
            name=place.name,
            version=place.version,
            flavor=files.flavor,
            path=str(folder),
            digest=digest,
            described=files.described,
            mlmodel=files.mlmodel,
            signature=files.signature,
            registry="folder",
            tags=tags,
        )

    def dataset(self, source: SourceModel, name: str, into: Path) -> Path:
        """From `datasets/NAME.npz|parquet|csv` in the version's folder, in the registry's root, or beside the model
        directory."""
        check_dataset_name(name)
        place = _locate(source.uri)
        homes = (place.model.parent, place.root) if place.version else (place.model.parent,)
        for file in (home / "datasets" / f"{name}{suffix}" for home in homes for suffix in DATASET_SUFFIXES):
            if file.is_file():
                Path(into).mkdir(parents=True, exist_ok=True)
                with file_trouble(str(file)):
                    return Path(shutil.copy2(file, Path(into) / file.name))
        raise RegistryError(
            f"there is no data set called {name!r}",
            fix=f"put it at {homes[0] / 'datasets' / f'{name}.npz'} (.parquet and .csv do as well)",
            where=source.uri,
            code=Code.NOT_IN_REGISTRY,
        )

    def publication_name(self, source: SourceModel, name: str) -> str:
        if name.startswith((_SCHEME, "/")):
            return _SCHEME + str(_home(name))
        check_name(name)
        root = Path(os.environ[_ROOT_VARIABLE]) if os.environ.get(_ROOT_VARIABLE) else _root_beside(source)
        return f"{_SCHEME}{root.absolute() / name}"

    def find(self, name: str, key: str) -> Receipt | None:
        return _find(_home(name), key)

    def find_family(self, name: str, family_key: str) -> tuple[Receipt, ...]:
        home = _home(name)
        tags = {version: _tags(home, version) for version in _versions(home)}
        family = {
            version: held for version, held in tags.items() if held.get(FAMILY_TAG) == family_key and not replaced(held)
        }
        return tuple(_receipt(home, version) for version in latest_of_family(family))

    def published(self, uri: str) -> Receipt:
        place = _locate(uri)
        if not place.version or KEY_TAG not in _tags(place.root / place.name, place.version):
            raise not_published(_uri(place))
        return _receipt(place.root / place.name, place.version)

    def push(self, bundle: Bundle, source: SourceModel, files: Mapping[str, Path]) -> Receipt:
        home = _home(self.publication_name(source, bundle.name))
        check_name(home.name)
        with writing(home):
            note = ""
            while (held := _find(home, bundle.key)) is not None:
                reason = refuse_folder(home / held.version / "model", held.tags, bundle)
                if reason is None:
                    return held
                _retag(home, held.version, {KEY_TAG: DAMAGED + bundle.key})
                note = replaced_note(held.uri, reason)
            version = str(max(map(int, _taken(home)), default=0) + 1)
            tags = prefixed(
                {"source": source.uri, "source_digest": source.digest, "target": bundle.target}
                | {**bundle.tags, "key": bundle.key, "digest": bundle.digest}
            )
            with part_folder(home) as part:
                copy_model(Path(bundle.path), part / "model", bundle.path)
                if wrong := differing(part / "model", Path(bundle.path)):
                    raise RegistryError(
                        f"the disk holds other bytes than were written: {', '.join(wrong[:5])}",
                        fix="run again; nothing was published. If it stays so, look at the disk",
                        where=str(home),
                    )
                write_files(part / "files", files)
                described = {
                    "name": home.name,
                    "version": version,
                    "description": bundle.summary,
                    "tags": tags,
                    "metrics": dict(bundle.metrics),
                    "params": dict(bundle.params),
                }
                (part / "version.json").write_text(json.dumps(described, indent=2, sort_keys=True), encoding="utf-8")
                flush_tree(part)
                part.chmod(0o755)  # mkdtemp makes it private
                part.rename(home / version)
                flush_folder(home)
            return replace(_receipt(home, version, created=True), note=note)

    def attach(self, receipt: Receipt, files: Mapping[str, Path]) -> None:
        home = _home(receipt.name)
        _demand_version(home, receipt)
        with writing(home):
            if has_report(_tags(home, receipt.version), receipt):
                return
            folder = home / receipt.version / "files"
            for name, path in files.items():
                replace_file(folder / checked_name(name), path, part_in=folder.parent)
            _retag(home, receipt.version, {REPORT_TAG: report_state(receipt)})

    def attest(self, receipt: Receipt, validation: Path, tags: Mapping[str, str]) -> None:
        home = _home(receipt.name)
        with writing(home):
            folder = home / receipt.version / "model" / "validations"
            replace_file(folder / validation.name, validation, part_in=folder.parent.parent)
            _retag(home, receipt.version, prefixed(tags))

    def current(self, name: str, alias: str) -> Receipt | None:
        check_alias(alias)
        home = _home(name)
        version = _aliases(home).get(alias)
        return _receipt(home, version) if version else None

    def promote(self, receipt: Receipt, alias: str, *, expected: str | None = None) -> Receipt:
        check_alias_to_move(alias)
        home = _home(receipt.name)
        _demand_version(home, receipt)
        with writing(home):
            before = _aliases(home).get(alias, "")
            history = _history(home, before, alias) if before else History()
            if before == receipt.version:
                previous = history.previous or None
                return replace(receipt, promoted_to=alias, previous=previous, note="the alias was already there")
            if expected is not None and before != expected:
                raise moved_meanwhile(alias, before, str(home))
            _remember(home, receipt.version, alias, history.moved_on(before) if before else history)
            _set_alias(home, alias, receipt.version)
        return replace(receipt, promoted_to=alias, previous=before or None)

    def rollback(self, name: str, alias: str, *, expected: str | None = None) -> Receipt:
        check_alias(alias)
        home = _home(name)
        with writing(home):
            now = _aliases(home).get(alias)
            if now is None:
                raise nothing_to_roll_back(home.name, alias, _aliases(home), str(home))
            history = _history(home, now, alias)
            previous = history.previous
            if expected is not None and previous != expected:
                raise moved_meanwhile(alias, now, str(home))
            if not previous:
                raise RegistryError(
                    f"no version is recorded that {alias!r} pointed to before {_SCHEME}{home / now}",
                    fix=f"name one: compile-stage promote {_SCHEME}{home}/VERSION --alias {alias}",
                )
            if not (home / previous / "version.json").is_file():
                raise RegistryError(
                    f"version {previous}, which {alias!r} pointed to before, is no longer there", where=str(home)
                )
            # That version may have come twice, and its tag tell of another time. Written before the alias moves: after
            # a kill between the two, this version's own tag still leads there.
            if (earlier := history.moved_back()) is not None:
                _remember(home, previous, alias, earlier)
            _set_alias(home, alias, previous)
        return replace(_receipt(home, previous), promoted_to=alias, previous=now)

    def fetch(self, uri: str, into: Path) -> Path:
        place, into = _locate(uri), Path(into)
        demand_mlmodel(place.model, _uri(place), partial(_files_removed, place))
        if (reason := refuse_tree(place.model)) is not None:
            raise IntegrityError(f"it is not what was published: {reason}", where=_uri(place))
        shutil.rmtree(into, ignore_errors=True)
        with file_trouble(uri):
            shutil.copytree(place.model, into)  # compiled Python too: what is loaded from here would run it
        if place.version:
            check_published(into, _tags(place.root / place.name, place.version), _uri(place))
        return into

    def result(self, uri: str, into: Path) -> Path:
        receipt = self.published(uri)
        file = _home(receipt.name) / receipt.version / "files" / "result.json"
        if not file.is_file():
            raise RegistryError("no result.json is stored with it", where=receipt.uri)
        with file_trouble(uri):
            return Path(shutil.copyfile(file, into / "result.json"))

    def pull_records(self, source: SourceModel, key: str, have: Collection[str], into: Path) -> None:
        folder = self._records(source, key)
        with file_trouble(str(folder)):
            for name in tuning_records.names_in(folder):
                if name not in have:
                    shutil.copyfile(folder / name, Path(into) / name)

    def push_records(self, source: SourceModel, key: str, records: Mapping[str, Path]) -> int:
        folder = self._records(source, key)
        with file_trouble(str(folder)):
            held = set(tuning_records.names_in(folder))
            fresh = {name: path for name, path in records.items() if name not in held}
            for name, path in fresh.items():
                tuning_records.write(folder, name, path.read_bytes())
        return len(fresh)

    def _records(self, source: SourceModel, key: str) -> Path:
        root = _home(self.publication_name(source, "records")).parent
        return root / ".tuning" / tuning_records.checked_key(key)

    def is_configured(self, uri: str) -> bool:
        root = os.environ.get(_ROOT_VARIABLE)
        return root is not None and _locate(uri).root == Path(root).absolute()

    def check(self) -> str | None:
        root = os.environ.get(_ROOT_VARIABLE)
        if root is None:
            return None
        nearest = next(path for path in (Path(root).absolute(), *Path(root).absolute().parents) if path.exists())
        return None if os.access(nearest, os.W_OK) else f"${_ROOT_VARIABLE} is {root}, and {nearest} can't be written"


# ----------------------------------------------------------------------------------------------------- names and places


def _locate(uri: str) -> _Place:
    """The version or model directory that a URI means now."""
    text = uri.removeprefix(_SCHEME).partition("#")[0]
    path = Path(text).expanduser().absolute()
    if (path / "MLmodel").is_file():
        return _Place(root=path.parent, name=path.name, version="", model=path)
    if "@" in path.name:
        name, _, alias = path.name.rpartition("@")
        check_alias(alias)
        aliases = _aliases(path.parent / name)
        if alias not in aliases:
            listed = f"it has: {', '.join(sorted(aliases))}" if aliases else "it has none"
            raise RegistryError(f"{name!r} has no alias {alias!r}", fix=listed, where=uri, code=Code.NOT_IN_REGISTRY)
        path = path.parent / name / aliases[alias]
    elif path.name == "latest":
        if not (versions := _versions(path.parent)):
            raise RegistryError(
                f"{path.parent.name!r} has no version", fix=_FORMS, where=uri, code=Code.NOT_IN_REGISTRY
            )
        path = path.parent / max(versions, key=int)
    if not path.name.isdigit():
        raise RegistryError(
            "there is no model: neither an MLflow model directory nor a version of one",
            fix=_FORMS,
            where=uri,
            code=Code.NOT_IN_REGISTRY,
        )
    if not path.is_dir():
        raise (FilesGoneError if path.parent.is_dir() else RegistryError)(
            f"there is no version {path.name} of {path.parent.name!r}", fix=_FORMS, where=uri, code=Code.NOT_IN_REGISTRY
        )
    return _Place(root=path.parents[1], name=path.parent.name, version=path.name, model=path / "model")


def _files_removed(place: _Place) -> str | None:
    """Why the files of a version, which are not there, will not come back; None where it is no version. They lie beside
    what describes it, on the same disk."""
    described = place.model.parent / "version.json"
    return "somebody deleted them" if place.version and described.is_file() else None


def _uri(place: _Place) -> str:
    return _SCHEME + str(place.model.parent if place.version else place.model)


def _home(name: str) -> Path:
    """The folder of a registered name, given as `folder:/ROOT/NAME`, as a path, or alone when the root is in the
    environment."""
    text = name.removeprefix(_SCHEME)
    if Path(text).is_absolute():
        return Path(text)
    check_name(text)
    if root := os.environ.get(_ROOT_VARIABLE):
        return Path(root).absolute() / text
    raise RegistryError(
        f"{name!r} does not say in which folder the registry is",
        fix=f"write {_SCHEME}/ROOT/{text}, or set {_ROOT_VARIABLE}",
    )


def _root_beside(source: SourceModel) -> Path:
    if source.registry != "folder":
        raise RegistryError(
            f"{source.uri} does not come from a folder, so there is none to publish to", fix=f"set {_ROOT_VARIABLE}"
        )
    place = _locate(source.uri)
    return place.root if place.version else place.model.parent / "compiled-models"


# -------------------------------------------------------------------------------------------------- reading and writing


def _versions(home: Path) -> list[str]:
    return [path.name for path in home.iterdir() if path.name.isdigit()] if home.is_dir() else []


def _taken(home: Path) -> set[str]:
    """The numbers that no new version may get: of the versions, and of those that somebody deleted while an alias
    pointed to them, or may be rolled back to them. The alias would be at what nobody promoted."""
    versions, aliases = set(_versions(home)), _aliases(home)
    tags = [_tags(home, version).get(alias_history.previous_tag(alias)) for version in versions for alias in aliases]
    before = {version for tag in tags for version in alias_history.parse(tag).versions}
    return versions | set(aliases.values()) | set(filter(alias_history.is_version, before))


def _find(home: Path, key: str) -> Receipt | None:
    for version in sorted(_versions(home), key=int):
        if _tags(home, version).get(KEY_TAG) == key:
            return _receipt(home, version)
    return None


def _receipt(home: Path, version: str, *, created: bool = False) -> Receipt:
    tags = _tags(home, version)
    return Receipt(
        uri=f"{_SCHEME}{home / version}",
        name=f"{_SCHEME}{home}",
        version=version,
        digest=tags.get(DIGEST_TAG, ""),
        created=created,
        tags=tags,
    )


def _demand_version(home: Path, receipt: Receipt) -> None:
    if not (home / receipt.version / "version.json").is_file():
        raise RegistryError(f"there is no version {receipt.uri}", where=str(home), code=Code.NOT_IN_REGISTRY)


def _tags(home: Path, version: str) -> dict[str, str]:
    return as_texts(read_json(home / version / "version.json").get("tags", {}), home / version / "version.json")


def _aliases(home: Path) -> dict[str, str]:
    file = home / "aliases.json"
    aliases = as_texts(read_json(file), file)
    for alias, version in aliases.items():
        if not version.isdigit():
            raise RegistryError(
                f"the alias {alias!r} points to {version!r}, which is no version",
                fix="write the number of a version there",
                where=str(file),
            )
    return aliases


def _set_alias(home: Path, alias: str, version: str) -> None:
    write_json(home / "aliases.json", {**_aliases(home), alias: version})


def _history(home: Path, version: str, alias: str) -> History:
    return alias_history.followed(version, lambda one: _tags(home, one).get(alias_history.previous_tag(alias)))


def _remember(home: Path, version: str, alias: str, history: History) -> None:
    _retag(home, version, {alias_history.previous_tag(alias): alias_history.write(history)})


def _retag(home: Path, version: str, tags: Mapping[str, str]) -> None:
    file = home / version / "version.json"
    described = read_json(file)
    write_json(file, {**described, "tags": {**described.get("tags", {}), **tags}})
