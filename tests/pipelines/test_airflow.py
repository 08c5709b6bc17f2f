"""The Airflow DAG: loaded by Airflow's DagBag and run by `dag.test()`, in Airflow's own environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "pipelines" / "airflow"
pytestmark = pytest.mark.orchestrators

RUN = """\
import json, sys
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
run = bag.dags["compile_stage"].test(run_conf=json.loads(sys.argv[2]))
[task] = run.get_task_instances()
print(json.dumps({"state": task.state, "tries": task.try_number, "returned": task.xcom_pull(task_ids="compile_model")}))
"""


@pytest.fixture(scope="session")
def airflow_home(orchestrator: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Airflow's settings, with a database of its own in sqlite."""
    programs = orchestrator("apache-airflow")
    settings = {
        "AIRFLOW_HOME": str(tmp_path_factory.mktemp("airflow")),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(FOLDER),
    }
    subprocess.run([str(programs / "airflow"), "db", "migrate"], env={**os.environ, **settings}, check=True)
    return settings


@pytest.fixture
def run_dag(
    orchestrator: Callable[[str], Path], airflow_home: dict[str, str], tmp_path: Path, stage: Path
) -> Callable[..., tuple[dict[str, Any], str]]:
    def run(**params: Any) -> tuple[dict[str, Any], str]:
        command = [str(orchestrator("apache-airflow") / "python"), "-c", RUN, str(FOLDER), json.dumps(params)]
        variables = {**os.environ, **airflow_home}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr

    return run


@pytest.fixture
def in_mlflow(registered: Any, embedded: str) -> str:
    """The model's URI in the MLflow registry, in sqlite."""
    import mlflow
    import numpy as np
    import onnx

    model = onnx.load(f"{registered.uri.removeprefix('folder:')}/model.onnx")
    rows = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
    signature = mlflow.models.infer_signature(rows, np.zeros((64, 3), np.float32))
    named = {"name": "model", "registered_model_name": "perceptron", "pip_requirements": ["onnx"]}
    with mlflow.start_run():
        mlflow.onnx.log_model(model, **named, signature=signature, input_example=rows)
    return "models:/perceptron/1"


def test_a_run_keeps_its_reports_and_returns_what_was_published(run_dag, tmp_path, registered, in_mlflow):
    """Broken: tasks after it do not know what won, or nobody can see why."""
    ended, said = run_dag(
        model_uri=in_mlflow,
        policy=str(registered.policy),
        targets=["small"],
        reports=f"file://{tmp_path}/kept reports",
    )
    assert ended["state"] == "success", said
    returned = ended["returned"]
    assert (returned["status"], returned["exit_code"], list(returned["winners"])) == ("passed", 0, ["small"])
    assert re.fullmatch(r"models:/perceptron\S*/1", returned["published"]["small"])
    [kept] = (tmp_path / "kept reports").iterdir()
    assert returned["reports"].endswith(f"kept reports/{kept.name}")
    assert {file.name for file in kept.iterdir()} == {"result.json", "report.html", "report.md", "junit.xml"}


def test_storage_that_can_not_be_reached_is_found_before_the_stage_runs(run_dag, tmp_path, registered):
    """Broken: a worker without s3fs found it when all was compiled and published, and did it all twice more."""
    ended, said = run_dag(model_uri=registered.uri, policy=str(registered.policy), reports="s3://bucket/reports")
    assert ended == {"state": "failed", "tries": 1, "returned": None}
    assert "reports: s3://bucket/reports: Install s3fs to access S3" in said
    assert not (tmp_path / "compile-stage-out").exists()


def test_a_failed_gate_fails_the_task_without_another_try(run_dag, tmp_path, registered):
    """Broken: a model that missed its gate counts as done, or is compiled three times to no end."""
    ended, said = run_dag(model_uri=registered.uri, policy=str(registered.unreachable), arguments=["--no-publish"])
    assert ended == {"state": "failed", "tries": 1, "returned": None}
    assert re.search(r"compile-stage ended with exit code 3; reports are in \S*compile-stage-out", said)
    assert json.loads((tmp_path / "compile-stage-out" / "result.json").read_text())["exit_code"] == 3


def test_parameters_can_not_run_a_command(run_dag, tmp_path, hostile):
    """Broken: who may start the DAG may run what they like on the worker."""
    ended, said = run_dag(model_uri=hostile, policy=hostile, targets=[hostile], arguments=["--set", hostile])
    assert ended["state"] == "failed"
    assert "exit code 2" in said
    assert hostile in said
    assert not (tmp_path / "pwned").exists()
