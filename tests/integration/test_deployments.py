"""The target `compile-stage` of `mlflow deployments`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from compile_stage.core import plugins
from compile_stage.core.errors import AliasMovedError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
    pytest.mark.skipif(
        "compile-stage" not in entry_points(group="mlflow.deployments").names,
        reason="pyproject.toml is newer than this environment, which lacks the entry point: make test",
    ),
]

FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}"
ON = ("-t", "compile-stage")


@pytest.fixture
def registered(small_model: Path, embedded: str) -> str:
    """`small_model` as version 1 of the registered model `net`; its run has the data set `holdout`."""
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput

    client = MlflowClient()
    run = client.create_run("0")
    file = {"uri": f"file://{small_model.parent / 'data.npz'}"}
    logged = Dataset("holdout", "0123abcd", "local", json.dumps(file))
    client.log_inputs(run.info.run_id, datasets=[DatasetInput(logged)])
    model = client.create_logged_model("0", name="net", source_run_id=run.info.run_id)
    client.log_model_artifacts(model.model_id, str(small_model))
    client.finalize_logged_model(model.model_id, "READY")
    client.create_registered_model("net")
    client.create_model_version("net", f"models:/{model.model_id}", run_id=run.info.run_id, model_id=model.model_id)
    return "models:/net/1"


def deployments(*arguments: str) -> Result:
    """`mlflow deployments ARGUMENTS` in this process."""
    from mlflow.deployments.cli import commands

    return CliRunner().invoke(commands, arguments)


@pytest.mark.slow
def test_a_deployment_is_an_alias_from_its_making_to_its_end(
    registered: str, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: who works with `mlflow deployments` could not compile a model, ask what is deployed and get answers of
    it, or would lose a version, or make two, where the alias goes or is made again; or MLflow could not tell on which
    data a metric of the compiled model was measured; or its page would not open on the report."""
    from mlflow import MlflowClient, pyfunc
    from mlflow.deployments import get_deploy_client

    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    policy.write_text(policy.read_text().replace(f"file:{tmp_path / 'data.npz'}", "mlflow-dataset:holdout", 1))
    given = ("--name", "net-prod", "-m", registered, "-C", "policy=policy.yaml", "-C", "out=out")
    mlflow = Path(sys.executable).with_name("mlflow")
    command = [mlflow, "deployments", "create", *ON, *given]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "compile_stage deployment net-prod is created" in made.stdout
    assert "publish cpu: done" in made.stderr  # a line for each step
    assert (tmp_path / "out" / "report.html").is_file()

    client, held = get_deploy_client("compile-stage"), MlflowClient()
    deployed = client.get_deployment("net-prod")
    assert (deployed["uri"], deployed["source"]) == ("models:/net-compiled/1", registered)
    assert client.list_deployments() == [deployed]
    version = held.get_model_version("net-compiled", "1")
    metrics = held.get_logged_model(version.source.removeprefix("models:/")).metrics
    linked = {metric.key: (metric.dataset_name, metric.dataset_digest) for metric in metrics}
    assert linked["cosine.y.batch_1"] == ("holdout", "0123abcd")
    assert linked["size_mb"] == (None, None)  # measured on no data
    (entry,) = held.get_run(version.run_id).inputs.dataset_inputs
    assert entry.dataset.digest == "0123abcd"
    artifacts = [file.path for file in held.list_artifacts(version.run_id)]
    assert [name for name in artifacts if name.endswith(".html")] == ["report.html"]
    again = deployments("create", *ON, *given)
    assert again.exit_code == 2
    assert "there is a deployment 'net-prod' already: models:/net-compiled/1" in again.output

    inputs = np.load(tmp_path / "data.npz")["x"][:3]
    (tmp_path / "inputs.json").write_text(json.dumps([{"x": row} for row in inputs.tolist()]))
    answered = deployments("predict", *ON, "--name", "net-prod", "-I", "inputs.json", "-O", "answers.json")
    assert answered.exit_code == 0, answered.output
    answers = json.loads((tmp_path / "answers.json").read_text())["predictions"]
    expected = pyfunc.load_model(registered).predict({"x": inputs})
    for output in ("y", "z"):
        rows = [answer[output] for answer in answers]
        np.testing.assert_allclose(rows, expected[output], rtol=1e-4, atol=1e-4)
    (tmp_path / "inputs.json").write_text(json.dumps([{"x": [1, 2]}]))
    misfit = deployments("predict", *ON, "--name", "net-prod", "-I", "inputs.json")
    assert misfit.exit_code == 2, misfit.output
    assert misfit.output.startswith("Error: models:/net-compiled/1 does not answer that: ")  # no traceback

    updated = deployments("update", *ON, "--name", "net-prod", "-C", "policy=policy.yaml", "-C", "out=out")
    assert updated.exit_code == 0, updated.output
    assert client.get_deployment("net-prod") == deployed  # the same inputs, the same version
    with pytest.raises(AliasMovedError):  # somebody else moved it meanwhile
        plugins.load("registries", "mlflow").remove_alias("net-compiled", "net-prod", expected="9")
    gone = deployments("delete", *ON, "--name", "net-prod")
    assert gone.exit_code == 0, gone.output
    assert held.get_registered_model("net-compiled").aliases == {}
    assert [one["name"] for one in client.list_deployments()] == ["net-compiled/1"]
    assert deployments("delete", *ON, "--name", "net-prod").exit_code == 0  # as MLflow asks for
    missing = deployments("get", *ON, "--name", "net-prod")
    assert missing.exit_code == 4
    assert missing.output.startswith("Error: there is no deployment 'net-prod'\n  fix: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "models:/net/1"], "no policy is named"),
        (["-m", "folder:net", "-C", "policy=policy.yaml"], "'folder:net' is no model of MLflow's registry"),
        (["-m", "models:/net/1", "-C", "polcy=policy.yaml"], "no setting 'polcy'; did you mean 'policy'?"),
        (["-m", "models:/net/1", "-C", "policy=policy.yaml", "-f", "onnx"], "not 'onnx'"),
        (["-m", "models:/net/1", "-C", "policy=policy.yaml", "--endpoint", "e"], "no endpoints"),
        (["-m", "models:/net/1", "-C", "policy=policy.yaml"], "the targets cpu, other can't all be the deployment"),
        (["-m", "models:/net/1", "-C", "policy=policy.yaml", "-C", "targets=x*"], "--target x*: matches no target"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    arguments: list[str], message: str, write_policy: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Broken: a wrong setting would be ignored, or end in a traceback of MLflow's command line after minutes; or two
    targets would take one alias from each other."""
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "data.npz", x=np.zeros((64, 8), np.float32))
    write_policy(
        "backends: [onnxruntime], precisions: [fp32]",
        "  other: {device: cpu, threads: 1, backends: [onnxruntime], precisions: [fp32]}\n",
    )
    said = deployments("create", *ON, "--name", "net-prod", *arguments)
    assert said.exit_code == 2, said.output
    assert said.output.startswith("Error: ")
    assert message in said.output


def test_the_help_names_every_setting_and_explain_is_refused() -> None:
    """Broken: `mlflow deployments help` would not say what -C takes, or `explain` would end in a traceback."""
    from mlflow.deployments import get_deploy_client
    from mlflow.exceptions import MlflowException

    said = deployments("help", *ON)
    assert said.exit_code == 0
    for setting in ("policy", "targets", "alias", "out"):
        assert f"\n  {setting} " in said.output
    with pytest.raises(MlflowException, match="computes no explanations"):
        get_deploy_client("compile-stage").explain("net-prod", None)
