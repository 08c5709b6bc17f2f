"""Tuning records in MLflow: one run for each key, in an experiment of their own, whose artifacts are the records.

Nothing is ever changed or deleted. Two machines that make a key's run at once leave two, and whoever reads takes what
both hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.errors import RegistryError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.tuning_records import MAX_BYTES
from compile_stage.registry.mlflow_connection import is_code, trouble
from compile_stage.registry.mlflow_download import download_of_run
from compile_stage.registry.model_files import TAG, link_or_copy

EXPERIMENT = "compile-stage-tuning"
"""The same for everybody, whatever MLFLOW_EXPERIMENT_NAME says: records are found again from other models'
experiments."""

KEY_TAG = TAG + "records"
_FOLDER = "records"
_NOTE = (
    "Tuning records of compile-stage: what was measured while models were compiled, for the tool and the machine that "
    "the run's name says. Later runs start from them. Deleting this run makes them measure again."
)


def pull(client: Any, key: str, have: Collection[str], into: Path) -> None:
    """Download what the runs of a key hold, but not the names in `have`."""
    with trouble(key), temporary_folder("records") as scratch:
        for run in _runs(client, _experiment(client), key):
            held = _held(client, run)
            wanted = [name for name, size in held.items() if name not in have and size <= MAX_BYTES]
            if len(wanted) == len(held) > 0:  # in one call, which MLflow makes side by side
                whole = download_of_run(client, run, _FOLDER, Path(scratch))
                got = {name: whole / name for name in wanted}
            else:
                got = {
                    name: download_of_run(client, run, f"{_FOLDER}/{name}", Path(scratch))
                    for name in wanted
                    if not (into / name).exists()
                }
            for name, path in got.items():
                shutil.move(path, into / name)


def push(client: Any, key: str, records: Mapping[str, Path]) -> int:
    """Upload what no run of the key holds whole; returns how many files that were."""
    with trouble(key), temporary_folder("records") as scratch:
        experiment = _experiment(client) or _make_experiment(client)
        runs = _runs(client, experiment, key)
        held = [_held(client, run) for run in runs]
        # A smaller file under its name is of an upload that was killed: the same bytes go there once more.
        fresh = {
            name: path
            for name, path in records.items()
            if not any(one.get(name) == path.stat().st_size for one in held)
        }
        if not fresh:
            return 0
        for name, path in fresh.items():
            link_or_copy(str(path), str(Path(scratch) / name))
        run = runs[0] if runs else _make_run(client, experiment, key)
        client.log_artifacts(run, scratch, _FOLDER)
        return len(fresh)


def _runs(client: Any, experiment: str | None, key: str) -> list[str]:
    """The runs of a key, the oldest first."""
    if experiment is None:
        return []
    runs = client.search_runs([experiment], filter_string=f"tags.`{KEY_TAG}` = '{key}'", max_results=100)
    return [run.info.run_id for run in sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))]


def _held(client: Any, run: str) -> dict[str, int]:
    """Name → size of a run's records."""
    listed = client.list_artifacts(run, _FOLDER)
    return {file.path.rpartition("/")[2]: int(file.file_size or 0) for file in listed if not file.is_dir}


def _make_run(client: Any, experiment: str, key: str) -> str:
    tags = {KEY_TAG: key, "mlflow.note.content": _NOTE}
    run = client.create_run(experiment, run_name=key, tags=tags).info.run_id
    client.set_terminated(run, "FINISHED")  # artifacts may still be added
    return str(run)


def _experiment(client: Any) -> str | None:
    held = client.get_experiment_by_name(EXPERIMENT)
    if held is None:
        return None
    if held.lifecycle_stage != "active":
        raise RegistryError(f"the experiment {EXPERIMENT!r}, which holds tuning records, was deleted", fix="restore it")
    return str(held.experiment_id)


def _make_experiment(client: Any) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(client.create_experiment(EXPERIMENT))
    except MlflowException as error:
        experiment = _experiment(client) if is_code(error, "RESOURCE_ALREADY_EXISTS") else None  # by another process
        if experiment is None:
            raise
        return experiment
