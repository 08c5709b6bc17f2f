"""How the runs of a publication end: with the version, or when the push that made them was killed, failed or was
interrupted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from compile_stage.core.records import Receipt, record
from compile_stage.registry.mlflow_connection import connect, is_code, single_writer
from compile_stage.registry.mlflow_retries import within
from compile_stage.registry.model_files import TAG

WRITER_TAG = TAG + "writer"
REFUSED = ("PERMISSION_DENIED", "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE")
UNFINISHED = ("RUNNING", "KILLED")
"""The states of a run of which no version was made yet."""
_ENDING_S = 20.0  # to end the runs of a push that failed


@record
class Runs:
    """The runs of a publication: one parent for source and policy, one child for each target."""

    experiment_id: str
    parent: str
    child: str


def end_published(client: Any, name: str, receipt: Receipt) -> None:
    """Mark the runs of a published version as finished, also those of a push that was killed before it could."""
    for run in runs_of(client, client.get_model_version(name, receipt.version)):
        if run.info.status in UNFINISHED:
            client.set_terminated(run.info.run_id, "FINISHED")


def end_killed(client: Any, experiment_id: str, writer: str, *, but: Collection[str] = ()) -> None:
    """End what earlier holders of this place left RUNNING: they were killed while they published under another key,
    such as that of another policy, and nobody will push that key again; or their push has failed. A run that another
    machine goes on with is only marked, and its push marks it FINISHED; an upload that is READY stays, since another
    machine may be making a version of it.

    Args:
        but: Runs that are left alone.
    """
    from mlflow.exceptions import MlflowException

    mine = f"tags.`{WRITER_TAG}` = '{writer}' and attributes.status = 'RUNNING'"
    left = client.search_runs([experiment_id], filter_string=mine)
    for run in sorted(left, key=lambda run: "mlflow.parentRunId" not in run.data.tags):  # the parents last
        run_id = run.info.run_id
        if run_id in but:
            continue
        try:
            _end_unpublished(client, experiment_id, run_id, writer)
        except MlflowException as error:  # somebody deleted it meanwhile, or keeps it from this account
            if not is_code(error, *REFUSED):
                raise


@contextmanager
def ending_what_failed(name: str) -> Iterator[Callable[[str], None]]:
    """Where the push of a registered model, with all its attempts, fails or is interrupted, end what it began: its runs
    would be RUNNING, and its upload PENDING, for ever where nobody pushes again. The next push of the key goes on with
    the runs. Whatever fails here: why the push ended is what is reported.

    Yields:
        What the push calls with the id of each experiment before it makes runs in it. Where it called it with none,
        nothing is asked of the registry, which may be out of reach.
    """
    experiments: set[str] = set()
    try:
        yield experiments.add
    except (Exception, KeyboardInterrupt):
        if experiments:
            with suppress(Exception):
                within(partial(_end_failed, name, experiments), lambda: _ENDING_S)
        raise


def _end_failed(name: str, experiments: Collection[str]) -> None:
    client = connect()
    with single_writer(name) as writer:  # another push of this machine may have begun meanwhile
        for experiment_id in experiments:
            end_killed(client, experiment_id, writer)


def _end_unpublished(client: Any, experiment_id: str, run_id: str, writer: str) -> None:
    """Delete this place's unfinished uploads of a run whose push is over, and mark it as FINISHED, where something was
    published of it or below it, else as KILLED."""
    for model in client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'"):
        if model.status != "READY" and model.tags.get(WRITER_TAG) == writer:
            client.delete_logged_model(model.model_id)
    finished = f"tags.`mlflow.parentRunId` = '{run_id}' and attributes.status = 'FINISHED'"
    published = client.search_model_versions(f"run_id = '{run_id}'") or client.search_runs(
        [experiment_id], filter_string=finished, max_results=1
    )
    client.set_terminated(run_id, "FINISHED" if published else "KILLED")


def runs_of(client: Any, version: Any) -> list[Any]:
    """The child and the parent run of a published version, without one that somebody deleted, also for good (`mlflow
    gc`)."""
    child = _run(client, version.run_id)
    parent = _run(client, child.data.tags.get("mlflow.parentRunId")) if child is not None else None
    return [run for run in (child, parent) if run is not None and run.info.lifecycle_stage == "active"]


def _run(client: Any, run_id: str | None) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id) if run_id else None
    except MlflowException as error:
        if not is_code(error, "RESOURCE_DOES_NOT_EXIST"):
            raise
        return None
