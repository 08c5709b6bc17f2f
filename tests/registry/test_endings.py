"""How the runs of a publication end when it is refused or interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from compile_stage.core.errors import RegistryError
from compile_stage.core.records import SourceModel
from compile_stage.registry import mlflow_held, mlflow_publish
from compile_stage.registry.mlflow import MLflowRegistry


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("log_artifact", KeyboardInterrupt()),
        ("create_model_version", KeyboardInterrupt()),
        ("create_model_version", MlflowException("a plug-in of the server says no", error_code=3)),
    ],
)
def test_a_push_that_is_refused_or_interrupted_leaves_nothing_under_way(
    registry: MLflowRegistry,
    source: SourceModel,
    make_bundle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: BaseException,
) -> None:
    """Broken: after Ctrl-C, or where the server refuses the version, MLflow's page shows runs that are RUNNING and an
    upload that is PENDING, for ever where nobody publishes again."""
    client = MlflowClient()
    bundle, place = make_bundle("net-compiled"), [source.experiment_id]

    def fails(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(LocalArtifactRepository if call == "log_artifact" else MlflowClient, call, fails)
        with pytest.raises((KeyboardInterrupt, RegistryError)):
            registry.push(bundle, source, {})
    ours = f"tags.`compile_stage.source` = '{source.uri}'"
    assert [run.info.status for run in client.search_runs(place, ours)] == ["KILLED", "KILLED"]
    assert "PENDING" not in {str(model.status) for model in client.search_logged_models(place)}
    assert registry.push(bundle, source, {}).created
    assert [run.info.status for run in client.search_runs(place, ours)] == ["FINISHED", "FINISHED"]


def test_a_refused_target_leaves_what_another_published_finished(
    registry: MLflowRegistry,
    source: SourceModel,
    make_bundle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: the parent run of a policy whose first target is published is marked KILLED where the second fails."""
    client = MlflowClient()
    one, two = (make_bundle("net-compiled", key=key) for key in "ab")
    registry.push(one, source, {})

    def fails(*_: Any, **__: Any) -> None:
        raise MlflowException("no", error_code=3)

    monkeypatch.setattr(MlflowClient, "create_model_version", fails)
    with pytest.raises(RegistryError):
        registry.push(two, source, {})
    ours = client.search_runs([source.experiment_id], f"tags.`compile_stage.source` = '{source.uri}'")
    parents = [run.info.status for run in ours if "mlflow.parentRunId" not in run.data.tags]
    assert parents == ["FINISHED"]


def test_a_report_that_is_too_large_for_a_proxy_is_named(
    registry: MLflowRegistry,
    source: SourceModel,
    make_bundle: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: "the registry refuses a file of this size (413)", and nobody knows which, nor what limit it takes."""
    report = tmp_path / "result.json"
    report.write_text("{}")

    def refused(*_: Any, **__: Any) -> None:
        answer = requests.Response()
        answer.status_code = 413
        raise requests.HTTPError("413 Client Error: Request Entity Too Large", response=answer)

    monkeypatch.setattr(LocalArtifactRepository, "log_artifact", refused)
    with pytest.raises(RegistryError, match="413") as caught:
        registry.push(make_bundle("net-compiled"), source, {"result.json": report})
    assert caught.value.where.endswith("/result.json")


@pytest.mark.parametrize("which", ["child", "both"])
def test_a_version_whose_runs_are_deleted_for_good_is_still_found_published(
    registry: MLflowRegistry,
    source: SourceModel,
    make_bundle: Callable[..., Any],
    tmp_path: Path,
    which: str,
) -> None:
    """Broken: once old runs were cleared up (`mlflow gc`), each run of the same policy on the same model ends with exit
    code 4 and "Run with id=... not found", whatever anybody does."""
    from mlflow.tracking._tracking_service.utils import _get_store

    client = MlflowClient()
    bundle, report = make_bundle("net-compiled"), tmp_path / "result.json"
    report.write_text("{}")
    receipt = registry.push(bundle, source, {})
    child = client.get_run(client.get_model_version(receipt.name, receipt.version).run_id)
    runs = {"child": child.info.run_id, "parent": child.data.tags["mlflow.parentRunId"]}
    for run in runs.values() if which == "both" else [runs["child"]]:
        client.delete_run(run)
        _get_store()._hard_delete_run(run)
    again = registry.push(bundle, source, {})
    assert (again.version, again.created) == (receipt.version, False)
    registry.attach(again, {"result.json": report})
    assert client.get_model_version(receipt.name, receipt.version).tags["compile_stage.report"] == "final"


@pytest.mark.parametrize("made_by", ["this machine", "this machine, again", "another machine"])
def test_a_push_whose_files_do_not_arrive_leaves_nothing_under_way(
    registry: MLflowRegistry,
    source: SourceModel,
    make_bundle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    made_by: str,
) -> None:
    """Broken: where the store of artifacts is down and the tracking server is not, MLflow's page shows the runs of a
    publication that failed as RUNNING, for ever where nobody publishes again; or a second attempt leaves its upload
    PENDING."""
    client = MlflowClient()
    bundle, place = make_bundle("net-compiled"), [source.experiment_id]
    ours = f"tags.`compile_stage.source` = '{source.uri}'"

    def is_down(*_: Any, **__: Any) -> None:
        raise requests.HTTPError("too many 503 error responses")

    with monkeypatch.context() as patched:
        patched.setattr("compile_stage.registry.mlflow_retries._PATIENCE_S", 0.1)
        patched.setattr("compile_stage.registry.mlflow_retries._PAUSES_S", (0.01, 0.01, 0.01))
        patched.setattr(LocalArtifactRepository, "log_artifact", is_down)
        patched.setattr(LocalArtifactRepository, "log_artifacts", is_down)
        with pytest.raises(RegistryError):
            registry.push(bundle, source, {})
        left = client.search_runs(place, ours)
        assert [run.info.status for run in left] == ["KILLED", "KILLED"]
        if made_by == "another machine":
            for run in left:
                client.set_tag(run.info.run_id, "compile_stage.writer", "another")
                client.update_run(run.info.run_id, "RUNNING")
        if made_by != "this machine":
            with pytest.raises(RegistryError):
                registry.push(bundle, source, {})
            assert [run.info.status for run in client.search_runs(place, ours)] == ["KILLED", "KILLED"]
    assert "PENDING" not in {str(model.status) for model in client.search_logged_models(place)}
    assert registry.push(bundle, source, {}).created
    assert [run.info.status for run in client.search_runs(place, ours)] == ["FINISHED", "FINISHED"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("add", "files that nobody uploaded: code/sitecustomize.py"),
        ("remove", "the upload is incomplete: code/loader.py"),
    ],
)
def test_an_upload_with_other_files_than_were_uploaded_is_not_published(
    registry: MLflowRegistry,
    source: SourceModel,
    make_bundle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    said: str,
) -> None:
    """Broken: code that somebody else wrote into the store while a version was uploaded is published with it, and
    imported where it is served; or a version is published that lacks its loader."""
    real = mlflow_publish.upload

    def changed(uri: str, folder: Path) -> None:
        real(uri, folder)
        code = Path(mlflow_held._folder(mlflow_held._store(uri)) or "") / "code"
        if change == "add":
            (code / "sitecustomize.py").write_text("")
        else:
            (code / "loader.py").unlink()

    monkeypatch.setattr(mlflow_publish, "upload", changed)
    bundle = make_bundle("net-compiled")
    with pytest.raises(RegistryError, match=said):
        registry.push(bundle, source, {})
    assert registry.find(bundle.name, bundle.key) is None
