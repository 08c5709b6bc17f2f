"""The MLflow Project: run by `mlflow run` in the current environment."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sqlite3
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from pipelines import shells

PROJECT = Path(__file__).parents[2] / "pipelines" / "mlflow"


@pytest.mark.slow
def test_a_failed_gate_fails_the_run_and_keeps_its_reports(embedded, tmp_path, registered):
    """Broken: the run that the project made shows nothing, or a path with a quote in it is run by a shell."""
    odd = tmp_path / "a $(touch pwned) 'b' \"c\".yaml"
    shutil.copy(registered.unreachable, odd)
    given = {"model_uri": registered.uri, "policy": odd.name, "targets": '["small"]', "arguments": '["--no-publish"]'}
    parameters = [word for name, value in given.items() for word in ("-P", f"{name}={value}")]
    command = ["mlflow", "run", str(PROJECT), "-e", "compile", *parameters, "--env-manager", "local"]
    done = shells.run(command, tmp_path, {})
    assert done.returncode != 0
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        [(run_id, status)] = connection.execute("SELECT run_uuid, status FROM runs").fetchall()
        tags = dict(connection.execute("SELECT key, value FROM tags").fetchall())
    assert (status, tags["compile-stage.exit_code"]) == ("FAILED", "3"), done.stderr
    kept = {path.name for path in (tmp_path / "mlruns" / "0" / run_id / "artifacts").iterdir()}
    assert kept == {"result.json", "report.html", "report.md", "junit.xml"}
    # Broken without it: the last path that a reader sees is one that was removed.
    assert f"is removed: the reports are artifacts of run {run_id}" in done.stdout + done.stderr
    assert not [path for path in (tmp_path, PROJECT) if (path / "pwned").exists()]


def test_the_stage_is_not_told_the_experiment_of_the_project(tmp_path, monkeypatch):
    """Broken: what is published has its runs in `Default`, where MLflow's page shows no lineage of the source."""
    (tmp_path / "policy.yaml").touch()
    asked: list[dict[str, str]] = []

    def run(command, *, env, **_):
        asked.append(env)
        return subprocess.CompletedProcess(command, 0)

    spec = importlib.util.spec_from_file_location("compile_model", PROJECT / "compile_model.py")
    compile_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compile_model)
    monkeypatch.setattr(compile_model, "mlflow", mock.MagicMock())
    monkeypatch.setattr(compile_model, "subprocess", mock.Mock(run=run))
    of_project = {"MLFLOW_RUN_ID": "1", "MLFLOW_EXPERIMENT_ID": "0"}  # what `mlflow run` sets, with the tracking URI
    kept = {"MLFLOW_TRACKING_URI": "http://mlflow:5000", "MLFLOW_EXPERIMENT_NAME": "chosen"}
    for name, value in (of_project | kept).items():
        monkeypatch.setenv(name, value)
    assert compile_model.main("models:/a/1", str(tmp_path / "policy.yaml"), "[]", "[]", "") == 0
    [environment] = asked
    assert kept.items() <= environment.items()
    assert not of_project.keys() & environment.keys()


def test_its_entry_points_hand_on_every_parameter():
    """Broken: a parameter that somebody gives changes nothing."""
    from mlflow.projects.utils import load_project

    project = load_project(str(PROJECT))
    promote = project.get_entry_point("promote").compute_command({"uri": "$(id)", "alias": "x;y"}, None)
    assert promote == "compile-stage promote --alias 'x;y' -- '$(id)'"
    compiled = project.get_entry_point("compile").compute_command({"model_uri": "a b", "policy": str(PROJECT)}, None)
    assert compiled == f"python compile_model.py 'a b' {PROJECT} '[]' '[]' ''"


@pytest.mark.slow
def test_a_policy_that_comes_with_the_stage_is_named_without_a_file(embedded, tmp_path):
    """Broken: MLflow takes `shipped:cpu-server` for a URI, and ends while it tries to download it."""
    given = ["-P", "model_uri=models:/nothing@here", "-P", "shipped=cpu-server"]
    command = ["mlflow", "run", str(PROJECT), "-e", "compile", *given, "--env-manager", "local"]
    done = shells.run(command, tmp_path, {})
    assert "there is no registered model" in done.stderr, done.stderr
    done = shells.run([*command[:5], *given[:2], *command[9:]], tmp_path, {})
    assert "-P shipped=NAME" in done.stderr
