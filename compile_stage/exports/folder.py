"""The folder of an export: complete or absent, with the bundle, the digests of all files, and a README."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compile_stage.core.cache import flush_tree
from compile_stage.core.digest import digest_file, digest_tree, list_tree
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.core.leftovers import part_folder, remove_leftovers
from compile_stage.core.records import record
from compile_stage.core.storage import demand_writable
from compile_stage.exports.version import Version
from compile_stage.serving.manifest import artifact_of, check_integrity, data_folder
from compile_stage.serving.trust import TRUST_VARIABLE

EXPORT_FILE, README, BUNDLE = "export.json", "README.md", "bundle"
SCHEMA = "compile-stage/export/v1"


@record
class Written:
    """What a form wrote into the folder of an export.

    Attributes:
        bundle: The bundle's folder, relative; empty where it is not there as a folder.
        served_by: What runs the artifact in that server, for `export.json`.
        start: Commands that start the server, in a shell, from the export's folder.
        differs: What the server does otherwise than what was proven, a sentence each.
    """

    bundle: str
    served_by: Mapping[str, Any]
    start: Sequence[str]
    differs: Sequence[str]


@contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder that is renamed to `out` when the context ends without an error; nothing is left of it otherwise.

    Args:
        force: An export that is there is replaced. Never anything else.

    Raises:
        UsageError: There is something at `out`.
    """
    _demand_free(out, force=force)
    demand_writable(out.parent)
    remove_leftovers(out.parent)
    with part_folder(out.parent) as part:
        made = part / "export"
        made.mkdir()
        yield made
        flush_tree(made)
        _demand_free(out, force=force)
        if out.exists():
            out.rename(part / "before")
        made.rename(out)


def _demand_free(out: Path, *, force: bool) -> None:
    if out.is_symlink() and not out.exists():
        raise UsageError(
            f"there is a link that leads nowhere, to {out.readlink()}",
            fix="remove it, or name another folder with --out",
            where=str(out),
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force or not (out / EXPORT_FILE).is_file():
        is_export = (out / EXPORT_FILE).is_file()
        raise UsageError(
            "there is an export already" if is_export else "there is something that is no export of ours",
            fix="--force replaces it" if is_export else "name another folder with --out",
            where=str(out),
        )


def copy_bundle(version: Version, into: Path) -> None:
    """The bundle as it was published, without what MLflow writes into each download, compared with its manifest after
    the copy. Raises IntegrityError where a file of
    it is not what was published."""
    into.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        version.published.folder, into, ignore=shutil.ignore_patterns("__pycache__", "registered_model_meta")
    )
    if check_integrity(into, beside=True)["digest"] != version.manifest["digest"]:
        raise IntegrityError("the copy of the bundle has another manifest", where=str(into))


def link_artifact(version: Version, bundle: Path, into: Path) -> None:
    """The artifact's files in another folder: links to those of the bundle, or copies where there are no links. Raises
    IntegrityError where they have not the digest that was proven."""
    artifact = artifact_of(version.manifest, data_folder(bundle))  # of a variant, wherever its files are stored
    shutil.copytree(artifact.path, into, copy_function=_link_or_copy, dirs_exist_ok=True)
    proven = version.manifest["artifact"]["digest"]
    if (found := digest_tree(into)) != proven:
        raise IntegrityError(f"the exported artifact is {found}, and {proven} was proven", where=str(into))


def _link_or_copy(source: str, place: str) -> None:
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def describe(folder: Path, version: Version, form: str, written: Written, proven: Mapping[str, Any]) -> None:
    """Write `README.md`, and `export.json` with the digest of every file.

    Args:
        proven: What the check found: `outcome` (proven or not run) and `said`, a sentence.
    """
    (folder / README).write_text(_readme(version, form, written, proven), encoding="utf-8")
    document = {
        "schema": SCHEMA,
        "form": form,
        "name": version.name,
        "number": version.number,
        "lineage": version.lineage,
        "bundle": written.bundle,
        "served_by": dict(written.served_by),
        "differs": list(written.differs),
        "check": dict(proven),
        "files": {name: digest_file(folder / name) for name in list_tree(folder)},
    }
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / EXPORT_FILE).write_text(text + "\n", encoding="utf-8")


def _readme(version: Version, form: str, written: Written, proven: Mapping[str, Any]) -> str:
    lines = [
        f"# {version.name}, version {version.number}, for {form}",
        "",
        f"Exported from `{version.uri}`. The artifact is the one that was proven, byte for byte.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | `{value}` |" for name, value in version.lineage.items()),
        "",
        "## Start it",
        "",
        *(f"    {line}" for line in written.start),
        "",
        "## What the server does otherwise than what was proven",
        "",
        *(f"- {line}" for line in written.differs or ["Nothing that is known."]),
        "",
        "## How the export was checked",
        "",
        str(proven["said"]),
        "",
    ]
    if written.bundle:
        lines += [
            f"Verify it again: `compile-stage verify {written.bundle}`; the digest of every file of this folder is in",
            f"`{EXPORT_FILE}`.",
            "",
        ]
    return "\n".join(lines)


def common_differences(version: Version) -> list[str]:
    """What is so in any server: where it loads, with which runtime."""
    manifest = version.manifest
    mode = manifest.get("on_hardware_mismatch", "error")
    done = {"error": "is refused when it is loaded", "warn": "is warned of", "ignore": "is not looked at"}[mode]
    signed = [
        f"Its policy requires a signature: the bundle's loader opens it only where {TRUST_VARIABLE} names the signer's "
        "public key. Triton's own backends do not look at signatures.",
    ]
    runtime = ", ".join(f"{name} {held}" for name, held in manifest.get("runtime", {}).items())
    return [
        f"It was proven on the machine {manifest['fingerprint']} with {runtime or 'no package of its own'}. Another "
        f"machine or version {done} (the policy's `compliance.on_hardware_mismatch`); `compile-stage validate` proves "
        "it there.",
        *(signed if manifest.get("signature_required") else ()),
    ]
