"""The bill of materials of a published model: CycloneDX 1.6, with a model card.

It says nothing that the manifest does not; it says it in the form that inventories and scanners read. No time and no
random number is in it, so that the same publication has the same bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compile_stage import __version__
from compile_stage.core.digest import digest_file, list_tree
from compile_stage.serving.manifest import ARTIFACT_NAME
from compile_stage.serving.variant_files import VARIANTS_FOLDER

MLBOM = "mlbom.cdx.json"
_SPACE = uuid.UUID("6c3f3c2e-5b1f-5e0a-9a0d-0f6f4f1d6a4e")  # ours, for serial numbers made of publication keys


def mlbom(manifest: Mapping[str, Any], name: str, data_dir: Path) -> str:
    """The document, as text.

    Args:
        manifest: As plain JSON values.
        name: Of the published model.
        data_dir: The folder that holds the artifact's files.
    """
    model, parts = "model", [*_sources(manifest), *_data(manifest), *_packages(manifest)]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_SPACE, manifest['key'])}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "compile-stage", "version": __version__}]},
            "component": {
                "type": "machine-learning-model",
                "bom-ref": model,
                "name": name,
                "description": f"compiled by {manifest['artifact']['backend']} to {manifest['scheme']['precision']}",
                "components": [*_files(data_dir, ARTIFACT_NAME), *_files(data_dir, VARIANTS_FOLDER)],
                "modelCard": _card(manifest),
                "properties": [
                    {"name": f"compile-stage:{field}", "value": value} for field, value in _properties(manifest).items()
                ],
            },
        },
        "components": parts,
        "dependencies": [{"ref": model, "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _properties(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {
        "key": manifest["key"],
        "artifact": manifest["artifact"]["digest"],
        "policy": f"{manifest['policy']['name']} {manifest['policy']['digest']}",
        "target": manifest["target"]["name"],
        "hardware": manifest["fingerprint"],
        "python": manifest["python"],
    }


def _files(data_dir: Path, folder: str) -> Iterator[dict[str, Any]]:
    for name in list_tree(data_dir / folder) if (data_dir / folder).is_dir() else ():
        hashes = [{"alg": "SHA-256", "content": digest_file(data_dir / folder / name)[7:]}]
        ref = name if folder == ARTIFACT_NAME else f"{folder}/{name}"
        yield {"type": "file", "bom-ref": f"file:{ref}", "name": f"data/{folder}/{name}", "hashes": hashes}


def _sources(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    source = manifest["source"]
    described = {"uri": source["uri"], "digest": source["digest"], "flavor": source["flavor"]}
    component = {"type": "machine-learning-model", "bom-ref": "source", "name": source["name"]}
    if source["version"]:
        component["version"] = source["version"]
    yield {**component, "properties": _named(described)}


def _data(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for role, samples in sorted(manifest["data"]["samples"].items()):
        described = {"digest": samples["digest"], "count": str(samples["count"]), "real": str(samples["real"]).lower()}
        yield {"type": "data", "bom-ref": f"data:{role}", "name": f"{role} samples", "properties": _named(described)}


def _packages(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    others = [entry["manifest"] for entry in manifest.get("variants", {}).values() if entry["manifest"] is not None]
    packages = {(name, version) for one in (manifest, *others) for name, version in _software(one).items()}
    for name, version in sorted(packages):
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version.replace('+', '%2B')}"
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _software(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {**manifest["toolchain"], **manifest["runtime"]}


def _named(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": f"compile-stage:{name}", "value": value} for name, value in values.items()]


def _card(manifest: Mapping[str, Any]) -> dict[str, Any]:
    signature = manifest["signature"]
    card: dict[str, Any] = {
        "modelParameters": {
            "datasets": [{"ref": f"data:{role}"} for role in sorted(manifest["data"]["samples"])],
            "inputs": [{"format": _tensor(spec)} for spec in signature["inputs"]],
            "outputs": [{"format": _tensor(spec)} for spec in signature["outputs"]],
        }
    }
    if manifest["verdict"] is not None:
        measured = [_metric(check) for check in manifest["verdict"]["checks"] if check["measured"] is not None]
        card["quantitativeAnalysis"] = {"performanceMetrics": measured}
    return card


def _tensor(spec: Mapping[str, Any]) -> str:
    return f"{spec['name']}: {spec['dtype']}[{', '.join(map(str, spec['shape']))}]"


def _metric(check: Mapping[str, Any]) -> dict[str, Any]:
    places = (
        f"output {check['output']}" if check["output"] else "",
        f"batch {check['batch_size']}" if check["batch_size"] else "",
    )
    metric: dict[str, Any] = {"type": check["gate"]["metric"], "value": str(check["measured"])}
    if place := ", ".join(filter(None, places)):
        metric["slice"] = place
    if check["interval"] is not None:
        low, high = map(str, check["interval"])
        metric["confidenceInterval"] = {"lowerBound": low, "upperBound": high}
    return metric
