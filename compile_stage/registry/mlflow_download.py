"""The files of a model in MLflow, whole: what a proxy or a network cut off is asked for again, or named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import RegistryError, SourceError
from compile_stage.core.file_trees import refuse_tree
from compile_stage.core.json_files import read_json_object
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.storage import disk_full_of_text
from compile_stage.registry.descriptions import read_text
from compile_stage.registry.mlflow_connection import TRANSFER_FIX, trouble
from compile_stage.registry.mlflow_pinning import pin
from compile_stage.registry.mlflow_retries import (
    UnreachableError,
    failed_on_the_way,
    repeated_call,
    transfer_limit,
    within,
)

_FILE_NAME = re.compile(r"\w[\w./-]*\.[A-Za-z]\w*")  # model.onnx, and no version such as 1.20.1
_ASKED_BY_NAME = 5  # files that a list lacks; each may cost the time of a transfer


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

    into.mkdir(parents=True)
    into = into.resolve()
    with trouble(place, missing="the registry lists the model, but its files are not there"):
        store = _store(uri)
    _demand_plain_files(store, place)
    fetch = partial(mlflow.artifacts.download_artifacts, artifact_uri=uri, dst_path=str(into))
    if uri.startswith("models:/"):  # `download_artifacts` takes it for a path where a folder `models:` is here
        fetch = partial(store.download_artifacts, "", dst_path=str(into))
    with trouble(place, missing="the registry lists the model, but its files are not there"):
        with _full_disk_named(into):
            got = Path(_whole_or_file_by_file(store, into, fetch)).resolve()
        if into not in (got, *got.parents):
            raise RegistryError("MLflow put the files outside of the folder that it was given", where=place)
        if _cut_off(store, got, sizes) is not None:
            within(partial(_file_by_file, store, got, sizes), transfer_limit(into))
            if (cut := _cut_off(store, got, sizes)) is not None:
                raise RegistryError(cut, fix=TRANSFER_FIX, where=place)
        absent = [name for name in _source_files(got) if not (got / name).is_file()]
        demand_listed(uri, absent, place, store)
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


def download_of_run(client: Any, run_id: str, path: str, into: Path) -> Path:
    """Fetch an artifact of a run, a file or a folder, into a folder that is there; returns its place. `MlflowClient`'s
    own way says of whatever goes wrong, an expired account too, that there is no such artifact.

    Raises what the store raises (`trouble`).
    """
    return download_from(store_of(client.get_run(run_id)), path, into)


def store_of(run: Any) -> Any:
    """The store of a run's artifacts."""
    return _store(run.info.artifact_uri)


def download_from(store: Any, path: str, into: Path) -> Path:
    """`download_of_run`, of a run whose store is known."""
    fetch = partial(store.download_artifacts, path, str(into))
    with _full_disk_named(into):
        return Path(repeated_call(within, fetch, transfer_limit(into)))


@contextmanager
def _full_disk_named(into: Path) -> Iterator[None]:
    """Of files that could not be written MlflowException keeps the text."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if (full := disk_full_of_text(str(error), str(into))) is not None:
            raise full from error
        raise


def demand_listed(uri: str, unlisted: Iterable[str], place: str, store: Any = None) -> None:
    """Raise UnreachableError where a server has a file that its list of files left out: the list was cut short on the
    way, and nothing is missing. Files are asked for by their names, so what is really gone is not held to be there.

    Args:
        unlisted: Files of the model that the list lacks; the first few are asked for.
        store: Of the model's files, where it was made already: two requests.
    """
    names = [name for name in unlisted if not Path(name).is_absolute() and ".." not in Path(name).parts]
    if not names:
        return
    store = store or _store(uri)
    store = getattr(store, "repo", None) or store
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
