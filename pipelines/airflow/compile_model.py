"""An Airflow 3 DAG that calls the stage: copy it into the DAGs folder.

The stage lives in an environment of its own, since Airflow brings some hundred packages with limits on their versions:
`COMPILE_STAGE` in the worker's environment is its executable, `compile-stage` on the path without it. The DAG's
parameters reach it as a list of arguments, which no shell reads. `MLFLOW_TRACKING_URI` and credentials come from the
worker's environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from airflow.sdk import ObjectStoragePath, Param, dag, task
from airflow.sdk.exceptions import AirflowFailException

REPORTS = ("result.json", "report.html", "report.md", "junit.xml")
REGISTRY_TROUBLE, INTERRUPTED = 4, 130  # the exit codes after which it is worth to try again


@task(retries=2)
def compile_model(params: dict[str, Any], run_id: str) -> dict[str, Any]:
    """Run the stage; a gate that failed fails the task, without another try.

    Returns:
        status, exit_code, winners (target → job id or None), published (target → URI or None), and reports (folder).
    """
    out = Path(params["out"])
    command = [os.environ.get("COMPILE_STAGE", "compile-stage"), "run", "--policy", params["policy"], "--out", str(out)]
    for target in params["targets"]:
        command += ["--target", target]
    folder = None
    if params["reports"]:
        # Before the stage runs: storage that can't be had would be found when everything is done and published.
        try:
            folder = ObjectStoragePath(params["reports"]) / run_id
            folder.mkdir(parents=True, exist_ok=True)
        except ImportError as error:  # no other try helps
            raise AirflowFailException(f"reports: {params['reports']}: {error}") from error
    for name in REPORTS:
        (out / name).unlink(missing_ok=True)  # of an earlier run; it must not be taken for this one's
    code = subprocess.run([*command, *params["arguments"], "--", params["model_uri"]], check=False).returncode  # noqa: S603 (a list: no shell reads it)

    kept = str(out)
    if folder is not None:
        for name in REPORTS:
            if (out / name).exists():
                (folder / name).write_bytes((out / name).read_bytes())
        kept = str(folder)
    if code in (REGISTRY_TROUBLE, INTERRUPTED):
        raise RuntimeError(f"compile-stage ended with exit code {code}; its messages are above")
    if code:
        raise AirflowFailException(f"compile-stage ended with exit code {code}; reports are in {kept}")
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return {
        "status": result["status"],
        "exit_code": code,
        "winners": {target["name"]: target["winner"] for target in result["targets"]},
        "published": {target["name"]: (target["receipt"] or {}).get("uri") for target in result["targets"]},
        "reports": kept,
    }


@dag(
    schedule=None,
    catchup=False,
    max_active_runs=1,  # a second one on the same machine would only wait for the first one's measurements
    tags=["compile-stage"],
    params={
        "model_uri": Param(type="string", description="models:/NAME/VERSION, models:/NAME@ALIAS, runs:/..."),
        "policy": Param(type="string", description="Path of the policy file on the worker, or shipped:NAME"),
        "targets": Param([], type="array", items={"type": "string"}, description="Targets; all of them when empty"),
        "arguments": Param([], type="array", items={"type": "string"}, description="More arguments of the run"),
        "out": Param("compile-stage-out", type="string", description="The worker's folder for reports and bundles"),
        "reports": Param("", type="string", description="Object storage for the reports, for instance s3://bucket/key"),
    },
)
def compile_stage() -> None:
    """Compile a registered model under a policy, prove and measure what came out, publish it."""
    compile_model()


compile_stage()
