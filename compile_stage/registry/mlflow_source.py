"""MLflow, the way in: a model URI → one immutable version, its files in our cache; and the data sets of its run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import RegistryError, SourceError
from compile_stage.core.file_trees import refuse_tree
from compile_stage.core.json_files import read_json_object
from compile_stage.core.leftovers import part_folder, remove_leftovers, temporary_folder
from compile_stage.core.records import SourceModel, record
from compile_stage.core.spelling import did_you_mean
from compile_stage.core.storage import disk_full_of_text
from compile_stage.registry.dataset_sources import demand_allowed
from compile_stage.registry.descriptions import read_text
from compile_stage.registry.mlflow_connection import TRANSFER_FIX, is_code, trouble
from compile_stage.registry.mlflow_retries import (
    UnreachableError,
    failed_on_the_way,
    repeated_call,
    transfer_limit,
    within,
)
from compile_stage.registry.model_files import (
    DATASET_SUFFIXES,
    KEY_TAG,
    check_alias,
    check_dataset_name,
    check_name,
    keep,
    payload_digest,
    read_model,
)

_FORMS = "write models:/NAME/VERSION, models:/NAME@ALIAS, models:/NAME/latest, models:/m-ID or runs:/RUN_ID/NAME"
_MODEL_ID = re.compile(r"m-[0-9a-f]{32}")
_MODEL_FOLDER = re.compile(r"/models/(m-[0-9a-f]{32})/artifacts/?$")
_SUGGESTED_FROM = 500  # names that a mistyped one is compared with
_FILE_NAME = re.compile(r"\w[\w./-]*\.[A-Za-z]\w*")  # model.onnx, and no version such as 1.20.1
_ASKED_BY_NAME = 5  # files that a list lacks; each may cost the time of a transfer
_COPIES = 8  # a version copied from a copy of a copy ...; more than that is a circle


@record
class Pinned:
    """What a URI stands for, once.

    Attributes:
        uri: Immutable, as published in lineage.
        download: What its files are fetched by.
    """

    uri: str
    download: str
    name: str
    version: str = ""
    model_id: str = ""
    run_id: str = ""
    experiment_id: str = ""
    tags: dict[str, str]


def resolve(client: Any, uri: str, into: Path) -> SourceModel:
    """Pin the URI and copy its files into a folder below `into`, named by digest.

    Raises:
        RegistryError: There is no such model, version, alias or file; or the registry refuses.
        SourceError: The model was published by us, or its `MLmodel` can't be parsed.
    """
    pinned = pin(client, uri)
    if KEY_TAG in pinned.tags:
        raise SourceError(
            "this version was published by compile-stage: it is already compiled and can't be a source",
            fix=f"name the model that it was made from: {pinned.tags.get('compile_stage.source', 'see its tags')}",
            where=pinned.uri,
        )
    folder = keep(into, pinned.uri, lambda part: download(pinned.download, part / "model", pinned.uri))
    files = read_model(folder, pinned.uri)
    return SourceModel(
        uri=pinned.uri,
        name=pinned.name,
        version=pinned.version,
        flavor=files.flavor,
        path=str(folder),
        digest=payload_digest(folder),
        described=files.described,
        mlmodel=files.mlmodel,
        signature=files.signature,
        registry="mlflow",
        logged_model_id=pinned.model_id,
        run_id=pinned.run_id or files.run_id,
        experiment_id=pinned.experiment_id,
        tags=pinned.tags,
    )


def pin(client: Any, uri: str) -> Pinned:
    """The immutable thing that the URI means now."""
    scheme, _, rest = uri.partition(":")
    if scheme == "runs":
        return _pin_run(client, uri, rest)
    if not rest.startswith("/") or rest.startswith("//"):
        raise RegistryError(f"{uri!r} is not a model URI that can be resolved", fix=_FORMS, code=Code.NOT_IN_REGISTRY)
    path = rest.strip("/")
    if _MODEL_ID.fullmatch(path):
        return _pin_logged_model(client, uri, path)
    name, slash, version = path.partition("/")
    alias = ""
    if not slash:
        name, _, alias = path.rpartition("@")
        if not name or not alias:
            raise RegistryError(f"{uri!r} names no version", fix=_FORMS, code=Code.NOT_IN_REGISTRY)
    check_name(name)
    if "/" in version or (slash and not (version.isdigit() or version == "latest")):
        raise RegistryError(
            f"{version!r} is not a version number",
            fix=f"{_FORMS}; MLflow's stages are deprecated, use an alias",
            where=uri,
            code=Code.NOT_IN_REGISTRY,
        )
    return _pin_version(client, uri, name, version, alias)


def download(uri: str, into: Path, place: str, sizes: Mapping[str, int] | None = None) -> Path:
    """Fetch a model's files into the new folder `into`; returns the folder that holds `MLmodel`.

    A destination is always given: without one, MLflow answers with a local registry's own folder and writes into it.

    Args:
        sizes: File → bytes, where it is known; else the store is asked, a request for each folder.

    Raises:
        RegistryError: A file is cut off each time that it is asked for; or the registry refuses or can't be reached.
        SourceError: A file of the model is a link that leads out of it, or none.
    """
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    into.mkdir(parents=True)
    into = into.resolve()
    with trouble(place, missing="the registry lists the model, but its files are not there"):
        store = _store(uri)
    _demand_plain_files(store, place)
    fetch = partial(mlflow.artifacts.download_artifacts, artifact_uri=uri, dst_path=str(into))
    if uri.startswith("models:/"):  # `download_artifacts` takes it for a path where a folder `models:` is here
        fetch = partial(store.download_artifacts, "", dst_path=str(into))
    with trouble(place, missing="the registry lists the model, but its files are not there"):
        try:
            got = Path(_whole_or_file_by_file(store, into, fetch)).resolve()
        except MlflowException as error:  # of files that could not be written it keeps the text
            if (full := disk_full_of_text(str(error), str(into))) is not None:
                raise full from error
            raise
        if into not in (got, *got.parents):
            raise RegistryError("MLflow put the files outside of the folder that it was given", where=place)
        if _cut_off(store, got, sizes) is not None:
            within(partial(_file_by_file, store, got, sizes), transfer_limit(into))
            if (cut := _cut_off(store, got, sizes)) is not None:
                raise RegistryError(cut, fix=TRANSFER_FIX, where=place)
        demand_listed(uri, [name for name in _source_files(got) if not (got / name).is_file()], place)
    return got


def _source_files(model: Path) -> list[str]:
    """The files that a model must have: `MLmodel`, and what the flavors in it name as a file."""
    from mlflow.models import Model

    names = ["MLmodel"]
    with suppress(Exception):  # whoever reads it next says what is wrong
        read_text(model / "MLmodel")  # raises for what would keep the next line busy
        flavors = Model.load(str(model)).flavors
        values = [value for flavor in flavors.values() for key, value in flavor.items() if key != "loader_module"]
        names += [value for value in values if isinstance(value, str) and _FILE_NAME.fullmatch(value)]
    return names


def published_files(model: Path) -> list[str]:
    """The files that a published model must have: all that its manifest lists, where that is there."""
    names = ["MLmodel", "data/manifest.json"]
    with suppress(OSError, ValueError, TypeError, AttributeError):  # whoever reads it next says what is wrong
        manifest = read_json_object(model / "data" / "manifest.json")
        names += [f"data/{name}" for name in manifest.get("files", {})]
        names += [*manifest.get("code", {}), *manifest.get("beside", {})]
    return names


def download_file(client: Any, uri: str, path: str, into: Path) -> Path:
    """Fetch one file of a model into a folder that is there, under its own path; the rest stays where it is.

    Raises:
        RegistryError: There is no such model or file; or the registry refuses or can't be reached.
    """
    import mlflow.artifacts

    pinned = pin(client, uri)
    fetch = partial(mlflow.artifacts.download_artifacts, artifact_uri=f"{pinned.download}/{path}", dst_path=str(into))
    with trouble(pinned.uri, missing=f"the registry lists the model, but {path} is not there"):
        try:
            return Path(within(fetch, transfer_limit(into)))
        except Exception as error:
            # MLflow tells a file that is gone and a network that failed as one error.
            if isinstance(error, UnreachableError) or not failed_on_the_way(error):
                raise
            if any(name == path for name, _ in _listed(_store(pinned.download))):
                raise
            raise RegistryError(
                f"the registry lists the model, but its files are not there (no {path})",
                fix="log the model again; a version stays READY even after its artifacts were deleted",
                where=pinned.uri,
                code=Code.NOT_IN_REGISTRY,
            ) from error


def _whole_or_file_by_file(store: Any, into: Path, fetch: Callable[[], str]) -> str:
    """The folder with all files. MLflow gives up the whole of them for one that fails, and of a hundred requests over a
    network that loses one in twenty, each attempt loses some: those are asked for one by one, each again and again."""
    try:
        return within(fetch, transfer_limit(into))
    except Exception as error:
        if isinstance(error, UnreachableError) or not failed_on_the_way(error):
            raise
    return within(partial(_file_by_file, store, into), transfer_limit(into))


def _file_by_file(store: Any, into: Path, sizes: Mapping[str, int] | None = None) -> str:
    for path, size in _sizes(store, into, sizes):
        if not _is_whole(into / path, size):
            repeated_call(store.download_artifacts, path, str(into))
    return str(into)


def _cut_off(store: Any, got: Path, sizes: Mapping[str, int] | None) -> str | None:
    """Which file is not as large as the registry lists it. A body that a proxy cut off is no error to MLflow where the
    proxy wrote its length anew, and the model would seem unreadable."""
    for path, size in _sizes(store, got, sizes):
        if size is not None and not _is_whole(got / path, size):
            arrived = (got / path).stat().st_size if (got / path).is_file() else 0
            return f"{path} arrived with {arrived:,} of {size:,} bytes"
    return None


def demand_listed(uri: str, unlisted: Iterable[str], place: str) -> None:
    """Raise UnreachableError where a server has a file that its list of files left out: the list was cut short on the
    way, and nothing is missing. Files are asked for by their names, so what is really gone is not held to be there.

    Args:
        unlisted: Files of the model that the list lacks; the first few are asked for.
    """
    names = [name for name in unlisted if not Path(name).is_absolute() and ".." not in Path(name).parts]
    if not names:
        return
    store = getattr(_store(uri), "repo", None) or _store(uri)
    if getattr(store, "artifact_dir", None):  # MLflow's store of local files: no list comes over a network
        return
    with temporary_folder("unlisted") as scratch:
        for name in names[:_ASKED_BY_NAME]:
            # Whatever fails: it is missing then, as the list says.
            with suppress(Exception):
                within(partial(store.download_artifacts, name, str(scratch)), transfer_limit(Path(scratch)))
            if (Path(scratch) / name).is_file():
                raise UnreachableError(
                    f"the server's list of files lacks {name}, which is there",
                    fix="look at what is in front of the server (a proxy, a gateway): it cuts answers short. Then run "
                    "again",
                    where=place,
                )


def _store(uri: str) -> Any:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return repeated_call(get_artifact_repository, uri)


def _sizes(store: Any, got: Path, known: Mapping[str, int] | None) -> Iterator[tuple[str, int | None]]:
    """The files that must be whole: those that the store lists, or of those whose sizes are known what arrived. Whoever
    knows the sizes knows what is missing."""
    if known is None:
        return _listed(store)
    return ((path, size) for path, size in known.items() if (got / path).is_file())


def _listed(store: Any) -> Iterator[tuple[str, int | None]]:
    """All files of a model, with their sizes in bytes where the store says them."""
    folders = [""]
    while folders:
        for file in repeated_call(store.list_artifacts, folders.pop() or None):
            if file.is_dir:
                folders.append(file.path)
            else:
                yield file.path, file.file_size


def _is_whole(path: Path, size: int | None) -> bool:
    return size is not None and path.is_file() and path.stat().st_size == size


def _demand_plain_files(store: Any, place: str) -> None:
    """Raise SourceError where the files lie in a folder of this machine, which MLflow copies with all that its links
    lead to."""
    folder = getattr(getattr(store, "repo", store), "artifact_dir", None)  # of MLflow's store of local files
    if folder and Path(folder).is_dir() and (reason := refuse_tree(folder)) is not None:
        raise SourceError(reason, fix="log the model again, with its own files", where=place)


def dataset(client: Any, source: SourceModel, name: str, into: Path) -> Path:
    """A data set of the run that made the source, as one file below `into`.

    Found as a data set that was logged as an input of the run under that name and whose source is a readable
    file, or as an artifact `datasets/NAME.npz|parquet|csv` of the run. MLflow keeps only digest and profile of the
    values themselves, so one that was logged from memory has nothing to be fetched.
    """
    check_dataset_name(name)
    if not source.run_id:
        raise RegistryError(
            f"the data set {name!r} can't be found: no run is known that made {source.uri}",
            fix="use data.*.source: file:PATH in the policy",
        )
    into.mkdir(parents=True, exist_ok=True)
    into = into.resolve()
    remove_leftovers(into)
    with part_folder(into) as part:
        file = _logged_input(client, source, name, part) or _run_artifact(client, source, name, part)
        if file is None:
            raise RegistryError(
                f"run {source.run_id} has no data set called {name!r} that can be fetched",
                fix=f"log the file as artifact datasets/{name}.npz of that run, or name samples of yours under data in "
                "the policy (source: file:PATH)",
                where=source.uri,
            )
        final = into / f"{name}{file.suffix}"
        return file.replace(final)


def _pin_version(client: Any, uri: str, name: str, version: str, alias: str) -> Pinned:
    with trouble(uri, missing=f"there is no model version {uri}"), _naming_what_is_missing(client, uri, name):
        if alias:
            check_alias(alias)
            version = _aliased(client, uri, name, alias)
        elif version == "latest":
            client.get_registered_model(name)  # so that a missing model is named as such
            newest = client.search_model_versions(f"name = '{name}'", max_results=1, order_by=["version_number DESC"])
            if not newest:
                raise RegistryError(
                    f"the registered model {name!r} has no version", where=uri, code=Code.NOT_IN_REGISTRY
                )
            version = str(newest[0].version)
        held = client.get_model_version(name, version)
    exact = f"models:/{name}/{held.version}"
    model = _origin(client, held, exact)
    return Pinned(
        uri=exact,
        download=exact,
        name=name,
        version=str(held.version),
        model_id=model.model_id if model else "",
        run_id=held.run_id or (model.source_run_id if model else "") or "",
        experiment_id=(model.experiment_id if model else _experiment_of(client, held.run_id)) or "",
        tags={str(k): str(v) for k, v in (held.tags or {}).items()},
    )


@contextmanager
def _naming_what_is_missing(client: Any, uri: str, name: str) -> Iterator[None]:
    """Say which word of the URI is wrong: MLflow answers alike for a model that is missing and for a version."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if not is_code(error, "RESOURCE_DOES_NOT_EXIST"):
            raise
        held = [model.name for model in client.search_registered_models(max_results=_SUGGESTED_FROM)]
        if name in held:
            raise
        near = did_you_mean(name, held)
        hint = f"did you mean {near!r}?" if near else "check the name and MLFLOW_TRACKING_URI"
        raise RegistryError(
            f"there is no registered model {name!r}", fix=hint, where=uri, code=Code.NOT_IN_REGISTRY
        ) from error


def _aliased(client: Any, uri: str, name: str, alias: str) -> str:
    aliases = client.get_registered_model(name).aliases
    if alias not in aliases:
        listed = (
            f"it has: {', '.join(sorted(aliases))}" if aliases else "it has none; name a version: models:/NAME/VERSION"
        )
        raise RegistryError(
            f"the registered model {name!r} has no alias {alias!r}", fix=listed, where=uri, code=Code.NOT_IN_REGISTRY
        )
    return str(aliases[alias])


def _origin(client: Any, version: Any, uri: str) -> Any:
    """The logged model behind a version; None when it was registered from plain files, or may not be read."""
    model_id = origin_id(client, version, uri)
    return _logged_model(client, model_id) if model_id else None


def origin_id(client: Any, version: Any, uri: str) -> str:
    """The id of the logged model behind a version, through copies of versions; empty when it was registered from plain
    files, or when what it was copied from is gone and the place of its files names no logged model.

    Args:
        uri: Of the version, for messages.
    """
    from mlflow.exceptions import MlflowException

    copied = version
    for _ in range(_COPIES):
        if version.model_id:
            return str(version.model_id)
        path = str(version.source).removeprefix("models:/")
        if _MODEL_ID.fullmatch(path):
            return path
        if not str(version.source).startswith("models:/"):
            return ""
        name, _, number = path.rpartition("/")
        try:
            with trouble(uri):
                version = client.get_model_version(name, number)
        except RegistryError as error:  # renamed, or deleted: a copy has its files all the same
            if not (
                isinstance(cause := error.__cause__, MlflowException) and is_code(cause, "RESOURCE_DOES_NOT_EXIST")
            ):
                raise
            return _stored_as(client, copied, uri)
    raise RegistryError("it is a copy of a copy without end", where=uri)


def _stored_as(client: Any, version: Any, uri: str) -> str:
    """The id of the logged model whose files a version has, by where they lie; empty where that names none."""
    with trouble(uri):
        place = str(client.get_model_version_download_uri(version.name, version.version))
    named = _MODEL_FOLDER.search(place)
    model = _logged_model(client, named[1]) if named else None
    return model.model_id if model is not None and model.artifact_location == place else ""


def _logged_model(client: Any, model_id: str) -> Any:
    """The logged model, or None where one may read the version but not the experiment that the model belongs to."""
    from mlflow.exceptions import MlflowException

    try:
        with trouble(f"models:/{model_id}"):
            return client.get_logged_model(model_id)
    except RegistryError as error:
        cause = error.__cause__
        if isinstance(cause, MlflowException) and is_code(cause, "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"):
            return None
        raise


def _pin_logged_model(client: Any, uri: str, model_id: str) -> Pinned:
    with trouble(uri, missing=f"there is no logged model {model_id}"):
        model = client.get_logged_model(model_id)
    _demand_ready(model, uri)
    return _pinned_model(model)


def _pin_run(client: Any, uri: str, rest: str) -> Pinned:
    run_id, _, path = rest.strip("/").partition("/")
    if not path or rest.startswith("//"):
        raise RegistryError(f"{uri!r} names no model of the run", fix=_FORMS, code=Code.NOT_IN_REGISTRY)
    with trouble(uri, missing=f"there is no run {run_id}"):
        run = client.get_run(run_id)
        models = client.search_logged_models([run.info.experiment_id], filter_string=f"source_run_id = '{run_id}'")
    named = [model for model in models if model.name == path]
    if named:
        ready = [model for model in named if model.status == "READY"]
        # A run may log the same name at several steps; MLflow itself takes the newest.
        newest = max(ready or named, key=lambda model: (model.creation_timestamp, model.model_id))
        _demand_ready(newest, uri)
        return _pinned_model(newest)
    with trouble(uri):
        held = [file.path for file in client.list_artifacts(run_id, path)]
    if f"{path}/MLmodel" not in held:
        names = sorted({model.name for model in models})
        listed = f"it has: {', '.join(names)}" if names else "it has none"
        raise RegistryError(f"run {run_id} has no model {path!r}", fix=listed, where=uri, code=Code.NOT_IN_REGISTRY)
    exact = f"runs:/{run_id}/{path}"  # logged by MLflow 2, as plain artifacts of the run
    return Pinned(
        uri=exact,
        download=exact,
        name=path.rpartition("/")[2],
        run_id=run_id,
        experiment_id=run.info.experiment_id,
        tags={},
    )


def _pinned_model(model: Any) -> Pinned:
    uri = f"models:/{model.model_id}"
    return Pinned(
        uri=uri,
        download=uri,
        name=model.name or model.model_id,
        model_id=model.model_id,
        run_id=model.source_run_id or "",
        experiment_id=str(model.experiment_id),
        tags={str(k): str(v) for k, v in (model.tags or {}).items()},
    )


def _demand_ready(model: Any, uri: str) -> None:
    if model.status != "READY":
        status = getattr(model.status, "value", model.status)
        raise RegistryError(
            f"the logged model {model.model_id} is {status}, not READY: its upload never ended",
            fix="log the model again",
            where=uri,
        )


def _experiment_of(client: Any, run_id: str | None) -> str:
    if not run_id:
        return ""
    try:
        with trouble(f"runs:/{run_id}"):
            return str(client.get_run(run_id).info.experiment_id)
    except RegistryError:
        return ""  # lineage goes to tags then; the model itself can still be read


def _logged_input(client: Any, source: SourceModel, name: str, part: Path) -> Path | None:
    from mlflow.data import get_source
    from mlflow.data.filesystem_dataset_source import FileSystemDatasetSource
    from mlflow.data.http_dataset_source import HTTPDatasetSource

    with trouble(source.uri, missing=f"run {source.run_id} is no longer there"):
        inputs = client.get_run(source.run_id).inputs.dataset_inputs
    file = None
    for entry in inputs:
        if entry.dataset.name != name:
            continue
        folder = part / "input"
        folder.mkdir(exist_ok=True)
        with trouble(f"data set {name} of run {source.run_id}", missing="its file is no longer there"):
            origin = get_source(entry)
            # Spark, Hugging Face, Delta and code sources have no file to download.
            if not isinstance(origin, FileSystemDatasetSource | HTTPDatasetSource):
                continue
            demand_allowed(origin.url if isinstance(origin, HTTPDatasetSource) else origin.uri, name)
            load = partial(origin.load, dst_path=str(folder))
            got = Path(within(load, transfer_limit(folder)))
        if folder not in got.parents:  # never move a file that is somebody's own
            got = Path(shutil.copy2(got, folder / got.name)) if got.is_file() else got
        if got.suffix in DATASET_SUFFIXES and got.is_file():
            file = got
    return file


def _run_artifact(client: Any, source: SourceModel, name: str, part: Path) -> Path | None:
    with trouble(source.uri):
        held = {file.path for file in client.list_artifacts(source.run_id, "datasets")}
        for suffix in DATASET_SUFFIXES:
            if (path := f"datasets/{name}{suffix}") in held:
                return Path(client.download_artifacts(source.run_id, path, str(part)))
    return None
