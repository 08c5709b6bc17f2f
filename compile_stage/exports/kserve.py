"""`--to kserve`: an InferenceService, and the bundle that it serves by MLServer's MLflow runtime.

inferenceservice.yaml
bundle/               what lies at the storage URI
model-settings.json   the same for MLServer without a cluster: `mlserver start .`
Dockerfile            an image with MLServer and the packages of the bundle
README.md, export.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compile_stage.exports.folder import BUNDLE, Written, common_differences, copy_bundle
from compile_stage.exports.options import ExportOptions
from compile_stage.exports.version import Version, kubernetes_name, plain_name

SERVICE = "inferenceservice.yaml"
_ARCHITECTURES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_PREFIX = "compile-stage/"
MLSERVER = "1.7.1"
"""The version that was run."""
UVLOOP = "uvloop<0.22"
"""MLServer asks for any version, and each of its worker processes ends at once with a later one: they have no event
loop unless they make it."""


def write(version: Version, options: ExportOptions, folder: Path) -> Written:
    """Write the service and the bundle into the folder."""
    copy_bundle(version, folder / BUNDLE)
    service = inference_service(version, options)
    (folder / SERVICE).write_text("".join(f"{line}\n" for line in yaml_lines(service)), encoding="utf-8")
    name = plain_name(version.name)
    settings = {
        "name": name,
        "implementation": "mlserver_mlflow.MLflowRuntime",
        "parameters": {"uri": f"./{BUNDLE}", "version": version.number},
    }
    (folder / "model-settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "Dockerfile").write_text(_dockerfile(version), encoding="utf-8")
    return Written(
        bundle=BUNDLE,
        served_by={"server": "KServe", "runtime": options.runtime, "storage_uri": options.storage_uri, "model": name},
        start=[
            f"# first bring {BUNDLE}/ to {options.storage_uri}",
            f"kubectl apply -f {SERVICE}",
            "# the same without a cluster",
            f"pip install {_packages()} -r {BUNDLE}/requirements.txt",
            "mlserver start .",
        ],
        differs=[*common_differences(version), *_differences(version, options)],
    )


def inference_service(version: Version, options: ExportOptions) -> dict[str, Any]:
    """The InferenceService of KServe's API `serving.kserve.io/v1beta1`."""
    threads = str(version.manifest.get("threads", 1))
    model: dict[str, Any] = {
        "modelFormat": {"name": "mlflow"},
        "protocolVersion": "v2",
        "runtime": options.runtime,
        "storageUri": options.storage_uri,
        **({"image": options.image} if options.image else {}),
        "resources": {"requests": {"cpu": threads}, "limits": {"cpu": threads}},
    }
    machine = version.manifest.get("hardware", {}).get("machine", "")
    architecture = _ARCHITECTURES.get(machine)
    predictor: dict[str, Any] = {"model": model}
    if architecture is not None:
        predictor["nodeSelector"] = {"kubernetes.io/arch": architecture}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": kubernetes_name(version.name),
            "labels": {"app.kubernetes.io/managed-by": "compile-stage"},
            "annotations": {_PREFIX + key.replace("_", "-"): value for key, value in version.lineage.items()},
        },
        "spec": {"predictor": predictor},
    }


def yaml_lines(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Maps of maps and scalars as YAML; every text is quoted, as JSON quotes it."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield f"{indent}{key}:"
            yield from yaml_lines(item, indent + "  ")
        elif isinstance(item, list | tuple):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {json.dumps(one)}" for one in item)
        else:
            yield f"{indent}{key}: {json.dumps(item)}"


def _packages() -> str:
    """MLServer and its runtime for MLflow, as words of a shell."""
    return f"mlserver=={MLSERVER} mlserver-mlflow=={MLSERVER} '{UVLOOP}'"


def _dockerfile(version: Version) -> str:
    python = ".".join(str(version.manifest.get("python", "3.11")).split(".")[:2])
    return (
        f"FROM python:{python}-slim\n"
        f"COPY {BUNDLE}/requirements.txt {BUNDLE}/constraints.tx[t] /\n"  # the second is not there always
        f"RUN pip install --no-cache-dir {_packages()} -r /requirements.txt\n"
        "RUN useradd --create-home --uid 1000 serving\n"
        "USER 1000\n"
        'CMD ["mlserver", "start", "/mnt/models"]\n'
    )


def _differences(version: Version, options: ExportOptions) -> list[str]:
    image = (
        f"The image {options.image} must have"
        if options.image
        else f"The image of the runtime {options.runtime} must have"
    )
    sizes = ", ".join(map(str, version.batches.sizes))
    return [
        f"{image} the packages of `{BUNDLE}/requirements.txt` at those versions; `Dockerfile` makes one. It was not "
        "built for this export, and no cluster was asked.",
        "A pod has as many CPUs as the artifact was proven with threads. Of a node's CPU Kubernetes knows only the "
        "architecture: name nodes like the one it was proven on by a label of yours.",
        f"Batches are those that were proven ({sizes}): the bundle's loader runs no other. MLServer's own adaptive "
        "batching is off.",
    ]
