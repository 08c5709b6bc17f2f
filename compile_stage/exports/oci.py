"""`--to oci`: an OCI artifact by the CNCF's ModelPack specification, in an image layout, and in a registry.

    artifact/   an OCI image layout: every file of the bundle is a layer of its own, under its path
    README.md, export.json

The manifest's annotations hold the lineage. It says no time and no machine of the export, so the same version has the
same digest wherever it is exported.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from compile_stage.core.digest import list_tree
from compile_stage.core.errors import IntegrityError
from compile_stage.exports.folder import Written, common_differences, copy_bundle
from compile_stage.exports.options import ExportOptions
from compile_stage.exports.version import Version, plain_name
from compile_stage.plugin_support.oci import (
    MANIFEST_TYPE,
    Layer,
    Reference,
    encoded,
    pull_folder,
    push_layout,
    write_layout,
)
from compile_stage.serving.manifest import check_integrity

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
LAYOUT = "artifact"
_FILE_PATH = "org.cncf.model.filepath"
_WEIGHTS, _SETTINGS, _CODE, _DOCUMENT, _DATA = (
    f"application/vnd.cncf.model.{kind}.v1.raw" for kind in ("weight", "weight.config", "code", "doc", "dataset")
)
_KINDS = {
    "data/artifact/": _WEIGHTS,
    "data/pyfunc/": _CODE,
    "data/": _SETTINGS,
    "code/": _CODE,
    "signature/": _DOCUMENT,
    "validations/": _DOCUMENT,
    "mlbom.cdx.json": _DOCUMENT,
    "input_example": _DATA,
    "serving_input_example": _DATA,
}


def write(version: Version, options: ExportOptions, folder: Path) -> Written:
    """Write the image layout into the folder."""
    staged = folder.with_name("staged")
    copy_bundle(version, staged)
    layers = [_layer(staged, name) for name in list_tree(staged)]
    described = [layer.descriptor() for layer in layers]
    config = encoded(_config(version, [one["digest"] for one in described]))
    config_digest = "sha256:" + hashlib.sha256(config).hexdigest()
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": config_digest, "size": len(config)},
        "layers": described,
        "annotations": {
            "org.opencontainers.image.title": version.name,
            "org.opencontainers.image.version": version.number,
            **{f"compile_stage.{key}": value for key, value in version.lineage.items()},
        },
    }
    blobs: dict[str, Path | bytes] = {one["digest"]: layer.path for one, layer in zip(described, layers, strict=True)}
    tag = Reference.parse(options.push).tag if options.push else version.number
    digest = write_layout(folder / LAYOUT, manifest, {**blobs, config_digest: config}, tag)
    where = options.push or f"REGISTRY/{plain_name(version.name).lower()}:{tag}"
    plain = " --to-plain-http" if options.plain_http else ""
    return Written(
        bundle="",
        served_by={"artifact_type": ARTIFACT_TYPE, "digest": digest, "layers": len(layers)},
        start=[
            f"oras copy{plain} --from-oci-layout {LAYOUT}:{tag} {where}",
            f"oras pull {where} -o bundle    # each layer is a file of the bundle",
            "compile-stage verify bundle",
        ],
        differs=common_differences(version),
    )


def push(folder: Path, options: ExportOptions) -> tuple[Reference, int]:
    """Push the layout of an export, and say by which digest it is there, and how many blobs were sent. Raises
    RegistryError."""
    return push_layout(folder / LAYOUT, Reference.parse(options.push, plain_http=options.plain_http))


def pull(reference: Reference, version: Version, into: Path) -> Path:
    """What a registry gives out for an artifact that was pushed, compared with what was published. Raises
    IntegrityError where it is something else."""
    folder, _ = pull_folder(reference, ARTIFACT_TYPE, into)
    if check_integrity(folder, beside=True)["digest"] != version.manifest["digest"]:
        raise IntegrityError("what was pulled is another bundle than what was pushed", where=reference.uri)
    return folder


def _layer(bundle: Path, name: str) -> Layer:
    media_type = next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), _SETTINGS)
    return Layer(path=bundle / name, title=name, media_type=media_type, annotations={_FILE_PATH: name})


def _config(version: Version, digests: list[str]) -> dict[str, Any]:
    """The ModelPack configuration. A layer is not compressed, so its DiffID is its digest."""
    artifact, policy = version.manifest["artifact"], version.manifest["policy"]
    scheme = str(version.manifest["scheme"]["name"])
    return {
        "descriptor": {
            "name": version.name,
            "version": version.number,
            "sourceURL": version.uri,
            "revision": str(artifact["digest"]),
            "authors": [str(policy["owner"])],
            "description": f"{artifact['backend']} {scheme}, proven under the policy {policy['name']}",
        },
        "config": {
            "format": Path(artifact["entry"]).suffix.lstrip(".") or str(artifact["backend"]),
            "precision": str(artifact["precision"]),
            **({"quantization": scheme} if artifact["precision"].startswith("int") else {}),
        },
        "modelfs": {"type": "layers", "diffIds": digests},
    }
