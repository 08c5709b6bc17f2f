"""The RayJob for KubeRay: its fields are those of KubeRay's API, its command is one that the stage takes, and its
variables are those that the code reads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
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


# Fields of ray.io/v1 that KubeRay's API reference (v1.4) lists, as far as a job for the stage may use them. A cluster
# prunes or refuses any other. The definition itself has 2 MB, since it repeats a pod's whole schema three times; pods
# are held against the Kubernetes client's own models here.
INTEGER, STRING = {"type": "integer", "minimum": 0}, {"type": "string"}


def fields(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


PARAMETERS = {"type": "object", "additionalProperties": STRING}
HEAD = fields(("template",), rayStartParams=PARAMETERS, template={"type": "object"})
WORKERS = fields(
    ("groupName", "template", "maxReplicas", "minReplicas"), groupName=STRING, replicas=INTEGER, minReplicas=INTEGER,
    maxReplicas=INTEGER, numOfHosts=INTEGER, idleTimeoutSeconds=INTEGER, rayStartParams=PARAMETERS,
    template={"type": "object"},
)  # fmt: skip
RAY_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"}, metadata={"type": "object"},
    spec=fields(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=STRING, runtimeEnvYAML=STRING, jobId=STRING, activeDeadlineSeconds={"type": "integer", "minimum": 1},
        backoffLimit=INTEGER, submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        ttlSecondsAfterFinished=INTEGER, shutdownAfterJobFinishes={"type": "boolean"}, suspend={"type": "boolean"},
        submitterPodTemplate={"type": "object"},
        rayClusterSpec=fields(
            ("headGroupSpec",), rayVersion=STRING, enableInTreeAutoscaling={"type": "boolean"}, headGroupSpec=HEAD,
            workerGroupSpecs={"type": "array", "items": WORKERS},
        ),
    ),
)  # fmt: skip


def strays(value: Any, kind: str, where: str) -> list[str]:
    """Paths of a Kubernetes object that its type in the Kubernetes client lacks, or has in another form."""
    import kubernetes.client  # a second, which every test process would spend when it collects

    if (inner := re.fullmatch(r"list\[(.+)\]", kind)) is not None:
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [found for at, one in enumerate(value) for found in strays(one, inner[1], f"{where}[{at}]")]
    if kind.startswith("dict("):
        return [] if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()) else [where]
    model = getattr(kubernetes.client.models, kind, None)
    if model is None:
        plain = {"str": str, "int": int, "bool": bool}.get(kind, object)
        return [] if isinstance(value, plain) else [f"{where} is no {kind}"]
    if not isinstance(value, dict):
        return [f"{where} is no {kind}"]
    names = {outer: inner for inner, outer in model.attribute_map.items()}
    found = [f"{where}.{name}" for name in value if name not in names]
    for name in [name for name in value if name in names]:
        found += strays(value[name], model.openapi_types[names[name]], f"{where}.{name}")
    try:
        model(**{names[name]: one for name, one in value.items() if name in names})  # what it requires is there
    except ValueError as error:
        found.append(f"{where}: {error}")
    return found


def test_the_rayjob_has_only_fields_of_kuberays_api() -> None:
    """Broken: a cluster refuses the manifest, or drops a misspelt field without a word: no time limit, no mounts."""
    manifest = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    jsonschema.validate(manifest, RAY_JOB)
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert strays(group["template"], "V1PodTemplateSpec", "template") == []
    wrong = {"spec": {"containers": [{"image": "x", "envfrom": []}], "nodeSelector": {"a": 1}}}
    assert [found.partition(":")[0] for found in strays(wrong, "V1PodTemplateSpec", "t")] == [
        "t.spec.containers[0].envfrom", "t.spec.containers[0]", "t.spec.nodeSelector",
    ]  # fmt: skip
    manifest["spec"]["activeDeadlineSecond"] = 5
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, RAY_JOB)
