"""MLflow, the way back: a bundle → one registered version with its lineage, exactly once.

Nothing that a reader takes for a publication exists before the version does, and the version is made in one call with
all its tags. Everything before it can be found again by tag and is completed, or thrown away, by the next push of the
same key; so a process may be killed between any two calls.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_of
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import RegistryError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.records import Bundle, Receipt, SourceModel, record
from compile_stage.registry.held_files import GONE
from compile_stage.registry.mlflow_connection import is_code, single_writer, trouble
from compile_stage.registry.mlflow_datasets import measured_on, validation_dataset
from compile_stage.registry.mlflow_endings import (
    REFUSED,
    UNFINISHED,
    WRITER_TAG,
    Runs,
    end_killed,
    end_published,
    runs_of,
)
from compile_stage.registry.mlflow_held import demand_uploaded, refuse_version, upload
from compile_stage.registry.mlflow_retries import UnreachableError, refused_with
from compile_stage.registry.mlflow_stores import store_trouble
from compile_stage.registry.mlflow_versions import (
    model_of,
    receipt_of,
    refuse_deleted,
    remove_doubles,
    taken_away,
    versions_of,
)
from compile_stage.registry.model_files import (
    DAMAGED,
    DIGEST_TAG,
    KEY_TAG,
    REPORT_TAG,
    TAG,
    check_name,
    has_report,
    link_or_copy,
    prefixed,
    replaced_note,
    report_state,
)
from compile_stage.serving.version_tags import DELETED

_RUN_TAG = TAG + "run_key"
_PUSH_TAG = TAG + "push"
_EXPERIMENT = "compile-stage"
_NOTE_CHARS = 7500  # MLflow cuts a run's tags at 8000
_PARAM_CHARS = 6000
_ATTEMPTS = 4  # as many machines at once
_PAUSES_S = (0.05, 0.2, 0.5, 1.0)
_ABANDONED_S = 24 * 3600  # what another machine began so long ago is dead: large models take hours on a slow line


@record
class _Push:
    """What one push works with.

    Attributes:
        files: Name → file of the reports.
        writer: This machine's place for the registered model (`single_writer`).
        began: Is called with the id of an experiment before runs are made in it.
    """

    client: Any
    bundle: Bundle
    source: SourceModel
    files: Mapping[str, Path]
    writer: str
    began: Callable[[str], None]


def push(
    client: Any, bundle: Bundle, source: SourceModel, files: Mapping[str, Path], began: Callable[[str], None]
) -> Receipt:
    """Publish the bundle, or find it published: same key, same version.

    Args:
        began: Is called with the id of an experiment before runs are made in it (`ending_what_failed`).

    Raises:
        RegistryError: The registry can't be reached or refuses; nothing half-done is visible then.
    """
    check_name(bundle.name)
    with trouble(bundle.name), single_writer(bundle.name) as writer:
        receipt = _find_or_push(
            _Push(client=client, bundle=bundle, source=source, files=files, writer=writer, began=began)
        )
        end_published(client, bundle.name, receipt)
        return receipt


def attach(client: Any, receipt: Receipt, files: Mapping[str, Path]) -> None:
    """Replace the reports in the runs of a published version, and then tag the version, so that a call that was killed
    is made again."""
    missing = f"there is no version {receipt.uri}"
    with trouble(receipt.uri, missing=missing), single_writer(receipt.name):
        version = client.get_model_version(receipt.name, receipt.version)
        if has_report(version.tags or {}, receipt):
            return
        for run in runs_of(client, version):
            _log_reports(client, run.info.run_id, files)
        client.set_model_version_tag(receipt.name, receipt.version, REPORT_TAG, report_state(receipt))


def _find_or_push(push: _Push, attempts: int = _ATTEMPTS) -> Receipt:
    from mlflow.exceptions import MlflowException

    client, bundle = push.client, push.bundle
    note = ""
    while held := versions_of(client, bundle.name, bundle.key):
        receipt = receipt_of(held[0])
        deleted, damage = refuse_deleted(client, held[0]), refuse_version(receipt.uri, receipt.tags, bundle)
        reason = deleted or damage
        if reason is None:
            remove_doubles(client, held)
            return receipt
        prefix = DELETED if deleted and damage in (None, GONE) else DAMAGED
        _set_aside(client, receipt, prefix + bundle.key)
        note = replaced_note(receipt.uri, reason, prefix)
    try:
        return replace(_publish(push), note=note)
    except MlflowException as error:
        if attempts == 1 or not taken_away(error):
            raise
    return _find_or_push(push, attempts - 1)


def _set_aside(client: Any, receipt: Receipt, key: str) -> None:
    """Let a version no longer be found by its key. It stays, with its number, files and aliases: what to do with it is
    for people to say."""
    client.set_model_version_tag(receipt.name, receipt.version, KEY_TAG, key)


def _publish(push: _Push) -> Receipt:
    """Make the version, with its runs and its logged model."""
    client, bundle, source, writer = push.client, push.bundle, push.source, push.writer
    runs = _runs(push)
    end_killed(client, runs.experiment_id, writer, but=(runs.parent, runs.child))
    _describe(client, runs, bundle, push.files)
    model = _logged_model(client, bundle, source, runs, writer)
    _lineage(client, runs, model, source)
    _measurements(client, runs, model, bundle, source)
    return _version(client, bundle, source, runs, model, writer)


def _version(client: Any, bundle: Bundle, source: SourceModel, runs: Runs, model: Any, writer: str) -> Receipt:
    _registered_model(client, bundle.name, source)
    push_id = secrets.token_hex(8)
    tags = {**_tags(bundle, source), _PUSH_TAG: push_id}
    created = client.create_model_version(
        bundle.name,
        f"models:/{model.model_id}",
        run_id=runs.child,
        tags=tags,
        description=_description(bundle, runs),
        model_id=model.model_id,
        await_creation_for=0,
    )
    held = versions_of(client, bundle.name, bundle.key)
    if not held:
        raise _not_listed(client, receipt_of(created))
    first = held[0]
    if first.version == created.version:
        return receipt_of(created, created=True)
    client.delete_model_version(bundle.name, created.version)
    if (first.tags or {}).get(_PUSH_TAG) == push_id:
        return receipt_of(first, created=True)  # our own call, whose answer was lost and which HTTP then sent again
    # Another machine was faster: its version stands, and ours goes with its files, unless they are what that machine
    # published too.
    if model.tags.get(WRITER_TAG) == writer and model_of(first) != model.model_id:
        client.delete_logged_model(model.model_id)
    return receipt_of(first)


def _not_listed(client: Any, receipt: Receipt) -> RegistryError:
    """What to say where the registry does not list the version that it just made: somebody deleted it, or the answer
    came empty, and then the push is made again and finds it."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_model_version(receipt.name, receipt.version)
    except MlflowException as error:
        if not is_code(error, "RESOURCE_DOES_NOT_EXIST"):
            raise
        return RegistryError(
            "the version was deleted while it was being published",
            fix="find out who deletes versions of this model, then run again: it is published anew",
            where=receipt.uri,
            code=Code.NOT_IN_REGISTRY,
        )
    return UnreachableError(
        "the registry does not list the version that it just made",
        fix="look at what is in front of the server (a proxy, a gateway), then run again; it is found then",
        where=receipt.uri,
    )


def _registered_model(client: Any, name: str, source: SourceModel) -> None:
    """Make the registered model if it isn't there; describe it where nobody did."""
    from mlflow.exceptions import MlflowException

    description = (
        f"{source.name}, compiled by compile-stage: one version for each target and policy. "
        "A version's description says how fast and how exact it is."
    )
    try:
        client.create_registered_model(name, tags={TAG + "role": "compiled"}, description=description)
    except MlflowException as error:
        if not is_code(error, "RESOURCE_ALREADY_EXISTS"):
            raise
        if not client.get_registered_model(name).description:
            try:
                client.update_registered_model(name, description)
            except MlflowException as refusal:  # who may add versions may not be allowed to describe the model
                if not is_code(refusal, *REFUSED):
                    raise


def _description(bundle: Bundle, runs: Runs) -> str:
    """The bundle's summary and where the report is. The link has no host, so it holds on whatever address MLflow's
    pages are read."""
    link = f"#/experiments/{runs.experiment_id}/runs/{runs.child}/artifacts/report.html"
    return f"{bundle.summary} Report: [runs:/{runs.child}/report.html]({link})".strip()


def _tags(bundle: Bundle, source: SourceModel) -> dict[str, str]:
    lineage = {"source": source.uri, "source_digest": source.digest}
    if source.logged_model_id:
        lineage["source_model_id"] = source.logged_model_id
    if source.run_id:
        lineage["source_run_id"] = source.run_id
    return prefixed({**lineage, "target": bundle.target, **bundle.tags, "key": bundle.key, "digest": bundle.digest})


# ----------------------------------------------------------------------------------------------------- the logged model


def _logged_model(client: Any, bundle: Bundle, source: SourceModel, runs: Runs, writer: str) -> Any:
    """A READY logged model with the bundle's files: one that an earlier push finished, or a new one."""
    held = _logged_models(client, runs, bundle)
    for model in held:
        same = model.status == "READY" and model.tags.get(DIGEST_TAG) == bundle.digest
        if same and refuse_version(f"models:/{model.model_id}", model.tags, bundle) is None:
            return model
    _clear_away_unpublished(client, runs, held, writer)
    model = client.create_logged_model(
        runs.experiment_id,
        name=_logged_model_name(bundle),
        source_run_id=runs.child,
        tags={**_tags(bundle, source), WRITER_TAG: writer},
        params={key: str(value)[:_PARAM_CHARS] for key, value in bundle.params.items()},
        model_type="compiled",
    )
    # The others' age is counted from when this one was made: the server's clock may be hours off from ours.
    _clear_away(client, held, writer, model.creation_timestamp)
    with temporary_folder("push") as scratch:
        staged = _staged(bundle, model, runs, Path(scratch) / "model")
        upload(f"models:/{model.model_id}", staged)
        demand_uploaded(f"models:/{model.model_id}", staged)
    client.finalize_logged_model(model.model_id, "READY")
    # A call whose answer was lost, and which HTTP then sent again, made one more: nobody would look for it any more.
    _clear_away(client, _logged_models(client, runs, bundle), writer, model.creation_timestamp)
    return client.get_logged_model(model.model_id)


def _logged_models(client: Any, runs: Runs, bundle: Bundle) -> list[Any]:
    return list(client.search_logged_models([runs.experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{bundle.key}'"))


def _clear_away(client: Any, models: Sequence[Any], writer: str, now_ms: int) -> None:
    """Delete the uploads among them that nobody will finish, at this time of the server's clock."""
    for model in models:
        if model.status != "READY" and _is_abandoned(model, writer, now_ms):
            client.delete_logged_model(model.model_id)


def _clear_away_unpublished(client: Any, runs: Runs, models: Sequence[Any], writer: str) -> None:
    """Delete the finished uploads among them that an earlier holder of this place made no version of, since it was
    killed. They hold what it measured, which this bundle measured anew.

    Where the run has ended, there was a version, and what becomes of its files is for people to say."""
    left = [model for model in models if model.status == "READY" and model.tags.get(WRITER_TAG) == writer]
    if not left or client.get_run(runs.child).info.status not in UNFINISHED:
        return
    used = {model_of(version) for version in client.search_model_versions(f"run_id = '{runs.child}'")}
    for model in left:
        if model.model_id not in used:
            client.delete_logged_model(model.model_id)


def _is_abandoned(model: Any, writer: str, now_ms: int) -> bool:
    """An unfinished upload of this place's earlier holder, who is dead since we hold the place; or one that is very
    old."""
    age_s = (now_ms - model.creation_timestamp) / 1000
    return bool(model.tags.get(WRITER_TAG) == writer or age_s > _ABANDONED_S)


def _logged_model_name(bundle: Bundle) -> str:
    forbidden = str.maketrans(dict.fromkeys("/:.%\"'", "-"))  # more than a registered model's name may not hold
    return f"{bundle.name}-{bundle.target}".translate(forbidden)


def _staged(bundle: Bundle, model: Any, runs: Runs, into: Path) -> Path:
    """The bundle with the logged model's ids in `MLmodel`; the bundle itself is never changed."""
    from mlflow.models import Model

    shutil.copytree(
        bundle.path,
        into,
        copy_function=link_or_copy,
        ignore=shutil.ignore_patterns("__pycache__", "registered_model_meta"),
    )
    described = Model.load(str(into))
    described.model_id = model.model_id
    described.model_uuid = model.model_id
    described.run_id = runs.child
    described.artifact_path = model.artifact_location
    (into / "MLmodel").unlink()  # it may be a hard link to the bundle's own
    described.save(str(into / "MLmodel"))
    return into


# ----------------------------------------------------------------------------------------------------- runs and lineage


def _runs(push: _Push) -> Runs:
    """Parent and child run, in the source's own experiment where that is allowed: only there MLflow's page shows the
    lineage."""
    from mlflow.exceptions import MlflowException

    of_source = push.source.experiment_id
    if os.environ.get("MLFLOW_EXPERIMENT_ID") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or not of_source:
        return _runs_in(push, _experiment(push.client))
    try:
        return _runs_in(push, of_source)
    except MlflowException as error:
        if not is_code(error, *REFUSED):
            raise
    return _runs_in(push, _experiment(push.client))


def _runs_in(push: _Push, experiment: str) -> Runs:
    client, bundle, source = push.client, push.bundle, push.source
    push.began(experiment)
    policy = prefixed(bundle.tags).get(TAG + "policy_digest", "")
    parent_key = digest_of({"source": source.digest, "uri": source.uri, "policy": policy, "name": bundle.name})
    common = {**prefixed({"source": source.uri, "source_digest": source.digest}), WRITER_TAG: push.writer}
    model = "-".join(filter(None, (source.name, source.version)))
    rules = prefixed(bundle.tags).get(TAG + "policy", "")
    parent = _run(client, experiment, parent_key, " · ".join(filter(None, (f"compile {model}", rules))), common)
    tags = {**common, **_tags(bundle, source), "mlflow.parentRunId": parent}
    how = " ".join(filter(None, (bundle.params.get("backend"), bundle.params.get("precision"))))
    name = " · ".join(filter(None, (model, bundle.target, how)))
    return Runs(experiment_id=experiment, parent=parent, child=_run(client, experiment, bundle.key, name, tags))


def _run(client: Any, experiment: str, key: str, name: str, tags: Mapping[str, str]) -> str:
    """The run with that key, made if it isn't there. Two machines that make it at once agree on the older."""
    from mlflow.exceptions import MlflowException

    runs = _runs_with(client, experiment, key)
    if runs and runs[0].data.tags.get(WRITER_TAG) != tags[WRITER_TAG]:  # who goes on with it ends it, also if it fails
        client.set_tag(runs[0].info.run_id, WRITER_TAG, tags[WRITER_TAG])
    if not runs:
        created = client.create_run(experiment, run_name=name, tags={**tags, _RUN_TAG: key})
        runs = _runs_with(client, experiment, key) or [created]
    # A request whose answer was lost was sent again, and left a second run; or another machine made one at that moment.
    for other in runs[1:]:
        if other.info.status in UNFINISHED:
            try:
                client.delete_run(other.info.run_id)
            except MlflowException as error:
                if not taken_away(error):
                    raise
    if runs[0].info.status == "KILLED":  # by a push that failed; should this one fail too, it ends what is RUNNING
        client.update_run(runs[0].info.run_id, "RUNNING")
    return str(runs[0].info.run_id)


def _runs_with(client: Any, experiment: str, key: str) -> list[Any]:
    """The runs with a key, the oldest first."""
    runs = client.search_runs([experiment], filter_string=f"tags.`{_RUN_TAG}` = '{key}'", max_results=100)
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def _experiment(client: Any) -> str:
    """The experiment that MLflow's variables name, or ours."""
    from mlflow.exceptions import MlflowException

    if named := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return named
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
    if (held := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException as error:  # another process made it meanwhile
            if not is_code(error, "RESOURCE_ALREADY_EXISTS"):
                raise
            held = client.get_experiment_by_name(name)
    if held is None or held.lifecycle_stage != "active":
        raise RegistryError(
            f"experiment {name!r} can't be used: it was deleted", fix="restore it, or set MLFLOW_EXPERIMENT_NAME"
        )
    return str(held.experiment_id)


def _describe(client: Any, runs: Runs, bundle: Bundle, files: Mapping[str, Path]) -> None:
    from mlflow.entities import Param

    held = client.get_run(runs.child).data.params
    fresh = [Param(key, str(value)[:_PARAM_CHARS]) for key, value in bundle.params.items() if key not in held]
    _until_settled(lambda: client.log_batch(runs.child, params=fresh))
    for run in (runs.child, runs.parent):
        _log_reports(client, run, files)


def _log_reports(client: Any, run: str, files: Mapping[str, Path]) -> None:
    """Log the reports as a run's artifacts, and report.md also as its note; what is there under these names is
    replaced."""
    from mlflow.entities import RunTag

    for name, path in files.items():
        _log_file(client, run, name, Path(path))
    if (report := files.get("report.md")) is not None:
        note = Path(report).read_text(encoding="utf-8")
        if len(note) > _NOTE_CHARS:
            note = note[:_NOTE_CHARS].rpartition("\n")[0] + "\n\n(The rest is in the artifact report.md.)"
        written = [RunTag("mlflow.note.content", note)]
        _until_settled(partial(client.log_batch, run, tags=written))


def _until_settled(call: Callable[[], object]) -> None:
    """Make a call that changes nothing when it is made again. Of stages that write the same row at once, MLflow's
    database refuses all but one; asked again, they find the row there, unless still another was writing then."""
    from mlflow.exceptions import MlflowException

    for pause_s in _PAUSES_S:
        try:
            call()
        except MlflowException as error:
            if is_code(error, "PERMISSION_DENIED") or taken_away(error):
                raise
            time.sleep(pause_s * (1 + secrets.randbelow(100) / 100))  # so that those who met do not meet again
        else:
            return
    call()


def _log_file(client: Any, run: str, name: str, path: Path) -> None:
    """Log a file under the name it is known by, which its path may not end with."""
    folder, _, base = name.rpartition("/")
    with temporary_folder("file") as scratch:
        named = path if path.name == base else Path(shutil.copy2(path, Path(scratch) / base))
        try:
            client.log_artifact(run, str(named), folder or None)
        except Exception as error:
            if refused_with(error) is None and store_trouble(error) is None:
                raise
            with trouble(f"runs:/{run}/{name}"):  # which names the file
                raise


def _lineage(client: Any, runs: Runs, model: Any, source: SourceModel) -> None:
    from mlflow.entities import LoggedModelInput, LoggedModelOutput
    from mlflow.exceptions import MlflowException

    def lead_out() -> None:
        held = client.get_run(runs.child).outputs
        if model.model_id not in {m.model_id for m in (held.model_outputs if held else ())}:
            client.log_outputs(runs.child, [LoggedModelOutput(model.model_id, step=0)])

    def lead_in(run: str) -> None:
        held = client.get_run(run).inputs
        if source.logged_model_id not in {m.model_id for m in (held.model_inputs if held else ())}:
            client.log_inputs(run, models=[LoggedModelInput(source.logged_model_id)])

    _until_settled(lead_out)
    if not source.logged_model_id:
        return
    for run_id in (runs.child, runs.parent):
        try:
            _until_settled(partial(lead_in, run_id))
        except MlflowException as error:
            # The source's experiment may be closed to us; the tags say where it came from.
            if not is_code(error, *REFUSED):
                raise


def _measurements(client: Any, runs: Runs, model: Any, bundle: Bundle, source: SourceModel) -> None:
    from mlflow.entities import Metric

    entry = validation_dataset(client, bundle, source)
    link: dict[str, str] = {}
    if entry is not None:
        link = {"dataset_name": entry.dataset.name, "dataset_digest": entry.dataset.digest}
        _until_settled(lambda: client.log_inputs(runs.child, datasets=[entry]))  # one that is there is not added
    # The model's own time stamp: logging again after a crash adds nothing. What the model has is left out, since MLflow
    # takes a metric with another data set for another one, and then refuses its key.
    there = {metric.key for metric in model.metrics or () if metric.run_id == runs.child}
    at, ids = model.creation_timestamp, {"model_id": model.model_id, "run_id": runs.child}
    metrics = [
        Metric(_metric_name(key), float(value), at, 0, **ids, **(link if measured_on(bundle, key) else {}))
        for key, value in sorted(bundle.metrics.items())
        if _metric_name(key) not in there
    ]
    for start in range(0, len(metrics), 500):
        client.log_batch(runs.child, metrics=metrics[start : start + 500])


def _metric_name(key: str) -> str:
    return "".join(c if c.isalnum() or c in "_-./ :" else "_" for c in key)[:250]
