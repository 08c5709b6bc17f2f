"""The Dagster asset: materialized by Dagster, in its own environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage.report.summary import PERFORMANCE_METRICS

ASSET = Path(__file__).parents[2] / "pipelines" / "dagster" / "compiled_model.py"

RUN = """\
import json, sys
import dagster as dg
sys.path.insert(0, sys.argv[1])
from compiled_model import compiled_model
asset = compiled_model("perceptron", *json.loads(sys.argv[2]), arguments=["--no-publish"], out="kept reports")

@dg.asset(deps=[asset])
def deployed() -> None: ...

with dg.DagsterInstance.ephemeral() as instance:
    run = dg.materialize([asset, deployed], instance=instance, raise_on_error=False)
checks = {check.check_name: [check.passed, check.severity.value] for check in run.get_asset_check_evaluations()}
made = [event.materialization for event in run.get_asset_materialization_events()]
made = {one.asset_key.path[-1]: sorted(one.metadata) for one in made}
retried = any(event.event_type_value == "STEP_UP_FOR_RETRY" for event in run.all_events)
print(json.dumps({"success": run.success, "checks": checks, "made": made, "retried": retried}))
"""


@pytest.fixture
def materialize(orchestrator: Callable[[str], Path], tmp_path: Path, stage: Path) -> Callable[..., Any]:
    def run(model_uri: str, policy: str, *targets: str) -> tuple[dict[str, Any], str]:
        given = json.dumps([model_uri, policy, targets])
        command = [str(orchestrator("dagster") / "python"), "-c", RUN, str(ASSET.parent), given]
        done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr

    return run


def test_the_metrics_of_performance_are_the_stages():
    """Broken: a new limit on speed or size would count as one on answers."""
    [listed] = re.findall(r"^PERFORMANCE = \(\n(.*?)\)", ASSET.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r'"(\w+)"', listed)) == PERFORMANCE_METRICS


@pytest.mark.orchestrators
def test_the_gates_are_checks_of_the_asset(materialize, tmp_path, registered):
    """Broken: Dagster shows a compiled model without what was proven of it."""
    ended, said = materialize(registered.uri, str(registered.policy), "small")
    assert ended["success"], said
    assert ended["checks"] == {f"small_{gate}": [True, "ERROR"] for gate in ("answers", "performance", "winner")}
    assert set(ended["made"]) == {"perceptron", "deployed"}
    assert {"report", "report.html", "result.json", "junit.xml"} <= set(ended["made"]["perceptron"])
    assert (tmp_path / "kept reports" / "report.html").is_file()


@pytest.mark.orchestrators
def test_a_failed_gate_stops_what_depends_on_the_asset(materialize, tmp_path, registered):
    """Broken: a model that is too slow is deployed by the next asset."""
    ended, _ = materialize(registered.uri, str(registered.unreachable), "small")
    assert not ended["success"]
    assert ended["checks"]["small_answers"] == [True, "ERROR"]
    assert ended["checks"]["small_performance"] == ended["checks"]["small_winner"] == [False, "ERROR"]
    assert "deployed" not in ended["made"]
    assert (tmp_path / "kept reports" / "result.json").is_file()


STAGE = """\
#!{python}
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True)
out.joinpath("result.json").write_text({result!r})
out.joinpath("report.md").write_text("")
sys.exit(3)
"""


@pytest.mark.orchestrators
@pytest.mark.parametrize(
    ("required", "winner", "metrics", "missed"),
    [
        (True, "a", ["speedup"], {"winner"}),  # it was published, and the alias was not moved
        (False, "a", ["speedup"], {"winner"}),
        (False, None, ["accuracy"], {"answers", "performance", "winner"}),
    ],
)
def test_a_run_that_failed_stops_what_depends_on_the_asset(
    materialize, tmp_path, monkeypatch, required, winner, metrics, missed
):
    """Broken: the stage ends with 3, since a winner may not take its alias or since no target has one, and all checks
    pass or only warn: what depends on the asset is deployed."""
    checks = [{"metric": one, "outcome": "pass" if winner else "fail", "waiver": None, "reason": ""} for one in metrics]
    target = {
        "name": "small", "required": required, "winner": winner, "reason": None, "receipt": None,
        "candidates": [{"job_id": "a", "verdict": {"checks": checks}}],
    }  # fmt: skip
    problem = "the alias stays: it is slower"
    result = {"status": "failed", "problem": problem, "source": {"uri": "models:/m/1"}, "targets": [target]}
    stage = tmp_path / "stage"
    stage.write_text(STAGE.format(python=sys.executable, result=json.dumps(result)), encoding="utf-8")
    stage.chmod(0o755)
    monkeypatch.setenv("COMPILE_STAGE", str(stage))
    ended, said = materialize("models:/m/1", "policy.yaml", "small")
    assert not ended["success"], said
    assert "deployed" not in ended["made"]
    assert {name for name, (passed, _) in ended["checks"].items() if not passed} == {f"small_{one}" for one in missed}
    assert {severity for _, severity in ended["checks"].values()} == {"ERROR"}


@pytest.mark.orchestrators
def test_a_models_name_can_not_run_a_command(materialize, tmp_path, hostile):
    """Broken: a name from the registry would run a command on the worker."""
    ended, said = materialize(hostile, hostile, hostile)
    assert (ended["success"], ended["checks"], ended["retried"]) == (False, {}, False)
    assert "compile-stage ended with exit code 2" in said
    assert hostile in said
    assert not (tmp_path / "pwned").exists()
