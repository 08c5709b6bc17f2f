"""The entry point `compile` of the MLflow Project: calls the stage, and keeps its reports as artifacts of the
project's run, also when a gate failed. Exits with the stage's own exit code.

    python compile_model.py MODEL_URI POLICY TARGETS ARGUMENTS SHIPPED      the third and fourth are JSON lists

MLflow reads `shipped:NAME` in POLICY as a URI to download, so the name is a parameter of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import mlflow

REPORTS = ("result.json", "report.html", "report.md", "junit.xml")
OF_PROJECT = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")


def main(model_uri: str, policy: str, targets: str, arguments: str, shipped: str) -> int:
    """Returns the stage's exit code."""
    if shipped == "" and not Path(policy).is_file():
        sys.exit("name the policy: -P policy=FILE, or -P shipped=NAME for one that comes with compile-stage")
    policy = f"shipped:{shipped}" if shipped else policy
    # The run that the project made is for the reports; the stage must not take it for one of its own. Nor is its
    # experiment, which MLflow always names, the one to publish in: the runs belong beside the source's.
    environment = {name: value for name, value in os.environ.items() if name not in OF_PROJECT}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = [sys.executable, "-m", "compile_stage", "run", "--policy", policy, "--out", str(out)]
        for target in json.loads(targets):
            command += ["--target", target]
        command += [*json.loads(arguments), "--", model_uri]
        code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 (a list: no shell reads it)
        kept = [name for name in REPORTS if (out / name).exists()]
        with mlflow.start_run() as run:  # goes on with the run that MLFLOW_RUN_ID names
            mlflow.set_tag("compile-stage.exit_code", code)
            for name in kept:
                mlflow.log_artifact(str(out / name))
            if kept:  # the stage has just named files that nobody finds after this
                print(f"{out} is removed: the reports are artifacts of run {run.info.run_id}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
