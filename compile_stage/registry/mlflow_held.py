"""What MLflow's artifact store holds of a version, or of an upload: is it what was published?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.core.digest import list_tree
from compile_stage.core.errors import RegistryError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.records import Bundle
from compile_stage.registry.held_files import GONE, HeldFiles, differing, refuse_folder, refuse_held
from compile_stage.registry.mlflow_connection import SAME_FILE_FIX, is_code, trouble
from compile_stage.registry.mlflow_download import demand_listed, download
from compile_stage.registry.mlflow_retries import UnreachableError, repeated_call, transfer_limit, within
from compile_stage.registry.mlflow_stores import store_trouble

_LISTING_S = 150.0  # one folder of a store


def refuse_version(uri: str, tags: Mapping[str, str], bundle: Bundle) -> str | None:
    """None when the store holds what was published as `uri`, as far as `held_files` looks, or the reason. Behind a
    server, files are fetched a second time before they are called damaged: they may have been cut off or changed on the
    way, and what is called damaged stays refused.

    Args:
        tags: Of the version, or of the logged model.
        bundle: Of the same key.
    """
    from mlflow.exceptions import MlflowException

    try:
        store = _store(uri)
        if (folder := _folder(store)) is not None:
            _demand_there(folder, uri)
            return refuse_folder(folder, tags, bundle)
        return _refuse_fetched(uri, store, tags, bundle) and _refuse_fetched(uri, store, tags, bundle)
    except MlflowException as error:
        found = store_trouble(error)
        if is_code(error, "RESOURCE_DOES_NOT_EXIST") and not (found is not None and found.lacks_bucket):
            return GONE
        raise


def _refuse_fetched(uri: str, store: Any, tags: Mapping[str, str], bundle: Bundle) -> str | None:
    with temporary_folder("held") as scratch:
        sizes = _sizes(store)
        read = partial(_read, store, Path(scratch), sizes)
        reason = refuse_held(HeldFiles(sizes=sizes, path=read, here=False), tags, bundle)
    if reason is not None:  # also where the list that it goes by was cut short
        demand_listed(uri, [name for name in list_tree(Path(bundle.path)) if name not in sizes], uri)
    return reason


def upload(uri: str, staged: Path) -> None:
    """Upload all files of a folder, one by one: each is repeated by itself, has a time of its own, and is named by what
    goes wrong. MLflow uploads them one after the other too, and begins anew with the first.

    Args:
        uri: Of the logged model.

    Raises:
        RegistryError: The registry refuses a file, or can't be reached.
    """
    store = _store(uri)
    for name in list_tree(staged):
        folder, _, _ = name.rpartition("/")
        put = partial(store.log_artifact, str(staged / name), folder or None)
        try:
            with trouble(f"{uri}/{name}"):
                repeated_call(within, put, transfer_limit(staged / name))
        except UnreachableError as error:
            error.fix = f"{error.fix}. {SAME_FILE_FIX}"
            raise


def demand_uploaded(uri: str, staged: Path) -> None:
    """Raise RegistryError unless the store holds, byte for byte, what was uploaded."""
    folder = _folder(_store(uri))
    sizes = {name: (staged / name).stat().st_size for name in list_tree(staged)}
    with temporary_folder("uploaded") as scratch:
        there = folder if folder is not None else download(uri, Path(scratch) / "model", uri, sizes)
        held = set(list_tree(there, leave_out=("registered_model_meta",)))  # MLflow adds it to what it downloads
        missing, foreign = sorted(sizes.keys() - held), sorted(held - sizes.keys())
        if missing or foreign:
            demand_listed(uri, missing, uri)
            raise RegistryError(
                f"the upload is incomplete: {_some(missing)}"
                if missing
                else f"the upload holds files that nobody uploaded: {_some(foreign)}",
                fix="run again; a proxy's limit on the size of a request is a usual cause"
                if missing
                else "find out who else writes to the registry's store, then run again; nothing was published",
                where=uri,
            )
        wrong = differing(staged, there)
    if wrong:
        raise RegistryError(
            f"the upload is damaged, the registry holds other bytes of: {_some(wrong)}",
            fix="run again; nothing was published. If it stays so, look at the store's disk and at what is in front of "
            "the server",
            where=uri,
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _store(uri: str) -> Any:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = repeated_call(get_artifact_repository, uri)
    return getattr(store, "repo", store)


def _folder(store: Any) -> Path | None:
    """Where MLflow's store of local files has them; None of any other store."""
    folder = getattr(store, "artifact_dir", None)
    return Path(folder) if folder else None


def _demand_there(folder: Path, uri: str) -> None:
    """Raise RegistryError where not even the folder is there in which that of each model lies: a disk that is not
    mounted has lost nothing."""
    if not any(one.is_dir() for one in (folder, *folder.parents[:2])):
        raise RegistryError(
            f"the store's folder {folder.parents[1]} is not there",
            fix="mount it where MLflow looks for it, then run again; where its files are gone for good, delete the "
            "version",
            where=uri,
        )


def _sizes(store: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    folders: list[str | None] = [None]
    while folders:
        ask = partial(store.list_artifacts, folders.pop())
        for file in repeated_call(within, ask, lambda: _LISTING_S):
            if ".." in Path(file.path).parts or Path(file.path).is_absolute():
                raise RegistryError(f"the registry lists {file.path!r}, which lies outside of the model's folder")
            if file.is_dir:
                folders.append(file.path)
            else:
                sizes[file.path] = int(file.file_size or 0)
    return sizes


def _read(store: Any, into: Path, sizes: Mapping[str, int], name: str) -> Path:
    if (into / name).is_file() or name not in sizes:
        return into / name

    def fetch() -> None:
        store.download_artifacts(name, str(into))
        if (got := (into / name).stat().st_size) != sizes[name]:
            raise UnreachableError(
                f"{name} has {sizes[name]} bytes, and the server's answer had {got}",
                fix="look at what is in front of the server, then run again",
            )

    repeated_call(within, fetch, transfer_limit(into))
    return into / name
