"""compile-stage as Kubeflow Pipelines components: thin callers of the command line.

`compile_model` and `promote_model` are plain functions that KFP ships as source text, so each carries its imports
inside. `component()` turns one into a KFP component for an image and packages of your choice:

    compile_op = component(compile_model, packages=["compile-stage[openvino] @ git+https://HOST/OWNER/compile-stage@COMMIT"])
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kfp import dsl

DEFAULT_PACKAGES = ("compile-stage[openvino,torch,sklearn]",)


def compile_model(
    model_uri: str,
    policy: str,
    targets: list,
    arguments: list,
    tracking_uri: str,
    result: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> NamedTuple("Outputs", [("status", str), ("exit_code", int), ("winners", dict), ("published", dict)]):
    """Run the stage for one model under one policy.

    A gate that failed is a result, not a failure of the component, so that a pipeline can branch on `status`. Anything
    else that keeps the stage from its end (a wrong policy, a registry out of reach, ...) raises.

    Args:
        model_uri: The model in the registry, for instance `models:/fraud@candidate`.
        policy: The policy itself, as YAML text, so that the pipeline run records it.
        targets: Names of the policy's targets; all of them when empty.
        arguments: More arguments of `compile-stage run`, for instance `["--no-promote"]`.
        tracking_uri: MLflow tracking server; empty leaves it to the environment of the image.
        result: Receives result.json.
        report: Receives report.html.
        metrics: Receives each winner's speed-up over the original model, as `TARGET.speedup_batch_SIZE`, where it was
            stable: else only a range is known.

    Returns:
        status: passed, failed or refused. exit_code: as documented for the command line. winners: target → job id or
            None.
        published: target → URI of the published version, or None.
    """
    import json
    import os
    import shutil
    import subprocess
    import sys
    import tempfile
    from collections import namedtuple
    from pathlib import Path

    environment = dict(os.environ)
    if tracking_uri:
        environment["MLFLOW_TRACKING_URI"] = tracking_uri

    with tempfile.TemporaryDirectory() as folder:
        policy_file = Path(folder, "policy.yaml")
        policy_file.write_text(policy, encoding="utf-8")
        out = Path(folder, "out")
        options = ["--policy", str(policy_file), "--out", str(out)]
        for target in targets:
            options += ["--target", target]
        command = [sys.executable, "-m", "compile_stage", "run", *options, *arguments, "--", model_uri]
        code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 (a list: no shell reads it)

        result_file = out / "result.json"
        gate_failed = 3
        if code not in (0, gate_failed) or not result_file.exists():
            message = f"compile-stage ended with exit code {code}; its messages are above"
            raise RuntimeError(message)
        content = json.loads(result_file.read_text(encoding="utf-8"))
        shutil.copyfile(result_file, result.path)
        shutil.copyfile(out / "report.html", report.path)
        # The stage has just named files that nobody finds after this.
        print(f"{out} is removed: its reports are the outputs `result` and `report` of this step", flush=True)

    for target in content["targets"]:
        for candidate in target["candidates"]:
            if candidate["state"] == "won":
                for batch_size, timing in candidate["timing"]["by_batch"].items():
                    if timing["stable"]:
                        metrics.log_metric(f"{target['name']}.speedup_batch_{batch_size}", timing["speedup"])
    outputs = namedtuple("Outputs", ["status", "exit_code", "winners", "published"])
    return outputs(
        content["status"],
        code,
        {target["name"]: target["winner"] for target in content["targets"]},
        {target["name"]: (target["receipt"] or {}).get("uri") for target in content["targets"]},
    )


def promote_model(published: dict, aliases: dict, tracking_uri: str) -> None:
    """Move an alias to each published version.

    Args:
        published: Target → URI, as `compile_model` returns it.
        aliases: Target → alias; a target without an alias is left alone.
        tracking_uri: MLflow tracking server; empty leaves it to the environment of the image.
    """
    import os
    import subprocess
    import sys

    environment = dict(os.environ)
    if tracking_uri:
        environment["MLFLOW_TRACKING_URI"] = tracking_uri
    for target, alias in aliases.items():
        if published.get(target):
            command = [sys.executable, "-m", "compile_stage", "promote", published[target], "--alias", alias]
            subprocess.run(command, env=environment, check=True)  # noqa: S603 (a list: no shell reads it)


def component(
    function: Callable[..., Any], *, packages: Sequence[str] = DEFAULT_PACKAGES, image: str = "python:3.12"
) -> Any:
    """A KFP component of one of the functions above.

    Args:
        function: `compile_model` or `promote_model`.
        packages: What pip installs in the step before it runs, beside kfp; empty when the image has both already.
        image: Image of the step. Measurements hold for the node it runs on: schedule it on the target's hardware.
    """
    return dsl.component(
        function, base_image=image, packages_to_install=list(packages), install_kfp_package=bool(packages)
    )
