"""`--to bentoml`: a service of BentoML 1.4.

service.py        the service, which loads the bundle beside it
bentofile.yaml    what `bentoml build` packs, with the lineage as labels
requirements.txt  the bundle's
bundle/
README.md, export.json
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from compile_stage.exports.folder import BUNDLE, Written, common_differences, copy_bundle
from compile_stage.exports.kserve import yaml_lines
from compile_stage.exports.options import ExportOptions
from compile_stage.exports.version import Version, kubernetes_name

_SERVICE = Path(__file__).with_name("copied") / "bentoml_service.py"
_NO_LABEL = re.compile(r"[^A-Za-z0-9._-]+")


def write(version: Version, options: ExportOptions, folder: Path) -> Written:
    """Write the service and the bundle into the folder."""
    copy_bundle(version, folder / BUNDLE)
    shutil.copyfile(_SERVICE, folder / "service.py")
    for file in ("requirements.txt", "constraints.txt"):  # the first may name the second
        if (folder / BUNDLE / file).is_file():
            shutil.copyfile(folder / BUNDLE / file, folder / file)
    name = kubernetes_name(version.name)
    bentofile = {
        "service": "service:PublishedModel",
        "name": name,
        "labels": {key: _label(value) for key, value in version.lineage.items()},
        "include": ["service.py", "export.json", "README.md", f"{BUNDLE}/**"],
        "python": {"requirements_txt": "./requirements.txt", "lock_packages": False},
    }
    (folder / "bentofile.yaml").write_text("".join(f"{line}\n" for line in yaml_lines(bentofile)), encoding="utf-8")
    sizes = ", ".join(map(str, version.batches.sizes))
    return Written(
        bundle=BUNDLE,
        served_by={"server": "BentoML", "model": name},
        start=["pip install 'bentoml>=1.4,<1.5' -r requirements.txt", "bentoml serve service:PublishedModel"],
        differs=[
            *common_differences(version),
            f"Batches are those that were proven ({sizes}): the bundle's loader runs no other. BentoML's adaptive "
            "batching is off, since it makes sizes of its own.",
            "One worker process with as many threads as were proven. More of them share the CPUs, which was not "
            "measured.",
        ],
    )


def _label(value: str) -> str:
    """BentoML takes labels as Kubernetes does: at most 63 characters, no colon or slash. So of a digest there are the
    first 32; `export.json`, which is packed too, has the whole values."""
    if value.startswith("sha256:"):
        return value[7:39]
    return _NO_LABEL.sub("-", value)[:63].strip("-._")
