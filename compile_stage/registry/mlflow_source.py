"""MLflow, the way in: a model URI → one immutable version, its files in our cache; and the data sets of its run."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.core.errors import RegistryError, SourceError
from compile_stage.core.leftovers import part_folder, remove_leftovers
from compile_stage.core.records import SourceModel
from compile_stage.registry.dataset_sources import demand_allowed
from compile_stage.registry.mlflow_connection import trouble
from compile_stage.registry.mlflow_download import download, download_from, store_of
from compile_stage.registry.mlflow_pinning import pin
from compile_stage.registry.mlflow_retries import answer_limit_s, repeated_call, transfer_limit, within
from compile_stage.registry.model_files import (
    DATASET_SUFFIXES,
    KEY_TAG,
    check_dataset_name,
    keep,
    payload_digest,
    read_model,
)


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
        with trouble(source.uri, missing=f"run {source.run_id} is no longer there"):
            run = client.get_run(source.run_id)
        file = _logged_input(run, name, part) or _run_artifact(run, source.uri, name, part)
        if file is None:
            raise RegistryError(
                f"run {source.run_id} has no data set called {name!r} that can be fetched",
                fix=f"log the file as artifact datasets/{name}.npz of that run, or name samples of yours under data in "
                "the policy (source: file:PATH)",
                where=source.uri,
            )
        final = into / f"{name}{file.suffix}"
        return file.replace(final)


def _logged_input(run: Any, name: str, part: Path) -> Path | None:
    from mlflow.data import get_source
    from mlflow.data.filesystem_dataset_source import FileSystemDatasetSource
    from mlflow.data.http_dataset_source import HTTPDatasetSource

    file = None
    for entry in run.inputs.dataset_inputs:
        if entry.dataset.name != name:
            continue
        folder = part / "input"
        folder.mkdir(exist_ok=True)
        with trouble(f"data set {name} of run {run.info.run_id}", missing="its file is no longer there"):
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


def _run_artifact(run: Any, place: str, name: str, part: Path) -> Path | None:
    """The store itself is asked: `MlflowClient.list_artifacts` asks for the run again, and for its models."""
    with trouble(place):
        store = store_of(run)
        folder = partial(repeated_call, store.list_artifacts, "datasets")
        held = {file.path for file in within(folder, answer_limit_s)}
        for suffix in DATASET_SUFFIXES:
            if (path := f"datasets/{name}{suffix}") in held:
                return download_from(store, path, part)
    return None
