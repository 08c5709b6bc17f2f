"""The RayJob for KubeRay: its command is one that the stage takes, and its variables are those that the code reads."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from compile_stage.cli.commands import run
from compile_stage.cluster import pool
from compile_stage.core.cache import SECRET_VARIABLE
from compile_stage.core.shared_cache import URL_VARIABLE

MANIFEST = Path(__file__).parents[2] / "pipelines" / "kubernetes" / "rayjob.yaml"


def test_the_command_and_the_variables_of_the_rayjob() -> None:
    """Broken: the job ends with a usage error, or a node lacks the cache, the secret or the registry."""
    spec = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]
    program, command, *arguments = shlex.split(spec["entrypoint"])
    assert (program, command) == ("compile-stage", "run")
    assert run.make_context("run", arguments).params["engine"] == "ray"

    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}  # nothing is measured beside the driver
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        variables = {one["name"] for one in container["env"]}
        assert variables == {URL_VARIABLE, SECRET_VARIABLE, pool.WAIT_VARIABLE, "RAY_USAGE_STATS_ENABLED"}
        assert container["envFrom"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    gpus = [
        group
        for group in groups
        if "nvidia.com/gpu" in group["template"]["spec"]["containers"][0]["resources"]["limits"]
    ]
    assert [group["template"]["spec"]["nodeSelector"] for group in gpus] == [
        {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    ]
